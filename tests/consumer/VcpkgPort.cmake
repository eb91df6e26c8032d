# Runs the vcpkg port as vcpkg would, with stand-ins for the functions that vcpkg brings: what it
# configures must install, and what it promises must then lie where vcpkg looks.
cmake_minimum_required(VERSION 3.25)

set(PORT heddle)
set(FEATURES core)
set(CURRENT_PACKAGES_DIR "${SCRATCH}/packages")
set(build "${SCRATCH}/build")
set(port "${ROOT}/cmake/packaging/vcpkg")
file(REMOVE_RECURSE "${SCRATCH}")

file(READ "${port}/vcpkg.json" manifest)
string(JSON name GET "${manifest}" name)
string(JSON features LENGTH "${manifest}" features)
string(JSON count LENGTH "${manifest}" dependencies)
set(dependencies "")
math(EXPR last "${count} - 1")
foreach(i RANGE ${last})
  string(JSON kind TYPE "${manifest}" dependencies ${i})
  if(kind STREQUAL "STRING")
    string(JSON dependency GET "${manifest}" dependencies ${i})
  else()
    string(JSON dependency GET "${manifest}" dependencies ${i} name)
  endif()
  list(APPEND dependencies ${dependency})
endforeach()
set(expected eigen3 tbb vcpkg-cmake vcpkg-cmake-config)
if(NOT name STREQUAL PORT OR NOT features EQUAL 1 OR NOT dependencies STREQUAL expected)
  message(FATAL_ERROR "vcpkg.json: ${name} needs ${dependencies}")
endif()

function(vcpkg_check_features)
  cmake_parse_arguments(PARSE_ARGV 0 given "" "OUT_FEATURE_OPTIONS" "FEATURES")
  list(GET given_FEATURES 0 feature)
  list(GET given_FEATURES 1 option)
  string(JSON type ERROR_VARIABLE unknown TYPE "${manifest}" features ${feature})
  if(unknown)
    message(FATAL_ERROR "vcpkg.json has no feature ${feature}")
  endif()
  set(${given_OUT_FEATURE_OPTIONS} "-D${option}=OFF" PARENT_SCOPE)
endfunction()

function(vcpkg_cmake_configure)
  cmake_parse_arguments(PARSE_ARGV 0 given "" "SOURCE_PATH" "OPTIONS")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -S "${given_SOURCE_PATH}" -B "${build}" -G "${GENERATOR}"
            -DCMAKE_BUILD_TYPE=${VCPKG_BUILD_TYPE} "-DCMAKE_CXX_COMPILER=${COMPILER}"
            "-DCMAKE_INSTALL_PREFIX=${CURRENT_PACKAGES_DIR}" --warn-uninitialized -Werror=dev
            ${given_OPTIONS}
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(vcpkg_cmake_install)
  execute_process(COMMAND ${CMAKE_COMMAND} --build "${build}" --target install
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(vcpkg_cmake_config_fixup)
  cmake_parse_arguments(PARSE_ARGV 0 given "" "CONFIG_PATH" "")
  file(GLOB found "${CURRENT_PACKAGES_DIR}/${given_CONFIG_PATH}/heddle-config.cmake")
  if(NOT found)
    message(FATAL_ERROR "no package configuration in ${given_CONFIG_PATH}")
  endif()
endfunction()

function(vcpkg_fixup_pkgconfig)
  if(NOT EXISTS "${CURRENT_PACKAGES_DIR}/share/pkgconfig/heddle.pc")
    message(FATAL_ERROR "no heddle.pc")
  endif()
endfunction()

function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 given "" "" "FILE_LIST")
  foreach(file IN LISTS given_FILE_LIST)
    if(NOT EXISTS "${file}")
      message(FATAL_ERROR "no ${file}")
    endif()
  endforeach()
endfunction()

include("${port}/portfile.cmake")

foreach(file IN ITEMS include/heddle/heddle.hpp include/heddle/core/region/math.inl share/heddle/usage)
  if(NOT EXISTS "${CURRENT_PACKAGES_DIR}/${file}")
    message(FATAL_ERROR "not installed: ${file}")
  endif()
endforeach()
file(GLOB empty_by_policy "${CURRENT_PACKAGES_DIR}/lib" "${CURRENT_PACKAGES_DIR}/debug")
if(empty_by_policy)
  message(FATAL_ERROR "headers alone have no ${empty_by_policy}")
endif()
