// The emulator's form of kernels/isa/mma/mma.cuh, as far as emulated kernels use it: products are
// summed in fp32 in the order of K.
#pragma once

#include <bit>
#include <cmath>

#include "tests/emulation/emulator.h"

namespace dorad::kernels {

inline void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  struct Lane {
    uint32_t* r;
    uint32_t address;
  };
  if (address % 16 != 0) emulation::Fail("a row of a matrix is not aligned");
  emulation::Together(Lane{r, address}, [](const Lane* lanes) {
    for (int row = 0; row < 32; ++row) {
      const unsigned char* from = emulation::ThisBlock().At(lanes[row].address);
      for (int t = 0; t < 4; ++t) {
        std::memcpy(&lanes[row % 8 * 4 + t].r[row / 8], from + 4 * t, 4);
      }
    }
  });
}

inline void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  if (address % 16 != 0) emulation::Fail("a row of a matrix is not aligned");
  const int lane = static_cast<int>(threadIdx.x % 32);
  emulation::Exchange(address, [&](const uint32_t* rows) {
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 2; ++j) {
        std::memcpy(reinterpret_cast<unsigned char*>(&r[i]) + 2 * j,
                    emulation::ThisBlock().At(rows[8 * i + lane % 4 * 2 + j]) + lane / 4 * 2, 2);
      }
    }
    return 0;
  });
}

inline uint32_t Transpose(uint32_t value) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return emulation::Exchange(value, [lane](const uint32_t* all) {
    // Row r of the result is column r: its elements are in column r of the rows 2 t, 2 t + 1.
    uint32_t result = 0;
    for (int half = 0; half < 2; ++half) {
      const int row = lane % 4 * 2 + half, column = lane / 4;
      const uint32_t pair = all[row * 4 + column / 2];
      result |= (column % 2 == 0 ? pair & 0xFFFF : pair >> 16) << 16 * half;
    }
    return result;
  });
}

inline uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  std::memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

inline float Exp2(float x) { return std::exp2(x); }

// A row's K of a fragment: two from each of four lanes, then the upper eight.
inline void ReadRow(const uint32_t* const (&lower)[4], int upper, float (&values)[16]) {
  for (int k = 0; k < 16; ++k) {
    const uint32_t pair = lower[k % 8 / 2][k / 8 * upper];
    values[k] = std::bit_cast<float>(k % 2 == 0 ? pair << 16 : pair & 0xFFFF0000);
  }
}

inline void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Lane {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
  };
  emulation::Together(Lane{d, a, {b0, b1}}, [](const Lane* lanes) {
    float columns[16][8];
    for (int n = 0; n < 8; ++n) {
      const Lane* of = lanes + 4 * n;
      float values[16];
      ReadRow({of[0].b, of[1].b, of[2].b, of[3].b}, 1, values);
      for (int k = 0; k < 16; ++k) columns[k][n] = values[k];
    }
    for (int m = 0; m < 16; ++m) {
      const Lane* of = lanes + 4 * (m % 8);
      const int half = m / 8;
      float row[16];
      ReadRow({of[0].a + half, of[1].a + half, of[2].a + half, of[3].a + half}, 2, row);
      float sums[8] = {};
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < 8; ++n) sums[n] += row[k] * columns[k][n];
      }
      for (int n = 0; n < 8; ++n) of[n / 2].d[2 * half + n % 2] += sums[n];
    }
  });
}

}  // namespace dorad::kernels
