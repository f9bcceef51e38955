#include "server/backends/cpu/ops/activation.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "server/backends/cpu/simd/kernels.h"
#include "server/backends/cpu/simd/parallel.h"
#include "server/platform/check.h"

namespace dorad::ops {

namespace {

constexpr int64_t kBlock = 1024;

// Elementwise, so any division gives the same result: blocks rather than rows balance a single long
// row. work(first, count) for blocks that cover all elements.
template <typename Work>
void ForBlocks(int64_t count, Work work) {
  cpu::ForRows((count + kBlock - 1) / kBlock, 4 * kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock;
      work(first, std::min(count - first, kBlock));
    }
  });
}

void Run(void (*kernel)(float*, const float*, int64_t), at::Tensor& gate_TF,
         const at::Tensor& up_TF) {
  DORAD_CHECK(gate_TF.scalar_type() == at::kFloat && gate_TF.is_contiguous());
  DORAD_CHECK(up_TF.scalar_type() == at::kFloat && up_TF.is_contiguous());
  DORAD_CHECK(gate_TF.sizes() == up_TF.sizes());
  float* gate = gate_TF.mutable_data_ptr<float>();
  const float* up = up_TF.const_data_ptr<float>();
  ForBlocks(gate_TF.numel(),
            [&](int64_t first, int64_t count) { kernel(gate + first, up + first, count); });
}

}  // namespace

void SiluMul(at::Tensor& gate_TF, const at::Tensor& up_TF) {
  Run(cpu::ActiveKernels().silu_mul, gate_TF, up_TF);
}

void GeluTanhMul(at::Tensor& gate_TF, const at::Tensor& up_TF) {
  Run(cpu::ActiveKernels().gelu_tanh_mul, gate_TF, up_TF);
}

void SigmoidMul(at::Tensor& x, const at::Tensor& gate) {
  DORAD_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous());
  DORAD_CHECK(gate.scalar_type() == at::kFloat && gate.is_contiguous());
  DORAD_CHECK(x.sizes() == gate.sizes());
  float* data = x.mutable_data_ptr<float>();
  const float* gates = gate.const_data_ptr<float>();
  ForBlocks(x.numel(), [&](int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; ++i) data[i] /= 1.0f + std::exp(-gates[i]);
  });
}

void GeluTanh(at::Tensor& x) {
  DORAD_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous());
  static const std::vector<float>* const ones = new std::vector<float>(kBlock, 1.0f);
  float* data = x.mutable_data_ptr<float>();
  ForBlocks(x.numel(), [&](int64_t first, int64_t count) {
    cpu::ActiveKernels().gelu_tanh_mul(data + first, ones->data(), count);
  });
}

void Gelu(at::Tensor& x) {
  DORAD_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous());
  float* data = x.mutable_data_ptr<float>();
  ForBlocks(x.numel(), [&](int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; ++i) {
      data[i] *= 0.5f * (1.0f + std::erf(data[i] * 0.70710678f));
    }
  });
}

}  // namespace dorad::ops
