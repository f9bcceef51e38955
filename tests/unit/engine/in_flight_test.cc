// What requests do when the active version of their adapter moves: every token must be the one that
// a replay of the response's spans gives, whatever else happened to the request.

#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

using Adapter = std::shared_ptr<const adapter::LoadedAdapter>;

class InFlightTest : public EngineTest {
 protected:
  static constexpr InFlightPolicy kBoth[] = {InFlightPolicy::kSwitchKeepKv,
                                             InFlightPolicy::kSwitchRecompute};

  InFlightTest() {
    for (int64_t version = 1; version <= 8; ++version)
      versions_[version] = MakeAdapter("a", version);
  }

  // As the registry would: moves the active version and tells the engine.
  void Activate(int64_t version) {
    active_ = version;
    engine_->NoteActivated();
  }

  GenerateInput Following(std::vector<TokenId> prompt, int64_t max_tokens, InFlightPolicy policy) {
    GenerateInput input = Input(std::move(prompt), max_tokens, versions_.at(active_));
    input.in_flight = policy;
    if (policy != InFlightPolicy::kPin) {
      input.follow = [this]() -> absl::StatusOr<adapter::AdapterLease> {
        if (active_ == 0) return absl::NotFoundError("no active version");
        return leases_.Take(versions_.at(active_));
      };
    }
    return input;
  }

  // Activates versions when so many steps have finished, on the engine's thread: {steps, version}.
  // To be called before the first request.
  void ActivateAt(std::map<int, int64_t> plan) {
    runner_->on_step = [this, plan = std::move(plan), step = 0]() mutable {
      if (const auto it = plan.find(++step); it != plan.end()) Activate(it->second);
      return absl::OkStatus();
    };
  }

  // The tokens that the spans of a sample promise.
  std::vector<TokenId> Replay(const std::vector<TokenId>& prompt, const SampleText& sample,
                              InFlightPolicy policy, uint32_t index,
                              const SamplingParams& sampling) const {
    std::vector<TokenId> made;
    EXPECT_FALSE(sample.spans.empty());
    const auto version_of = [&](size_t token) -> const adapter::LoadedAdapter* {
      for (const VersionSpan& span : sample.spans) {
        if (token >= span.begin && token < span.end) return versions_.at(span.version).get();
      }
      ADD_FAILURE() << "no span has token " << token;
      return nullptr;
    };
    for (size_t t = 0; t < sample.tokens.size(); ++t) {
      uint64_t hash = 0;
      for (size_t p = 0; p < prompt.size() + t; ++p) {
        const TokenId token = p < prompt.size() ? prompt[p] : made[p - prompt.size()];
        // The row of position p predicts token p + 1 - prompt.
        const size_t predicts = p + 1 < prompt.size() ? 0 : p + 1 - prompt.size();
        const size_t by = policy == InFlightPolicy::kSwitchKeepKv ? predicts : t;
        hash = FakeKv(hash, token, version_of(by));
      }
      made.push_back(FakeNext(hash, sampling, index));
    }
    return made;
  }

  static std::vector<int64_t> VersionsOf(const SampleText& sample) {
    std::vector<int64_t> versions;
    for (const VersionSpan& span : sample.spans) {
      if (versions.empty() || versions.back() != span.version) versions.push_back(span.version);
    }
    return versions;
  }

  std::map<int64_t, Adapter> versions_;
  std::atomic<int64_t> active_{1};
};

TEST_F(InFlightTest, APinnedRequestEndsOnTheVersionThatItBeganWith) {
  Start(DefaultOptions(), 64);
  ActivateAt({{3, 2}});
  const SampleText sample =
      Wait(*Submit(Following(Prompt(5), 300, InFlightPolicy::kPin))).samples.at(0);
  EXPECT_EQ(VersionsOf(sample), std::vector<int64_t>{1});
  ExpectEverythingBack();
}

TEST_F(InFlightTest, ARequestThatFollowsGoesOverAndItsSpansReplay) {
  for (const InFlightPolicy policy : kBoth) {
    active_ = 1;
    Start(DefaultOptions(), 64);
    ActivateAt({{10, 2}, {50, 3}, {51, 4}});
    GenerateInput input = Following(Prompt(21), 400, policy);
    const SamplingParams sampling = input.sampling;
    const SampleText sample = Wait(*Submit(std::move(input))).samples.at(0);
    ASSERT_EQ(sample.tokens.size(), 400u);
    // Between steps 50 and 51 a step was on its way already.
    EXPECT_THAT(VersionsOf(sample), AnyOf(ElementsAre(1, 2, 3, 4), ElementsAre(1, 2, 4)));
    EXPECT_EQ(sample.tokens, Replay(Prompt(21), sample, policy, 0, sampling));
    EXPECT_EQ(sample.finish.usage.preemptions, 0u) << "a switch is no preemption";
    ExpectEverythingBack();
  }
}

TEST_F(InFlightTest, AnActivationBeforeTheRequestHasComeIsFollowedToo) {
  for (const InFlightPolicy policy : kBoth) {
    active_ = 1;
    Start(DefaultOptions(), 64);
    GenerateInput input = Following(Prompt(5), 8, policy);  // its lease is on version 1
    Activate(2);
    // Answered in the turn of the note or a later one: the request comes after it.
    absl::Notification noted;
    engine_->Resume({}, [&] { noted.Notify(); });
    noted.WaitForNotification();
    const SampleText sample = Wait(*Submit(std::move(input))).samples.at(0);
    EXPECT_EQ(VersionsOf(sample), std::vector<int64_t>{2});
  }
}

TEST_F(InFlightTest, ASampleWithoutTokensBeginsAnewUnderTheNewVersion) {
  for (const InFlightPolicy policy : kBoth) {
    active_ = 1;
    EngineOptions options = DefaultOptions();
    options.max_step_tokens = 4;
    Start(options, 64);
    ActivateAt({{10, 2}});  // of some 75 that the prompt takes
    GenerateInput input = Following(Prompt(300), 8, policy);
    const SamplingParams sampling = input.sampling;
    const SampleText sample = Wait(*Submit(std::move(input))).samples.at(0);
    EXPECT_EQ(VersionsOf(sample), std::vector<int64_t>{2});
    EXPECT_EQ(sample.tokens, Replay(Prompt(300), sample, policy, 0, sampling));
    ExpectEverythingBack();
  }
}

TEST_F(InFlightTest, PagesOfTwoVersionsAreNobodysPrefix) {
  Start(DefaultOptions(), 64);
  ActivateAt({{30, 2}});
  const SampleText first =
      Wait(*Submit(Following(Prompt(40), 200, InFlightPolicy::kSwitchKeepKv))).samples.at(0);
  ASSERT_EQ(VersionsOf(first), (std::vector<int64_t>{1, 2}));
  // The prompt and what was generated before the switch, but for the last token.
  uint32_t tokens_of_1 = 0;
  for (const VersionSpan& span : first.spans) {
    if (span.version == 1) tokens_of_1 += span.end - span.begin;
  }
  const uint32_t cached = 40 + tokens_of_1 - 1;
  std::vector<TokenId> all = Prompt(40);
  all.insert(all.end(), first.tokens.begin(), first.tokens.end());
  for (int64_t version : {1, 2}) {
    GenerateInput again = Input(all, 4, versions_.at(version));
    const SampleText expected = Expected(again, 0, 512);
    const SampleText sample = Wait(*Submit(std::move(again))).samples.at(0);
    EXPECT_EQ(sample.tokens, expected.tokens) << version;
    EXPECT_EQ(sample.finish.usage.cached_prompt_tokens, version == 1 ? cached : 0) << version;
  }
}

TEST_F(InFlightTest, AKeptVersionIsLeasedAsLongAsItsKeysAndValuesAreNeeded) {
  for (const InFlightPolicy policy : kBoth) {
    active_ = 1;
    Start(DefaultOptions(), 64);
    std::atomic<int> held = 0;
    runner_->on_step = [&, step = 0]() mutable {
      if (++step == 5) Activate(2);
      if (step == 10) held = leases_.held();
      return absl::OkStatus();
    };
    Wait(*Submit(Following(Prompt(5), 50, policy)));
    EXPECT_EQ(held, policy == InFlightPolicy::kSwitchKeepKv ? 2 : 1);
    ExpectEverythingBack();
  }
}

TEST_F(InFlightTest, WithoutAnActiveVersionARequestStaysWhereItIs) {
  Start(DefaultOptions(), 64);
  ActivateAt({{3, 0}});
  const SampleText sample =
      Wait(*Submit(Following(Prompt(5), 100, InFlightPolicy::kSwitchRecompute))).samples.at(0);
  EXPECT_EQ(VersionsOf(sample), std::vector<int64_t>{1});
  EXPECT_EQ(sample.tokens.size(), 100u);
}

// Activations, preemptions, prefixes, many samples, cancels, failed steps: whatever comes, spans
// replay and books balance.
TEST_F(InFlightTest, RandomActivationsReplayExactly) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    active_ = 1;
    EngineOptions options = DefaultOptions();
    options.max_step_tokens = 8 + below(60);
    const std::vector<int64_t> windows = RandomWindows(&random);
    Start(options, (24 + below(40)) * static_cast<int64_t>(windows.size()), 1 + below(2),
          /*chunk_pages=*/0, /*state_pages=*/0, windows);
    struct Running {
      std::vector<TokenId> prompt;
      InFlightPolicy policy;
      SamplingParams sampling;
      std::shared_ptr<TokenStream> stream;
      bool cancelled = false;
    };
    runner_->on_step = [this, steps = std::mt19937(seed + 1000)]() mutable {
      if (steps() % 8 == 0) Activate(1 + static_cast<int64_t>(steps() % 8));
      return absl::OkStatus();
    };
    std::vector<Running> running;
    for (int i = 0; i < 40; ++i) {
      const int64_t length = 1 + below(90);
      Running r;
      r.prompt = Prompt(length, 100 + below(3));
      r.policy = static_cast<InFlightPolicy>(below(3));
      GenerateInput input = Following(r.prompt, 1 + below(120), r.policy);
      input.n = 1 + below(3);
      input.sampling.temperature = 1;
      input.sampling.seed = random();
      input.priority = below(2);
      input.bypass_prefix_cache = below(4) == 0;
      for (int sample = below(3); sample > 0; --sample) {
        SampleText guess = Expected(input, sample, 512);
        guess.tokens[below(static_cast<int>(guess.tokens.size()))] = 5;
        input.drafts.push_back(std::move(guess.tokens));
      }
      r.sampling = input.sampling;
      r.stream = Submit(std::move(input));
      running.push_back(std::move(r));
      if (below(8) == 0) {
        Running& victim = running[below(static_cast<int>(running.size()))];
        victim.cancelled = true;
        Cancel(victim.stream);
      }
    }
    for (Running& r : running) {
      const Outcome outcome = Wait(*r.stream);
      if (r.cancelled) continue;
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      for (const auto& [index, sample] : outcome.samples) {
        ASSERT_EQ(sample.finish.reason, FinishReason::kLength);
        ASSERT_EQ(sample.tokens, Replay(r.prompt, sample, r.policy, index, r.sampling));
      }
    }
    ExpectEverythingBack();
  }
}

}  // namespace
}  // namespace dorad::engine
