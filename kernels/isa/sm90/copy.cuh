// Hopper's copy engine (sm_90a): boxes of tensors into shared memory, which complete on barriers
// there. Shared-memory addresses are 32-bit. All functions are for one thread unless they say
// otherwise.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace dorad::kernels {

// Arrives, and makes the phase wait for `bytes` more from the copy engine.
__device__ inline void BarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Copies `bytes` contiguous bytes; size and addresses are multiples of 16.
__device__ inline void CopyBytes(uint32_t destination, const void* source, uint32_t bytes,
                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// One box of a two-dimensional tensor, its corner at (column, row); out of bounds reads as zero.
__device__ inline void CopyTensorBox(uint32_t destination, const CUtensorMap* map, int column,
                                     int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(destination),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same of a three-dimensional tensor.
__device__ inline void CopyTensorBox(uint32_t destination, const CUtensorMap* map, int column,
                                     int row, int plane, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(destination),
      "l"(map), "r"(column), "r"(row), "r"(plane), "r"(barrier)
      : "memory");
}

// The same into all blocks of a cluster that `blocks` has a bit for: to the same place, completing
// on the barrier at the same place.
__device__ inline void CopyTensorBoxToBlocks(uint32_t destination, const CUtensorMap* map,
                                             int column, int row, uint32_t barrier,
                                             uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

// What L2 should do with copied data: evict it first, or last.
using CachePolicy = uint64_t;
__device__ inline CachePolicy EvictFirst() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline CachePolicy EvictLast() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void CopyTensorBoxBy(CachePolicy policy, uint32_t destination,
                                       const CUtensorMap* map, int column, int row,
                                       uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ inline void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// For a tensor map in device memory that may have changed since this multiprocessor used it: later
// copies of this thread read the map again.
__device__ inline void AcquireTensorMap(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

// Orders ordinary accesses to shared memory before those of the tensor cores and the copy engine.
__device__ inline void FenceProxyAsync() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for device memory, both ways: this thread's earlier writes, before reads of the copy
// engine in threads that synchronise with it; and writes that it has acquired, before its own
// copies.
__device__ inline void FenceProxyAsyncGlobal() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace dorad::kernels
