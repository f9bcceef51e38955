// The rows of any step on the device: StepBatch as arrays for the kernels. Owned by the runner and
// reused for every step. Confined to the engine thread.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/decoder/rows.h"
#include "kernels/dora/factors.h"
#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/adapter_slots.h"
#include "server/backends/cuda/array_writer.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/image_features.h"
#include "server/backends/cuda/kv_layout.h"
#include "server/engine/model_runner.h"
#include "server/engine/step_batch.h"

namespace dorad::cuda {

// Rows [begin, end) of a product use one adapter's factors (null, slot -1: the base model).
struct AdapterRange {
  const CudaAdapterWeights* weights = nullptr;
  int slot = -1;
  int64_t begin = 0;
  int64_t end = 0;
};

// The rows of a product and their adapters, on the host and on the device.
struct LinearRows {
  int64_t rows = 0;
  bool adapted = true;  // false: promises that no row has an adapter
  std::vector<AdapterRange> ranges;
  kernels::AdapterTable table;
  const CUtensorMap* maps = nullptr;  // of the table
  kernels::RowSegments segments;
  const kernels::RowSegment* range_segments = nullptr;  // device: `ranges`; null in decode graphs
};

// Rows that need logits, in pieces that are computed one after another.
struct LogitsBlock {
  absl::Span<const engine::WantedRow> wanted;
  const int32_t* row_indices = nullptr;  // device, of the step's rows; null: all of them, in order
  LinearRows linear;
};

// Whether any of the rows has an adapter.
bool IsAdapted(absl::Span<const engine::StepBatch::AdapterRows> rows);

// Assigns each adapter its slot; copies that fill slots are ordered with the stream's work.
absl::StatusOr<std::vector<AdapterRange>> ToRanges(
    absl::Span<const engine::StepBatch::AdapterRows> rows, AdapterSlots* slots,
    const Stream& stream);

// The most rows of a sequence in a decode graph, where attention computes each by itself. Longer
// runs are computed in tiles, which read common pages once anyway.
inline constexpr int64_t kMostRowsApart = 16;

// Whether attention should read pages once that neighbouring rows have in common: these rows see so
// many positions together, and an eighth of them more than once. groups: of layers.
bool SharesReads(const engine::StepBatch& batch, absl::Span<const engine::StepSequence> sequences,
                 int64_t groups, int64_t least_positions);

// What the rows of a model's steps have.
struct RowKinds {
  explicit RowKinds(const model::ModelConfig& model);

  KvLayout kv;                   // of their pages
  std::vector<int64_t> windows;  // of each group of layers (model::KvGroups)
  bool rotary = false;           // rotary positions
  bool bidirectional = false;    // rows of an image see each other
  int64_t state_pages = 0;       // of a sequence's recurrent state; 0: none

  // The most places that WritePages writes for one row of a sequence with so many blocks.
  int64_t PlacesOfRow(int64_t blocks) const;
};

// How many places WritePages writes for a sequence.
int64_t PlacesOf(const engine::StepSequence& sequence, const RowKinds& kinds);
// Writes the places of a sequence's pages and state from pages[*next] on. begin[group · stride],
// state, state_from: its elements of StepRows' and StepStates' arrays; the last two null without a
// recurrence.
void WritePages(const engine::StepSequence& sequence, const RowKinds& kinds, int32_t* pages,
                int32_t* next, int32_t* begin, int64_t stride, int32_t* state, int32_t* state_from);
// The same rows for each group of layers. stride: from one group's page_begin to the next.
std::vector<kernels::StepRows> ByGroup(const kernels::StepRows& rows, const RowKinds& kinds,
                                       int64_t stride);

// Steps in flight: a step's host buffers must stay while the step before is in flight.
inline constexpr int kStepsInFlight = 2;

// The sampled tokens of the last step.
struct SampledTokens {
  const int32_t* tokens = nullptr;  // device
  std::vector<int32_t> index;  // of each sequence's first token, in the caller's order of that step
};

// The placeholder for the first token of a sequence until kernels::FeedTokens has run: the
// token itself where it is known.
inline int32_t FedToken(const engine::StepSequence& sequence, const SampledTokens& previous) {
  return sequence.follows < 0 ? sequence.tokens[0] : -1 - previous.index[sequence.follows];
}

// Writes the kernels' description of the rows from their number and ranges.
void WriteSegments(LinearRows* linear, ArrayWriter& writer);

// Writes the rotary positions of `count` rows of a sequence from `position` on, three a row.
void WriteRotary(const engine::PromptImages* images, int64_t position, int64_t count, int32_t* to);

class DeviceBatch {
 public:
  // slots is borrowed. max_logits_rows: of one LogitsBlock.
  DeviceBatch(MemoryLedger* ledger, AdapterSlots* slots, int64_t max_logits_rows,
              const RowKinds& kinds)
      : ledger_(ledger), slots_(*slots), max_logits_rows_(max_logits_rows), kinds_(kinds) {}

  // Copies the step's arrays to the device, ordered with `stream`'s work, and feeds the tokens of
  // `previous`. REQUIRES: the work of the upload before the last has ended. Borrows `batch` until
  // the next upload.
  absl::Status Upload(const engine::StepBatch& batch,
                      absl::Span<const engine::StepSequence> sequences, const Stream& stream,
                      const SampledTokens& previous = {});

  // Of the last upload; the rows for each group of layers.
  std::vector<kernels::StepRows> rows() const { return ByGroup(rows_, kinds_, sequences_); }
  const LinearRows& linear() const { return linear_; }
  const std::vector<ImageRows>& images() const { return images_; }
  const std::vector<LogitsBlock>& samples() const { return samples_; }
  const std::vector<LogitsBlock>& scores() const { return scores_; }

 private:
  absl::Status MakeBlocks(absl::Span<const engine::WantedRow> rows,
                          absl::Span<const engine::StepSequence> sequences, const Stream& stream,
                          std::vector<LogitsBlock>* blocks);

  MemoryLedger* const ledger_;
  AdapterSlots& slots_;
  const int64_t max_logits_rows_;
  const RowKinds kinds_;
  struct Buffers {
    PinnedBuffer host;
    DeviceBuffer device;
  };
  std::array<Buffers, kStepsInFlight> buffers_;
  size_t next_ = 0;
  kernels::StepRows rows_;
  int64_t sequences_ = 0;
  LinearRows linear_;
  std::vector<ImageRows> images_;
  std::vector<LogitsBlock> samples_;
  std::vector<LogitsBlock> scores_;
};

}  // namespace dorad::cuda
