# Compiles SOURCES with what pkg-config says of the package in PREFIX and runs the program.
cmake_minimum_required(VERSION 3.25)

find_program(pkg_config NAMES pkg-config pkgconf)
if(NOT pkg_config)
  message("skipped: pkg-config is not installed")
  return()
endif()
# In front of the default path, where Eigen's and oneTBB's files are.
set(ENV{PKG_CONFIG_PATH} "${PREFIX}/share/pkgconfig")

execute_process(COMMAND ${pkg_config} --modversion heddle
  OUTPUT_VARIABLE version OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT version STREQUAL VERSION)
  message(FATAL_ERROR "pkg-config knows heddle ${version}, the project is ${VERSION}")
endif()

execute_process(COMMAND ${pkg_config} --cflags --libs heddle
  OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
foreach(needed IN ITEMS "/include$" "/eigen3$" "^-ltbb")
  set(found ${flags})
  list(FILTER found INCLUDE REGEX "${needed}")
  if(NOT found)
    message(FATAL_ERROR "nothing like ${needed} among: ${flags}")
  endif()
endforeach()

file(MAKE_DIRECTORY "${SCRATCH}")
execute_process(
  COMMAND ${COMPILER} -std=c++20 ${SOURCES} ${flags} -o "${SCRATCH}/program"
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${SCRATCH}/program" COMMAND_ERROR_IS_FATAL ANY)
