#include "kernels/common/barrier.cuh"
#include "kernels/common/host.h"
#include "kernels/common/launch.h"
#include "kernels/common/mma.cuh"
#include "kernels/vision/attention.h"

namespace dorad::kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kQueries = kSegmentTileRows;  // 16 a warp
constexpr int kKeys = 64;
constexpr int kStages = 2;
static_assert(kQueries == 16 * kWarps);

// kDim: head_dim or more, a multiple of 16; the columns beyond it are zero.
template <int kDim>
struct Shared {
  // Elements from one row to the next: eight rows begin in different banks.
  static constexpr int kPitch = kDim + 8;
  __nv_bfloat16 queries[kQueries][kPitch];
  __nv_bfloat16 keys[kStages][kKeys][kPitch];
  __nv_bfloat16 values[kStages][kKeys][kPitch];
};

// Begins the copy of `count` rows to shared memory; those from `valid` on become zero.
template <int kPitch>
__device__ void CopyRows(const __nv_bfloat16* from, int64_t stride, int valid, int count,
                         int head_dim, __nv_bfloat16 (*to)[kPitch]) {
  const int groups = head_dim / 8;
  for (int i = threadIdx.x; i < count * groups; i += kThreads) {
    const int row = i / groups;
    const int column = i % groups * 8;
    const bool is_valid = row < valid;
    CopyAsync16(SharedAddress(&to[row][column]), from + (is_valid ? row : 0) * stride + column,
                is_valid);
  }
}

__device__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's last groups of copies are under way.
template <int kPending>
__device__ void AwaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

template <int kPitch>
__device__ void ZeroColumns(int begin, int end, int rows, __nv_bfloat16 (*to)[kPitch]) {
  const int columns = end - begin;
  for (int i = threadIdx.x; i < rows * columns; i += kThreads) {
    to[i / columns][begin + i % columns] = __float2bfloat16_rn(0.0f);
  }
}

// Of the four lanes that share a row.
template <typename Op>
__device__ float ReduceRow(float x, Op op) {
  x = op(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
  return op(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}

// The 16 rows of a warp: a lane has rows lane / 4 and lane / 4 + 8 of them.
template <int kDim>
struct WarpRows {
  uint32_t query[kDim / 16][4];
  float out[kDim / 8][4] = {};
  float most[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};

  __device__ void LoadQueries(const __nv_bfloat16 (*rows)[Shared<kDim>::kPitch]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      LoadMatrices(SharedAddress(&rows[lane % 16][16 * k + lane / 16 * 8]), query[k]);
    }
  }

  // `valid`: of the tile's keys.
  __device__ void Take(const __nv_bfloat16 (*keys)[Shared<kDim>::kPitch],
                       const __nv_bfloat16 (*values)[Shared<kDim>::kPitch], int valid,
                       float scale) {
    const int lane = threadIdx.x % 32;
    float scores[kKeys / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        uint32_t b[4];
        const int key = 16 * n + lane / 16 * 8 + lane % 8;
        LoadMatrices(SharedAddress(&keys[key][16 * k + lane / 8 % 2 * 8]), b);
        Mma(scores[2 * n], query[k], b[0], b[1]);
        Mma(scores[2 * n + 1], query[k], b[2], b[3]);
      }
    }
    if (valid < kKeys) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (8 * n + lane % 4 * 2 + i % 2 >= valid) scores[n][i] = -INFINITY;
        }
      }
    }
    uint32_t weights[kKeys / 16][4];
    Weigh(scores, scale, weights);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        LoadMatricesTransposed(SharedAddress(&values[16 * k + lane % 16][16 * n + lane / 16 * 8]),
                               b);
        Mma(out[2 * n], weights[k], b[0], b[1]);
        Mma(out[2 * n + 1], weights[k], b[2], b[3]);
      }
    }
  }

  // The softmax's numerators, rounded; the sums so far are scaled to the new maximum.
  __device__ void Weigh(const float (&scores)[kKeys / 8][4], float scale,
                        uint32_t (&weights)[kKeys / 16][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_most = -INFINITY;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        tile_most = fmaxf(tile_most, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      }
      tile_most = ReduceRow(tile_most, [](float a, float b) { return fmaxf(a, b); });
      const float now = fmaxf(most[half], tile_most);
      const float shrink = exp2f((most[half] - now) * scale);
      most[half] = now;
      float tile_sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const __nv_bfloat162 pair =
            __floats2bfloat162_rn(exp2f((scores[n][2 * half] - now) * scale),
                                  exp2f((scores[n][2 * half + 1] - now) * scale));
        weights[n / 2][n % 2 * 2 + half] = *reinterpret_cast<const uint32_t*>(&pair);
        tile_sum += __low2float(pair) + __high2float(pair);
      }
      sum[half] = sum[half] * shrink + ReduceRow(tile_sum, [](float a, float b) { return a + b; });
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        out[n][2 * half] *= shrink;
        out[n][2 * half + 1] *= shrink;
      }
    }
  }
};

// One block a tile and head.
template <int kDim>
__global__ void __launch_bounds__(kThreads)
    SegmentAttentionKernel(const SegmentAttentionParams p, float scale) {
  constexpr int kPitch = Shared<kDim>::kPitch;
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<kDim>*>(memory);
  const SegmentTile tile = p.tiles[blockIdx.x];
  const int width = p.heads * p.head_dim;
  const int64_t stride = 3 * int64_t{width};
  const __nv_bfloat16* const queries = p.qkv + tile.row * stride + blockIdx.y * p.head_dim;
  const __nv_bfloat16* const keys = p.qkv + tile.begin * stride + width + blockIdx.y * p.head_dim;
  const int count = tile.end - tile.begin;
  const int tiles = (count + kKeys - 1) / kKeys;
  const auto copy_keys = [&](int index) {
    if (index < tiles) {
      const __nv_bfloat16* const from = keys + int64_t{index} * kKeys * stride;
      const int valid = min(kKeys, count - index * kKeys);
      CopyRows<kPitch>(from, stride, valid, kKeys, p.head_dim, shared.keys[index % kStages]);
      CopyRows<kPitch>(from + width, stride, valid, kKeys, p.head_dim,
                       shared.values[index % kStages]);
    }
    CommitCopies();
  };
  CopyRows<kPitch>(queries, stride, tile.rows, kQueries, p.head_dim, shared.queries);
  copy_keys(0);
  if (p.head_dim < kDim) {
    ZeroColumns<kPitch>(p.head_dim, kDim, kQueries, shared.queries);
    ZeroColumns<kPitch>(p.head_dim, kDim, kStages * kKeys, shared.keys[0]);
    ZeroColumns<kPitch>(p.head_dim, kDim, kStages * kKeys, shared.values[0]);
  }
  const int warp_row = threadIdx.x / 32 * 16;
  WarpRows<kDim> rows;
  for (int i = 0; i < tiles; ++i) {
    copy_keys(i + 1);
    AwaitCopies<1>();
    __syncthreads();
    if (i == 0) rows.LoadQueries(&shared.queries[warp_row]);
    rows.Take(shared.keys[i % kStages], shared.values[i % kStages], min(kKeys, count - i * kKeys),
              scale);
    __syncthreads();  // before the stage is filled again
  }
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + lane / 4 + 8 * half;
    if (row >= tile.rows) continue;
    const float factor = 1.0f / rows.sum[half];
    __nv_bfloat16* const out = p.out + int64_t{tile.row - p.first_row + row} * width +
                               blockIdx.y * p.head_dim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (8 * n >= p.head_dim) break;
      *reinterpret_cast<uint32_t*>(out + 8 * n) =
          PackBf16(rows.out[n][2 * half] * factor, rows.out[n][2 * half + 1] * factor);
    }
  }
}

template <int kDim>
cudaError_t Launch(const SegmentAttentionParams& params, cudaStream_t stream) {
  DORAD_CUDA_RETURN_IF_ERROR(AllowSharedMemory(SegmentAttentionKernel<kDim>));
  // exp(x) = 2^(x · log2 e)
  const float scale = params.softmax_scale * 1.4426950408889634f;
  const dim3 grid(params.num_tiles, params.heads);
  SegmentAttentionKernel<kDim><<<grid, kThreads, sizeof(Shared<kDim>), stream>>>(params, scale);
  return cudaGetLastError();
}

}  // namespace

cudaError_t SegmentAttention(const SegmentAttentionParams& params, cudaStream_t stream) {
  if (params.heads <= 0 || params.heads > 65535 || !HasSegmentAttention(params.head_dim) ||
      params.num_tiles <= 0 || params.softmax_scale <= 0.0f || !IsThere(params.qkv, 16) ||
      !IsThere(params.tiles, 4) || !IsThere(params.out, 4)) {
    return cudaErrorInvalidValue;
  }
  if (params.head_dim <= 32) return Launch<32>(params, stream);
  if (params.head_dim <= 64) return Launch<64>(params, stream);
  if (params.head_dim <= 80) return Launch<80>(params, stream);
  return Launch<128>(params, stream);
}

}  // namespace dorad::kernels
