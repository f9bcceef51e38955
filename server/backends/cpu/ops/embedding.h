// Token embedding with adapters: y = c·g ⊙ (E[x] + s·B A[x]) (PEFT `DoraEmbeddingLayer`; LoRA: no
// g), with the model's factor c (Gemma; others: 1).
// Thread-safe. Row independence as in dora_linear.h.
// Shape suffixes: T tokens, V vocabulary, D embedding dimension, R rank.
#pragma once

#include <ATen/core/Tensor.h>

#include "absl/types/span.h"
#include "server/backends/cpu/ops/dora_linear.h"

namespace dorad::ops {

// token_ids_T: int32 [T], each in [0, V). weight_VD: fp32 or bf16. In the segments' factors a_RI is
// lora_embedding_A *transposed to [V, R]* (so that a token's row is contiguous), b_OR is [D, R] and
// g_O is [D]. Returns [T, D] fp32.
at::Tensor Embed(const at::Tensor& token_ids_T, const at::Tensor& weight_VD, float factor,
                 absl::Span<const RowSegment> segments);

}  // namespace dorad::ops
