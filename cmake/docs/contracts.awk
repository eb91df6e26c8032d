# Doxygen's input filter: the comment of a contract as Doxygen's own markup, line for line.
#   /// One sentence.                     stays
#   ///   an indented formula             verbatim
#   /// shapes    text                    a paragraph of that title; lines under the text continue it,
#   ///             a case                lines further in stand each by itself
# Characters that Doxygen would take for markup are escaped outside of `code`.

function escaped(text, parts, count, i, result) {
  count = split(text, parts, "`")
  result = ""
  for (i = 1; i <= count; ++i) {
    if (i % 2 == 1) {
      gsub(/[\\@#%*]/, "\\\\&", parts[i])
      gsub(/&/, "\\&amp;", parts[i])
      gsub(/</, "\\&lt;", parts[i])
      gsub(/>/, "\\&gt;", parts[i])
    }
    result = result (i > 1 ? "`" : "") parts[i]
  }
  return result
}

BEGIN {
  keys = "^(shapes|units|dtypes|writes|alias|specials|order|accuracy|memory|cost|throws|source)  +"
  text_column = 10
}

# A text compiled once for each instruction set declares nothing of its own.
/^ *#include ".*\.inl"/ {
  print ""
  next
}

# Code, and the comment behind a member.
!/^ *\/\/\/( |$)/ {
  in_contract = 0
  if (match($0, /\/\/\/< /)) {
    $0 = substr($0, 1, RSTART + 4) escaped(substr($0, RSTART + RLENGTH))
  }
  print
  next
}

{
  match($0, /^ *\/\/\/ ?/)
  lead = substr($0, 1, RLENGTH)
  text = substr($0, RLENGTH + 1)
  match(text, /^ */)
  indent = RLENGTH
  if (text ~ keys) {
    in_contract = 1
    match(text, /^[a-z]+/)
    key = substr(text, 1, RLENGTH)
    sub(/^[a-z]+ +/, "", text)
    print lead "@contract{" key "} " escaped(text)
    of_cases = 0
  } else if (in_contract) {
    sub(/^ +/, "", text)
    is_case = indent > text_column
    print lead (is_case || of_cases ? "@n " : "") escaped(text)
    of_cases = is_case
  } else if (indent >= 2) {
    print lead "@verbatim " text " @endverbatim"
  } else {
    print lead escaped(text)
  }
}
