// Plain rows, which have no adjustments and no bans. Logits are read once, from device memory to
// registers, by warps that do not wait for each other: each takes a chunk and leaves what it found
// in the row's record. The row's last block computes the results from the record and, for a draw,
// from the few groups that may win. For every GPU. Internal to kernels/sampling.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/isa/memory.cuh"
#include "kernels/sampling/adjust.cuh"
#include "kernels/sampling/draw.cuh"
#include "kernels/sampling/record.cuh"
#include "kernels/sampling/results.cuh"
#include "kernels/sampling/select.cuh"
#include "kernels/sampling/wanted.cuh"

namespace dorad::kernels {

// Shared memory of rows without lists. The last member is as long as the row needs it.
template <typename Place>
struct DrawShared : ResultShared<Place> {
  uint16_t hits[kMostChunks * kWarp];
};

// A row whose logits stay where they are, for one block. kLists: it may need lists.
template <bool kLists>
struct InRecord {
  static constexpr int kBlocks = 1;
  using SharedMemory =
      std::conditional_t<kLists, ListShared<InRecord<kLists>>, DrawShared<InRecord<kLists>>>;
  struct Memory {
    float* group_maxima;
  };

  static size_t SharedBytes(int chunks) {
    const size_t hits = sizeof(uint16_t) * kWarp * static_cast<size_t>(chunks);
    const size_t last = kLists ? std::max(hits, sizeof(Ranked) * kListed) : hits;
    return sizeof(SharedMemory) - sizeof(SharedMemory::hits) + last;
  }

  __device__ static const float* Logits(const Row<InRecord>& row) { return row.x; }
  __device__ static float* GroupMaxima(const Row<InRecord>& row) { return row.group_maxima; }
  __device__ static void Sync() { __syncthreads(); }
  template <typename T>
  __device__ static T* Remote(T* local, int) {
    return local;
  }
};

// What a plain row asks for.
struct PlainWanted : Wanted {
  // At equal temperatures the raw sums are the sums.
  bool same_sums, sums;

  __device__ PlainWanted(const Launch& p, int index) : Wanted(p, index) {
    same_sums = raw && raw_temperature == temperature;
    sums = !greedy && !same_sums && (!truncated || MassOfAll());
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
  if (wanted.raw) {
    const float sum = SumChunk(chunk_max, wanted.raw_temperature, pair);
    if (lane == 0) record.raw_sums[chunk] = sum;
  }
  if (wanted.sums) {
    const float sum = SumChunk(chunk_max, wanted.temperature, pair);
    if (lane == 0) record.sums[chunk] = sum;
  }
  if (wanted.Draws() || wanted.needs_list) record.group_maxima[chunk * kWarp + lane] = group_max;
}

// The largest of the record's chunks, NaN if the row has one, for all threads.
template <typename Place>
__device__ inline float RecordMax(const Row<Place>& row, const PlainRecord& record) {
  Ranked* const reduced = Shared<Place>()->reduced;
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
template <typename Place>
__device__ inline void FindFirst(const Row<Place>& row, const PlainRecord& record, float maximum) {
  auto* const s = Shared<Place>();
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

// Lists the candidates up to a bin that follows the rule, as ListByRule does, but looks only at the
// groups that may have one. Returns their number; more than kListed: there is no list. For one
// block.
template <typename Place>
__device__ __noinline__ int ListFromGroups(const Row<Place>& row, const Tempered& tempered,
                                           float maximum, const BinRule& rule) {
  auto* const s = Shared<Place>();
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  __syncthreads();
  for (int i = thread; i < kBins; i += threads) s->counts[i] = 0;
  __syncthreads();
  const int groups = row.chunks * kWarp;
  const auto bin_of = [&](float x) { return BinOf(maximum - tempered(x)); };
  const auto* const quads = reinterpret_cast<const float4*>(row.group_maxima);
  const auto for_each_group = [&](auto visit) {
#pragma unroll 4
    for (int i = thread; i < groups / 4; i += threads) {
      const float4 x = quads[i];
      visit(bin_of(x.x), 4 * i);
      visit(bin_of(x.y), 4 * i + 1);
      visit(bin_of(x.z), 4 * i + 2);
      visit(bin_of(x.w), 4 * i + 3);
    }
  };
  for_each_group([s](int bin, int) { atomicAdd(&s->counts[bin], 1u); });
  __syncthreads();
  PickBin(row, rule);
  if (thread == 0) s->num_hits = 0;
  __syncthreads();
  const int bin = s->picked_bin;
  if (s->picked_count > kListed) return s->picked_count;
  // The counts are in use no more.
  static_assert(sizeof(s->counts) >= sizeof(uint16_t) * kListed);
  auto* const hits = reinterpret_cast<uint16_t*>(s->counts);
  for_each_group([s, hits, bin](int group_bin, int group) {
    if (group_bin <= bin) hits[atomicAdd(&s->num_hits, 1)] = static_cast<uint16_t>(group);
  });
  __syncthreads();
  for (int i = thread; i < s->num_hits * kGroupSize; i += threads) {
    const int32_t id = IdOfMember(hits[i / kGroupSize], i % kGroupSize);
    if (id >= row.vocabulary) continue;
    const float z = tempered(row.x[id]);
    if (BinOf(maximum - z) > bin) continue;
    const uint32_t at = atomicAdd(&s->listed, 1u);
    if (at < kListed) s->list[at] = Rank(z, id);
  }
  __syncthreads();
  return static_cast<int>(s->listed);
}

// A sorted list of the first `count` candidates; false: they are too many for a list.
template <typename Place>
__device__ inline bool ListFirst(const Row<Place>& row, const Tempered& tempered, float maximum,
                                 int count) {
  BinRule rule;
  rule.count = static_cast<uint32_t>(min(count, row.vocabulary));
  const int listed = ListFromGroups(row, tempered, maximum, rule);
  if (listed <= kListed) SortList(row, listed);
  return listed <= kListed;
}

// The row's results from its complete record; false: the second launch must do it. For one block.
template <bool kLists>
__device__ __noinline__ bool FinishRow(const Launch& p, const PlainWanted wanted, int index,
                                       const PlainRecord record) {
  using Place = InRecord<kLists>;
  Row<Place> row;
  row.group_maxima = record.group_maxima;
  row.x = p.logits + index * p.logits_ld;
  row.vocabulary = p.vocabulary;
  row.rank = row.first = 0;
  row.own = row.share = row.chunks = ChunksOf(p.vocabulary);
  row.lane = static_cast<int>(threadIdx.x) % kWarp;
  row.warp = static_cast<int>(threadIdx.x) / kWarp;
  row.warps = static_cast<int>(blockDim.x) / kWarp;
  const Target to(p.out, index, p.max_top);
  const float row_maximum = RecordMax(row, record);
  if (!(row_maximum > -Infinity() && row_maximum < Infinity())) {
    WriteUnusable(wanted, to);
    return true;
  }
  const Tempered tempered(row_maximum, wanted.temperature);
  const Tempered raw(row_maximum, wanted.raw_temperature);
  const float maximum = tempered.Maximum();
  auto* const s = Shared<Place>();
  for (int chunk = threadIdx.x; chunk < row.chunks; chunk += blockDim.x) {
    const float chunk_max = record.chunk_max[chunk];
    if (wanted.raw) {
      s->raw_sums[chunk] = PartOf(record.raw_sums[chunk], raw(chunk_max), raw.Maximum());
    }
    if (wanted.sums) s->sums[chunk] = PartOf(record.sums[chunk], tempered(chunk_max), maximum);
  }
  if (wanted.greedy) FindFirst(row, record, row_maximum);
  __syncthreads();
  const float* const sums = wanted.same_sums ? s->raw_sums : s->sums;
  if constexpr (kLists) {
    if (wanted.top_logprobs > 0 && wanted.raw) {
      if (!ListFirst(row, raw, raw.Maximum(), wanted.top_logprobs)) return false;
      const double total = Total(row, s->raw_sums);
      WriteTop(row, wanted, to, row.vocabulary, raw.Maximum(), log(total), true);
    }
    if (wanted.truncated) {
      const double total = wanted.MassOfAll() ? Total(row, sums) : 0.0;
      const int count =
          ListFromGroups(row, tempered, maximum, RuleOf(wanted, total, row.vocabulary));
      if (count > kListed) return false;
      const Kept kept = DrawFromList(row, wanted, maximum, count, total);
      FinishKept(row, wanted, Unadjusted(), tempered, maximum, raw, kept, true, to);
      return true;
    }
    if (wanted.ListsProcessed()) {
      if (!ListFirst(row, tempered, maximum, wanted.top_logprobs)) return false;
      const double total = Total(row, sums);
      WriteTop(row, wanted, to, row.vocabulary, maximum, log(total), wanted.score);
    }
  }
  int32_t token = -1;
  if (wanted.Draws()) {
    token = Draw(row, wanted.noise, tempered, maximum, RoughTotal(row, sums), 0);
  }
  FinishFull(row, wanted, Unadjusted(), tempered, maximum, raw, token, to);
  if (wanted.num_chosen > 0) {
    WriteChosen(row, wanted, Unadjusted(), tempered, maximum, raw, nullptr);
  }
  if (wanted.greedy && wanted.processed) WritePoint(row, wanted, to);
  return true;
}

}  // namespace dorad::kernels
