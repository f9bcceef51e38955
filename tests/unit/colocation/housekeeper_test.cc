#include "server/colocation/housekeeper.h"

#include "tests/unit/support/engine_fixture.h"
#include "tests/unit/support/fake_backend.h"

namespace dorad {
namespace {

constexpr Governor::Marks kMarks{.high = 900, .low = 800};

class HousekeeperTest : public engine::EngineTest {
 protected:
  HousekeeperTest() : residency_({.executor = [](std::function<void()> task) { task(); }}) {
    Start(DefaultOptions(), /*pages=*/64, /*max_steps_in_flight=*/2, /*chunk_pages=*/16);
    kv_shrinker_.Open(engine_.get());
  }
  ~HousekeeperTest() override { kv_shrinker_.Close(); }

  FakeBackend backend_;
  adapter::Residency residency_;
  KvShrinker kv_shrinker_;
};

TEST_F(HousekeeperTest, AboveTheHighMarkFreedMemoryGoesBackFirst) {
  backend_.set_device({.total = 1000, .free = 50, .pooled = 500});
  {
    const Housekeeper housekeeper(kMarks, &backend_, &residency_, engine_.get(), &kv_shrinker_,
                                  &metrics_);
    EXPECT_TRUE(backend_.AwaitCall("return freed memory"));
  }
  EXPECT_EQ(backend_.device()->free, 550);
  EXPECT_EQ(runner_->chunks_released, 0);
}

TEST_F(HousekeeperTest, ThenTheKvCacheShrinks) {
  backend_.set_device({.total = 1000, .free = 50});
  const Housekeeper housekeeper(kMarks, &backend_, &residency_, engine_.get(), &kv_shrinker_,
                                &metrics_);
  const absl::Time limit = absl::Now() + absl::Seconds(30);
  while (runner_->chunks_released == 0 && absl::Now() < limit)
    absl::SleepFor(absl::Milliseconds(5));
  EXPECT_GT(runner_->chunks_released, 0);
}

TEST_F(HousekeeperTest, WarnsOnceOfPressureThatNothingRelieves) {
  kv_shrinker_.Close();  // no KV cache that could shrink
  backend_.set_device({.total = 1000, .free = 50});
  ::testing::internal::CaptureStderr();
  {
    const Housekeeper housekeeper(kMarks, &backend_, &residency_, engine_.get(), &kv_shrinker_,
                                  &metrics_);
    absl::SleepFor(absl::Milliseconds(2500));  // two looks
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  const size_t first = log.find("above memory.high_water");
  ASSERT_NE(first, std::string::npos);
  EXPECT_THAT(log.substr(first + 1), Not(HasSubstr("above memory.high_water")));
}

TEST_F(HousekeeperTest, BelowTheHighMarkNothingGoes) {
  backend_.set_device({.total = 1000, .free = 150, .pooled = 500});
  {
    const Housekeeper housekeeper(kMarks, &backend_, &residency_, engine_.get(), &kv_shrinker_,
                                  &metrics_);
    absl::SleepFor(absl::Milliseconds(1500));  // one look
  }
  EXPECT_THAT(backend_.calls(), IsEmpty());
  EXPECT_EQ(runner_->chunks_released, 0);
}

}  // namespace
}  // namespace dorad
