// The emulator's form of kernels/isa/mma/mma.cuh, as far as emulated kernels use it: products are
// summed in fp32 in the order of K.
#pragma once

#include <array>
#include <bit>
#include <cmath>

#include "tests/emulation/emulator.h"

namespace dorad::kernels {

inline void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  if (address % 16 != 0) emulation::Fail("a row of a matrix is not aligned");
  const int lane = static_cast<int>(threadIdx.x % 32);
  emulation::Exchange(address, [&](const uint32_t* rows) {
    for (int i = 0; i < 4; ++i) {
      std::memcpy(&r[i], emulation::ThisBlock().At(rows[8 * i + lane / 4] + lane % 4 * 4), 4);
    }
    return 0;
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

// The halves of a register, the lower one first.
inline float HalfOf(uint32_t pair, int half) {
  return std::bit_cast<float>(half == 0 ? pair << 16 : pair & 0xFFFF0000);
}

inline void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  using Registers = std::array<uint32_t, 6>;
  emulation::Exchange(Registers{a[0], a[1], a[2], a[3], b0, b1}, [&](const Registers* all) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8;
      const int column = lane % 4 * 2 + i % 2;
      float sum = 0.0f;
      for (int k = 0; k < 16; ++k) {
        const Registers& of_row = all[row % 8 * 4 + k % 8 / 2];
        const Registers& of_column = all[column * 4 + k % 8 / 2];
        sum += HalfOf(of_row[row / 8 + k / 8 * 2], k % 2) * HalfOf(of_column[4 + k / 8], k % 2);
      }
      d[i] += sum;
    }
    return 0;
  });
}

}  // namespace dorad::kernels
