// Common parts of the attention kernels: the tiles and chunks of positions that fix the order of a
// row's arithmetic, and the workspace of a step.
//
// A row's positions are taken in chunks of kChunk and, inside a chunk, in tiles of kTile, all
// aligned to multiples of their size. Inside a chunk the softmax is online over its tiles: maximum
// m, numerators o += P V with P rounded to bf16, and denominator l += P 1 through the same tensor
// cores. Chunks are joined in order by JoinChunk. Kernels differ in the distribution of this work,
// not in its arithmetic.
//
// Neighbouring rows whose sequences have the same first pages share an item for the whole chunks of
// these, which reads keys and values once for all of them. It leaves a part for each row: its
// softmax so far, which is what joining the chunks in order gives, and with which the row's own
// item begins.
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

// Positions [begin, end) of one row, or of several neighbouring ones, for every key head; or the
// parts of a row to join. An item leaves no part, one part for each of its rows, or one for each
// row and chunk (HasPartsOfChunks). One warp reads it, a word a lane.
struct alignas(64) AttentionItem {
  int32_t row;    // the first
  int32_t begin;  // first position in reach
  int32_t end;
  int32_t slot;   // of the first row's (first) part in the workspace; -1: the item ends its row
  int32_t count;  // rows; of parts to join: parts
  // Of one row: the slot of the part that it begins with, or -1. Of several: the distance between
  // the slots of their parts. Of parts to join: the first one's slot.
  int32_t first;
  int32_t page_base;  // index in StepRows::pages of the (first) sequence's first page
  int32_t position;   // of one row; no position of the item for several
  // The first pages, from that of the first tile's first position; -1 where the item has none.
  int32_t pages[2 * kAttentionTilePages];
};
static_assert(sizeof(AttentionItem) == 64);

// Whether an item leaves a part for each chunk, of a row in slots that follow each other: the item
// of a row by itself, or of several, with its slot, count and first.
constexpr bool HasPartsOfChunks(int32_t slot, int32_t count, int32_t first) {
  return slot >= 0 && (count == 1 || first > 1);
}

// The rows [leader, leader + rows) share `chunks` chunks. The parts of the i-th one have the slots
// from slot + i · stride on: if it is split, one for each chunk, which are joined at last; else, if
// there are chunks to share, one for all of these.
struct AttentionSharing {
  int32_t leader;
  int32_t rows;
  int32_t chunks;
  int32_t slot;
  int32_t stride;
  bool is_split;
};

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
  int32_t join_blocks;  // of the row kernel's, the last ones: each joins a row's parts of a key
                        // head; or 0
  // Counters of the running launch, zero between launches.
  int32_t next;
  int32_t done;
};

// The workspace by parts: the same for all steps.
struct AttentionLayout {
  AttentionHeader* header;
  int32_t* segment_starts;    // [max_rows], of the plan
  int32_t* common_chunks;     // [max_rows], of a row and the one before it
  int32_t* group_starts;      // [max_rows]
  AttentionSharing* sharing;  // [max_rows]
  // [items_room]: items from the front, those of several rows first; from the back, the rows whose
  // parts must be joined, which are processed after all items, or beside them by blocks that do
  // nothing else.
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

// Tiles of eight columns (query heads) that the row kernel computes at once for an item of several
// rows, as registers allow.
inline constexpr int kAttentionSharedTiles = 4;
// Columns of a row: whole pairs, a divisor of eight, or two times eight.
constexpr int32_t AttentionRowColumns(int32_t group) {
  return group > 8 ? 16 : 2 * AttentionPartPairs(group);
}
// Whether there are items of several rows.
constexpr bool SharesAttention(int head_dim, int32_t group) {
  return head_dim <= 128 && group <= 8;
}
// Their rows at most; 1: there are none.
inline int32_t AttentionSharedRows(const AttentionShape& shape) {
  const int32_t group = AttentionGroup(shape);
  if (!SharesAttention(shape.head_dim, group)) return 1;
  return 8 * kAttentionSharedTiles / AttentionRowColumns(group);
}

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
cudaError_t AttentionBlocks(const AttentionShape& shape, KernelIsa isa, bool shares, bool is_fp8,
                            int32_t* blocks);

struct AttentionLaunch {
  PagedAttentionParams params;
  AttentionLayout layout;
  const RopeAppendParams* append = nullptr;  // or the rows are appended already
};

struct Sm90Pages;
struct MmaPages;

// The kernels behind PagedAttention, by instruction set: rows by themselves, and tiles of rows.
template <typename Isa>
cudaError_t RowBlocks(const AttentionShape& shape, bool shares, bool is_fp8, int32_t* blocks);
template <typename Isa>
cudaError_t LaunchRowAttention(const AttentionLaunch& launch, cudaStream_t stream);
template <typename Isa>
cudaError_t LaunchTileAttention(const AttentionLaunch& launch, cudaStream_t stream);

constexpr bool HasTileAttention(int32_t head_dim) {
  return head_dim == 64 || head_dim == 128 || head_dim == 256;
}

}  // namespace dorad::kernels
