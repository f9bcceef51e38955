#include "server/backends/cpu/ops/activation.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "server/backends/cpu/simd/kernels.h"
#include "server/backends/cpu/simd/parallel.h"
#include "server/platform/check.h"

namespace dorad::ops {

namespace {

void Run(void (*kernel)(float*, const float*, int64_t), at::Tensor& gate_TF,
         const at::Tensor& up_TF) {
  DORAD_CHECK(gate_TF.scalar_type() == at::kFloat && gate_TF.is_contiguous());
  DORAD_CHECK(up_TF.scalar_type() == at::kFloat && up_TF.is_contiguous());
  DORAD_CHECK(gate_TF.sizes() == up_TF.sizes());
  float* gate = gate_TF.mutable_data_ptr<float>();
  const float* up = up_TF.const_data_ptr<float>();
  // Elementwise, so any division gives the same result: blocks rather than rows balance a single
  // long row.
  constexpr int64_t kBlock = 1024;
  const int64_t count = gate_TF.numel();
  cpu::ForRows((count + kBlock - 1) / kBlock, 4 * kBlock, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kBlock;
    kernel(gate + first, up + first, std::min(count, end * kBlock) - first);
  });
}

}  // namespace

void SiluMul(at::Tensor& gate_TF, const at::Tensor& up_TF) {
  Run(cpu::ActiveKernels().silu_mul, gate_TF, up_TF);
}

void GeluTanhMul(at::Tensor& gate_TF, const at::Tensor& up_TF) {
  Run(cpu::ActiveKernels().gelu_tanh_mul, gate_TF, up_TF);
}

}  // namespace dorad::ops
