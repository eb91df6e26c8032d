#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heddle/mesh/detail/device_team.hpp"
#include "heddle/mesh/detail/mpi_groups.hpp"
#include "heddle/mesh/detail/mpi_wire.hpp"
#include "heddle/mesh/detail/report.hpp"
#include "heddle/mesh/detail/slot.hpp"

namespace heddle::detail {

/// One stage of one collective on its way between the ranks of its group: descriptors, then the blocks'
/// offsets where every member has its own, then the data.
///
/// Messages go between pairs of ranks and carry the collective's number, because members may start several
/// at a time and finish them in another order, which MPI's own nonblocking collectives do not allow on one
/// communicator. Who gets which bytes is what MPI_Alltoallv (blocks) and MPI_Allgatherv (whole inputs,
/// folded slices) would bring; nothing is ever added up by MPI.
class MpiJob {
 public:
  struct Place {
    const MpiGroup* group = nullptr;
    GroupKey key;
    int rank = 0;  ///< this rank in the world
    std::int64_t per_rank = 1;
    std::int64_t number = 0;  ///< of the collective in its group
  };

  MpiJob(std::shared_ptr<Slot> slot, Stage stage, Place place)
      : slot_(std::move(slot)), stage_(stage), place_(place) {
    for (std::size_t member = 0; member < slot_->ids.size(); ++member) {
      const int owner = static_cast<int>(slot_->ids[member] / place_.per_rank);
      members_of_[owner].push_back(static_cast<std::int64_t>(member));
    }
  }
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;
  MpiJob(MpiJob&&) = default;
  MpiJob& operator=(MpiJob&&) = default;
  ~MpiJob() = default;

  [[nodiscard]] const Place& place() const { return place_; }
  [[nodiscard]] bool waits_for_peers() const {
    return step_ == Step::descriptors || step_ == Step::texts;
  }
  [[nodiscard]] bool is_sending() const { return step_ == Step::data; }

  void begin(DeviceTeam& team) {
    if (stage_ == Stage::started) {
      exchange_descriptors();
    } else {
      exchange_outputs(team);
    }
  }

  enum class Progress : std::uint8_t { none, some, done };

  /// Goes on as far as it can without waiting.
  Progress advance(DeviceTeam& team) {
    if (step_ == Step::dropped) {
      return Progress::done;
    }
    if (step_ == Step::texts) {
      return read_texts(team) ? Progress::done : Progress::none;
    }
    if (!messages_.test()) {
      return Progress::none;
    }
    switch (step_) {
      case Step::descriptors:
        if (!agree()) {
          exchange_texts();
        } else if (delivery() == Delivery::nothing) {
          team.complete(slot_, stage_);
          return Progress::done;
        } else if (own_call().cut == BlockCut::own) {
          exchange_offsets();
        } else {
          exchange_inputs(team);
        }
        break;
      case Step::offsets:
        exchange_inputs(team);
        break;
      case Step::data:
        team.complete(slot_, stage_);
        return Progress::done;
      case Step::texts:
      case Step::dropped:
        break;
    }
    return step_ == Step::dropped ? Progress::done : Progress::some;
  }

 private:
  enum class Step : std::uint8_t { descriptors, texts, offsets, data, dropped };

  [[nodiscard]] const std::vector<std::int64_t>& members_of(int world_rank) const {
    return members_of_.at(world_rank);
  }
  [[nodiscard]] const std::vector<std::int64_t>& own_members() const {
    return members_of(place_.rank);
  }
  /// A call of this process; what the signature fixes is the same in all of them.
  [[nodiscard]] const CollectiveCall& own_call() const {
    return slot_->member(own_members().front()).call;
  }
  [[nodiscard]] Delivery delivery() const { return own_call().delivery; }

  template <class Use>
  void for_peers(const Use& use) const {
    for (std::size_t i = 0; i < place_.group->ranks.size(); ++i) {
      if (place_.group->ranks[i] != place_.rank) {
        use(place_.group->ranks[i], static_cast<int>(i));
      }
    }
  }

  /// Tags tell the steps of the collectives under way in a group apart; far fewer than 4096 are.
  [[nodiscard]] int tag(int step) const {
    return static_cast<int>(place_.number % 4096) * 4 + step;
  }

  void exchange_descriptors() {
    descriptors_.resize(slot_->members.size());
    std::vector<MpiDescriptor> own;
    for (const std::int64_t member : own_members()) {
      const auto i = static_cast<std::size_t>(member);
      own.push_back(describe_call(slot_->ids[i], slot_->members[i].call));
      descriptors_[i] = own.back();
    }
    own_descriptors_ = std::move(own);
    for_peers([&](int rank, int peer) {
      auto& theirs = arriving_[rank];
      theirs.resize(members_of(rank).size());
      messages_.receive(std::as_writable_bytes(std::span(theirs)), peer, tag(0),
                        place_.group->comm);
      messages_.send(std::as_bytes(std::span(own_descriptors_)), peer, tag(0), place_.group->comm);
    });
  }

  /// True when every member called the same thing.
  [[nodiscard]] bool agree() {
    for_peers([&](int rank, int) {
      for (std::size_t i = 0; i < arriving_[rank].size(); ++i) {
        const MpiDescriptor& theirs = arriving_[rank][i];
        require(theirs.magic == MpiDescriptor::expected_magic, "mesh", "descriptor", theirs.magic,
                "is none of heddle's");
        descriptors_[static_cast<std::size_t>(members_of(rank)[i])] = theirs;
      }
    });
    return std::all_of(descriptors_.begin(), descriptors_.end(), [&](const MpiDescriptor& each) {
      return same_signature(each, descriptors_.front());
    });
  }

  void exchange_texts() {
    step_ = Step::texts;
    for (const std::int64_t member : own_members()) {
      const auto i = static_cast<std::size_t>(member);
      const CollectiveCall& call = slot_->members[i].call;
      lines_.emplace_back(slot_->ids[i], to_string(CallRecord{call.signature, call.site}));
    }
    Packer packer;
    for (const auto& [id, text] : lines_) {
      packer.put(id);
      packer.put(text);
    }
    const std::vector<std::byte> message = packer.take();
    for_peers([&](int, int peer) {
      messages_.send_owned(message, peer, tag(1), place_.group->comm);
      silent_.push_back(peer);
    });
  }

  [[nodiscard]] bool read_texts(DeviceTeam& team) {
    const bool is_sent = messages_.test();
    for (std::size_t i = 0; i < silent_.size();) {
      int is_here = 0;
      MPI_Status status;
      check_mpi(MPI_Iprobe(silent_[i], tag(1), place_.group->comm, &is_here, &status),
                "MPI_Iprobe");
      if (is_here == 0) {
        ++i;
        continue;
      }
      int size = 0;
      MPI_Get_count(&status, MPI_BYTE, &size);
      std::vector<std::byte> message(static_cast<std::size_t>(size));
      check_mpi(MPI_Recv(message.data(), size, MPI_BYTE, silent_[i], tag(1), place_.group->comm,
                         MPI_STATUS_IGNORE),
                "MPI_Recv");
      Unpacker unpacker(message);
      while (!unpacker.is_empty()) {
        const std::int64_t id = unpacker.number();
        lines_.emplace_back(id, unpacker.text());
      }
      silent_.erase(silent_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (!silent_.empty() || !is_sent) {
      return false;
    }
    team.fail_with({.kind = DeviceTeam::Failure::Kind::mismatch,
                    .origin = *std::min_element(slot_->ids.begin(), slot_->ids.end()),
                    .text = mismatch_text(slot_->ids, lines_),
                    .members = slot_->ids});
    return true;
  }

  void exchange_offsets() {
    step_ = Step::offsets;
    const std::size_t row = slot_->members.size() + 1;
    offsets_.resize(slot_->members.size() * row);
    const auto offsets_of = [&](std::int64_t member) {
      return std::span(offsets_).subspan(static_cast<std::size_t>(member) * row, row);
    };
    for (const std::int64_t member : own_members()) {
      const auto& own = slot_->member(member).call.block_offsets;
      std::copy(own.begin(), own.end(), offsets_of(member).begin());
    }
    for_peers([&](int rank, int peer) {
      for (const std::int64_t member : members_of(rank)) {
        messages_.receive(std::as_writable_bytes(offsets_of(member)), peer, tag(1),
                          place_.group->comm);
      }
      for (const std::int64_t member : own_members()) {
        messages_.send(std::as_bytes(offsets_of(member)), peer, tag(1), place_.group->comm);
      }
    });
  }

  [[nodiscard]] std::span<const std::int64_t> block_offsets(std::int64_t member) const {
    const std::size_t row = slot_->members.size() + 1;
    return offsets_.empty()
               ? own_call().block_offsets
               : std::span(offsets_).subspan(static_cast<std::size_t>(member) * row, row);
  }

  /// Whether any of `readers` wants the whole input of `source`.
  [[nodiscard]] bool wants_whole(const std::vector<std::int64_t>& readers,
                                 std::int64_t source) const {
    return delivery() == Delivery::whole ||
           std::any_of(readers.begin(), readers.end(), [&](std::int64_t reader) {
             return own_call().sources[static_cast<std::size_t>(reader)] == source;
           });
  }

  [[nodiscard]] std::span<std::byte> fresh(std::int64_t bytes) {
    slot_->inbox->storage.push_back(
        std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes)));
    return {slot_->inbox->storage.back().get(), static_cast<std::size_t>(bytes)};
  }

  /// Lays what others brought where MeshDevice::read() looks for it.
  void exchange_inputs(DeviceTeam& team) {
    step_ = team.begin_transfer(*slot_) ? Step::data : Step::dropped;
    if (step_ == Step::dropped) {
      return;
    }
    const std::int64_t size = slot_->size();
    slot_->inbox = std::make_unique<Slot::Inbox>();
    Slot::Inbox& inbox = *slot_->inbox;
    inbox.whole.resize(slot_->members.size());
    inbox.blocks.resize(own_members().size() * slot_->members.size());
    const bool cuts = delivery() == Delivery::blocks;
    for_peers([&](int rank, int peer) {
      for (const std::int64_t source : members_of(rank)) {
        if (!cuts) {
          if (wants_whole(own_members(), source)) {
            const auto to = fresh(descriptors_[static_cast<std::size_t>(source)].input_bytes);
            inbox.whole[static_cast<std::size_t>(source)] = to;
            messages_.receive(to, peer, tag(2), place_.group->comm);
          }
          continue;
        }
        const auto offsets = block_offsets(source);
        for (std::size_t reader = 0; reader < own_members().size(); ++reader) {
          const auto block = static_cast<std::size_t>(own_members()[reader]);
          const auto to = fresh(offsets[block + 1] - offsets[block]);
          inbox.blocks[reader * static_cast<std::size_t>(size) + static_cast<std::size_t>(source)] =
              to;
          messages_.receive(to, peer, tag(2), place_.group->comm);
        }
      }
    });
    for_peers([&](int rank, int peer) {
      for (const std::int64_t source : own_members()) {
        const CollectiveCall& call = slot_->member(source).call;
        if (!cuts) {
          if (wants_whole(members_of(rank), source)) {
            messages_.send(call.input, peer, tag(2), place_.group->comm);
          }
          continue;
        }
        for (const std::int64_t reader : members_of(rank)) {
          messages_.send(part(call.input, call.block_offsets, reader), peer, tag(2),
                         place_.group->comm);
        }
      }
    });
  }

  void exchange_outputs(DeviceTeam& team) {
    step_ = team.begin_transfer(*slot_) ? Step::data : Step::dropped;
    if (step_ == Step::dropped) {
      return;
    }
    Slot::Inbox& inbox = *slot_->inbox;
    inbox.outputs.resize(slot_->members.size());
    const std::span<const std::int64_t> offsets = own_call().output_offsets;
    for_peers([&](int rank, int peer) {
      for (const std::int64_t source : members_of(rank)) {
        const auto i = static_cast<std::size_t>(source);
        const auto to = fresh(offsets[i + 1] - offsets[i]);
        inbox.outputs[i] = to;
        messages_.receive(to, peer, tag(3), place_.group->comm);
      }
      for (const std::int64_t source : own_members()) {
        const CollectiveCall& call = slot_->member(source).call;
        messages_.send(part(std::span<const std::byte>(call.output), offsets, source), peer, tag(3),
                       place_.group->comm);
      }
    });
  }

  std::shared_ptr<Slot> slot_;
  Stage stage_;
  Place place_;
  Step step_ = Step::descriptors;
  std::map<int, std::vector<std::int64_t>>
      members_of_;  ///< indices in the group, by rank of the world
  MpiMessages messages_;
  std::vector<MpiDescriptor> own_descriptors_;
  std::map<int, std::vector<MpiDescriptor>> arriving_;
  std::vector<MpiDescriptor> descriptors_;  ///< by index in the group
  std::vector<std::int64_t> offsets_;
  std::vector<std::pair<std::int64_t, std::string>> lines_;
  std::vector<int> silent_;
};

}  // namespace heddle::detail
