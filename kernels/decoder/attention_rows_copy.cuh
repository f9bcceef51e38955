// The row kernel's two warps that do not compute: one copies tiles of the cache, what is fresh of
// the rows, and parts to be joined; one announces parts that are stored.
#pragma once

#include <algorithm>

#include "kernels/decoder/attention_rows.cuh"

namespace dorad::kernels::row_attention {

// Words of an AttentionItem, by the lanes that hold them.
enum { kRow, kBegin, kEnd, kSlot, kSlots, kFirst, kPageBase, kPosition, kPages };

// The next stage to fill, and the parity of its phase.
template <typename C>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Advance() {
    if (++stage == C::stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Parts of a row, once all are there, into as many stages as they take.
template <typename C>
__device__ void CopyParts(const Args& p, uint8_t* shared, uint32_t base, int row, int head,
                          int first, int slots, Ring<C>& ring) {
  const int lane = threadIdx.x % 32;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * C::stages;
  if (lane == 0) {
    auto* const arrived = reinterpret_cast<uint32_t*>(p.layout.arrived + first * p.kv_heads + head);
    while (LoadAcquire(arrived) != static_cast<uint32_t>(slots)) __nanosleep(20);
    *arrived = 0;
  }
  __syncwarp();
  // What others stored in the ordinary way is read by the copy engine.
  asm volatile("fence.proxy.async;" ::: "memory");
  const int part_bytes = p.layout.part_floats * 4;
  const int in_stage = min(32, C::stage_bytes / part_bytes);
#pragma unroll 1
  for (int part = 0; part < slots; part += in_stage) {
    const int count = min(in_stage, slots - part);
    BarrierWait(empty + 8 * ring.stage, ring.parity ^ 1);
    if (lane == 0) {
      TileInfo info = {};
      info.flags = kJoin | (part == 0 ? kItemBegins : 0) | (part + count == slots ? kItemEnds : 0);
      info.row = row;
      info.head = head;
      info.slots = count;
      info.slot = -1;
      reinterpret_cast<TileInfo*>(shared + C::info_at)[ring.stage] = info;
      BarrierArriveExpect(full + 8 * ring.stage, count * part_bytes);
    }
    __syncwarp();
    if (lane < count) {
      CopyBytes(base + ring.stage * C::stage_bytes + lane * part_bytes,
                p.layout.parts +
                    (int64_t{first + part + lane} * p.kv_heads + head) * p.layout.part_floats,
                part_bytes, full + 8 * ring.stage);
    }
    ring.Advance();
  }
}

// Announces `bytes` of a tile to the stage's barrier, with what is fresh of its row, and copies
// the latter. One lane.
template <typename C>
__device__ void ExpectTile(const Args& p, uint32_t base, int stage, int row, int head, int position,
                           bool begins, bool appends, uint32_t bytes) {
  constexpr uint32_t kHeadBytes = C::head_dim * 2;
  const uint32_t full = base + C::barrier_at + 8 * stage;
  const uint32_t to = base + C::fresh_at + stage * C::fresh_bytes;
  const uint32_t query_bytes = p.group * kHeadBytes;
  if (p.append.qkv == nullptr) {
    BarrierArriveExpect(full, bytes + (begins ? query_bytes : 0));
    if (begins) {
      CopyBytes(to, p.q + (int64_t{row} * p.kv_heads + head) * p.group * C::head_dim, query_bytes,
                full);
    }
    return;
  }
  BarrierArriveExpect(full, bytes + (begins ? query_bytes : 0) + (appends ? 2 * kHeadBytes : 0) +
                                (begins || appends ? C::head_dim * 4 : 0));
  const int heads = p.kv_heads * p.group;
  const __nv_bfloat16* const qkv =
      p.append.qkv + int64_t{row} * (heads + 2 * p.kv_heads) * C::head_dim;
  if (begins) CopyBytes(to, qkv + head * p.group * C::head_dim, query_bytes, full);
  if (appends) {
    CopyBytes(to + C::key_offset * 2, qkv + (heads + head) * C::head_dim, kHeadBytes, full);
    CopyBytes(to + C::value_offset * 2, qkv + (heads + p.kv_heads + head) * C::head_dim, kHeadBytes,
              full);
  }
  if (begins || appends) {
    constexpr int kHalf = C::head_dim / 2;
    const uint32_t angles = to + C::angles_offset * 2;
    CopyBytes(angles, p.append.cos + int64_t{position} * kHalf, kHalf * 4, full);
    CopyBytes(angles + kHalf * 4, p.append.sin + int64_t{position} * kHalf, kHalf * 4, full);
  }
}

// The copying warp. Work is taken in turns first, then as blocks come free: (item, key head) pairs,
// then joins. What is needed of an item is loaded while the one before is copied.
template <typename C>
__device__ void Produce(const Args& p, uint8_t* shared, uint32_t base) {
  constexpr int kItemTiles = 2;                // whose pages are in the item
  constexpr int kListTiles = 32 / kTilePages;  // whose pages a warp loads at once
  constexpr int kMostEarly = std::min(C::stages, 8);
  const int lane = threadIdx.x % 32;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * C::stages;
  const uint64_t policy = EvictFirst();
  const int grid = static_cast<int>(gridDim.x);
  const bool is_appending = p.append.qkv != nullptr;
  bool is_waiting = is_appending;
  if (!is_appending) WaitForPrevious();
  const auto item_of = [&](int work) {
    return static_cast<int>(static_cast<uint64_t>(work) * p.kv_heads_inverse >> 32);
  };
  // Past the end, anything: it is not used.
  const auto load = [&](int index) {
    index = max(0, min(index, p.layout.items_room - 1));
    return reinterpret_cast<const int32_t*>(p.layout.items + index)[lane % 16];
  };
  // At first as if all were items, not to wait for their number.
  int work = blockIdx.x, next_work = work + grid;
  int item = load(item_of(work)), next_item = load(item_of(next_work));
  const int items = p.layout.header->items, joins = p.layout.header->joins;
  const int total = (items + joins) * p.kv_heads;
  const auto load_join = [&](int index) { return load(p.layout.items_room - 1 - (index - items)); };
  if (item_of(work) >= items) item = load_join(item_of(work));
  if (item_of(next_work) >= items) next_item = load_join(item_of(next_work));
  Ring<C> ring;
#pragma unroll 1
  while (work < total) {
    const auto word = [item](int at) { return __shfl_sync(0xFFFFFFFF, item, at); };
    const int begin = word(kBegin), end = word(kEnd), row = word(kRow);
    const int slot = word(kSlot), slots = word(kSlots), first_slot = word(kFirst);
    const int position = word(kPosition);  // where the row is appended
    const int index = item_of(work), head = work - index * p.kv_heads;
    const bool is_join = index >= items;
    const int32_t* const pages = p.pages + word(kPageBase);
    const int first_tile = begin / kTile, last_tile = is_join ? first_tile - 1 : (end - 1) / kTile;
    const auto load_pages = [&](int tile) {
      const int page = tile * kTilePages + lane;
      return page * kKvPageTokens < end ? pages[page] : 0;
    };
    int list = 0, next_list = 0;
    if (last_tile - first_tile >= kItemTiles) next_list = load_pages(first_tile + kItemTiles);
    const auto pages_begin = [&](int tile) {
      return max(begin / kKvPageTokens, tile * kTilePages) - tile * kTilePages;
    };
    const auto pages_end = [&](int tile) {
      return min((end - 1) / kKvPageTokens - tile * kTilePages, kTilePages - 1) + 1;
    };
    // The lane with the number of the tile's first page, in `item` or `list`.
    const auto page_lane = [&](int tile) {
      const int offset = tile - first_tile;
      return offset < kItemTiles ? kPages + offset * kTilePages
                                 : (offset - kItemTiles) % kListTiles * kTilePages;
    };
    const auto copy = [&](int tile, int to_stage) {
      CopyPages<C::head_dim>(p.k, p.v, base + to_stage * C::stage_bytes, full + 8 * to_stage,
                             tile - first_tile < kItemTiles ? item : list, page_lane(tile),
                             p.kv_heads, head, pages_begin(tile), pages_end(tile), policy);
    };
    int early_tiles = 0;  // whose copies have begun
    if (is_waiting) {
      // The block's first work: all but the row's own position is in the cache.
      list = next_list;
#pragma unroll 1
      while (early_tiles < kMostEarly && first_tile + early_tiles <= last_tile) {
        copy(first_tile + early_tiles, early_tiles);
        ++early_tiles;
      }
      WaitForPrevious();
      is_waiting = false;
    }
    int next = 0;
    if (lane == 0) next = 2 * grid + atomicAdd(&p.layout.header->next, 1);
    if (is_join) CopyParts<C>(p, shared, base, row, head, first_slot, slots, ring);
#pragma unroll 1
    for (int tile = first_tile; tile <= last_tile; ++tile) {
      const int offset = tile - first_tile;
      if (offset >= kItemTiles && (offset - kItemTiles) % kListTiles == 0) {
        list = next_list;
        if (last_tile - tile >= kListTiles) next_list = load_pages(tile + kListTiles);
      }
      BarrierWait(empty + 8 * ring.stage, ring.parity ^ 1);
      // The row's own position is the last of its last item.
      const bool appends = is_appending && tile == last_tile && end > position;
      const int page = __shfl_sync(0xFFFFFFFF, offset < kItemTiles ? item : list,
                                   page_lane(tile) + pages_end(tile) - 1);
      if (lane == 0) {
        TileInfo info;
        info.position = tile * kTile;
        info.begin = begin;
        info.end = end;
        constexpr int kPerChunk = kAttentionChunk / kTile;
        info.flags = (tile == first_tile ? kItemBegins : 0) |
                     (tile == last_tile ? kItemEnds | kChunkEnds : 0) |
                     (tile % kPerChunk == kPerChunk - 1 ? kChunkEnds : 0) |
                     (tile % kPerChunk == 0 || tile == first_tile ? kChunkBegins : 0);
        info.row = row;
        info.head = head;
        info.slot = slot;
        info.first = first_slot;
        info.slots = slots;
        info.page = appends ? page : -1;
        reinterpret_cast<TileInfo*>(shared + C::info_at)[ring.stage] = info;
        ExpectTile<C>(p, base, ring.stage, row, head, position, tile == first_tile, appends,
                      (pages_end(tile) - pages_begin(tile)) * kKvPageTokens * C::head_dim * 4);
      }
      __syncwarp();
      if (offset >= early_tiles) copy(tile, ring.stage);
      ring.Advance();
    }
    work = next_work;
    item = next_item;
    next_work = __shfl_sync(0xFFFFFFFF, next, 0);
    const int next_index = item_of(next_work);
    next_item = next_index < items ? load(next_index) : load_join(next_index);
  }
  BarrierWait(empty + 8 * ring.stage, ring.parity ^ 1);
  if (lane == 0) {
    reinterpret_cast<TileInfo*>(shared + C::info_at)[ring.stage].flags = kStop;
    BarrierArrive(full + 8 * ring.stage);
    // A block without work leaves without waiting: one with work waits for the whole launch. The
    // last of those to come here leaves the counters as the next launch wants them.
    AttentionHeader* const header = p.layout.header;
    const int blocks = min(grid, total);
    if (static_cast<int>(blockIdx.x) < blocks && atomicAdd(&header->done, 1) == blocks - 1) {
      header->next = 0;
      header->done = 0;
    }
  }
}

// The announcing warp: whoever computes need not wait until a part has left the multiprocessor.
template <typename C>
__device__ void Announce(const Args& p, const uint8_t* shared, uint32_t base) {
  const uint32_t full = base + C::part_barrier_at, empty = full + 8 * kQueue;
  const int lane = threadIdx.x % 32;
  int done = 0;
  while (true) {
    BarrierWait(full + 8 * (done % kQueue), done / kQueue % 2);
    const int mine = done + lane, at = mine % kQueue;
    const bool is_there = lane < kQueue && BarrierTest(full + 8 * at, mine / kQueue % 2);
    // Lanes up to the first without a part: all that are there share a fence.
    const int count = __ffs(~__ballot_sync(0xFFFFFFFF, is_there)) - 1;
    PartInfo part{0, 0};
    if (lane < count) {
      part = reinterpret_cast<const PartInfo*>(shared + C::part_at)[at];
      BarrierArrive(empty + 8 * at);
      if (part.first >= 0) {
        SignalRelease(
            reinterpret_cast<uint32_t*>(p.layout.arrived + part.first * p.kv_heads + part.head));
      }
    }
    if (__any_sync(0xFFFFFFFF, part.first < 0)) return;
    done += count;
  }
}

}  // namespace dorad::kernels::row_attention
