#pragma once

#include "heddle-train/options.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"

namespace heddle::train {

/// Calls use(S{}) with the storage type of the option.
template <class Use>
void with_storage(DtypeOption dtype, const Use& use) {
  switch (dtype) {
    case DtypeOption::f32:
      return use(float{});
    case DtypeOption::f64:
      return use(double{});
    case DtypeOption::bf16:
      return use(bfloat16{});
  }
  fail("train::with_storage", "dtype", dtype, "must be f32, f64 or bf16");
}

}  // namespace heddle::train
