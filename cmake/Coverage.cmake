# From the counters in BUILD/coverage/raw: a page a file in BUILD/coverage/html, a line a file in
# BUILD/coverage/report.txt, the total on the screen.
cmake_minimum_required(VERSION 3.25)

set(output "${BUILD}/coverage")
file(GLOB counters "${output}/raw/*.profraw")
if(NOT counters)
  message(FATAL_ERROR "no counters in ${output}/raw: run ctest --preset coverage first")
endif()
execute_process(
  COMMAND ${LLVM_PROFDATA} merge -sparse ${counters} -o "${output}/all.profdata"
  COMMAND_ERROR_IS_FATAL ANY)

# Each test program holds instances of the headers of its own.
file(GLOB_RECURSE programs "${BUILD}/tests/heddle_*_test")
if(NOT programs)
  message(FATAL_ERROR "no test programs under ${BUILD}/tests")
endif()
list(POP_FRONT programs objects)
foreach(program IN LISTS programs)
  list(APPEND objects "-object=${program}")
endforeach()
set(common ${objects} "-instr-profile=${output}/all.profdata" "${SOURCE}/include")
execute_process(
  COMMAND ${LLVM_COV} show ${common} -format=html "-output-dir=${output}/html"
          -show-instantiations=false
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(
  COMMAND ${LLVM_COV} report ${common}
  OUTPUT_FILE "${output}/report.txt" COMMAND_ERROR_IS_FATAL ANY)
file(STRINGS "${output}/report.txt" total REGEX "^(Filename|TOTAL) ")
list(JOIN total "\n" total)
message("${total}\n${output}/html/index.html")
