// Linears with DoRA adapters that have the same input, such as q, k and v, forward and backward, as
// a trainer runs them: their norms, five matrix products each, and one pass over each output each
// way.
//
//   norm = ||W + s·B·A||,  g = m / max(norm, eps)
//   h = x Aᵀ,  inner = x Wᵀ + s·h Bᵀ,  y = g·inner + bias
//   d_inner = g·dy,  d_m = Σ_rows dy·inner / max(norm, eps),  d_h = s·d_inner B,
//   d_x = Σ_linears (d_inner W + d_h A),  d_A = d_hᵀ x,  d_B = s·d_innerᵀ h
//
// which is PEFT's DoRA with its norm detached. Products with the A of all linears, and their norms,
// are one launch each. inner is summed in fp32 and rounded once, for y and where it is kept; d_x,
// where PEFT adds rounded gradients, is rounded after each of its products in half types. In
// fp16 a 16th of inner is kept, which is finite where the products are: the caller brings 16·g to
// the forward pass, and norm / 16 and eps / 16 to the backward pass, with g itself. The products
// are cuBLAS's: the caller brings its handle, bound to the stream, and the function, so that this
// library does not choose a version. Functions only enqueue work; they are as thread-safe as the
// handle.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/dora/compose.h"

namespace dorad::train {

// cublasGemmEx; a type of its own because C++ overloads it.
using GemmFunction = cublasStatus_t (*)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int,
                                        int, int, const void*, const void*, cudaDataType, int,
                                        const void*, cudaDataType, int, const void*, void*,
                                        cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t);

// One of the linears. Matrices are row-major and contiguous, of `type` unless a comment says
// otherwise.
struct Linear {
  const void* w = nullptr;  // [out, in]
  const void* a = nullptr;  // [rank, in], `factor_type`
  const void* b = nullptr;  // [out, rank], `factor_type`
  float* norm = nullptr;    // [out]
  float* g = nullptr;       // [out]
  void* inner = nullptr;    // [rows, out]: written forward; backward: for d_m only
  // Forward.
  // [out], `m_type`: norm and g are made, by DirectNorm, whose fast path must take the layer;
  // nullptr: g is given, and norm is not read.
  const void* m = nullptr;
  const float* bias = nullptr;  // [out] or nullptr
  void* y = nullptr;            // [rows, out]; may be inner
  // Backward. nullptr: not wanted.
  const void* dy = nullptr;  // [rows, out]; always given
  void* d_b = nullptr;       // [out, rank], `sum_type`
  void* d_m = nullptr;       // [out], `m_type`
  int64_t out = 0;
  int64_t rank = 0;
  double scale = 0.0;  // s
};

// Linears of a call.
constexpr int kMostLinears = 8;

// Parameters of forward and backward. `ranks` is the sum of the linears' ranks.
struct LinearParams {
  const Linear* linears = nullptr;
  int count = 0;            // 1 to kMostLinears
  const void* x = nullptr;  // [rows, in]; backward: for d_a only
  void* h = nullptr;        // [rows, ranks]: written forward; backward: for d_b only
  // ForwardBytes or BackwardBytes, 256-byte aligned.
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  int64_t rows = 0;
  int64_t in = 0;
  float eps = 0.0f;
  kernels::FloatType type = kernels::FloatType::kBF16;
  kernels::FloatType factor_type = kernels::FloatType::kBF16;  // `type`, or any where that is half
  kernels::FloatType m_type = kernels::FloatType::kF32;
};

struct LinearGradients {
  void* d_x = nullptr;                                      // [rows, in]; nullptr: not wanted
  void* d_a = nullptr;                                      // [ranks, in], `sum_type`; as d_x
  kernels::FloatType sum_type = kernels::FloatType::kBF16;  // `type` or fp32
};

// makes_norms: for a forward call that computes norms. Of the linears they read out and rank, and
// of the parameters count, rows, in and types.
size_t ForwardBytes(const LinearParams& params, bool makes_norms);
size_t BackwardBytes(const LinearParams& params);

// Products of fp32 are as exact as the handle's math mode. cudaErrorInvalidValue: sizes below 1 or
// beyond int32, a norm of other weights than bf16, outputs without their inputs, a workspace too
// small, or a refusal of DirectNorms or ComposeBackward; cudaErrorUnknown: cuBLAS refused a
// product.
cudaError_t Forward(GemmFunction gemm, cublasHandle_t handle, const LinearParams& params,
                    cudaStream_t stream);
cudaError_t Backward(GemmFunction gemm, cublasHandle_t handle, const LinearParams& params,
                     const LinearGradients& gradients, cudaStream_t stream);

}  // namespace dorad::train
