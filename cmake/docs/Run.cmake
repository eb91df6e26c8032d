# Runs DOXYGEN with DOXYFILE and fails on every warning in WARNINGS but these: that a member of a class or
# struct, or a type inside one, has no comment of its own, for its owner's contract speaks of it; or a
# specialisation of a template, whose contract is the template's.
cmake_minimum_required(VERSION 3.25)

get_filename_component(output "${WARNINGS}" DIRECTORY)
file(MAKE_DIRECTORY "${output}")
execute_process(COMMAND ${DOXYGEN} "${DOXYFILE}" COMMAND_ERROR_IS_FATAL ANY)

file(STRINGS "${WARNINGS}" warnings)
list(FILTER warnings EXCLUDE REGEX
  "warning: Member .* \\((function|variable|typedef|enumeration|friend)\\) of (class|struct) .* is not documented")
list(FILTER warnings EXCLUDE REGEX
  "warning: Compound heddle(::[a-z0-9_]+)*::[A-Z][A-Za-z0-9]*(::[A-Z]|<).* is not documented")
list(REMOVE_DUPLICATES warnings)
if(warnings)
  list(JOIN warnings "\n" text)
  message(FATAL_ERROR "${text}")
endif()
message(STATUS "API reference: ${output}/html/index.html")
