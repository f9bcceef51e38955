// Clusters of blocks (sm_90), which reach into each other's shared memory.
#pragma once

#include <cstdint>

namespace dorad::kernels {

// The same for a barrier of any block of the cluster, by its RemoteAddress. Does not order this
// thread's earlier writes for the other block.
__device__ inline void BarrierArriveRemote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// For all threads of the cluster that have not exited, whole warps: writes before an arrival are
// visible after the wait. Arrivals and waits alternate.
__device__ inline void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline void ClusterBarrier() {
  ClusterArrive();
  ClusterWait();
}

// This block's index in its cluster.
__device__ inline int ClusterRank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The same address in the shared memory of block `rank` of the cluster, for StoreRemote.
__device__ inline uint32_t RemoteAddress(uint32_t shared_address, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address), "r"(rank));
  return address;
}

// The same object in the shared memory of block `rank` of the cluster, for plain accesses and
// atomics.
template <typename T>
__device__ inline T* RemotePointer(T* shared, int rank) {
  T* remote;
  asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(shared), "r"(rank));
  return remote;
}

// Stores 16 bytes; completes on the barrier, which is in the same block as `address`.
__device__ inline void StoreRemote(uint32_t address, float4 value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}

}  // namespace dorad::kernels
