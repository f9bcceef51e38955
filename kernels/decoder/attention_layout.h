// Common parts of the attention kernels: the tiles and chunks of positions that fix the order of a
// row's arithmetic, and the workspace of a step.
//
// A row's positions are taken in chunks of kChunk and, inside a chunk, in tiles of kTile, all
// aligned to multiples of their size. Inside a chunk the softmax is online over its tiles: maximum
// m, numerators o += P V with P rounded to bf16, and denominator l += P 1 through the same tensor
// cores. Chunks are joined in order by JoinChunk. Kernels differ in the distribution of this work,
// not in its arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/decoder/attention.h"

namespace dorad::kernels {

inline constexpr int kAttentionTile = 64;
static_assert(kAttentionTile == kKvListTokens);
inline constexpr int kAttentionTilePages = kAttentionTile / kKvPageTokens;
inline constexpr int kAttentionChunk = 128;
inline constexpr int kAttentionMaxGroup = 16;
// Query rows (tokens by the heads of one group) of one block of the tiled kernel.
constexpr int AttentionTileRows(int head_dim) { return head_dim > 128 ? 64 : 128; }

// Positions [begin, end) of one row, for every key head. One warp reads it, a word a lane.
struct alignas(64) AttentionItem {
  int32_t row;
  int32_t begin;  // first position in reach, for a chunk's item inside that chunk
  int32_t end;
  int32_t slot;       // of the part in the workspace; -1: the item is the whole row
  int32_t slots;      // parts of the row
  int32_t first;      // slot of the row's first part
  int32_t page_base;  // index in StepRows::pages of the sequence's first page
  int32_t position;   // of the row
  // The first pages, from that of the first tile's first position; -1 where the item has none.
  int32_t pages[2 * kAttentionTilePages];
};
static_assert(sizeof(AttentionItem) == 64);

// Rows [row, row + tokens) of one sequence, the first at `position`.
struct AttentionRowTile {
  int32_t row;
  int32_t tokens;
  int32_t position;
  int32_t page_base;
};

// Bits of an unwritten place in a part: a NaN that no part contains. The reader of a part takes its
// numbers as they appear, and writes these bits back.
inline constexpr uint32_t kNoPart = 0xFFFFFFFF;

struct AttentionHeader {
  int32_t items;
  int32_t joins;
  int32_t tiles;
  // Counters of the running launch, zero between launches.
  int32_t next;
  int32_t done;
};

// The workspace by parts: the same for all steps.
struct AttentionLayout {
  AttentionHeader* header;
  int32_t* segment_starts;  // [max_rows], of the plan
  // [items_room]: items from the front; from the back, the rows whose parts must be joined, which
  // are processed after all items.
  AttentionItem* items;
  AttentionRowTile* tiles;  // [max_rows]
  float* parts;             // [slots, kv_heads, part_floats]; kNoPart where unwritten
  int32_t items_room;
  int32_t slots;
  int32_t part_floats;
};

inline int32_t AttentionGroup(const AttentionShape& shape) { return shape.heads / shape.kv_heads; }

inline bool IsFastAttention(const AttentionShape& shape) {
  const int32_t dim = shape.head_dim;
  return (dim == 64 || dim == 80 || dim == 96 || dim == 128 || dim == 256) &&
         AttentionGroup(shape) <= kAttentionMaxGroup;
}

// Whether only a part of a head turns.
constexpr bool IsPartial(const RopeAppendParams& params) {
  return params.width != 0 && params.width != params.shape.head_dim;
}

// Whether a part of a head can be turned two neighbouring elements at a time (RotatePart).
inline bool TurnsByPairs(const RopeAppendParams& params) {
  return params.width % 4 == 0 && params.width <= params.shape.head_dim / 2;
}

// Whether AppendAttention turns such parts in the same launch.
constexpr bool AppendsParts(int head_dim) { return head_dim == 256; }

// Tokens of one AttentionRowTile.
inline int32_t AttentionTileTokens(const AttentionShape& shape) {
  return AttentionTileRows(shape.head_dim) / AttentionGroup(shape);
}

// The shortest run that is computed in tiles: below half a tile, single rows in parts are faster.
inline int32_t AttentionLeastTokens(const AttentionShape& shape) {
  return (AttentionTileTokens(shape) + 1) / 2;
}

// Pairs of heads that a part has for each eight: 1, 2 or 4.
constexpr int32_t AttentionPartPairs(int32_t group) { return group > 4 ? 4 : (group + 1) / 2; }

// A part: maximum and denominator of every head, then the numerators in the lanes' layout.
inline int32_t AttentionPartFloats(const AttentionShape& shape) {
  const int32_t group = AttentionGroup(shape);
  const int32_t head_tiles = (group + 7) / 8;
  return head_tiles * 16 + shape.head_dim / 16 * head_tiles * 32 * AttentionPartPairs(group);
}

// False: the workspace is too small for the work list, or made for fewer rows.
bool LayOutAttention(const AttentionShape& shape, int32_t rows, const AttentionWorkspace& workspace,
                     AttentionLayout* layout);

// Blocks of the decode kernel that run at once on the current device.
cudaError_t AttentionBlocks(const AttentionShape& shape, KernelIsa isa, int32_t* blocks);

struct AttentionLaunch {
  PagedAttentionParams params;
  AttentionLayout layout;
  const RopeAppendParams* append = nullptr;  // or the rows are appended already
};

struct Sm90Pages;
struct MmaPages;

// The kernels behind PagedAttention, by instruction set: rows by themselves, and tiles of rows.
template <typename Isa>
cudaError_t RowBlocks(const AttentionShape& shape, int32_t* blocks);
template <typename Isa>
cudaError_t LaunchRowAttention(const AttentionLaunch& launch, cudaStream_t stream);
template <typename Isa>
cudaError_t LaunchTileAttention(const AttentionLaunch& launch, cudaStream_t stream);

inline bool HasTileAttention(const AttentionShape& shape) {
  return shape.head_dim == 64 || shape.head_dim == 128 || shape.head_dim == 256;
}

}  // namespace dorad::kernels
