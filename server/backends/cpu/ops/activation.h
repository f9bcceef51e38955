// Activations, gated and plain. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

namespace dorad::ops {

// gate_TF <- silu(gate_TF) * up_TF, in place; both [T, F] fp32 contiguous.
void SiluMul(at::Tensor& gate_TF, const at::Tensor& up_TF);
// The same with the tanh form of gelu (torch's approximate="tanh").
void GeluTanhMul(at::Tensor& gate_TF, const at::Tensor& up_TF);

// x <- x * sigmoid(gate), in place; both fp32 contiguous, of one size.
void SigmoidMul(at::Tensor& x, const at::Tensor& gate);

// x <- gelu(x), in place; fp32 contiguous. The tanh form, and the exact one.
void GeluTanh(at::Tensor& x);
void Gelu(at::Tensor& x);

}  // namespace dorad::ops
