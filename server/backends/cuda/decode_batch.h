// The rows of a step in which every sequence decodes, at fixed addresses for captured graphs: one
// row each, or a few with guesses. A batch is padded to one of a few sizes; padded rows compute on
// a page of their own. Owned by the runner and reused for every step. Confined to the engine
// thread.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/backends/cuda/batch.h"
#include "server/backends/cuda/device.h"
#include "server/engine/step_batch.h"

namespace dorad::cuda {

class DecodeBatch {
 public:
  // The sizes that graphs are captured for, ascending.
  static constexpr std::array<int, 19> kSizes = {1,  2,  4,  8,   16,  24,  32,  40,  48, 56,
                                                 64, 80, 96, 112, 128, 160, 192, 224, 256};

  // slots is borrowed. blocks_per_sequence: of positions with keys and values. Padded rows write to
  // the spare page and have no state.
  static absl::StatusOr<DecodeBatch> Create(AdapterSlots* slots, int64_t blocks_per_sequence,
                                            const RowKinds& kinds, MemoryLedger* ledger);

  // Whether every row samples a token of text, few of each sequence, in a batch that is small
  // enough.
  static bool Takes(absl::Span<const engine::StepSequence> sequences);
  // The smallest of kSizes that is at least `rows`.
  static int SizeFor(int64_t rows);

  // Fills the largest batch with padded rows.
  absl::Status Fill(const Stream& stream);
  // Copies the step's arrays to the device, ordered with `stream`'s work, and feeds the tokens of
  // `previous`. REQUIRES: Takes, and the work of the upload before the last has ended.
  absl::Status Upload(const engine::StepBatch& batch,
                      absl::Span<const engine::StepSequence> sequences,
                      const SampledTokens& previous, const Stream& stream);

  // The arrays of a pass over `size` rows, for each group of layers. The same for every step.
  std::vector<kernels::StepRows> rows(int size) const;
  LinearRows linear(int size, bool adapted) const;

 private:
  static constexpr int kMaxRows = kSizes.back();

  absl::Status UploadPadded(const engine::StepBatch& batch,
                            absl::Span<const engine::StepSequence> sequences, int64_t size,
                            const SampledTokens& previous, const Stream& stream);

  DecodeBatch(AdapterSlots* slots, const RowKinds& kinds) : slots_(slots), kinds_(kinds) {}
  bool has_states() const { return kinds_.state_pages > 0; }

  AdapterSlots* slots_;
  RowKinds kinds_;
  std::array<PinnedBuffer, kStepsInFlight> hosts_;
  size_t next_ = 0;
  DeviceBuffer device_;
  // Offsets in all of them.
  int64_t ids_at_ = 0, positions_at_ = 0, owners_at_ = 0, page_begin_at_ = 0;
  int64_t segments_at_ = 0, count_at_ = 0, rotary_at_ = 0, pages_at_ = 0;
  int64_t row_begin_at_ = 0, state_at_ = 0, state_from_at_ = 0;
};

}  // namespace dorad::cuda
