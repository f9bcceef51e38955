#include <algorithm>

#include "kernels/decoder/attention_layout.h"

namespace dorad::kernels {
namespace {

// Enough for a few very long rows to fill the GPU many times over.
constexpr int64_t kLeastSlots = 2048;
constexpr int64_t kMostPartBytes = 96 << 20;

int64_t Aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

int64_t ListBytes(int64_t rows, int64_t slots) {
  return Aligned(sizeof(AttentionHeader)) + 3 * Aligned(rows * 4) +
         Aligned(rows * sizeof(AttentionSharing)) +
         Aligned((3 * rows + slots) * sizeof(AttentionItem)) +
         Aligned(rows * sizeof(AttentionRowTile));
}

int64_t PartBytes(const AttentionShape& shape) {
  return int64_t{shape.kv_heads} * AttentionPartFloats(shape) * 4;
}

// For rows of so many chunks. A row in parts is more than two blocks' share of the work
// (attention_plan.cu): of rows that have no pages in common at most blocks / (2 × kv_heads) are.
int64_t MostSlots(const AttentionShape& shape, int64_t chunks) {
  constexpr int64_t kHeads = 128;  // half of an H200's blocks
  const int64_t most = std::max(kLeastSlots, kMostPartBytes / PartBytes(shape));
  return std::clamp(kHeads / shape.kv_heads * chunks, kLeastSlots, most);
}

}  // namespace

bool LayOutAttention(const AttentionShape& shape, int32_t rows, const AttentionWorkspace& workspace,
                     AttentionLayout* layout) {
  const int64_t max_rows = workspace.max_rows;
  const int64_t rest = static_cast<int64_t>(workspace.bytes) - ListBytes(max_rows, 0);
  if (workspace.data == nullptr || rows > max_rows || rest < 0) return false;
  // Alignment may cost one more piece than a list without slots.
  const int64_t slot_bytes = PartBytes(shape) + static_cast<int64_t>(sizeof(AttentionItem));
  const int64_t slots = std::max<int64_t>((rest - 256) / slot_bytes, 0);
  char* at = static_cast<char*>(workspace.data);
  const auto take = [&at](int64_t size) {
    char* const piece = at;
    at += Aligned(size);
    return piece;
  };
  layout->header = reinterpret_cast<AttentionHeader*>(take(sizeof(AttentionHeader)));
  layout->segment_starts = reinterpret_cast<int32_t*>(take(max_rows * 4));
  layout->common_chunks = reinterpret_cast<int32_t*>(take(max_rows * 4));
  layout->group_starts = reinterpret_cast<int32_t*>(take(max_rows * 4));
  layout->sharing = reinterpret_cast<AttentionSharing*>(take(max_rows * sizeof(AttentionSharing)));
  layout->items_room = static_cast<int32_t>(3 * max_rows + slots);
  layout->items =
      reinterpret_cast<AttentionItem*>(take(layout->items_room * sizeof(AttentionItem)));
  layout->tiles = reinterpret_cast<AttentionRowTile*>(take(max_rows * sizeof(AttentionRowTile)));
  layout->parts = reinterpret_cast<float*>(at);
  layout->slots = static_cast<int32_t>(slots);
  layout->part_floats = AttentionPartFloats(shape);
  return true;
}

size_t AttentionWorkspaceBytes(const AttentionShape& shape, int32_t max_rows,
                               int32_t max_positions) {
  if (!IsFastAttention(shape)) return 0;
  const int64_t chunks = (int64_t{max_positions} + kAttentionChunk - 1) / kAttentionChunk;
  const int64_t slots = std::min<int64_t>(max_rows * chunks, MostSlots(shape, chunks));
  return ListBytes(max_rows, slots) + Aligned(slots * PartBytes(shape)) + 1024;
}

}  // namespace dorad::kernels
