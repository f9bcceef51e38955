// What the engine needs of a model: forward passes over the rows of many sequences. The seam
// between scheduling (no torch) and computing, and the place where tests put a fake.
//
// A step has two ends: the engine begins it and asks for its outputs later. A runner that computes
// elsewhere (a GPU) takes the next step while the last one is being computed, so that the engine
// schedules and delivers meanwhile; one that computes on the engine's thread takes one at a time.
// Confined to the engine thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/adapter/registry/version.h"
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

// The rows of one sequence in a step. Spans and pointers are valid for the call of Begin; the
// adapter until the step has finished.
struct StepSequence {
  absl::Span<const TokenId> tokens;
  // >= 0: the one token is what the sequence of this index sampled in the step that began last and
  // has not finished; tokens[0] says nothing.
  int32_t follows = -1;
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

// The KV cache's memory in chunks, which go and come one by one while addresses stay. All are there
// at first. Owned by the runner; confined to the engine thread.
class KvChunks {
 public:
  virtual ~KvChunks() = default;
  // Of one chunk, a power of two; page p lies in chunk (p + lead()) / pages().
  virtual int64_t pages() const = 0;
  virtual int64_t lead() const = 0;
  virtual int64_t bytes() const = 0;
  // Gives the memory back; what it held is lost. REQUIRES: it is there, is not the first one, and
  // no step has begun that uses its pages.
  virtual void Unmap(int32_t chunk) = 0;
  // Steps may have begun. RESOURCE_EXHAUSTED (OUT_OF_MEMORY): others need the memory more.
  virtual absl::Status Map(int32_t chunk) = 0;
};

class ModelRunner {
 public:
  virtual ~ModelRunner() = default;
  // Pages of the KV cache, ids [0, kv_pages()).
  virtual int64_t kv_pages() const = 0;
  // nullptr: the cache's memory stays, but for sleep.
  virtual KvChunks* kv_chunks() { return nullptr; }
  // How many steps may have begun and not finished: 1 or 2. REQUIRES of Begin: fewer have.
  virtual int max_steps_in_flight() const = 0;
  // Begins a step. Steps are computed one after another in the order in which they begin: one that
  // begins later may use pages that an earlier one still reads and writes. A failure fails every
  // sequence of the step, which then has not begun.
  virtual absl::Status Begin(absl::Span<const StepSequence> sequences) = 0;
  // Waits for the oldest step. One output for each of its sequences, in order; what follows a row
  // that was not finite is undefined. A failure fails every sequence of the step and of the steps
  // that began behind it; the KV pages that they wrote are undefined. REQUIRES: one has begun.
  virtual absl::StatusOr<std::vector<StepOutput>> Finish() = 0;

  // --- Sleeping. REQUIRES: no step has begun.

  // Gives the KV cache's memory back, as far as there is somebody to give it to; returns how much.
  // Chunks that have gone are gone before and after.
  // What `keep` holds comes back with RestoreKv, the other pages are undefined then. After a
  // failure nothing has changed.
  virtual absl::StatusOr<int64_t> ReleaseKv(absl::Span<const int32_t> keep) = 0;
  // RESOURCE_EXHAUSTED (OUT_OF_MEMORY): it is still released. REQUIRES: it is.
  virtual absl::Status RestoreKv() = 0;
};

}  // namespace dorad::engine
