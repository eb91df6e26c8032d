#include "heddle-oracle/commands.hpp"
#include "support/program.hpp"

int main(int argc, char** argv) {
  return heddle::examples::run_program(
      {.name = "heddle-oracle",
       .description = "Runs one kernel on tensors from a file, and compares two files of tensors."},
      argc, argv, heddle::oracle::set_up);
}
