// A module's weights and adapters for emulated projections: random, some of them plain LoRA.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/dora/linear_plan.h"
#include "tests/emulation/emulator.h"

namespace dorad::kernels {

// A workspace of a launch: counters, zero between launches, and NaN behind them.
class Workspace {
 public:
  explicit Workspace(size_t bytes) : memory_((bytes + sizeof(Line) - 1) / sizeof(Line)) {
    std::memset(memory_.data(), 0xFF, memory_.size() * sizeof(Line));
    std::memset(memory_.data(), 0, kDoraLinearSignalBytes);
  }
  void* data() { return memory_.data(); }
  size_t bytes() const { return memory_.size() * sizeof(Line); }
  bool CountersAreZero() const {
    const auto* const first = reinterpret_cast<const unsigned char*>(memory_.data());
    return std::all_of(first, first + kDoraLinearSignalBytes, [](auto byte) { return byte == 0; });
  }

 private:
  struct alignas(256) Line {
    unsigned char bytes[256];
  };
  std::vector<Line> memory_;
};

class RandomLayer {
 public:
  // ranks: [slot][part].
  RandomLayer(const DoraLinearShape& shape, int rows, bool has_bias,
              const std::vector<std::vector<int>>& ranks, std::mt19937* random)
      : shape_(shape), random_(*random), out_(OutFeatures(shape)) {
    x_ = Random(size_t{1} * rows * shape.in, 1.0f);
    w_ = Random(size_t{1} * out_ * shape.in, 0.05f);
    for (int i = 0; i < out_; ++i) bias_.push_back(has_bias ? Normal(1.0f) : 0.0f);
    for (const std::vector<int>& slot : ranks) {
      for (int part = 0; part < shape.parts; ++part) AddFactors(slot[part], part);
    }
  }

  int out() const { return out_; }

 protected:
  // What projections of many and of few rows have in common.
  template <typename Params>
  Params ParamsOf(int first_row, int rows, KernelIsa isa, void* y, bool y_fp32) const {
    Params params;
    params.shape = shape_;
    params.rows = rows;
    params.max_rank = max_rank_;
    params.x = x_.data() + size_t{1} * first_row * shape_.in;
    params.w = w_.data();
    params.bias = bias_.data();
    params.table = {factors_.data(), shape_.parts};
    params.maps = reinterpret_cast<const CUtensorMap*>(maps_.data());
    params.y = y;
    params.y_fp32 = y_fp32;
    params.isa = isa;
    return params;
  }
  // launch(y): y of so many rows, as fp32.
  template <typename F>
  std::vector<float> RunInto(int rows, bool y_fp32, F launch) const {
    std::vector<float> y(size_t{1} * rows * out_, NAN);
    std::vector<__nv_bfloat16> rounded(y.size());
    launch(y_fp32 ? static_cast<void*>(y.data()) : static_cast<void*>(rounded.data()));
    if (!y_fp32) std::transform(rounded.begin(), rounded.end(), y.begin(), __bfloat162float);
    return y;
  }

  const DoraLinearShape shape_;
  std::mt19937& random_;
  const int out_;
  int max_rank_ = 0;
  std::vector<__nv_bfloat16> x_, w_;  // [rows, in], [out, in]
  std::vector<float> bias_;
  std::vector<DoraFactors> factors_;  // [slot · parts + part]
  struct Maps {
    CUtensorMap of_a_and_b[2];
  };
  std::vector<Maps> maps_;  // of each

 private:
  float Normal(float deviation) { return std::normal_distribution<float>(0, deviation)(random_); }

  std::vector<__nv_bfloat16> Random(size_t size, float deviation) {
    std::vector<__nv_bfloat16> values(size);
    for (__nv_bfloat16& value : values) value = __float2bfloat16(Normal(deviation));
    return values;
  }

  void AddFactors(int rank, int part) {
    const int out = shape_.out[part];
    max_rank_ = std::max(max_rank_, rank);
    DoraFactors factors;
    factors.rank = rank;
    factors.ldb = RoundUp(rank, 8);
    factors.scale = 0.5f + 0.1f * static_cast<float>(factors_.size());
    tensors_.push_back(Random(size_t{1} * rank * shape_.in, 0.05f));
    factors.a = tensors_.back().data();
    tensors_.push_back(Random(size_t{1} * out * factors.ldb, 0.05f));
    for (int n = 0; n < out; ++n) {
      for (int k = rank; k < factors.ldb; ++k) {
        tensors_.back()[size_t{1} * n * factors.ldb + k] = __float2bfloat16(0.0f);
      }
    }
    factors.b = tensors_.back().data();
    magnitudes_.emplace_back();
    for (int n = 0; n < out; ++n) magnitudes_.back().push_back(1 + Normal(0.2f));
    if (factors_.size() % 4 != 3) factors.g = magnitudes_.back().data();
    factors_.push_back(factors);
    Maps maps;
    EncodeDoraMaps(factors, shape_.in, out, maps.of_a_and_b);
    maps_.push_back(maps);
  }

  std::vector<std::vector<__nv_bfloat16>> tensors_;
  std::vector<std::vector<float>> magnitudes_;
};

}  // namespace dorad::kernels
