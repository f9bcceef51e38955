// Root-mean-square norm (Llama, Mistral, Qwen2, Qwen3: `*RMSNorm`) and layer norm. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

namespace dorad::ops {

// y = x / sqrt(mean(x²) + eps) * weight over the last dimension. x: [..., D] fp32 contiguous;
// weight_D: fp32. Returns a new tensor.
at::Tensor RmsNorm(const at::Tensor& x, const at::Tensor& weight_D, double eps);

// In place over the last dimension of x (query/key norm of Qwen3, x is [T, H, D]).
void RmsNormInplace(at::Tensor& x, const at::Tensor& weight_D, double eps);

// residual_TD += x_TD in place, then RmsNorm(residual_TD).
at::Tensor AddRmsNorm(at::Tensor& residual_TD, const at::Tensor& x_TD, const at::Tensor& weight_D,
                      double eps);

// y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension, for x,
// weight and bias as above. Returns a new tensor.
at::Tensor LayerNorm(const at::Tensor& x, const at::Tensor& weight_D, const at::Tensor& bias_D,
                     double eps);

}  // namespace dorad::ops
