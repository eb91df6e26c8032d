# The recipes in RECIPES are Python; what they do is seen where Conan is.
cmake_minimum_required(VERSION 3.25)

find_program(python python3)
if(NOT python)
  message("skipped: python3 is not installed")
  return()
endif()
foreach(recipe IN ITEMS conanfile.py test_package/conanfile.py)
  execute_process(
    COMMAND ${python} -c "import sys; compile(open(sys.argv[1]).read(), sys.argv[1], 'exec')"
            "${RECIPES}/${recipe}"
    COMMAND_ERROR_IS_FATAL ANY)
endforeach()
