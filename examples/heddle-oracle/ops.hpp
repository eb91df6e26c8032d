#pragma once

#include <vector>

#include "heddle-oracle/op_spec.hpp"

namespace heddle::oracle {

/// The ops of each family, without the attributes that every op takes.
[[nodiscard]] std::vector<OpSpec> gdn_ops();
[[nodiscard]] std::vector<OpSpec> head_ops();
[[nodiscard]] std::vector<OpSpec> moe_ops();
[[nodiscard]] std::vector<OpSpec> tile_ops();
[[nodiscard]] std::vector<OpSpec> loss_ops();

}  // namespace heddle::oracle
