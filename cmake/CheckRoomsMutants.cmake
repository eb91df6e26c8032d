# Breaks one rule in a copy of the tree and passes only if CheckRooms.cmake notices.
cmake_minimum_required(VERSION 3.25)

file(REMOVE_RECURSE "${SCRATCH}")
file(COPY "${ROOT}/include" "${ROOT}/tests" DESTINATION "${SCRATCH}"
  FILES_MATCHING PATTERN "*.hpp" PATTERN "*_test.cpp")
if(MUTANT STREQUAL "room_above")
  file(APPEND "${SCRATCH}/include/heddle/core/error.hpp" "#include \"heddle/mesh/axes.hpp\"\n")
  set(expected "room core must not include mesh")
elseif(MUTANT STREQUAL "umbrella_missing")
  file(WRITE "${SCRATCH}/include/heddle/core/stray.hpp" "#pragma once\n")
  file(WRITE "${SCRATCH}/tests/core/stray_test.cpp" "\n")
  set(expected "heddle.hpp does not include heddle/core/stray.hpp")
elseif(MUTANT STREQUAL "test_missing")
  file(REMOVE "${SCRATCH}/tests/core/error_test.cpp")
  set(expected "core/error.hpp has no test")
else()
  message(FATAL_ERROR "unknown mutant ${MUTANT}")
endif()
execute_process(
  COMMAND ${CMAKE_COMMAND} -DROOT=${SCRATCH} -P "${ROOT}/cmake/CheckRooms.cmake"
  RESULT_VARIABLE result ERROR_VARIABLE errors)
if(result EQUAL 0 OR NOT errors MATCHES "${expected}")
  message(FATAL_ERROR "the check passed over ${MUTANT}: ${errors}")
endif()
