// A linear with a DoRA adapter, forward and backward, as a trainer runs it: its norm, five matrix
// products, and one pass over the output each way.
//
//   norm = ||W + s·B·A||,  g = m / max(norm, eps)
//   h = x Aᵀ,  inner = x Wᵀ + s·h Bᵀ,  y = g·inner + bias
//   d_inner = g·dy,  d_m = Σ_rows dy·inner / max(norm, eps),  d_h = s·d_inner B,
//   d_x = d_inner W + d_h A,  d_A = d_hᵀ x,  d_B = s·d_innerᵀ h
//
// which is PEFT's DoRA with its norm detached. inner is summed in fp32 and rounded once, for y and
// where it is kept; d_x, where PEFT adds two rounded gradients, is rounded twice in half types. In
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

// Parameters of forward and backward. Matrices are row-major and contiguous; x, w, h, inner and
// tensors made of them are of `type`, the factors and their conversions of `factor_type`, m of
// `m_type`.
struct LinearParams {
  const void* x = nullptr;  // [rows, in]; backward: for d_a only
  const void* w = nullptr;  // [out, in]
  const void* a = nullptr;  // [rank, in]
  const void* b = nullptr;  // [out, rank]
  void* h = nullptr;        // [rows, rank]: written forward; backward: for d_b only
  void* inner = nullptr;    // [rows, out]: written forward; backward: for d_m only
  float* norm = nullptr;    // [out]
  float* g = nullptr;       // [out]
  // FactorBytes, 256-byte aligned; for factors of another type than `type`.
  void* factors = nullptr;
  // ForwardBytes, backward SumBytes, 256-byte aligned.
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  int64_t rows = 0;
  int64_t in = 0;
  int64_t out = 0;
  int64_t rank = 0;
  double scale = 0.0;  // s
  float eps = 0.0f;
  kernels::FloatType type = kernels::FloatType::kBF16;
  kernels::FloatType factor_type = kernels::FloatType::kBF16;  // `type`, or any where that is half
  kernels::FloatType m_type = kernels::FloatType::kF32;
};

struct LinearForward {
  // [out], fp32 or bf16: norm and g are made, by DirectNorm, whose fast path must take the layer;
  // nullptr: g is given, and norm is not read.
  const void* m = nullptr;
  const float* bias = nullptr;  // [out] or nullptr
  void* y = nullptr;            // [rows, out]; may be inner
};

struct LinearBackward {
  const void* dy = nullptr;  // [rows, out]
  void* d_inner = nullptr;   // [rows, out]; nullptr: only d_m is wanted
  void* d_h = nullptr;       // [rows, rank]; needed for d_x and d_a
  void* d_x = nullptr;       // [rows, in] or nullptr, as all that follow
  void* d_a = nullptr;       // [rank, in], `sum_type`
  void* d_b = nullptr;       // [out, rank], `sum_type`
  void* d_m = nullptr;       // [out], `m_type`
  kernels::FloatType sum_type = kernels::FloatType::kBF16;  // `type` or fp32
};

// makes_norm: for a forward call that computes norms.
size_t FactorBytes(const LinearParams& params, bool makes_norm);
size_t ForwardBytes(const LinearParams& params, bool makes_norm);
size_t SumBytes(int64_t rows, int64_t out);

// Products of fp32 are as exact as the handle's math mode. cudaErrorInvalidValue: sizes below 1 or
// beyond int32, a norm of other weights than bf16, outputs without their inputs, or a refusal of
// DirectNorm or ComposeBackward; cudaErrorUnknown: cuBLAS refused a product.
cudaError_t Forward(GemmFunction gemm, cublasHandle_t handle, const LinearParams& params,
                    const LinearForward& forward, cudaStream_t stream);
cudaError_t Backward(GemmFunction gemm, cublasHandle_t handle, const LinearParams& params,
                     const LinearBackward& backward, cudaStream_t stream);

}  // namespace dorad::train
