// Row norms ||W + s·B·A|| of an adapted linear and g = m / norm (paper, sections "Factored Norm
// Computation" and "Norm Assembly Kernel"); the CPU's counterpart is
// server/backends/cpu/ops/dora_norm.h.
//
// Two forms of the same number. *Direct*: one tensor-core product B·A, tile by tile, whose epilogue
// adds the tile of W, squares and sums the rows: nothing cancels and no product is stored.
// *Factored*: the paper's Algorithm 1, ||W||² + 2s·Σ_l B∘(W Aᵀ) + s²·Σ_l (B G)∘B with G = A Aᵀ. The
// direct form is the default: it is faster and more exact (tests/bench/kernels_norm_bench.cc).
//
// Results are deterministic: partial sums are added in an order that depends on the shape alone.
// Functions only enqueue work on the stream, allocate nothing, are thread-safe and can be captured
// in graphs. All pointers are to device memory.
//
// Shape suffixes: I in_features, O out_features, R rank.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/isa/isa.h"

namespace dorad::kernels {

// out[row] = Σ_column w², fp32 [rows]. w: [rows, columns] contiguous. Any sizes; the fast path
// needs w 16-byte aligned and rows of a multiple of 16 bytes. NaN and infinity come through.
// cudaErrorInvalidValue: negative sizes or more than 2^31 - 1 rows.
cudaError_t SquaredRowNorms(const __nv_bfloat16* w, int64_t rows, int64_t columns, float* out,
                            cudaStream_t stream);
cudaError_t SquaredRowNorms(const float* w, int64_t rows, int64_t columns, float* out,
                            cudaStream_t stream);

// norm = sqrt(max(base_sq + 2s·cross + s²·ba_sq, 0)). 2s and s² are computed in double and rounded
// to fp32; every fp32 operation is rounded on its own (no FMA contraction), the root to nearest.
// NaN stays NaN. s = 0: cross and ba_sq are not read and may be nullptr. norm may be any of the
// inputs.
struct NormAssemblyParams {
  const float* base_sq = nullptr;  // [size]
  const float* cross = nullptr;    // [size], Σ_l B∘(W Aᵀ)
  const float* ba_sq = nullptr;    // [size], Σ_l (B G)∘B
  float* norm = nullptr;           // [size]
  int64_t size = 0;
  double scale = 0.0;  // s
};
cudaError_t AssembleNorms(const NormAssemblyParams& params, cudaStream_t stream);

// The magnitudes of rows, [size] in fp32 or bf16; or none.
struct Magnitude {
  Magnitude() = default;
  // NOLINTNEXTLINE(google-explicit-constructor)
  Magnitude(const float* values) : values(values) {}
  // NOLINTNEXTLINE(google-explicit-constructor)
  Magnitude(const __nv_bfloat16* values) : values(values), is_bf16(true) {}

  const void* values = nullptr;
  bool is_bf16 = false;
};

// g = magnitude / max(norm, eps), fp32 [size], division rounded to nearest. NaN in norm or
// magnitude stays NaN. eps: 1e-12 for fp32 base weights, 1e-6 for bf16 and fp16 ones (paper).
// degenerate: [1] or nullptr, set to 1 if a row's norm does not define its g: norm or g is not
// finite, or a magnitude other than zero stands on a norm of at most eps.
cudaError_t MagnitudeScale(Magnitude magnitude, const float* norm, float eps, int64_t size,
                           float* g, uint32_t* degenerate, cudaStream_t stream);

// The largest rank for the functions below.
constexpr int64_t kMostRank = 4096;

// One module. workspace: 256-byte aligned, workspace_bytes by the form's function; its contents are
// undefined before and after, and calls on one stream may share it.
struct DoraNormParams {
  const __nv_bfloat16* w = nullptr;  // [O, I], or [I, O] if w_by_in; contiguous
  const __nv_bfloat16* a = nullptr;  // [R, I], contiguous
  const __nv_bfloat16* b = nullptr;  // [O, R], leading dimension ldb >= R
  const float* base_sq = nullptr;    // [O], ||W||²: the factored form, and s = 0
  Magnitude magnitude;               // [O], m; none: g is not wanted
  float* norm = nullptr;             // [O]
  float* g = nullptr;                // [O], m / max(norm, eps), as MagnitudeScale gives it
  uint32_t* degenerate = nullptr;    // [1] or nullptr, as of MagnitudeScale
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  int64_t out = 0;   // O
  int64_t in = 0;    // I
  int64_t rank = 0;  // R, 0 to kMostRank; 0 is s = 0
  int64_t ldb = 0;
  double scale = 0.0;  // s
  float eps = 1e-6f;
  // W lies transposed, as an embedding [V, D] does, whose norm is over V: O = D, I = V, with
  // a = lora_embedding_A and b = lora_embedding_B. The direct form only.
  bool w_by_in = false;
  // With kMma every GPU from compute capability 8.0 on, with other bits.
  KernelIsa isa = KernelIsa::kSm90;
};

// The direct form. Fast path: w, a and b 16-byte aligned, I, ldb and (with w_by_in) O multiples of
// 8; other inputs use a plain kernel, correct at any size and some hundred times slower. base_sq is
// needed without an update (s = 0 or rank 0) if W is not transposed. cudaErrorInvalidValue:
// negative sizes, O or I beyond 2^31 - 1, ldb < R, a workspace too small.
size_t DirectNormWorkspace(int64_t out, int64_t in, int64_t rank);
cudaError_t DirectNorm(const DoraNormParams& params, cudaStream_t stream);
// The same, to the last bit, of many modules, eight to a launch: the linears of a layer cost less
// together than one by one. Their workspaces must not overlap. `modules` is read during the call
// only. One refused module refuses all, before any is enqueued.
cudaError_t DirectNorms(const DoraNormParams* modules, int count, cudaStream_t stream);

// The factored form. Gram matrix and W Aᵀ on tensor cores with fp32 sums; G enters B·G as two bf16
// terms (hi + lo, 16 bits of mantissa). cudaErrorInvalidValue: as the direct form, shapes outside
// of its fast path, and w_by_in.
size_t FactoredNormWorkspace(int64_t out, int64_t in, int64_t rank);
cudaError_t FactoredNorm(const DoraNormParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
