// h = s·(A x), y = g ⊙ (W x + B h) + bias: see linear.h for the function and linear_plan.h for the
// division.
//
// A block takes a panel of W, and of K all or one of two splits. It streams (weight tile, batch
// tile) pairs of 64 elements of K through a ring of shared memory into wgmma, the batch as the M
// operand, the panel as N: (W, x) over K = in, then (B of a slot, h masked to the slot's rows) over
// K = rank, into the same accumulators. Rows outside of a segment get products with zero, which
// change no bit of an fp32 sum.
//
// First, or after a few stages of W, the same ring carries the block's share of the shrink, (A, x),
// which the block multiplies and stores in device memory; while it continues with W, the shares of
// all blocks are added up: linear_shrink.cuh.
//
// Of MmaIsa the blocks of a group of rows of the batch, blockIdx.y, do all this for its rows, apart
// from those of other groups. Its splits of K are no cluster: sums of the first one go through
// device memory to the second one, which has all of the rank.
//
// A cluster is the splits of a panel, whose sums are added, and siblings: adjacent panels, which
// fetch x together, each a share of the rows for all.
//
// Warps: consumers (linear_consume.cuh) | producers of weights (linear_weights.cuh) | producers of
// the batch (linear_batch.cuh): the first fetch x, the others add up h meanwhile, and all copy h.
// Weights depend on no earlier kernel, so their producer runs ahead as far as the ring allows. Each
// role has its own code and registers; linear_block.cuh has their common state.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/dora/linear_batch.cuh"
#include "kernels/dora/linear_consume.cuh"
#include "kernels/dora/linear_tables.cuh"
#include "kernels/dora/linear_weights.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/shared.cuh"
#include "kernels/isa/sm90/cluster.cuh"
#include "kernels/isa/sm90/copy.cuh"
#include "kernels/isa/sm90/wgmma.cuh"

namespace dorad::kernels {

// The body of the kernel for all threads; `dynamic`: shared memory, 1024-byte aligned.
template <typename Isa, int kM, int kPanel, bool kAdapted>
__device__ void RunProject(const typename Isa::Matrix* w_map, const typename Isa::Matrix* x_map,
                           const typename Isa::Matrix* x_tile_map, const LinearArgs& args,
                           typename ProjectBlock<Isa, kM, kPanel, kAdapted>::Shared& shared,
                           uint32_t dynamic) {
  using Config = ProjectConfig<Isa, kM, kPanel, kAdapted>;
  LaunchDependents();
  ProjectWeights<Isa, kM, kPanel, kAdapted> weights(args, shared, dynamic);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  const bool is_consumer = warp < Config::kConsumerWarps;
  const bool is_weight_producer =
      Config::FetchesWeights(warp) && threadIdx.x % 32 < Isa::kFetchThreads;
  const bool is_cluster = Isa::kHasClusters && args.log_siblings + args.plan.log_splits > 0;
  if (warp == Config::kConsumerWarps) {
    weights.InitBarriers(args, shared);
    NamedBarrierArrive(1, Config::kThreads);
    if (is_cluster) ClusterArrive();
    if (is_weight_producer) weights.Start(w_map);
    __syncwarp();
  } else {
    if constexpr (Isa::kHasCopyEngine) {
      if (threadIdx.x == 0) PrefetchTensorMap(x_map);
    }
    LinearSegments<Config::kSegments, 32 * Config::kConsumerWarps> segments;
    if (kAdapted && is_consumer) {
      segments = LoadSegments<Config::kSegments, 32 * Config::kConsumerWarps>(args);
    }
    NamedBarrier(1, Config::kThreads);  // the barriers are initialised
    if (is_cluster) ClusterArrive();
    if (kAdapted && is_consumer) {
      FillTables(args, shared.tables, RowsOfBlock<Isa>(args), segments);
      NamedBarrier(2, 32 * Config::kConsumerWarps);
      if (warp == 0) {
        NumberBoxes(args, shared.tables);
        BarrierArrive(SharedAddress(&shared.tables_filled));
      }
    }
    if (Config::kWeightWarps > 1 && is_weight_producer) weights.Start(w_map);
  }
  if (is_cluster) ClusterWait();
  if (is_consumer) {
    if constexpr (Config::kMovesRegisters) IncreaseRegisters<Config::kConsumerRegisters>();
    ProjectConsumers<Isa, kM, kPanel, kAdapted>(args, shared, dynamic).Consume();
  } else {
    if constexpr (Config::kMovesRegisters) DecreaseRegisters<Config::kProducerRegisters>();
    if (Config::FetchesWeights(warp)) {
      weights.Produce(w_map);
    } else {
      ProjectBatch<Isa, kM, kPanel, kAdapted>(args, shared, dynamic)
          .Produce(x_map, x_tile_map, warp - Config::kConsumerWarps - Config::kWeightWarps);
    }
  }
  __syncwarp();
  if (is_cluster) ClusterBarrier();  // other blocks may still use this one's shared memory
}

template <typename Isa, int kM, int kPanel, bool kAdapted>
__global__ void __launch_bounds__(ProjectConfig<Isa, kM, kPanel, kAdapted>::kThreads,
                                  (ProjectConfig<Isa, kM, kPanel, kAdapted>::kBlocks))
    ProjectKernel(const __grid_constant__ typename Isa::Matrix w_map,
                  const __grid_constant__ typename Isa::Matrix x_map,
                  const __grid_constant__ typename Isa::Matrix x_tile_map,
                  const __grid_constant__ LinearArgs args) {
  using Shared = typename ProjectBlock<Isa, kM, kPanel, kAdapted>::Shared;
  RunProject<Isa, kM, kPanel, kAdapted>(&w_map, &x_map, &x_tile_map, args, StaticShared<Shared>(),
                                        SharedAddress(DynamicShared<1024>()));
}

}  // namespace dorad::kernels
