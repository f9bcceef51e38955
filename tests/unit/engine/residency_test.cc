// Requests for more adapters than fit: they wait for weights that are away, and nobody else does.
#include "server/adapter/residency/residency.h"

#include "absl/strings/numbers.h"
#include "server/platform/metrics/metrics.h"
#include "server/platform/thread_pool.h"
#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

struct NoWeights final : adapter::AdapterWeights {};

class EngineResidencyTest : public EngineTest {
 protected:
  using Adapter = std::shared_ptr<const adapter::LoadedAdapter>;

  // Room for so many adapters; each reload takes `delay`.
  void Limit(int adapters, absl::Duration delay = absl::Milliseconds(1)) {
    adapter::Residency::Options options;
    options.max_bytes = adapters;
    options.patience = absl::Milliseconds(30);
    options.executor = [this](std::function<void()> task) { loaders_.Submit(std::move(task)); };
    residency_ = std::make_unique<adapter::Residency>(std::move(options));
    delay_ = delay;
  }

  Adapter Resident(const std::string& name) {
    adapter::AdapterSummary summary;
    summary.digest = name + "#1";
    auto reload = [this]() -> absl::StatusOr<std::shared_ptr<const adapter::AdapterWeights>> {
      absl::SleepFor(delay_);
      if (held_ != nullptr) held_->WaitForNotification();
      if (failing_) return MakeError(absl::StatusCode::kDataLoss, "GONE", "the file is gone");
      return std::make_shared<NoWeights>();
    };
    auto entry = residency_->Add(std::make_shared<NoWeights>(), 1, std::move(reload));
    return std::make_shared<adapter::LoadedAdapter>(name, 1, summary, *std::move(entry));
  }

  ~EngineResidencyTest() override {
    engine_.reset();
    residency_.reset();
  }

  adapter::AdapterLease Lease(Adapter adapter) { return leases_.Take(std::move(adapter)); }

  ThreadPool loaders_{2, 0};
  std::unique_ptr<adapter::Residency> residency_;
  absl::Duration delay_;
  absl::Notification* held_ = nullptr;  // reloads wait for it
  std::atomic<bool> failing_ = false;
};

TEST_F(EngineResidencyTest, MoreAdaptersThanFitAreAllServed) {
  Limit(2);
  Start(DefaultOptions(), 64);
  std::vector<SampleText> expected;
  std::vector<std::shared_ptr<TokenStream>> streams;
  engine_->Pause({PauseMode::kKeep, {}}, [](auto) {});  // none ends before there are too many
  for (int i = 0; i < 40; ++i) {
    GenerateInput input = Input(Prompt(5 + i), 20, Resident("a" + std::to_string(i % 10)));
    expected.push_back(Expected(input, 0, 512));
    streams.push_back(Submit(std::move(input)));
  }
  engine_->Resume({}, [] {});
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(Wait(*streams[i]).samples.at(0).tokens, expected[i].tokens) << i;
  }
  EXPECT_GT(residency_->stats().reloads_from_store, 0);
  ExpectEverythingBack();
}

TEST_F(EngineResidencyTest, OthersDoNotWaitForWeightsThatAreAway) {
  Limit(1, absl::Seconds(1));
  Start(DefaultOptions(), 64);
  const Adapter away = Resident("away");
  const Adapter here = Resident("here");
  ASSERT_FALSE(away->resident());
  auto waiting = Submit(Input(Prompt(5), 3, away));
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(6), 10))).status.ok());
  EXPECT_FALSE(waiting->Ended().has_value());
  EXPECT_EQ(Wait(*waiting).samples.at(0).tokens.size(), 3u);
  ExpectEverythingBack();
}

// The value of a series without labels.
double ValueOf(Metrics& metrics, const std::string& name) {
  for (const absl::string_view line : absl::StrSplit(metrics.Render(), '\n')) {
    double value = 0;
    if (absl::StartsWith(line, name + " ") && absl::SimpleAtod(line.substr(name.size()), &value)) {
      return value;
    }
  }
  ADD_FAILURE() << name << " is not exported";
  return 0;
}

TEST_F(EngineResidencyTest, TimeThatSequencesWaitForWeightsIsCounted) {
  Limit(1, absl::Milliseconds(50));
  Start(DefaultOptions(), 64);
  const Adapter away = Resident("away");
  const Adapter here = Resident("here");
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 3, here))).status.ok());
  EXPECT_EQ(ValueOf(metrics_, "dorad_adapter_stall_seconds_count"), 0) << "they were there";
  GenerateInput input = Input(Prompt(5), 3, away);
  input.n = 2;
  EXPECT_TRUE(Wait(*Submit(std::move(input))).status.ok());
  const double stalls = ValueOf(metrics_, "dorad_adapter_stall_seconds_count");
  EXPECT_GE(stalls, 1);
  EXPECT_LE(stalls, 2) << "one for each sample at most";
  EXPECT_GE(ValueOf(metrics_, "dorad_adapter_stall_seconds_sum"), .05);
  ExpectEverythingBack();
}

TEST_F(EngineResidencyTest, AStallEndsWithItsRequest) {
  Limit(1, absl::Seconds(1));
  Start(DefaultOptions(), 64);
  const Adapter away = Resident("away");
  const Adapter here = Resident("here");
  GenerateInput input = Input(Prompt(5), 3, away);
  input.deadline = absl::Now() + absl::Milliseconds(30);
  EXPECT_EQ(Wait(*Submit(std::move(input))).status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ValueOf(metrics_, "dorad_adapter_stall_seconds_count"), 1);
  ExpectEverythingBack();
}

TEST_F(EngineResidencyTest, ADeadlineThatComesInAStallSaysSo) {
  Limit(1);
  absl::Notification released;
  held_ = &released;
  Start(DefaultOptions(), 64);
  const Adapter away = Resident("away");
  const Adapter here = Resident("here");
  GenerateInput input = Input(Prompt(5), 3, away);
  input.deadline = absl::Now() + absl::Seconds(3);  // the stall begins long before
  const absl::Status status = Wait(*Submit(std::move(input))).status;
  released.Notify();
  EXPECT_EQ(ReasonOf(status), "DEADLINE_EXCEEDED");
  EXPECT_EQ(MetadataOf(status)["waited_for"], "weights");
  EXPECT_THAT(std::string(status.message()), HasSubstr("weights were evicted"));
  ExpectEverythingBack();
}

TEST_F(EngineResidencyTest, ARequestWhoseWeightsCannotBeBroughtFailsAndSaysWhy) {
  Limit(1);
  Start(DefaultOptions(), 64);
  const Adapter away = Resident("away");
  const Adapter here = Resident("here");
  failing_ = true;
  const Outcome outcome = Wait(*Submit(Input(Prompt(5), 3, away)));
  EXPECT_EQ(ReasonOf(outcome.status), "GONE");
  failing_ = false;
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 3, away))).status.ok()) << "it is tried again";
  ExpectEverythingBack();
}

TEST_F(EngineResidencyTest, WeightsThatCannotBeBroughtEndOnlyTheRequestsThatWaitForThem) {
  Limit(2);
  Start(DefaultOptions(), 64);
  const Adapter away = Resident("away");
  const Adapter here = Resident("here");
  const Adapter paused = Resident("paused");
  ASSERT_FALSE(away->resident());
  absl::Notification running;
  runner_->on_step = [&, step = 0]() mutable {
    if (++step == 3) running.Notify();
    absl::SleepFor(absl::Microseconds(200));
    return absl::OkStatus();
  };
  absl::Notification is_paused;
  engine_->Pause({PauseMode::kKeep, {"paused", 0}}, [&](auto) { is_paused.Notify(); });
  is_paused.WaitForNotification();
  auto frozen = Submit(Input(Prompt(5), 3, paused));
  auto other = Submit(Input(Prompt(5), 450, here));
  auto base = Submit(Input(Prompt(6), 450));
  running.WaitForNotification();
  failing_ = true;
  EXPECT_EQ(ReasonOf(Wait(*Submit(Input(Prompt(5), 3, away))).status), "GONE");
  failing_ = false;
  EXPECT_EQ(Wait(*other).samples.at(0).tokens.size(), 450u);
  EXPECT_EQ(Wait(*base).samples.at(0).tokens.size(), 450u);
  engine_->Resume({}, [] {});
  EXPECT_EQ(Wait(*frozen).samples.at(0).tokens.size(), 3u);
  ExpectEverythingBack();
}

TEST_F(EngineResidencyTest, AnAdapterInConstantDemandDoesNotStarveAnother) {
  Limit(1);
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Microseconds(200));
    return absl::OkStatus();
  };
  const Adapter rare = Resident("rare");
  const Adapter popular = Resident("popular");
  std::vector<std::shared_ptr<TokenStream>> busy;
  for (int i = 0; i < 3; ++i) busy.push_back(Submit(Input(Prompt(5), 100, popular)));
  auto patient = Submit(Input(Prompt(7), 5, rare));
  int asked = 0;
  const absl::Time limit = absl::Now() + absl::Seconds(30);
  while (!patient->Ended() && absl::Now() < limit) {
    busy.push_back(Submit(Input(Prompt(5), 100, popular)));
    ++asked;
    Wait(*busy[asked - 1]);
    while (patient->Take()) {
    }
  }
  EXPECT_TRUE(patient->Ended().has_value());
  for (auto& stream : busy) Wait(*stream);
  ExpectEverythingBack();
}

TEST_F(EngineResidencyTest, AScoreUnderMoreAdaptersThanFitIsComputed) {
  Limit(2);
  Start(DefaultOptions(), 64);
  ScoreInput input;
  input.request_id = "score";
  input.sequences = {Prompt(30)};
  for (int i = 0; i < 7; ++i) input.leases.push_back(Lease(Resident("a" + std::to_string(i))));
  absl::Notification done;
  absl::StatusOr<ScoreResult> result;
  auto ticket = std::make_shared<ScoreTicket>([&](absl::StatusOr<ScoreResult> r) {
    result = std::move(r);
    done.Notify();
  });
  ASSERT_TRUE(engine_->Submit(std::move(input), ticket).ok());
  done.WaitForNotification();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->scores[0].size(), 7u);
  ExpectEverythingBack();
}

TEST_F(EngineResidencyTest, ASwitchToWeightsThatAreAwayWaitsForThem) {
  for (const InFlightPolicy policy :
       {InFlightPolicy::kSwitchKeepKv, InFlightPolicy::kSwitchRecompute}) {
    Limit(2);
    Start(DefaultOptions(), 64);
    const Adapter next = Resident("next");
    const Adapter first = Resident("first");
    const Adapter third = Resident("third");
    ASSERT_FALSE(next->resident());
    std::atomic<bool> moved = false;
    GenerateInput input = Input(Prompt(20), 200, first);
    input.in_flight = policy;
    input.follow = [&]() -> absl::StatusOr<adapter::AdapterLease> {
      return Lease(moved ? next : first);
    };
    runner_->on_step = [&, step = 0]() mutable {
      if (++step == 20) {
        moved = true;
        engine_->NoteActivated();
      }
      return absl::OkStatus();
    };
    const SampleText sample = Wait(*Submit(std::move(input))).samples.at(0);
    EXPECT_EQ(sample.tokens.size(), 200u);
    EXPECT_EQ(sample.spans.back().adapter, "next");
    EXPECT_TRUE(next->resident());
    ExpectEverythingBack();
    engine_.reset();
  }
}

TEST_F(EngineResidencyTest, AVersionThatWasActiveBetweenTwoTokensIsUsedNoMore) {
  Limit(2);
  Start(DefaultOptions(), 64);
  std::vector<Adapter> versions(3);
  for (int i : {2, 1, 0}) versions[i] = Resident(i == 0 ? "first" : i == 1 ? "between" : "last");
  ASSERT_FALSE(versions[2]->resident());
  std::atomic<size_t> active = 0;
  GenerateInput input = Input(Prompt(20), 100, versions[0]);
  input.in_flight = InFlightPolicy::kSwitchKeepKv;
  input.follow = [&]() -> absl::StatusOr<adapter::AdapterLease> { return Lease(versions[active]); };
  absl::Notification running;
  runner_->on_step = [&, step = 0]() mutable {
    if (++step == 10) running.Notify();
    absl::SleepFor(absl::Microseconds(200));
    return absl::OkStatus();
  };
  auto stream = Submit(std::move(input));
  running.WaitForNotification();
  const auto pause = [&] {
    absl::Notification done;
    engine_->Pause({PauseMode::kKeep, {}}, [&](auto) { done.Notify(); });
    done.WaitForNotification();
  };
  pause();
  for (size_t next : {1, 2}) {
    active = next;
    engine_->NoteActivated();
    pause();  // answered when the note has been read
    pause();  // answered in a later turn, when the request has gone over
  }
  EXPECT_EQ(leases_.held(), 2) << "the one between has none";
  versions[1].reset();  // checks that nobody uses it
  engine_->Resume({}, [] {});
  const SampleText sample = Wait(*stream).samples.at(0);
  EXPECT_EQ(sample.spans.back().adapter, "last");
  EXPECT_EQ(sample.tokens.size(), 100u);
  ExpectEverythingBack();
}

TEST_F(EngineResidencyTest, TheWeightsOfAPausedAdapterMakeRoom) {
  Limit(1);
  Start(DefaultOptions(), 64);
  runner_->on_step = [] {
    absl::SleepFor(absl::Microseconds(200));
    return absl::OkStatus();
  };
  const Adapter other = Resident("other");
  const Adapter paused = Resident("paused");
  GenerateInput input = Input(Prompt(20), 300, paused);
  const SampleText expected = Expected(input, 0, 512);
  auto stream = Submit(std::move(input));
  const absl::Time limit = absl::Now() + absl::Seconds(20);
  while (engine_->stats().running_sequences == 0 && absl::Now() < limit) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  absl::Notification done;
  engine_->Pause({PauseMode::kKeep, {"paused", 0}}, [&](auto) { done.Notify(); });
  done.WaitForNotification();
  EXPECT_TRUE(Wait(*Submit(Input(Prompt(5), 3, other))).status.ok());
  EXPECT_FALSE(paused->resident());
  engine_->Resume({}, [] {});
  const SampleText sample = Wait(*stream).samples.at(0);
  EXPECT_EQ(sample.tokens, expected.tokens);
  EXPECT_EQ(sample.finish.usage.preemptions, 0u) << "its pages stayed";
  ExpectEverythingBack();
}

TEST_F(EngineResidencyTest, RandomTrafficOverManyAdaptersKeepsResultsAndBooks) {
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    Limit(1 + below(4));
    EngineOptions options = DefaultOptions();
    options.max_step_tokens = 16 + below(64);
    Start(options, 24 + below(40), 1 + below(2));
    std::vector<Adapter> adapters;
    for (int i = 0; i < 9; ++i) adapters.push_back(Resident("a" + std::to_string(i)));
    std::vector<std::pair<std::shared_ptr<TokenStream>, SampleText>> running;
    for (int i = 0; i < 80; ++i) {
      GenerateInput input = Input(Prompt(1 + below(100), 100 + below(3)), 1 + below(50),
                                  below(6) == 0 ? nullptr : adapters[below(9)]);
      SampleText expected = Expected(input, 0, 512);
      auto stream = Submit(std::move(input));
      if (below(10) == 0) {
        Cancel(stream);
      } else {
        running.emplace_back(std::move(stream), std::move(expected));
      }
    }
    for (auto& [stream, expected] : running) {
      EXPECT_EQ(Wait(*stream).samples.at(0).tokens, expected.tokens);
    }
    ExpectEverythingBack();
    engine_.reset();
  }
}

}  // namespace
}  // namespace dorad::engine
