// The products behind kernels/isa's seam in the emulator: which element of D a lane's registers
// are, the same for both instruction sets, and what tiles in the swizzle give.
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/mma/isa.cuh"
#include "kernels/isa/shared.cuh"
#include "kernels/isa/sm90/isa.cuh"
#include "tests/emulation/emulator.h"

namespace dorad::kernels {
namespace {

using emulation::Emulator;

constexpr int kK = 64;

// Tiles of 64 and kN rows in device memory, and D by row and column.
template <int kN>
class Product {
 public:
  explicit Product(std::mt19937* random) : a_(64 * kK), b_(kN * kK) {
    std::normal_distribution<float> normal;
    for (__nv_bfloat16& value : a_) value = __float2bfloat16(normal(*random));
    for (__nv_bfloat16& value : b_) value = __float2bfloat16(normal(*random));
  }

  // D after two products, of which each element is written once.
  template <typename Isa>
  std::vector<float> Run() {
    constexpr int kWarpRows = 16 * Isa::kRowBlocks;
    std::vector<float> d(Isa::kRowWarps * kWarpRows * kN, NAN);
    const PlainMatrix a = {a_.data(), 64, kK, kK, 64};
    const PlainMatrix b = {b_.data(), kN, kK, kK, kN};
    Emulator::Get().Launch(1, /*threads=*/128, /*cluster=*/1, 1024 + (64 + kN) * 128 + 8, [&] {
      WaitForPrevious();
      const int lane = static_cast<int>(threadIdx.x % 32);
      const int warp = static_cast<int>(threadIdx.x / 32);
      const uint32_t a_tile = SharedAddress(DynamicShared<1024>());
      const uint32_t b_tile = a_tile + 64 * 128;
      const uint32_t barrier = a_tile + (64 + kN) * 128;
      if (threadIdx.x == 0) BarrierInit(barrier, 1);
      __syncthreads();
      if (warp == 0) {
        MmaIsa<4>::Fetch(a_tile, MmaIsa<4>::RowsOf(a, 0, 64), 0, barrier);
        MmaIsa<4>::Fetch(b_tile, MmaIsa<4>::RowsOf(b, 0, kN), 0, barrier);
        MmaIsa<4>::Complete(barrier);
      }
      BarrierWait(barrier, 0);
      if (warp >= Isa::kGroupWarps) return;
      constexpr int kColumns = kN * Isa::kRowWarps / Isa::kGroupWarps;
      float sums[Isa::kRowBlocks * kColumns / 2] = {};
      for (int i = 0; i < 2; ++i) {
        Isa::Begin(true);
        Isa::template Multiply<kN>(sums, Isa::Tile(a_tile), Isa::Tile(b_tile));
        Isa::End();
      }
      for (int i = 0; i < Isa::kRowBlocks * kColumns / 8; ++i) {
        for (int j = 0; j < 4; ++j) {
          const int block = i / (kColumns / 8);
          const int row = warp % Isa::kRowWarps * kWarpRows + 16 * block + lane / 4 + j / 2 * 8;
          const int column =
              warp / Isa::kRowWarps * kColumns + 8 * (i % (kColumns / 8)) + lane % 4 * 2 + j % 2;
          float& to = d[row * kN + column];
          if (!std::isnan(to)) emulation::Fail("two lanes have one element");
          to = sums[4 * i + j];
        }
      }
    });
    Emulator::Get().Run();
    return d;
  }

  double Reference(int row, int column) const {
    double sum = 0.0;
    for (int k = 0; k < kK; ++k) {
      sum += 2.0 * __bfloat162float(a_[row * kK + k]) * __bfloat162float(b_[column * kK + k]);
    }
    return sum;
  }

 private:
  std::vector<__nv_bfloat16> a_, b_;
};

template <int kN>
void ExpectLayout() {
  SCOPED_TRACE(testing::Message() << kN << " columns");
  Emulator emulator(5);
  Product<kN> product(&emulator.random());
  std::vector<float> wgmma, mma, narrow, blocks;
  ASSERT_NO_THROW(wgmma = product.template Run<Sm90Isa>());
  ASSERT_NO_THROW(mma = product.template Run<MmaIsa<4>>());
  ASSERT_NO_THROW(narrow = product.template Run<MmaIsa<2>>());
  ASSERT_NO_THROW(blocks = (product.template Run<MmaIsa<1, 4, 2>>()));
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < kN; ++column) {
      const size_t i = row * kN + column;
      ASSERT_NEAR(wgmma[i], product.Reference(row, column), 1e-4) << row << ", " << column;
      ASSERT_EQ(mma[i], wgmma[i]) << row << ", " << column;
      ASSERT_EQ(blocks[i], wgmma[i]) << row << ", " << column;
      if (i >= narrow.size()) continue;
      ASSERT_EQ(narrow[i], wgmma[i]) << row << ", " << column;
    }
  }
}

TEST(EmulatedProduct, LanesHaveTheSameElementsWithWgmmaAndMma) {
  ExpectLayout<32>();
  ExpectLayout<64>();
  ExpectLayout<128>();
}

}  // namespace
}  // namespace dorad::kernels
