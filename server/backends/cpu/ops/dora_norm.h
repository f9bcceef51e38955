// Row norms ||W + s·B·A|| without the dense product (paper, Algorithm 1), and g = m / norm.
//
//   norm² = ||W||² + 2s·Σ_l B∘(W Aᵀ) + s²·Σ_l (B G)∘B,   G = A Aᵀ
//
// The rows of the result are independent given G: blocks of them are walked one by one, each in
// chunks of d_in (multiples of 64), so that everything a call allocates stays under a byte budget.
// fp32 products, summed over a row in double; s = 0 skips the cross and Gram terms; NaN stays NaN.
// Rows whose terms nearly cancel have lost digits: they are added in double and squared afterwards.
// ||W||² depends on the base weight alone and is computed once (BaseSquaredNorms). Functions are
// thread-safe.
//
// Shape suffixes: I in_features, O out_features, R rank, V vocabulary, D embedding dimension.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dorad::ops {

struct NormOptions {
  // Upper bound of the tensor memory that one call holds at a time, in bytes, its result and the
  // Gram matrix (4·R²) included. Blocks are never smaller than 256 rows by 64 columns: a budget too
  // small for one, 12·O + 4·R² + 256·max(24·R + 32, 1032) bytes or so, is exceeded.
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
