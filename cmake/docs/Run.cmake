# Runs DOXYGEN with DOXYFILE and fails on every warning in WARNINGS but one: that a member of a class,
# struct or enumeration has no comment of its own, for its owner's contract speaks of it.
cmake_minimum_required(VERSION 3.25)

get_filename_component(output "${WARNINGS}" DIRECTORY)
file(MAKE_DIRECTORY "${output}")
execute_process(COMMAND ${DOXYGEN} "${DOXYFILE}" COMMAND_ERROR_IS_FATAL ANY)

file(STRINGS "${WARNINGS}" warnings)
list(FILTER warnings EXCLUDE REGEX
  "warning: Member .* \\((function|variable|typedef|enumeration|friend|enumvalue)\\) of (class|struct|enum) .* is not documented")
list(REMOVE_DUPLICATES warnings)
if(warnings)
  list(JOIN warnings "\n" text)
  message(FATAL_ERROR "${text}")
endif()
message(STATUS "API reference: ${output}/html/index.html")
