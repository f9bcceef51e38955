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

// kDim: head_dim or more, a multiple of 8. The columns from head_dim to kColumns are zero.
template <int kDim>
struct Shared {
  static constexpr int kColumns = (kDim + 15) / 16 * 16;
  // Elements from one row to the next: eight rows begin in different banks.
  static constexpr int kPitch = kColumns + 8;
  __nv_bfloat16 queries[kQueries][kPitch];
  __nv_bfloat16 keys[kStages][kKeys][kPitch];
  __nv_bfloat16 values[kStages][kKeys][kPitch];
};

// Begins the copy of kRows rows to shared memory. Rows from `valid` on become zero, and columns
// from head_dim on.
template <int kDim, int kRows>
__device__ void CopyRows(const __nv_bfloat16* from, int64_t stride, int valid, int head_dim,
                         __nv_bfloat16 (*to)[Shared<kDim>::kPitch]) {
  constexpr int kGroups = Shared<kDim>::kColumns / 8;
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kGroups; i += kThreads) {
    const int row = i / kGroups;
    const int column = i % kGroups * 8;
    const bool is_valid = row < valid && column < head_dim;
    CopyAsync16(SharedAddress(&to[row][column]), is_valid ? from + row * stride + column : from,
                is_valid);
  }
}

__device__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's last groups of copies are under way.
template <int kPending>
__device__ void AwaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Of the four lanes that share a row.
template <typename Op>
__device__ float ReduceRow(float x, Op op) {
  x = op(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
  return op(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}

// The 16 rows of a warp: a lane has rows lane / 4 and lane / 4 + 8.
template <int kDim>
struct WarpRows {
  using Row = __nv_bfloat16[Shared<kDim>::kPitch];
  static constexpr int kSteps = Shared<kDim>::kColumns / 16;

  uint32_t query[kSteps][4];
  float out[kDim / 8][4] = {};
  float most[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // of this lane's keys

  __device__ void LoadQueries(const Row* rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      LoadMatrices(query[k], SharedAddress(&rows[lane % 16][16 * k + lane / 16 * 8]));
    }
  }

  // One tile of keys, of which the first `valid` count.
  __device__ void Take(const Row* keys, const Row* values, int valid, float scale) {
    const int lane = threadIdx.x % 32;
    float scores[kKeys / 8][4] = {};
    // Neighbouring products do not wait for one another: they have different sums.
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        const int key = 16 * n + lane / 16 * 8 + lane % 8;
        LoadMatrices(b, SharedAddress(&keys[key][16 * k + lane / 8 % 2 * 8]));
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
    Weigh(0, scores, scale, weights);
    Weigh(1, scores, scale, weights);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        uint32_t b[4];
        LoadMatricesTransposed(b,
                               SharedAddress(&values[16 * k + lane % 16][16 * n + lane / 16 * 8]));
        Mma(out[2 * n], weights[k], b[0], b[1]);
        if (2 * n + 1 < kDim / 8) Mma(out[2 * n + 1], weights[k], b[2], b[3]);
      }
    }
  }

  // The softmax's numerators, rounded; the sums so far are scaled to a new maximum.
  __device__ void Weigh(int half, const float (&scores)[kKeys / 8][4], float scale,
                        uint32_t (&weights)[kKeys / 16][4]) {
    float now = most[half];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      now = fmaxf(now, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    }
    now = ReduceRow(now, [](float a, float b) { return fmaxf(a, b); });
    if (__any_sync(0xFFFFFFFF, now > most[half])) {
      const float shrink = Exp2((most[half] - now) * scale);
      most[half] = now;
      sum[half] *= shrink;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        out[n][2 * half] *= shrink;
        out[n][2 * half + 1] *= shrink;
      }
    }
    const float offset = now * scale;
    float added = 0.0f;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const float low = Exp2(fmaf(scores[n][2 * half], scale, -offset));
      const float high = Exp2(fmaf(scores[n][2 * half + 1], scale, -offset));
      weights[n / 2][n % 2 * 2 + half] = PackBf16(low, high);
      added += low + high;
    }
    sum[half] += added;
  }

  __device__ float Sum(int half) const {
    return ReduceRow(sum[half], [](float a, float b) { return a + b; });
  }
};

// One block a tile and head.
template <int kDim>
__global__ void __launch_bounds__(kThreads, kDim <= 80 ? 2 : 1)
    SegmentAttentionKernel(const SegmentAttentionParams p, float scale) {
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
      CopyRows<kDim, kKeys>(from, stride, valid, p.head_dim, shared.keys[index % kStages]);
      CopyRows<kDim, kKeys>(from + width, stride, valid, p.head_dim,
                            shared.values[index % kStages]);
    }
    CommitCopies();
  };
  CopyRows<kDim, kQueries>(queries, stride, tile.rows, p.head_dim, shared.queries);
  copy_keys(0);
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
    const float factor = 1.0f / rows.Sum(half);
    const int row = warp_row + lane / 4 + 8 * half;
    if (row >= tile.rows) continue;
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
  if (params.head_dim <= 72) return Launch<72>(params, stream);
  if (params.head_dim <= 80) return Launch<80>(params, stream);
  return Launch<128>(params, stream);
}

}  // namespace dorad::kernels
