// Single rows (decode). Persistent blocks take (item, key head) pairs, then joins of split rows; if
// these are few, some blocks only join. One warp copies tiles into a ring of stages, ahead across
// items, and four warps compute. Defines LaunchRowAttention and RowBlocks.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/common/status.h"
#include "kernels/decoder/attention_rows_compute.cuh"
#include "kernels/decoder/attention_rows_copy.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/device.h"
#include "kernels/isa/launch.h"
#include "kernels/isa/shared.cuh"
#include "kernels/isa/sm90/wgmma.cuh"

namespace dorad::kernels {
namespace row_attention {

// shared: 1024-byte aligned.
template <typename C>
__device__ void RunRowBlock(const Args<typename C::Isa>& p, uint8_t* shared) {
  const uint32_t base = SharedAddress(shared);
  if (threadIdx.x == 0) {
    C::Isa::Prefetch(p.k);
    C::Isa::Prefetch(p.v);
    C::Barriers::Init(base + C::barrier_at, 1, kWarps);
    BarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x < 32 * kWarps) {
    if constexpr (C::moves_registers) IncreaseRegisters<C::consumer_registers>();
    Consume<C>(p, shared, base);
  } else {
    if constexpr (C::moves_registers) DecreaseRegisters<C::producer_registers>();
    if (threadIdx.x < 32 * (kWarps + 1)) Produce<C>(p, shared, base);
  }
}

template <typename C>
__global__ void __launch_bounds__(C::threads, C::blocks)
    RowAttentionKernel(const __grid_constant__ Args<typename C::Isa> p) {
  LaunchDependents();
  RunRowBlock<C>(p, DynamicShared<1024>());
}

// Blocks that wait for each other's parts must run at the same time: no more than that.
template <typename C>
cudaError_t BlocksAtOnce(int32_t* blocks) {
  if constexpr (C::Isa::kHasCopyEngine) {
    static_assert(C::blocks * (C::shared_bytes + 1024) <= 228 * 1024 && C::stages >= 3);
    DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(blocks));
    *blocks *= C::blocks;
    return cudaSuccess;
  } else {
    static_assert(C::shared_bytes <= C::Isa::kSharedBytes && C::stages >= 1);
    int processors = 0;
    DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(&processors));
    DORAD_CUDA_RETURN_IF_ERROR(MostClustersAtOnce(RowAttentionKernel<C>, /*cluster=*/1, C::threads,
                                                  C::shared_bytes, blocks));
    *blocks = std::min(*blocks, C::blocks * processors);
    return cudaSuccess;
  }
}

template <typename C>
cudaError_t Launch(const AttentionLaunch& launch, cudaStream_t stream) {
  const PagedAttentionParams& params = launch.params;
  Args<typename C::Isa> args;
  DORAD_CUDA_RETURN_IF_ERROR(C::Isa::template Encode<C::cache_dim>(params.cache.k, &args.k));
  DORAD_CUDA_RETURN_IF_ERROR(C::Isa::template Encode<C::cache_dim>(params.cache.v, &args.v));
  args.factors = params.cache.factors;
  args.layout = launch.layout;
  args.q = params.q;
  args.out = params.out;
  args.pages = params.rows.pages;
  args.kv_heads = params.shape.kv_heads;
  args.kv_heads_inverse = (uint64_t{1} << 32) / params.shape.kv_heads + 1;
  args.group = AttentionGroup(params.shape);
  args.scale = params.softmax_scale * 1.44269504088896340736f;
  if (launch.append != nullptr) args.append = *launch.append;
  int32_t blocks;
  DORAD_CUDA_RETURN_IF_ERROR(BlocksAtOnce<C>(&blocks));
  return LaunchEarly(RowAttentionKernel<C>, blocks, C::threads, C::shared_bytes, stream, args);
}

// f(Config) of the shape.
template <typename Isa, typename F>
cudaError_t WithConfig(const AttentionShape& shape, bool shares, bool is_fp8, F f) {
  const auto of_cache = [&](auto head_dim, auto fp8) {
    if (AttentionGroup(shape) > 8) return f(Config<Isa, head_dim, 2, false, fp8>());
    if constexpr (SharesAttention(head_dim, 1)) {
      if (shares) return f(Config<Isa, head_dim, 1, true, fp8>());
    }
    return f(Config<Isa, head_dim, 1, false, fp8>());
  };
  const auto of_group = [&](auto head_dim) {
    if constexpr (HasTileAttention(head_dim)) {
      if (is_fp8) return of_cache(head_dim, std::true_type());
    }
    return is_fp8 ? cudaErrorInvalidValue : of_cache(head_dim, std::false_type());
  };
  switch (shape.head_dim) {
    case 64:
      return of_group(std::integral_constant<int, 64>());
    case 80:
      return of_group(std::integral_constant<int, 80>());
    case 96:
      return of_group(std::integral_constant<int, 96>());
    case 128:
      return of_group(std::integral_constant<int, 128>());
    case 256:
      return of_group(std::integral_constant<int, 256>());
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace row_attention

template <typename Isa>
cudaError_t RowBlocks(const AttentionShape& shape, bool shares, bool is_fp8, int32_t* blocks) {
  return row_attention::WithConfig<Isa>(shape, shares, is_fp8, [&](auto config) {
    return row_attention::BlocksAtOnce<decltype(config)>(blocks);
  });
}

template <typename Isa>
cudaError_t LaunchRowAttention(const AttentionLaunch& launch, cudaStream_t stream) {
  const PagedAttentionParams& params = launch.params;
  const bool is_fp8 = params.cache.factors != nullptr;
  return row_attention::WithConfig<Isa>(params.shape, params.shares, is_fp8, [&](auto config) {
    return row_attention::Launch<decltype(config)>(launch, stream);
  });
}

}  // namespace dorad::kernels
