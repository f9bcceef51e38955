// An engine over a model that is none (fake_model_runner.h), and what its clients would receive.
#pragma once

#include <bit>
#include <random>

#include "server/engine/engine.h"
#include "server/platform/metrics/metrics.h"
#include "tests/unit/support/fake_model_runner.h"
#include "tests/unit/support/test.h"

namespace dorad::engine {

inline constexpr TokenId kEos = 7;

inline std::shared_ptr<const adapter::LoadedAdapter> MakeAdapter(const std::string& name,
                                                                 int64_t version) {
  adapter::AdapterSummary summary;
  summary.digest = name + "#" + std::to_string(version);
  return std::make_shared<adapter::LoadedAdapter>(name, version, summary);
}

// Counts the leases that tests hand out.
class Leases {
 public:
  adapter::AdapterLease Take(std::shared_ptr<const adapter::LoadedAdapter> adapter) {
    if (adapter == nullptr) return {};
    ++held_;
    return adapter::AdapterLease(std::move(adapter), [this] { --held_; });
  }
  int held() const { return held_; }

 private:
  std::atomic<int> held_{0};
};

struct SampleText {
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;
  std::vector<float> prompt_logprobs;
  Finish finish;
  std::vector<VersionSpan> spans;
};

// What a client would have received.
struct Outcome {
  absl::Status status;
  std::map<int, SampleText> samples;
};

class EngineTest : public ::testing::Test {
 protected:
  static EngineOptions DefaultOptions() {
    EngineOptions options;
    options.max_step_tokens = 64;
    options.max_running_sequences = 16;
    options.vocab_size = kFakeVocab;
    options.context_length = 512;
    options.eos_token_ids = {kEos};
    return options;
  }

  void Start(EngineOptions options, int64_t pages, int max_steps_in_flight = 2,
             int64_t chunk_pages = 0, int64_t state_pages = 0, std::vector<int64_t> windows = {0}) {
    auto runner = std::make_unique<FakeModelRunner>(pages, max_steps_in_flight, chunk_pages,
                                                    state_pages, std::move(windows));
    runner_ = runner.get();
    engine_ = std::make_unique<Engine>(options, std::move(runner), &metrics_);
  }

  GenerateInput Input(std::vector<TokenId> prompt, int64_t max_tokens,
                      std::shared_ptr<const adapter::LoadedAdapter> adapter = nullptr) {
    GenerateInput input;
    input.request_id = "r" + std::to_string(next_id_++);
    input.prompt = std::move(prompt);
    if (adapter != nullptr) input.adapter.name = adapter->name();
    input.lease = leases_.Take(std::move(adapter));
    input.sampling.temperature = 0;
    input.stop.max_tokens = max_tokens;
    input.stop.ignore_eos = true;
    input.logprobs.mode = LogprobMode::kRaw;
    return input;
  }

  std::shared_ptr<TokenStream> Submit(GenerateInput input) {
    auto stream = std::make_shared<TokenStream>(/*final_only=*/false);
    const absl::StatusOr<RequestHandle> handle = engine_->Submit(std::move(input), stream);
    if (absl::IsDeadlineExceeded(handle.status())) {
      stream->Close(handle.status());  // a busy machine: it has passed before the admission
    } else {
      EXPECT_TRUE(handle.ok()) << handle.status();
    }
    absl::MutexLock lock(&handles_mu_);
    handles_[stream.get()] = handle.value_or(RequestHandle());
    return stream;
  }

  // Of what Submit returned. Any thread.
  void Cancel(const std::shared_ptr<TokenStream>& stream) {
    absl::MutexLock lock(&handles_mu_);
    engine_->Cancel(handles_.at(stream.get()));
  }

  static Outcome Wait(TokenStream& stream) {
    Outcome outcome;
    const absl::Time limit = absl::Now() + absl::Seconds(60);
    while (absl::Now() < limit) {
      while (std::optional<SampleDelta> delta = stream.Take()) {
        SampleText& sample = outcome.samples[delta->sample_index];
        EXPECT_EQ(sample.finish.reason, FinishReason::kNone) << "a delta after the last";
        sample.tokens.insert(sample.tokens.end(), delta->token_ids.begin(), delta->token_ids.end());
        sample.logprobs.insert(sample.logprobs.end(), delta->logprobs.logprobs.begin(),
                               delta->logprobs.logprobs.end());
        if (const std::vector<float>& scores = delta->prompt_logprobs.logprobs; !scores.empty()) {
          EXPECT_EQ(delta->sample_index, 0);
          EXPECT_TRUE(sample.prompt_logprobs.empty()) << "they come once";
          EXPECT_EQ(sample.tokens.size(), delta->token_ids.size()) << "with the first token";
          sample.prompt_logprobs = scores;
        }
        sample.finish = delta->finish;
        for (const VersionSpan& span : delta->spans) sample.spans.push_back(span);
      }
      if (std::optional<absl::Status> ended = stream.Ended()) {
        outcome.status = *ended;
        return outcome;
      }
      absl::SleepFor(absl::Microseconds(100));
    }
    outcome.status = absl::DeadlineExceededError("the test waited too long");
    return outcome;
  }

  // What the fake model says, computed without engine, pages or batches.
  static SampleText Expected(const GenerateInput& input, uint32_t sample, int64_t max_length,
                             bool stop_at_eos = false) {
    SampleText expected;
    std::vector<TokenId> tokens = input.prompt;
    for (const PlacedImage& place : input.images) {
      const adapter::LoadedAdapter* const adapter = input.lease.get();
      const FakeFeatures features(*place.image, FakeChangesImages(adapter) ? adapter : nullptr);
      std::fill(tokens.begin() + place.begin, tokens.begin() + place.end(), features.token);
    }
    while (static_cast<int64_t>(expected.tokens.size()) < input.stop.max_tokens &&
           static_cast<int64_t>(tokens.size()) < max_length) {
      const uint64_t hash = FakeHash(input.lease.get(), tokens);
      const TokenId token = FakeNext(hash, input.sampling, sample);
      expected.tokens.push_back(token);
      expected.logprobs.push_back(FakeLogprob(hash, token));
      tokens.push_back(token);
      if (stop_at_eos && token == kEos) break;
    }
    return expected;
  }

  // The fake model's log-probabilities of a prompt's tokens.
  static std::vector<float> ExpectedScores(const adapter::LoadedAdapter* adapter,
                                           const std::vector<TokenId>& prompt) {
    std::vector<float> expected = {std::numeric_limits<float>::quiet_NaN()};
    for (size_t t = 1; t < prompt.size(); ++t) {
      const uint64_t hash = FakeHash(adapter, absl::MakeConstSpan(prompt).first(t));
      expected.push_back(FakeLogprob(hash, prompt[t]));
    }
    return expected;
  }

  // NaN equals NaN.
  static std::vector<uint32_t> Bits(const std::vector<float>& values) {
    std::vector<uint32_t> bits;
    for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
    return bits;
  }

  void ExpectEverythingBack() {
    const absl::Time limit = absl::Now() + absl::Seconds(10);
    while (!engine_->idle() && absl::Now() < limit) absl::SleepFor(absl::Milliseconds(1));
    absl::Notification settled;  // an answer comes with current counts
    engine_->Abort({}, "", [&](int) { settled.Notify(); });
    settled.WaitForNotification();
    const EngineStats stats = engine_->stats();
    EXPECT_EQ(stats.kv_pages_used, 0);
    EXPECT_EQ(stats.running_sequences, 0);
    EXPECT_EQ(stats.queued_requests, 0);
    EXPECT_EQ(stats.queued_tokens, 0);
    EXPECT_EQ(leases_.held(), 0);
    const AdaptersInUse in_use = engine_->adapters_in_use();
    EXPECT_EQ(in_use.running.size() + in_use.waiting.size(), 0u);
  }

  Metrics metrics_{Metrics::Info{"test", "fake", "fake", "cpu", "fp32"}};
  Leases leases_;
  FakeModelRunner* runner_ = nullptr;
  std::unique_ptr<Engine> engine_;
  int next_id_ = 0;

 private:
  absl::Mutex handles_mu_;
  std::map<const TokenStream*, RequestHandle> handles_ ABSL_GUARDED_BY(handles_mu_);
};

// Of one to three groups of layers.
inline std::vector<int64_t> RandomWindows(std::mt19937* random) {
  const auto window = static_cast<int64_t>(2 + (*random)() % 60);
  const std::vector<int64_t> choices[] = {{0}, {0, window}, {window}, {0, window, window}};
  return choices[(*random)() % 4];
}

inline std::vector<TokenId> Prompt(int64_t length, TokenId first = 100) {
  std::vector<TokenId> prompt;
  for (int64_t i = 0; i < length; ++i) prompt.push_back((first + i * 31) % kFakeVocab);
  return prompt;
}

}  // namespace dorad::engine
