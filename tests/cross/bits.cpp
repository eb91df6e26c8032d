// The hashes of support/bits.hpp on another machine: no test framework, so that a cross compiler and an
// emulator suffice. Prints a line for each result that differs and fails then.
#include "support/bits.hpp"

#include <cstdio>
#include <string>

int main() {
  int differing = 0;
  int compared = 0;
  for (const heddle::Path path : heddle::available_paths()) {
    const heddle::ScopedPath scope(path);
    const std::string name(heddle::path_name(path));
    for (const heddle::test::Bits& bits : heddle::test::all_bits()) {
      ++compared;
      if (bits.hash != bits.expected) {
        ++differing;
        std::printf("%s, %s: hash 0x%llx differs from 0x%llx\n", name.c_str(), bits.name.c_str(),
                    static_cast<unsigned long long>(bits.hash),
                    static_cast<unsigned long long>(bits.expected));
      }
    }
    std::printf("path %s: done\n", name.c_str());
  }
  std::printf("%d results, %d differing\n", compared, differing);
  return differing == 0 && compared > 0 ? 0 : 1;
}
