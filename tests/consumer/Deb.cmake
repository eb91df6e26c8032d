# Packs BUILD with cpack, checks what the package says of itself, unpacks it into SCRATCH/tree and
# compares that with what was installed into PREFIX.
cmake_minimum_required(VERSION 3.25)

if(NOT DPKG_DEB)
  message("skipped: dpkg-deb is not installed")
  return()
endif()
file(REMOVE_RECURSE "${SCRATCH}")
execute_process(
  COMMAND ${CPACK} -G DEB --config "${BUILD}/CPackConfig.cmake" -B "${SCRATCH}"
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
set(package "${SCRATCH}/libheddle-dev_${VERSION}_all.deb")
if(NOT EXISTS "${package}")
  file(GLOB found RELATIVE "${SCRATCH}" "${SCRATCH}/*.deb")
  message(FATAL_ERROR "cpack made ${found}")
endif()

function(expect_field name value)
  execute_process(COMMAND ${DPKG_DEB} --field "${package}" ${name}
    OUTPUT_VARIABLE said OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT said STREQUAL value)
    message(FATAL_ERROR "${name} is '${said}', not '${value}'")
  endif()
endfunction()
expect_field(Package libheddle-dev)
expect_field(Version "${VERSION}")
expect_field(Architecture all)
expect_field(Section libdevel)
expect_field(Depends "libeigen3-dev (>= 3.4), libtbb-dev (>= 2021)")

execute_process(COMMAND ${DPKG_DEB} --extract "${package}" "${SCRATCH}/tree" COMMAND_ERROR_IS_FATAL ANY)

# What an install has, no more and no less, but for the licence's place.
file(GLOB_RECURSE packed RELATIVE "${SCRATCH}/tree/usr" "${SCRATCH}/tree/*")
file(GLOB_RECURSE installed RELATIVE "${PREFIX}" "${PREFIX}/*")
list(TRANSFORM installed REPLACE "^share/doc/heddle/LICENSE$" "share/doc/libheddle-dev/copyright")
list(SORT packed)
list(SORT installed)
if(NOT packed STREQUAL installed)
  message(FATAL_ERROR "packed: ${packed}\ninstalled: ${installed}")
endif()
