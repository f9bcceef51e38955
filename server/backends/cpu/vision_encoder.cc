#include "server/backends/cpu/vision_encoder.h"

#include <ATen/ATen.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "server/backends/cpu/ops/activation.h"
#include "server/backends/cpu/ops/attention.h"
#include "server/backends/cpu/ops/norm.h"
#include "server/platform/check.h"

namespace dorad::model {
namespace {

at::Tensor EmptyF32(at::IntArrayRef sizes) { return at::empty(sizes, at::kFloat); }

}  // namespace

// One image.
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
    float* cos = rope_.cos.mutable_data_ptr<float>();
    float* sin = rope_.sin.mutable_data_ptr<float>();
    for (int64_t i = 0; i < frame_; ++i) {
      const int64_t first = i * config_.head_dim() / 2;
      FillPatchAngles(config_, places_[i], cos + first, sin + first);
    }
    PlaceFrames();
    kv_ = ops::AllocatePagedKv(static_cast<int64_t>(pages_.size()), config_.heads,
                               config_.head_dim(), compute_);
  }

  // The rows of all patches before the first block.
  at::Tensor Embed(const at::Tensor& patches_PE) const {
    at::Tensor x_PW = Project(patches_PE, weights_.patch, nullptr);
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
    return x_PW;
  }

  // Adds attention and MLP of one block to the residual x_PW.
  void RunBlock(size_t index, at::Tensor& x_PW) {
    const VisionBlockSpec& spec = config_.blocks[index];
    const VisionBlockWeights& w = weights_.blocks[index];
    x_PW.add_(Linear(Attention(Linear(Norm(x_PW, w.norm1), w.qkv, spec.qkv)), w.proj, spec.proj));
    at::Tensor inner = Linear(Norm(x_PW, w.norm2), w.fc1, spec.fc1);
    ops::GeluTanh(inner);
    x_PW.add_(Linear(inner, w.fc2, spec.fc2));
  }

  // The norm of a deepstack merger is that of whole tokens.
  at::Tensor Merge(const at::Tensor& x_PW, const MergerSpec& spec, const MergerWeights& w,
                   bool deepstack) const {
    const at::Tensor tokens = x_PW.view({-1, config_.merged_width()});
    at::Tensor inner = deepstack ? Norm(tokens, w.norm) : Norm(x_PW, w.norm).view_as(tokens);
    inner = Linear(inner, w.fc1, spec.fc1);
    ops::Gelu(inner);
    return Linear(inner, w.fc2, spec.fc2);
  }

 private:
  // A frame is a sequence of its own, with pages of its own.
  void PlaceFrames() {
    const int64_t pages = (frame_ + ops::kPageTokens - 1) / ops::kPageTokens;
    pages_.resize(pages * grid_.frames);
    std::iota(pages_.begin(), pages_.end(), 0);
    for (int64_t f = 0; f < grid_.frames; ++f) {
      frames_.push_back({f * frame_, frame_, /*position=*/0,
                         absl::MakeConstSpan(pages_).subspan(f * pages, pages)});
    }
  }

  at::Tensor Attention(const at::Tensor& qkv) {
    const at::Tensor parts = qkv.view({rows_, 3, config_.heads, config_.head_dim()});
    at::Tensor q = parts.select(1, 0).contiguous();
    at::Tensor k = parts.select(1, 1).contiguous();
    const at::Tensor v = parts.select(1, 2).contiguous();
    ops::RopeAndAppend(q, k, v, rope_, frames_, kv_);
    const double scale = 1.0 / std::sqrt(static_cast<double>(config_.head_dim()));
    return ops::FullAttention(q, kv_, frames_, scale).view({rows_, config_.width});
  }

  at::Tensor Norm(const at::Tensor& x, const LayerNormWeights& w) const {
    return ops::LayerNorm(x, w.weight, w.bias, config_.norm_eps);
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
  const int64_t frame_;  // patches of a frame
  const std::vector<PatchPlace> places_;
  ops::RopeTable rope_;  // of a frame's patches in their order
  std::vector<int32_t> pages_;
  std::vector<ops::SequenceRows> frames_;
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
