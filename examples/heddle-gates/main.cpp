#include "heddle-gates/command_line.hpp"
#include "support/program.hpp"

int main(int argc, char** argv) {
  return heddle::examples::run_program(
      {.name = "heddle-gates",
       .description =
           "Holds the tensors of a candidate run against those of a baseline run, gate by "
           "gate: exit status 1 where one fails."},
      argc, argv, heddle::gates::set_up);
}
