// One row of logits in the memory of the blocks that work on it: sums, and communication between
// the blocks. Internal to kernels/sampling.
//
// The row is cut into *chunks* of 1024 logits; each of the row's blocks has an equal, contiguous
// share of them. A warp works on a chunk. All functions are for all threads of all blocks of the
// row unless they say otherwise.
//
// Place: where the row lies, in_cluster.cuh or in_block.cuh. No sum depends on it.
#pragma once

#include <cstdint>

#include "kernels/isa/max.cuh"
#include "kernels/isa/shared.cuh"
#include "kernels/sampling/numbers.cuh"

namespace dorad::kernels {

constexpr int kChunk = 1024;
constexpr int kMostChunks = 384;
constexpr int kListed = 2048;  // candidates that a list takes
constexpr int kWarp = 32;
constexpr int kScanThreads = 256;  // least threads of a block

constexpr int ChunksOf(int vocabulary) { return (vocabulary + kChunk - 1) / kChunk; }

// A block's shared memory for sums, a draw and the results. Members of the first block only are
// marked so; all blocks write to those of the first block.
template <typename Place>
struct ResultShared {
  Ranked exchange[2][Place::kBlocks];
  Ranked reduced[kWarp];
  // Parts of the row's sums by chunk, see PartOf.
  float raw_sums[kMostChunks];
  float sums[kMostChunks];
  double raw_log_total;  // first block, as the rest
  double log_total;
  uint32_t first_id;
  int32_t token;
  int num_hits;  // of each block, see FindGroups
};

// For lists of candidates, too.
template <typename Place>
struct ListShared : ResultShared<Place> {
  static constexpr int kMostShare = kMostChunks / Place::kBlocks;  // chunks of one block
  uint32_t counts[kBins];  // candidates by bin; zero between uses
  double scan_double[kScanThreads / kWarp];
  Ranked scan_ranked[kScanThreads / kWarp];
  Ranked crossed;  // first block
  Ranked before_crossed;
  uint32_t listed;     // first block
  int32_t picked_bin;  // set by the first block
  int32_t picked_count;
  int32_t last_kept;  // first block, as the rest
  int32_t num_kept;
  double total;
  union {
    Ranked list[kListed];  // first block
    Ranked measure[kBins];
    uint16_t hits[kMostShare * kWarp];  // see FindGroups
  };
};

// And for all else, beside the logits.
template <typename Place>
struct RowShared : ListShared<Place> {
  uint64_t landed[Place::kBarriers];
  float chunk_max[ListShared<Place>::kMostShare];
  uint32_t equals, last_equal;
  uint32_t newest_count;  // see adjust.cuh
};

// A kernel's dynamic shared memory: the place's SharedMemory, and what it puts after it. Asked for
// each time, so that the compiler knows the memory.
template <typename Place>
__device__ inline typename Place::SharedMemory* Shared() {
  return reinterpret_cast<typename Place::SharedMemory*>(DynamicShared<128>());
}

template <typename Place>
struct Row : Place::Memory {
  const float* x;
  int vocabulary;
  int chunks;     // of the row
  int own;        // of this block
  int share;      // the most that a block has
  int first;      // index of its first chunk
  int rank;       // of this block among the row's
  int phase = 0;  // of Exchange
  int lane, warp, warps;

  // The first id of an own chunk.
  __device__ int IdAt(int chunk) const { return (first + chunk) * kChunk; }
};

// The block's logits; where they are a copy, -inf beyond the vocabulary.
template <typename Place>
__device__ inline auto* Share(const Row<Place>& row) {
  return Place::Logits(row);
}

// The largest of the 32 ids that a lane has of an own chunk, which are a group of noise.cuh: at
// least what is drawn from.
template <typename Place>
__device__ inline float& GroupMax(const Row<Place>& row, int chunk) {
  return Place::GroupMaxima(row)[chunk * kWarp + row.lane];
}

// Calls f(z, id) for the lane's elements of an own chunk: pairs of neighbours, 64 elements apart.
constexpr int kPairs = kChunk / (2 * kWarp);
template <typename Place, typename F>
__device__ inline void ForLane(const Row<Place>& row, int chunk, F f) {
  const float2* at = reinterpret_cast<const float2*>(Share(row) + chunk * kChunk) + row.lane;
  const int id = row.IdAt(chunk) + 2 * row.lane;
#pragma unroll 4
  for (int i = 0; i < kPairs; ++i) {
    const float2 v = at[i * kWarp];
    f(v.x, id + i * 2 * kWarp);
    f(v.y, id + i * 2 * kWarp + 1);
  }
}

// The same over all own chunks of the warp, without ids beyond the vocabulary.
template <typename Place, typename F>
__device__ inline void ForAll(const Row<Place>& row, F f) {
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    ForLane(row, chunk, [&](float z, int id) {
      if (id < row.vocabulary) f(z, id);
    });
  }
}

__device__ inline float WarpMaxOrNan(float x) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    x = MaxOrNan(x, __shfl_xor_sync(~0u, x, mask));
  }
  return x;
}

// For a warp.
template <typename Place>
__device__ inline void LoadChunk(const Row<Place>& row, int chunk) {
  const int id = row.IdAt(chunk);
  float* to = Share(row) + chunk * kChunk;
  const int left = row.vocabulary - id;
#pragma unroll 16
  for (int i = 0; i < kChunk; i += kWarp) {
    const int at = i + row.lane;
    to[at] = at < left ? row.x[id + at] : -Infinity();
  }
}

// Fills the chunk's GroupMax, too. For a warp.
template <typename Place>
__device__ inline float ChunkMax(const Row<Place>& row, int chunk) {
  const float2* at = reinterpret_cast<const float2*>(Share(row) + chunk * kChunk) + row.lane;
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
template <typename Place>
__device__ inline Ranked BlockMax(const Row<Place>& row, Ranked value) {
  Ranked* const reduced = Shared<Place>()->reduced;
  if (__any_sync(~0u, value != 0)) value = WarpMax(value);
  if (row.lane == 0) reduced[row.warp] = value;
  __syncthreads();
  return row.warp == 0 ? WarpMax(row.lane < row.warps ? reduced[row.lane] : 0) : 0;
}

// Collects a value from every block; all threads may read the values until the next but one
// Exchange. `value` is of thread 0.
template <typename Place>
__device__ inline const Ranked* Exchange(Row<Place>& row, Ranked value) {
  Ranked* const slots = Shared<Place>()->exchange[row.phase];
  row.phase ^= 1;
  if (row.warp == 0) {
    value = __shfl_sync(~0u, value, 0);
    if (row.lane < Place::kBlocks) *Place::Remote(slots + row.rank, row.lane) = value;
  }
  Place::Sync();
  return slots;
}

// The row's maximum, NaN if the row has one. Fills chunk_max and GroupMax. wait: for the chunks to
// land.
template <typename Place>
__device__ inline float RowMax(Row<Place>& row, bool wait) {
  float warp_max = -Infinity();
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    if (wait) Place::AwaitChunk(chunk);
    const float chunk_max = ChunkMax(row, chunk);
    if (row.lane == 0) Shared<Place>()->chunk_max[chunk] = chunk_max;
    warp_max = MaxOrNan(warp_max, chunk_max);
  }
  if (row.lane == 0) Shared<Place>()->reduced[row.warp] = __float_as_uint(warp_max);
  __syncthreads();
  float block_max = -Infinity();
  if (row.warp == 0) {
    if (row.lane < row.warps) {
      block_max = __uint_as_float(static_cast<uint32_t>(Shared<Place>()->reduced[row.lane]));
    }
    block_max = WarpMaxOrNan(block_max);
  }
  const Ranked* all = Exchange(row, __float_as_uint(block_max));
  float maximum = -Infinity();
  for (int i = 0; i < Place::kBlocks; ++i) {
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

// A chunk's sum of exp((x - its maximum) / temperature), so that it needs no other chunk. pair(i):
// the lane's pairs of logits. 0: none is above -inf. For a warp.
template <typename Pair>
__device__ inline float SumChunk(float chunk_max, float temperature, Pair pair) {
  if (!(chunk_max > -Infinity())) return 0.0f;
  const Tempered tempered(chunk_max, temperature);
  float a = 0.0f;
  float b = 0.0f;
  // All indices are constants, so that pairs in registers stay there.
  const auto add = [&](auto weight) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 v = pair(i);
      a += weight(v.x - chunk_max);
      b += weight(v.y - chunk_max);
    }
  };
  if (tempered.identity) {
    add([](float x) { return Exp(x); });
  } else if (tempered.quick) {
    // Beyond the bound of quick quotients, weights are 0.
    add([&](float x) { return Exp(tempered.QuickQuotient(fmaxf(x, -0x1p80f))); });
  } else {
    add([&](float x) { return Exp(SlowQuotient(x, temperature)); });
  }
  return SumColumns(a, b);
}

// Its part of the row's sum of exp(z - maximum). chunk_max: as z.
__device__ inline float PartOf(float sum, float chunk_max, float maximum) {
  if (sum == 0.0f) return 0.0f;
  return static_cast<float>(static_cast<double>(sum) *
                            exp(static_cast<double>(chunk_max) - static_cast<double>(maximum)));
}

// To every block's raw_sums or sums the parts of the block's chunks. The logits are x, `maximum` is
// the largest z. Needs chunk_max. Complete after the next Sync of the place.
template <typename Place>
__device__ inline void SumExp(const Row<Place>& row, const Tempered& tempered, float maximum,
                              float* sums) {
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    const float2* at = reinterpret_cast<const float2*>(Share(row) + chunk * kChunk) + row.lane;
    const float chunk_max = Shared<Place>()->chunk_max[chunk];
    const float sum =
        SumChunk(chunk_max, tempered.temperature, [&](int i) { return at[i * kWarp]; });
    if (row.lane < Place::kBlocks) {
      *Place::Remote(sums + row.first + chunk, row.lane) =
          PartOf(sum, tempered(chunk_max), maximum);
    }
  }
}

// To the first block's first_id: the smallest id with this z, the row's maximum; needs chunk_max.
// Complete after the next Sync.
template <typename Place>
__device__ inline void FindFirst(const Row<Place>& row, float maximum) {
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    if (Shared<Place>()->chunk_max[chunk] != maximum) continue;
    uint32_t found = ~0u;
    ForLane(row, chunk, [&](float z, int id) {
      if (z == maximum) found = min(found, static_cast<uint32_t>(id));
    });
    found = __reduce_min_sync(~0u, found);
    if (row.lane == 0) atomicMin(Place::Remote(&Shared<Place>()->first_id, 0), found);
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
template <typename T, typename Place>
__device__ inline T ExclusiveScan(const Row<Place>& row, T value, T* warps, T* total) {
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
