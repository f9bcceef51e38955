// One producer warp feeds a ring of shared-memory stages with the bulk copy engine; two warpgroups,
// each with half of the tile's rows, multiply and reduce. Stages carry, tile after tile, the steps
// over K and then the tile of Z, so that the copies run on through the reductions. CTAs walk the
// tiles with a fixed stride.
#include <cuda.h>

#include <algorithm>
#include <limits>

#include "kernels/common/status.h"
#include "kernels/dora/norm_gemm.h"
#include "kernels/dora/norm_hopper.cuh"

namespace dorad::kernels::norm {
namespace {

constexpr int kTileM = 128;
constexpr int kStepK = 64;      // 128 bytes: the width of the swizzle
constexpr int kBoxBytes = 128;  // of a box's row
constexpr int kConsumers = 256;
constexpr int kThreads = 128 + kConsumers;
constexpr int kRegistersProducer = 40;
constexpr int kRegistersConsumer = 232;

// tile_n columns of D a CTA; ctas of a cluster work on adjacent tiles of rows and share the tile of
// Y, of which each fetches its part for all.
template <Reduction kind_, int tile_n_, int ctas_>
struct Config {
  static constexpr Reduction kind = kind_;
  static constexpr int tile_n = tile_n_;
  static constexpr int ctas = ctas_;
  // Y as [K, N]: N is contiguous.
  static constexpr bool y_by_k = kind == Reduction::kSquare;
  static constexpr int x_bytes = kTileM * kBoxBytes;
  static constexpr int y_bytes = tile_n * kBoxBytes;
  static constexpr int stage_bytes = x_bytes + y_bytes;
  static constexpr int stages = 196608 / stage_bytes;
  static constexpr int shared_bytes = stages * stage_bytes + 1024;  // aligned by hand
  // Z: boxes of 64 columns.
  static constexpr int z_box_bytes = kTileM * kBoxBytes;
  static constexpr int z_boxes = tile_n / 64;
  static constexpr int z_boxes_stage = 2;
  static constexpr int z_stages = kind == Reduction::kStore ? 0 : z_boxes / z_boxes_stage;
  static_assert(z_boxes_stage * z_box_bytes <= stage_bytes);
};

struct Params {
  CUtensorMap x;
  CUtensorMap y;
  CUtensorMap z;
  float* partial;
  float scale;
  int32_t m;
  int32_t n;
  int32_t tiles_n;
  int32_t splits;
  int32_t steps;         // over K
  int32_t period_steps;  // of X
  int32_t items;         // of a cluster: tile of columns, split, group of tiles of rows
};

// What a CTA does next.
struct Item {
  int32_t m;
  int32_t n;
  int32_t partial;  // row of the partial sums
  int32_t split;
  int32_t step_begin;
  int32_t step_end;
};

template <typename C>
__device__ Item ItemOf(const Params& p, int32_t index, uint32_t rank) {
  const int32_t tile_n = index % p.tiles_n;
  const int32_t rest = index / p.tiles_n;
  const int32_t split = rest % p.splits;
  const int32_t group = rest / p.splits;
  Item item;
  item.m = (group * C::ctas + static_cast<int32_t>(rank)) * kTileM;
  item.n = tile_n * C::tile_n;
  item.partial = tile_n * p.splits + split;
  item.split = split;
  item.step_begin = static_cast<int32_t>(static_cast<int64_t>(split) * p.steps / p.splits);
  item.step_end = static_cast<int32_t>(static_cast<int64_t>(split + 1) * p.steps / p.splits);
  return item;
}

// A place in the ring and the phase of its barriers.
template <int stages>
struct Ring {
  int32_t stage = 0;
  uint32_t phase = 0;
  __device__ void Next() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

struct Barriers {
  uint32_t full;  // of stage 0; the others follow in steps of 8 bytes
  uint32_t empty;
};

template <typename C>
__device__ void Produce(const Params& p, uint32_t data, Barriers barriers, uint32_t rank,
                        int32_t first, int32_t step) {
  constexpr uint16_t kAll = (1 << C::ctas) - 1;
  Ring<C::stages> ring;
  const auto acquire = [&](uint32_t bytes) {
    BarrierWait(barriers.empty + 8 * ring.stage, ring.phase ^ 1);
    BarrierExpect(barriers.full + 8 * ring.stage, bytes);
  };
  for (int32_t index = first; index < p.items; index += step) {
    const Item item = ItemOf<C>(p, index, rank);
    for (int32_t k = item.step_begin; k < item.step_end; ++k) {
      acquire(C::stage_bytes);
      const uint32_t full = barriers.full + 8 * ring.stage;
      const uint32_t x = data + ring.stage * C::stage_bytes;
      CopyBox(x, p.x, k % p.period_steps * kStepK, item.m, full);
      const uint32_t y = x + C::x_bytes;
      // This CTA's part of Y.
      constexpr int kPart = C::tile_n / C::ctas;
      const int32_t n = static_cast<int32_t>(rank) * kPart;
      if constexpr (C::y_by_k) {
#pragma unroll
        for (int box = 0; box < kPart / 64; ++box) {
          const int32_t column = n + 64 * box;
          const uint32_t to = y + column * kStepK * 2;
          if constexpr (C::ctas == 1) {
            CopyBox(to, p.y, item.n + column, k * kStepK, full);
          } else {
            CopyBoxToCluster(to, p.y, item.n + column, k * kStepK, full, kAll);
          }
        }
      } else {
        const uint32_t to = y + n * kBoxBytes;
        if constexpr (C::ctas == 1) {
          CopyBox(to, p.y, k * kStepK, item.n + n, full);
        } else {
          CopyBoxToCluster(to, p.y, k * kStepK, item.n + n, full, kAll);
        }
      }
      ring.Next();
    }
    for (int i = 0; i < C::z_stages; ++i) {
      acquire(C::z_boxes_stage * C::z_box_bytes);
#pragma unroll
      for (int box = 0; box < C::z_boxes_stage; ++box) {
        CopyBox(data + ring.stage * C::stage_bytes + box * C::z_box_bytes, p.z,
                item.n + 64 * (C::z_boxes_stage * i + box), item.m, barriers.full + 8 * ring.stage);
      }
      ring.Next();
    }
  }
}

// A pair of z and its two places of D.
template <Reduction kind>
__device__ void Reduce(uint32_t pair, float d0, float d1, float scale, float& sum0, float& sum1) {
  const float z0 = __uint_as_float(pair << 16);
  const float z1 = __uint_as_float(pair & 0xFFFF0000u);
  if constexpr (kind == Reduction::kSquare) {
    const float t0 = fmaf(scale, d0, z0);
    const float t1 = fmaf(scale, d1, z1);
    sum0 = fmaf(t0, t0, sum0);
    sum1 = fmaf(t1, t1, sum1);
  } else {
    sum0 = fmaf(z0, d0, sum0);
    sum1 = fmaf(z1, d1, sum1);
  }
}

template <typename C>
__device__ void Consume(const Params& p, uint32_t data, Barriers barriers, uint32_t rank,
                        int32_t first, int32_t step) {
  const int thread = threadIdx.x - 128;
  const int group = thread / 128;
  const int warp = thread % 128 / 32;
  const int lane = thread % 32;
  const int row = group * 64 + warp * 16;  // of the tile, where this warp's rows begin
  Ring<C::stages> ring;
  // One arrival a warp, at every CTA that may write the stage.
  const auto release = [&](int32_t stage) {
    if (lane < C::ctas) BarrierArriveCluster(AddressInCta(barriers.empty + 8 * stage, lane));
  };
  float d[C::tile_n / 2];
  for (int32_t index = first; index < p.items; index += step) {
    const Item item = ItemOf<C>(p, index, rank);
    int32_t previous = -1;
    for (int32_t k = item.step_begin; k < item.step_end; ++k) {
      BarrierWait(barriers.full + 8 * ring.stage, ring.phase);
      const uint32_t x = data + ring.stage * C::stage_bytes + group * 64 * kBoxBytes;
      const uint32_t y = data + ring.stage * C::stage_bytes + C::x_bytes;
      WgmmaFence();
#pragma unroll
      for (int i = 0; i < kStepK / 16; ++i) {
        const uint64_t a = Descriptor(x + 32 * i, 16, 8 * kBoxBytes);
        // 16 rows of K lie 16 · 128 bytes on where N is contiguous, 32 bytes on where K is.
        const uint64_t b =
            C::y_by_k ? Descriptor(y + 16 * kBoxBytes * i, kStepK * kBoxBytes, 8 * kBoxBytes)
                      : Descriptor(y + 32 * i, 16, 8 * kBoxBytes);
        Wgmma<C::y_by_k ? 1 : 0>(d, a, b, k > item.step_begin || i > 0);
      }
      WgmmaCommit();
      WgmmaWait<1>();
      if (previous >= 0) release(previous);
      previous = ring.stage;
      ring.Next();
    }
    WgmmaWait<0>();
    if (previous >= 0) release(previous);

    const int32_t low = item.m + row + lane / 4;
    const int32_t high = low + 8;
    if constexpr (C::kind == Reduction::kStore) {
      float* const to = p.partial + static_cast<int64_t>(item.split) * p.m * p.n;
#pragma unroll
      for (int i = 0; i < C::tile_n / 2; ++i) {
        const int32_t column = item.n + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int32_t m = i % 4 < 2 ? low : high;
        if (m < p.m && column < p.n) to[static_cast<int64_t>(m) * p.n + column] = d[i];
      }
    } else {
      // Two sums a row, for shorter chains.
      float sum[2][2] = {};
      // The lane's row for ldmatrix, and the first of the two groups of 8 columns it may address.
      const int z_row = row + lane % 16;
      const int z_group = lane / 16;
#pragma unroll
      for (int i = 0; i < C::z_stages; ++i) {
        BarrierWait(barriers.full + 8 * ring.stage, ring.phase);
#pragma unroll
        for (int box = 0; box < C::z_boxes_stage; ++box) {
          const uint32_t z =
              data + ring.stage * C::stage_bytes + box * C::z_box_bytes + z_row * kBoxBytes;
#pragma unroll
          for (int c = 0; c < 4; ++c) {  // 16 columns
            uint32_t pairs[4];
            LoadMatrices(z + (((2 * c + z_group) ^ (z_row % 8)) * 16), pairs);
            const int at = ((i * C::z_boxes_stage + box) * 8 + 2 * c) * 4;
            Reduce<C::kind>(pairs[0], d[at], d[at + 1], p.scale, sum[0][0], sum[0][1]);
            Reduce<C::kind>(pairs[1], d[at + 2], d[at + 3], p.scale, sum[1][0], sum[1][1]);
            Reduce<C::kind>(pairs[2], d[at + 4], d[at + 5], p.scale, sum[0][0], sum[0][1]);
            Reduce<C::kind>(pairs[3], d[at + 6], d[at + 7], p.scale, sum[1][0], sum[1][1]);
          }
        }
        __syncwarp();
        release(ring.stage);
        ring.Next();
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[half][0] + sum[half][1];
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
        const int32_t m = half == 0 ? low : high;
        if (lane % 4 == 0 && m < p.m) {
          p.partial[static_cast<int64_t>(item.partial) * p.m + m] = total;
        }
      }
    }
  }
}

template <typename C>
__global__ void __launch_bounds__(kThreads, 1) RowGemmKernel(const __grid_constant__ Params p) {
  extern __shared__ uint8_t raw[];
  __shared__ alignas(8) uint64_t barrier_storage[2 * C::stages];
  const uint32_t data = (SharedAddress(raw) + 1023) / 1024 * 1024;
  const Barriers barriers = {SharedAddress(barrier_storage),
                             SharedAddress(barrier_storage + C::stages)};
  const uint32_t rank = C::ctas == 1 ? 0 : CtaRankInCluster();
  LetLaterKernelsStart();
  if (threadIdx.x == 0) {
    PrefetchMap(p.x);
    PrefetchMap(p.y);
    if (C::z_stages > 0) PrefetchMap(p.z);
    for (int i = 0; i < C::stages; ++i) {
      BarrierInit(barriers.full + 8 * i, 1);
      BarrierInit(barriers.empty + 8 * i, C::ctas * kConsumers / 32);
    }
    BarrierInitFence();
  }
  if (C::ctas == 1) {
    __syncthreads();
  } else {
    ClusterSync();
  }
  WaitForEarlierKernels();
  const auto first = static_cast<int32_t>(blockIdx.x / C::ctas);
  const auto step = static_cast<int32_t>(gridDim.x / C::ctas);
  if (threadIdx.x < 128) {
    LowerRegisters<kRegistersProducer>();
    if (threadIdx.x == 0) Produce<C>(p, data, barriers, rank, first, step);
  } else {
    RaiseRegisters<kRegistersConsumer>();
    Consume<C>(p, data, barriers, rank, first, step);
  }
  // A neighbour may still write to this CTA's shared memory.
  if (C::ctas > 1) {
    __syncwarp();
    ClusterSync();
  }
}

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, looked up once: nothing here links to the driver.
EncodeFunction Encoder() {
  static const EncodeFunction encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &result);
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<EncodeFunction>(function);
  }();
  return encoder;
}

// Boxes of 64 columns by `rows` rows.
cudaError_t Encode(const Matrix& matrix, int64_t columns, int rows, CUtensorMap* map) {
  if (Encoder() == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns),
                               static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.ld) * 2};
  const cuuint32_t box[2] = {kBoxBytes / 2, static_cast<cuuint32_t>(rows)};
  const cuuint32_t element_strides[2] = {1, 1};
  const CUresult result = Encoder()(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<__nv_bfloat16*>(matrix.data), sizes,
      strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

int64_t TilesOf(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

int64_t ColumnsOf(const RowGemm& gemm) {
  return gemm.reduction == Reduction::kSquare ? gemm.y.columns : gemm.y.rows;
}

// Wide tiles reuse more; narrow ones where wide ones would be half empty, as at R = 384.
int TileN(const RowGemm& gemm) {
  if (gemm.reduction == Reduction::kStore) return 128;
  const int64_t rest = ColumnsOf(gemm) % 256;
  return rest != 0 && rest <= 128 && ColumnsOf(gemm) < 1024 ? 128 : 256;
}

constexpr int64_t kMultiprocessors = 132;  // of the machine that splits are made for

template <typename C>
cudaError_t LaunchAs(const RowGemm& gemm, cudaStream_t stream) {
  Params p;
  p.partial = gemm.partial;
  p.scale = gemm.scale;
  p.m = static_cast<int32_t>(gemm.x.rows);
  p.n = static_cast<int32_t>(ColumnsOf(gemm));
  p.tiles_n = static_cast<int32_t>(TilesOf(p.n, C::tile_n));
  p.splits = static_cast<int32_t>(gemm.splits);
  p.steps = static_cast<int32_t>(TilesOf(gemm.k, kStepK));
  p.period_steps = gemm.x_period == 0 ? p.steps : static_cast<int32_t>(gemm.x_period / kStepK);
  const int64_t items = TilesOf(p.m, kTileM * C::ctas) * p.tiles_n * p.splits;
  if (items > std::numeric_limits<int32_t>::max() / 2) return cudaErrorInvalidValue;
  p.items = static_cast<int32_t>(items);
  DORAD_CUDA_RETURN_IF_ERROR(Encode(gemm.x, gemm.x.columns, kTileM, &p.x));
  DORAD_CUDA_RETURN_IF_ERROR(
      Encode(gemm.y, gemm.y.columns, C::y_by_k ? kStepK : C::tile_n / C::ctas, &p.y));
  if (C::z_stages > 0) DORAD_CUDA_RETURN_IF_ERROR(Encode(gemm.z, gemm.z.columns, kTileM, &p.z));

  int device = 0;
  int multiprocessors = 0;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  DORAD_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  DORAD_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
      RowGemmKernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::shared_bytes));
  const int64_t clusters = std::min<int64_t>(items, multiprocessors / C::ctas);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * C::ctas));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = C::shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = C::ctas;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = C::ctas == 1 ? 1 : 2;
  return cudaLaunchKernelEx(&config, RowGemmKernel<C>, p);
}

}  // namespace

bool FitsTensorCores(const Matrix& matrix) {
  return reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0 && matrix.ld % 8 == 0;
}

int64_t Partials(const RowGemm& gemm) {
  return TilesOf(ColumnsOf(gemm), TileN(gemm)) * gemm.splits;
}

int64_t SplitsFor(const RowGemm& gemm, int64_t most) {
  const int64_t tiles = TilesOf(gemm.x.rows, kTileM) * TilesOf(ColumnsOf(gemm), TileN(gemm));
  const int64_t steps = TilesOf(gemm.k, kStepK);
  // At least four steps a part.
  most = std::max<int64_t>(1, std::min(most, steps / 4));
  // The largest fill of the last wave, and of equals the fewest parts.
  int64_t best = 1;
  double best_fill = 0.0;
  for (int64_t splits = 1; splits <= most; ++splits) {
    const int64_t items = tiles * splits;
    const double fill = static_cast<double>(items) /
                        static_cast<double>(TilesOf(items, kMultiprocessors) * kMultiprocessors);
    if (fill > best_fill + 0.02) {
      best = splits;
      best_fill = fill;
    }
    if (items > 8 * kMultiprocessors) break;
  }
  return best;
}

cudaError_t Launch(const RowGemm& gemm, cudaStream_t stream) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  if (gemm.x.rows > kMost || ColumnsOf(gemm) > kMost || gemm.k > kMost)
    return cudaErrorInvalidValue;
  const bool narrow = TileN(gemm) == 128;
  switch (gemm.reduction) {
    case Reduction::kSquare:
      return narrow ? LaunchAs<Config<Reduction::kSquare, 128, 2>>(gemm, stream)
                    : LaunchAs<Config<Reduction::kSquare, 256, 2>>(gemm, stream);
    case Reduction::kDot:
      return narrow ? LaunchAs<Config<Reduction::kDot, 128, 2>>(gemm, stream)
                    : LaunchAs<Config<Reduction::kDot, 256, 2>>(gemm, stream);
    case Reduction::kStore:
      return LaunchAs<Config<Reduction::kStore, 128, 1>>(gemm, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dorad::kernels::norm
