#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "heddle/mesh/detail/mpi_wire.hpp"
#include "heddle/mesh/topology.hpp"

namespace heddle::detail {

/// A group of devices that lies on several ranks, and the communicator of those ranks.
struct MpiGroup {
  MPI_Comm comm = MPI_COMM_NULL;
  std::vector<int> ranks =
      {};  ///< of the world, ascending: a rank's place here is its rank in comm
};

/// Which axes of more than one device a tuple names, and the least id of the group: the same for all tuples
/// that mean the same devices.
using GroupKey = std::pair<std::int64_t, std::int64_t>;

[[nodiscard]] inline GroupKey group_key(const Topology& mesh, const AxisTuple& axes,
                                        std::int64_t id) {
  std::int64_t mask = 0;
  for (const Axis axis : axes.axes()) {
    if (mesh.axes().size(axis) > 1) {
      mask |= std::int64_t{1} << static_cast<unsigned>(axis);
    }
  }
  return {mask, mesh.least_in_group(axes, id)};
}

/// The tuple, in the mesh's own order, of the axes in a key's mask.
[[nodiscard]] inline AxisTuple tuple_of(std::int64_t mask) {
  const bool fsdp = (mask & 1) != 0;
  const bool context = (mask & 2) != 0;
  const bool expert = (mask & 4) != 0;
  if (fsdp && context) {
    return expert ? AxisTuple{Axis::fsdp, Axis::context, Axis::expert}
                  : AxisTuple{Axis::fsdp, Axis::context};
  }
  if (fsdp) {
    return expert ? AxisTuple{Axis::fsdp, Axis::expert} : AxisTuple{Axis::fsdp};
  }
  if (context) {
    return expert ? AxisTuple{Axis::context, Axis::expert} : AxisTuple{Axis::context};
  }
  return expert ? AxisTuple{Axis::expert} : AxisTuple{};
}

/// The ranks that a group of devices lies on, ascending.
[[nodiscard]] inline std::vector<int> ranks_of(const Topology& mesh, const GroupKey& key,
                                               std::int64_t per_rank) {
  std::vector<int> ranks;
  for (const std::int64_t member : mesh.group_of(tuple_of(key.first), key.second)) {
    ranks.push_back(static_cast<int>(member / per_rank));
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

/// A communicator for every group of devices that this rank shares with another one. Made once: groups
/// whose members all live on one rank never reach MPI.
class MpiGroups {
 public:
  /// Collective over `world`.
  MpiGroups(const Topology& mesh, std::int64_t per_rank, int rank, MPI_Comm world) {
    MPI_Group world_group = MPI_GROUP_NULL;
    check_mpi(MPI_Comm_group(world, &world_group), "MPI_Comm_group");
    // Every rank walks the groups in the same order, so that creating them cannot wait in a circle.
    for (std::int64_t mask = 1; mask < 8; ++mask) {
      const AxisTuple axes = tuple_of(mask);
      if (group_key(mesh, axes, 0).first != mask) {
        continue;  // an axis of one device: the same groups have come or will come without it
      }
      for (std::int64_t id = 0; id < mesh.devices(); ++id) {
        if (mesh.least_in_group(axes, id) != id) {
          continue;
        }
        MpiGroup group{.ranks = ranks_of(mesh, {mask, id}, per_rank)};
        if (group.ranks.size() == 1 ||
            !std::binary_search(group.ranks.begin(), group.ranks.end(), rank)) {
          continue;
        }
        MPI_Group members = MPI_GROUP_NULL;
        check_mpi(MPI_Group_incl(world_group, static_cast<int>(group.ranks.size()),
                                 group.ranks.data(), &members),
                  "MPI_Group_incl");
        check_mpi(MPI_Comm_create_group(world, members, static_cast<int>(mask), &group.comm),
                  "MPI_Comm_create_group");
        check_mpi(MPI_Comm_set_errhandler(group.comm, MPI_ERRORS_RETURN),
                  "MPI_Comm_set_errhandler");
        MPI_Group_free(&members);
        groups_.emplace(GroupKey{mask, id}, std::move(group));
      }
    }
    MPI_Group_free(&world_group);
  }
  MpiGroups(const MpiGroups&) = delete;
  MpiGroups& operator=(const MpiGroups&) = delete;
  ~MpiGroups() = default;

  /// Collective over each group.
  void free() {
    for (auto& [key, group] : groups_) {
      MPI_Comm_free(&group.comm);
    }
    groups_.clear();
  }

  [[nodiscard]] const std::map<GroupKey, MpiGroup>& all() const { return groups_; }

 private:
  std::map<GroupKey, MpiGroup> groups_;
};

}  // namespace heddle::detail
