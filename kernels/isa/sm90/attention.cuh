// Attention's products on Hopper: a warpgroup has 64 query rows and takes 64 positions at a time.
// kernels/isa/mma/attention.cuh has the same members for all other GPUs.
#pragma once

#include <cstdint>

#include "kernels/isa/sm90/isa.cuh"

namespace dorad::kernels {

// Tiles of queries, keys and values are 64 rows in blocks of 64 columns, each
// in the copy engine's 128-byte swizzle. Products begin between Begin and End and are complete
// after End. Registers of D are as mma.m16n8k16 has them, 16 rows for each warp.
struct Sm90Attention : Sm90Isa {
  // Whether values of a stage come and go apart from its keys, because few stages fit.
  static constexpr bool kApart = false;
  static constexpr int kBlockBytes = 64 * 128;

  // D[64, 64] = Q Kᵀ over 16 kSteps columns.
  template <int kSteps>
  __device__ static void Scores(float (&d)[32], uint32_t queries, uint32_t keys) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint32_t offset = s / 4 * kBlockBytes;
      Wgmma<64>(d, WgmmaTile(queries + offset) + 2 * (s % 4),
                WgmmaTile(keys + offset) + 2 * (s % 4), s > 0);
    }
  }
  // D[64, kN] += P V, of 16 positions: P in registers, V their rows.
  template <int kN>
  __device__ static void Values(float (&d)[kN / 2], const uint32_t (&p)[4], uint32_t values) {
    WgmmaByK<kN>(d, p, WgmmaTileByK(values, kBlockBytes));
  }
  // D[64, 8] += P 1; `ones`: 1024 bytes of them, in shared memory.
  __device__ static void Sums(float (&d)[4], const uint32_t (&p)[4], uint32_t ones) {
    WgmmaNarrow(d, p, WgmmaTile(ones));
  }
};

}  // namespace dorad::kernels
