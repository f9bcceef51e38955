// Single rows (decode). Persistent blocks take (item, key head) pairs, then joins of split rows:
// one warp copies tiles into a ring of stages, ahead across items, and four warps compute.
#include "kernels/common/host.h"
#include "kernels/common/status.h"
#include "kernels/decoder/attention_rows_compute.cuh"
#include "kernels/decoder/attention_rows_copy.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"
#include "kernels/isa/sm90/copy.cuh"

namespace dorad::kernels {
namespace row_attention {
namespace {

template <typename C>
__global__ void __launch_bounds__(kThreads, C::blocks)
    RowAttentionKernel(const __grid_constant__ Args p) {
  LaunchDependents();
  extern __shared__ uint8_t dynamic[];
  uint8_t* const shared = dynamic + (1024 - SharedAddress(dynamic) % 1024) % 1024;
  const uint32_t base = SharedAddress(shared);
  if (threadIdx.x == 0) {
    PrefetchTensorMap(&p.k);
    PrefetchTensorMap(&p.v);
    for (int i = 0; i < C::stages; ++i) {
      BarrierInit(base + C::barrier_at + 8 * i, 1);
      BarrierInit(base + C::barrier_at + 8 * (C::stages + i), kWarps);
    }
    BarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x < 32 * kWarps) {
    Consume<C>(p, shared, base);
  } else {
    Produce<C>(p, shared, base);
  }
}

template <int kHeadDim, int kHeadTiles>
cudaError_t Launch(const AttentionLaunch& launch, cudaStream_t stream) {
  using C = Config<kHeadDim, kHeadTiles>;
  static_assert(C::blocks * (C::shared_bytes + 1024) <= 228 * 1024 && C::stages >= 3);
  const PagedAttentionParams& params = launch.params;
  Args args;
  DORAD_CUDA_RETURN_IF_ERROR(EncodeCache<kHeadDim>(params.cache.k, kKvPageTokens, &args.k));
  DORAD_CUDA_RETURN_IF_ERROR(EncodeCache<kHeadDim>(params.cache.v, kKvPageTokens, &args.v));
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
  DORAD_CUDA_RETURN_IF_ERROR(AttentionBlocks(params.shape, &blocks));
  return LaunchEarly(RowAttentionKernel<C>, blocks, kThreads, C::shared_bytes, stream, args);
}

template <int kHeadDim>
cudaError_t LaunchGroup(const AttentionLaunch& launch, cudaStream_t stream) {
  return AttentionGroup(launch.params.shape) <= 8 ? Launch<kHeadDim, 1>(launch, stream)
                                                  : Launch<kHeadDim, 2>(launch, stream);
}

}  // namespace
}  // namespace row_attention

cudaError_t AttentionBlocks(const AttentionShape& shape, int32_t* blocks) {
  DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(blocks));
  *blocks *= row_attention::BlocksOf(shape.head_dim, (AttentionGroup(shape) + 7) / 8);
  return cudaSuccess;
}

cudaError_t LaunchRowAttention(const AttentionLaunch& launch, cudaStream_t stream) {
  switch (launch.params.shape.head_dim) {
    case 64:
      return row_attention::LaunchGroup<64>(launch, stream);
    case 80:
      return row_attention::LaunchGroup<80>(launch, stream);
    case 96:
      return row_attention::LaunchGroup<96>(launch, stream);
    case 128:
      return row_attention::LaunchGroup<128>(launch, stream);
    case 256:
      return row_attention::LaunchGroup<256>(launch, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace dorad::kernels
