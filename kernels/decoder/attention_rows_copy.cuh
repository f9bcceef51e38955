// The copying warp of the row kernel: takes work and copies tiles of the cache.
#pragma once

#include <climits>

#include "kernels/decoder/attention_rows.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/pipeline/ring.cuh"

namespace dorad::kernels::row_attention {

// Words of an AttentionItem, by the lanes that hold them.
enum { kRow, kBegin, kEnd, kSlot, kCount, kFirst, kPageBase, kPosition, kPages };

// Fetches a tile's pages to a free stage of keys, then values, and `factors` of those. Whole warp;
// `empty` and `parity`: of the stage.
template <typename C>
__device__ void FetchStage(const Args<typename C::Isa>& p, uint32_t to, uint32_t factors,
                           uint32_t full, uint32_t empty, uint32_t parity, const TilePages& pages,
                           const typename C::Isa::Policy& policy) {
  using Isa = typename C::Isa;
  constexpr int kDim = C::cache_dim;
  const auto fetch_factors = [&](int kind) {
    if constexpr (C::is_fp8) {
      Isa::FetchFactors(p.factors, C::head_dim, kind, factors + kind * kTile * 2, full, pages);
    }
  };
  if constexpr (Isa::kApart) {
    Isa::template FetchPages<kDim>(p.k, to, pages);
    fetch_factors(0);
    Isa::Complete(full);
    BarrierWait(empty + C::Barriers::kValues, parity ^ 1);
    Isa::template FetchPages<kDim>(p.v, to + C::Tile::kBytes, pages);
    fetch_factors(1);
    Isa::Complete(full + C::Barriers::kValues);
  } else {
    Isa::template FetchPages<kDim>(p.k, p.v, to, full, pages, policy);
    fetch_factors(0);
    fetch_factors(1);
  }
}

// The copying warp. Takes (item, key head) pairs, then joins: its first work by block number, then
// the next free one. Loads an item's data while it copies the item before. If rows are appended
// here, tiles do not depend on the previous kernels: the computing warps wait for those.
template <typename C>
__device__ void Produce(const Args<typename C::Isa>& p, uint8_t* shared, uint32_t base) {
  using Isa = typename C::Isa;
  using Barriers = typename C::Barriers;
  constexpr int kItemTiles = 2;                // whose pages are in the item
  constexpr int kListTiles = 32 / kTilePages;  // whose pages a warp loads at once
  const int lane = threadIdx.x % 32;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * C::stages;
  const typename Isa::Policy policy = Isa::EvictFirst();
  const int all_blocks = static_cast<int>(gridDim.x);
  const bool is_appending = p.append.qkv != nullptr;
  bool is_waiting = is_appending;
  if (!is_appending) WaitForPrevious();
  const auto item_of = [&](int work) {
    return static_cast<int>(static_cast<uint64_t>(work) * p.kv_heads_inverse >> 32);
  };
  // Past the end any value will do: it is not used.
  const auto load = [&](int index) {
    index = max(0, min(index, p.layout.items_room - 1));
    return reinterpret_cast<const int32_t*>(p.layout.items + index)[lane % 16];
  };
  // The first work is taken before the number of items is known, to avoid a wait.
  int work = blockIdx.x, next_work = work + all_blocks;
  int item = load(item_of(work)), next_item = load(item_of(next_work));
  const int items = p.layout.header->items, joins = p.layout.header->joins;
  const int join_blocks = p.layout.header->join_blocks;
  const auto load_at = [&](int index) {
    return load(index < items ? index : p.layout.items_room - 1 - (index - items));
  };
  const int blocks = all_blocks - join_blocks;  // that take what is next
  const int works = (items + (join_blocks > 0 ? 0 : joins)) * p.kv_heads;
  const bool only_joins = static_cast<int>(blockIdx.x) >= blocks;
  const int stop = only_joins ? INT_MAX : works;
  if (only_joins) {
    work += works - blocks;
    next_work = stop;
    item = load_at(item_of(work));
  } else {
    if (item_of(work) >= items) item = load_at(item_of(work));
    next_work = work + blocks;
    if (join_blocks > 0 || item_of(next_work) >= items) next_item = load_at(item_of(next_work));
  }
  RingPosition ring;
  const auto next_stage = [&] { ring.Advance(C::stages); };
#pragma unroll 1
  while (work < stop) {
    const auto word = [item](int at) { return __shfl_sync(0xFFFFFFFF, item, at); };
    const int begin = word(kBegin), end = word(kEnd), row = word(kRow);
    const int slot = word(kSlot), count = word(kCount), first = word(kFirst);
    const int position = word(kPosition);  // where the row is appended
    const int index = item_of(work), head = work - index * p.kv_heads;
    const bool is_join = index >= items;
    const int32_t* const pages = p.pages + word(kPageBase);
    const int first_tile = begin / kTile, last_tile = is_join ? first_tile - 1 : (end - 1) / kTile;
    const bool has_chunk_parts = HasPartsOfChunks(slot, count, first);
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
    int next = 0;
    const auto take_next = [&] {
      if (lane == 0) next = only_joins ? stop : 2 * blocks + atomicAdd(&p.layout.header->next, 1);
    };
    if (!is_waiting) take_next();
    TileInfo info;
    info.begin = begin;
    info.end = end;
    info.row = row;
    info.head = head;
    info.slot = slot;
    info.count = count;
    info.first = first;
    info.own = position;
    if (is_join) {
      BarrierWait(empty + 8 * ring.stage, ring.parity ^ 1);
      if constexpr (Isa::kApart)
        BarrierWait(empty + Barriers::kValues + 8 * ring.stage, ring.parity ^ 1);
      if (lane == 0) {
        info.flags = kJoin;
        reinterpret_cast<TileInfo*>(shared + C::info_at)[ring.stage] = info;
        BarrierArrive(full + 8 * ring.stage);
        if constexpr (Isa::kApart) BarrierArrive(full + Barriers::kValues + 8 * ring.stage);
      }
      next_stage();
    }
#pragma unroll 1
    for (int tile = first_tile; tile <= last_tile; ++tile) {
      const int offset = tile - first_tile;
      if (offset >= kItemTiles && (offset - kItemTiles) % kListTiles == 0) {
        list = next_list;
        if (last_tile - tile >= kListTiles) next_list = load_pages(tile + kListTiles);
      }
      BarrierWait(empty + 8 * ring.stage, ring.parity ^ 1);
      const int pages_of = offset < kItemTiles ? item : list;
      // A row's own position is the last of its last item.
      const int page = __shfl_sync(0xFFFFFFFF, pages_of, page_lane(tile) + pages_end(tile) - 1);
      if (lane == 0) {
        constexpr int kPerChunk = kAttentionChunk / kTile;
        info.position = tile * kTile;
        const bool ends_chunk = tile == last_tile || tile % kPerChunk == kPerChunk - 1;
        const bool ends_part = has_chunk_parts ? ends_chunk : slot >= 0 && tile == last_tile;
        info.flags = (tile == first_tile ? kItemBegins : 0) | (tile == last_tile ? kItemEnds : 0) |
                     (ends_chunk ? kChunkEnds : 0) | (ends_part ? kPartEnds : 0) |
                     (tile % kPerChunk == 0 || tile == first_tile ? kChunkBegins : 0);
        if (has_chunk_parts) info.slot = slot + tile / kPerChunk - first_tile / kPerChunk;
        info.page = is_appending && tile == last_tile && end > position ? page : -1;
        reinterpret_cast<TileInfo*>(shared + C::info_at)[ring.stage] = info;
        Isa::Expect(full + 8 * ring.stage, (pages_end(tile) - pages_begin(tile)) * kKvPageTokens *
                                               (C::cache_dim * 4 + (C::is_fp8 ? 4 : 0)));
      }
      __syncwarp();
      FetchStage<C>(
          p, base + ring.stage * C::stage_bytes,
          base + C::factors_at + ring.stage * C::factor_bytes, full + 8 * ring.stage,
          empty + 8 * ring.stage, ring.parity,
          {pages_of, page_lane(tile), p.kv_heads, head, pages_begin(tile), pages_end(tile)},
          policy);
      next_stage();
    }
    if (is_waiting) {
      // The previous launch may still use the counters.
      WaitForPrevious();
      is_waiting = false;
      take_next();
    }
    work = next_work;
    item = next_item;
    next_work = __shfl_sync(0xFFFFFFFF, next, 0);
    next_item = load_at(item_of(next_work));
  }
  BarrierWait(empty + 8 * ring.stage, ring.parity ^ 1);
  if (lane == 0) {
    reinterpret_cast<TileInfo*>(shared + C::info_at)[ring.stage].flags = kStop;
    BarrierArrive(full + 8 * ring.stage);
    // A block without work may exit at once, since blocks with work wait for the whole launch. The
    // last block resets the counters for the next launch.
    AttentionHeader* const header = p.layout.header;
    const int busy = min(blocks, works);
    const bool is_busy = only_joins || static_cast<int>(blockIdx.x) < busy;
    if (is_busy && atomicAdd(&header->done, 1) == busy + join_blocks - 1) {
      header->next = 0;
      header->done = 0;
    }
  }
}

}  // namespace dorad::kernels::row_attention
