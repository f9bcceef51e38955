// mma.m16n8k16 (sm_80 and later): D[16, 8] += A[16, 16] B[16, 8] by one warp; bf16 operands, fp32
// sums. Fragments are loaded from row-major shared memory; a row's address is a multiple of 16
// bytes. With g = lane / 4 and t = lane % 4 a lane has D's elements (g, 2t), (g, 2t + 1),
// (g + 8, 2t), (g + 8, 2t + 1). All functions are for whole warps.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace dorad::kernels {

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void LoadMatrices(uint32_t address, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
// The same, each matrix transposed.
__device__ inline void LoadMatricesTransposed(uint32_t address, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

__device__ inline void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two neighbours of a fragment, rounded; `low` has the smaller index.
__device__ inline uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace dorad::kernels
