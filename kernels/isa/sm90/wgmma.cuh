// wgmma (sm_90a): D[64, N] += A[64, 16] B[16, N] by one warpgroup; bf16 operands, fp32 sums.
// Operands in shared memory are rows of 64 elements (128 bytes) in the copy engine's 128-byte
// swizzle, 1024-byte aligned: of A along K, of B along K (WgmmaTile) or along N (WgmmaTileByK).
// Warp w holds rows 16 w + lane / 4 (+ 8) of D; its register 4 i + 2 j + c is row + 8 j, column
// 8 i + 2 (lane % 4) + c. A in registers is as mma.m16n8k16 has it, warp w with the same rows.
#pragma once

#include <cstdint>

namespace dorad::kernels {

// Sets this thread's number of registers, from the block's share; whole warpgroup.
template <int kRegisters>
__device__ inline void IncreaseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void DecreaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Descriptor of a swizzled tile; + 2 advances by 16 elements of K.
__device__ inline uint64_t WgmmaTile(uint32_t shared_address) {
  constexpr uint64_t kEightRows = 1024 >> 4;  // from one group of 8 rows to the next, in 16 bytes
  constexpr uint64_t kSwizzle128 = 1;
  return (kSwizzle128 << 62) | (kEightRows << 32) | (uint64_t{1} << 16) |
         ((shared_address & 0x3FFFF) >> 4);
}

// Descriptor of a B whose rows run along N, in blocks of 64 columns at a distance of `block_bytes`;
// 16 rows of K are 2048 bytes.
__device__ inline uint64_t WgmmaTileByK(uint32_t shared_address, uint32_t block_bytes) {
  constexpr uint64_t kEightRows = 1024 >> 4;
  constexpr uint64_t kSwizzle128 = 1;
  return (kSwizzle128 << 62) | (kEightRows << 32) | (uint64_t{block_bytes >> 4} << 16) |
         ((shared_address & 0x3FFFF) >> 4);
}

// Call before the first wgmma after a change of the accumulators or the shared memory; whole
// warpgroup.
__device__ inline void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `kPending` committed groups are running.
template <int kPending>
__device__ inline void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define DORAD_P4 "%0,%1,%2,%3"
#define DORAD_P8 DORAD_P4 ",%4,%5,%6,%7"
#define DORAD_P16 DORAD_P8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define DORAD_P32 DORAD_P16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define DORAD_P36 DORAD_P32 ",%32,%33,%34,%35"
#define DORAD_P40 DORAD_P36 ",%36,%37,%38,%39"
#define DORAD_P48 DORAD_P32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define DORAD_P64                                                                    \
  DORAD_P32                                                                          \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51" \
  ",%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define DORAD_P72 DORAD_P64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define DORAD_P88 DORAD_P72 ",%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87"
#define DORAD_P96 DORAD_P88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define DORAD_P128                                                              \
  DORAD_P96                                                                     \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110"     \
  ",%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125" \
  ",%126,%127"
#define DORAD_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DORAD_D8(i) DORAD_D4(i), DORAD_D4(i + 4)
#define DORAD_D16(i) DORAD_D8(i), DORAD_D8(i + 8)
#define DORAD_D32(i) DORAD_D16(i), DORAD_D16(i + 16)
#define DORAD_D36(i) DORAD_D32(i), DORAD_D4(i + 32)
#define DORAD_D40(i) DORAD_D32(i), DORAD_D8(i + 32)
#define DORAD_D48(i) DORAD_D32(i), DORAD_D16(i + 32)
#define DORAD_D64(i) DORAD_D32(i), DORAD_D32(i + 32)
#define DORAD_D72(i) DORAD_D64(i), DORAD_D8(i + 64)
#define DORAD_D88(i) DORAD_D72(i), DORAD_D16(i + 72)
#define DORAD_D96(i) DORAD_D64(i), DORAD_D32(i + 64)
#define DORAD_D128(i) DORAD_D64(i), DORAD_D64(i + 64)
// The three operands after the accumulators are numbered from `a`, `b`, `s`.
#define DORAD_WGMMA(n, places, registers, a, b, s)                                           \
  asm volatile(                                                                              \
      "{\n"                                                                                  \
      ".reg .pred p;\n"                                                                      \
      "setp.ne.b32 p, %" #s                                                                  \
      ", 0;\n"                                                                               \
      "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" places "}, %" #a ", %" #b \
      ", p, 1, 1, 0, 0;\n"                                                                   \
      "}\n"                                                                                  \
      : registers                                                                            \
      : "l"(a_tile), "l"(b_tile), "r"(accumulate))
// A in registers; accumulates.
#define DORAD_WGMMA_A(n, places, registers, a0, a1, a2, a3, b, by_k)                           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" places "}, {%" #a0 \
               ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b ", 1, 1, 1, " #by_k ";\n"                  \
               : registers                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile))

// Starts one step of K = 16; with `accumulate` 0, D is overwritten. Whole warpgroup.
template <int kN>
__device__ inline void Wgmma(float (&d)[kN / 2], uint64_t a_tile, uint64_t b_tile, int accumulate) {
  if constexpr (kN == 32) {
    DORAD_WGMMA(32, DORAD_P16, DORAD_D16(0), 16, 17, 18);
  } else if constexpr (kN == 64) {
    DORAD_WGMMA(64, DORAD_P32, DORAD_D32(0), 32, 33, 34);
  } else if constexpr (kN == 96) {
    DORAD_WGMMA(96, DORAD_P48, DORAD_D48(0), 48, 49, 50);
  } else if constexpr (kN == 128) {
    DORAD_WGMMA(128, DORAD_P64, DORAD_D64(0), 64, 65, 66);
  } else if constexpr (kN == 144) {
    DORAD_WGMMA(144, DORAD_P72, DORAD_D72(0), 72, 73, 74);
  } else if constexpr (kN == 176) {
    DORAD_WGMMA(176, DORAD_P88, DORAD_D88(0), 88, 89, 90);
  } else if constexpr (kN == 192) {
    DORAD_WGMMA(192, DORAD_P96, DORAD_D96(0), 96, 97, 98);
  } else {
    static_assert(kN == 256);
    DORAD_WGMMA(256, DORAD_P128, DORAD_D128(0), 128, 129, 130);
  }
}

// The same with a B of WgmmaTileByK.
__device__ inline void WgmmaByK(float (&d)[128], uint64_t a_tile, uint64_t b_tile, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" DORAD_P128
      "}, %128, %129, p, 1, 1, 0, 1;\n"
      "}\n"
      : DORAD_D128(0)
      : "l"(a_tile), "l"(b_tile), "r"(accumulate));
}

// The same with A in registers and a B of WgmmaTileByK; adds to D.
template <int kN>
__device__ inline void WgmmaByK(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b_tile) {
  if constexpr (kN == 64) {
    DORAD_WGMMA_A(64, DORAD_P32, DORAD_D32(0), 32, 33, 34, 35, 36, 1);
  } else if constexpr (kN == 72) {
    DORAD_WGMMA_A(72, DORAD_P36, DORAD_D36(0), 36, 37, 38, 39, 40, 1);
  } else if constexpr (kN == 80) {
    DORAD_WGMMA_A(80, DORAD_P40, DORAD_D40(0), 40, 41, 42, 43, 44, 1);
  } else {
    static_assert(kN == 128);
    DORAD_WGMMA_A(128, DORAD_P64, DORAD_D64(0), 64, 65, 66, 67, 68, 1);
  }
}

// The same for 8 columns and a B of WgmmaTile.
__device__ inline void WgmmaNarrow(float (&d)[4], const uint32_t (&a)[4], uint64_t b_tile) {
  DORAD_WGMMA_A(8, DORAD_P4, DORAD_D4(0), 4, 5, 6, 7, 8, 0);
}

#undef DORAD_WGMMA_A
#undef DORAD_WGMMA
#undef DORAD_P4
#undef DORAD_P8
#undef DORAD_P16
#undef DORAD_P32
#undef DORAD_P36
#undef DORAD_P40
#undef DORAD_P48
#undef DORAD_P64
#undef DORAD_P72
#undef DORAD_P88
#undef DORAD_P96
#undef DORAD_P128
#undef DORAD_D4
#undef DORAD_D8
#undef DORAD_D16
#undef DORAD_D32
#undef DORAD_D36
#undef DORAD_D40
#undef DORAD_D48
#undef DORAD_D64
#undef DORAD_D72
#undef DORAD_D88
#undef DORAD_D96
#undef DORAD_D128

}  // namespace dorad::kernels
