// A module's weights and adapters for emulated projections: random, some of them plain LoRA.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/dora/linear_plan.h"
#include "kernels/isa/sm90/copy.cuh"
#include "tests/emulation/emulator.h"

namespace dorad::kernels {

inline cudaError_t EncodeMatrix(const __nv_bfloat16* data, int64_t rows, int64_t columns,
                                int64_t ld, int box_rows, CUtensorMap* map) {
  const FakeMap fake = {data, static_cast<int>(rows), static_cast<int>(columns),
                        static_cast<int>(ld), box_rows};
  *map = {};
  std::memcpy(map, &fake, sizeof(fake));
  return cudaSuccess;
}

inline CUtensorMap MapOf(const __nv_bfloat16* data, int rows, int columns, int ld, int box_rows) {
  CUtensorMap map;
  EncodeMatrix(data, rows, columns, ld, box_rows, &map);
  return map;
}

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
  const DoraLinearShape shape_;
  std::mt19937& random_;
  const int out_;
  int max_rank_ = 0;
  std::vector<__nv_bfloat16> x_, w_;  // [rows, in], [out, in]
  std::vector<float> bias_;
  std::vector<DoraFactors> factors_;  // [slot · parts + part]
  std::vector<CUtensorMap> maps_;     // of A and B of each

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
    maps_.push_back(MapOf(factors.a, rank, shape_.in, shape_.in, kLinearBoxRows));
    maps_.push_back(MapOf(factors.b, out, factors.ldb, factors.ldb, kLinearBoxRows));
  }

  std::vector<std::vector<__nv_bfloat16>> tensors_;
  std::vector<std::vector<float>> magnitudes_;
};

}  // namespace dorad::kernels
