// The first candidates of a row, by rank: as a sorted list where they are few, as a bound where
// they are many. Internal to kernels/sampling. Functions are for all threads of the cluster unless
// they say otherwise.
#pragma once

#include "kernels/sampling/row.cuh"

namespace dorad::kernels {

// Counts candidates by their distance to the maximum into the first block's `counts`.
__device__ __noinline__ void CountByDistance(const Row& row, float maximum) {
  uint32_t* const counts = Shared()->counts;
  ForAll(row, [&](float z, int) { atomicAdd(&counts[BinOf(maximum - z)], 1u); });
  __syncthreads();
  if (row.rank != 0) {
    for (int bin = threadIdx.x; bin < kBins; bin += blockDim.x) {
      if (counts[bin] == 0) continue;
      atomicAdd(Remote(&counts[bin], 0), counts[bin]);
      counts[bin] = 0;
    }
  }
  ClusterSync();
}

// The bins that must be listed: the first that hold `count` candidates, or with by_mass those that
// surely hold a weight of `mass`; `last` at most.
struct BinRule {
  uint32_t count = ~0u;
  double mass = 0.0;
  bool by_mass = false;
  int last = kBins - 1;
};

// Sets picked_bin, the last bin by the rule, in all blocks, after the next ClusterSync; zeroes
// `counts`. For the first block.
__device__ __noinline__ void PickBin(const Row& row, const BinRule& rule) {
  constexpr int kEach = kBins / kScanThreads;
  RowShared* const s = Shared();
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
  if (threadIdx.x == 0) s->picked_bin = rule.last;
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
  if (threadIdx.x > 0 && threadIdx.x < kCluster) *Remote(&s->picked_bin, threadIdx.x) = bin;
}

// The k-th largest of the row's chunk maxima, of which there are at least k: as many candidates
// reach it. For all threads of a block.
__device__ __noinline__ float ChunkBound(const Row& row, int k) {
  RowShared* const s = Shared();
  const int at = static_cast<int>(threadIdx.x);
  if (at < row.chunks) {
    const float mine = s->chunk_max[at];
    int before = 0;
#pragma unroll 4
    for (int i = 0; i < row.chunks; ++i) {
      const float other = s->chunk_max[i];
      before += other > mine || (other == mine && i < at);
    }
    if (before == k - 1) s->bound = mine;
  }
  __syncthreads();
  return s->bound;
}

// Which of the lane's elements of an own chunk `take` (x, id) accepts, one bit each.
template <typename Take>
__device__ inline uint32_t Taken(const Row& row, int chunk, Take take) {
  uint32_t taken = 0;
  uint32_t bit = 1;
  ForLane(row, chunk, [&](float x, int id) {
    if (id < row.vocabulary && take(x, id)) taken |= bit;
    bit <<= 1;
  });
  return taken;
}

// Counts the candidates that `take` (x, id) accepts and puts them, by live(x), into the first
// block's list, unless there are more than kListed. With a mass above 0 they must weigh that
// together, too, each exp(live(x) - maximum); if they do not, nothing is listed and the result is
// kListed + 1. The list is complete after the next ClusterSync; so must all be done with the former
// one when this is called.
template <typename Take>
__device__ inline int Gather(Row& row, const Tempered& live, float maximum, double mass,
                             Take take) {
  RowShared* const s = Shared();
  double weight = 0.0;
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    const uint32_t taken = Taken(row, chunk, take);
    const int count = __reduce_add_sync(~0u, __popc(taken));
    if (row.lane == 0) s->chunk_counts[chunk] = count;
    if (mass > 0.0 && count > 0) {
      for (uint32_t left = taken; left != 0; left &= left - 1) {
        const int i = __ffs(left) - 1;
        const float x = Share()[chunk * kChunk + (i / 2) * 2 * kWarp + 2 * row.lane + i % 2];
        weight += static_cast<double>(Exp(live(x) - maximum));
      }
      __syncwarp();
    }
  }
  __syncthreads();
  int count = 0;
  if (row.warp == 0) {
    for (int i = row.lane; i < row.own; i += kWarp) count += s->chunk_counts[i];
    count = __reduce_add_sync(~0u, count);
  }
  const Ranked* counts = Exchange(row, static_cast<Ranked>(count));
  int total = 0;
  int base = 0;
  for (int i = 0; i < kCluster; ++i) {
    if (i == row.rank) base = total;
    total += static_cast<int>(counts[i]);
  }
  if (total > kListed) return total;
  if (mass > 0.0) {
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
      weight += __shfl_xor_sync(~0u, weight, mask);
    }
    if (row.lane == 0) s->reduced[row.warp] = __double_as_longlong(weight);
    __syncthreads();
    double block = 0.0;
    for (int i = 0; i < row.warps; ++i) block += __longlong_as_double(s->reduced[i]);
    const Ranked* weights = Exchange(row, __double_as_longlong(block));
    double all = 0.0;
    for (int i = 0; i < kCluster; ++i) all += __longlong_as_double(weights[i]);
    if (all < mass * (1.0 + 1e-9)) return kListed + 1;
  }
  for (int chunk = 0; chunk < row.own; ++chunk) {
    const int here = s->chunk_counts[chunk];
    if (here > 0 && chunk % row.warps == row.warp) {
      uint32_t taken = Taken(row, chunk, take);
      const int mine = __popc(taken);
      int at = base + InclusiveScan(mine, row.lane) - mine;
      for (; taken != 0; taken &= taken - 1) {
        const int i = __ffs(taken) - 1;
        const int offset = (i / 2) * 2 * kWarp + 2 * row.lane + i % 2;
        const float x = Share()[chunk * kChunk + offset];
        *Remote(&s->list[at++], 0) = Rank(live(x), row.IdAt(chunk) + offset);
      }
      __syncwarp();
    }
    base += here;
  }
  return total;
}

// Sorts the first `count` of the list, best first. For the first block.
__device__ __noinline__ void SortList(const Row& row, int count) {
  Ranked* const list = Shared()->list;
  constexpr int kFew = 512;
  if (count <= kFew) {
    // Each one's place is the number of those before it.
    constexpr int kMine = kFew / kScanThreads;
    Ranked mine[kMine];
    int place[kMine];
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int index = static_cast<int>(threadIdx.x + j * blockDim.x);
      place[j] = 0;
      if (index >= count) continue;
      mine[j] = list[index];
#pragma unroll 8
      for (int i = 0; i < count; ++i) place[j] += list[i] > mine[j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      if (threadIdx.x + j * blockDim.x < count) list[place[j]] = mine[j];
    }
    __syncthreads();
    return;
  }
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
__device__ __noinline__ Ranked SelectByMeasure(Row& row, float maximum, bool by_mass, Ranked need) {
  RowShared* const s = Shared();
  const auto measure = [&](float z) { return by_mass ? Units(Exp(z - maximum)) : Ranked{1}; };
  int bin = 0;
  uint32_t prefix = 0;
  Ranked before = 0;
  // First by distance to the maximum, which spreads candidates over many bins; then, of those in
  // one bin, by the bits of z from the highest down: 11, 11, 10.
  for (int level = 0; level < 4; ++level) {
    const int shift = level == 1 ? 21 : level == 2 ? 10 : 0;
    const int width = level == 3 ? 10 : 11;
    for (int i = threadIdx.x; i < kBins; i += blockDim.x) s->measure[i] = 0;
    ClusterSync();
    ForAll(row, [&](float z, int) {
      const int by_distance = kBins - 1 - BinOf(maximum - z);
      const uint32_t bits = OrderedBits(z);
      uint32_t to = static_cast<uint32_t>(by_distance);
      if (level > 0) {
        if (by_distance != bin || (level > 1 && bits >> (shift + width) != prefix)) return;
        to = (bits >> shift) & ((1u << width) - 1);
      }
      if (const Ranked units = measure(z); units != 0) atomicAdd(&s->measure[to], units);
    });
    __syncthreads();
    if (row.rank != 0) {
      for (int i = threadIdx.x; i < kBins; i += blockDim.x) {
        if (s->measure[i] != 0) atomicAdd(Remote(&s->measure[i], 0), s->measure[i]);
      }
    }
    ClusterSync();
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
        int at = begin;
        while (running + s->measure[at] < need) running += s->measure[at--];
        s->crossed = static_cast<Ranked>(at);
        s->before_crossed = running;
      }
      __syncthreads();
      if (threadIdx.x > 0 && threadIdx.x < kCluster) {
        *Remote(&s->crossed, threadIdx.x) = s->crossed;
        *Remote(&s->before_crossed, threadIdx.x) = s->before_crossed;
      }
    }
    ClusterSync();
    if (level == 0) {
      bin = static_cast<int>(s->crossed);
    } else {
      prefix = prefix << width | static_cast<uint32_t>(s->crossed);
    }
    before = s->before_crossed;
  }

  // Among equals by id.
  const float z = FromOrderedBits(prefix);
  const Ranked each = measure(z);
  Ranked wanted = (need - before + each - 1) / each;  // the how manyth
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
  while (owner < kCluster - 1 && wanted > counts[owner]) wanted -= counts[owner++];
  uint32_t id = s->last_equal;
  if (row.rank == owner && row.warp == 0 && wanted < counts[owner]) {
    for (int i = 0; i < row.own * kPairs; ++i) {
      const float2 v = reinterpret_cast<const float2*>(Share())[i * kWarp + row.lane];
      const int at = row.first * kChunk + i * 2 * kWarp + 2 * row.lane;
      const int a = at < row.vocabulary && OrderedBits(v.x) == prefix;
      const int b = at + 1 < row.vocabulary && OrderedBits(v.y) == prefix;
      const Ranked inclusive = static_cast<Ranked>(InclusiveScan(a + b, row.lane));
      const uint32_t reached = __ballot_sync(~0u, inclusive >= wanted);
      if (reached != 0) {
        const int lane = __ffs(reached) - 1;
        // The second of the pair if both are equal and the first is not the one, or it alone is.
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
// Units, and the last of them by rank (~0 if there is none).
struct Survivors {
  Ranked units;
  Ranked last;
};
__device__ __noinline__ Survivors SumSurvivors(Row& row, float maximum, Ranked bound, float min_p) {
  RowShared* const s = Shared();
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
  for (int i = 0; i < kCluster; ++i) all.units += each[i];
  each = Exchange(row, block_last);
  for (int i = 0; i < kCluster; ++i) all.last = min(all.last, each[i]);
  return all;
}

// A bound below that of all candidates that rank as x does or better, `bound` being x and `maximum`
// the row's: what is divided by the temperature may become equal.
__device__ inline float Slackened(float bound, const Tempered& live) {
  return live.identity ? bound : bound - (live.maximum - bound) * 0x1p-20f;
}

// z in place of x, in the chunks and their maxima. For all threads of a block.
__device__ inline void Temper(const Row& row, const Tempered& tempered) {
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    float2* at = reinterpret_cast<float2*>(Share() + chunk * kChunk) + row.lane;
#pragma unroll 2
    for (int i = 0; i < kPairs; ++i) {
      const float2 v = at[i * kWarp];
      at[i * kWarp] = {tempered.Divide(v.x - tempered.maximum),
                       tempered.Divide(v.y - tempered.maximum)};
    }
  }
  for (int i = threadIdx.x; i < row.chunks; i += blockDim.x) {
    Shared()->chunk_max[i] = tempered(Shared()->chunk_max[i]);
  }
  __syncthreads();
}

// The first `count` (1 to kMostTopLogprobs) candidates, sorted, in the first block's list; fewer if
// the vocabulary is. -inf is a candidate like any other. Logits are ranked by live(x), of which
// `maximum` is the largest; where they come to be replaced by that, live becomes the identity.
__device__ __noinline__ void ListFirst(Row& row, Tempered& live, float maximum, int count) {
  count = min(count, row.vocabulary);
  int listed = kListed + 1;
  if (count <= row.chunks) {
    const float bound = Slackened(ChunkBound(row, count), live);
    listed = Gather(row, live, maximum, 0.0, [&](float x, int) { return x >= bound; });
  }
  if (listed > kListed) {
    if (!live.identity) {
      Temper(row, live);
      live.identity = true;
    }
    CountByDistance(row, maximum);
    if (row.rank == 0) {
      BinRule rule;
      rule.count = static_cast<uint32_t>(count);
      PickBin(row, rule);
    }
    ClusterSync();
    const int bin = Shared()->picked_bin;
    listed =
        Gather(row, live, maximum, 0.0, [&](float z, int) { return BinOf(maximum - z) <= bin; });
  }
  if (listed > kListed) {
    const Ranked last = SelectByMeasure(row, maximum, false, static_cast<Ranked>(count));
    listed = Gather(row, live, maximum, 0.0, [&](float z, int id) { return Rank(z, id) >= last; });
  }
  ClusterSync();
  if (row.rank == 0) SortList(row, listed);
}

}  // namespace dorad::kernels
