#pragma once

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace heddle::bench {

/// How large the problems of a run are.
enum class Shapes {
  ci,        ///< milliseconds each
  standard,  ///< what claims are made on; below 2 s an iteration on two cores
  geometry,  ///< the 397B model's own extents
};

[[nodiscard]] constexpr std::string_view name(Shapes shapes) {
  switch (shapes) {
    case Shapes::ci:
      return "ci";
    case Shapes::standard:
      return "standard";
    case Shapes::geometry:
      return "geometry";
  }
  return "";
}

/// Takes --shapes=ci|standard|geometry off the command line, ci where it is not there. Ends the program
/// with status 2 on another value: Google Benchmark, which reads the rest, would name the whole flag.
[[nodiscard]] inline Shapes take_shapes(int& argc, char** argv) {
  constexpr std::string_view flag = "--shapes=";
  Shapes shapes = Shapes::ci;
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.substr(0, flag.size()) != flag) {
      argv[kept++] = argv[i];
      continue;
    }
    bool known = false;
    for (const Shapes candidate : {Shapes::ci, Shapes::standard, Shapes::geometry}) {
      if (argument.substr(flag.size()) == name(candidate)) {
        shapes = candidate;
        known = true;
      }
    }
    if (!known) {
      std::fprintf(stderr, "%s: must be --shapes=ci, standard or geometry\n", argv[i]);
      std::exit(2);
    }
  }
  argc = kept;
  return shapes;
}

}  // namespace heddle::bench
