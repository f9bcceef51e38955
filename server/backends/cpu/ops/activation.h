// Gated activations. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

namespace dorad::ops {

// gate_TF <- silu(gate_TF) * up_TF, in place; both [T, F] fp32 contiguous.
void SiluMul(at::Tensor& gate_TF, const at::Tensor& up_TF);
// The same with the tanh form of gelu (torch's approximate="tanh").
void GeluTanhMul(at::Tensor& gate_TF, const at::Tensor& up_TF);

}  // namespace dorad::ops
