// Row norms ||W + s·B·A|| without the dense product (paper, Algorithm 1), and g = m / norm.
//
//   norm² = ||W||² + 2s·Σ_l B∘(W Aᵀ) + s²·Σ_l (B G)∘B,   G = A Aᵀ
//
// W and A are walked in chunks of d_in (multiples of 64) whose fp32 transients stay under a byte
// budget. fp32 products; s = 0 skips the cross and Gram terms; a negative radicand becomes 0; NaN
// stays NaN. ||W||² depends on the base weight alone and is computed once (BaseSquaredNorms).
// Functions are thread-safe.
//
// Shape suffixes: I in_features, O out_features, R rank, V vocabulary, D embedding dimension.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dorad::ops {

struct NormOptions {
  // Upper bound of the transient fp32 memory of one call, in bytes. At least one 64-wide chunk is
  // always processed, whatever the budget.
  int64_t chunk_budget_bytes = 64 << 20;
};

// Orientation of the norm over a weight stored as [rows, cols].
//   kRows  one norm per row over the columns (linear: per output feature).
//   kCols  one norm per column over the rows (embedding [V, D]: per embedding dimension; PEFT
//          `DoraEmbeddingLayer`: W is used as [D, V]).
enum class NormAxis { kRows, kCols };

// ||W||² along the axis, fp32 [rows] or [cols]. weight: fp32 or bf16, contiguous, 2-D.
at::Tensor BaseSquaredNorms(const at::Tensor& weight, NormAxis axis, const NormOptions& options);

// ||W + s·B·A|| along the axis, fp32, unrounded.
//   kRows  weight [O, I], a [R, I], b [O, R]; result [O].
//   kCols  weight [V, D], a [R, V] (lora_embedding_A), b [D, R] (lora_embedding_B); result [D].
// base_squared: BaseSquaredNorms of the same weight and axis.
at::Tensor FactoredNorms(const at::Tensor& weight, const at::Tensor& base_squared,
                         const at::Tensor& a, const at::Tensor& b, double scale, NormAxis axis,
                         const NormOptions& options);

// g = m / max(norm, eps), fp32; eps is 1e-12 for fp32 base weights and 1e-6 for bf16/fp16 ones.
// NaN in norm or m stays NaN.
at::Tensor MagnitudeScale(const at::Tensor& magnitude, const at::Tensor& norms, double eps);

// The eps of MagnitudeScale for a base weight of that dtype.
double NormEpsilon(at::ScalarType weight_dtype);

}  // namespace dorad::ops
