#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "heddle/mesh/communicator.hpp"

namespace heddle::detail {

/// One call of a collective, as a report names it.
struct CallRecord {
  CollectiveSignature signature;
  CallSite site;
};

[[nodiscard]] inline std::string to_string(const CallRecord& call) {
  return heddle::to_string(call.signature) + " (" + heddle::to_string(call.site) + ")";
}

/// "0-3, 7": ids in ascending order.
[[nodiscard]] inline std::string id_list(std::vector<std::int64_t> ids) {
  std::sort(ids.begin(), ids.end());
  std::string text;
  for (std::size_t first = 0; first < ids.size();) {
    std::size_t last = first;
    while (last + 1 < ids.size() && ids[last + 1] == ids[last] + 1) {
      ++last;
    }
    text += (text.empty() ? "" : ", ") + std::to_string(ids[first]);
    if (last > first) {
      text += (last > first + 1 ? "-" : ", ") + std::to_string(ids[last]);
    }
    first = last + 1;
  }
  return text;
}

/// "device 3" or "devices 0-3, 7".
[[nodiscard]] inline std::string name_devices(const std::vector<std::int64_t>& ids) {
  return (ids.size() == 1 ? "device " : "devices ") + id_list(ids);
}

/// "devices 0, 2: <call>; device 1: <call>": devices of equal texts together, in order of their least id.
[[nodiscard]] inline std::string by_text(
    const std::vector<std::pair<std::int64_t, std::string>>& lines) {
  std::map<std::string, std::vector<std::int64_t>> devices;
  for (const auto& [id, text] : lines) {
    devices[text].push_back(id);
  }
  std::vector<std::pair<std::int64_t, std::string>> ordered;
  for (const auto& [text, ids] : devices) {
    ordered.emplace_back(*std::min_element(ids.begin(), ids.end()),
                         name_devices(ids) + ": " + text);
  }
  std::sort(ordered.begin(), ordered.end());
  std::string result;
  for (const auto& [id, text] : ordered) {
    result += (result.empty() ? "" : "; ") + text;
  }
  return result;
}

[[nodiscard]] inline std::string mismatch_text(
    const std::vector<std::int64_t>& group,
    const std::vector<std::pair<std::int64_t, std::string>>& lines) {
  return "mismatched collectives in group " + id_list(group) + ": " + by_text(lines);
}

}  // namespace heddle::detail
