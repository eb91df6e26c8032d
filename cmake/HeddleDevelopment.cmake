# What Heddle's own programs, tests and benchmarks are compiled with. Nothing here reaches users:
# heddle::heddle exports no flag.
add_library(heddle_dev INTERFACE)
target_compile_options(heddle_dev INTERFACE
  -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 finds overflows in the inlined operators of std::string that are not there (its bug 105651),
  # now here, now there as inlining goes. Clang and the sanitizers look for the real ones.
  target_compile_options(heddle_dev INTERFACE
    -Wno-restrict -Wno-stringop-overflow -Wno-array-bounds)
endif()
target_link_libraries(heddle_dev INTERFACE heddle::heddle)
