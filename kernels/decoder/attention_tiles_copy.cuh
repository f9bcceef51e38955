// How tiles of the cache come to the tile kernel's shared memory: by Hopper's copying warp, or by
// the warps that compute. In eight bits they become bf16 there.
#pragma once

#include "kernels/decoder/attention_fp8.cuh"
#include "kernels/decoder/attention_tiles.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/pipeline/ring.cuh"

namespace dorad::kernels::tile_attention {

// Writes eight rows of a tile in bf16, from a multiple of 8 on, by one warp. codes(row, i): the
// i-th 16 in eight bits of a row; factor(row): twice.
template <typename C, typename Codes, typename Factor>
__device__ void ConvertRows(uint8_t* tile, int first, Codes codes, Factor factor) {
  using Tile = typename C::Tile;
  constexpr int kPasses = C::head_dim / 64;
  // Eight lanes have four units of two rows, whose swizzles differ in their first and third bit:
  // so they have different banks as they read 16 bytes each and as they write twice as many.
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int row = lane / 8 ^ (lane / 4 % 2 == 0 ? 0 : 5);
  uint4 from[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) from[i] = codes(row, lane % 4 + 4 * i);
  const uint32_t by = factor(row);
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int column = 16 * (lane % 4 + 4 * i);
    const uint4 x = from[i];
    *reinterpret_cast<uint4*>(tile + Tile::Offset(first + row, column)) = {
        EvenElements(x.x, by), EvenElements(x.y, by), EvenElements(x.z, by), EvenElements(x.w, by)};
    *reinterpret_cast<uint4*>(tile + Tile::Offset(first + row, column + 8)) = {
        OddElements(x.x, by), OddElements(x.y, by), OddElements(x.z, by), OddElements(x.w, by)};
  }
}

// Hopper's warps that make bf16 stages of those in eight bits.
template <typename C>
__device__ void Convert(const Span& span, uint8_t* shared, uint32_t base) {
  using CodeTile = typename C::CodeTile;
  constexpr int kEights = 2 * kTile / 8;  // of rows: of keys, then of values
  const int warp = static_cast<int>(threadIdx.x - kConsumers) / 32 - 1;
  const uint32_t full = base + C::barrier_at, empty = full + 8 * C::stages;
  const uint32_t codes_full = base + C::code_barrier_at;
  const uint32_t codes_empty = codes_full + 8 * C::code_stages;
  RingPosition ring, codes;
  for (int tile = span.FirstTile(); tile < span.EndTile(); ++tile) {
    BarrierWait(codes_full + 8 * codes.stage, codes.parity);
    BarrierWait(empty + 8 * ring.stage, ring.parity ^ 1);
    const uint8_t* const stage = shared + C::codes_at + codes.stage * C::code_stage_bytes;
    const auto* const factors =
        reinterpret_cast<const uint16_t*>(shared + C::factors_at + codes.stage * C::factor_bytes);
#pragma unroll 1
    for (int eight = warp; eight < kEights; eight += C::converters / 32) {
      const int kind = eight / (kTile / 8), first = eight % (kTile / 8) * 8;
      const uint8_t* const from = stage + kind * CodeTile::kBytes;
      ConvertRows<C>(
          shared + ring.stage * C::stage_bytes + kind * C::Tile::kBytes, first,
          [=](int row, int unit) {
            return *reinterpret_cast<const uint4*>(from + CodeTile::Offset(first + row, 8 * unit));
          },
          [=](int row) { return factors[8 * eight + row] * 0x10001u; });
    }
    // The tensor cores will read there.
    C::Isa::FenceStages();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      BarrierArrive(full + 8 * ring.stage);
      BarrierArrive(codes_empty + 8 * codes.stage);
    }
    ring.Advance(C::stages);
    codes.Advance(C::code_stages);
  }
}

// Hopper's copying warp.
template <typename C>
__device__ void Produce(const Args<typename C::Isa>& p, const Span& span, uint32_t base) {
  using Isa = typename C::Isa;
  constexpr int kStages = C::has_codes ? C::code_stages : C::stages;
  constexpr int kStageBytes = C::has_codes ? C::code_stage_bytes : C::stage_bytes;
  const int lane = threadIdx.x % 32;
  const uint32_t full = base + (C::has_codes ? C::code_barrier_at : C::barrier_at);
  const uint32_t empty = full + 8 * kStages;
  const uint32_t stages_at = base + (C::has_codes ? C::codes_at : 0);
  const typename Isa::Policy policy = Isa::EvictLast();
  const int32_t* const pages = p.pages + span.tile.page_base;
  RingPosition ring;
  int page = 0;
  for (int tile = span.FirstTile(); tile < span.EndTile(); ++tile) {
    const int page_lane = (tile - span.FirstTile()) % 8 * kTilePages;
    if (page_lane == 0) {
      const int index = tile * kTilePages + lane;
      page = index * kKvPageTokens < span.end ? pages[index] : 0;
    }
    const int first = max(span.begin / kKvPageTokens, tile * kTilePages) - tile * kTilePages;
    const int end = min((span.end - 1) / kKvPageTokens - tile * kTilePages, kTilePages - 1) + 1;
    BarrierWait(empty + 8 * ring.stage, ring.parity ^ 1);
    if (lane == 0) {
      Isa::Expect(full + 8 * ring.stage,
                  (end - first) * kKvPageTokens * (C::cache_dim * 4 + (C::is_fp8 ? 4 : 0)));
    }
    __syncwarp();
    const TilePages pages_of = {page, page_lane, p.kv_heads, span.head, first, end};
    Isa::template FetchPages<C::cache_dim>(p.k, p.v, stages_at + ring.stage * kStageBytes,
                                           full + 8 * ring.stage, pages_of, policy);
    if constexpr (C::has_codes) {
      const uint32_t factors = base + C::factors_at + ring.stage * C::factor_bytes;
      for (const int kind : {0, 1}) {
        Isa::FetchFactors(p.factors, C::head_dim, kind, factors + kind * kTile * 2,
                          full + 8 * ring.stage, pages_of);
      }
    }
    ring.Advance(kStages);
  }
}

// Where there is no copy engine: the warp's share of the tiles that the warps of a block fetch for
// each other, eight rows of each.
template <typename C>
class TileShare {
 public:
  __device__ TileShare(const Args<typename C::Isa>& p, const Span& span, uint8_t* shared,
                       uint32_t base)
      : p_(p), span_(span), shared_(shared), base_(base) {}

  // Keys, then values of each tile in turn, to a free stage.
  __device__ void FetchKeys(int tile, int stage) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int turn = (tile - span_.FirstTile()) % 32;
    if (turn == 0) {
      const int index = (tile + lane) * kTilePages + Warp() / kWarpsOfPage;
      const bool is_in = index >= span_.begin / kKvPageTokens && index * kKvPageTokens < span_.end;
      pages_ = is_in ? p_.pages[span_.tile.page_base + index] : -1;
    }
    page_ = __shfl_sync(0xFFFFFFFF, pages_, turn);
    Fetch(0, stage, base_ + C::barrier_at + 8 * stage);
  }
  __device__ void FetchValues(int stage) {
    Fetch(1, stage, base_ + C::barrier_at + C::Barriers::kValues + 8 * stage);
  }

 private:
  static constexpr int kRows = kTile / (kConsumers / 32);
  static constexpr int kWarpsOfPage = kKvPageTokens / kRows;

  static __device__ int Warp() { return static_cast<int>(threadIdx.x / 32); }

  // kind: 0 for keys, 1 for values.
  __device__ void Fetch(int kind, int stage, uint32_t full) const {
    using Isa = typename C::Isa;
    const int first = Warp() % kWarpsOfPage * kRows;  // in the page
    const int to = stage * C::stage_bytes + kind * C::Tile::kBytes;
    if (page_ < 0) {
      Isa::Skip(full);
      return;
    }
    const auto* const rows = Isa::template PageAt<C::cache_dim>(kind == 0 ? p_.k : p_.v, page_,
                                                                p_.kv_heads, span_.head) +
                             first * C::cache_dim;
    if constexpr (C::is_fp8) {
      const __nv_bfloat16* const factors =
          p_.factors + FactorsAt(page_, p_.kv_heads, span_.head, kind, C::head_dim) + first;
      static_assert(kRows == 8);
      ConvertRows<C>(
          shared_ + to, Warp() * kRows,
          [=](int row, int unit) {
            return *reinterpret_cast<const uint4*>(rows + row * C::cache_dim + 8 * unit);
          },
          [=](int row) { return __bfloat16_as_ushort(factors[row]) * 0x10001u; });
      Isa::Skip(full);
    } else {
      Isa::template FetchRows<C::head_dim, kRows>(rows,
                                                  base_ + to + Warp() * kRows * C::Tile::kRowBytes);
      Isa::Complete(full);
    }
  }

  const Args<typename C::Isa>& p_;
  const Span& span_;
  uint8_t* const shared_;
  const uint32_t base_;
  int pages_ = -1;  // of this warp's rows: the next 32 tiles, by lane
  int page_ = -1;   // of the last tile whose keys were fetched
};

}  // namespace dorad::kernels::tile_attention
