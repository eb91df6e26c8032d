# The version is stated once, in project() of ROOT/CMakeLists.txt. Files that have to repeat it, because
# something reads them that cannot read that, must agree.
cmake_minimum_required(VERSION 3.25)

file(READ "${ROOT}/CMakeLists.txt" text)
if(NOT text MATCHES "project\\(heddle VERSION ([0-9]+)\\.([0-9]+)\\.([0-9]+)")
  message(FATAL_ERROR "CMakeLists.txt states no version")
endif()
set(full "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}")
set(minor "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")

set(problems "")
# The first place in `file` that matches `pattern`, whose group must be `version`.
function(expect file pattern version)
  file(READ "${ROOT}/${file}" text)
  if(NOT text MATCHES "${pattern}")
    set(problems "${problems}${file} states no version\n" PARENT_SCOPE)
  elseif(NOT CMAKE_MATCH_1 STREQUAL version)
    set(problems "${problems}${file} says ${CMAKE_MATCH_1}, the project is ${version}\n" PARENT_SCOPE)
  endif()
endfunction()
expect(CHANGELOG.md "\n## ([^ \n]+)" "${full}")
expect(cmake/packaging/vcpkg/vcpkg.json "\"version\": \"([^\"]*)\"" "${full}")
expect(README.md "find_package\\(heddle ([0-9.]+)" "${minor}")
expect(examples/minimal/CMakeLists.txt "find_package\\(heddle ([0-9.]+)" "${minor}")

if(problems)
  message(FATAL_ERROR "\n${problems}")
endif()
message(STATUS "version ${full} everywhere")
