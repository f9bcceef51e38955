// The emulator's form of kernels/isa/sm90/wgmma.cuh: products are complete at once, summed in fp32
// in the order of K.
#pragma once

#include <bit>
#include <cstring>

#include "tests/emulation/emulator.h"

namespace dorad::kernels {

template <int kRegisters>
void IncreaseRegisters() {}
template <int kRegisters>
void DecreaseRegisters() {}
inline void WgmmaFence() {}
inline void WgmmaCommit() {}
template <int kPending>
void WgmmaWait() {
  __syncwarp();
}

// Address and swizzle as the real descriptor has them.
inline uint64_t WgmmaTile(uint32_t shared_address) {
  return uint64_t{1} << 62 | (shared_address & 0x3FFFF) >> 4;
}

// A row's 16 elements, of which each eight lie side by side.
inline void ReadTile(uint64_t tile, int row, float (&values)[16]) {
  for (int first = 0; first < 16; first += 8) {
    uint32_t at = static_cast<uint32_t>(tile & 0x3FFF) << 4;
    at += row / 8 * 1024 + row % 8 * 128 + 2 * first;
    at ^= (at >> 7 & 7) << 4;
    const unsigned char* from = emulation::ThisBlock().At(at);
    for (int k = 0; k < 8; ++k) {
      uint16_t bits;
      std::memcpy(&bits, from + 2 * k, sizeof(bits));
      values[first + k] = std::bit_cast<float>(uint32_t{bits} << 16);
    }
  }
}

template <int kN>
void Wgmma(float (&d)[kN / 2], uint64_t a_tile, uint64_t b_tile, int accumulate) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  float a[2][16];
  for (int j = 0; j < 2; ++j) ReadTile(a_tile, 16 * warp + lane / 4 + 8 * j, a[j]);
  for (int i = 0; i < kN / 8; ++i) {
    for (int c = 0; c < 2; ++c) {
      float b[16];
      ReadTile(b_tile, 8 * i + 2 * (lane % 4) + c, b);
      for (int j = 0; j < 2; ++j) {
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += a[j][k] * b[k];
        float& to = d[4 * i + 2 * j + c];
        to = (accumulate != 0 ? to : 0.0f) + sum;
      }
    }
  }
}

}  // namespace dorad::kernels
