#include "kernels/common/status.h"
#include "kernels/decoder/attention.h"
#include "kernels/decoder/attention_layout.h"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"
#include "kernels/isa/shared.cuh"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 1024;

// A row is one item up to this percentage of a block's share of the work. Parts have a cost: with
// many rows, uneven blocks cost less.
constexpr int64_t kSharePercent = 200;
// Items that a block gets of rows in parts, in the mean: few, since each begins with a wait for its
// queries, and not so few that blocks end at different times.
constexpr int64_t kItemsOfBlock = 4;
// Few joins, of at most a block in so many, have blocks of their own, which take parts as they
// come. Joined after all items, each part would take as long as a chunk.
constexpr int64_t kJoinShare = 8;

struct PlanArgs {
  StepRows rows;
  AttentionLayout layout;
  int32_t kv_heads;
  int32_t window;
  int32_t blocks;       // of the row kernel
  int32_t tile_tokens;  // 0: no tiles
  int32_t least_tokens;
  int32_t shared_rows;  // of an item at most; 1: rows share none
  AttentionSplit split;
};

struct PlanShared {
  int64_t sums[kThreads / 32];
  int32_t most[kThreads / 32];
};

// Exclusive prefix sum over the block; *total is the sum. All threads.
__device__ int64_t BlockScan(int64_t value, int64_t* total) {
  int64_t* const sums = StaticShared<PlanShared>().sums;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t sum = value;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int64_t other = __shfl_up_sync(0xFFFFFFFF, sum, offset);
    if (lane >= offset) sum += other;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int64_t part = sums[lane];
  for (int offset = 1; offset < 32; offset *= 2) {
    const int64_t other = __shfl_up_sync(0xFFFFFFFF, part, offset);
    if (lane >= offset) part += other;
  }
  *total = __shfl_sync(0xFFFFFFFF, part, 31);
  const int64_t before = __shfl_sync(0xFFFFFFFF, part, (warp + 31) % 32);
  return (warp == 0 ? 0 : before) + sum - value;
}

// Inclusive maximum over the block, and with `carry`; all threads. Values are at least -1.
__device__ int32_t BlockMaxScan(int32_t value, int32_t* carry) {
  int32_t* const most = StaticShared<PlanShared>().most;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t other = __shfl_up_sync(0xFFFFFFFF, value, offset);
    if (lane >= offset) value = max(value, other);
  }
  __syncthreads();
  if (lane == 31) most[warp] = value;
  __syncthreads();
  int32_t part = most[lane];
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t other = __shfl_up_sync(0xFFFFFFFF, part, offset);
    if (lane >= offset) part = max(part, other);
  }
  const int32_t before = __shfl_sync(0xFFFFFFFF, part, (warp + 31) % 32);
  value = max(value, *carry);
  if (warp > 0) value = max(value, before);
  *carry = max(*carry, __shfl_sync(0xFFFFFFFF, part, 31));
  return value;
}

struct Reach {
  int32_t begin, end;  // positions
  __device__ int64_t Tiles() const {
    return (end - 1) / kAttentionTile - begin / kAttentionTile + 1;
  }
  __device__ int32_t Chunks() const {
    return (end - 1) / kAttentionChunk - begin / kAttentionChunk + 1;
  }
};

__device__ Reach ReachOf(const PlanArgs& a, int row) {
  const int32_t position = a.rows.positions[row];
  const int32_t last = a.rows.reach == nullptr ? position : a.rows.reach[row];
  return {a.window > 0 ? max(0, position - a.window + 1) : 0, last + 1};
}

// Whether the row belongs to a run that is computed in tiles.
__device__ bool IsTiled(const PlanArgs& a, int row) {
  if (a.tile_tokens == 0) return false;
  const int32_t start = a.layout.segment_starts[row];
  const int32_t last = start + a.least_tokens - 1;
  return last < a.rows.rows && a.layout.segment_starts[last] == start;
}

// The begin of the run of a row, for rows in ascending order: threads take turns of kThreads rows.
// begins(row): whether a run begins there. `starts`: out.
template <typename F>
__device__ void FindRuns(int rows, F begins, int32_t* starts) {
  int32_t carry = -1;
  for (int base = 0; base < rows; base += kThreads) {
    const int row = base + static_cast<int>(threadIdx.x);
    const int32_t start = BlockMaxScan(row < rows && begins(row) ? row : -1, &carry);
    if (row < rows) starts[row] = start;
  }
  __syncthreads();
}

// The whole chunks that a row and the one before it have in common, below both own positions. One
// warp.
__device__ int32_t CommonChunks(const PlanArgs& a, int row) {
  constexpr int kChunkPages = kAttentionChunk / kKvPageTokens;
  const int lane = threadIdx.x % 32;
  if (row == 0 || IsTiled(a, row) || IsTiled(a, row - 1)) return 0;
  if (ReachOf(a, row).begin > 0 || ReachOf(a, row - 1).begin > 0) return 0;
  const int chunks = min(a.rows.positions[row], a.rows.positions[row - 1]) / kAttentionChunk;
  const int mine = a.rows.sequences[row], other = a.rows.sequences[row - 1];
  if (mine == other) return chunks;
  const int32_t* const x = a.rows.pages + a.rows.page_begin[mine];
  const int32_t* const y = a.rows.pages + a.rows.page_begin[other];
  const int pages = chunks * kChunkPages;
  constexpr int kDeep = 4;  // loads in flight together
  for (int base = 0; base < pages; base += 32 * kDeep) {
    bool differ[kDeep];
    for (int i = 0; i < kDeep; ++i) {
      const int page = base + 32 * i + lane;
      differ[i] = page >= pages || x[page] != y[page];
    }
    for (int i = 0; i < kDeep; ++i) {
      const unsigned first = __ballot_sync(0xFFFFFFFF, differ[i]);
      if (first != 0) return (base + 32 * i + __ffs(static_cast<int>(first)) - 1) / kChunkPages;
    }
  }
  return chunks;
}

// Whether a row belongs to another group than the one before it. Groups part where the rows have
// less than half in common of what one of them has with its other neighbour.
__device__ bool BeginsGroup(const PlanArgs& a, int row) {
  const auto common = [&a](int at) { return at < a.rows.rows ? a.layout.common_chunks[at] : 0; };
  return row == 0 || common(row) == 0 || 2 * common(row) < common(row - 1) ||
         2 * common(row) < common(row + 1);
}

struct Group {
  int rows = 1;
  int32_t chunks = 0;  // that all share
  __device__ int64_t Tiles() const { return int64_t{chunks} * (kAttentionChunk / kAttentionTile); }
};

// The group of at most shared_rows rows that a row leads. A row that another one leads leads none.
__device__ Group GroupOf(const PlanArgs& a, int row) {
  const int32_t* const starts = a.layout.group_starts;
  if ((row - starts[row]) % a.shared_rows != 0) return {0, 0};
  Group group;
  while (group.rows < a.shared_rows && row + group.rows < a.rows.rows &&
         starts[row + group.rows] == starts[row]) {
    const int32_t common = a.layout.common_chunks[row + group.rows++];
    group.chunks = group.rows == 2 ? common : min(group.chunks, common);
  }
  return group;
}

// Writes the items of a warp's 32 rows, in turns over the lanes: `whole` is the lane's, in `items`
// items of `run` chunks, each of which has a slot of its own; or as it is, if run is 0.
__device__ void WriteItems(const PlanArgs& a, const AttentionItem& whole, int items, int run,
                           int64_t first_item) {
  const int lane = threadIdx.x % 32;
  int end = items;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFF, end, offset);
    if (lane >= offset) end += other;
  }
  const int total = __shfl_sync(0xFFFFFFFF, end, 31);
  for (int base = 0; base < total; base += 32) {
    const int index = base + lane;
    // The first lane whose items end behind this one.
    int owner = 0;
    for (int step = 16; step > 0; step /= 2) {
      if (__shfl_sync(0xFFFFFFFF, end, owner + step - 1) <= index) owner += step;
    }
    owner = min(owner, 31);
    const auto of_owner = [owner](int32_t x) { return __shfl_sync(0xFFFFFFFF, x, owner); };
    AttentionItem item;
    item.row = of_owner(whole.row);
    item.begin = of_owner(whole.begin);
    item.end = of_owner(whole.end);
    item.slot = of_owner(whole.slot);
    item.count = of_owner(whole.count);
    item.first = of_owner(whole.first);
    item.page_base = of_owner(whole.page_base);
    item.position = of_owner(whole.position);
    const int i = index - (of_owner(end) - of_owner(items));
    const int chunks = of_owner(run);
    const int64_t at = __shfl_sync(0xFFFFFFFF, first_item, owner) + i;
    if (index >= total) continue;
    if (chunks > 0) {
      const int32_t chunk = item.begin / kAttentionChunk + i * chunks;
      item.begin = max(item.begin, chunk * kAttentionChunk);
      item.end = min(item.end, (chunk + chunks) * kAttentionChunk);
      item.slot += i * chunks;
    }
    const int first_page = item.begin / kAttentionTile * kAttentionTilePages;
    for (int j = 0; j < 2 * kAttentionTilePages; ++j) {
      const int page = first_page + j;
      item.pages[j] = page * kKvPageTokens < item.end && page >= item.begin / kKvPageTokens
                          ? a.rows.pages[item.page_base + page]
                          : -1;
    }
    a.layout.items[at] = item;
  }
}

// The group's way, with the number of parts that it needs in `slots`.
__device__ AttentionSharing Decide(const PlanArgs& a, int row, const Group& group, int64_t all_work,
                                   int64_t* slots) {
  // More than a block's share of the work.
  const auto is_much = [&](int64_t tiles) {
    return a.split == AttentionSplit::kAlways ||
           (a.split == AttentionSplit::kByLoad &&
            100 * tiles * a.blocks > kSharePercent * all_work * a.kv_heads);
  };
  AttentionSharing way{row, group.rows, group.chunks, 0, 1, false};
  int32_t most_chunks = 0;
  for (int i = 0; i < group.rows; ++i) {
    const Reach reach = ReachOf(a, row + i);
    most_chunks = max(most_chunks, reach.Chunks());
    // A row's own tiles wait for the shared ones.
    way.is_split = way.is_split || (reach.Chunks() > 1 && is_much(reach.Tiles()));
  }
  if (way.is_split) way.stride = most_chunks;
  *slots = way.is_split || group.chunks > 0 ? int64_t{group.rows} * way.stride : 0;
  return way;
}

// Lets no kernel start before its end, so that later kernels may read the plan while kernels
// between them still run.
__global__ void __launch_bounds__(kThreads) PlanKernel(const PlanArgs a) {
  WaitForPrevious();
  const int rows = a.rows.rows;
  const AttentionLayout& layout = a.layout;
  const int32_t* const starts = layout.segment_starts;
  FindRuns(
      rows,
      [&a](int row) {
        return row == 0 || a.rows.sequences[row] != a.rows.sequences[row - 1] ||
               a.rows.positions[row] != a.rows.positions[row - 1] + 1;
      },
      layout.segment_starts);
  if (a.shared_rows > 1) {
    for (int row = threadIdx.x / 32; row < rows; row += kThreads / 32) {
      const int32_t chunks = CommonChunks(a, row);
      if (threadIdx.x % 32 == 0) layout.common_chunks[row] = chunks;
    }
    __syncthreads();
  }
  FindRuns(
      rows, [&a](int row) { return a.shared_rows == 1 || BeginsGroup(a, row); },
      layout.group_starts);

  int64_t work = 0;
  for (int row = threadIdx.x; row < rows; row += kThreads) {
    if (IsTiled(a, row)) continue;
    const Group group = GroupOf(a, row);
    work += ReachOf(a, row).Tiles();
    if (group.rows > 1) work -= (group.rows - 1) * group.Tiles();
  }
  int64_t all_work;
  BlockScan(work, &all_work);
  constexpr int kChunkTiles = kAttentionChunk / kAttentionTile;
  const int run = static_cast<int>(
      max(int64_t{1}, all_work * a.kv_heads / (kItemsOfBlock * kChunkTiles * a.blocks)));
  const auto runs_of = [run](int chunks) { return (chunks + run - 1) / run; };

  int64_t slots_before = 0, items_before = 0, joins_before = 0, tiles_before = 0;
  for (int base = 0; base < rows; base += kThreads) {
    const int row = base + static_cast<int>(threadIdx.x);
    Group group{0, 0};
    if (row < rows && !IsTiled(a, row)) group = GroupOf(a, row);
    int64_t slots = 0, sum;
    AttentionSharing way{row, 0, 0, 0, 1, false};
    if (group.rows > 0) way = Decide(a, row, group, all_work, &slots);
    const int64_t slot = slots_before + BlockScan(slots, &sum);
    slots_before += sum;
    if (slot + slots > layout.slots) {
      way.chunks = 0;
      way.is_split = false;
    }
    way.slot = static_cast<int32_t>(slot);
    for (int i = 0; i < group.rows; ++i) layout.sharing[row + i] = way;
    const int items = way.chunks == 0 ? 0 : way.is_split ? runs_of(way.chunks) : 1;
    const int64_t first_item = items_before + BlockScan(items, &sum);
    items_before += sum;
    WriteItems(a,
               {row,
                0,
                way.chunks * kAttentionChunk,
                way.slot,
                way.rows,
                way.stride,
                items > 0 ? a.rows.page_begin[a.rows.sequences[row]] : 0,
                INT32_MAX,
                {}},
               items, way.is_split ? run : 0, first_item);
  }
  __syncthreads();

  for (int base = 0; base < rows; base += kThreads) {
    const int row = base + static_cast<int>(threadIdx.x);
    const bool is_row = row < rows;
    const bool is_tiled = is_row && IsTiled(a, row);
    const int32_t position = is_row ? a.rows.positions[row] : 0;
    const int32_t page_base = is_row ? a.rows.page_begin[a.rows.sequences[row]] : 0;
    Reach reach{0, 1};
    AttentionSharing way{row, 1, 0, 0, 1, false};
    if (is_row) reach = ReachOf(a, row);
    if (is_row && !is_tiled) way = layout.sharing[row];
    const int32_t part = way.slot + (row - way.leader) * way.stride;  // the row's first
    const bool is_split = way.is_split;
    const int items = !is_row || is_tiled ? 0 : is_split ? runs_of(reach.Chunks() - way.chunks) : 1;
    int64_t sum;
    const int64_t first_item = items_before + BlockScan(items, &sum);
    items_before += sum;
    WriteItems(a,
               {row,
                max(reach.begin, way.chunks * kAttentionChunk),
                reach.end,
                is_split ? part + way.chunks : -1,
                1,
                is_split || way.chunks == 0 ? -1 : part,
                page_base,
                position,
                {}},
               items, is_split ? run : 0, first_item);
    const int64_t join = joins_before + BlockScan(is_split, &sum);
    joins_before += sum;
    if (is_split) {
      layout.items[layout.items_room - 1 - join] = {row, 0, 0, -1, reach.Chunks(), part, 0, 0, {}};
    }

    const bool is_tile = is_tiled && (row - starts[row]) % a.tile_tokens == 0;
    const int64_t tile = tiles_before + BlockScan(is_tile, &sum);
    tiles_before += sum;
    if (is_tile) {
      int tokens = 1;
      while (tokens < a.tile_tokens && row + tokens < rows && starts[row + tokens] == starts[row]) {
        ++tokens;
      }
      layout.tiles[tile] = {row, tokens, position, page_base};
    }
  }
  if (threadIdx.x == 0) {
    const int64_t joins = joins_before * a.kv_heads;
    *layout.header = {static_cast<int32_t>(items_before),
                      static_cast<int32_t>(joins_before),
                      static_cast<int32_t>(tiles_before),
                      static_cast<int32_t>(kJoinShare * joins <= a.blocks ? joins : 0),
                      0,
                      0};
  }
  __threadfence();
}

}  // namespace

cudaError_t PlanAttention(const AttentionPlanParams& params, cudaStream_t stream) {
  const AttentionShape& shape = params.shape;
  if (params.rows.rows <= 0 || shape.kv_heads <= 0 || shape.heads <= 0 ||
      shape.heads % shape.kv_heads != 0) {
    return cudaErrorInvalidValue;
  }
  if (!IsFastAttention(shape)) return cudaSuccess;
  PlanArgs args;
  args.rows = params.rows;
  if (!LayOutAttention(shape, params.rows.rows, params.workspace, &args.layout)) {
    return cudaErrorInvalidValue;
  }
  args.kv_heads = shape.kv_heads;
  args.window = params.window;
  DORAD_CUDA_RETURN_IF_ERROR(
      AttentionBlocks(shape, params.isa, params.shares, params.is_fp8, &args.blocks));
  const bool tiles = params.row_tiles && HasTileAttention(shape.head_dim);
  args.tile_tokens = tiles ? AttentionTileTokens(shape) : 0;
  args.least_tokens = AttentionLeastTokens(shape);
  args.shared_rows = params.shares ? AttentionSharedRows(shape) : 1;
  args.split = params.split;
  return LaunchEarly(PlanKernel, 1, kThreads, 0, stream, args);
}

}  // namespace dorad::kernels
