// Stores of Hopper's kernel behind DoraLinearPrefill: h by the consumers, y by the storers. Part of
// linear_prefill_kernel.cuh.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/dora/linear_prefill_block.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/memory.cuh"

namespace dorad::kernels {

template <int kN>
template <int kSums>
__device__ void PrefillBlock<kN>::StoreShrunk(const float (&sum)[kSums], int row,
                                              const Panel& panel, int first) const {
  const int segment = panel.segment;
  const int rank = tables_.rank[panel.part][segment];
  const float scale = FactorsOf(args_, tables_.slot[segment], panel.part)->scale;
#pragma unroll
  for (int j = 0; j < 2; ++j, row += 8) {
    const bool mine = row >= tables_.begin[segment] && row < tables_.begin[segment + 1];
    __nv_bfloat16* line =
        args_.h + (static_cast<int64_t>(row) * args_.p.shape.parts + panel.part) * args_.ldh;
#pragma unroll
    for (int i = 0; i < kSums / 16; ++i) {
      uint32_t pairs[4];  // columns 2 (lane % 4).. of 4 blocks of 8
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int at = 4 * (4 * i + k) + 2 * j;
        pairs[k] = PackPair(scale * sum[at], scale * sum[at + 1]);
      }
      TransposeInFours(pairs);
      const int column = panel.column + first + 8 * (4 * i + Lane() % 4);
      if (!mine || column >= rank) continue;
      *reinterpret_cast<uint4*>(line + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}

template <int kN>
__device__ void PrefillBlock<kN>::StoreShare(const float (&sum)[Config::kShrinkN / 2],
                                             const Panel& panel, int slice) const {
  const int warp = static_cast<int>(threadIdx.x / 32);
  if (!HasRows(panel.segment, FirstRow(panel.band) + 16 * warp)) return;
#pragma unroll
  for (int i = 0; i < Config::kShrinkN / 8; ++i) {
    *ShareOf(panel.index, slice, BlockRank(), i, threadIdx.x) =
        make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
  }
}

template <int kN>
__device__ void PrefillBlock<kN>::AddShares(int storer) const {
  constexpr int kColumns = 32;  // that a warp adds at once, of 16 rows
  constexpr int kThirds = Config::kShrinkN / kColumns;
  constexpr int kWarps = kPrefillTileRows / 16;
  constexpr int kAtOnce = Config::kAddAtOnce;
  if (storer == 0 && Lane() == 0) SpinUntil(&args_.counters->shares, gridDim.x);
  NamedBarrier(4, 64);
  const int first = static_cast<int>(storer * gridDim.x + blockIdx.x);
  ForEachPiece(first, 2 * gridDim.x, 2 * kWarps * kThirds, [&](const Panel& panel, int piece) {
    const int third = piece % kThirds;
    const int warp = piece / kThirds;  // of both blocks'
    const int row = panel.band * kPrefillBandRows + 16 * warp;
    if (!HasRows(panel.segment, row)) return;
    float sum[kColumns / 2] = {};
#pragma unroll 1
    for (int slice = 0; slice < slices_; slice += kAtOnce) {
      float4 shares[kAtOnce][kColumns / 8];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          shares[i][j] =
              slice + i < slices_
                  ? __ldcg(ShareOf(panel.index, slice + i, warp / kWarps,
                                   third * (kColumns / 8) + j, warp % kWarps * 32 + Lane()))
                  : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          sum[4 * j] += shares[i][j].x;
          sum[4 * j + 1] += shares[i][j].y;
          sum[4 * j + 2] += shares[i][j].z;
          sum[4 * j + 3] += shares[i][j].w;
        }
      }
    }
    StoreShrunk(sum, row + Lane() / 4, panel, third * kColumns);
  });
  // The copy engine will read h.
  FenceProxyAsyncGlobal();
  NamedBarrier(4, 64);
  if (storer == 0 && Lane() == 0) SignalRelease(&args_.counters->shrunk);
}

template <int kN>
__device__ const float* PrefillBlock<kN>::Magnitudes(int segment, int part) const {
  if (tables_.rank[part][segment] == 0) return nullptr;
  const float* g = FactorsOf(args_, tables_.slot[segment], part)->g;
  return g == nullptr ? nullptr : g - args_.part_begin[part];
}

template <int kN>
__device__ void PrefillBlock<kN>::StoreHalf(int group, int row0, int column0) {
  BarrierWait(parked_ + 8 * group, half_parity_);
  constexpr int kWarps = Config::kConsumerWarps / 2;
  StoreParked(sums_ + group * kWarps * Config::kParkedBytes, kWarps, row0, column0);
  __syncwarp();
  if (Lane() == 0) BarrierArrive(stored_ + 8 * group);
  half_parity_ ^= 1;
}

template <int kN>
__device__ void PrefillBlock<kN>::StoreParked(uint32_t sums, int warps, int row0,
                                              int column0) const {
  if (args_.p.y_fp32) {
    StoreColumns<float>(sums, warps, row0, column0);
  } else {
    StoreColumns<__nv_bfloat16>(sums, warps, row0, column0);
  }
}

template <int kN>
template <typename T>
__device__ void PrefillBlock<kN>::StoreColumns(uint32_t sums, int warps, int row0,
                                               int column0) const {
  constexpr int kUnit = 16 / sizeof(T);  // columns
  constexpr int kUnits = 8 / kUnit;      // of a block
  constexpr int kPairs = kUnit / 2;
  const int out = args_.part_begin[args_.p.shape.parts];
  row0 += Lane() / 8;
#pragma unroll 1
  for (int unit = Lane() % 8; unit < kN / 2 / kUnit; unit += 8) {
    const int column = column0 + unit * kUnit;
    if (column >= out || row0 >= args_.p.rows) break;
    const int part = PartOf(args_, column);
    float2 bias[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      bias[i] = args_.p.bias == nullptr ? make_float2(0.0f, 0.0f)
                                        : LoadPair(args_.p.bias + column + 2 * i);
    }
    // Of the lanes that have a row's sums, the first one of the unit's.
    const uint32_t from = sums + unit / kUnits * Config::kParkedBlockBytes +
                          (Lane() / 8 * 4 + unit % kUnits * 2) * 16;
    int segment = SegmentOf(row0);
    int end = row0;  // of the rows that `scale` is for
    float2 scale[kPairs];
#pragma unroll 1
    for (int warp = 0; warp < warps; ++warp) {
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const int row = row0 + 16 * warp + 4 * quarter;
        if (row >= args_.p.rows) break;
        if (row >= end) {
          while (row >= tables_.begin[segment + 1]) ++segment;
          end = tables_.begin[segment + 1];
          const float* g = Magnitudes(segment, part);
#pragma unroll
          for (int i = 0; i < kPairs; ++i) {
            scale[i] = g == nullptr ? make_float2(1.0f, 1.0f) : LoadPair(g + column + 2 * i);
          }
        }
        float2 y[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const float2 sum = LoadSharedPair(from + warp * Config::kParkedBytes + quarter % 2 * 256 +
                                            quarter / 2 * 8 + i * 16);
          y[i] =
              make_float2(fmaf(scale[i].x, sum.x, bias[i].x), fmaf(scale[i].y, sum.y, bias[i].y));
        }
        StoreUnit(static_cast<T*>(args_.p.y) + static_cast<int64_t>(row) * out + column, y);
      }
    }
  }
}

}  // namespace dorad::kernels
