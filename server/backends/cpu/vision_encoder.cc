#include "server/backends/cpu/vision_encoder.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "server/backends/cpu/ops/activation.h"
#include "server/backends/cpu/ops/attention.h"
#include "server/backends/cpu/ops/norm.h"
#include "server/platform/check.h"

namespace dorad::model {
namespace {

at::Tensor EmptyF32(at::IntArrayRef sizes) { return at::empty(sizes, at::kFloat); }

// Parts of the rows, each with pages of its own: rows of one part see each other.
struct Segments {
  std::vector<int32_t> pages;
  std::vector<ops::SequenceRows> sequences;  // borrow pages
};

// lengths: those of a frame's parts, in their order. A row's rotary position is its place in the
// frame.
Segments SegmentsOf(absl::Span<const int64_t> lengths, int64_t frames) {
  const auto pages_of = [](int64_t rows) {
    return (rows + ops::kPageTokens - 1) / ops::kPageTokens;
  };
  int64_t pages = 0;
  for (const int64_t length : lengths) pages += frames * pages_of(length);
  Segments segments;
  segments.pages.resize(pages);
  std::iota(segments.pages.begin(), segments.pages.end(), 0);
  absl::Span<const int32_t> free = segments.pages;
  int64_t row = 0;
  for (int64_t f = 0; f < frames; ++f) {
    int64_t place = 0;
    for (const int64_t length : lengths) {
      ops::SequenceRows part{row, length, /*position=*/0, free.first(pages_of(length)), {}, {}};
      part.reach.assign(static_cast<size_t>(length), length - 1);
      for (int64_t i = 0; i < length; ++i, ++place) part.rotary.push_back({place, place, place});
      segments.sequences.push_back(std::move(part));
      free.remove_prefix(pages_of(length));
      row += length;
    }
  }
  return segments;
}

}  // namespace

// One image. Rows are in the order of WindowsOf, frame by frame.
class VisionEncoder::Pass {
 public:
  Pass(const LoadedModel& model, const ImageGrid& grid, const adapter::CpuAdapterWeights* adapter)
      : compute_(model.compute()),
        config_(*model.config().vision),
        weights_(model.weights().vision),
        grid_(grid),
        adapter_(adapter),
        rows_(config_.patches(grid)),
        frame_(grid.height * grid.width),
        places_(PatchPlaces(config_, grid)),
        rope_{EmptyF32({frame_, config_.head_dim() / 2}),
              EmptyF32({frame_, config_.head_dim() / 2})} {
    const FrameWindows windows = WindowsOf(config_, grid);
    if (config_.style.windows) OrderTokens(windows.tokens);
    float* cos = rope_.cos.mutable_data_ptr<float>();
    float* sin = rope_.sin.mutable_data_ptr<float>();
    for (int64_t i = 0; i < frame_; ++i) {
      const int64_t first = i * config_.head_dim() / 2;
      FillPatchAngles(config_, places_[i], cos + first, sin + first);
    }
    frames_ = SegmentsOf({frame_}, grid.frames);
    if (config_.style.windows) windows_ = SegmentsOf(windows.patches, grid.frames);
    const size_t pages = std::max(frames_.pages.size(), windows_.pages.size());
    kv_ = ops::AllocatePagedKv(static_cast<int64_t>(pages), config_.heads, config_.head_dim(),
                               compute_);
  }

  // The rows of all patches before the first block.
  at::Tensor Embed(const at::Tensor& patches_PE) const {
    at::Tensor x_PW = Project(patches_PE, weights_.patch, nullptr);
    if (config_.style.windows) x_PW = InOrder(x_PW, order_);
    if (config_.style.position_table) AddTable(x_PW);
    if (config_.style.patch_norm) x_PW = Norm(x_PW, weights_.patch_norm, config_.norm_eps);
    return x_PW;
  }

  void AddTable(at::Tensor& x_PW) const {
    const float* table = weights_.table_PD.const_data_ptr<float>();
    float* x = x_PW.mutable_data_ptr<float>();
    for (int64_t i = 0; i < rows_; ++i) {
      const TableTaps taps = TapsOf(config_, grid_, places_[i % frame_]);
      for (int64_t d = 0; d < config_.width; ++d) {
        float sum = 0.0f;
        for (int t = 0; t < 4; ++t) {
          sum += table[taps.rows[t] * config_.width + d] * taps.weights[t];
        }
        x[i * config_.width + d] += sum;
      }
    }
  }

  // Adds attention and MLP of one block to the residual x_PW.
  void RunBlock(size_t index, at::Tensor& x_PW) {
    const VisionBlockSpec& spec = config_.blocks[index];
    const VisionBlockWeights& w = weights_.blocks[index];
    const Segments& seen = spec.windowed ? windows_ : frames_;
    const double eps = config_.norm_eps;
    x_PW.add_(Linear(Attention(Norm(x_PW, w.norm1, eps), spec, w, seen), w.proj, spec.proj));
    x_PW.add_(Linear(Inner(Norm(x_PW, w.norm2, eps), spec, w), w.fc2, spec.fc2));
  }

  // The norm of a deepstack merger is that of whole tokens. The result is in the processor's order.
  at::Tensor Merge(const at::Tensor& x_PW, const MergerSpec& spec, const MergerWeights& w,
                   bool deepstack) const {
    const double eps = config_.merger_eps;
    if (config_.style.pools_patches) {
      const at::Tensor pooled = Pool(Norm(x_PW, w.norm, config_.norm_eps));
      return Project(ops::RmsNorm(pooled, w.pooled_norm.weight, eps), w.projection, nullptr);
    }
    const at::Tensor tokens = x_PW.view({-1, config_.merged_width()});
    at::Tensor inner =
        deepstack ? Norm(tokens, w.norm, eps) : Norm(x_PW, w.norm, eps).view_as(tokens);
    if (config_.style.joins_patches) inner = Linear(ByChannel(inner), w.join, spec.join);
    inner = Linear(inner, w.fc1, spec.fc1);
    ops::Gelu(inner);
    const at::Tensor merged = Linear(inner, w.fc2, spec.fc2);
    return config_.style.windows ? InOrder(merged, inverse_) : merged;
  }

 private:
  // tokens: FrameWindows::tokens.
  void OrderTokens(const std::vector<int64_t>& tokens) {
    const int64_t of_token = config_.merge * config_.merge;
    const auto of_frame = static_cast<int64_t>(tokens.size());
    inverse_.resize(of_frame * grid_.frames);
    for (int64_t i = 0; i < of_frame * grid_.frames; ++i) {
      const int64_t token = i / of_frame * of_frame + tokens[i % of_frame];
      inverse_[token] = i;
      for (int64_t p = 0; p < of_token; ++p) order_.push_back(token * of_token + p);
    }
  }

  // Row i of the result is row order[i].
  static at::Tensor InOrder(const at::Tensor& rows, const std::vector<int64_t>& order) {
    return rows.index_select(0, at::tensor(order));
  }

  // The mean of each token's patches, added in their order.
  at::Tensor Pool(const at::Tensor& x_PW) const {
    const int64_t of_token = config_.merge * config_.merge;
    const at::Tensor patches = x_PW.view({-1, of_token, config_.width});
    at::Tensor sum = patches.select(1, 0).clone();
    for (int64_t i = 1; i < of_token; ++i) sum.add_(patches.select(1, i));
    return sum.div_(static_cast<double>(of_token));
  }

  // The elements of a token's patches, channel by channel.
  at::Tensor ByChannel(const at::Tensor& tokens) const {
    const at::Tensor patches = tokens.view({tokens.size(0), -1, config_.width});
    return patches.transpose(1, 2).contiguous().view_as(tokens);
  }

  // x_PW: normed input of the MLP.
  at::Tensor Inner(const at::Tensor& x_PW, const VisionBlockSpec& spec,
                   const VisionBlockWeights& w) const {
    at::Tensor inner = Linear(x_PW, w.fc1, spec.fc1);
    switch (config_.style.mlp) {
      case TowerStyle::kGeluTanh:
        ops::GeluTanh(inner);
        break;
      case TowerStyle::kSiluGate:
        ops::SiluMul(inner, Linear(x_PW, w.up, spec.up));
        break;
      case TowerStyle::kGeluGate:
        ops::Gelu(inner);
        inner.mul_(Linear(x_PW, w.up, spec.up));
        break;
    }
    return inner;
  }

  // x_PW: normed input of the attention.
  at::Tensor Attention(const at::Tensor& x_PW, const VisionBlockSpec& spec,
                       const VisionBlockWeights& w, const Segments& seen) {
    at::Tensor q = Linear(x_PW, w.qkv, spec.qkv), k, v;
    if (config_.style.split_qkv) {
      k = Linear(x_PW, w.k, spec.k);
      v = Linear(x_PW, w.v, spec.v);
    } else {
      const at::Tensor parts = q.view({rows_, 3, config_.width});
      q = parts.select(1, 0).contiguous();
      k = parts.select(1, 1).contiguous();
      v = parts.select(1, 2).contiguous();
    }
    for (at::Tensor* each : {&q, &k, &v}) {
      *each = each->view({rows_, config_.heads, config_.head_dim()});
    }
    ops::RopeAndAppend(q, k, v, rope_, seen.sequences, kv_);
    const double scale = 1.0 / std::sqrt(static_cast<double>(config_.head_dim()));
    return ops::PagedAttention(q, kv_, seen.sequences, scale, /*window=*/0)
        .view({rows_, config_.width});
  }

  at::Tensor Norm(const at::Tensor& x, const TowerNormWeights& w, double eps) const {
    if (config_.style.rms_norms) return ops::RmsNorm(x, w.weight, eps);
    return ops::LayerNorm(x, w.weight, w.bias, eps);
  }

  at::Tensor Linear(const at::Tensor& x, const ops::BaseLinear& base, int module_id) const {
    return Project(x, base, adapter_ == nullptr ? nullptr : adapter_->Find(module_id));
  }

  at::Tensor Project(const at::Tensor& x, const ops::BaseLinear& base,
                     const ops::AdapterFactors* factors) const {
    at::Tensor y = EmptyF32({x.size(0), base.weight_OI.size(0)});
    const ops::RowSegment segment{factors, 0, x.size(0)};
    const ops::Projection projection{&base, {&segment, 1}, y};
    ops::DoraLinear(x, {&projection, 1}, compute_);
    return y;
  }

  const ops::ComputeDType compute_;
  const VisionConfig& config_;
  const VisionWeights& weights_;
  const ImageGrid grid_;
  const adapter::CpuAdapterWeights* const adapter_;
  const int64_t rows_;
  const int64_t frame_;                   // patches of a frame
  const std::vector<PatchPlace> places_;  // of a frame's rows
  std::vector<int64_t> order_, inverse_;  // of patches and of tokens of all frames, with windows
  ops::RopeTable rope_;                   // of a frame's rows
  Segments frames_, windows_;
  ops::PagedKv kv_;
};

VisionEncoder::VisionEncoder(const LoadedModel& model) : model_(model) {
  DORAD_CHECK(model.config().vision.has_value());
}

at::Tensor VisionEncoder::Encode(const at::Tensor& patches_PE, const ImageGrid& grid,
                                 const adapter::CpuAdapterWeights* adapter) const {
  const VisionConfig& config = *model_.config().vision;
  const VisionWeights& weights = model_.weights().vision;
  DORAD_CHECK(grid.frames > 0 && grid.height > 0 && grid.width > 0);
  DORAD_CHECK(grid.height % config.merge == 0 && grid.width % config.merge == 0);
  DORAD_CHECK(config.fixed_side == 0 ||
              (grid.height == config.fixed_side && grid.width == config.fixed_side));
  DORAD_CHECK(patches_PE.sizes() ==
              at::IntArrayRef({config.patches(grid), config.patch_elements()}));
  Pass pass(model_, grid, adapter);
  at::Tensor x = pass.Embed(patches_PE);
  at::Tensor result = EmptyF32(
      {1 + static_cast<int64_t>(config.deepstack.size()), config.tokens(grid), config.output});
  size_t next = 0;
  for (size_t i = 0; i < config.blocks.size(); ++i) {
    pass.RunBlock(i, x);
    if (next == config.deepstack.size() || config.deepstack[next] != static_cast<int>(i)) continue;
    result.select(0, static_cast<int64_t>(next) + 1)
        .copy_(pass.Merge(x, config.deepstack_mergers[next], weights.deepstack_mergers[next],
                          /*deepstack=*/true));
    ++next;
  }
  result.select(0, 0).copy_(pass.Merge(x, config.merger, weights.merger, /*deepstack=*/false));
  return result;
}

}  // namespace dorad::model
