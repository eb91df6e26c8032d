#include "heddle-train/command_line.hpp"
#include "support/program.hpp"

int main(int argc, char** argv) {
  return heddle::examples::run_program(
      {.name = "heddle-train",
       .description =
           "Trains a mixture-of-experts model on rollouts by GRPO, or scores token ids."},
      argc, argv, heddle::train::set_up);
}
