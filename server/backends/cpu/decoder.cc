#include "server/backends/cpu/decoder.h"

#include <ATen/ATen.h>

#include <cmath>

#include "server/backends/cpu/ops/activation.h"
#include "server/backends/cpu/ops/embedding.h"
#include "server/backends/cpu/ops/norm.h"

namespace dorad::model {
namespace {

at::Tensor EmptyF32(at::IntArrayRef sizes) { return at::empty(sizes, at::kFloat); }

ops::RopeTable MakeRopeTable(const ModelConfig& config, int64_t positions) {
  const int64_t half = config.head_dim / 2;
  ops::RopeTable table{EmptyF32({positions, half}), EmptyF32({positions, half})};
  FillRopeTable(config, positions, table.cos.data_ptr<float>(), table.sin.data_ptr<float>());
  return table;
}

std::vector<ops::RowSegment> SegmentsOf(absl::Span<const AdapterRows> adapters, int module_id) {
  std::vector<ops::RowSegment> segments;
  segments.reserve(adapters.size());
  for (const AdapterRows& rows : adapters) {
    segments.push_back(
        {rows.weights == nullptr ? nullptr : rows.weights->Find(module_id), rows.begin, rows.end});
  }
  return segments;
}

}  // namespace

// One forward pass: the batch and the inputs common to all layers.
class Decoder::Pass {
 public:
  Pass(const LoadedModel& model, const ops::RopeTable& rope, const DecoderBatch& batch)
      : model_(model), config_(model.config()), rope_(rope), batch_(batch) {}

  at::Tensor Embed() const {
    return ops::Embed(batch_.token_ids_T, model_.weights().embedding_VD,
                      SegmentsOf(batch_.adapters, EmbeddingId(config_)));
  }

  // h_TD: normed input. Returns the block's output, before it is added to the residual.
  at::Tensor Attention(int64_t layer, const at::Tensor& h_TD, ops::PagedKv& kv) const {
    const LayerWeights& w = model_.weights().layers[layer];
    const int64_t rows = h_TD.size(0);
    at::Tensor q = EmptyF32({rows, config_.num_heads, config_.head_dim});
    at::Tensor k = EmptyF32({rows, config_.num_kv_heads, config_.head_dim});
    at::Tensor v = EmptyF32({rows, config_.num_kv_heads, config_.head_dim});
    Linears(h_TD, layer,
            {{kQ, &w.q, q.view({rows, -1})},
             {kK, &w.k, k.view({rows, -1})},
             {kV, &w.v, v.view({rows, -1})}});
    if (w.q_norm.defined()) {
      ops::RmsNormInplace(q, w.q_norm, config_.rms_norm_eps);
      ops::RmsNormInplace(k, w.k_norm, config_.rms_norm_eps);
    }
    ops::RopeAndAppend(q, k, v, rope_, batch_.sequences, kv);
    const double scale = 1.0 / std::sqrt(static_cast<double>(config_.head_dim));
    const at::Tensor attended =
        ops::PagedAttention(q, kv, batch_.sequences, scale, config_.windows[layer]);
    at::Tensor out = EmptyF32({rows, config_.hidden_size});
    Linears(attended.view({rows, config_.q_size()}), layer, {{kO, &w.o, out}});
    return out;
  }

  at::Tensor Mlp(int64_t layer, const at::Tensor& h_TD) const {
    const LayerWeights& w = model_.weights().layers[layer];
    const int64_t rows = h_TD.size(0);
    at::Tensor gate = EmptyF32({rows, config_.intermediate_size});
    at::Tensor up = EmptyF32({rows, config_.intermediate_size});
    Linears(h_TD, layer, {{kGate, &w.gate, gate}, {kUp, &w.up, up}});
    ops::SiluMul(gate, up);
    at::Tensor out = EmptyF32({rows, config_.hidden_size});
    Linears(gate, layer, {{kDown, &w.down, out}});
    return out;
  }

 private:
  struct Linear {
    LayerModule module;
    const ops::BaseLinear* base;
    at::Tensor y;
  };

  void Linears(const at::Tensor& x, int64_t layer, std::initializer_list<Linear> linears) const {
    std::vector<std::vector<ops::RowSegment>> segments;
    std::vector<ops::Projection> projections;
    segments.reserve(linears.size());  // projections keep spans into its elements
    for (const Linear& linear : linears) {
      segments.push_back(SegmentsOf(batch_.adapters, LayerModuleId(layer, linear.module)));
      projections.push_back({linear.base, segments.back(), linear.y});
    }
    ops::DoraLinear(x, projections, model_.compute());
  }

  const LoadedModel& model_;
  const ModelConfig& config_;
  const ops::RopeTable& rope_;
  const DecoderBatch& batch_;
};

Decoder::Decoder(const LoadedModel& model, int64_t max_positions)
    : model_(model), rope_(MakeRopeTable(model.config(), max_positions)) {}

std::vector<ops::PagedKv> Decoder::AllocateKv(int64_t pages) const {
  const ModelConfig& config = model_.config();
  std::vector<ops::PagedKv> kv;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    kv.push_back(
        ops::AllocatePagedKv(pages, config.num_kv_heads, config.head_dim, model_.compute()));
  }
  return kv;
}

at::Tensor Decoder::Forward(const DecoderBatch& batch, std::vector<ops::PagedKv>& kv) const {
  const Pass pass(model_, rope_, batch);
  const double eps = model_.config().rms_norm_eps;
  at::Tensor residual = pass.Embed();
  at::Tensor pending;  // output of the last block, not yet added to the residual
  for (int64_t layer = 0; layer < model_.config().num_layers; ++layer) {
    const LayerWeights& w = model_.weights().layers[layer];
    const at::Tensor h = pending.defined() ? ops::AddRmsNorm(residual, pending, w.input_norm, eps)
                                           : ops::RmsNorm(residual, w.input_norm, eps);
    pending = pass.Attention(layer, h, kv[layer]);
    pending = pass.Mlp(layer, ops::AddRmsNorm(residual, pending, w.post_attention_norm, eps));
  }
  residual.add_(pending);
  return residual;
}

at::Tensor Decoder::Logits(const at::Tensor& hidden_ND,
                           absl::Span<const AdapterRows> adapters) const {
  const ModelConfig& config = model_.config();
  const at::Tensor h = ops::RmsNorm(hidden_ND, model_.weights().final_norm, config.rms_norm_eps);
  at::Tensor logits = EmptyF32({hidden_ND.size(0), config.vocab_size});
  const std::vector<ops::RowSegment> segments = SegmentsOf(adapters, HeadId(config));
  const ops::Projection head{&model_.weights().head, segments, logits};
  ops::DoraLinear(h, {&head, 1}, model_.compute());
  return logits;
}

}  // namespace dorad::model
