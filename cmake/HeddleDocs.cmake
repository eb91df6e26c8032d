# `cmake --build <build> --target docs`: the API reference, without a warning.
find_program(HEDDLE_DOXYGEN doxygen)
mark_as_advanced(HEDDLE_DOXYGEN)
set(HEDDLE_DOCS_OUTPUT "${PROJECT_BINARY_DIR}/docs")
if(HEDDLE_DOXYGEN)
  configure_file("${PROJECT_SOURCE_DIR}/cmake/docs/Doxyfile.in" "${PROJECT_BINARY_DIR}/Doxyfile" @ONLY)
  add_custom_target(docs
    COMMAND ${CMAKE_COMMAND} -DDOXYGEN=${HEDDLE_DOXYGEN} -DDOXYFILE=${PROJECT_BINARY_DIR}/Doxyfile
            -DWARNINGS=${HEDDLE_DOCS_OUTPUT}/warnings.txt
            -P "${PROJECT_SOURCE_DIR}/cmake/docs/Run.cmake"
    COMMENT "Reading the contracts" VERBATIM)
else()
  add_custom_target(docs
    COMMAND ${CMAKE_COMMAND} -E echo "docs: install doxygen and configure again"
    COMMAND ${CMAKE_COMMAND} -E false
    VERBATIM)
endif()
