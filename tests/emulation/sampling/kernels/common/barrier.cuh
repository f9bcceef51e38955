#pragma once
#include "emu.h"
namespace dorad::kernels {
inline uint32_t SharedAddress(const void* p) { return (uint32_t)((unsigned char*)p - emu::cur->cta->mem.data()); }
inline void BarrierInit(uint32_t a, uint32_t n) { auto& b = emu::cur->cta->mbars[a]; b = {}; b.need = b.left = n; }
inline void BarrierInitFence() {}
inline void BarrierArrive(uint32_t a) { auto& b = emu::cur->cta->mbars[a]; if (--b.left < 0) { fprintf(stderr, "too many arrivals\n"); abort(); } emu::Complete(emu::cur->cta, a); }
inline void BarrierArriveExpect(uint32_t a, uint32_t n) { emu::cur->cta->mbars[a].tx += n; BarrierArrive(a); }
inline void BarrierWait(uint32_t a, uint32_t parity) { auto& b = emu::cur->cta->mbars[a]; while ((b.phase & 1) == (int)parity) { b.waiting.push_back(emu::cur); emu::Fiber* me = emu::cur; swapcontext(&me->ctx, &emu::main_ctx); } }
inline void FenceProxyAsync() {}
}
