#include "server/colocation/sleep_controller.h"

#include "server/platform/thread_pool.h"
#include "tests/unit/support/engine_fixture.h"
#include "tests/unit/support/fake_backend.h"

namespace dorad {
namespace {

using Tags = SleepControl::Tags;
using Freed = std::map<std::string, int64_t>;

class SleepControllerTest : public engine::EngineTest {
 protected:
  SleepControllerTest() {
    Start(DefaultOptions(), /*pages=*/64);
    const auto executor = [this](std::function<void()> task) { pool_.Submit(std::move(task)); };
    residency_ =
        std::make_unique<adapter::Residency>(adapter::Residency::Options{.executor = executor});
    registry_ = std::make_unique<adapter::AdapterRegistry>(
        adapter::AdapterRegistry::Options{.executor = executor});
    loader_ = std::make_unique<adapter::AdapterLoader>(
        adapter::LoaderOptions{}, &pool_, &backend_.modules(), backend_.adapter_builder(),
        residency_.get(), registry_.get(), [](const adapter::EndedLoad&) {});
    sleep_ = std::make_unique<SleepController>(
        &backend_, residency_.get(), loader_.get(), engine_.get(),
        [this](std::function<void()> task) { waits_.Submit(std::move(task)); });
  }
  ~SleepControllerTest() override { engine_.reset(); }

  absl::StatusOr<Freed> Sleep(Tags tags, SleepControl::Options options = {}) {
    absl::StatusOr<Freed> result;
    absl::Notification done;
    sleep_->Sleep(std::move(tags), options, [&](absl::StatusOr<Freed> freed) {
      result = std::move(freed);
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }

  absl::Status Wake(Tags tags) {
    absl::Status result;
    absl::Notification done;
    sleep_->Wake(std::move(tags), [&](absl::Status status) {
      result = std::move(status);
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }

  FakeBackend backend_;
  ThreadPool pool_{1, 0};
  std::unique_ptr<adapter::Residency> residency_;
  std::unique_ptr<adapter::AdapterRegistry> registry_;
  std::unique_ptr<adapter::AdapterLoader> loader_;
  std::unique_ptr<SleepController> sleep_;
  ThreadPool waits_{1, 0};
};

TEST_F(SleepControllerTest, NoTagsMeanAllAndEachGoesToSleepOnce) {
  const auto freed = Sleep({});
  ASSERT_TRUE(freed.ok()) << freed.status();
  EXPECT_THAT(*freed,
              ElementsAre(Key("adapters"), Key("kv"), Pair("weights", FakeBackend::kWeightBytes)));
  EXPECT_THAT(sleep_->asleep(), ElementsAre("adapters", "kv", "weights"));
  const auto again = Sleep({});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_THAT(*again, IsEmpty());
  EXPECT_TRUE(Wake({}).ok());
  EXPECT_THAT(sleep_->asleep(), IsEmpty());
}

TEST_F(SleepControllerTest, RefusesUnknownTags) {
  EXPECT_EQ(ReasonOf(Sleep({"kv", "lora"}).status()), "SLEEP_TAG_INVALID");
  EXPECT_EQ(ReasonOf(Wake({"KV"})), "SLEEP_TAG_INVALID");
  EXPECT_THAT(sleep_->asleep(), IsEmpty());
}

TEST_F(SleepControllerTest, TheEngineGoesOnWhenTheLastTagWakes) {
  ASSERT_TRUE(Sleep({}).ok());
  engine::GenerateInput input = Input(engine::Prompt(8), 4);
  const engine::SampleText expected = Expected(input, 0, 512);
  const auto stream = Submit(std::move(input));
  ASSERT_TRUE(Wake({"weights", "kv"}).ok());
  EXPECT_THAT(sleep_->asleep(), ElementsAre("adapters"));
  EXPECT_EQ(engine_->stats().steps, 0);
  ASSERT_TRUE(Wake({"adapters"}).ok());
  const engine::Outcome outcome = Wait(*stream);
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.samples.at(0).tokens, expected.tokens);
}

TEST_F(SleepControllerTest, RefusesNewRequestsWhenAskedTo) {
  ASSERT_TRUE(Sleep({"kv"}, {.refuse_requests = true}).ok());
  const auto stream = std::make_shared<engine::TokenStream>(/*final_only=*/false);
  EXPECT_EQ(ReasonOf(engine_->Submit(Input(engine::Prompt(8), 4), stream).status()),
            "SERVER_SLEEPING");
  ASSERT_TRUE(Wake({}).ok());
  EXPECT_TRUE(Wait(*Submit(Input(engine::Prompt(8), 4))).status.ok());
}

TEST_F(SleepControllerTest, AWakeWithoutMemoryLeavesTheTagsAsleepAndCanBeTriedAgain) {
  ASSERT_TRUE(Sleep({}).ok());
  backend_.set_wake_status(
      MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", "no memory"));
  EXPECT_EQ(ReasonOf(Wake({})), "OUT_OF_MEMORY");
  EXPECT_THAT(sleep_->asleep(), ElementsAre("adapters", "kv", "weights"));
  EXPECT_EQ(engine_->stats().steps, 0);
  backend_.set_wake_status(absl::OkStatus());
  ASSERT_TRUE(Wake({}).ok());
  EXPECT_THAT(sleep_->asleep(), IsEmpty());
  EXPECT_TRUE(Wait(*Submit(Input(engine::Prompt(8), 4))).status.ok());
}

TEST_F(SleepControllerTest, TheEngineGoesOnAfterASleepThatFailed) {
  runner_->fail_release = true;
  EXPECT_FALSE(Sleep({"kv"}).ok());
  EXPECT_THAT(sleep_->asleep(), IsEmpty());
  EXPECT_TRUE(Wait(*Submit(Input(engine::Prompt(8), 4))).status.ok());
}

TEST_F(SleepControllerTest, AnExceptionIsAnsweredAndTheTagsWakeAgain) {
  backend_.throws = true;
  EXPECT_EQ(ReasonOf(Sleep({}).status()), "OUT_OF_MEMORY");
  EXPECT_THAT(sleep_->asleep(), ElementsAre("adapters", "kv", "weights"));
  ASSERT_TRUE(Wake({}).ok());
  EXPECT_TRUE(Wait(*Submit(Input(engine::Prompt(8), 4))).status.ok());
}

TEST_F(SleepControllerTest, AwakeTagsStayAwake) {
  ASSERT_TRUE(Wake({}).ok());
  ASSERT_TRUE(Sleep({"adapters"}).ok());
  ASSERT_TRUE(Wake({"weights", "kv"}).ok());
  EXPECT_THAT(sleep_->asleep(), ElementsAre("adapters"));
  EXPECT_THAT(backend_.calls(), ElementsAre("return freed memory"));
}

}  // namespace
}  // namespace dorad
