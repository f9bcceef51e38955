// The engine's view of a model: forward passes over the rows of many sequences. The seam between
// scheduling (no torch) and computing; tests put a fake here.
//
// A step has two calls: Begin, and later Finish for its outputs. A runner on another device (a GPU)
// accepts the next step while it computes the last one, so that the engine schedules and delivers
// meanwhile; a runner on the engine's thread accepts one at a time. Confined to the engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/adapter/registry/version.h"
#include "server/engine/images.h"
#include "server/engine/types.h"

namespace dorad::engine {

// Tokens of one KV page, on every backend: of a block of positions.
inline constexpr int64_t kKvPageTokens = 16;

// The first block that a row at `position` sees through a window. window 0: it sees all positions.
inline int64_t FirstBlockSeen(int64_t window, int64_t position) {
  return window > 0 && position >= window ? (position - window + 1) / kKvPageTokens : 0;
}

// The most states of a recurrence that a sequence holds: the one that it read, one for the cache,
// and its own.
inline constexpr int64_t kMostStates = 3;

// A token of a sequence: how often it was generated, and whether the prompt has it.
struct TokenUse {
  static constexpr uint32_t kInPrompt = 1;
  static constexpr uint32_t kGenerated = 2;

  TokenId id = 0;
  uint32_t count = 0;  // kGenerated for each occurrence, kInPrompt once
};

// `token` is banned if the token that StepSequence::follows leaves open is `after`.
struct ConditionalBan {
  TokenId after = 0;
  TokenId token = 0;
};

// How the token after a row is sampled.
struct SampleWant {
  SamplingParams sampling;
  uint32_t sample_index = 0;
  // Absolute position of the token to sample: the key of its draw with seed and sample_index.
  int64_t position = 0;
  absl::Span<const TokenId> banned;  // see ops::SampleSpec
  // The rest of the bans where StepSequence::follows leaves a token open.
  absl::Span<const ConditionalBan> conditional_bans;
  const LogitParams* logits = nullptr;  // nullptr: the logits stay as they are
  // With penalties: all distinct tokens so far, without the one that `follows` leaves open.
  absl::Span<const TokenUse> uses;
  const LogprobParams* logprobs = nullptr;
};

// Log-probabilities of given tokens: row i of the chunk predicts targets[i].
struct ScoreWant {
  absl::Span<const TokenId> targets;
  float temperature = 1.0f;
  int32_t top_k = 0;
  absl::Span<const TokenId> chosen_ids;
};

// The rows of one sequence in a step, at least one, or another sequence's last row. Spans and
// pointers are valid for the call of Begin; the adapter until the step has finished.
struct StepSequence {
  static constexpr TokenId kUnknown = -1;
  absl::Span<const TokenId> tokens;  // below Image::kNoToken: an image's
  // >= 0: the first token is the first sample of the sequence with this index in the last step,
  // which has not finished; tokens[0] is kUnknown.
  int32_t follows = -1;
  // >= 0: there are no tokens. The sequence samples from the last row of the sequence with this
  // index in the step, whose tokens end as its own do, under the same version.
  int32_t row_of = -1;
  int64_t position = 0;  // of tokens[0]
  // The page of position p for the layers of group g: pages[p / kKvPageTokens * groups + g]. -1: no
  // row sees it.
  absl::Span<const int32_t> pages;
  // A page of each group whose keys and values are copied to that of `position` before the step's
  // rows are computed. The step writes to neither's copied positions. Empty: none.
  absl::Span<const int32_t> copy_from;
  // Of a model with a recurrence: the pages for the state after the rows, and those with the state
  // before them. Empty state_from: the same pages; at position 0 the state is zeros.
  absl::Span<const int32_t> state;
  absl::Span<const int32_t> state_from;
  const adapter::LoadedAdapter* adapter = nullptr;  // nullptr: base
  const PromptImages* images = nullptr;             // nullptr: none
  // One for each image, those of the rows' images are set. They outlive the step.
  absl::Span<const std::shared_ptr<const ImageFeatures>> features;
  // Of the last rows, in order. Several: each row's token is a guess of the row's before it, and
  // the engine drops what comes after a wrong one. At most one of the two; neither: the rows only
  // fill the KV cache.
  absl::Span<const SampleWant> samples;
  const ScoreWant* score = nullptr;
};

struct StepOutput {
  static constexpr TokenId kNotFinite = -1;

  std::vector<TokenId> tokens;  // one for each sample; kNotFinite: its row's logits are not finite
  bool finite = true;           // all logits of a score
  Logprobs logprobs;            // one position for each sample, all rows with score
};

// The KV cache's memory in chunks. Single chunks can be unmapped and mapped; addresses stay. All
// are mapped at first. Owned by the runner; confined to the engine thread.
class KvChunks {
 public:
  virtual ~KvChunks() = default;
  // Pages of one chunk, a power of two; page p lies in chunk (p + lead()) / pages().
  virtual int64_t pages() const = 0;
  virtual int64_t lead() const = 0;
  virtual int64_t bytes() const = 0;
  // Releases the memory and loses its contents. REQUIRES: it is mapped, is not the first one, and
  // no step that uses its pages has begun.
  virtual void Unmap(int32_t chunk) = 0;
  // Steps may have begun. RESOURCE_EXHAUSTED (OUT_OF_MEMORY): no memory to spare.
  virtual absl::Status Map(int32_t chunk) = 0;
};

class ModelRunner {
 public:
  virtual ~ModelRunner() = default;
  // Pages of the KV cache, ids [0, kv_pages()).
  virtual int64_t kv_pages() const = 0;
  // Layers with keys and values are in groups: a page has those of one group's layers. Of each
  // group, the last positions that a row sees, its own included; 0: all.
  virtual std::vector<int64_t> windows() const { return {0}; }
  // Of them, those of a sequence's state of a recurrence; 0: the model has none.
  virtual int64_t state_pages() const { return 0; }
  // nullptr: only sleep releases the cache's memory.
  virtual KvChunks* kv_chunks() { return nullptr; }
  // The limit of steps in flight: 1 or 2. REQUIRES of Begin: fewer are in flight.
  virtual int max_steps_in_flight() const = 0;
  // Begins a step. Steps are computed in order: a later step may use pages that an earlier one
  // still reads and writes. A failure fails every sequence of the step, which has then not begun.
  virtual absl::Status Begin(absl::Span<const StepSequence> sequences) = 0;
  // Waits for the oldest step. One output for each of its sequences, in order; the outputs of later
  // steps are undefined for a sequence whose logits were not finite. A failure fails every sequence
  // of this step and of all later ones; the KV pages that they wrote are undefined. REQUIRES: a
  // step is in flight.
  virtual absl::StatusOr<std::vector<StepOutput>> Finish() = 0;

  // --- Images. Only of a model with a tower.

  // Whether the adapter changes the features of images.
  virtual bool ChangesImages(const adapter::LoadedAdapter& /*adapter*/) const { return false; }
  // Computes features of the first one or more of the images under an adapter (nullptr: base), or a
  // piece of them, in order with the steps. Returns those of the first images, as many as are
  // complete; none: another call is needed. Pieces are kept for a next call with the same first
  // image and adapter, any other drops them. alone: no step is in flight, so that the call may take
  // as long as a large step; otherwise it takes about a millisecond, if the runner has pieces.
  // UNIMPLEMENTED: the runner has no tower.
  virtual absl::StatusOr<std::vector<std::shared_ptr<const ImageFeatures>>> EncodeImages(
      absl::Span<const Image* const> /*images*/, const adapter::LoadedAdapter* /*adapter*/,
      bool /*alone*/) {
    return absl::UnimplementedError("this runner has no vision tower");
  }

  // --- Sleeping. REQUIRES: no step has begun.

  // Releases the KV cache's memory, if another process can use it; returns the bytes. Unmapped
  // chunks stay unmapped. RestoreKv restores the contents of `keep`; other pages are undefined
  // then. After a failure nothing has changed.
  virtual absl::StatusOr<int64_t> ReleaseKv(absl::Span<const int32_t> keep) = 0;
  // RESOURCE_EXHAUSTED (OUT_OF_MEMORY): it stays released. REQUIRES: it is released.
  virtual absl::Status RestoreKv() = 0;
};

}  // namespace dorad::engine
