// The one decoder of all supported families: a plain function of weights and a batch of rows.
// Differences between families are data: LayerSpec says what a layer computes.
// Immutable after construction; Forward is thread-safe for distinct KV pages.
//
// Shape suffixes: T rows, D hidden size, H query heads, K kv heads, N rows with logits, V
// vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/backends/cpu/adapter_weights.h"
#include "server/backends/cpu/model.h"
#include "server/backends/cpu/ops/attention.h"
#include "server/model/delta_config.h"
#include "server/model/kv_groups.h"

namespace dorad::model {

// Rows [begin, end) use `weights` (nullptr: the base model). Ascending, covering all rows.
struct AdapterRows {
  const adapter::CpuAdapterWeights* weights = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

// Rows [begin, begin + count) are tokens of an image, from its token `first` on.
struct ImageRows {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t first = 0;
  // [1 + n, tokens, D] fp32: in place of the embeddings, then added after each of n first layers.
  at::Tensor features;
};

// Of a sequence, with a recurrence: engine::StepSequence::state and state_from.
struct StatePages {
  absl::Span<const int32_t> to;
  absl::Span<const int32_t> from;  // empty: zeros
};

struct DecoderBatch {
  at::Tensor token_ids_T;  // int32; any valid id in rows of images
  // For each group of layers (KvGroups), with the pages of that group.
  absl::Span<const std::vector<ops::SequenceRows>> sequences;
  absl::Span<const StatePages> states;  // of the sequences; empty without a recurrence
  absl::Span<const AdapterRows> adapters;
  absl::Span<const ImageRows> images;
};

class Decoder {
 public:
  // model is borrowed. max_positions bounds the rotary tables.
  Decoder(const LoadedModel& model, int64_t max_positions);

  // One cache for each layer of a page.
  std::vector<ops::PagedKv> AllocateKv(int64_t pages) const;
  const DeltaStateLayout& state_layout() const { return state_layout_; }
  const KvGroups& groups() const { return groups_; }

  // Writes keys and values of all rows into kv and returns the last layer's residual stream,
  // [T, D] fp32, before the final norm.
  at::Tensor Forward(const DecoderBatch& batch, std::vector<ops::PagedKv>& kv) const;

  // Final norm and head of some rows. hidden_ND: rows of Forward's result. Returns [N, V] fp32.
  at::Tensor Logits(const at::Tensor& hidden_ND, absl::Span<const AdapterRows> adapters) const;

 private:
  class Pass;
  const LoadedModel& model_;
  const KvGroups groups_;
  std::vector<ops::RopeTable> ropes_;  // as ModelConfig::ropes
  const DeltaStateLayout state_layout_;
};

}  // namespace dorad::model
