// Hopper's kernel behind DoraLinearPrefill: see linear_prefill.h for what it computes.
//
// Two blocks are a cluster. They work on one band of rows of the batch, half of it each, and one
// panel of rows of W at a time: each fetches its own half of x, and half of the panel for both. Or
// they share the rows, half as many, and have a panel each: what divides the tiles better.
// (x, W) pairs of 64 elements of K go through a ring of shared memory into wgmma, x as the M
// operand (64 rows a warpgroup). What the pairs are is known to the producers alone:
//   panels of the shrink: (x, A of a slot), summed in pieces of K, as DoraLinear's, into h
//   tiles of y:           for each of the plan's pieces of K: (x, W), then its share of
//                         (h masked to a segment's rows, B of its slot), into the same accumulators
// All clusters shrink first, then walk their tiles. The shrink has a ring of its own in the same
// memory: its stages are smaller, and more of them have to be on their way. Where its panels are
// too few for all clusters, each takes a slice of K; then the storers of all meet, and add the
// slices up, while the first tiles are multiplied. Where tiles are too few, two clusters divide
// each: they multiply a piece of K each and exchange their sums of half of its columns.
//
// What consumers do between two products is time without any: so sums of pieces are added, and wait
// to be stored, in places of their own, half of a tile's in registers and half in shared memory,
// and other warps store them while the products of the next tile run; consumers store the last one
// themselves. And code comes from memory too: whatever is unrolled over a tile is waited for at
// every tile.
//
// Warps: two warpgroups of consumers | weight producer | batch producer | a storer for each
// warpgroup.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/dora/linear_prefill_args.cuh"
#include "kernels/dora/linear_prefill_block.cuh"
#include "kernels/dora/linear_prefill_consume.cuh"
#include "kernels/dora/linear_prefill_produce.cuh"
#include "kernels/dora/linear_prefill_store.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/shared.cuh"
#include "kernels/isa/sm90/cluster.cuh"
#include "kernels/isa/sm90/copy.cuh"
#include "kernels/isa/sm90/wgmma.cuh"

namespace dorad::kernels {

// The kernel, of all threads, in shared memory that it is given; `dynamic`: 1024-byte aligned. In
// clusters of two blocks.
template <int kN>
__device__ void RunPrefill(const CUtensorMap* w_map, const CUtensorMap* x_map,
                           const CUtensorMap* h_map, const PrefillArgs& args,
                           typename PrefillBlock<kN>::Shared& shared, uint32_t dynamic) {
  using Config = PrefillConfig<kN>;
  using Block = PrefillBlock<kN>;
  if (threadIdx.x == 0) {
    PrefetchTensorMap(w_map);
    PrefetchTensorMap(x_map);
    PrefetchTensorMap(h_map);
    Block::InitBarriers(shared);
    shared.tables.panels = 0;
  }
  __syncthreads();
  FillTables(args, shared.tables);
  for (int i = threadIdx.x; i < args.p.num_segments; i += kPrefillThreads) shared.acquired[i] = 0;
  __syncthreads();
  ClusterBarrier();
  LaunchDependents();
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  Block block(args, shared, dynamic);
  if (warp < Config::kConsumerWarps) {
    IncreaseRegisters<Config::kRegistersConsumer>();
    block.Consume();
  } else {
    DecreaseRegisters<Config::kRegistersProducer>();
    if (warp == Config::kConsumerWarps) {
      const bool produces = threadIdx.x % 32 == 0;
      if (produces && args.shares_rows) block.template ProduceWeights<true>(w_map);
      if (produces && !args.shares_rows) block.template ProduceWeights<false>(w_map);
    } else if (warp == Config::kConsumerWarps + 1) {
      if (args.shares_rows) {
        block.template ProduceBatch<true>(x_map, h_map);
      } else {
        block.template ProduceBatch<false>(x_map, h_map);
      }
    } else {
      block.Store(warp - Config::kConsumerWarps - 2);
    }
    __syncwarp();
  }
  // The other block may still be writing and arriving here.
  ClusterBarrier();
}

template <int kN>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    PrefillKernel(const __grid_constant__ CUtensorMap w_map,
                  const __grid_constant__ CUtensorMap x_map,
                  const __grid_constant__ CUtensorMap h_map,
                  const __grid_constant__ PrefillArgs args) {
  using Shared = typename PrefillBlock<kN>::Shared;
  static_assert(sizeof(Shared) <= PrefillConfig<kN>::kStaticBytes);
  RunPrefill<kN>(&w_map, &x_map, &h_map, args, StaticShared<Shared>(),
                 (SharedAddress(DynamicShared<128>()) + 1023) / 1024 * 1024);
}

}  // namespace dorad::kernels
