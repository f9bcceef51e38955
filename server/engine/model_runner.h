// What the engine needs of a model: one forward pass over the rows of many sequences. The seam
// between scheduling (no torch) and computing, and the place where tests put a fake.
// Confined to the engine thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/adapter/version.h"
#include "server/engine/types.h"

namespace dorad::engine {

// Tokens of one KV page, on every backend.
inline constexpr int64_t kKvPageTokens = 16;

// How the token after a sequence's last row is sampled.
struct SampleWant {
  SamplingParams sampling;
  uint32_t sample_index = 0;
  // Absolute position of the token to sample: with seed and sample_index the key of its draw.
  int64_t position = 0;
  absl::Span<const TokenId> banned;  // see ops::SampleSpec
  const LogprobParams* logprobs = nullptr;
};

// Log-probabilities of given tokens: row i of the chunk predicts targets[i].
struct ScoreWant {
  absl::Span<const TokenId> targets;
  float temperature = 1.0f;
  int32_t top_k = 0;
  absl::Span<const TokenId> chosen_ids;
};

// The rows of one sequence in a step. Spans are valid for the call.
struct StepSequence {
  absl::Span<const TokenId> tokens;
  int64_t position = 0;                             // of tokens[0]
  absl::Span<const int32_t> pages;                  // page of position p: pages[p / kKvPageTokens]
  const adapter::LoadedAdapter* adapter = nullptr;  // nullptr: base
  // At most one of the two; neither: the rows only fill the KV cache.
  const SampleWant* sample = nullptr;
  const ScoreWant* score = nullptr;
};

struct StepOutput {
  TokenId token = -1;  // with sample
  bool finite = true;  // false: non-finite logits, no token and no log-probabilities
  Logprobs logprobs;   // one position with sample, all rows with score
};

class ModelRunner {
 public:
  virtual ~ModelRunner() = default;
  // Pages of the KV cache, ids [0, kv_pages()).
  virtual int64_t kv_pages() const = 0;
  // One output for each sequence, in order. A failure fails every sequence of the step; the KV
  // pages that it wrote are undefined.
  virtual absl::StatusOr<std::vector<StepOutput>> Run(absl::Span<const StepSequence> sequences) = 0;
};

}  // namespace dorad::engine
