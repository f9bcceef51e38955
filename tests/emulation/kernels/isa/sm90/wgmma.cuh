// The emulator's form of kernels/isa/sm90/wgmma.cuh: products are complete at once, summed in fp32
// in the order of K.
#pragma once

#include <bit>
#include <cstring>

#include "kernels/isa/mma/mma.cuh"
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

inline uint64_t WgmmaTileByK(uint32_t shared_address, uint32_t block_bytes) {
  return uint64_t{1} << 62 | uint64_t{block_bytes >> 4} << 16 | (shared_address & 0x3FFFF) >> 4;
}

// Of 16 rows of kN columns.
template <int kN>
void ReadTileByK(uint64_t tile, float (&values)[16][kN]) {
  const uint32_t first = static_cast<uint32_t>(tile & 0x3FFF) << 4;
  const uint32_t block_bytes = static_cast<uint32_t>(tile >> 16 & 0x3FFF) << 4;
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < kN; n += 8) {
      uint32_t at = first + n / 64 * block_bytes + k * 128 + n % 64 * 2;
      at ^= (at >> 7 & 7) << 4;
      const unsigned char* from = emulation::ThisBlock().At(at);
      for (int i = 0; i < 8; ++i) {
        uint16_t bits;
        std::memcpy(&bits, from + 2 * i, sizeof(bits));
        values[k][n + i] = std::bit_cast<float>(uint32_t{bits} << 16);
      }
    }
  }
}

// A in registers; read(b): fills B.
template <int kN, typename F>
void WgmmaOfRegisters(float (&d)[kN / 2], const uint32_t (&a)[4], F read) {
  struct Lane {
    float* d;
    const uint32_t* a;
  };
  emulation::Together(Lane{d, a}, [&](const Lane* lanes) {
    float b[16][kN];
    read(b);
    for (int row = 0; row < 16; ++row) {
      const Lane* of = lanes + 4 * (row % 8);
      const int half = row / 8;
      float values[16];
      ReadRow({of[0].a + half, of[1].a + half, of[2].a + half, of[3].a + half}, 2, values);
      float sums[kN] = {};
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < kN; ++n) sums[n] += values[k] * b[k][n];
      }
      for (int n = 0; n < kN; ++n) of[n % 8 / 2].d[n / 8 * 4 + 2 * half + n % 2] += sums[n];
    }
  });
}

template <int kN>
void WgmmaByK(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b_tile) {
  WgmmaOfRegisters<kN>(d, a, [&](float(&b)[16][kN]) { ReadTileByK(b_tile, b); });
}

inline void WgmmaNarrow(float (&d)[4], const uint32_t (&a)[4], uint64_t b_tile) {
  WgmmaOfRegisters<8>(d, a, [&](float(&b)[16][8]) {
    for (int n = 0; n < 8; ++n) {
      float column[16];
      ReadTile(b_tile, n, column);
      for (int k = 0; k < 16; ++k) b[k][n] = column[k];
    }
  });
}

}  // namespace dorad::kernels
