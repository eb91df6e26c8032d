#include "heddle/heddle.hpp"

const void* address_in_other_unit();

int main() {
  // The same inline entity has one address in the whole program.
  return address_in_other_unit() == reinterpret_cast<const void*>(&heddle::parse_axes) ? 0 : 1;
}
