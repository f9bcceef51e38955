#pragma once
#define __launch_bounds__(...)
#define __grid_constant__
#define __global__
#define __shared__
#include <cuda.h>
#include <cuda_bf16.h>
#include <vector_types.h>
#include <vector_functions.h>
#include <ucontext.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <vector>
#include <deque>
namespace emu {
struct Warp { int arrived = 0, gen = 0; alignas(16) unsigned char slot[32][64]; };
struct MBar { int init = 0, pending = 0; long tx = 0; int phase = 0; };
struct Named { int arrived = 0, gen = 0; };
struct Block;
struct Cluster { int arrived = 0, gen = 0; std::vector<Block*> blocks; };
struct Block { int index = 0; std::vector<unsigned char> mem; unsigned char* base = nullptr; std::vector<Warp> warps; std::map<uint32_t, MBar> bars; Named named[16]; int alive = 0, threads = 0; Cluster* cluster = nullptr; int rank = 0; };
struct Thread { ucontext_t ctx; std::vector<unsigned char> stack; Block* block; unsigned tid; bool done = false; };
extern Thread* cur; extern unsigned grid; extern ucontext_t sched; extern std::mt19937 rng;
extern std::deque<std::function<void()>> pending;
extern long progress;
inline void Yield() { swapcontext(&cur->ctx, &sched); }
inline Warp& W() { return cur->block->warps[cur->tid / 32]; }
inline void WarpBar() { Warp& w = W(); int g = w.gen; if (++w.arrived == 32) { w.arrived = 0; ++w.gen; ++progress; } else while (w.gen == g) Yield(); }
template <class T, class F> auto Exchange(T v, F f) { Warp& w = W(); std::memcpy(w.slot[cur->tid % 32], &v, sizeof(T)); WarpBar(); T all[32]; for (int i = 0; i < 32; ++i) std::memcpy(&all[i], w.slot[i], sizeof(T)); WarpBar(); return f(all); }
inline void Check(MBar& b) { if (b.pending < 0) { std::printf("too many arrivals\n"); abort(); } if (b.pending == 0 && b.tx == 0) { b.phase ^= 1; b.pending = b.init; ++progress; } }
inline unsigned char* Mem(Block* b, uint32_t a) { if (a >= b->mem.size() - 2048) { std::printf("shared address %u\n", a); abort(); } return b->base + a; }
struct Dim { unsigned x; };
}
#define threadIdx (emu::Dim{emu::cur->tid})
#define blockIdx (emu::Dim{(unsigned)emu::cur->block->index})
#define blockDim (emu::Dim{(unsigned)emu::cur->block->threads})
#define gridDim (emu::Dim{emu::grid})
template <class T> T __shfl_sync(unsigned, T v, int l) { return emu::Exchange(v, [l](T* a) { return a[l]; }); }
inline int __any_sync(unsigned, bool v) { return emu::Exchange((int)v, [](int* a) { int r = 0; for (int i = 0; i < 32; ++i) r |= a[i]; return r; }); }
inline void __syncwarp() { emu::WarpBar(); }
inline void __syncthreads() { emu::Named& n = emu::cur->block->named[0]; int g = n.gen; if (++n.arrived == emu::cur->block->threads) { n.arrived = 0; ++n.gen; } else while (n.gen == g) emu::Yield(); }
inline void __threadfence() {}
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> void __stcg(T* p, T v) { *p = v; }
inline unsigned atomicAdd(unsigned* p, unsigned v) { unsigned o = *p; *p += v; return o; }
inline int atomicAdd(int* p, int v) { int o = *p; *p += v; return o; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
