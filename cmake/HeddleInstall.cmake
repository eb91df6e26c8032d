include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(heddle_package_dir "${CMAKE_INSTALL_DATAROOTDIR}/cmake/heddle")

install(TARGETS heddle EXPORT heddle-targets
  FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILE_SET texts DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT heddle-targets NAMESPACE heddle:: DESTINATION "${heddle_package_dir}")

# Apart, so that who asks for no MPI needs none.
if(HEDDLE_WITH_MPI)
  install(TARGETS heddle_mpi EXPORT heddle-mpi-targets
    FILE_SET mpi_headers DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
  install(EXPORT heddle-mpi-targets NAMESPACE heddle:: DESTINATION "${heddle_package_dir}")
endif()

configure_package_config_file(cmake/heddle-config.cmake.in
  "${CMAKE_CURRENT_BINARY_DIR}/heddle-config.cmake"
  INSTALL_DESTINATION "${heddle_package_dir}")
# Before 1.0 a minor version may change the interface. The package has no compiled part, so a build
# for any architecture may use it.
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/heddle-config-version.cmake"
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES
  "${CMAKE_CURRENT_BINARY_DIR}/heddle-config.cmake"
  "${CMAKE_CURRENT_BINARY_DIR}/heddle-config-version.cmake"
  DESTINATION "${heddle_package_dir}")

# pkg-config --cflags --libs heddle. No architecture in it, so it lies under share.
set(heddle_pc_dir "${CMAKE_INSTALL_DATAROOTDIR}/pkgconfig")
file(RELATIVE_PATH heddle_pc_to_prefix "/prefix/${heddle_pc_dir}" "/prefix")
string(REGEX REPLACE "/$" "" heddle_pc_to_prefix "${heddle_pc_to_prefix}")
configure_file(cmake/heddle.pc.in "${CMAKE_CURRENT_BINARY_DIR}/heddle.pc" @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/heddle.pc" DESTINATION "${heddle_pc_dir}")

install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DATAROOTDIR}/doc/heddle")
