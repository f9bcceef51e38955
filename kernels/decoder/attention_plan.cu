#include "kernels/common/status.h"
#include "kernels/decoder/attention.h"
#include "kernels/decoder/attention_layout.h"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 1024;

// A row is one item up to this percentage of a block's share of the work. Parts have a cost: with
// many rows, uneven blocks cost less.
constexpr int64_t kSharePercent = 200;

struct PlanArgs {
  StepRows rows;
  AttentionLayout layout;
  int32_t kv_heads;
  int32_t window;
  int32_t blocks;       // of the row kernel
  int32_t tile_tokens;  // 0: no tiles
  int32_t least_tokens;
  AttentionSplit split;
};

// Exclusive prefix sum over the block; *total is the sum. All threads.
__device__ int64_t BlockScan(int64_t value, int64_t* total) {
  __shared__ int64_t sums[32];
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
  __shared__ int32_t most[32];
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

// Writes the items of a warp's 32 rows, in turns over the lanes: `whole` is the lane's row, in
// whole.slots items.
__device__ void WriteItems(const PlanArgs& a, const AttentionItem& whole, int64_t first_item) {
  const int lane = threadIdx.x % 32;
  int end = whole.slots;
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
    item.slots = of_owner(whole.slots);
    item.first = of_owner(whole.first);
    item.page_base = of_owner(whole.page_base);
    item.position = of_owner(whole.position);
    const int i = index - (of_owner(end) - item.slots);
    const int64_t at = __shfl_sync(0xFFFFFFFF, first_item, owner) + i;
    if (index >= total) continue;
    if (item.slot >= 0) {
      const int32_t chunk = item.begin / kAttentionChunk + i;
      item.begin = max(item.begin, chunk * kAttentionChunk);
      item.end = min(item.end, (chunk + 1) * kAttentionChunk);
      item.slot += i;
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

// Lets no kernel start before its end, so that later kernels may read the plan while kernels
// between them still run.
__global__ void __launch_bounds__(kThreads) PlanKernel(const PlanArgs a) {
  WaitForPrevious();
  const int rows = a.rows.rows;
  const int32_t* const starts = a.layout.segment_starts;
  int32_t carry = -1;
  for (int base = 0; base < rows; base += kThreads) {
    const int row = base + static_cast<int>(threadIdx.x);
    int32_t start = -1;
    if (row < rows && (row == 0 || a.rows.sequences[row] != a.rows.sequences[row - 1] ||
                       a.rows.positions[row] != a.rows.positions[row - 1] + 1)) {
      start = row;
    }
    start = BlockMaxScan(start, &carry);
    if (row < rows) a.layout.segment_starts[row] = start;
  }
  __syncthreads();

  int64_t work = 0;
  for (int row = threadIdx.x; row < rows; row += kThreads) {
    if (!IsTiled(a, row)) work += ReachOf(a, row).Tiles();
  }
  int64_t all_work;
  BlockScan(work, &all_work);

  int64_t slots_before = 0, items_before = 0, joins_before = 0, tiles_before = 0;
  for (int base = 0; base < rows; base += kThreads) {
    const int row = base + static_cast<int>(threadIdx.x);
    const bool is_row = row < rows;
    const bool is_tiled = is_row && IsTiled(a, row);
    Reach reach{0, 1};
    if (is_row) reach = ReachOf(a, row);
    const int32_t chunks = reach.Chunks();
    const int64_t tiles = is_row && !is_tiled ? reach.Tiles() : 0;
    int64_t sum;

    bool is_split = tiles > 0 && chunks > 1 && a.split != AttentionSplit::kNever;
    if (a.split == AttentionSplit::kByLoad) {
      is_split = is_split && 100 * tiles * a.blocks > kSharePercent * all_work * a.kv_heads;
    }
    const int64_t first_slot = slots_before + BlockScan(is_split ? chunks : 0, &sum);
    slots_before += sum;
    is_split = is_split && first_slot + chunks <= a.layout.slots;

    const int64_t items = tiles == 0 ? 0 : is_split ? chunks : 1;
    const int64_t first_item = items_before + BlockScan(items, &sum);
    items_before += sum;
    const int32_t position = is_row ? a.rows.positions[row] : 0;
    const int32_t page_base = is_row ? a.rows.page_begin[a.rows.sequences[row]] : 0;
    WriteItems(a,
               {row,
                reach.begin,
                reach.end,
                is_split ? static_cast<int32_t>(first_slot) : -1,
                static_cast<int32_t>(items),
                static_cast<int32_t>(first_slot),
                page_base,
                position,
                {}},
               first_item);
    const int64_t join = joins_before + BlockScan(is_split, &sum);
    joins_before += sum;
    if (is_split) {
      AttentionItem item{row, 0, 0, -1, chunks, static_cast<int32_t>(first_slot), 0, 0, {}};
      a.layout.items[a.layout.items_room - 1 - join] = item;
    }

    const bool is_tile = is_tiled && (row - starts[row]) % a.tile_tokens == 0;
    const int64_t tile = tiles_before + BlockScan(is_tile, &sum);
    tiles_before += sum;
    if (is_tile) {
      int tokens = 1;
      while (tokens < a.tile_tokens && row + tokens < rows && starts[row + tokens] == starts[row]) {
        ++tokens;
      }
      a.layout.tiles[tile] = {row, tokens, position, page_base};
    }
  }
  if (threadIdx.x == 0) {
    *a.layout.header = {static_cast<int32_t>(items_before), static_cast<int32_t>(joins_before),
                        static_cast<int32_t>(tiles_before), 0, 0};
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
  DORAD_CUDA_RETURN_IF_ERROR(AttentionBlocks(shape, params.isa, &args.blocks));
  const bool tiles = params.row_tiles && HasTileAttention(shape);
  args.tile_tokens = tiles ? AttentionTileTokens(shape) : 0;
  args.least_tokens = AttentionLeastTokens(shape);
  args.split = params.split;
  return LaunchEarly(PlanKernel, 1, kThreads, 0, stream, args);
}

}  // namespace dorad::kernels
