#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace heddle {

/// Something went wrong between devices, not within one. After it every further call on the same
/// communicator throws too.
class MeshError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Members of a group called different collectives, or the same one with sizes that do not go together.
/// Every member gets it; the text lists, for each distinct call, its devices, counts and call site.
class CollectiveMismatch : public MeshError {
 public:
  using MeshError::MeshError;
};

/// Every device waits, and none of the groups waited for will ever be complete. The text says who
/// waits where and what each missing member does instead.
class Deadlock : public MeshError {
 public:
  using MeshError::MeshError;
};

/// The watchdog's backstop: no device has entered or left a collective for too long.
class Stalled : public MeshError {
 public:
  using MeshError::MeshError;
};

/// What a device gets that did nothing wrong itself: another one failed.
class PeerFailure : public MeshError {
 public:
  PeerFailure(std::int64_t origin, const std::string& text)
      : MeshError("device " + std::to_string(origin) + " failed: " + text), origin_(origin) {}

  /// The id of the device that failed first.
  [[nodiscard]] std::int64_t origin() const noexcept { return origin_; }

 private:
  std::int64_t origin_;
};

}  // namespace heddle
