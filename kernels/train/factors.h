// Converts LoRA factors to the type of a layer's products, and wider ones to the norm's terms.
// Functions only enqueue work on the stream; they are thread-safe and can be captured in graphs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/dora/compose.h"

namespace dorad::train {

// The factors of one layer: a [rank, in] and b [out, rank], contiguous, of `from`. Outputs are of
// `to`, contiguous; nullptr: not wanted.
struct LayerFactors {
  const void* a = nullptr;
  const void* b = nullptr;
  void* rounded_a = nullptr;  // [rank, in]
  // One term: [rank, in] and [out, rank], rounded. Three terms: [3, rank, in] and [out, 3, rank],
  // whose product over 3·rank is b @ a to within 2^-16 of it in bf16: with a = a1 + a2 and
  // b = b1 + b2 it is b2·a1 + b1·a1 + b1·a2. a's first term and b's second are the rounded ones.
  void* to_a = nullptr;
  void* to_b = nullptr;
  int64_t rank = 0;
  int64_t out = 0;
};

// Layers of one launch.
constexpr int kMostLayers = 8;

struct FactorsParams {
  LayerFactors layers[kMostLayers];
  int count = 0;
  int64_t in = 0;
  int terms = 1;
  kernels::FloatType from = kernels::FloatType::kF32;
  kernels::FloatType to = kernels::FloatType::kBF16;  // bf16 or fp16, or `from` with one term
};

// cudaErrorInvalidValue: negative sizes, no or more than kMostLayers layers, other terms than 1 and
// 3, or an unsupported type.
cudaError_t ConvertFactors(const FactorsParams& params, cudaStream_t stream);

// cudaSuccess if the library has code for the current device: its kernels are all compiled for the
// same architectures.
cudaError_t CheckDevice();

}  // namespace dorad::train
