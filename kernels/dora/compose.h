// The element-wise half of a DoRA linear: combines the base product and the low-rank product in
// memory (paper, "Compose Kernel" and its specification). The fused projection does this in its
// epilogue; these kernels serve the reference path and callers that hold both products.
//
// Arithmetic is fp32 in one fixed order, every operation rounded on its own (no FMA contraction),
// and one rounding to the output's type at the end: every path of a function (vectors, scalars, in
// place, any number of rows) gives the same bits. Functions only enqueue work on the stream; they
// are thread-safe and can be captured in graphs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dorad::kernels {

enum class FloatType : int32_t { kF32, kBF16, kF16 };

// delta = (g - 1)·base + g·(s·lora), in the order t = s·lora, u = g·t, v = (g - 1)·base, v + u. The
// factor (g - 1) keeps the small correction that g·(base + s·lora) - base would cancel.
struct ComposeParams {
  const void* base = nullptr;  // [rows, out], contiguous, `type`
  const void* lora = nullptr;  // [rows, out], contiguous, `type`
  const float* g = nullptr;    // [out], the same for all rows
  void* delta = nullptr;       // [rows, out], contiguous, `type`; may be base or lora itself
  void* inner = nullptr;  // as delta: base + s·lora, for the backward pass; nullptr: not wanted
  int64_t rows = 0;
  int64_t out = 0;
  float scale = 0.0f;  // s
  FloatType type = FloatType::kBF16;
};

// Any sizes and element-aligned pointers are right; the fast path needs 16-byte aligned pointers
// and rows of a multiple of 16 bytes. delta and inner may each be equal to base or lora, but must
// not overlap them, or each other, otherwise. cudaErrorInvalidValue: negative sizes or rows · out
// beyond 2^40.
cudaError_t Compose(const ComposeParams& params, cudaStream_t stream);

// y = g·(base + s·lora) + bias: the whole linear for a segment of rows that share an adapter, in
// the order t = s·lora, u = base + t, v = g·u, v + bias. An absent operand (nullptr) leaves the
// others unchanged, to the last bit: the base model's rows have neither lora nor g.
struct ApplyParams {
  const void* base = nullptr;   // [rows, out], leading dimension base_ld, `type`
  const void* lora = nullptr;   // as base, with lora_ld; nullptr: not adapted, or a part of base
  const float* g = nullptr;     // [out]; nullptr: plain LoRA
  const float* bias = nullptr;  // [out] or nullptr
  void* y = nullptr;            // [rows, out], leading dimension y_ld, `y_type`
  void* inner = nullptr;  // as delta: base + s·lora, for the backward pass; nullptr: not wanted
  int64_t base_ld = 0;
  int64_t lora_ld = 0;
  int64_t y_ld = 0;
  int64_t rows = 0;
  int64_t out = 0;
  float scale = 0.0f;  // s
  FloatType type = FloatType::kF32;
  FloatType y_type = FloatType::kBF16;  // `type`, or any where that is fp32
};

// Alignment as for Compose (rows start at multiples of 16 bytes on the fast path). y may be equal
// to base or lora if it has their type and leading dimension; inner is memory of its own.
// cudaErrorInvalidValue: as Compose, a leading dimension below out, or types that do not go
// together.
cudaError_t Apply(const ApplyParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
