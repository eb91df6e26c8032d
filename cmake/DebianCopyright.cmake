# Run by cpack on the staged tree: Debian looks for the licence under the package's own name.
set(documents "${CPACK_TEMPORARY_DIRECTORY}/usr/share/doc")
file(MAKE_DIRECTORY "${documents}/${CPACK_PACKAGE_NAME}")
file(RENAME "${documents}/heddle/LICENSE" "${documents}/${CPACK_PACKAGE_NAME}/copyright")
file(REMOVE_RECURSE "${documents}/heddle")
