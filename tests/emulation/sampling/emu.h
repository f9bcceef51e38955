#pragma once
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <map>
#include <vector>
#include <cuda_runtime_api.h>
#include <vector_types.h>
#undef __device__
#undef __host__
#undef __global__
#undef __shared__
#undef __noinline__
#undef __launch_bounds__
#undef __cluster_dims__
#undef __grid_constant__
#define __device__
#define __global__
#define __shared__
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
namespace emu {
struct Fiber;
struct Bar { int count = 0; std::vector<Fiber*> waiting; };
struct Warp { Bar bar; uint64_t slot[32]; };
struct MBar { int need = 0, left = 0; long tx = 0; int phase = 0; std::vector<Fiber*> waiting; };
struct Cta { int alive = 0; std::map<uint32_t, MBar> mbars; int rank; int threads; Bar bar; std::vector<Warp> warps; std::vector<unsigned char> mem; };
struct Cluster { Bar bar; int total; std::vector<Cta> ctas; };
struct Fiber { ucontext_t ctx; char* stack; int tid; Cta* cta; Cluster* cluster; int block; bool done = false; };
struct Copy { Cta* cta; float* to; const float* from; size_t bytes; uint32_t bar; }; extern std::vector<Copy> copies;
extern Fiber* cur; extern ucontext_t main_ctx; extern std::deque<Fiber*> ready; extern std::function<void()> body;
inline void Wait(Bar& b, int n) {
  if (++b.count == n) { b.count = 0; for (Fiber* f : b.waiting) ready.push_back(f); b.waiting.clear(); ready.push_back(cur); }
  else b.waiting.push_back(cur);
  Fiber* me = cur; swapcontext(&me->ctx, &main_ctx);
}
inline Warp& W() { return cur->cta->warps[cur->tid / 32]; }
inline int lane() { return cur->tid % 32; }
inline void WarpSync() { Wait(W().bar, 32); }
template <class T> void Put(T v) { uint64_t u = 0; memcpy(&u, &v, sizeof(T)); W().slot[lane()] = u; WarpSync(); }
template <class T> T Get(int l) { T v; memcpy(&v, &W().slot[l], sizeof(T)); return v; }
void RunKernel(int grid, int threads, size_t bytes, std::function<void()> f);
struct D3 { int x; };
}
#define threadIdx (emu::D3{emu::cur->tid})
#define blockDim (emu::D3{emu::cur->cta->threads})
#define blockIdx (emu::D3{emu::cur->block})
inline void __syncthreads() { emu::Wait(emu::cur->cta->bar, emu::cur->cta->threads); }
inline void __syncwarp() { emu::WarpSync(); }
template <class T> T __shfl_sync(unsigned, T v, int l) { emu::Put(v); T r = emu::Get<T>(l); emu::WarpSync(); return r; }
template <class T> T __shfl_xor_sync(unsigned, T v, int m) { emu::Put(v); T r = emu::Get<T>(emu::lane() ^ m); emu::WarpSync(); return r; }
template <class T> T __shfl_up_sync(unsigned, T v, int d) { emu::Put(v); int l = emu::lane() - d; T r = l < 0 ? v : emu::Get<T>(l); emu::WarpSync(); return r; }
inline uint32_t __ballot_sync(unsigned, int p) { emu::Put<int>(p != 0); uint32_t r = 0; for (int i = 0; i < 32; ++i) r |= (uint32_t)(emu::Get<int>(i)) << i; emu::WarpSync(); return r; }
template <class T, class F> T emu_red(T v, F f) { emu::Put(v); T r = emu::Get<T>(0); for (int i = 1; i < 32; ++i) r = f(r, emu::Get<T>(i)); emu::WarpSync(); return r; }
template <class T> T __reduce_min_sync(unsigned, T v) { return emu_red(v, [](T a, T b) { return std::min(a, b); }); }
template <class T> T __reduce_max_sync(unsigned, T v) { return emu_red(v, [](T a, T b) { return std::max(a, b); }); }
template <class T> T __reduce_add_sync(unsigned, T v) { return emu_red(v, [](T a, T b) { return (T)(a + b); }); }
template <class T, class U> T atomicAdd(T* p, U v) { T o = *p; *p += v; return o; }
template <class T, class U> T atomicMin(T* p, U v) { T o = *p; *p = std::min(o, (T)v); return o; }
template <class T, class U> T atomicMax(T* p, U v) { T o = *p; *p = std::max(o, (T)v); return o; }
template <class T> T min(T a, T b) { return std::min(a, b); }
template <class T> T max(T a, T b) { return std::max(a, b); }
#define __fmaf_rn fmaf
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
inline int __float_as_int(float x) { int f; memcpy(&f, &x, 4); return f; }
inline float __uint_as_float(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }
inline uint32_t __float_as_uint(float x) { uint32_t f; memcpy(&f, &x, 4); return f; }
inline unsigned long long __float2ull_rn(float x) { return (unsigned long long)std::nearbyint(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
namespace cooperative_groups { struct CG { int block_rank() { return emu::cur->cta->rank; } void sync() { emu::Wait(emu::cur->cluster->bar, emu::cur->cluster->total); }
 template <class T> T* map_shared_rank(T* p, int r) { auto& c = emu::cur->cluster->ctas; size_t off = (unsigned char*)p - emu::cur->cta->mem.data(); if (off >= c[r].mem.size()) { fprintf(stderr, "bad remote\n"); abort(); } if (c[r].alive == 0) { fprintf(stderr, "remote access to an exited block\n"); abort(); } return (T*)(c[r].mem.data() + off); } };
inline CG this_cluster() { return {}; } }
inline long long __double_as_longlong(double x) { long long y; memcpy(&y, &x, 8); return y; }
inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
#define gridDim (emu::D3{emu::grid})
namespace emu { extern int grid;
inline void Complete(Cta* c, uint32_t a) { MBar& b = c->mbars[a]; if (b.left == 0 && b.tx == 0) { b.phase++; b.left = b.need; for (Fiber* f : b.waiting) ready.push_back(f); b.waiting.clear(); } }
inline void Issue(float* to, const float* from, size_t bytes, uint32_t bar) { memset(to, 0xFF, bytes); copies.push_back({cur->cta, to, from, bytes, bar}); }
inline void Land(size_t i) { Copy c = copies[i]; copies[i] = copies.back(); copies.pop_back(); memcpy(c.to, c.from, c.bytes); c.cta->mbars[c.bar].tx -= c.bytes; Complete(c.cta, c.bar); }
}
