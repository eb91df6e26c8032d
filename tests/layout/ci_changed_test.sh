#!/usr/bin/env bash
# .ci/changed in repositories made for it: ci_changed_test.sh SCRIPT SCRATCH
set -euo pipefail
script=$1 scratch=$2
command -v git >/dev/null || { echo "skipped: git is not installed"; exit 0; }
rm -rf "$scratch"
mkdir -p "$scratch/origin"
cd "$scratch/origin"
unset HEDDLE_CI_BASE GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null

commit() { # FILE: changes it and commits
  mkdir -p "$(dirname "$1")"
  echo "$RANDOM $SECONDS" >>"$1"
  git add "$1"
  git commit -qm "$1"
}
expect() { # 0|1 WHAT PATH...
  local wanted=$1 what=$2 status=0
  shift 2
  "$script" "$@" 2>/dev/null || status=$?
  if [[ $status != "$wanted" ]]; then
    echo "$what: exit status $status, not $wanted"
    exit 1
  fi
}

git init -q -b main
expect 0 "a repository without a commit" docs
commit docs/a
expect 0 "the first commit of all" docs code
commit code/a
expect 1 "main, the commit before changed something else" docs
expect 0 "main, the commit before changed it" code
expect 0 "main, one of two paths" docs code

git checkout -q -b branch
commit docs/b
commit code/b
expect 0 "a branch, changed by the commit before last" docs
expect 1 "a branch, a path of neither commit" other
git checkout -q main
commit other/a
git checkout -q branch
expect 1 "a branch, changed on main alone since" other

git checkout -q main
git merge -q --no-ff -m merge branch
expect 0 "a merge, changed by the branch" docs
expect 1 "a merge, changed by main before" other

HEDDLE_CI_BASE=HEAD~2 expect 0 "a base that was given" other
HEDDLE_CI_BASE=nowhere expect 0 "a base that is unknown" other

echo more >>docs/a
expect 0 "a change that is not committed" docs
git checkout -q docs/a
touch other/new
expect 0 "a file that is not committed" other
rm other/new
expect 1 "nothing left behind" other

git clone -q --depth 1 "file://$scratch/origin" "$scratch/shallow" 2>/dev/null
cd "$scratch/shallow"
expect 0 "a clone without history" other
mkdir "$scratch/none"
cd "$scratch/none"
GIT_CEILING_DIRECTORIES="$scratch" expect 0 "no repository" docs
echo "all as expected"
