// The first candidates of a row, by rank: as a sorted list if they are few, as a bound if they are
// many. Internal to kernels/sampling. Functions are for all threads of the row unless they say
// otherwise.
#pragma once

#include "kernels/sampling/row.cuh"

namespace dorad::kernels {

// Counts candidates by their distance to the maximum into the first block's `counts`.
template <typename Place>
__device__ __noinline__ void CountByDistance(const Row<Place>& row, float maximum) {
  uint32_t* const counts = Shared<Place>()->counts;
  ForAll(row, [&](float z, int) { atomicAdd(&counts[BinOf(maximum - z)], 1u); });
  __syncthreads();
  if (row.rank != 0) {
    for (int bin = threadIdx.x; bin < kBins; bin += blockDim.x) {
      if (counts[bin] == 0) continue;
      atomicAdd(Place::Remote(&counts[bin], 0), counts[bin]);
      counts[bin] = 0;
    }
  }
  Place::Sync();
}

// The bins to list: the first ones with `count` candidates, or with a certain weight of `mass`; at
// most up to `last`. 0: no such condition.
struct BinRule {
  uint32_t count = 0;
  double mass = 0.0;
  bool by_mass = false;
  int last = kBins - 1;
};

// Sets picked_bin and picked_count (candidates up to that bin) in all blocks, after the next
// Sync; zeroes `counts`. For the first block.
template <typename Place>
__device__ __noinline__ void PickBin(const Row<Place>& row, const BinRule& rule) {
  constexpr int kEach = kBins / kScanThreads;
  auto* const s = Shared<Place>();
  uint32_t counts[kEach] = {};
  double mass = 0.0;
  uint32_t count = 0;
  const int begin = threadIdx.x * kEach;
  if (threadIdx.x < kScanThreads) {
    for (int i = 0; i < kEach; ++i) {
      counts[i] = s->counts[begin + i];
      s->counts[begin + i] = 0;
      count += counts[i];
      if (rule.by_mass && counts[i] > 0) {
        mass += static_cast<double>(LeastWeight(begin + i)) * counts[i];
      }
    }
  }
  if (threadIdx.x == 0) {
    s->picked_bin = rule.last;
    s->listed = 0;
  }
  Ranked total_count;
  double total_mass;
  Ranked running = ExclusiveScan<Ranked>(row, count, s->scan_ranked, &total_count);
  double running_mass = ExclusiveScan<double>(row, mass, s->scan_double, &total_mass);
  if (threadIdx.x < kScanThreads) {
    for (int i = 0; i < kEach; ++i) {
      running += counts[i];
      if (rule.by_mass && counts[i] > 0) {
        running_mass += static_cast<double>(LeastWeight(begin + i)) * counts[i];
      }
      if (rule.by_mass ? running_mass >= rule.mass : running >= rule.count) {
        atomicMin(&s->picked_bin, begin + i);
        break;
      }
    }
  }
  __syncthreads();
  const int bin = s->picked_bin;
  running = 0;
  if (threadIdx.x < kScanThreads) {
    for (int i = 0; i < kEach; ++i) running += begin + i <= bin ? counts[i] : 0;
  }
  const Ranked before = ExclusiveScan<Ranked>(row, running, s->scan_ranked, &total_count);
  (void)before;
  if (threadIdx.x < Place::kBlocks) {
    *Place::Remote(&s->picked_bin, threadIdx.x) = bin;
    *Place::Remote(&s->picked_count, threadIdx.x) = static_cast<int32_t>(total_count);
  }
}

// Appends the candidates that `take` (z, id) accepts to the first block's list, in any order; there
// are no more than kListed of them. Complete after the next Sync. REQUIRES: `listed` is 0.
template <typename Place, typename Take>
__device__ inline void Gather(const Row<Place>& row, Take take) {
  auto* const s = Shared<Place>();
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    uint32_t taken = 0;
    uint32_t bit = 1;
    ForLane(row, chunk, [&](float z, int id) {
      if (id < row.vocabulary && take(z, id)) taken |= bit;
      bit <<= 1;
    });
    if (__ballot_sync(~0u, taken != 0) == 0) continue;
    const int mine = __popc(taken);
    const int inclusive = InclusiveScan(mine, row.lane);
    int at = 0;
    if (row.lane == kWarp - 1) {
      at = static_cast<int>(
          atomicAdd(Place::Remote(&s->listed, 0), static_cast<uint32_t>(inclusive)));
    }
    at = __shfl_sync(~0u, at, kWarp - 1) + inclusive - mine;
    for (; taken != 0; taken &= taken - 1) {
      const int i = __ffs(taken) - 1;
      const int offset = (i / 2) * 2 * kWarp + 2 * row.lane + i % 2;
      const float z = Share(row)[chunk * kChunk + offset];
      *Place::Remote(&s->list[at++], 0) = Rank(z, row.IdAt(chunk) + offset);
    }
  }
}

// Lists the candidates up to a bin that follows the rule, which the first block has, and returns
// their number; more than kListed: there is no list.
template <typename Place>
__device__ __noinline__ int ListByRule(const Row<Place>& row, float maximum, const BinRule& rule) {
  CountByDistance(row, maximum);
  if (row.rank == 0) PickBin(row, rule);
  Place::Sync();
  const int bin = Shared<Place>()->picked_bin;
  const int count = Shared<Place>()->picked_count;
  if (count <= kListed) {
    Gather(row, [maximum, bin](float z, int) { return BinOf(maximum - z) <= bin; });
    Place::Sync();
  }
  return count;
}

// Sorts the first `count` of the list, best first. For the first block.
template <typename Place>
__device__ __noinline__ void SortList(const Row<Place>& row, int count) {
  Ranked* const list = Shared<Place>()->list;
  int size = kWarp;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += blockDim.x) list[i] = 0;
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int stride = run / 2; stride > 0; stride /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += blockDim.x) {
        const int low = 2 * i - (i & (stride - 1));
        const Ranked a = list[low];
        const Ranked b = list[low + stride];
        if ((a < b) == ((low & run) == 0)) {
          list[low] = b;
          list[low + stride] = a;
        }
      }
      __syncthreads();
    }
  }
}

// The first candidate, by rank, at which the sum of measures over it and those before reaches
// `need`, at least 1 and no more than the sum over all. A candidate's measure is 1, or with by_mass
// the Units of its weight exp(z - maximum).
template <typename Place>
__device__ __noinline__ Ranked SelectByMeasure(Row<Place>& row, float maximum, bool by_mass,
                                               Ranked need) {
  auto* const s = Shared<Place>();
  const auto measure = [&](float z) { return by_mass ? Units(Exp(z - maximum)) : Ranked{1}; };
  uint32_t prefix = 0;
  Ranked before = 0;
  // From the highest bits down: 11, 11, 10.
  for (int shift = 21; shift >= 0; shift -= shift == 21 ? 11 : 10) {
    const int width = shift == 0 ? 10 : 11;
    for (int i = threadIdx.x; i < kBins; i += blockDim.x) s->measure[i] = 0;
    Place::Sync();
    ForAll(row, [&](float z, int) {
      const uint32_t bits = OrderedBits(z);
      if (shift < 21 && bits >> (shift + width) != prefix) return;
      if (const Ranked units = measure(z); units != 0) {
        atomicAdd(&s->measure[(bits >> shift) & ((1u << width) - 1)], units);
      }
    });
    __syncthreads();
    if (row.rank != 0) {
      for (int i = threadIdx.x; i < kBins; i += blockDim.x) {
        if (s->measure[i] != 0) atomicAdd(Place::Remote(&s->measure[i], 0), s->measure[i]);
      }
    }
    Place::Sync();
    if (row.rank == 0) {
      constexpr int kEach = kBins / kScanThreads;
      const int begin = kBins - 1 - static_cast<int>(threadIdx.x) * kEach;
      Ranked sum = 0;
      if (threadIdx.x < kScanThreads) {
        for (int i = 0; i < kEach; ++i) sum += s->measure[begin - i];
      }
      Ranked total;
      Ranked running = before + ExclusiveScan<Ranked>(row, sum, s->scan_ranked, &total);
      if (threadIdx.x < kScanThreads && running < need && running + sum >= need) {
        int bin = begin;
        while (running + s->measure[bin] < need) running += s->measure[bin--];
        s->crossed = static_cast<Ranked>(bin);
        s->before_crossed = running;
      }
      __syncthreads();
      if (threadIdx.x > 0 && threadIdx.x < Place::kBlocks) {
        *Place::Remote(&s->crossed, threadIdx.x) = s->crossed;
        *Place::Remote(&s->before_crossed, threadIdx.x) = s->before_crossed;
      }
    }
    Place::Sync();
    prefix = prefix << width | static_cast<uint32_t>(s->crossed);
    before = s->before_crossed;
  }

  // Among equals by id.
  const float z = FromOrderedBits(prefix);
  const Ranked each = measure(z);
  Ranked wanted = (need - before + each - 1) / each;  // its index, from 1
  uint32_t mine = 0;
  uint32_t last = 0;
  ForAll(row, [&](float other, int at) {
    if (OrderedBits(other) != prefix) return;
    ++mine;
    last = static_cast<uint32_t>(at);
  });
  mine = __reduce_add_sync(~0u, mine);
  last = __reduce_max_sync(~0u, last);
  __syncthreads();
  if (threadIdx.x == 0) s->equals = s->last_equal = 0;
  __syncthreads();
  if (row.lane == 0) {
    atomicAdd(&s->equals, mine);
    atomicMax(&s->last_equal, last);
  }
  __syncthreads();
  const Ranked* counts = Exchange(row, s->equals);
  int owner = 0;
  while (owner < Place::kBlocks - 1 && wanted > counts[owner]) wanted -= counts[owner++];
  uint32_t id = s->last_equal;
  if (row.rank == owner && row.warp == 0 && wanted < counts[owner]) {
    for (int i = 0; i < row.own * kPairs; ++i) {
      const float2 v = reinterpret_cast<const float2*>(Share(row))[i * kWarp + row.lane];
      const int at = row.first * kChunk + i * 2 * kWarp + 2 * row.lane;
      const int a = at < row.vocabulary && OrderedBits(v.x) == prefix;
      const int b = at + 1 < row.vocabulary && OrderedBits(v.y) == prefix;
      const Ranked inclusive = static_cast<Ranked>(InclusiveScan(a + b, row.lane));
      const uint32_t reached = __ballot_sync(~0u, inclusive >= wanted);
      if (reached != 0) {
        const int lane = __ffs(reached) - 1;
        // The second one of the pair if both are equal and the first is not the wanted one, or if
        // only the second is equal.
        const uint32_t found =
            static_cast<uint32_t>(a != 0 && inclusive - b == wanted ? at : at + 1);
        id = __shfl_sync(~0u, found, lane);
        break;
      }
      wanted -= __shfl_sync(~0u, inclusive, kWarp - 1);
    }
  }
  const Ranked* ids = Exchange(row, id);
  return static_cast<Ranked>(prefix) << 32 | ~static_cast<uint32_t>(ids[owner]);
}

// Over candidates ranked at least `bound`, of weight above 0 and at least min_p: the sum of their
// Units, and the last of them by rank (~0: none).
struct Survivors {
  Ranked units;
  Ranked last;
};
template <typename Place>
__device__ __noinline__ Survivors SumSurvivors(Row<Place>& row, float maximum, Ranked bound,
                                               float min_p) {
  auto* const s = Shared<Place>();
  Ranked units = 0;
  Ranked last = ~Ranked{0};
  ForAll(row, [&](float z, int id) {
    const Ranked ranked = Rank(z, id);
    const float weight = Exp(z - maximum);
    if (ranked < bound || weight < min_p || weight == 0.0f) return;
    units += Units(weight);
    last = min(last, ranked);
  });
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    units += __shfl_xor_sync(~0u, units, mask);
    last = min(last, __shfl_xor_sync(~0u, last, mask));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    s->crossed = 0;
    s->before_crossed = ~Ranked{0};
  }
  __syncthreads();
  if (row.lane == 0) {
    atomicAdd(&s->crossed, units);
    atomicMin(&s->before_crossed, last);
  }
  __syncthreads();
  const Ranked block_units = s->crossed;
  const Ranked block_last = s->before_crossed;
  Survivors all = {0, ~Ranked{0}};
  const Ranked* each = Exchange(row, block_units);
  for (int i = 0; i < Place::kBlocks; ++i) all.units += each[i];
  each = Exchange(row, block_last);
  for (int i = 0; i < Place::kBlocks; ++i) all.last = min(all.last, each[i]);
  return all;
}

// The first `count` (1 to kMostTopLogprobs) candidates, sorted, in the first block's list; fewer if
// the vocabulary is. -inf is a candidate like any other.
template <typename Place>
__device__ __noinline__ void ListFirst(Row<Place>& row, float maximum, int count) {
  count = min(count, row.vocabulary);
  BinRule rule;
  rule.count = static_cast<uint32_t>(count);
  int listed = ListByRule(row, maximum, rule);
  if (listed > kListed) {
    const Ranked bound = SelectByMeasure(row, maximum, false, static_cast<Ranked>(count));
    if (threadIdx.x == 0) Shared<Place>()->listed = 0;
    Place::Sync();
    Gather(row, [bound](float z, int id) { return Rank(z, id) >= bound; });
    Place::Sync();
    listed = count;
  }
  if (row.rank == 0) SortList(row, listed);
}

}  // namespace dorad::kernels
