#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/call_site.hpp"
#include "heddle/mesh/data_type.hpp"

namespace heddle {

/// What devices do together. A barrier moves nothing and is recorded like the rest.
enum class Collective : std::uint8_t {
  all_gather,
  all_gather_v,
  reduce_scatter,
  reduce_scatter_v,
  all_reduce,
  broadcast,
  shift,
  permute,
  all_to_all,
  all_to_all_v,
  exclusive_scan,
  barrier,
  compare,  ///< debug check that copies are equal; outside the ledger, which debugging must not change
};

[[nodiscard]] constexpr std::string_view collective_name(Collective op) {
  switch (op) {
    case Collective::all_gather:
      return "all_gather";
    case Collective::all_gather_v:
      return "all_gather_v";
    case Collective::reduce_scatter:
      return "reduce_scatter";
    case Collective::reduce_scatter_v:
      return "reduce_scatter_v";
    case Collective::all_reduce:
      return "all_reduce";
    case Collective::broadcast:
      return "broadcast";
    case Collective::shift:
      return "shift";
    case Collective::permute:
      return "permute";
    case Collective::all_to_all:
      return "all_to_all";
    case Collective::all_to_all_v:
      return "all_to_all_v";
    case Collective::exclusive_scan:
      return "exclusive_scan";
    case Collective::barrier:
      return "barrier";
    case Collective::compare:
      return "compare";
  }
  return "unknown collective";
}

/// The part of a training step that a collective serves.
enum class Phase : std::uint8_t {
  forward,
  replay,  ///< the forward pass again, inside the backward pass
  backward,
  boundary,  ///< between micro-batches: gradient sums, the optimizer
};

[[nodiscard]] constexpr std::string_view phase_name(Phase phase) {
  switch (phase) {
    case Phase::forward:
      return "fwd";
    case Phase::replay:
      return "replay";
    case Phase::backward:
      return "bwd";
    case Phase::boundary:
      return "boundary";
  }
  return "unknown phase";
}

/// Whether the device waited for the collective at once or may have computed beside it.
enum class Overlap : std::uint8_t { blocking, overlappable };

/// The bytes of one collective on one device.
///
///   all_gather, n in      wire (G-1) n                reduce_scatter, n out    wire (G-1) n
///   all_reduce, n         wire 2 (G-1)/G n            broadcast, n             wire n off the root
///   shift, n              wire n unless k mod G = 0   permute, n               wire n if from another
///   all_to_all, N         wire (G-1)/G N              v-forms                  wire what others sent
///   exclusive_scan, n     wire n unless first, as a chain
///
/// units     bytes
/// specials  where G does not divide an all_reduce, a device counts the slice that it folds, so that
///           a group adds up to 2 (G-1) n exactly
/// source    AI-Hypercomputer/accelerator-microbenchmarks counts the same
struct Traffic {
  std::int64_t payload_bytes = 0;  ///< the device's own input
  std::int64_t wire_bytes = 0;     ///< what must enter the device, by the formulas above
  std::int64_t sent_bytes = 0;     ///< what leaves it
  std::int64_t recv_bytes = 0;     ///< what it was seen to read from others: equals wire_bytes

  friend constexpr bool operator==(const Traffic&, const Traffic&) = default;
};

/// The indices [first, first + count).
struct IndexRange {
  std::int64_t first = 0;
  std::int64_t count = 0;

  friend constexpr bool operator==(const IndexRange&, const IndexRange&) = default;
};

/// The part of `count` elements that member `index` of `members` folds in an all_reduce: blocks of
/// ceil(count / members), the last ones short or empty.
[[nodiscard]] constexpr IndexRange fold_slice(std::int64_t count, std::int64_t members,
                                              std::int64_t index) {
  const std::int64_t block = (count + members - 1) / members;
  const std::int64_t first = std::min(count, block * index);
  return {first, std::min(block, count - first)};
}

/// One member's part in an equal-count collective.
struct EqualCountCall {
  Collective op = Collective::barrier;
  std::int64_t members = 1;
  std::int64_t index = 0;     ///< the member's own
  std::int64_t count = 0;     ///< n or N of the table above, in elements
  std::int64_t bytes = 1;     ///< of an element
  std::int64_t argument = 0;  ///< root of a broadcast, distance of a shift, 1 for a reverse scan
};

/// The traffic of an equal-count collective from its sizes alone; recv_bytes is left to whoever moves
/// the data. For planning, too: nothing has to run.
///
/// throws    Error for a v-form or a permute, whose bytes depend on every member's counts
[[nodiscard]] inline Traffic traffic_of(const EqualCountCall& call) {
  const std::int64_t whole = call.count * call.bytes;
  const std::int64_t others = call.members - 1;
  switch (call.op) {
    case Collective::all_gather:
      return {.payload_bytes = whole, .wire_bytes = others * whole, .sent_bytes = others * whole};
    case Collective::reduce_scatter:
      return {.payload_bytes = call.members * whole,
              .wire_bytes = others * whole,
              .sent_bytes = others * whole};
    case Collective::all_reduce: {
      const std::int64_t own = fold_slice(call.count, call.members, call.index).count * call.bytes;
      const std::int64_t moved = others * own + (whole - own);
      return {.payload_bytes = whole, .wire_bytes = moved, .sent_bytes = moved};
    }
    case Collective::broadcast:
      return call.index == call.argument
                 ? Traffic{.payload_bytes = whole, .sent_bytes = others * whole}
                 : Traffic{.wire_bytes = whole};
    case Collective::shift: {
      const std::int64_t moved = call.argument % call.members == 0 ? 0 : whole;
      return {.payload_bytes = whole, .wire_bytes = moved, .sent_bytes = moved};
    }
    case Collective::all_to_all: {
      const std::int64_t moved = call.count / call.members * others * call.bytes;
      return {.payload_bytes = whole, .wire_bytes = moved, .sent_bytes = moved};
    }
    case Collective::exclusive_scan: {
      const std::int64_t place = call.argument == 0 ? call.index : others - call.index;
      return {.payload_bytes = whole,
              .wire_bytes = place > 0 ? whole : 0,
              .sent_bytes = place < others ? whole : 0};
    }
    case Collective::barrier:
    case Collective::compare:
      return {};
    case Collective::all_gather_v:
    case Collective::reduce_scatter_v:
    case Collective::permute:
    case Collective::all_to_all_v:
      break;
  }
  fail("traffic_of", "call.op", collective_name(call.op),
       "must be a collective whose sizes are equal on every member");
}

/// One collective as one device saw it.
struct TrafficRecord {
  std::int64_t sequence = 0;  ///< among the device's recorded collectives, from 0
  std::int64_t device = 0;
  Collective op = Collective::barrier;
  AxisTuple axes = {};
  std::int64_t members = 1;  ///< G
  std::int64_t group = 0;    ///< the least id among the members
  DataType type = {};
  Traffic bytes = {};
  Phase phase = Phase::forward;
  Overlap overlap = Overlap::blocking;
  std::string label = {};
  CallSite site = {};

  /// Call sites are compared by their text: two programs of the same source agree.
  friend bool operator==(const TrafficRecord& a, const TrafficRecord& b) {
    return a.sequence == b.sequence && a.device == b.device && a.op == b.op && a.axes == b.axes &&
           a.members == b.members && a.group == b.group && a.type == b.type && a.bytes == b.bytes &&
           a.phase == b.phase && a.overlap == b.overlap && a.label == b.label &&
           to_string(a.site) == to_string(b.site);
  }
};

/// The collectives that a device has entered, in order, and the phase and label that the next ones
/// will carry.
class DeviceLedger {
 public:
  [[nodiscard]] const std::vector<TrafficRecord>& records() const { return records_; }

  /// Appends `record` under the current phase and label. Its place is where add_received() finds it.
  std::size_t open(TrafficRecord record) {
    record.sequence = static_cast<std::int64_t>(records_.size());
    record.phase = phase_;
    record.label = label_;
    records_.push_back(std::move(record));
    return records_.size() - 1;
  }

  [[nodiscard]] Traffic& traffic(std::size_t place) { return records_[place].bytes; }

  [[nodiscard]] Phase phase() const { return phase_; }
  [[nodiscard]] const std::string& label() const { return label_; }
  void enter(Phase phase, std::string label) {
    phase_ = phase;
    label_ = std::move(label);
  }

 private:
  std::vector<TrafficRecord> records_;
  Phase phase_ = Phase::forward;
  std::string label_;
};

/// Labels what a device sends while it lives: `const LedgerScope scope(device.ledger(),
/// Phase::backward, "experts");`. Scopes nest; the outer one's phase and label come back.
class LedgerScope {
 public:
  LedgerScope(DeviceLedger& ledger, Phase phase, std::string label)
      : ledger_(ledger), outer_phase_(ledger.phase()), outer_label_(ledger.label()) {
    ledger.enter(phase, std::move(label));
  }
  LedgerScope(const LedgerScope&) = delete;
  LedgerScope& operator=(const LedgerScope&) = delete;
  ~LedgerScope() { ledger_.enter(outer_phase_, std::move(outer_label_)); }

 private:
  DeviceLedger& ledger_;
  Phase outer_phase_;
  std::string outer_label_;
};

/// Which records a sum takes; what is left out takes all.
struct LedgerFilter {
  std::optional<std::int64_t> device = {};
  std::optional<Collective> op = {};
  std::optional<AxisTuple> axes = {};
  std::optional<Phase> phase = {};
  std::optional<std::string> label = {};

  [[nodiscard]] bool takes(const TrafficRecord& record) const {
    return (!device || *device == record.device) && (!op || *op == record.op) &&
           (!axes || *axes == record.axes) && (!phase || *phase == record.phase) &&
           (!label || *label == record.label);
  }
};

/// Every record of a run, ordered by device and then by sequence: the same on every backend.
class Ledger {
 public:
  Ledger() = default;
  explicit Ledger(std::vector<TrafficRecord> records) : records_(std::move(records)) {
    std::stable_sort(records_.begin(), records_.end(), [](const auto& a, const auto& b) {
      return std::pair(a.device, a.sequence) < std::pair(b.device, b.sequence);
    });
  }

  [[nodiscard]] const std::vector<TrafficRecord>& records() const { return records_; }

  /// Component by component over the records that `filter` takes.
  [[nodiscard]] Traffic sum(const LedgerFilter& filter) const {
    Traffic total;
    for (const TrafficRecord& record : records_) {
      if (filter.takes(record)) {
        total.payload_bytes += record.bytes.payload_bytes;
        total.wire_bytes += record.bytes.wire_bytes;
        total.sent_bytes += record.bytes.sent_bytes;
        total.recv_bytes += record.bytes.recv_bytes;
      }
    }
    return total;
  }

  [[nodiscard]] std::int64_t count(const LedgerFilter& filter) const {
    return std::count_if(records_.begin(), records_.end(),
                         [&](const TrafficRecord& record) { return filter.takes(record); });
  }

  friend bool operator==(const Ledger&, const Ledger&) = default;

 private:
  std::vector<TrafficRecord> records_;
};

/// Refuses a ledger in which a group has not received what it has sent, or a device not what the
/// formulas say.
///
/// throws    Error that names the first such collective
inline void require_balanced(const Ledger& ledger) {
  constexpr std::string_view where = "require_balanced";
  struct Sums {
    std::int64_t sent = 0;
    std::int64_t received = 0;
    const TrafficRecord* first = nullptr;
  };
  // Members of a group agree on the collective's place in the program, so (group, size, sequence)
  // names it.
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, Sums> groups;
  for (const TrafficRecord& record : ledger.records()) {
    if (record.bytes.wire_bytes != record.bytes.recv_bytes) {
      fail(where, element_name("device", record.device) + ".recv_bytes", record.bytes.recv_bytes,
           "must equal wire_bytes (" + std::to_string(record.bytes.wire_bytes) + ") of its " +
               std::string(collective_name(record.op)) + " " + std::to_string(record.sequence));
    }
    Sums& sums = groups[{record.sequence, record.group, record.members}];
    sums.sent += record.bytes.sent_bytes;
    sums.received += record.bytes.recv_bytes;
    sums.first = sums.first == nullptr ? &record : sums.first;
  }
  for (const auto& [key, sums] : groups) {
    if (sums.sent != sums.received) {
      fail(where, "sent_bytes", sums.sent,
           "must equal the bytes received (" + std::to_string(sums.received) + ") in " +
               std::string(collective_name(sums.first->op)) + " " +
               std::to_string(sums.first->sequence) + " over " + to_string(sums.first->axes));
    }
  }
}

}  // namespace heddle
