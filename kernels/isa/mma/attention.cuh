// Attention's products by mma.m16n8k16: four warps have 64 query rows, 16 each, and take 64
// positions at a time. The members are those of kernels/isa/sm90/attention.cuh.
#pragma once

#include <cstdint>

#include "kernels/isa/mma/isa.cuh"

namespace dorad::kernels {

struct MmaAttention : MmaIsa<4> {
  static constexpr bool kApart = true;
  static constexpr int kBlockBytes = 64 * 128;

  template <int kSteps>
  __device__ static void Scores(float (&d)[32], uint32_t queries, uint32_t keys) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = static_cast<int>(threadIdx.x / 32 % 4);
    // Blocks are aligned: the swizzle turns with the column by an exclusive or of the address.
    const uint32_t q = queries + (16 * warp + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
    const uint32_t k = keys + (lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll
    for (float& x : d) x = 0.0f;
    // More at once would cost registers that sm_100 does not have.
    [[maybe_unused]] constexpr int kUnroll = kSteps > 8 ? 2 : 4;
#pragma unroll kUnroll
    for (int s = 0; s < kSteps; ++s) {
      const uint32_t block = s / 4 * kBlockBytes, turn = s % 4 * 32;
      uint32_t rows[4];
      LoadMatrices(rows, (q ^ turn) + block);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t columns[4];
        LoadMatrices(columns, (k ^ turn) + block + i * 16 * 128);
        MmaStep(&d[8 * i], rows, columns[0], columns[1]);
        MmaStep(&d[8 * i + 4], rows, columns[2], columns[3]);
      }
    }
  }
  template <int kN>
  __device__ static void Values(float (&d)[kN / 2], const uint32_t (&p)[4], uint32_t values) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const uint32_t v = values + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int i = 0; i < (kN + 15) / 16; ++i) {
      uint32_t columns[4];
      LoadMatricesTransposed(columns, (v ^ i % 4 * 32) + i / 4 * kBlockBytes);
      MmaStep(&d[8 * i], p, columns[0], columns[1]);
      if (16 * i + 8 < kN) MmaStep(&d[8 * i + 4], p, columns[2], columns[3]);
    }
  }
  __device__ static void Sums(float (&d)[4], const uint32_t (&p)[4], uint32_t) {
    constexpr uint32_t kOnes = 0x3F803F80;
    Mma(d, p, kOnes, kOnes);
  }
};

}  // namespace dorad::kernels
