// A model without a model: the "keys and values" of a position are a hash of everything before it,
// kept in KV pages like the real ones. A wrong page, a stale prefix, a lost or repeated row change
// the tokens that come out, so tests of the scheduler see such faults.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/model_runner.h"

namespace dorad::engine {

inline constexpr TokenId kFakeVocab = 1000;

inline uint64_t FakeMix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15ull + b + 0x7F4A7C15ull;
  x ^= x >> 31;
  x *= 0xD6E8FEB86659FD93ull;
  return x ^ (x >> 29);
}

inline uint64_t FakeSeed(const adapter::LoadedAdapter* adapter) {
  return adapter == nullptr ? 1 : std::hash<std::string>()(adapter->digest());
}

inline uint64_t FakeHash(const adapter::LoadedAdapter* adapter, absl::Span<const TokenId> tokens) {
  uint64_t h = FakeSeed(adapter);
  for (TokenId token : tokens) h = FakeMix(h, static_cast<uint64_t>(token));
  return h;
}

inline TokenId FakeNext(uint64_t hash, const SamplingParams& sampling, uint32_t sample_index) {
  return static_cast<TokenId>(
      FakeMix(hash, sampling.temperature == 0 ? 0 : FakeMix(sampling.seed, sample_index)) %
      kFakeVocab);
}

inline float FakeLogprob(uint64_t hash, TokenId token) {
  return -static_cast<float>(FakeMix(hash, static_cast<uint64_t>(token)) % 10000) / 1000.0f;
}

class FakeModelRunner final : public ModelRunner {
 public:
  explicit FakeModelRunner(int64_t pages) : kv_(static_cast<size_t>(pages * kKvPageTokens), 0) {}

  int64_t kv_pages() const override { return static_cast<int64_t>(kv_.size()) / kKvPageTokens; }

  absl::StatusOr<std::vector<StepOutput>> Run(absl::Span<const StepSequence> sequences) override {
    if (on_step) {
      if (absl::Status status = on_step(sequences); !status.ok()) return status;
    }
    std::vector<StepOutput> outputs(sequences.size());
    for (size_t i = 0; i < sequences.size(); ++i) RunOne(sequences[i], &outputs[i]);
    return outputs;
  }

  // Called before each step; a failure fails the step.
  std::function<absl::Status(absl::Span<const StepSequence>)> on_step;
  // This token's appearance in a row makes its logits non-finite.
  TokenId poison = -1;

 private:
  uint64_t& At(const StepSequence& s, int64_t position) {
    return kv_[s.pages[position / kKvPageTokens] * kKvPageTokens + position % kKvPageTokens];
  }

  void RunOne(const StepSequence& s, StepOutput* output) {
    const int64_t count = static_cast<int64_t>(s.tokens.size());
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = s.position + i;
      const uint64_t before = position == 0 ? FakeSeed(s.adapter) : At(s, position - 1);
      const uint64_t hash = FakeMix(before, static_cast<uint64_t>(s.tokens[i]));
      At(s, position) = hash;
      if (s.tokens[i] == poison) output->finite = false;
      if (s.score != nullptr) {
        output->logprobs.logprobs.push_back(FakeLogprob(hash, s.score->targets[i]));
      }
    }
    if (s.sample == nullptr || !output->finite) return;
    const uint64_t hash = At(s, s.position + count - 1);
    output->token = FakeNext(hash, s.sample->sampling, s.sample->sample_index);
    const auto banned = [&](TokenId id) {
      return std::find(s.sample->banned.begin(), s.sample->banned.end(), id) !=
             s.sample->banned.end();
    };
    while (banned(output->token)) output->token = (output->token + 1) % kFakeVocab;
    if (s.sample->logprobs->mode != LogprobMode::kNone) {
      output->logprobs.logprobs.push_back(FakeLogprob(hash, output->token));
    }
  }

  std::vector<uint64_t> kv_;
};

}  // namespace dorad::engine
