#include "server/engine/engine.h"

#include "server/platform/metrics/metrics.h"
#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

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
  const std::vector<TokenId> free_run = Expected(Input(Prompt(4), 6), 0, 512).tokens;
  for (const int place : {0, 1}) {
    GenerateInput input = Input(Prompt(4), 6);
    input.stop.stop_token_ids = {free_run[place]};
    input.stop.min_tokens = 2;
    const Outcome outcome = Wait(*Submit(std::move(input)));
    ASSERT_GT(outcome.samples.at(0).tokens.size(), 2u);
    EXPECT_NE(outcome.samples.at(0).tokens[place], free_run[place]);
  }
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
    EXPECT_EQ(cached, i == 0 ? 0u : 100u) << "siblings compute nothing of the prompt";
  }
  EXPECT_NE(outcome.samples.at(0).tokens, outcome.samples.at(1).tokens);
  ExpectEverythingBack();
}

TEST_F(EngineTest, ReusesThePrefixOfAnEarlierRequestOfTheSameVersionOnly) {
  Start(DefaultOptions(), 256);
  const auto v1 = MakeAdapter("a", 1);
  Wait(*Submit(Input(Prompt(64), 4, v1)));
  Outcome again = Wait(*Submit(Input(Prompt(64), 4, v1)));
  EXPECT_EQ(again.samples.at(0).finish.usage.cached_prompt_tokens, 63u);
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
    refused = engine_->Submit(Input(Prompt(4, i), 2), stream).status();
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
    const absl::Status status = engine_->Submit(Input(Prompt(4, i), 2), stream).status();
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
  EXPECT_EQ(engine_->Submit(std::move(second), other).status().code(),
            absl::StatusCode::kAlreadyExists);
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

TEST_F(EngineTest, ALateCancelSparesTheNextRequestOfTheSameId) {
  Start(DefaultOptions(), 64);
  const auto submit = [&](int max_tokens) {
    GenerateInput input = Input(Prompt(4), max_tokens);
    input.request_id = "same";
    auto stream = std::make_shared<TokenStream>(/*final_only=*/false);
    const absl::StatusOr<RequestHandle> handle = engine_->Submit(std::move(input), stream);
    EXPECT_TRUE(handle.ok()) << handle.status();
    return std::pair(*handle, stream);
  };
  const auto [first, first_stream] = submit(1);
  Wait(*first_stream);
  absl::Notification go;
  runner_->on_step = [&] {
    go.WaitForNotification();
    return absl::OkStatus();
  };
  const auto [second, second_stream] = submit(8);
  engine_->Cancel(first);
  go.Notify();
  EXPECT_EQ(Wait(*second_stream).samples.at(0).finish.reason, FinishReason::kLength);
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

TEST_F(EngineTest, ReportsGeneratedTokensOfATenantOnceAStep) {
  std::map<std::string, int64_t> tokens;
  std::atomic<int> reports{0};
  EngineOptions options = DefaultOptions();
  options.on_generated = [&](const std::string& tenant, int64_t count) {
    tokens[tenant] += count;
    ++reports;
  };
  Start(options, 64);
  engine_->Pause({PauseMode::kKeep, {}}, [](auto) {});  // so that all begin together
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (const char* tenant : {"a", "b", "a"}) {
    GenerateInput input = Input(Prompt(4, 100 * static_cast<TokenId>(streams.size())), 20);
    input.n = 3;
    input.tenant = tenant;
    streams.push_back(std::make_shared<TokenStream>(/*final_only=*/true));
    ASSERT_TRUE(engine_->Submit(std::move(input), streams.back()).ok());
  }
  engine_->Resume({}, [] {});
  for (auto& stream : streams) Wait(*stream);
  EXPECT_EQ(tokens["a"], 120) << "whoever reads them, and before anyone does";
  EXPECT_EQ(tokens["b"], 60);
  ExpectEverythingBack();  // and the counts are current
  EXPECT_LE(reports, 2 * static_cast<int>(engine_->stats().steps));
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

}  // namespace
}  // namespace dorad::engine
