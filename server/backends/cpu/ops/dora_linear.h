// The adapted linear layer: y = g ⊙ (W x + s·B(A x)) + bias, for a batch whose rows belong to
// different adapters (DESIGN: paper section on the forward contract; PEFT: `DoraLinearLayer`).
//
// g = m / ||W + s·B·A||_row is computed once per adapter version (ops/dora_norm.h). Plain LoRA has
// no g; rows without an adapter have neither factors nor g. The bias is never scaled.
//
// Guarantee: a row of the result depends on that row of x, on the weights and on its own adapter
// only: not on the number of rows, their order, or the other rows' adapters, to the last bit.
// Functions are thread-safe.
//
// Shape suffixes: T rows (tokens), I in_features, O out_features, R rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "absl/types/span.h"

namespace dorad::ops {

// Arithmetic of a forward pass.
//   kF32   inputs, products and sums in fp32; weights may be stored in bf16 (their exact value).
//   kBF16  inputs of the linear layers' products are rounded to bf16, and K and V when they are
//          written to the cache; products are summed in fp32; everything else is fp32, in attention
//          the queries and the probabilities.
enum class ComputeDType { kF32, kBF16 };

// Base weights of one linear. weight_OI: contiguous fp32 or bf16. bias_O: fp32, or undefined.
struct BaseLinear {
  at::Tensor weight_OI;
  at::Tensor bias_O;
};

// One adapter's tensors for one linear. a_RI and b_OR: contiguous, fp32 or bf16, same dtype.
// g_O: fp32, undefined for plain LoRA. scale: s.
struct AdapterFactors {
  at::Tensor a_RI;
  at::Tensor b_OR;
  at::Tensor g_O;
  float scale = 0.0f;

  // Also for an embedding's factors, whose a is [V, R] and whose b is [D, R].
  int64_t rank() const { return b_OR.size(1); }
};

// Rows [begin, end) of x use `factors` (nullptr: the base model).
struct RowSegment {
  const AdapterFactors* factors = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

// One linear of a group that shares its input.
struct Projection {
  const BaseLinear* base = nullptr;
  // Ascending, without gaps or overlap, covering [0, T).
  absl::Span<const RowSegment> segments;
  // Result, [T, O] fp32 contiguous, allocated by the caller.
  at::Tensor y_TO;
};

// Runs every projection on x_TI ([T, I] fp32 contiguous). Projections of one input (q, k, v; gate,
// up) are passed together so that they share their parallel regions.
void DoraLinear(const at::Tensor& x_TI, absl::Span<const Projection> projections,
                ComputeDType compute);

// The same with ATen's matrix products, one segment at a time: the reference for tests and benches.
// Its results may depend on the number of rows.
void DoraLinearReference(const at::Tensor& x_TI, absl::Span<const Projection> projections,
                         ComputeDType compute);

}  // namespace dorad::ops
