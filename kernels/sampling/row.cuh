// One row of logits in the shared memory of a cluster of blocks: loading, sums, and communication
// between the blocks. Internal to kernels/sampling.
//
// The row is cut into *chunks* of 1024 logits; block i of the cluster holds an equal, contiguous
// share of them. A warp works on a chunk. All functions are for all threads of all blocks of the
// cluster unless they say otherwise.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "kernels/isa/barrier.cuh"
#include "kernels/isa/sm90/copy.cuh"
#include "kernels/sampling/numbers.cuh"

namespace dorad::kernels {

constexpr int kCluster = 8;
constexpr int kChunk = 1024;
constexpr int kMostShare = 48;  // chunks of one block
constexpr int kMostChunks = kCluster * kMostShare;
constexpr int kListed = 2048;  // candidates that a list takes
constexpr int kWarp = 32;
constexpr int kScanThreads = 256;  // least threads of a block

// A block's shared memory beside the logits. Members of the first block only are marked so; all
// blocks write to those of the first block.
struct RowShared {
  uint64_t landed[kMostShare];
  Ranked exchange[2][kCluster];
  float chunk_max[kMostShare];
  float raw_sums[kMostChunks];
  float sums[kMostChunks];
  uint32_t counts[kBins];  // candidates by bin; zero between uses
  union {
    Ranked list[kListed];  // first block
    Ranked measure[kBins];
    alignas(16) uint32_t group_words[kMostShare * kWarp];  // see FillNoise
  };
  Ranked reduced[kWarp];
  double scan_double[kScanThreads / kWarp];
  Ranked scan_ranked[kScanThreads / kWarp];
  Ranked crossed;  // first block
  Ranked before_crossed;
  uint32_t listed;     // first block
  uint32_t first_id;   // first block
  int32_t picked_bin;  // set by the first block
  int32_t picked_count;
  uint32_t equals, last_equal;
  uint32_t newest_count;  // see adjust.cuh
  int32_t last_kept;      // first block, as the rest
  int32_t num_kept;
  double total;
  double raw_log_total;
  double log_total;
  float token_logprob;
  int32_t token;
};

// A kernel's dynamic shared memory: RowShared, then this block's logits, -inf beyond the
// vocabulary, then the groups' maxima. By name and not by pointer, so that the compiler knows the
// memory.
constexpr size_t kShareOffset = (sizeof(RowShared) + 127) / 128 * 128;
constexpr size_t SharedBytes(int share) {
  return kShareOffset + sizeof(float) * (kChunk + kWarp) * share;
}
static_assert(SharedBytes(kMostShare) <= 227 * 1024);
extern __shared__ __align__(128) unsigned char row_memory[];
__device__ inline RowShared* Shared() { return reinterpret_cast<RowShared*>(row_memory); }
__device__ inline float* Share() { return reinterpret_cast<float*>(row_memory + kShareOffset); }

struct Row {
  const float* x;
  int vocabulary;
  int chunks;     // of the row
  int own;        // of this block
  int share;      // the most that a block has
  int first;      // index of its first chunk
  int rank;       // of this block in the cluster
  int phase = 0;  // of Exchange
  int lane, warp, warps;

  // The first id of an own chunk.
  __device__ int IdAt(int chunk) const { return (first + chunk) * kChunk; }
};

// The largest of the 32 ids that a lane has of an own chunk, which are a group of noise.cuh: at
// least what is drawn from.
__device__ inline float& GroupMax(const Row& row, int chunk) {
  return Share()[row.share * kChunk + chunk * kWarp + row.lane];
}

template <typename T>
__device__ inline T* Remote(T* local, int rank) {
  return cooperative_groups::this_cluster().map_shared_rank(local, rank);
}
__device__ inline void ClusterSync() { cooperative_groups::this_cluster().sync(); }

// Calls f(z, id) for the lane's elements of an own chunk: pairs of neighbours, 64 elements apart.
constexpr int kPairs = kChunk / (2 * kWarp);
template <typename F>
__device__ inline void ForLane(const Row& row, int chunk, F f) {
  const float2* at = reinterpret_cast<const float2*>(Share() + chunk * kChunk) + row.lane;
  const int id = row.IdAt(chunk) + 2 * row.lane;
#pragma unroll 4
  for (int i = 0; i < kPairs; ++i) {
    const float2 v = at[i * kWarp];
    f(v.x, id + i * 2 * kWarp);
    f(v.y, id + i * 2 * kWarp + 1);
  }
}

// The same over all own chunks of the warp, without ids beyond the vocabulary.
template <typename F>
__device__ inline void ForAll(const Row& row, F f) {
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    ForLane(row, chunk, [&](float z, int id) {
      if (id < row.vocabulary) f(z, id);
    });
  }
}

__device__ inline float MaxOrNan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ inline float WarpMaxOrNan(float x) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    x = MaxOrNan(x, __shfl_xor_sync(~0u, x, mask));
  }
  return x;
}

// For a warp.
__device__ inline void LoadChunk(const Row& row, int chunk) {
  const int id = row.IdAt(chunk);
  float* to = Share() + chunk * kChunk;
  const int left = row.vocabulary - id;
#pragma unroll 16
  for (int i = 0; i < kChunk; i += kWarp) {
    const int at = i + row.lane;
    to[at] = at < left ? row.x[id + at] : -Infinity();
  }
}

// Starts the copy of the warp's chunks; whole ones of aligned rows by the copy engine. For a warp.
__device__ inline void StartLoad(const Row& row) {
  const bool aligned = (reinterpret_cast<uintptr_t>(row.x) & 15) == 0;
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    const int id = row.IdAt(chunk);
    float* to = Share() + chunk * kChunk;
    const uint32_t landed = SharedAddress(&Shared()->landed[chunk]);
    if (aligned && id + kChunk <= row.vocabulary) {
      if (row.lane == 0) {
        BarrierInit(landed, 1);
        BarrierInitFence();
        BarrierArriveExpect(landed, kChunk * sizeof(float));
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
            "[%3];" ::"r"(SharedAddress(to)),
            "l"(row.x + id), "r"(static_cast<uint32_t>(kChunk * sizeof(float))), "r"(landed)
            : "memory");
      }
      continue;
    }
    if (row.lane == 0) BarrierInit(landed, 1);
    LoadChunk(row, chunk);
    __syncwarp();
    if (row.lane == 0) BarrierArrive(landed);
  }
  __syncwarp();
}

// Fills the chunk's GroupMax, too. For a warp.
__device__ inline float ChunkMax(const Row& row, int chunk) {
  const float2* at = reinterpret_cast<const float2*>(Share() + chunk * kChunk) + row.lane;
  float a = -Infinity();
  float b = -Infinity();
#pragma unroll 8
  for (int i = 0; i < kPairs; ++i) {
    const float2 v = at[i * kWarp];
    a = MaxOrNan(a, v.x);
    b = MaxOrNan(b, v.y);
  }
  a = MaxOrNan(a, b);
  GroupMax(row, chunk) = a;
  return WarpMaxOrNan(a);
}

__device__ inline Ranked WarpMax(Ranked value) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    value = max(value, __shfl_xor_sync(~0u, value, mask));
  }
  return value;
}
// The largest of one block's values, for its first warp; 0 for others.
__device__ inline Ranked BlockMax(const Row& row, Ranked value) {
  Ranked* const reduced = Shared()->reduced;
  if (__any_sync(~0u, value != 0)) value = WarpMax(value);
  if (row.lane == 0) reduced[row.warp] = value;
  __syncthreads();
  return row.warp == 0 ? WarpMax(row.lane < row.warps ? reduced[row.lane] : 0) : 0;
}

// Collects a value from every block; all threads may read the values until the next but one
// Exchange. `value` is of thread 0.
__device__ inline const Ranked* Exchange(Row& row, Ranked value) {
  Ranked* const slots = Shared()->exchange[row.phase];
  row.phase ^= 1;
  if (row.warp == 0) {
    value = __shfl_sync(~0u, value, 0);
    if (row.lane < kCluster) *Remote(slots + row.rank, row.lane) = value;
  }
  ClusterSync();
  return slots;
}

// The row's maximum, NaN if the row has one. Fills chunk_max and GroupMax. wait: for the chunks to
// land.
__device__ inline float RowMax(Row& row, bool wait) {
  float warp_max = -Infinity();
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    if (wait) BarrierWait(SharedAddress(&Shared()->landed[chunk]), 0);
    const float chunk_max = ChunkMax(row, chunk);
    if (row.lane == 0) Shared()->chunk_max[chunk] = chunk_max;
    warp_max = MaxOrNan(warp_max, chunk_max);
  }
  if (row.lane == 0) Shared()->reduced[row.warp] = __float_as_uint(warp_max);
  __syncthreads();
  float block_max = -Infinity();
  if (row.warp == 0) {
    if (row.lane < row.warps) {
      block_max = __uint_as_float(static_cast<uint32_t>(Shared()->reduced[row.lane]));
    }
    block_max = WarpMaxOrNan(block_max);
  }
  const Ranked* all = Exchange(row, __float_as_uint(block_max));
  float maximum = -Infinity();
  for (int i = 0; i < kCluster; ++i) {
    maximum = MaxOrNan(maximum, __uint_as_float(static_cast<uint32_t>(all[i])));
  }
  return maximum;
}

// The sum of 64 columns that a warp holds as pairs, in the CPU's order: columns 16 and 32 apart,
// then 8, 4, 2, 1.
__device__ inline float SumColumns(float a, float b) {
  for (const int mask : {8, 16, 4, 2, 1}) {
    a += __shfl_xor_sync(~0u, a, mask);
    b += __shfl_xor_sync(~0u, b, mask);
  }
  return a + b;
}

// To every block's raw_sums or sums, for each chunk: Σ exp(z - maximum). Complete after the next
// ClusterSync.
__device__ inline void SumExp(const Row& row, float maximum, float* sums) {
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    const float2* at = reinterpret_cast<const float2*>(Share() + chunk * kChunk) + row.lane;
    float a = 0.0f;
    float b = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kPairs; ++i) {
      const float2 v = at[i * kWarp];
      a += Exp(v.x - maximum);
      b += Exp(v.y - maximum);
    }
    const float sum = SumColumns(a, b);
    if (row.lane < kCluster) *Remote(sums + row.first + chunk, row.lane) = sum;
  }
}

// The same over tempered logits; with kRaw that of the raw ones to the first block's raw_sums, too.
template <bool kRaw>
__device__ inline void SumExpTempered(const Row& row, const Tempered& tempered) {
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    const float2* at = reinterpret_cast<const float2*>(Share() + chunk * kChunk) + row.lane;
    float a = 0.0f, b = 0.0f, raw_a = 0.0f, raw_b = 0.0f;
#pragma unroll 4
    for (int i = 0; i < kPairs; ++i) {
      const float2 v = at[i * kWarp];
      const float x = v.x - tempered.maximum;
      const float y = v.y - tempered.maximum;
      a += Exp(tempered.Divide(x));
      b += Exp(tempered.Divide(y));
      if constexpr (kRaw) {
        raw_a += Exp(x);
        raw_b += Exp(y);
      }
    }
    const float sum = SumColumns(a, b);
    if (row.lane < kCluster) *Remote(Shared()->sums + row.first + chunk, row.lane) = sum;
    if constexpr (kRaw) {
      const float raw_sum = SumColumns(raw_a, raw_b);
      if (row.lane == 0) *Remote(Shared()->raw_sums + row.first + chunk, 0) = raw_sum;
    }
  }
}

// To the first block's first_id: the smallest id with this z, the row's maximum; needs chunk_max.
// Complete after the next ClusterSync.
__device__ inline void FindFirst(const Row& row, float maximum) {
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    if (Shared()->chunk_max[chunk] != maximum) continue;
    uint32_t found = ~0u;
    ForLane(row, chunk, [&](float z, int id) {
      if (z == maximum) found = min(found, static_cast<uint32_t>(id));
    });
    found = __reduce_min_sync(~0u, found);
    if (row.lane == 0) atomicMin(Remote(&Shared()->first_id, 0), found);
    break;  // later chunks of the warp have larger ids
  }
}

// Running sums over the lanes of a warp.
template <typename T>
__device__ inline T InclusiveScan(T value, int lane) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const T other = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// The sum over the first 256 threads before this one, for all threads of one block; *total is that
// over all 256. `warps`: kScanThreads / 32 numbers in shared memory.
template <typename T>
__device__ inline T ExclusiveScan(const Row& row, T value, T* warps, T* total) {
  constexpr int kWarps = kScanThreads / kWarp;
  T inclusive = InclusiveScan(value, row.lane);
  if (row.warp < kWarps && row.lane == kWarp - 1) warps[row.warp] = inclusive;
  __syncthreads();
  T before = 0;
  T sum = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i == row.warp) before = sum;
    sum += warps[i];
  }
  *total = sum;
  __syncthreads();
  T previous = __shfl_up_sync(~0u, inclusive, 1);
  return row.lane == 0 ? before : before + previous;
}

}  // namespace dorad::kernels
