#include "heddle/heddle.hpp"

const void* address_in_other_unit() {
  return reinterpret_cast<const void*>(&heddle::parse_axes);
}
