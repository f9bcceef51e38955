// The end of a projection: y = g ⊙ sums + bias, from tensor cores' registers to rows of y.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/dora/linear_tables.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/memory.cuh"

namespace dorad::kernels {

// kPanel: rows of W; kTurnColumns: that a warp transposes at once, 16 or 32; kAdapted: whether
// there may be adapters.
template <int kPanel, int kConsumerWarps, int kTurnColumns, bool kAdapted>
class LinearFinish {
  static constexpr int kStaged = 8;  // segments whose magnitudes are kept in shared memory
  // The layout in which a warp transposes 16 rows of sums: bytes from one row to the next, with
  // padding against bank conflicts.
  static constexpr int kTurnBytes = (kTurnColumns + 4) * 4;

 public:
  struct Shared {
    alignas(16) float g[kAdapted ? kStaged : 1][kPanel];
    alignas(16) float bias[kPanel];
    alignas(16) uint8_t turn[kConsumerWarps][16 * kTurnBytes];
  };

  __device__ LinearFinish(const LinearArgs& args, const BlockRows& rows, const LinearTables& tables,
                          Shared& shared)
      : args_(args), rows_(rows), tables_(tables), shared_(shared) {}

  // Thread `thread` of `threads`: stores the bias, and g of the first segments, of the panel at
  // `row`. Read them after a barrier.
  __device__ void Stage(int row, int thread, int threads) const {
    const int out = args_.part_begin[args_.p.shape.parts];
#pragma unroll 1
    for (int column = thread; column < kPanel; column += threads) {
      const int n = row + column;
      shared_.bias[column] = args_.p.bias != nullptr && n < out ? args_.p.bias[n] : 0.0f;
    }
    if constexpr (kAdapted) {
      const int segments = min(tables_.segments, kStaged);
#pragma unroll 1
      for (int i = thread; i < segments * kPanel; i += threads) {
        const int n = row + i % kPanel;
        const float* g = n < out ? MagnitudesOf(i / kPanel, PartOf(n)) : nullptr;
        shared_.g[i / kPanel][i % kPanel] = g != nullptr ? g[n] : 1.0f;
      }
    }
  }

  // y = g · d + bias for a warp's 16 rows of the batch from batch_row on, and columns
  // [first_column, + kColumns) of the panel at `row`. Sums are transposed in shared memory, some
  // columns at a time, so that one short loop does the rest: unrolled code would be fetched from
  // memory for a single use.
  template <int kColumns>
  __device__ void Rows(const float (&d)[kColumns / 2], int batch_row, int row, int first_column,
                       int warp) const {
    constexpr int kWidth = kColumns % kTurnColumns == 0 ? kTurnColumns : 16;  // at a time
    const int rows = rows_.count;
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (batch_row >= rows) return;
    const uint32_t sums = SharedAddress(shared_.turn[warp]);
    const int t = batch_row + lane / 2;
    const int segment = kAdapted && tables_.segments > 1 ? SegmentOf(tables_, t) : 0;
    Magnitudes magnitudes;
#pragma unroll 1
    for (int step = 0; step < kColumns / kWidth; ++step) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kColumns / kWidth; ++i) {
        if (i != step) continue;
#pragma unroll
        for (int j = 0; j < kWidth / 8; ++j) {
          const int at = i * kWidth / 2 + 4 * j;
          const uint32_t to = sums + lane / 4 * kTurnBytes + 32 * j + lane % 4 * 8;
          StoreShared(to, make_float2(d[at], d[at + 1]));
          StoreShared(to + 8 * kTurnBytes, make_float2(d[at + 2], d[at + 3]));
        }
      }
      __syncwarp();
      if (t < rows) {
#pragma unroll
        for (int j = 0; j < kWidth / 16; ++j) {
          const int column = lane % 2 * kWidth / 2 + 8 * j;
          FinishEight(sums + lane / 2 * kTurnBytes + column * 4, t, segment, row,
                      first_column + step * kWidth + column, magnitudes);
        }
      }
    }
  }

 private:
  // g of a segment whose magnitudes are not in shared memory. Its address is two reads away: once
  // for a part.
  struct Magnitudes {
    const float* g = nullptr;
    int end = 0;  // of the part, in rows of W
  };

  __device__ int PartOf(int row) const {
    int part = 0;
#pragma unroll 1
    while (part + 1 < args_.p.shape.parts && row >= args_.part_begin[part + 1]) ++part;
    return part;
  }

  // To be indexed by rows of W; nullptr: 1.
  __device__ const float* MagnitudesOf(int segment, int part) const {
    if (tables_.rank[part][segment] == 0) return nullptr;
    const float* g = args_.p.table.factors[ModuleIndex(args_, tables_.slot[segment], part)].g;
    return g == nullptr ? nullptr : g - args_.part_begin[part];
  }

  // Columns column.. + 7 of a row of the batch.
  __device__ void FinishEight(uint32_t sums, int t, int segment, int row, int column,
                              Magnitudes& magnitudes) const {
    const int out = args_.part_begin[args_.p.shape.parts];
    const int n = row + column;
    float y[8];
    LoadEight(sums, y);
    float bias[8];
    LoadEight(SharedAddress(&shared_.bias[column]), bias);
    float g[8];
    if constexpr (!kAdapted) {
#pragma unroll
      for (int i = 0; i < 8; ++i) g[i] = 1.0f;
    } else if (segment < kStaged) {
      LoadEight(SharedAddress(&shared_.g[segment][column]), g);
    } else {
      if (n >= magnitudes.end && n < out) {
        const int part = PartOf(n);
        magnitudes = {MagnitudesOf(segment, part), args_.part_begin[part + 1]};
      }
      const float* from = magnitudes.g;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        g[i] = from != nullptr && n + i < out ? __ldg(from + n + i) : 1.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = fmaf(g[i], y[i], bias[i]);
    const int64_t at = static_cast<int64_t>(rows_.first + t) * out + n;
    if (out % 8 != 0 || n + 8 > out) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (n + i >= out) continue;
        if (args_.p.y_fp32) {
          static_cast<float*>(args_.p.y)[at + i] = y[i];
        } else {
          static_cast<__nv_bfloat16*>(args_.p.y)[at + i] = __float2bfloat16_rn(y[i]);
        }
      }
    } else if (args_.p.y_fp32) {
      auto* to = reinterpret_cast<float4*>(static_cast<float*>(args_.p.y) + at);
      to[0] = make_float4(y[0], y[1], y[2], y[3]);
      to[1] = make_float4(y[4], y[5], y[6], y[7]);
    } else {
      __nv_bfloat162 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(y[2 * i], y[2 * i + 1]);
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args_.p.y) + at) =
          *reinterpret_cast<const uint4*>(pairs);
    }
  }

  __device__ static void LoadEight(uint32_t address, float (&values)[8]) {
    const float4 first = LoadShared(address);
    const float4 second = LoadShared(address + 16);
    values[0] = first.x;
    values[1] = first.y;
    values[2] = first.z;
    values[3] = first.w;
    values[4] = second.x;
    values[5] = second.y;
    values[6] = second.z;
    values[7] = second.w;
  }

  const LinearArgs& args_;
  const BlockRows rows_;
  const LinearTables& tables_;
  Shared& shared_;
};

}  // namespace dorad::kernels
