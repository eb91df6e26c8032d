# HEDDLE_COVERAGE (preset coverage): which lines and branches of include/ the tests reach, by Clang's own
# counters. `coverage_report` reads what the tests left behind.
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "HEDDLE_COVERAGE: needs Clang, not ${CMAKE_CXX_COMPILER_ID}")
endif()
string(REGEX MATCH "^[0-9]+" major "${CMAKE_CXX_COMPILER_VERSION}")
# Of the compiler's own version: the format of the counters changes from one to the next.
find_program(HEDDLE_LLVM_COV NAMES llvm-cov-${major} llvm-cov REQUIRED)
find_program(HEDDLE_LLVM_PROFDATA NAMES llvm-profdata-${major} llvm-profdata REQUIRED)
mark_as_advanced(HEDDLE_LLVM_COV HEDDLE_LLVM_PROFDATA)

add_custom_target(coverage_report
  COMMAND ${CMAKE_COMMAND} -DBUILD=${PROJECT_BINARY_DIR} -DSOURCE=${PROJECT_SOURCE_DIR}
          -DLLVM_COV=${HEDDLE_LLVM_COV} -DLLVM_PROFDATA=${HEDDLE_LLVM_PROFDATA}
          -P "${PROJECT_SOURCE_DIR}/cmake/Coverage.cmake"
  COMMENT "Counting what the tests reached" VERBATIM)
