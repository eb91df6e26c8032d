# Changes one stated version in a copy and passes only if CheckVersion.cmake notices.
cmake_minimum_required(VERSION 3.25)

set(file_project CMakeLists.txt)
set(file_changelog CHANGELOG.md)
set(file_vcpkg cmake/packaging/vcpkg/vcpkg.json)
set(file_readme README.md)
set(file_minimal examples/minimal/CMakeLists.txt)

file(REMOVE_RECURSE "${SCRATCH}")
foreach(name IN ITEMS project changelog vcpkg readme minimal)
  get_filename_component(directory "${file_${name}}" DIRECTORY)
  file(COPY "${ROOT}/${file_${name}}" DESTINATION "${SCRATCH}/${directory}")
endforeach()

set(mutated "${SCRATCH}/${file_${MUTANT}}")
file(READ "${mutated}" text)
string(REGEX REPLACE
  "(heddle VERSION |\"version\": \"|\n## |find_package\\(heddle )[0-9]+" "\\1987" changed "${text}")
if(changed STREQUAL text)
  message(FATAL_ERROR "${file_${MUTANT}} states no version")
endif()
file(WRITE "${mutated}" "${changed}")
execute_process(
  COMMAND ${CMAKE_COMMAND} -DROOT=${SCRATCH} -P "${ROOT}/cmake/CheckVersion.cmake"
  RESULT_VARIABLE result ERROR_VARIABLE errors)
if(result EQUAL 0 OR NOT errors MATCHES "987")
  message(FATAL_ERROR "the check passed over ${MUTANT}: ${errors}")
endif()
