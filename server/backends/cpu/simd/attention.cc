// Splits attention into tasks. A unit is up to `queries` query vectors (rows x heads of one kv
// head) of one sequence; its positions are cut into partitions at multiples of kPartition.
// Partitions have a softmax of their own and are always merged in ascending order, so that the
// result is the same whether one task or several tasks compute them.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "server/backends/cpu/ops/thread_team.h"
#include "server/backends/cpu/simd/backend.h"
#include "server/backends/cpu/simd/kernels.h"
#include "server/backends/cpu/simd/scratch.h"

namespace dorad::ops::cpu {
namespace {

constexpr int64_t kPartition = 512;
static_assert(kPartition % kAttentionBlock == 0);
// Fewer elements of keys than this are not worth waking other threads.
constexpr int64_t kSerialWork = 8 << 10;

struct Unit {
  const SequenceRows* sequence;
  int64_t kv_head;
  int64_t begin, end;  // of the sequence's rows x group, row-major
  int64_t first_partition, partitions;
};

// Room for the states of one unit over one partition.
struct States {
  AttentionState state[kMaxQueries];

  void Place(float* memory, int64_t head_dim) {
    for (int i = 0; i < kMaxQueries; ++i) state[i].out = memory + i * head_dim;
  }
};

class Attention {
 public:
  Attention(const at::Tensor& q, const PagedKv& kv, absl::Span<const SequenceRows> sequences,
            float scale, int64_t window, at::Tensor& out)
      : kernels_(ActiveKernels()),
        q_(q.const_data_ptr<float>()),
        out_(out.mutable_data_ptr<float>()),
        kv_(kv),
        heads_(q.size(1)),
        kv_heads_(kv.k.size(1)),
        dim_(q.size(2)),
        group_(heads_ / kv_heads_),
        scale_(scale),
        window_(window) {
    for (const SequenceRows& s : sequences) AddUnits(s);
  }

  void Run() {
    const int64_t units = static_cast<int64_t>(units_.size());
    const int threads = Team().threads();
    if (work_ < kSerialWork || threads == 1) {
      for (int64_t i = 0; i < units; ++i) RunWhole(units_[i]);
    } else if (units >= 4 * threads || longest_ == 1) {
      Team().Run(units, [&](int64_t i) { RunWhole(units_[i]); });
    } else {
      RunSplit();
    }
  }

 private:
  int64_t Low(int64_t position) const {
    return window_ > 0 ? std::max<int64_t>(0, position - window_ + 1) : 0;
  }
  static int64_t High(const SequenceRows& s, int64_t row) {
    return s.reach.empty() ? s.position + row : s.reach[static_cast<size_t>(row)];
  }

  void AddUnits(const SequenceRows& s) {
    const int64_t vectors = s.count * group_;
    // Units of whole rows where possible: rows of one unit see different positions.
    const int64_t rows = std::max<int64_t>(1, kernels_.queries / group_);
    const int64_t step = group_ <= kernels_.queries ? rows * group_ : kernels_.queries;
    for (int64_t h = 0; h < kv_heads_; ++h) {
      for (int64_t begin = 0; begin < vectors; begin += step) {
        const int64_t end = std::min(begin + step, vectors);
        const int64_t low = Low(s.position + begin / group_);
        const int64_t high = High(s, (end - 1) / group_);
        const int64_t first = low / kPartition;
        const int64_t partitions = high / kPartition - first + 1;
        units_.push_back({&s, h, begin, end, first, partitions});
        longest_ = std::max(longest_, partitions);
        work_ += (high - low + 1) * dim_;
      }
    }
  }

  AttentionQueries Queries(const Unit& u) const {
    AttentionQueries queries;
    queries.count = static_cast<int>(u.end - u.begin);
    queries.head_dim = dim_;
    queries.scale = scale_;
    for (int i = 0; i < queries.count; ++i) {
      const int64_t row = (u.begin + i) / group_;
      queries.q[i] = q_ + Offset(u, i);
      queries.low[i] = Low(u.sequence->position + row);
      queries.high[i] = High(*u.sequence, row);
    }
    return queries;
  }

  // Of the unit's i-th query vector in q and out.
  int64_t Offset(const Unit& u, int i) const {
    const int64_t row = u.sequence->row_begin + (u.begin + i) / group_;
    return (row * heads_ + u.kv_head * group_ + (u.begin + i) % group_) * dim_;
  }

  AttentionPages Pages(const Unit& u) const {
    AttentionPages pages;
    const int64_t head = u.kv_head * dim_ * kPageSize;
    pages.bf16 = kv_.k.scalar_type() == at::kBFloat16;
    const int64_t offset = head * (pages.bf16 ? 2 : 4);
    pages.k = static_cast<const char*>(kv_.k.const_data_ptr()) + offset;
    pages.v = static_cast<const char*>(kv_.v.const_data_ptr()) + offset;
    pages.page_stride = kv_heads_ * dim_ * kPageSize;
    pages.pages = u.sequence->pages.data();
    return pages;
  }

  void RunPartition(const Unit& u, int64_t partition, States* states) const {
    const int64_t begin = (u.first_partition + partition) * kPartition;
    kernels_.attend(Queries(u), Pages(u), begin, begin + kPartition, states->state);
  }

  void Finish(const Unit& u, const States& states) const {
    for (int i = 0; i < u.end - u.begin; ++i) {
      const AttentionState& s = states.state[i];
      kernels_.scale(s.out, dim_, 1.0f / s.sum, out_ + Offset(u, i));
    }
  }

  void RunWhole(const Unit& u) const {
    static thread_local Scratch scratch;
    float* memory = reinterpret_cast<float*>(
        scratch.Get(static_cast<size_t>(2 * kMaxQueries * dim_) * sizeof(float)));
    States total, part;
    total.Place(memory, dim_);
    part.Place(memory + kMaxQueries * dim_, dim_);
    RunPartition(u, 0, &total);
    for (int64_t p = 1; p < u.partitions; ++p) {
      RunPartition(u, p, &part);
      for (int i = 0; i < u.end - u.begin; ++i) {
        kernels_.merge(&total.state[i], part.state[i], dim_);
      }
    }
    Finish(u, total);
  }

  // Few units with long contexts: every partition is a task; a unit's last one merges.
  void RunSplit() {
    struct Piece {
      int64_t unit;
      int64_t partition;
      int64_t first_piece;  // of its unit
    };
    std::vector<Piece> pieces;
    for (int64_t i = 0; i < static_cast<int64_t>(units_.size()); ++i) {
      const int64_t first = static_cast<int64_t>(pieces.size());
      for (int64_t p = 0; p < units_[i].partitions; ++p) pieces.push_back({i, p, first});
    }
    static thread_local Scratch scratch;
    float* memory = reinterpret_cast<float*>(
        scratch.Get(pieces.size() * static_cast<size_t>(kMaxQueries * dim_) * sizeof(float)));
    std::vector<States> states(pieces.size());
    for (size_t i = 0; i < pieces.size(); ++i) {
      states[i].Place(memory + static_cast<int64_t>(i) * kMaxQueries * dim_, dim_);
    }
    std::vector<std::atomic<int64_t>> finished(units_.size());
    Team().Run(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
      const Piece& piece = pieces[i];
      const Unit& u = units_[piece.unit];
      RunPartition(u, piece.partition, &states[i]);
      if (finished[piece.unit].fetch_add(1, std::memory_order_acq_rel) + 1 != u.partitions) return;
      States& total = states[piece.first_piece];
      for (int64_t p = 1; p < u.partitions; ++p) {
        for (int j = 0; j < u.end - u.begin; ++j) {
          kernels_.merge(&total.state[j], states[piece.first_piece + p].state[j], dim_);
        }
      }
      Finish(u, total);
    });
  }

  const Kernels& kernels_;
  const float* const q_;
  float* const out_;
  const PagedKv& kv_;
  const int64_t heads_;
  const int64_t kv_heads_;
  const int64_t dim_;
  const int64_t group_;
  const float scale_;
  const int64_t window_;
  std::vector<Unit> units_;
  int64_t longest_ = 0;  // partitions of a unit
  int64_t work_ = 0;     // elements of keys
};

}  // namespace

void PagedAttention(const at::Tensor& q_THD, const PagedKv& kv,
                    absl::Span<const SequenceRows> sequences, float softmax_scale, int64_t window,
                    at::Tensor& out_THD) {
  Attention(q_THD, kv, sequences, softmax_scale, window, out_THD).Run();
}

}  // namespace dorad::ops::cpu
