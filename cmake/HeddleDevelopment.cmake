# What Heddle's own programs, tests and benchmarks are compiled with. Nothing here reaches users:
# heddle::heddle exports no flag.
add_library(heddle_dev INTERFACE)
target_compile_options(heddle_dev INTERFACE
  -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)
target_link_libraries(heddle_dev INTERFACE heddle::heddle)
