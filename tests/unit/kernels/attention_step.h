// A step of attention on the device, with the whole cache of each sequence, and its reference in
// fp64.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/decoder/attention.h"
#include "tests/unit/kernels/device.h"
#include "tests/unit/kernels/fp8_cache.h"

namespace dorad::kernels {

using Bf16 = __nv_bfloat16;
using Bits = std::vector<uint16_t>;

// Rows [first, first + rows) of one sequence, by position.
struct Run {
  int first = 0;
  int rows = 1;
  // Parts [begin, end) of it whose rows see each other.
  struct Block {
    int begin, end;
  };
  std::vector<Block> blocks = {};
  int common = 0;  // positions, of whole pages, that lie in the pages of the run before

  int LastSeenBy(int position) const {
    for (const Block& block : blocks) {
      if (block.begin <= position && position < block.end) return block.end - 1;
    }
    return position;
  }
};

struct Case {
  std::string name;
  AttentionShape shape;
  int window = 0;
  std::vector<Run> runs;
  KernelIsa isa = KernelIsa::kSm90;
  bool is_fp8 = false;  // the cache
};

inline void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// A step on the device, with every sequence's whole cache.
class Step {
 public:
  Step(const Case& c, uint32_t seed) : case_(c) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    int pages = 3;
    std::vector<int32_t> lengths;
    for (const Run& run : c.runs) {
      lengths.push_back(run.first + run.rows);
      pages += (lengths.back() + kKvPageTokens - 1) / kKvPageTokens;
    }
    std::vector<int32_t> shuffled(pages);
    std::iota(shuffled.begin(), shuffled.end(), 0);
    std::shuffle(shuffled.begin(), shuffled.end(), random);

    const auto [heads, kv_heads, dim] = c.shape;
    const Bf16 nan = __float2bfloat16(NAN);
    k_.assign(int64_t{pages} * kv_heads * kKvPageTokens * dim, nan);
    v_ = k_;
    for (size_t s = 0; s < c.runs.size(); ++s) {
      page_begin_.push_back(static_cast<int32_t>(pages_.size()));
      for (int at = 0; at < lengths[s]; at += kKvPageTokens) {
        if (at < c.runs[s].common) {
          pages_.push_back(pages_[page_begin_[s - 1] + at / kKvPageTokens]);
          continue;
        }
        pages_.push_back(shuffled.back());
        shuffled.pop_back();
      }
      // Past queries of the run, no sequence has keys.
      for (int position = c.runs[s].common; position < lengths[s]; ++position) {
        for (int head = 0; head < kv_heads; ++head) {
          const int64_t at = At(static_cast<int>(s), position, head);
          for (int d = 0; d < dim; ++d) {
            k_[at + d] = __float2bfloat16(normal(random));
            v_[at + d] = __float2bfloat16(normal(random));
          }
        }
      }
      for (int row = 0; row < c.runs[s].rows; ++row) {
        sequences_.push_back(static_cast<int32_t>(s));
        positions_.push_back(c.runs[s].first + row);
        reach_.push_back(c.runs[s].LastSeenBy(positions_.back()));
        for (int i = 0; i < heads * dim; ++i) {
          // Now and then scores that leave no room for other positions.
          q_.push_back(__float2bfloat16(normal(random) * (row % 7 == 3 ? 4.0f : 1.0f)));
        }
      }
    }
    if (c.is_fp8) RoundToFp8(random, pages);
    device_k_ = std::make_unique<DeviceBuffer<Bf16>>(k_);
    device_v_ = std::make_unique<DeviceBuffer<Bf16>>(v_);
    device_pages_ = std::make_unique<DeviceBuffer<int32_t>>(pages_);
    device_page_begin_ = std::make_unique<DeviceBuffer<int32_t>>(page_begin_);
  }

  int rows() const { return static_cast<int>(positions_.size()); }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.shape.head_dim)); }

  struct How {
    bool simple = false;
    bool row_tiles = true;
    AttentionSplit split = AttentionSplit::kByLoad;
    bool shares = true;
    size_t workspace = ~size_t{0};  // bytes at most
    bool as_bf16 = false;           // from the numbers that a cache in eight bits stands for
  };
  // Of the rows named, in that order.
  void Compute(const std::vector<int>& which, const How& how, Bits* out) const {
    const auto [heads, kv_heads, dim] = case_.shape;
    const int64_t width = int64_t{heads} * dim;
    std::vector<int32_t> positions, sequences, reach;
    std::vector<Bf16> q;
    for (const int row : which) {
      positions.push_back(positions_[row]);
      sequences.push_back(sequences_[row]);
      reach.push_back(reach_[row]);
      q.insert(q.end(), q_.begin() + row * width, q_.begin() + (row + 1) * width);
    }
    DeviceBuffer<int32_t> device_positions(positions), device_sequences(sequences),
        device_reach(reach);
    DeviceBuffer<Bf16> device_q(q), device_out(q.size());
    const int rows = static_cast<int>(which.size());
    const size_t bytes = std::min(how.workspace, AttentionWorkspaceBytes(case_.shape, rows, 4096));
    DeviceBuffer<char> workspace(std::max<size_t>(bytes, 1));

    PagedAttentionParams params;
    params.rows = {rows,
                   nullptr,
                   device_positions.get(),
                   device_sequences.get(),
                   device_page_begin_->get(),
                   device_pages_->get()};
    if (reach != positions) params.rows.reach = device_reach.get();
    params.shape = case_.shape;
    params.q = device_q.get();
    params.cache = {device_k_->get(), device_v_->get()};
    if (case_.is_fp8 && !how.as_bf16) params.cache = device_fp8_->cache();
    params.softmax_scale = scale();
    params.window = case_.window;
    params.row_tiles = how.row_tiles;
    params.shares = how.shares;
    params.isa = case_.isa;
    params.out = device_out.get();
    if (!how.simple && bytes > 0) {
      params.workspace = {workspace.get(), bytes, rows};
      AttentionPlanParams plan;
      plan.rows = params.rows;
      plan.shape = params.shape;
      plan.window = params.window;
      plan.row_tiles = how.row_tiles;
      plan.split = how.split;
      plan.shares = how.shares;
      plan.isa = case_.isa;
      plan.is_fp8 = params.cache.factors != nullptr;
      plan.workspace = params.workspace;
      DORAD_ASSERT_CUDA(PlanAttention(plan, nullptr));
      // As layers do: more than one launch for a plan.
      DORAD_ASSERT_CUDA(PagedAttention(params, nullptr));
      cudaMemsetAsync(device_out.get(), 0xFF, q.size() * sizeof(Bf16), nullptr);
    }
    DORAD_ASSERT_CUDA(PagedAttention(params, nullptr));
    DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
    const std::vector<Bf16> values = device_out.Read();
    out->resize(values.size());
    std::memcpy(out->data(), values.data(), values.size() * sizeof(Bf16));
  }

  std::vector<int> All() const {
    std::vector<int> rows_of(rows());
    std::iota(rows_of.begin(), rows_of.end(), 0);
    return rows_of;
  }

  // Of one row: ‖out - reference‖ / ‖reference‖, the worst of its heads.
  double Error(int row, const uint16_t* out) const {
    const auto [heads, kv_heads, dim] = case_.shape;
    const int position = positions_[row];
    const int begin = case_.window > 0 ? std::max(0, position - case_.window + 1) : 0;
    const int last = reach_[row];
    double worst = 0.0;
    for (int head = 0; head < heads; ++head) {
      const Bf16* q = q_.data() + (int64_t{row} * heads + head) * dim;
      std::vector<double> scores;
      for (int j = begin; j <= last; ++j) {
        const Bf16* k = k_.data() + At(sequences_[row], j, head / (heads / kv_heads));
        double dot = 0.0;
        for (int d = 0; d < dim; ++d) {
          dot += double{__bfloat162float(q[d])} * double{__bfloat162float(k[d])};
        }
        scores.push_back(dot * static_cast<double>(scale()));
      }
      const double most = *std::max_element(scores.begin(), scores.end());
      std::vector<double> sum(dim, 0.0);
      double total = 0.0;
      for (int j = begin; j <= last; ++j) {
        const double weight = std::exp(scores[j - begin] - most);
        total += weight;
        const Bf16* v = v_.data() + At(sequences_[row], j, head / (heads / kv_heads));
        for (int d = 0; d < dim; ++d) sum[d] += weight * double{__bfloat162float(v[d])};
      }
      double difference = 0.0, size = 0.0;
      for (int d = 0; d < dim; ++d) {
        const Bf16 got = __ushort_as_bfloat16(out[head * dim + d]);
        const double reference = sum[d] / total;
        difference += std::pow(double{__bfloat162float(got)} - reference, 2);
        size += reference * reference;
      }
      const double error = std::sqrt(difference / size);
      if (!(error <= worst)) worst = error;
    }
    return worst;
  }

 private:
  // Heads of different sizes.
  void RoundToFp8(std::mt19937& random, int pages) {
    const auto [heads, kv_heads, dim] = case_.shape;
    Fp8Cache cache(case_.shape, pages);
    std::uniform_real_distribution<float> size(-1.0f, 1.0f);
    for (size_t s = 0; s < page_begin_.size(); ++s) {
      const Run& run = case_.runs[s];
      for (int position = run.common; position < run.first + run.rows; ++position) {
        for (int head = 0; head < kv_heads; ++head) {
          const int64_t at = At(static_cast<int>(s), position, head);
          const int64_t page = pages_[page_begin_[s] + position / kKvPageTokens];
          for (const Kind kind : {kKey, kValue}) {
            Bf16* const from = (kind == kKey ? k_ : v_).data() + at;
            const float by = std::exp2((kind == kKey ? 1.0f : 20.0f) * size(random));
            std::vector<float> x(dim);
            for (int d = 0; d < dim; ++d) x[d] = __bfloat162float(from[d]) * by;
            cache.Put(kind, page, head, position % kKvPageTokens, x.data());
            for (int d = 0; d < dim; ++d) from[d] = __float2bfloat16(x[d]);
          }
        }
      }
    }
    device_fp8_ = std::make_unique<Fp8Cache::OnDevice>(cache);
  }

  int64_t At(int sequence, int position, int kv_head) const {
    const int64_t page = pages_[page_begin_[sequence] + position / kKvPageTokens];
    return ((page * case_.shape.kv_heads + kv_head) * kKvPageTokens + position % kKvPageTokens) *
           case_.shape.head_dim;
  }

  const Case case_;
  std::vector<Bf16> k_, v_, q_;
  std::vector<int32_t> pages_, page_begin_, positions_, sequences_, reach_;
  std::unique_ptr<DeviceBuffer<Bf16>> device_k_, device_v_;
  std::unique_ptr<Fp8Cache::OnDevice> device_fp8_;
  std::unique_ptr<DeviceBuffer<int32_t>> device_pages_, device_page_begin_;
};

}  // namespace dorad::kernels
