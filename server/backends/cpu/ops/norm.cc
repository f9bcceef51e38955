#include "server/backends/cpu/ops/norm.h"

#include <ATen/ATen.h>

#include <cmath>

#include "server/backends/cpu/simd/kernels.h"
#include "server/backends/cpu/simd/parallel.h"
#include "server/platform/check.h"

namespace dorad::ops {
namespace {

void CheckArguments(const at::Tensor& x, const at::Tensor& weight_D) {
  DORAD_CHECK(x.scalar_type() == at::kFloat && x.dim() >= 1 && x.is_contiguous());
  DORAD_CHECK(weight_D.scalar_type() == at::kFloat && weight_D.is_contiguous());
  DORAD_CHECK(weight_D.dim() == 1 && weight_D.size(0) == x.size(-1));
}

// before(row) runs ahead of each row's norm.
template <typename Before>
void NormRows(const float* x, const at::Tensor& weight_D, double eps, int64_t count, float* y,
              Before before) {
  const int64_t dim = weight_D.size(0);
  if (dim == 0) return;
  const cpu::Kernels& kernels = cpu::ActiveKernels();
  const float* weight = weight_D.const_data_ptr<float>();
  cpu::ForRows(count / dim, dim, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      before(r);
      kernels.rms_norm(x + r * dim, weight, dim, static_cast<float>(eps), y + r * dim);
    }
  });
}

}  // namespace

at::Tensor RmsNorm(const at::Tensor& x, const at::Tensor& weight_D, double eps) {
  CheckArguments(x, weight_D);
  at::Tensor y = at::empty_like(x);
  NormRows(x.const_data_ptr<float>(), weight_D, eps, x.numel(), y.mutable_data_ptr<float>(),
           [](int64_t) {});
  return y;
}

void RmsNormInplace(at::Tensor& x, const at::Tensor& weight_D, double eps) {
  CheckArguments(x, weight_D);
  float* data = x.mutable_data_ptr<float>();
  NormRows(data, weight_D, eps, x.numel(), data, [](int64_t) {});
}

at::Tensor LayerNorm(const at::Tensor& x, const at::Tensor& weight_D, const at::Tensor& bias_D,
                     double eps) {
  CheckArguments(x, weight_D);
  CheckArguments(x, bias_D);
  const int64_t dim = weight_D.size(0);
  at::Tensor y = at::empty_like(x);
  const float* source = x.const_data_ptr<float>();
  const float* weight = weight_D.const_data_ptr<float>();
  const float* bias = bias_D.const_data_ptr<float>();
  float* target = y.mutable_data_ptr<float>();
  cpu::ForRows(x.numel() / dim, 4 * dim, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* row = source + r * dim;
      double sum = 0.0;
      for (int64_t d = 0; d < dim; ++d) sum += row[d];
      const double mean = sum / static_cast<double>(dim);
      double squares = 0.0;
      for (int64_t d = 0; d < dim; ++d) squares += (row[d] - mean) * (row[d] - mean);
      const double factor = 1.0 / std::sqrt(squares / static_cast<double>(dim) + eps);
      for (int64_t d = 0; d < dim; ++d) {
        target[r * dim + d] = static_cast<float>((row[d] - mean) * factor) * weight[d] + bias[d];
      }
    }
  });
  return y;
}

at::Tensor AddRmsNorm(at::Tensor& residual_TD, const at::Tensor& x_TD, const at::Tensor& weight_D,
                      double eps) {
  CheckArguments(residual_TD, weight_D);
  CheckArguments(x_TD, weight_D);
  DORAD_CHECK(residual_TD.sizes() == x_TD.sizes());
  const int64_t dim = weight_D.size(0);
  float* residual = residual_TD.mutable_data_ptr<float>();
  const float* x = x_TD.const_data_ptr<float>();
  at::Tensor y = at::empty_like(residual_TD);
  NormRows(residual, weight_D, eps, residual_TD.numel(), y.mutable_data_ptr<float>(),
           [&](int64_t r) { cpu::ActiveKernels().add(residual + r * dim, x + r * dim, dim); });
  return y;
}

}  // namespace dorad::ops
