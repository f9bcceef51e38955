// Token embedding of a mixed batch: y = c·g ⊙ (E[x] + s·B A[x]) (PEFT `DoraEmbeddingLayer`; LoRA:
// no g), with the model's factor c. Thread-safe.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "kernels/decoder/rows.h"
#include "kernels/dora/factors.h"

namespace dorad::kernels {

struct EmbedParams {
  StepRows rows;
  const __nv_bfloat16* weight = nullptr;  // [vocabulary, size], 16-byte aligned
  int32_t size = 0;
  float factor = 1.0f;
  // Of the embedding's module: a is [vocabulary, rank] (a token's row is contiguous), b [size,
  // ldb], g [size].
  AdapterTable adapters;
  int32_t module = 0;
  RowSegments segments;
  float* out = nullptr;  // [rows, size], 16-byte aligned
};

// Waits for all earlier kernels of the stream before it begins, and lets the next kernel start
// early.
cudaError_t Embed(const EmbedParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
