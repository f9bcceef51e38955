#include "server/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/base/error.h"
#include "server/base/metrics.h"
#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

using ::testing::HasSubstr;

TEST_F(EngineTest, GeneratesUntilMaxTokens) {
  Start(DefaultOptions(), 64);
  GenerateInput input = Input(Prompt(5), 9, MakeAdapter("a", 3));
  const SampleText expected = Expected(input, 0, 512);
  const Outcome outcome = Wait(*Submit(std::move(input)));
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  const SampleText& sample = outcome.samples.at(0);
  EXPECT_EQ(sample.tokens, expected.tokens);
  EXPECT_EQ(sample.logprobs, expected.logprobs);
  EXPECT_EQ(sample.finish.reason, FinishReason::kLength);
  EXPECT_EQ(sample.finish.usage.generated_tokens, 9u);
  EXPECT_EQ(sample.finish.usage.prompt_tokens, 5u);
  ASSERT_FALSE(sample.spans.empty());
  EXPECT_EQ(sample.spans[0].adapter, "a");
  EXPECT_EQ(sample.spans[0].version, 3);
  ExpectEverythingBack();
}

TEST_F(EngineTest, ChunksALongPromptWithoutChangingTheResult) {
  EngineOptions options = DefaultOptions();
  options.max_step_tokens = 7;
  Start(options, 64);
  GenerateInput input = Input(Prompt(200), 5);
  const SampleText expected = Expected(input, 0, 512);
  const Outcome outcome = Wait(*Submit(std::move(input)));
  EXPECT_EQ(outcome.samples.at(0).tokens, expected.tokens);
}

TEST_F(EngineTest, StopsAtEndOfSequenceAndAtStopTokens) {
  Start(DefaultOptions(), 64);
  GenerateInput probe = Input(Prompt(4), 6);
  const std::vector<TokenId> free_run = Expected(probe, 0, 512).tokens;
  GenerateInput input = Input(Prompt(4), 6);
  input.stop.stop_token_ids = {free_run[3]};
  const Outcome outcome = Wait(*Submit(std::move(input)));
  const SampleText& sample = outcome.samples.at(0);
  const auto first = std::find(free_run.begin(), free_run.end(), free_run[3]);
  EXPECT_EQ(sample.tokens, std::vector<TokenId>(free_run.begin(), first + 1));
  EXPECT_EQ(sample.finish.reason, FinishReason::kStop);
  EXPECT_EQ(sample.finish.stop_token_id, free_run[3]);
}

TEST_F(EngineTest, DoesNotSampleStopTokensBeforeMinTokens) {
  Start(DefaultOptions(), 64);
  GenerateInput probe = Input(Prompt(4), 6);
  const std::vector<TokenId> free_run = Expected(probe, 0, 512).tokens;
  GenerateInput input = Input(Prompt(4), 6);
  input.stop.stop_token_ids = {free_run[0]};
  input.stop.min_tokens = 2;
  const Outcome outcome = Wait(*Submit(std::move(input)));
  EXPECT_NE(outcome.samples.at(0).tokens[0], free_run[0]);
  EXPECT_GE(outcome.samples.at(0).tokens.size(), 2u);
}

TEST_F(EngineTest, MinTokensCountsWhatIsOnItsWay) {
  Start(DefaultOptions(), 64);
  GenerateInput input = Input(Prompt(4), 6);
  const std::vector<TokenId> free_run = Expected(input, 0, 512).tokens;
  ASSERT_EQ(std::count(free_run.begin(), free_run.end(), free_run[3]), 1);
  input.stop.stop_token_ids = {free_run[3]};
  input.stop.min_tokens = 3;
  const Outcome outcome = Wait(*Submit(std::move(input)));
  EXPECT_EQ(outcome.samples.at(0).tokens.size(), 4u);
  EXPECT_EQ(outcome.samples.at(0).finish.reason, FinishReason::kStop);
}

TEST_F(EngineTest, EndsWithLengthWhenTheContextIsFull) {
  EngineOptions options = DefaultOptions();
  options.context_length = 20;
  Start(options, 64);
  const Outcome outcome = Wait(*Submit(Input(Prompt(15), 100)));
  EXPECT_EQ(outcome.samples.at(0).tokens.size(), 5u);
  EXPECT_EQ(outcome.samples.at(0).finish.reason, FinishReason::kLength);
}

TEST_F(EngineTest, EndsWithLengthWhenTheKvCacheIsFull) {
  Start(DefaultOptions(), 2);
  EXPECT_EQ(engine_->limits().context_length, 2 * kKvPageTokens);
  const Outcome outcome = Wait(*Submit(Input(Prompt(20), 400)));
  ASSERT_TRUE(outcome.status.ok());
  EXPECT_EQ(outcome.samples.at(0).tokens.size(), 2 * kKvPageTokens - 20);
}

TEST_F(EngineTest, SamplesOfOneRequestShareItsPromptAndDiffer) {
  Start(DefaultOptions(), 256);
  GenerateInput input = Input(Prompt(100), 8);
  input.n = 8;
  input.sampling.temperature = 1;
  input.sampling.seed = 42;
  std::vector<SampleText> expected;
  for (uint32_t i = 0; i < 8; ++i) expected.push_back(Expected(input, i, 512));
  const Outcome outcome = Wait(*Submit(std::move(input)));
  ASSERT_EQ(outcome.samples.size(), 8u);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(outcome.samples.at(i).tokens, expected[i].tokens) << i;
    const uint32_t cached = outcome.samples.at(i).finish.usage.cached_prompt_tokens;
    EXPECT_EQ(cached, i == 0 ? 0u : 96u) << "siblings compute only the tail of the prompt";
  }
  EXPECT_NE(outcome.samples.at(0).tokens, outcome.samples.at(1).tokens);
  ExpectEverythingBack();
}

TEST_F(EngineTest, ReusesThePrefixOfAnEarlierRequestOfTheSameVersionOnly) {
  Start(DefaultOptions(), 256);
  const auto v1 = MakeAdapter("a", 1);
  Wait(*Submit(Input(Prompt(64), 4, v1)));
  Outcome again = Wait(*Submit(Input(Prompt(64), 4, v1)));
  EXPECT_EQ(again.samples.at(0).finish.usage.cached_prompt_tokens, 48u);
  GenerateInput other = Input(Prompt(64), 4, MakeAdapter("a", 2));
  const SampleText expected = Expected(other, 0, 512);
  again = Wait(*Submit(std::move(other)));
  EXPECT_EQ(again.samples.at(0).finish.usage.cached_prompt_tokens, 0u);
  EXPECT_EQ(again.samples.at(0).tokens, expected.tokens);
  GenerateInput salted = Input(Prompt(64), 4, v1);
  salted.cache_salt = "tenant";
  EXPECT_EQ(Wait(*Submit(std::move(salted))).samples.at(0).finish.usage.cached_prompt_tokens, 0u);
  GenerateInput bypass = Input(Prompt(64), 4, v1);
  bypass.bypass_prefix_cache = true;
  EXPECT_EQ(Wait(*Submit(std::move(bypass))).samples.at(0).finish.usage.cached_prompt_tokens, 0u);
}

TEST_F(EngineTest, PreemptionChangesNoToken) {
  Start(DefaultOptions(), 8);
  std::vector<std::shared_ptr<TokenStream>> streams;
  std::vector<SampleText> expected;
  for (int i = 0; i < 6; ++i) {
    GenerateInput input = Input(Prompt(10 + i, 50 * i), 60);
    expected.push_back(Expected(input, 0, 8 * kKvPageTokens));
    streams.push_back(Submit(std::move(input)));
  }
  uint32_t preemptions = 0;
  for (int i = 0; i < 6; ++i) {
    const Outcome outcome = Wait(*streams[i]);
    EXPECT_EQ(outcome.samples.at(0).tokens, expected[i].tokens) << i;
    preemptions += outcome.samples.at(0).finish.usage.preemptions;
  }
  EXPECT_GT(preemptions, 0u) << "the test meant to force preemption";
  ExpectEverythingBack();
}

TEST_F(EngineTest, ScoresSequencesUnderSeveralAdapters) {
  Start(DefaultOptions(), 64);
  const auto a = MakeAdapter("a", 1);
  ScoreInput input;
  input.request_id = "score";
  input.sequences = {Prompt(40), Prompt(1), Prompt(90, 3)};
  input.leases.push_back(leases_.Take(nullptr));
  input.leases.push_back(leases_.Take(a));
  const std::vector<std::vector<TokenId>> sequences = input.sequences;
  absl::Notification done;
  absl::StatusOr<ScoreResult> result;
  auto ticket = std::make_shared<ScoreTicket>([&](absl::StatusOr<ScoreResult> r) {
    result = std::move(r);
    done.Notify();
  });
  ASSERT_TRUE(engine_->Submit(std::move(input), ticket).ok());
  done.WaitForNotification();
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->scores.size(), 3u);
  for (size_t s = 0; s < sequences.size(); ++s) {
    for (int m = 0; m < 2; ++m) {
      const std::vector<float>& logprobs = result->scores[s][m].logprobs;
      ASSERT_EQ(logprobs.size(), sequences[s].size());
      EXPECT_TRUE(std::isnan(logprobs[0]));
      for (size_t t = 1; t < logprobs.size(); ++t) {
        const uint64_t hash =
            FakeHash(m == 0 ? nullptr : a.get(), absl::MakeConstSpan(sequences[s]).subspan(0, t));
        EXPECT_EQ(logprobs[t], FakeLogprob(hash, sequences[s][t]));
      }
    }
  }
  EXPECT_EQ(result->versions[1].digest, a->digest());
  ExpectEverythingBack();
}

TEST_F(EngineTest, CancelReturnsEverythingAndOthersGoOn) {
  Start(DefaultOptions(), 64);
  GenerateInput keep = Input(Prompt(10), 200);
  const SampleText expected = Expected(keep, 0, 512);
  auto cancelled = Submit(Input(Prompt(12), 480, MakeAdapter("a", 1)));
  auto kept = Submit(std::move(keep));
  cancelled->Cancel();
  engine_->NoteCancelled();
  EXPECT_EQ(Wait(*cancelled).status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(Wait(*kept).samples.at(0).tokens, expected.tokens);
  ExpectEverythingBack();
}

TEST_F(EngineTest, ACancelThatComesBeforeItsRequestCounts) {
  Start(DefaultOptions(), 64);
  auto stream = std::make_shared<TokenStream>(/*final_only=*/false);
  stream->Cancel();
  engine_->NoteCancelled();
  absl::Notification looked;
  engine_->Abort({}, "", [&](int) { looked.Notify(); });
  looked.WaitForNotification();
  ASSERT_TRUE(engine_->Submit(Input(Prompt(4), 500), stream).ok());
  EXPECT_EQ(Wait(*stream).status.code(), absl::StatusCode::kCancelled);
  ExpectEverythingBack();
}

TEST_F(EngineTest, AbortReturnsThePartialTokens) {
  Start(DefaultOptions(), 64);
  absl::Notification running;
  std::atomic<int> steps{0};
  runner_->on_step = [&] {
    if (++steps == 5) running.Notify();
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  GenerateInput input = Input(Prompt(4), 500, MakeAdapter("a", 1));
  const SampleText expected = Expected(input, 0, 512);
  auto stream = Submit(std::move(input));
  running.WaitForNotification();
  absl::Notification done;
  int aborted = 0;
  AbortTarget target;
  target.adapter = {"a", 1};
  engine_->Abort(target, "told to", [&](int count) {
    aborted = count;
    done.Notify();
  });
  done.WaitForNotification();
  EXPECT_EQ(aborted, 1);
  const Outcome outcome = Wait(*stream);
  ASSERT_TRUE(outcome.status.ok());
  const SampleText& sample = outcome.samples.at(0);
  EXPECT_EQ(sample.finish.reason, FinishReason::kAborted);
  EXPECT_EQ(sample.finish.detail, "told to");
  ASSERT_FALSE(sample.tokens.empty());
  EXPECT_TRUE(std::equal(sample.tokens.begin(), sample.tokens.end(), expected.tokens.begin()));
  ExpectEverythingBack();
}

TEST_F(EngineTest, ADeadlineEndsQueuedAndRunningRequests) {
  EngineOptions options = DefaultOptions();
  options.max_running_sequences = 1;
  Start(options, 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(2));
    return absl::OkStatus();
  };
  GenerateInput running = Input(Prompt(4), 500);
  running.deadline = absl::Now() + absl::Milliseconds(100);
  GenerateInput queued = Input(Prompt(4, 9), 500);
  queued.deadline = absl::Now() + absl::Milliseconds(50);
  auto first = Submit(std::move(running));
  auto second = Submit(std::move(queued));
  EXPECT_EQ(Wait(*second).status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Wait(*first).status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(metrics_.Render(), HasSubstr("dorad_request_queue_seconds_count 2\n"))
      << "who never had a turn has waited, too";
  ExpectEverythingBack();
}

TEST_F(EngineTest, TheFirstStepIsNotHiddenWhileItIsComputed) {
  Start(DefaultOptions(), 64);
  absl::Notification computing, go_on;
  runner_->on_step = [&] {
    if (!computing.HasBeenNotified()) computing.Notify();
    go_on.WaitForNotification();
    return absl::OkStatus();
  };
  auto stream = Submit(Input(Prompt(4), 2));
  computing.WaitForNotification();
  EXPECT_EQ(engine_->stats().requests, 1);
  go_on.Notify();
  Wait(*stream);
  ExpectEverythingBack();
}

TEST_F(EngineTest, RefusesWhatDoesNotFitTheQueueWithARetryHint) {
  EngineOptions options = DefaultOptions();
  options.max_queued_requests = 2;
  options.max_running_sequences = 1;
  Start(options, 64);
  absl::Notification go;
  runner_->on_step = [&] {
    go.WaitForNotification();
    return absl::OkStatus();
  };
  std::vector<std::shared_ptr<TokenStream>> streams;
  absl::Status refused;
  for (int i = 0; i < 10 && refused.ok(); ++i) {
    auto stream = std::make_shared<TokenStream>(false);
    refused = engine_->Submit(Input(Prompt(4, i), 2), stream);
    if (refused.ok()) streams.push_back(stream);
  }
  EXPECT_EQ(ReasonOf(refused), "QUEUE_FULL");
  EXPECT_TRUE(RetryAfterOf(refused).has_value());
  go.Notify();
  for (auto& stream : streams) EXPECT_TRUE(Wait(*stream).status.ok());
  ExpectEverythingBack();
}

double SecondsIn(Metrics& metrics, const std::string& phase) {
  const std::string series =
      absl::StrCat("dorad_engine_step_phase_seconds_total{phase=\"", phase, "\"} ");
  const std::string text = metrics.Render();
  const size_t at = text.find(series);
  EXPECT_NE(at, std::string::npos);
  return std::atof(text.c_str() + at + series.size());
}

TEST_F(EngineTest, TimeOfStepsIsSplitByWhatTheThreadDoes) {
  Start(DefaultOptions(), 64, /*max_steps_in_flight=*/1);
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 9))).status.ok());
  ExpectEverythingBack();
  for (const char* phase : {"schedule", "compute", "process"}) {
    EXPECT_GT(SecondsIn(metrics_, phase), 0) << phase;
  }
  EXPECT_EQ(SecondsIn(metrics_, "launch"), 0) << "it computes on this thread";
}

TEST_F(EngineTest, StepsThatAreComputedElsewhereAreLaunched) {
  Start(DefaultOptions(), 64, /*max_steps_in_flight=*/2);
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 9))).status.ok());
  ExpectEverythingBack();
  for (const char* phase : {"schedule", "launch", "compute", "process"}) {
    EXPECT_GT(SecondsIn(metrics_, phase), 0) << phase;
  }
}

TEST_F(EngineTest, AdaptersInUseAreThoseOfRequestsThatRunOrWait) {
  EngineOptions options = DefaultOptions();
  options.max_running_sequences = 1;
  Start(options, 64);
  absl::Notification running, go_on;
  runner_->on_step = [&, step = 0]() mutable {
    if (++step == 1) {
      running.Notify();
      go_on.WaitForNotification();
    }
    return absl::OkStatus();
  };
  auto first = Submit(Input(Prompt(5), 4, MakeAdapter("a", 1)));
  running.WaitForNotification();
  auto second = Submit(Input(Prompt(5), 4, MakeAdapter("b", 1)));
  auto third = Submit(Input(Prompt(6), 4, MakeAdapter("a", 1)));
  auto base = Submit(Input(Prompt(7), 4));
  const AdaptersInUse in_use = engine_->adapters_in_use();
  EXPECT_EQ(in_use.running, std::vector<std::string>({"a"}));
  EXPECT_EQ(in_use.waiting, std::vector<std::string>({"a", "b"}));
  go_on.Notify();
  for (const auto& stream : {first, second, third, base}) EXPECT_TRUE(Wait(*stream).status.ok());
  ExpectEverythingBack();
}

TEST_F(EngineTest, LimitsCanChangeForTheRequestsToCome) {
  EngineOptions options = DefaultOptions();
  options.max_running_sequences = 1;
  Start(options, 64);
  const EngineLimits before = engine_->limits();
  absl::Notification go;
  runner_->on_step = [&] {
    go.WaitForNotification();
    return absl::OkStatus();
  };
  std::vector<std::shared_ptr<TokenStream>> streams;
  const auto submit = [&](int i) {
    auto stream = std::make_shared<TokenStream>(false);
    const absl::Status status = engine_->Submit(Input(Prompt(4, i), 2), stream);
    if (status.ok()) streams.push_back(stream);
    return status;
  };
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(submit(i).ok());
  options.max_queued_requests = 1;
  options.max_n = 1;
  engine_->SetLimits(options);
  EXPECT_EQ(ReasonOf(submit(4)), "QUEUE_FULL");
  EXPECT_EQ(engine_->limits().max_n, 1);
  EXPECT_EQ(engine_->limits().context_length, before.context_length);
  options.max_queued_requests = 100;
  engine_->SetLimits(options);
  EXPECT_TRUE(submit(5).ok());
  go.Notify();
  for (auto& stream : streams) EXPECT_TRUE(Wait(*stream).status.ok());
  ExpectEverythingBack();
}

TEST_F(EngineTest, RefusesARequestIdInUse) {
  Start(DefaultOptions(), 64);
  absl::Notification go;
  runner_->on_step = [&] {
    go.WaitForNotification();
    return absl::OkStatus();
  };
  GenerateInput first = Input(Prompt(4), 2);
  GenerateInput second = Input(Prompt(4), 2);
  second.request_id = first.request_id;
  auto stream = Submit(std::move(first));
  auto other = std::make_shared<TokenStream>(false);
  EXPECT_EQ(engine_->Submit(std::move(second), other).code(), absl::StatusCode::kAlreadyExists);
  go.Notify();
  Wait(*stream);
  ExpectEverythingBack();
}

TEST_F(EngineTest, TenantsChooseIdsAndAbortAlone) {
  Start(DefaultOptions(), 64);
  absl::Notification go;
  runner_->on_step = [&] {
    go.WaitForNotification();
    return absl::OkStatus();
  };
  std::map<std::string, std::shared_ptr<TokenStream>> streams;
  for (const char* tenant : {"a", "b"}) {
    GenerateInput input = Input(Prompt(4), 500, MakeAdapter("shared", 1));
    input.request_id = "same";
    input.tenant = tenant;
    streams[tenant] = Submit(std::move(input));
  }
  std::vector<int> aborted;
  const auto abort = [&](AbortTarget target, const char* tenant) {
    target.tenant = tenant;
    engine_->Abort(std::move(target), "", [&](int count) { aborted.push_back(count); });
  };
  abort({.request_ids = {"same"}}, "c");
  abort({.adapter = {"shared", 0}}, "c");
  abort({.all = true}, "c");
  abort({.request_ids = {"same"}}, "a");
  abort({.all = true}, "a");
  go.Notify();
  EXPECT_EQ(Wait(*streams["a"]).samples.at(0).finish.reason, FinishReason::kAborted);
  EXPECT_EQ(Wait(*streams["b"]).samples.at(0).finish.reason, FinishReason::kLength);
  EXPECT_EQ(aborted, (std::vector<int>{0, 0, 0, 1, 0}));
  ExpectEverythingBack();
}

TEST_F(EngineTest, TenantsShareNoPrefixes) {
  Start(DefaultOptions(), 64);
  const auto cached = [&](const std::string& tenant, const std::string& salt) {
    GenerateInput input = Input(Prompt(64), 4);
    input.tenant = tenant;
    input.cache_salt = salt;
    return Wait(*Submit(std::move(input))).samples.at(0).finish.usage.cached_prompt_tokens;
  };
  EXPECT_EQ(cached("a", "s"), 0u);
  EXPECT_GT(cached("a", "s"), 0u);
  EXPECT_EQ(cached("b", "s"), 0u);
  EXPECT_EQ(cached("", "s"), 0u);
  EXPECT_EQ(cached("", "a s"), 0u);
  ExpectEverythingBack();
}

TEST_F(EngineTest, MetersTokensAsTheyAreMadeForWhoeverReadsThem) {
  Start(DefaultOptions(), 64);
  std::atomic<int64_t> metered{0};
  GenerateInput input = Input(Prompt(4), 20);
  input.n = 3;
  auto stream = std::make_shared<TokenStream>(/*final_only=*/true,
                                              [&](int64_t tokens) { metered += tokens; });
  ASSERT_TRUE(engine_->Submit(std::move(input), stream).ok());
  Wait(*stream);
  EXPECT_EQ(metered, 60);
  ExpectEverythingBack();
}

TEST_F(EngineTest, AFailedStepFailsItsRequestsAndTheEngineGoesOn) {
  Start(DefaultOptions(), 64);
  std::atomic<bool> fail{true};
  runner_->on_step = [&] {
    return fail.exchange(false) ? absl::InternalError("boom") : absl::OkStatus();
  };
  EXPECT_EQ(Wait(*Submit(Input(Prompt(4), 2))).status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(4), 2))).status.ok());
  ExpectEverythingBack();
}

TEST_F(EngineTest, AStepThatDoesNotBeginFailsItsRequestsOnly) {
  EngineOptions options = DefaultOptions();
  options.max_running_sequences = 1;
  Start(options, 64);
  std::atomic<int> begun{0};
  runner_->on_begin = [&](auto) {
    return ++begun == 4 ? absl::InternalError("boom") : absl::OkStatus();
  };
  GenerateInput input = Input(Prompt(4), 20, MakeAdapter("a", 1));
  const SampleText expected = Expected(input, 0, 512);
  auto first = Submit(std::move(input));
  auto second = Submit(Input(Prompt(4, 9), 20));
  const Outcome outcome = Wait(*first);
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(outcome.samples.at(0).tokens,
            std::vector<TokenId>(expected.tokens.begin(), expected.tokens.begin() + 3))
      << "the steps before it count";
  EXPECT_TRUE(Wait(*second).status.ok());
  ExpectEverythingBack();
}

TEST_F(EngineTest, AFailedStepTakesTheOneBehindItAlong) {
  Start(DefaultOptions(), 64);
  std::atomic<int> finished{0};
  runner_->on_step = [&] {
    return ++finished == 3 ? absl::InternalError("boom") : absl::OkStatus();
  };
  const Outcome outcome = Wait(*Submit(Input(Prompt(4), 20)));
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(outcome.samples.at(0).tokens.size(), 2u);
  EXPECT_EQ(finished, 4) << "asked for, so that the runner is rid of it";
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(4), 20))).status.ok());
  ExpectEverythingBack();
}

// A sequence that stops has one row in the step behind, which still reads the adapter.
TEST_F(EngineTest, ALeaseOutlastsTheRowsThatAreComputedInVain) {
  Start(DefaultOptions(), 64);
  GenerateInput input = Input(Prompt(4), 100, MakeAdapter("a", 1));
  const std::vector<TokenId> free_run = Expected(input, 0, 512).tokens;
  input.stop.stop_token_ids = {free_run[3]};
  std::atomic<int> finished{0};
  runner_->on_step = [&] {
    ++finished;
    EXPECT_EQ(leases_.held(), 1);
    return absl::OkStatus();
  };
  const Outcome outcome = Wait(*Submit(std::move(input)));
  EXPECT_EQ(outcome.samples.at(0).finish.reason, FinishReason::kStop);
  EXPECT_EQ(finished, static_cast<int>(outcome.samples.at(0).tokens.size()) + 1);
  ExpectEverythingBack();
}

TEST_F(EngineTest, ComputesNothingInVainWhenTheLengthEndsIt) {
  Start(DefaultOptions(), 64);
  std::atomic<int> finished{0};
  runner_->on_step = [&] {
    ++finished;
    return absl::OkStatus();
  };
  Wait(*Submit(Input(Prompt(4), 7)));
  EXPECT_EQ(finished, 7);
}

// In chunks, each begun while the one before is in flight, and again after a preemption.
TEST_F(EngineTest, ScoresEveryRowOnceThoughItIsPreempted) {
  EngineOptions options = DefaultOptions();
  options.max_step_tokens = 4;
  options.prefix_cache = false;
  Start(options, 14);
  engine_->Pause({PauseMode::kKeep, {}}, [](auto) {});  // so that all begin together
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int i = 0; i < 3; ++i) {
    GenerateInput input = Input(Prompt(4, 50 * i), 60);
    input.priority = -1;
    streams.push_back(Submit(std::move(input)));
  }
  ScoreInput input;
  input.request_id = "score";
  input.sequences = {Prompt(100)};
  input.leases.push_back(leases_.Take(MakeAdapter("a", 1)));
  const std::shared_ptr<const adapter::LoadedAdapter> adapter = MakeAdapter("a", 1);
  absl::Notification done;
  absl::StatusOr<ScoreResult> result;
  auto ticket = std::make_shared<ScoreTicket>([&](absl::StatusOr<ScoreResult> r) {
    result = std::move(r);
    done.Notify();
  });
  ASSERT_TRUE(engine_->Submit(std::move(input), ticket).ok());
  engine_->Resume({}, [] {});
  done.WaitForNotification();
  ASSERT_TRUE(result.ok()) << result.status();
  const std::vector<float>& logprobs = result->scores[0][0].logprobs;
  const std::vector<TokenId> tokens = Prompt(100);
  ASSERT_EQ(logprobs.size(), tokens.size());
  uint64_t hash = 0;
  for (size_t t = 1; t < tokens.size(); ++t) {
    hash = FakeKv(hash, tokens[t - 1], adapter.get());
    EXPECT_EQ(logprobs[t], FakeLogprob(hash, tokens[t])) << t;
  }
  for (auto& stream : streams) EXPECT_EQ(Wait(*stream).samples.at(0).tokens.size(), 60u);
  EXPECT_EQ(metrics_.Render().find("dorad_engine_preemptions_total 0\n"), std::string::npos)
      << "the test meant to force a preemption";
  EXPECT_THAT(metrics_.Render(), HasSubstr("dorad_scored_tokens_total 99\n"))
      << "each row once; the last one says nothing";
  ExpectEverythingBack();
}

TEST_F(EngineTest, NonFiniteLogitsEndThatSampleOnly) {
  Start(DefaultOptions(), 64);
  runner_->poison = 555;
  auto bad = Submit(Input({1, 555, 2}, 5));
  auto good = Submit(Input(Prompt(5), 5));
  const Outcome outcome = Wait(*bad);
  EXPECT_TRUE(outcome.status.ok());
  EXPECT_EQ(outcome.samples.at(0).finish.reason, FinishReason::kNonFinite);
  EXPECT_EQ(Wait(*good).samples.at(0).tokens.size(), 5u);
  ExpectEverythingBack();
}

TEST_F(EngineTest, PauseKeepFreezesAndResumeGoesOn) {
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  GenerateInput input = Input(Prompt(4), 300);
  const SampleText expected = Expected(input, 0, 512);
  auto stream = Submit(std::move(input));
  absl::Notification paused;
  engine_->Pause({PauseMode::kKeep, {}}, [&](absl::StatusOr<int> count) {
    EXPECT_EQ(count.value(), 1);
    paused.Notify();
  });
  paused.WaitForNotification();
  EXPECT_TRUE(engine_->stats().paused) << "an answer comes after its effect can be seen";
  const uint64_t steps = engine_->stats().steps;
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(engine_->stats().steps, steps);
  absl::Notification resumed;
  engine_->Resume({}, [&] { resumed.Notify(); });
  resumed.WaitForNotification();
  EXPECT_EQ(Wait(*stream).samples.at(0).tokens, expected.tokens);
}

TEST_F(EngineTest, PauseWaitRefusesNewRequestsAndAnswersWhenDrained) {
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  auto stream = Submit(Input(Prompt(4), 50));
  absl::Notification paused;
  engine_->Pause({PauseMode::kWait, {}}, [&](auto) { paused.Notify(); });
  // At the door, or when it enters behind the pause.
  auto refused = std::make_shared<TokenStream>(false);
  absl::Status status = engine_->Submit(Input(Prompt(4), 2), refused);
  if (status.ok()) status = Wait(*refused).status;
  EXPECT_EQ(ReasonOf(status), "ENGINE_PAUSED");
  paused.WaitForNotification();
  EXPECT_EQ(Wait(*stream).samples.at(0).tokens.size(), 50u);
  absl::Notification resumed;
  engine_->Resume({}, [&] { resumed.Notify(); });
  resumed.WaitForNotification();
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(4), 2))).status.ok());
}

TEST_F(EngineTest, PauseWaitLetsFrozenRequestsFinish) {
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  auto stream = Submit(Input(Prompt(4), 50));
  absl::Notification frozen;
  engine_->Pause({PauseMode::kKeep, {}}, [&](auto) { frozen.Notify(); });
  frozen.WaitForNotification();
  absl::Notification drained;
  engine_->Pause({PauseMode::kWait, {}}, [&](auto) { drained.Notify(); });
  EXPECT_TRUE(drained.WaitForNotificationWithTimeout(absl::Seconds(30)));
  EXPECT_EQ(Wait(*stream).samples.at(0).tokens.size(), 50u);
  EXPECT_TRUE(engine_->stats().paused);
}

TEST_F(EngineTest, APauseThatWaitsIsToldWhenItIsOvertaken) {
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  auto stream = Submit(Input(Prompt(4), 400));
  absl::Notification overtaken;
  engine_->Pause({PauseMode::kWait, {}}, [&](absl::StatusOr<int> result) {
    EXPECT_EQ(ReasonOf(result.status()), "PAUSE_SUPERSEDED");
    overtaken.Notify();
  });
  engine_->Resume({}, [] {});
  EXPECT_TRUE(overtaken.WaitForNotificationWithTimeout(absl::Seconds(30)));
  EXPECT_EQ(Wait(*stream).samples.at(0).tokens.size(), 400u);
}

TEST_F(EngineTest, WithoutThePrefixCacheNothingIsReused) {
  EngineOptions options = DefaultOptions();
  options.prefix_cache = false;
  Start(options, 256);
  for (int i = 0; i < 2; ++i) {
    const Outcome outcome = Wait(*Submit(Input(Prompt(64), 4)));
    EXPECT_EQ(outcome.samples.at(0).finish.usage.cached_prompt_tokens, 0u);
  }
  EXPECT_EQ(engine_->stats().kv_pages_cached, 0);
  GenerateInput several = Input(Prompt(64), 4);
  several.n = 3;  // which share the prompt's pages
  (void)Wait(*Submit(std::move(several)));
  EXPECT_THAT(metrics_.Render(), HasSubstr("dorad_prefix_cache_queried_tokens_total 0\n"));
  EXPECT_THAT(metrics_.Render(), HasSubstr("dorad_prefix_cache_hit_tokens_total 0\n"));
}

// Its lease is older than the retirement, whose abort it has missed.
TEST_F(EngineTest, ARequestThatEntersWithARevokedVersionIsAborted) {
  Start(DefaultOptions(), 64);
  const auto adapter = MakeAdapter("a", 1);
  GenerateInput input = Input(Prompt(4), 50, adapter);
  adapter->Revoke();
  const Outcome outcome = Wait(*Submit(std::move(input)));
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.samples.at(0).finish.reason, FinishReason::kAborted);
  EXPECT_TRUE(outcome.samples.at(0).tokens.empty());
  EXPECT_EQ(Wait(*Submit(Input(Prompt(4), 5, MakeAdapter("a", 2)))).samples.at(0).tokens.size(),
            5u);
  ExpectEverythingBack();
}

TEST_F(EngineTest, PauseAbortEndsEverything) {
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  auto stream = Submit(Input(Prompt(4), 500));
  absl::Notification paused;
  engine_->Pause({PauseMode::kAbort, {}}, [&](absl::StatusOr<int> count) {
    EXPECT_EQ(count.value(), 1);
    paused.Notify();
  });
  paused.WaitForNotification();
  EXPECT_EQ(Wait(*stream).samples.at(0).finish.reason, FinishReason::kAborted);
  ExpectEverythingBack();
}

TEST_F(EngineTest, ShutdownEndsEveryRequestOnce) {
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int i = 0; i < 20; ++i) streams.push_back(Submit(Input(Prompt(4, i), 500)));
  engine_.reset();
  for (auto& stream : streams) {
    EXPECT_EQ(ReasonOf(Wait(*stream).status), "SHUTTING_DOWN");
  }
  EXPECT_EQ(leases_.held(), 0);
}

// A request of random traffic, and what a run of its own gives.
struct Pending {
  std::shared_ptr<TokenStream> stream;
  std::vector<SampleText> expected;
  bool cancelled = false;
};

// What has come is right, and complete where the sample ended by itself.
void ExpectRightAsFarAsItGoes(const Outcome& outcome, const std::vector<SampleText>& all) {
  for (const auto& [index, sample] : outcome.samples) {
    const std::vector<TokenId>& expected = all[index].tokens;
    ASSERT_LE(sample.tokens.size(), expected.size());
    EXPECT_TRUE(std::equal(sample.tokens.begin(), sample.tokens.end(), expected.begin()));
    if (sample.finish.reason == FinishReason::kLength ||
        sample.finish.reason == FinishReason::kStop) {
      EXPECT_EQ(sample.tokens, expected);
    }
  }
}

// Random arrivals, cancels and aborts over few pages: whatever finishes has exactly the tokens of
// a run of its own, and everything is given back.
TEST_F(EngineTest, RandomTrafficKeepsResultsAndBooks) {
  for (uint32_t seed = 0; seed < 6; ++seed) {
    std::mt19937 random(seed);
    EngineOptions options = DefaultOptions();
    options.max_step_tokens = 1 + random() % 60;
    options.max_running_sequences = 1 + random() % 12;
    const int64_t pages = 6 + random() % 20;
    Start(options, pages, /*max_steps_in_flight=*/1 + seed % 2);
    const std::vector<std::shared_ptr<const adapter::LoadedAdapter>> adapters = {
        nullptr, MakeAdapter("a", 1), MakeAdapter("a", 2), MakeAdapter("b", 1)};
    std::vector<Pending> pending;
    for (int i = 0; i < 120; ++i) {
      GenerateInput input = Input(Prompt(1 + random() % 70, random() % 3), 1 + random() % 30,
                                  adapters[random() % adapters.size()]);
      input.n = 1 + random() % 4;
      input.sampling.temperature = random() % 2;
      input.sampling.seed = random();
      input.stop.ignore_eos = random() % 2;
      input.priority = random() % 3;
      input.bypass_prefix_cache = random() % 4 == 0;
      Pending p;
      for (int s = 0; s < input.n; ++s) {
        p.expected.push_back(Expected(input, s, engine_->limits().context_length,
                                      /*stop_at_eos=*/!input.stop.ignore_eos));
      }
      const std::string id = input.request_id;
      p.stream = Submit(std::move(input));
      if (random() % 8 == 0) {
        p.stream->Cancel();
        engine_->NoteCancelled();
        p.cancelled = true;
      } else if (random() % 10 == 0) {
        engine_->Abort({.request_ids = {id}}, "random", [](int) {});
        p.cancelled = true;
      }
      pending.push_back(std::move(p));
      if (random() % 5 == 0) absl::SleepFor(absl::Microseconds(random() % 2000));
    }
    for (Pending& p : pending) {
      const Outcome outcome = Wait(*p.stream);
      ASSERT_NE(outcome.status.code(), absl::StatusCode::kDeadlineExceeded);
      ASSERT_NO_FATAL_FAILURE(ExpectRightAsFarAsItGoes(outcome, p.expected));
      if (!p.cancelled) {
        EXPECT_TRUE(outcome.status.ok()) << outcome.status;
        EXPECT_EQ(outcome.samples.size(), p.expected.size());
      }
    }
    ExpectEverythingBack();
    engine_.reset();
  }
}

// Steps that do not begin, steps that fail with another behind them, rows that are not finite and
// clients that leave: what is delivered is right as far as it goes, and everything comes back.
TEST_F(EngineTest, RandomFaultsChangeNoTokenAndLoseNothing) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    std::mt19937 random(seed + 100);
    EngineOptions options = DefaultOptions();
    options.max_step_tokens = 4 + random() % 60;
    options.max_running_sequences = 2 + random() % 12;
    Start(options, 8 + random() % 20, /*max_steps_in_flight=*/1 + seed % 2);
    auto faults = std::make_shared<std::mt19937>(seed);  // the engine's thread
    runner_->on_begin = [faults](auto) {
      return (*faults)() % 60 == 0 ? absl::InternalError("begin") : absl::OkStatus();
    };
    runner_->on_step = [faults] {
      return (*faults)() % 60 == 0 ? absl::InternalError("finish") : absl::OkStatus();
    };
    runner_->poison = 77;
    const auto adapter = MakeAdapter("a", 1);
    std::vector<Pending> pending;
    for (int i = 0; i < 100; ++i) {
      GenerateInput input = Input(Prompt(1 + random() % 50, random() % 3), 1 + random() % 40,
                                  random() % 2 == 0 ? adapter : nullptr);
      input.n = 1 + random() % 3;
      input.sampling.temperature = random() % 2;
      input.sampling.seed = random();
      input.stop.ignore_eos = false;
      Pending p;
      for (int s = 0; s < input.n; ++s) {
        p.expected.push_back(
            Expected(input, s, engine_->limits().context_length, /*stop_at_eos=*/true));
      }
      p.stream = Submit(std::move(input));
      if (random() % 10 == 0) {
        p.stream->Cancel();
        engine_->NoteCancelled();
        p.cancelled = true;
      }
      pending.push_back(std::move(p));
      if (random() % 5 == 0) absl::SleepFor(absl::Microseconds(random() % 1000));
    }
    int failed = 0;
    for (Pending& p : pending) {
      const Outcome outcome = Wait(*p.stream);
      failed += outcome.status.code() == absl::StatusCode::kInternal ? 1 : 0;
      EXPECT_TRUE(outcome.status.ok() || outcome.status.code() == absl::StatusCode::kInternal ||
                  (p.cancelled && outcome.status.code() == absl::StatusCode::kCancelled))
          << outcome.status;
      ASSERT_NO_FATAL_FAILURE(ExpectRightAsFarAsItGoes(outcome, p.expected));
    }
    EXPECT_GT(failed, 0) << "the test meant to fail steps";
    EXPECT_LT(failed, 100);
    ExpectEverythingBack();
    engine_.reset();
  }
}

}  // namespace
}  // namespace dorad::engine
