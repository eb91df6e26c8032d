// Mutants tried: PeerFailure without its origin's text; a kind that is no MeshError.
#include "heddle/mesh/failure.hpp"

#include <type_traits>

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(Failure, APeersFailureNamesItsOriginAndWhatItSaid) {
  const PeerFailure failure(7, "head::forward: dims.vocab = 0: must be >= 1");
  EXPECT_EQ(failure.origin(), 7);
  EXPECT_STREQ(failure.what(), "device 7 failed: head::forward: dims.vocab = 0: must be >= 1");
}

TEST(Failure, EveryKindIsAMeshError) {
  EXPECT_TRUE((std::is_base_of_v<MeshError, PeerFailure>));
  EXPECT_TRUE((std::is_base_of_v<MeshError, CollectiveMismatch>));
  EXPECT_TRUE((std::is_base_of_v<MeshError, Deadlock>));
  EXPECT_TRUE((std::is_base_of_v<MeshError, Stalled>));
}

}  // namespace
}  // namespace heddle
