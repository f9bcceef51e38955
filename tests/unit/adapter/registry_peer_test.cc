// Numbers of versions that come from other servers.
#include "server/platform/error.h"
#include "tests/unit/adapter/registry_fixture.h"

namespace dorad::adapter {
namespace {

class RegistryPeerTest : public AdapterRegistryTest {
 protected:
  absl::StatusOr<int64_t> Reserve(int64_t version, bool of_peer = true) {
    return registry_->Reserve("a", version, {}, of_peer);
  }
  void Load(int64_t version) {
    ASSERT_TRUE(Reserve(version).ok());
    ASSERT_TRUE(registry_->Publish(Loaded("a", version), false, std::nullopt).ok());
  }
  AdapterState StateOf(int64_t version) { return registry_->Get({"a", version})->state; }
};

TEST_F(RegistryPeerTest, AVersionOfAPeerKeepsItsNumber) {
  Load(5);
  EXPECT_EQ(ReasonOf(Reserve(3, /*of_peer=*/false).status()), "ADAPTER_VERSION_TAKEN");
  Load(3);
  EXPECT_EQ(StateOf(3), AdapterState::kReady);
  EXPECT_EQ(StateOf(5), AdapterState::kReady);
  EXPECT_EQ(*registry_->Reserve("a", std::nullopt, {}), 6);
}

TEST_F(RegistryPeerTest, TheNumberOfAVersionThatIsHereIsTaken) {
  Load(5);
  EXPECT_EQ(ReasonOf(Reserve(5).status()), "ADAPTER_VERSION_TAKEN");
  ASSERT_TRUE(Reserve(6).ok());  // LOADING
  EXPECT_EQ(ReasonOf(Reserve(6).status()), "ADAPTER_VERSION_TAKEN");
  // RETIRING: a request still holds it.
  auto lease = registry_->Acquire({"a", 5});
  ASSERT_TRUE(lease.ok());
  ASSERT_TRUE(registry_->Retire("a", 5).ok());
  EXPECT_EQ(StateOf(5), AdapterState::kRetiring);
  EXPECT_EQ(ReasonOf(Reserve(5).status()), "ADAPTER_VERSION_TAKEN");
}

TEST_F(RegistryPeerTest, AVersionThatFailedOrIsGoneMayComeBack) {
  ASSERT_TRUE(Reserve(5).ok());
  registry_->Fail("a", 5, absl::ResourceExhaustedError("no memory"));
  Load(5);
  EXPECT_EQ(StateOf(5), AdapterState::kReady);
  ASSERT_TRUE(registry_->Retire("a", 5).ok());
  Drain();
  Load(5);
  // The records of other versions that end do not take it along.
  for (int64_t version = 10; version < 20; ++version) {
    ASSERT_TRUE(Reserve(version).ok());
    registry_->Fail("a", version, absl::ResourceExhaustedError("no memory"));
  }
  EXPECT_EQ(StateOf(5), AdapterState::kReady);
  EXPECT_EQ(memory_.alive, 1);
}

}  // namespace
}  // namespace dorad::adapter
