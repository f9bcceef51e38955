// Plain rows, which need a maximum, sums and a draw: no adjustments, bans, top list or truncation.
// Logits are read once, from device memory to registers, by warps that do not wait for each other:
// each takes a chunk and leaves what it found in the row's record. The row's last block computes
// the results from the record and, for a draw, from the few groups that may win. For every GPU.
// Internal to kernels/sampling.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/isa/memory.cuh"
#include "kernels/sampling/adjust.cuh"
#include "kernels/sampling/draw.cuh"
#include "kernels/sampling/results.cuh"
#include "kernels/sampling/wanted.cuh"

namespace dorad::kernels {

// A row's part of the workspace: a counter, zero between launches, then what a launch writes.
struct PlainRecord {
  uint32_t* arrived;    // blocks
  float* chunk_max;     // [chunks]
  float* raw_sums;      // [chunks], SumChunk
  float* sums;          // [chunks]
  float* group_maxima;  // [chunks, kWarp]

  static constexpr size_t kHead = 32;  // floats; a part is of whole lines of 128 bytes
  static constexpr size_t Padded(int chunks) {
    return (static_cast<size_t>(chunks) + 31) / 32 * 32;
  }
  static constexpr size_t Floats(int chunks) {
    return kHead + 3 * Padded(chunks) + kWarp * static_cast<size_t>(chunks);
  }

  __device__ PlainRecord(float* workspace, int index, int chunks) {
    float* const at = workspace + index * Floats(chunks);
    arrived = reinterpret_cast<uint32_t*>(at);
    chunk_max = at + kHead;
    raw_sums = chunk_max + Padded(chunks);
    sums = raw_sums + Padded(chunks);
    group_maxima = sums + Padded(chunks);
  }
};

// A row whose logits stay where they are, for one block.
struct RecordShared;
struct InRecord {
  static constexpr int kBlocks = 1;
  using SharedMemory = RecordShared;
  struct Memory {
    float* group_maxima;
  };

  __device__ static const float* Logits(const Row<InRecord>& row) { return row.x; }
  __device__ static float* GroupMaxima(const Row<InRecord>& row) { return row.group_maxima; }
  __device__ static void Sync() { __syncthreads(); }
  template <typename T>
  __device__ static T* Remote(T* local, int) {
    return local;
  }
};

struct RecordShared : ResultShared<InRecord> {
  uint16_t hits[kMostChunks * kWarp];  // the last member: as long as the row needs it

  static constexpr size_t Bytes(int chunks) {
    return sizeof(RecordShared) -
           sizeof(uint16_t) * kWarp * static_cast<size_t>(kMostChunks - chunks);
  }
};

// What a plain row asks for.
struct PlainWanted : Wanted {
  bool raw_sums, sums;

  __device__ PlainWanted(const Launch& p, int index) : Wanted(p, index) {
    if (raw_temperature != 1.0f) {  // what is sampled from
      raw = false;
      processed = true;
    }
    raw_sums = raw;
    // At temperature 1 the raw sums are the sums.
    sums = !greedy && !(raw && temperature == 1.0f);
  }
};

// A chunk's part of the record. For a warp.
__device__ inline void ReadChunk(const Launch& p, const PlainWanted& wanted, int index, int chunk,
                                 const PlainRecord& record) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const float* const x = p.logits + index * p.logits_ld + chunk * kChunk;
  const int left = p.vocabulary - chunk * kChunk;
  float2 pairs[kPairs];
  if (left >= kChunk && (reinterpret_cast<uintptr_t>(x) & 7) == 0) {
    const float2* const at = reinterpret_cast<const float2*>(x) + lane;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = __ldcs(at + i * kWarp);
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int at = 2 * (i * kWarp + lane);
      pairs[i].x = at < left ? x[at] : -Infinity();
      pairs[i].y = at + 1 < left ? x[at + 1] : -Infinity();
    }
  }
  float a = -Infinity();
  float b = -Infinity();
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    a = MaxOrNan(a, pairs[i].x);
    b = MaxOrNan(b, pairs[i].y);
  }
  const float group_max = MaxOrNan(a, b);
  const float chunk_max = WarpMaxOrNan(group_max);
  if (lane == 0) record.chunk_max[chunk] = chunk_max;
  const auto pair = [&pairs](int i) { return pairs[i]; };
  if (wanted.raw_sums) {
    const float sum = SumChunk(chunk_max, 1.0f, pair);
    if (lane == 0) record.raw_sums[chunk] = sum;
  }
  if (wanted.sums) {
    const float sum = SumChunk(chunk_max, wanted.temperature, pair);
    if (lane == 0) record.sums[chunk] = sum;
  }
  if (wanted.Draws()) record.group_maxima[chunk * kWarp + lane] = group_max;
}

// The largest of the record's chunks, NaN if the row has one, for all threads.
__device__ inline float RecordMax(const Row<InRecord>& row, const PlainRecord& record) {
  Ranked* const reduced = Shared<InRecord>()->reduced;
  float maximum = -Infinity();
  for (int chunk = threadIdx.x; chunk < row.chunks; chunk += blockDim.x) {
    maximum = MaxOrNan(maximum, record.chunk_max[chunk]);
  }
  maximum = WarpMaxOrNan(maximum);
  if (row.lane == 0) reduced[row.warp] = __float_as_uint(maximum);
  __syncthreads();
  for (int i = 0; i < row.warps; ++i) {
    maximum = MaxOrNan(maximum, __uint_as_float(static_cast<uint32_t>(reduced[i])));
  }
  __syncthreads();
  return maximum;
}

// To first_id: the smallest id of the largest logit, which is in the record.
__device__ inline void FindFirst(const Row<InRecord>& row, const PlainRecord& record,
                                 float maximum) {
  RecordShared* const s = Shared<InRecord>();
  if (threadIdx.x == 0) s->first_id = ~0u;
  __syncthreads();
  for (int chunk = threadIdx.x; chunk < row.chunks; chunk += blockDim.x) {
    if (record.chunk_max[chunk] == maximum) {
      atomicMin(&s->first_id, static_cast<uint32_t>(chunk * kChunk));
    }
  }
  __syncthreads();
  const int begin = static_cast<int>(s->first_id);
  __syncthreads();
  if (threadIdx.x == 0) s->first_id = ~0u;
  __syncthreads();
  const int end = min(begin + kChunk, row.vocabulary);
  for (int id = begin + static_cast<int>(threadIdx.x); id < end; id += blockDim.x) {
    if (row.x[id] == maximum) atomicMin(&s->first_id, static_cast<uint32_t>(id));
  }
  __syncthreads();
}

// The row's results from its complete record. For one block.
__device__ __noinline__ void FinishRow(const Launch& p, const PlainWanted wanted, int index,
                                       const PlainRecord record) {
  Row<InRecord> row;
  row.group_maxima = record.group_maxima;
  row.x = p.logits + index * p.logits_ld;
  row.vocabulary = p.vocabulary;
  row.rank = row.first = 0;
  row.own = row.share = row.chunks = ChunksOf(p.vocabulary);
  row.lane = static_cast<int>(threadIdx.x) % kWarp;
  row.warp = static_cast<int>(threadIdx.x) / kWarp;
  row.warps = static_cast<int>(blockDim.x) / kWarp;
  const Target to(p.out, index, p.max_top);
  const float maximum = RecordMax(row, record);
  if (!(maximum > -Infinity() && maximum < Infinity())) {
    WriteUnusable(wanted, to);
    return;
  }
  const Tempered tempered(maximum, wanted.temperature);
  const Tempered raw(maximum, 1.0f);
  RecordShared* const s = Shared<InRecord>();
  for (int chunk = threadIdx.x; chunk < row.chunks; chunk += blockDim.x) {
    const float chunk_max = record.chunk_max[chunk];
    if (wanted.raw_sums) s->raw_sums[chunk] = PartOf(record.raw_sums[chunk], chunk_max, maximum);
    if (wanted.sums) {
      s->sums[chunk] = PartOf(record.sums[chunk], tempered(chunk_max), tempered.Maximum());
    }
  }
  if (wanted.greedy) FindFirst(row, record, maximum);
  __syncthreads();
  int32_t token = -1;
  if (wanted.Draws()) {
    token = Draw(row, wanted.noise, tempered, tempered.Maximum(),
                 RoughTotal(row, wanted.sums ? s->sums : s->raw_sums), 0);
  }
  FinishFull(row, wanted, Unadjusted(), tempered, tempered.Maximum(), raw, token, to);
  if (wanted.num_chosen > 0) {
    WriteChosen(row, wanted, Unadjusted(), tempered, tempered.Maximum(), raw, nullptr);
  }
}

}  // namespace dorad::kernels
