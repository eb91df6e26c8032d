#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "heddle/core/workspace.hpp"
#include "heddle/gdn/context_pieces.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/permute.hpp"

namespace heddle::gdn::detail {

inline const AxisTuple context_axis = {Axis::context};

/// Towards later pieces, as states and windows go, or towards earlier ones, as their cotangents do.
enum class Travel : std::uint8_t { forward, backward };

/// Which rank sends what lies at the border behind a piece to which.
[[nodiscard]] inline mesh::Move border_move(const ContextPieces& pieces, std::int64_t piece,
                                            Travel travel) {
  const std::int64_t before = pieces.owner(piece);
  const std::int64_t behind = pieces.owner(piece + 1);
  return travel == Travel::forward ? mesh::Move{.from = before, .to = behind}
                                   : mesh::Move{.from = behind, .to = before};
}

/// One array of a size over some borders of a row, all at once. A rank has at most one border to its
/// neighbour of higher index and one to that of lower index: two collectives, the second in layouts
/// that turn back alone.
///
/// shapes    sent(piece), received(piece): what this rank sends over the border behind `piece`, and
///           where what comes over it goes, [elements]
template <Communicator Device, class T, class Sent, class Received>
void move_over_borders(Device& device, const ContextPieces& pieces, Travel travel,
                       std::int64_t elements, const Sent& sent, const Received& received,
                       Workspace& workspace) {
  const std::int64_t rank = mesh::axis_index(device, context_axis);
  const Workspace::Frame frame(workspace);
  const std::span<const T> idle = workspace.take<T>(elements);
  for (const bool ascending : {true, false}) {
    std::vector<mesh::Move> moves;
    std::span<const T> in = idle;
    std::optional<std::span<T>> out;
    for (std::int64_t piece = 0; piece + 1 < pieces.count(); ++piece) {
      const bool upwards = pieces.owner(piece) < pieces.owner(piece + 1);
      if (!pieces.crosses(piece) || !pieces.needs_window(piece + 1) || upwards != ascending) {
        continue;
      }
      const mesh::Move move = border_move(pieces, piece, travel);
      moves.push_back(move);
      if (move.from == rank) {
        in = sent(piece);
      }
      if (move.to == rank) {
        out = received(piece);
      }
    }
    if (!moves.empty()) {
      const Workspace::Frame wave(workspace);
      mesh::permute<Device, T>(device, context_axis, moves, in,
                               out ? *out : workspace.take<T>(elements));
    }
  }
}

}  // namespace heddle::gdn::detail
