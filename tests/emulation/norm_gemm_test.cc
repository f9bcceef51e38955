// The product of the norms as every GPU multiplies it (kernels/dora/norm_gemm_mma.cuh) in the
// emulator, against sums in double.
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/dora/norm_gemm_launch.h"
#include "kernels/dora/norm_gemm_mma.cuh"
#include "tests/emulation/emulator.h"

namespace dorad::kernels::norm {
namespace {

using emulation::Emulator;

constexpr float kScale = 1.5f;

// A matrix whose rows are padded by NaN, which nothing may read.
class Values {
 public:
  Values(int64_t rows, int64_t columns, std::mt19937* random)
      : rows_(rows), columns_(columns), ld_((columns + 7) / 8 * 8 + 8) {
    std::normal_distribution<float> normal;
    data_.resize(rows * ld_, __float2bfloat16(NAN));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        data_[row * ld_ + column] = __float2bfloat16(normal(*random));
      }
    }
  }
  Matrix matrix() const { return {data_.data(), rows_, columns_, ld_}; }
  double At(int64_t row, int64_t column) const {
    return __bfloat162float(data_[row * ld_ + column]);
  }

 private:
  int64_t rows_, columns_, ld_;
  std::vector<__nv_bfloat16> data_;
};

struct Sizes {
  int64_t m, n, k;
  int64_t splits = 1;
  int64_t period = 0;  // of X
};

// One product with its reference.
template <typename C>
class Product {
 public:
  Product(Sizes sizes, std::mt19937* random)
      : sizes_(sizes),
        x_(sizes.m, sizes.period == 0 ? sizes.k : std::min(sizes.k, sizes.period), random),
        y_(C::y_by_k ? sizes.k : sizes.n, C::y_by_k ? sizes.n : sizes.k, random),
        z_(C::z_by_n ? sizes.n : sizes.m, C::z_by_n ? sizes.m : sizes.n, random) {
    const int64_t tiles = TilesOf(sizes.n, C::tile_n);
    partial_.resize(sizes.splits * (C::has_z ? tiles * sizes.m : sizes.m * sizes.n), NAN);
  }

  RowGemm gemm() {
    RowGemm gemm;
    gemm.reduction = C::kind;
    gemm.x = x_.matrix();
    gemm.y = y_.matrix();
    if (C::has_z) gemm.z = z_.matrix();
    gemm.z_by_n = C::z_by_n;
    gemm.k = sizes_.k;
    gemm.x_period = sizes_.period;
    gemm.splits = sizes_.splits;
    gemm.scale = kScale;
    gemm.partial = partial_.data();
    gemm.isa = KernelIsa::kMma;
    return gemm;
  }

  void Expect() const {
    const auto [m, n, k, splits, period] = sizes_;
    const int64_t steps = TilesOf(k, kStepK);
    for (int64_t split = 0; split < splits; ++split) {
      const int64_t begin = split * steps / splits * kStepK;
      const int64_t end = std::min((split + 1) * steps / splits * kStepK, k);
      for (int64_t row = 0; row < m; ++row) {
        double sum = 0.0;
        for (int64_t column = 0; column < n; ++column) {
          double d = 0.0;
          for (int64_t i = begin; i < end; ++i) {
            const double y = C::y_by_k ? y_.At(i, column) : y_.At(column, i);
            d += x_.At(row, period == 0 ? i : i % period) * y;
          }
          if constexpr (C::has_z) {
            const double z = C::z_by_n ? z_.At(column, row) : z_.At(row, column);
            const double t = z + kScale * d;
            sum += C::kind == Reduction::kSquare ? t * t : z * d;
            if ((column + 1) % C::tile_n != 0 && column + 1 != n) continue;
            const int64_t tile = column / C::tile_n;
            Near(partial_[(tile * splits + split) * m + row], sum, row, column);
            sum = 0.0;
          } else {
            Near(partial_[(split * m + row) * n + column], d, row, column);
          }
        }
      }
    }
  }

 private:
  static void Near(float got, double expected, int64_t row, int64_t column) {
    ASSERT_NEAR(got, expected, 1e-5 * std::abs(expected) + 2e-2) << row << ", " << column;
  }

  const Sizes sizes_;
  const Values x_, y_, z_;
  std::vector<float> partial_;
};

template <typename C>
void ExpectReference(const std::vector<Sizes>& sizes, int blocks) {
  Emulator emulator(7);
  std::vector<std::unique_ptr<Product<C>>> products;
  std::vector<RowGemm> gemms;
  for (const Sizes& each : sizes) {
    products.push_back(std::make_unique<Product<C>>(each, &emulator.random()));
    gemms.push_back(products.back()->gemm());
  }
  ASSERT_EQ(LaunchMma(gemms.data(), static_cast<int>(gemms.size()), C::tile_n,
                      /*multiprocessors=*/blocks, nullptr),
            cudaSuccess);
  ASSERT_NO_THROW(emulator.Run());
  for (const auto& product : products) product->Expect();
}

// Tails of rows, columns and K; ranks that are no multiples of 8; several products; more tiles than
// blocks, and more blocks than tiles.
TEST(EmulatedNormGemm, SquaresMatchDouble) {
  using C = MmaConfig<Reduction::kSquare, 256, false>;
  ExpectReference<C>({{130, 300, 90}, {5, 8, 3}, {128, 128, 64}}, 2);
  ExpectReference<C>({{200, 520, 200}}, 8);
}

TEST(EmulatedNormGemm, SquaresOfATransposedWeightMatchDouble) {
  ExpectReference<MmaConfig<Reduction::kSquare, 256, true>>({{136, 296, 72}, {8, 8, 5}}, 3);
}

TEST(EmulatedNormGemm, DotsMatchDouble) {
  ExpectReference<MmaConfig<Reduction::kDot, 256, false>>({{140, 270, 600, 2}}, 3);
  ExpectReference<MmaConfig<Reduction::kDot, 128, false>>({{20, 130, 256, 1, 128}}, 1);
}

TEST(EmulatedNormGemm, PartsOfKAreStored) {
  ExpectReference<MmaConfig<Reduction::kStore, 128, false>>({{130, 140, 520, 3}}, 2);
}

}  // namespace
}  // namespace dorad::kernels::norm
