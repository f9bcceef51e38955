// wgmma with A in registers: D[64, N] += A[64, 16] B[16, N] by one warpgroup, bf16 with fp32
// accumulators; fragments of A and D as in kernels/common/wgmma.cuh (D) and mma.m16n8k16 (A, warp w
// holds rows 16 w + g and + 8).
#pragma once

#include <cstdint>

#include "kernels/common/wgmma.cuh"

namespace dorad::kernels {

// Descriptor of B[16, N] in rows of N elements (the copy engine's 128-byte swizzle): positions go
// down the rows, `block_bytes` lie between blocks of 64 columns. Rows move on by 128 bytes each.
__device__ inline uint64_t WgmmaRowsTile(uint32_t shared_address, uint32_t block_bytes) {
  constexpr uint64_t kEightRows = 1024 >> 4;
  constexpr uint64_t kSwizzle128 = 1;
  return (kSwizzle128 << 62) | (kEightRows << 32) | (uint64_t{block_bytes >> 4} << 16) |
         ((shared_address & 0x3FFFF) >> 4);
}

#define DORAD_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DORAD_D16(i) DORAD_D4(i), DORAD_D4(i + 4), DORAD_D4(i + 8), DORAD_D4(i + 12)
#define DORAD_D64(i) DORAD_D16(i), DORAD_D16(i + 16), DORAD_D16(i + 32), DORAD_D16(i + 48)

// B's rows are the product's K: N = 64 or 128 columns. Accumulates.
template <int kN>
__device__ inline void WgmmaRows(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b_tile) {
  if constexpr (kN == 128) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,"
        "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "{%64,%65,%66,%67}, %68, 1, 1, 1, 1;\n"
        : DORAD_D64(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile));
  } else {
    static_assert(kN == 64);
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;\n"
        : DORAD_D16(0), DORAD_D16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile));
  }
}

// B[16, 8] whose columns are contiguous (as WgmmaTile describes). Accumulates.
__device__ inline void WgmmaNarrow(float (&d)[4], const uint32_t (&a)[4], uint64_t b_tile) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 1, 1, "
      "1, 0;\n"
      : DORAD_D4(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile));
}

#undef DORAD_D4
#undef DORAD_D16
#undef DORAD_D64

}  // namespace dorad::kernels
