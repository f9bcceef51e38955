// One parallel region for a group of projections: first the shrink tasks (h = s·A x), then tasks of
// one block of weight rows each. A block's rows are read from memory once and meet all tiles of
// input rows, whatever their adapters; a tile's sums run over d_in of the base weight and go on
// over the rank of each row's own B.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "server/backends/cpu/ops/thread_team.h"
#include "server/backends/cpu/simd/backend.h"
#include "server/backends/cpu/simd/kernels.h"
#include "server/backends/cpu/simd/pause.h"
#include "server/backends/cpu/simd/scratch.h"

namespace dorad::ops::cpu {
namespace {

constexpr int kFormats = 3;
constexpr int64_t kMaxShrinkBlock = 64;
// Tasks: about this many bytes of weights when a step has few rows (it is bound by memory then),
// and this many weight rows times input rows when it has many.
constexpr int64_t kTaskBytes = 36 << 10;
constexpr int64_t kTaskColumns = 64;
constexpr int64_t kTaskRows = 192;
// From this many elements on packing x is worth a parallel region of its own.
constexpr int64_t kParallelPack = 32 << 10;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Input rows [begin, begin + rows).
struct TileRange {
  int64_t begin;
  int rows;
};

std::vector<TileRange> MakeTiles(int64_t rows, int max_rows) {
  std::vector<TileRange> tiles;
  const int64_t count = CeilDiv(rows, max_rows);
  tiles.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = rows * i / count;
    tiles.push_back({begin, static_cast<int>(rows * (i + 1) / count - begin)});
  }
  return tiles;
}

// A [rows, k] matrix of inputs, packed tile by tile for one format.
struct Packed {
  const char* data = nullptr;
  int64_t chunks = 0;
  int64_t chunk_bytes = 0;

  const char* tile(const TileRange& t) const { return data + t.begin * chunks * chunk_bytes; }
  int64_t step(const TileRange& t) const { return t.rows * chunk_bytes; }
};

class Group {
 public:
  Group(const at::Tensor& x, absl::Span<const Projection> projections, ComputeDType compute)
      : kernels_(ActiveKernels()),
        compute_(compute),
        x_(x.const_data_ptr<float>()),
        rows_(x.size(0)),
        in_(x.size(1)),
        chunk_(2 * kernels_.lanes),
        tiles_(MakeTiles(rows_, kernels_.tile_rows)) {
    linears_.reserve(projections.size());
    for (const Projection& p : projections) AddLinear(p);
  }

  void Run() {
    LayOut();
    PackInputs();
    MakeShrinkTasks();
    MakeTasks();
    pending_shrinks_.store(static_cast<int64_t>(shrinks_.size()), std::memory_order_relaxed);
    const int64_t shrinks = static_cast<int64_t>(shrinks_.size());
    Team().Run(shrinks + static_cast<int64_t>(tasks_.size()), [&](int64_t i) {
      if (i < shrinks) {
        Shrink(shrinks_[i]);
        pending_shrinks_.fetch_sub(1, std::memory_order_release);
      } else {
        Multiply(tasks_[i - shrinks]);
      }
    });
  }

 private:
  struct Segment {
    const AdapterFactors* factors;
    WeightRows a, b;
    const float* g;
    int64_t begin, end;
  };

  struct Linear {
    WeightRows weight;
    int64_t out;
    const float* bias;
    float* y;
    std::vector<Segment> segments;
    std::vector<int32_t> segment_of_row;
    bool extended = false;
    int64_t h_step = 0;  // bytes
    int64_t h_offset = 0;
    char* h = nullptr;
  };

  // Ranks [begin, end) of one segment, tiles [tile_begin, tile_end).
  struct ShrinkTask {
    int linear;
    int segment;
    int64_t begin, end;
    int64_t tile_begin, tile_end;
  };
  // Weight rows [begin, end) times tiles [tile_begin, tile_end).
  struct Task {
    int linear;
    int64_t begin, end;
    int64_t tile_begin, tile_end;
  };

  bool rounds() const { return compute_ == ComputeDType::kBF16; }
  int64_t ChunkBytes(Format f) const { return f == Format::kBf16Dot ? chunk_ * 2 : chunk_ * 4; }

  WeightRows Rows(const at::Tensor& weight) const {
    Format format = Format::kF32;
    if (weight.scalar_type() == at::kBFloat16) {
      format = rounds() && kernels_.bf16_dot ? Format::kBf16Dot : Format::kBf16;
    }
    return {weight.const_data_ptr(), weight.size(1), format};
  }

  void AddLinear(const Projection& p) {
    Linear linear;
    linear.weight = Rows(p.base->weight_OI);
    linear.out = p.base->weight_OI.size(0);
    linear.bias = p.base->bias_O.defined() ? p.base->bias_O.const_data_ptr<float>() : nullptr;
    linear.y = p.y_TO.mutable_data_ptr<float>();
    linear.segment_of_row.reserve(rows_);
    Use(linear.weight.format);
    for (const RowSegment& s : p.segments) {
      if (s.begin == s.end) continue;
      Segment segment{s.factors, {}, {}, nullptr, s.begin, s.end};
      if (s.factors != nullptr) {
        segment.a = Rows(s.factors->a_RI);
        segment.b = Rows(s.factors->b_OR);
        if (s.factors->g_O.defined()) segment.g = s.factors->g_O.const_data_ptr<float>();
        Use(segment.a.format);
        const Format f = segment.b.format;
        linear.h_step = std::max(linear.h_step, CeilDiv(segment.b.k, chunk_) * ChunkBytes(f));
        linear.extended = true;
      }
      linear.segment_of_row.insert(linear.segment_of_row.end(), s.end - s.begin,
                                   static_cast<int32_t>(linear.segments.size()));
      linear.segments.push_back(segment);
    }
    linears_.push_back(std::move(linear));
  }

  void Use(Format f) { used_[static_cast<int>(f)] = true; }
  const Packed& packed(Format f) const { return packed_[static_cast<int>(f)]; }

  // Places the packed inputs and every projection's h in this thread's scratch memory.
  void LayOut() {
    static thread_local Scratch scratch;
    int64_t bytes = 0;
    int64_t offsets[kFormats] = {};
    for (int f = 0; f < kFormats; ++f) {
      if (!used_[f]) continue;
      packed_[f].chunks = CeilDiv(in_, chunk_);
      packed_[f].chunk_bytes = ChunkBytes(static_cast<Format>(f));
      offsets[f] = bytes;
      bytes += rows_ * packed_[f].chunks * packed_[f].chunk_bytes;
    }
    for (Linear& l : linears_) {
      l.h_offset = bytes;
      bytes += rows_ * l.h_step;
    }
    char* data = scratch.Get(static_cast<size_t>(bytes));
    for (int f = 0; f < kFormats; ++f) packed_[f].data = data + offsets[f];
    for (Linear& l : linears_) l.h = data + l.h_offset;
  }

  void PackInputs() {
    auto pack_tile = [&](int64_t i) {
      const TileRange& tile = tiles_[i];
      for (int f = 0; f < kFormats; ++f) {
        if (!used_[f]) continue;
        const Packed& p = packed_[f];
        for (int m = 0; m < tile.rows; ++m) {
          kernels_.pack(x_ + (tile.begin + m) * in_, in_, 1.0f, rounds(), static_cast<Format>(f),
                        const_cast<char*>(p.tile(tile)) + m * p.chunk_bytes, p.step(tile));
        }
      }
    };
    const int64_t tiles = static_cast<int64_t>(tiles_.size());
    if (rows_ * in_ >= kParallelPack) {
      Team().Run(tiles, pack_tile);
    } else {
      for (int64_t i = 0; i < tiles; ++i) pack_tile(i);
    }
  }

  // Tiles that hold rows of [begin, end).
  std::pair<int64_t, int64_t> TilesOf(int64_t begin, int64_t end) const {
    const auto first = std::partition_point(tiles_.begin(), tiles_.end(), [&](const TileRange& t) {
      return t.begin + t.rows <= begin;
    });
    const auto last = std::partition_point(first, tiles_.end(),
                                           [&](const TileRange& t) { return t.begin < end; });
    return {first - tiles_.begin(), last - tiles_.begin()};
  }

  void MakeShrinkTasks() {
    const int64_t tiles_at_once = kTaskRows / kernels_.tile_rows;
    for (int i = 0; i < static_cast<int>(linears_.size()); ++i) {
      const Linear& l = linears_[i];
      for (int j = 0; j < static_cast<int>(l.segments.size()); ++j) {
        const Segment& s = l.segments[j];
        if (s.factors == nullptr) continue;
        // Packed formats permute within a chunk, so their blocks are whole chunks.
        int64_t block = s.b.format == Format::kF32 ? 8 : chunk_;
        if (s.end - s.begin > 2 * kernels_.tile_rows) block = kMaxShrinkBlock;
        const auto [first, last] = TilesOf(s.begin, s.end);
        for (int64_t r = 0; r < s.b.k; r += block) {
          for (int64_t t = first; t < last; t += tiles_at_once) {
            shrinks_.push_back(
                {i, j, r, std::min(r + block, s.b.k), t, std::min(t + tiles_at_once, last)});
          }
        }
      }
    }
  }

  void MakeTasks() {
    const int64_t tiles = static_cast<int64_t>(tiles_.size());
    const bool many = rows_ >= kTaskRows / 2;
    const int64_t tiles_at_once = many ? kTaskRows / kernels_.tile_rows : tiles;
    for (int i = 0; i < static_cast<int>(linears_.size()); ++i) {
      const Linear& l = linears_[i];
      const int64_t row_bytes = in_ * (l.weight.format == Format::kF32 ? 4 : 2);
      const int64_t columns =
          many ? kTaskColumns : std::max<int64_t>(8, kTaskBytes / row_bytes / 8 * 8);
      for (int64_t n = 0; n < l.out; n += columns) {
        for (int64_t t = 0; t < tiles; t += tiles_at_once) {
          tasks_.push_back(
              {i, n, std::min(n + columns, l.out), t, std::min(t + tiles_at_once, tiles)});
        }
      }
    }
  }

  void Shrink(const ShrinkTask& task) const {
    const Linear& l = linears_[task.linear];
    const Segment& s = l.segments[task.segment];
    const Packed& x = packed(s.a.format);
    const int64_t count = task.end - task.begin;
    alignas(64) float sums[kMaxTileRows * kMaxShrinkBlock];
    for (int64_t t = task.tile_begin; t < task.tile_end; ++t) {
      const TileRange& range = tiles_[t];
      const int64_t begin = std::max(range.begin, s.begin);
      const int64_t end = std::min(range.begin + range.rows, s.end);
      GemmTile tile;
      tile.rows = static_cast<int>(end - begin);
      tile.x = x.tile(range) + (begin - range.begin) * x.chunk_bytes;
      tile.x_step = x.step(range);
      tile.y = sums;
      tile.y_step = kMaxShrinkBlock;
      kernels_.gemm(s.a, task.begin, task.end, nullptr, tile);
      for (int64_t row = begin; row < end; ++row) {
        PackH(sums + (row - begin) * kMaxShrinkBlock, count, task.begin, s, l.h + row * l.h_step);
      }
    }
  }

  // h[begin, begin + count) of one row, scaled and rounded, into its place.
  void PackH(const float* sums, int64_t count, int64_t begin, const Segment& s, char* h) const {
    const float scale = s.factors->scale;
    if (s.b.format != Format::kF32) {
      const int64_t bytes = ChunkBytes(s.b.format);
      kernels_.pack(sums, count, scale, rounds(), s.b.format, h + begin / chunk_ * bytes, bytes);
      return;
    }
    // A block may share a chunk with another task's block.
    alignas(64) float packed[2 * kMaxShrinkBlock];
    kernels_.pack(sums, count, scale, rounds(), Format::kF32, reinterpret_cast<char*>(packed),
                  ChunkBytes(Format::kF32));
    const bool last = begin + count == s.b.k;
    const int64_t filled = last ? CeilDiv(s.b.k, chunk_) * chunk_ - begin : count;
    std::memcpy(h + begin * 4, packed, static_cast<size_t>(filled) * 4);
  }

  void AwaitShrinks() const {
    // They were taken before any other task, so their workers are running.
    for (uint32_t i = 1; pending_shrinks_.load(std::memory_order_acquire) != 0; ++i) {
      if (i % 1024 == 0) {
        std::this_thread::yield();
      } else {
        Pause();
      }
    }
  }

  void Multiply(const Task& task) const {
    const Linear& l = linears_[task.linear];
    if (l.extended) AwaitShrinks();
    const Packed& x = packed(l.weight.format);
    for (int64_t t = task.tile_begin; t < task.tile_end; ++t) {
      const TileRange& range = tiles_[t];
      GemmTile tile;
      tile.rows = range.rows;
      tile.x = x.tile(range);
      tile.x_step = x.step(range);
      tile.y = l.y + range.begin * l.out + task.begin;
      tile.y_step = l.out;
      if (l.extended) Extend(l, range, &tile);
      kernels_.gemm(l.weight, task.begin, task.end, l.bias, tile);
    }
  }

  static void Extend(const Linear& l, const TileRange& range, GemmTile* tile) {
    const int32_t* segments = l.segment_of_row.data() + range.begin;
    tile->h = l.h + range.begin * l.h_step;
    tile->h_step = l.h_step;
    for (int m = 0; m < range.rows; ++m) {
      const Segment& s = l.segments[segments[m]];
      tile->b[m] = s.b;
      tile->g[m] = s.g;
      tile->extended |= s.factors != nullptr;
    }
    tile->shared = tile->extended && segments[0] == segments[range.rows - 1];
  }

  const Kernels& kernels_;
  const ComputeDType compute_;
  const float* const x_;
  const int64_t rows_;
  const int64_t in_;
  const int64_t chunk_;
  const std::vector<TileRange> tiles_;
  std::vector<Linear> linears_;
  bool used_[kFormats] = {};
  Packed packed_[kFormats];
  std::vector<ShrinkTask> shrinks_;
  std::vector<Task> tasks_;
  std::atomic<int64_t> pending_shrinks_{0};
};

}  // namespace

void DoraLinear(const at::Tensor& x_TI, absl::Span<const Projection> projections,
                ComputeDType compute) {
  if (x_TI.size(0) == 0) return;
  Group(x_TI, projections, compute).Run();
}

}  // namespace dorad::ops::cpu
