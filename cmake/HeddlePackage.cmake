# `cpack -G DEB` in the build folder: the headers for Debian and its derivatives, on any architecture.
set(CPACK_PACKAGE_NAME "libheddle-dev")
set(CPACK_PACKAGE_VENDOR "Heddle")
set(CPACK_PACKAGE_CONTACT "Heddle maintainers <maintainers@heddle.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGE_DESCRIPTION
  "Header-only C++20 library: sequence packing, the log-prob head, the Gated Delta Net recurrence,\n\
expert routing and the GRPO loss, each with a hand-written backward and a plain reference.")
set(CPACK_PACKAGING_INSTALL_PREFIX "/usr")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")

set(CPACK_GENERATOR DEB)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_ARCHITECTURE all)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
# What the headers include, and no more: programs find the libraries through these two.
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libeigen3-dev (>= 3.4), libtbb-dev (>= 2021)")
if(HEDDLE_WITH_MPI)
  set(CPACK_DEBIAN_PACKAGE_SUGGESTS "libopenmpi-dev | libmpich-dev")
endif()
set(CPACK_PRE_BUILD_SCRIPTS "${PROJECT_SOURCE_DIR}/cmake/DebianCopyright.cmake")
include(CPack)
