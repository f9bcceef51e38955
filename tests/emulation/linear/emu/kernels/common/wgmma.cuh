#pragma once
#include "emu.h"
namespace dorad::kernels {
inline uint64_t WgmmaTile(uint32_t a) { return (1ull << 62) | (64ull << 32) | (1ull << 16) | ((a & 0x3FFFF) >> 4); }
inline void WgmmaFence() {}
inline void WgmmaCommit() {}
template <int P> void WgmmaWait() { emu::WarpBar(); }
inline float At(uint64_t tile, int r, int k) { uint32_t a = (uint32_t)(tile & 0x3FFF) << 4; a += (r / 8) * 1024 + (r % 8) * 128 + 2 * k; a ^= ((a >> 7) & 7) << 4; __nv_bfloat16 v; std::memcpy(&v, emu::Mem(emu::cur->block, a), 2); return __bfloat162float(v); }
template <int kN> void Wgmma(float (&d)[kN / 2], uint64_t A, uint64_t B, int acc) {
  int lane = emu::cur->tid % 32, w = emu::cur->tid / 32 % 4;
  for (int j = 0; j < 2; ++j) { float a[16]; for (int k = 0; k < 16; ++k) a[k] = At(A, 16 * w + lane / 4 + 8 * j, k);
    for (int i = 0; i < kN / 8; ++i) for (int c = 0; c < 2; ++c) { float s = 0; for (int k = 0; k < 16; ++k) s += a[k] * At(B, 8 * i + 2 * (lane % 4) + c, k); float& x = d[4 * i + 2 * j + c]; x = (acc ? x : 0) + s; } }
}
}
