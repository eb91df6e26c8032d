# Runs COMMAND, which must fail by itself within 30 seconds and have said each of EXPECTED.
cmake_minimum_required(VERSION 3.25)

execute_process(COMMAND ${COMMAND}
  TIMEOUT 30 RESULT_VARIABLE result OUTPUT_VARIABLE said ERROR_VARIABLE said)
message("${said}")
if(result EQUAL 0)
  message(FATAL_ERROR "the run did not fail")
endif()
if(result MATCHES "timeout")
  message(FATAL_ERROR "the run hung")
endif()
foreach(expected IN LISTS EXPECTED)
  if(NOT said MATCHES "${expected}")
    message(FATAL_ERROR "nobody said: ${expected}")
  endif()
endforeach()
