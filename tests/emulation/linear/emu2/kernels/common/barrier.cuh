#pragma once
#include "emu.h"
namespace dorad::kernels {
using namespace emu;
struct FakeMap { const __nv_bfloat16* data; int rows, cols, ld, box; };
inline uint32_t SharedAddress(const void* p) { return (const unsigned char*)p - cur->block->base; }
inline MBar& Bar(uint32_t a) { auto it = cur->block->bars.find(a); if (it == cur->block->bars.end()) { std::printf("no barrier %u\n", a); abort(); } return it->second; }
inline void BarrierInit(uint32_t a, uint32_t n) { cur->block->bars[a] = {(int)n, (int)n, 0, 0}; }
inline void BarrierInitFence() {}
inline void BarrierArrive(uint32_t a) { MBar& b = Bar(a); --b.pending; Check(b); }
inline void BarrierArriveExpect(uint32_t a, uint32_t n) { MBar& b = Bar(a); b.tx += n; --b.pending; Check(b); }
inline void BarrierHoldForCopies(uint32_t) {}
inline void BarrierWait(uint32_t a, uint32_t parity) { MBar& b = Bar(a); while (b.phase == (int)parity) Yield(); }
inline void CopyAsync16(uint32_t d, const void* s, bool v) { if (v) std::memcpy(Mem(cur->block, d), s, 16); else std::memset(Mem(cur->block, d), 0, 16); }
inline void CopyTensorBox(uint32_t d, const CUtensorMap* map, int col, int row, uint32_t bar) {
  FakeMap m; std::memcpy(&m, map, sizeof(m)); Block* blk = cur->block; MBar* b = &Bar(bar);
  pending.push_back([=] {
    for (int r = 0; r < m.box; ++r) for (int c = 0; c < 64; ++c) {
      __nv_bfloat16 v = __float2bfloat16(0.0f); int rr = row + r, cc = col + c;
      if (rr >= 0 && rr < m.rows && cc >= 0 && cc < m.cols) v = m.data[(size_t)rr * m.ld + cc];
      std::memcpy(Mem(blk, d + r * 128 + (((c / 8) ^ (r & 7)) << 4) + (c % 8) * 2), &v, 2);
    }
    b->tx -= m.box * 128; Check(*b);
  });
}
inline void CopyTensorBoxOnce(uint32_t d, const CUtensorMap* map, int col, int row, uint32_t bar) { CopyTensorBox(d, map, col, row, bar); }
inline void PrefetchL2(const void*) {}
inline void PrefetchTensorMap(const CUtensorMap*) {}
inline void FenceProxyAsync() {}
inline void LaunchDependents() {}
inline void WaitForPrevious() { for (int i = 0; i < 20; ++i) Yield(); }
inline void NamedBarrier(int id, int threads) { Named& n = cur->block->named[id]; int g = n.gen; if (++n.arrived == threads) { n.arrived = 0; ++n.gen; ++progress; } else while (n.gen == g) Yield(); }
inline void ClusterBarrier() { Cluster* c = cur->block->cluster; int g = c->gen; ++c->arrived; for (;;) { if (c->gen != g) return; int alive = 0; for (Block* b : c->blocks) alive += b->alive; if (c->arrived == alive) { c->arrived = 0; ++c->gen; ++progress; return; } Yield(); } }
inline uint32_t RemoteAddress(uint32_t a, int rank) { return 0x80000000u | (uint32_t)rank << 24 | a; }
inline void StoreRemote(uint32_t a, float4 v, uint32_t bar) { Block* b = cur->block->cluster->blocks.at((a >> 24) & 0x7F); if (((bar >> 24) & 0x7F) != ((a >> 24) & 0x7F) || !b->alive) { std::printf("bad remote\n"); abort(); } pending.push_back([=] { if (!b->alive) { std::printf("store to a block that left\n"); abort(); } std::memcpy(Mem(b, a & 0xFFFFFF), &v, 16); auto& m = b->bars.at(bar & 0xFFFFFF); m.tx -= 16; Check(m); }); }
inline void StoreShared(uint32_t a, float4 v) { std::memcpy(Mem(cur->block, a), &v, 16); }
inline float4 LoadShared(uint32_t a) { float4 v; std::memcpy(&v, Mem(cur->block, a), 16); return v; }
inline void StoreTransposed(uint32_t address, __nv_bfloat162 first, __nv_bfloat162 second) {
  struct S { uint32_t a; __nv_bfloat16 m[2][2]; } s{address, {{first.x, first.y}, {second.x, second.y}}};
  Exchange(s, [](S* all) {
    if (cur->tid % 32 < 16) { int m = cur->tid % 32 / 8, r = cur->tid % 8; for (int i = 0; i < 8; ++i) std::memcpy(Mem(cur->block, all[cur->tid % 32].a + 2 * i), &all[i * 4 + r / 2].m[m][r % 2], 2); }
    return 0; });
  __syncwarp();
}
inline void SignalRelease(uint32_t* c) { ++*c; ++progress; }
inline uint32_t LoadAcquire(const uint32_t* c) { return *c; }
inline void SpinUntil(const uint32_t* c, uint32_t v) { while (*c != v) Yield(); }
}
