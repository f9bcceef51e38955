// A warpgroup has 64 query rows; a warp of its own copies tiles of keys and values into a ring of
// stages. Scores and outputs by wgmma; the scores of the next tile run behind this one's outputs.
#include <cuda.h>

#include "kernels/common/host.h"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/launch.h"
#include "kernels/isa/mma/mma.cuh"
#include "kernels/isa/sm90/copy.cuh"
#include "kernels/isa/sm90/tensor_map.h"
#include "kernels/isa/sm90/wgmma.cuh"
#include "kernels/vision/attention.h"

namespace dorad::kernels {
namespace {

constexpr int kGroups = kSegmentTileRows / 64;  // warpgroups that compute
constexpr int kConsumers = 128 * kGroups;
constexpr int kThreads = kConsumers + 128;
constexpr int kRegistersConsumer = 160;
constexpr int kRegistersProducer = 24;
constexpr int kKeys = 64;  // of a stage
constexpr int kStages = 4;
constexpr int kBlockBytes = 64 * 128;  // 64 rows of 64 elements, swizzled

// kDim: head_dim or more. Columns from head_dim on are read as zeros.
template <int kDim>
struct Config {
  static constexpr int blocks = (kDim + 63) / 64;
  static constexpr int tile_bytes = blocks * kBlockBytes;  // of queries, keys or values
  static constexpr int query_at = kStages * 2 * tile_bytes;
  static constexpr int barrier_at = query_at + kGroups * tile_bytes;
  // Full and empty stages, and the queries; 1024 to align the stages.
  static constexpr int shared_bytes = barrier_at + (2 * kStages + 1) * 8 + 1024;
  static_assert(shared_bytes <= 227 * 1024);
};

struct Args {
  CUtensorMap map;  // [rows, 3 · heads, head_dim]
  const SegmentTile* tiles;
  __nv_bfloat16* out;
  int32_t heads;
  int32_t head_dim;
  int32_t first_row;
  float scale;  // · log2(e)
};

// 64 rows of one head, in blocks of 64 columns.
template <int kDim>
__device__ void CopyHead(const Args& p, uint32_t destination, int head, int row, uint32_t barrier) {
#pragma unroll
  for (int block = 0; block < Config<kDim>::blocks; ++block) {
    CopyTensorBox(destination + block * kBlockBytes, &p.map, 64 * block, head, row, barrier);
  }
}

template <int kDim>
__device__ void Produce(const Args& p, const SegmentTile& tile, uint32_t base) {
  using C = Config<kDim>;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * kStages;
  const uint32_t queries = empty + 8 * kStages;
  const int head = static_cast<int>(blockIdx.y);
  const int groups = (tile.rows + 63) / 64;
  BarrierArriveExpect(queries, groups * C::tile_bytes);
  for (int group = 0; group < groups; ++group) {
    CopyHead<kDim>(p, base + C::query_at + group * C::tile_bytes, head, tile.row + 64 * group,
                   queries);
  }
  int stage = 0;
  uint32_t parity = 0;
  for (int row = tile.begin; row < tile.end; row += kKeys) {
    BarrierWait(empty + 8 * stage, parity ^ 1);
    const uint32_t at = base + stage * 2 * C::tile_bytes;
    BarrierArriveExpect(full + 8 * stage, 2 * C::tile_bytes);
    CopyHead<kDim>(p, at, p.heads + head, row, full + 8 * stage);
    CopyHead<kDim>(p, at + C::tile_bytes, 2 * p.heads + head, row, full + 8 * stage);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// Of the four lanes that share a row.
template <typename Op>
__device__ float ReduceRow(float x, Op op) {
  x = op(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
  return op(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}

// The 64 rows of a warpgroup; of its warp's 16 a lane has rows lane / 4 and lane / 4 + 8.
template <int kDim>
struct GroupRows {
  float scores[kKeys / 2];
  uint32_t weights[kKeys / 16][4];
  float out[kDim / 2] = {};
  float most[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // of this lane's keys

  __device__ void StartScores(uint32_t queries, uint32_t keys) {
#pragma unroll
    for (int s = 0; s < (kDim + 15) / 16; ++s) {
      const uint32_t offset = s / 4 * kBlockBytes;
      Wgmma<kKeys>(scores, WgmmaTile(queries + offset) + 2 * (s % 4),
                   WgmmaTile(keys + offset) + 2 * (s % 4), s > 0);
    }
  }

  __device__ void StartValues(uint32_t values) {
#pragma unroll
    for (int s = 0; s < kKeys / 16; ++s) {
      WgmmaByK<kDim>(out, weights[s], WgmmaTileByK(values + s * 16 * 128, kBlockBytes));
    }
  }

  // The softmax's numerators, rounded; the sums so far are scaled to a new maximum. `valid`: of the
  // keys.
  __device__ void Weigh(int valid, float scale) {
    if (valid < kKeys) {
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= valid) scores[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float now = most[half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        now = fmaxf(now, fmaxf(scores[4 * n + 2 * half], scores[4 * n + 2 * half + 1]));
      }
      now = ReduceRow(now, [](float a, float b) { return fmaxf(a, b); });
      if (__any_sync(0xFFFFFFFF, now > most[half])) {
        const float shrink = Exp2((most[half] - now) * scale);
        most[half] = now;
        sum[half] *= shrink;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          out[4 * n + 2 * half] *= shrink;
          out[4 * n + 2 * half + 1] *= shrink;
        }
      }
      const float offset = now * scale;
      float added = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const float low = Exp2(fmaf(scores[4 * n + 2 * half], scale, -offset));
        const float high = Exp2(fmaf(scores[4 * n + 2 * half + 1], scale, -offset));
        weights[n / 2][n % 2 * 2 + half] = PackBf16(low, high);
        added += low + high;
      }
      sum[half] += added;
    }
  }
};

template <int kDim>
__device__ void Consume(const Args& p, const SegmentTile& tile, uint32_t base) {
  using C = Config<kDim>;
  const int group = threadIdx.x / 128;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * kStages;
  const uint32_t queries = base + C::query_at + group * C::tile_bytes;
  const int count = tile.end - tile.begin;
  const int tiles = (count + kKeys - 1) / kKeys;
  // A group without rows reads its stages, too: it must not hold up the ring.
  const bool is_idle = 64 * group >= tile.rows;
  GroupRows<kDim> rows;
  int stage = 0;
  uint32_t parity = 0;
  const auto keys = [&] { return base + stage * 2 * C::tile_bytes; };
  const auto release = [&](int used) {
    if (lane == 0) BarrierArrive(empty + 8 * used);
  };
  if (is_idle) {
    for (int i = 0; i < tiles; ++i) {
      BarrierWait(full + 8 * stage, parity);
      release(stage);
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    return;
  }
  BarrierWait(empty + 8 * kStages, 0);  // the queries
  BarrierWait(full, 0);
  WgmmaFence();
  rows.StartScores(queries, keys());
  WgmmaCommit();
  WgmmaWait<0>();
  for (int i = 0; i < tiles; ++i) {
    rows.Weigh(count - i * kKeys, p.scale);
    const int used = stage;
    WgmmaFence();
    rows.StartValues(keys() + C::tile_bytes);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    if (i + 1 < tiles) {
      BarrierWait(full + 8 * stage, parity);
      rows.StartScores(queries, keys());
    }
    WgmmaCommit();
    WgmmaWait<0>();
    release(used);
  }
  const int width = p.heads * p.head_dim;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = 1.0f / ReduceRow(rows.sum[half], [](float a, float b) { return a + b; });
    const int row = 64 * group + 16 * warp + lane / 4 + 8 * half;
    if (row >= tile.rows) continue;
    __nv_bfloat16* const out = p.out + int64_t{tile.row - p.first_row + row} * width +
                               blockIdx.y * p.head_dim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (8 * n >= p.head_dim) break;
      *reinterpret_cast<uint32_t*>(out + 8 * n) =
          PackBf16(rows.out[4 * n + 2 * half] * factor, rows.out[4 * n + 2 * half + 1] * factor);
    }
  }
}

// One block a tile and head.
template <int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    SegmentAttentionKernel(const __grid_constant__ Args p) {
  using C = Config<kDim>;
  extern __shared__ uint8_t dynamic[];
  const uint32_t at = SharedAddress(dynamic);
  const uint32_t base = at + (1024 - at % 1024) % 1024;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(base + C::barrier_at + 8 * i, 1);
      BarrierInit(base + C::barrier_at + 8 * (kStages + i), kConsumers / 32);
    }
    BarrierInit(base + C::barrier_at + 16 * kStages, 1);
    BarrierInitFence();
  }
  __syncthreads();
  const SegmentTile tile = p.tiles[blockIdx.x];
  if (threadIdx.x < kConsumers) {
    IncreaseRegisters<kRegistersConsumer>();
    Consume<kDim>(p, tile, base);
  } else {
    DecreaseRegisters<kRegistersProducer>();
    if (threadIdx.x == kConsumers) Produce<kDim>(p, tile, base);
  }
}

// Boxes of 64 rows and 64 columns of one head; out of bounds reads as zero.
cudaError_t EncodeHeads(const SegmentAttentionParams& params, CUtensorMap* map) {
  if (TensorMapEncoder() == nullptr) return cudaErrorNotSupported;
  const auto dim = static_cast<cuuint64_t>(params.head_dim);
  const auto heads = static_cast<cuuint64_t>(3 * params.heads);
  const cuuint64_t sizes[] = {dim, heads, static_cast<cuuint64_t>(params.rows)};
  const cuuint64_t strides[] = {2 * dim, 2 * dim * heads};  // bytes
  const cuuint32_t box[] = {64, 1, 64};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = TensorMapEncoder()(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<__nv_bfloat16*>(params.qkv), sizes,
      strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <int kDim>
cudaError_t Launch(const SegmentAttentionParams& params, cudaStream_t stream) {
  DORAD_CUDA_RETURN_IF_ERROR(AllowSharedMemory(SegmentAttentionKernel<kDim>));
  Args args;
  DORAD_CUDA_RETURN_IF_ERROR(EncodeHeads(params, &args.map));
  args.tiles = params.tiles;
  args.out = params.out;
  args.heads = params.heads;
  args.head_dim = params.head_dim;
  args.first_row = params.first_row;
  args.scale = params.softmax_scale * 1.4426950408889634f;  // exp(x) = 2^(x · log2 e)
  const dim3 grid(params.num_tiles, params.heads);
  SegmentAttentionKernel<kDim><<<grid, kThreads, Config<kDim>::shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t SegmentAttention(const SegmentAttentionParams& params, cudaStream_t stream) {
  if (params.rows <= 0 || params.heads <= 0 || params.heads > 21845 ||
      !HasSegmentAttention(params.head_dim) || params.num_tiles <= 0 ||
      params.softmax_scale <= 0.0f || !IsThere(params.qkv, 16) || !IsThere(params.tiles, 4) ||
      !IsThere(params.out, 4)) {
    return cudaErrorInvalidValue;
  }
  if (params.head_dim <= 64) return Launch<64>(params, stream);
  if (params.head_dim <= 72) return Launch<72>(params, stream);
  if (params.head_dim <= 80) return Launch<80>(params, stream);
  return Launch<128>(params, stream);
}

}  // namespace dorad::kernels
