#include "server/backends/cpu/decoder.h"

#include <ATen/ATen.h>

#include <cmath>

#include "server/backends/cpu/kv_layout.h"
#include "server/backends/cpu/ops/activation.h"
#include "server/backends/cpu/ops/delta.h"
#include "server/backends/cpu/ops/embedding.h"
#include "server/backends/cpu/ops/norm.h"

namespace dorad::model {
namespace {

at::Tensor EmptyF32(at::IntArrayRef sizes) { return at::empty(sizes, at::kFloat); }

std::vector<ops::RopeTable> MakeRopeTables(const ModelConfig& config, int64_t positions) {
  std::vector<ops::RopeTable> tables;
  for (const RopeConfig& rope : config.ropes) {
    const int64_t half = rope.width / 2;
    ops::RopeTable table{EmptyF32({positions, half}), EmptyF32({positions, half}), rope.axes};
    FillRopeTable(rope, positions, table.cos.data_ptr<float>(), table.sin.data_ptr<float>());
    tables.push_back(std::move(table));
  }
  return tables;
}

// As transformers has it: in the dtype of the weights that it computes with.
float EmbeddingFactor(const LoadedModel& model) {
  const auto factor = static_cast<float>(model.config().embedding_scale);
  const bool round = model.compute() == ops::ComputeDType::kBF16;
  return round ? static_cast<float>(at::BFloat16(factor)) : factor;
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
  Pass(const LoadedModel& model, const std::vector<ops::RopeTable>& ropes,
       const DeltaStateLayout& states, const DecoderBatch& batch)
      : model_(model), config_(model.config()), ropes_(ropes), states_(states), batch_(batch) {}

  at::Tensor Embed() const {
    at::Tensor embedded =
        ops::Embed(batch_.token_ids_T, model_.weights().embedding_VD, EmbeddingFactor(model_),
                   SegmentsOf(batch_.adapters, config_.embedding));
    for (const ImageRows& rows : batch_.images) {
      embedded.narrow(0, rows.begin, rows.count)
          .copy_(rows.features[0].narrow(0, rows.first, rows.count));
    }
    return embedded;
  }

  // Adds the features for the layer to its rows (DeepStack). x_TD: the layer's last addend.
  void AddFeatures(int64_t layer, at::Tensor& x_TD) const {
    for (const ImageRows& rows : batch_.images) {
      if (layer + 1 >= rows.features.size(0)) continue;
      x_TD.narrow(0, rows.begin, rows.count)
          .add_(rows.features[layer + 1].narrow(0, rows.first, rows.count));
    }
  }

  // h_TD: normed input. Returns what is added to the residual. sequences, kv: of the layer.
  at::Tensor Attention(int64_t layer, const at::Tensor& h_TD,
                       absl::Span<const ops::SequenceRows> sequences, ops::PagedKv& kv) const {
    const AttentionSpec& spec = config_.layers[layer].attention;
    const LayerWeights& w = model_.weights().layers[layer];
    const int64_t rows = h_TD.size(0);
    at::Tensor q = EmptyF32({rows, config_.num_heads, config_.head_dim});
    at::Tensor k = EmptyF32({rows, config_.num_kv_heads, config_.head_dim});
    at::Tensor v = EmptyF32({rows, config_.num_kv_heads, config_.head_dim});
    // Of each head its query, and its gate after that.
    const int64_t width = (spec.output_gate ? 2 : 1) * config_.head_dim;
    at::Tensor queries = spec.output_gate ? EmptyF32({rows, config_.num_heads, width}) : q;
    Linears(h_TD, {{spec.q, &w.q, queries.view({rows, -1})},
                   {spec.k, &w.k, k.view({rows, -1})},
                   {spec.v, &w.v, v.view({rows, -1})}});
    if (spec.output_gate) q.copy_(queries.narrow(2, 0, config_.head_dim));
    if (spec.qk_norm) {
      ops::RmsNormInplace(q, w.q_norm, config_.rms_norm_eps);
      ops::RmsNormInplace(k, w.k_norm, config_.rms_norm_eps);
    }
    ops::RopeAndAppend(q, k, v, ropes_[spec.rope], sequences, kv);
    const double scale = 1.0 / std::sqrt(spec.query_scalar);
    at::Tensor attended = ops::PagedAttention(q, kv, sequences, scale, spec.window);
    if (spec.output_gate) {
      ops::SigmoidMul(attended, queries.narrow(2, config_.head_dim, config_.head_dim).contiguous());
    }
    at::Tensor out = EmptyF32({rows, config_.hidden_size});
    Linears(attended.view({rows, config_.q_size()}), {{spec.o, &w.o, out}});
    if (config_.layers[layer].output_norms) {
      ops::RmsNormInplace(out, w.attention_output_norm, config_.rms_norm_eps);
    }
    return out;
  }

  // As Attention. net: the number of the delta-net. Such a model has one group of layers.
  at::Tensor Delta(int64_t layer, int64_t net, const at::Tensor& h_TD,
                   std::vector<ops::PagedKv>& kv) const {
    const DeltaSpec& spec = *config_.layers[layer].delta;
    const DeltaWeights& w = model_.weights().layers[layer].delta;
    const DeltaSizes& sizes = config_.delta;
    const int64_t rows = h_TD.size(0);
    const at::Tensor qkv = EmptyF32({rows, sizes.qkv_size()});
    at::Tensor z = EmptyF32({rows, sizes.value_heads, sizes.value_dim});
    const at::Tensor b = EmptyF32({rows, sizes.value_heads});
    const at::Tensor a = EmptyF32({rows, sizes.value_heads});
    Linears(h_TD, {{spec.qkv, &w.qkv, qkv},
                   {spec.z, &w.z, z.view({rows, -1})},
                   {spec.b, &w.b, b},
                   {spec.a, &w.a, a}});
    const std::vector<ops::DeltaRows> sequences = DeltaRowsOf(net, kv);
    const ops::DeltaShape shape{sizes, states_.tile(), states_.state_blocks(),
                                BlockBytes(kv[0].k) / static_cast<int64_t>(sizeof(float))};
    const at::Tensor mixed = ops::DeltaConvolution(qkv, w.convolution, sequences, shape);
    at::Tensor o = ops::GatedDeltaRule(mixed, b, a, w.decay_log, w.time_bias, sequences, shape);
    ops::RmsNormInplace(o, w.norm, config_.rms_norm_eps);
    ops::SiluMul(z, o);
    at::Tensor out = EmptyF32({rows, config_.hidden_size});
    Linears(z.view({rows, -1}), {{spec.out, &w.out, out}});
    return out;
  }

  // As Attention.
  at::Tensor Mlp(int64_t layer, const at::Tensor& h_TD) const {
    const MlpSpec& spec = config_.layers[layer].mlp;
    const LayerWeights& w = model_.weights().layers[layer];
    const int64_t rows = h_TD.size(0);
    at::Tensor gate = EmptyF32({rows, config_.intermediate_size});
    at::Tensor up = EmptyF32({rows, config_.intermediate_size});
    Linears(h_TD, {{spec.gate, &w.gate, gate}, {spec.up, &w.up, up}});
    switch (spec.activation) {
      case Activation::kSilu:
        ops::SiluMul(gate, up);
        break;
      case Activation::kGeluTanh:
        ops::GeluTanhMul(gate, up);
        break;
    }
    at::Tensor out = EmptyF32({rows, config_.hidden_size});
    Linears(gate, {{spec.down, &w.down, out}});
    if (config_.layers[layer].output_norms) {
      ops::RmsNormInplace(out, w.mlp_output_norm, config_.rms_norm_eps);
    }
    return out;
  }

 private:
  static int64_t BlockBytes(const at::Tensor& pages) {
    return static_cast<int64_t>(pages.nbytes()) / pages.size(0);
  }

  // The blocks of a page are its keys and its values in each layer with attention.
  std::vector<ops::DeltaRows> DeltaRowsOf(int64_t net, std::vector<ops::PagedKv>& kv) const {
    const auto block_at = [&](absl::Span<const int32_t> pages, DeltaStateLayout::Block at) {
      const ops::PagedKv& layer = kv[at.block / 2];
      const at::Tensor& tensor = at.block % 2 == 0 ? layer.k : layer.v;
      auto* const begin = static_cast<std::byte*>(tensor.mutable_data_ptr());
      return reinterpret_cast<float*>(begin + pages[at.page] * BlockBytes(tensor));
    };
    const auto blocks_of = [&](absl::Span<const int32_t> pages) {
      std::vector<float*> blocks;
      for (int64_t i = 0; i < states_.net_blocks(); ++i) {
        blocks.push_back(block_at(pages, states_.BlockAt(net, i)));
      }
      return blocks;
    };
    std::vector<ops::DeltaRows> sequences;
    for (size_t i = 0; i < batch_.states.size(); ++i) {
      const ops::SequenceRows& rows = batch_.sequences.front()[i];
      const StatePages& pages = batch_.states[i];
      sequences.push_back({rows.row_begin, rows.count, {}, blocks_of(pages.to)});
      if (pages.from.empty()) continue;
      const std::vector<float*> from = blocks_of(pages.from);
      sequences.back().from.assign(from.begin(), from.end());
    }
    return sequences;
  }

  struct Linear {
    int module;
    const ops::BaseLinear* base;
    at::Tensor y;
  };

  void Linears(const at::Tensor& x, std::initializer_list<Linear> linears) const {
    std::vector<std::vector<ops::RowSegment>> segments;
    std::vector<ops::Projection> projections;
    segments.reserve(linears.size());  // projections keep spans into its elements
    for (const Linear& linear : linears) {
      segments.push_back(SegmentsOf(batch_.adapters, linear.module));
      projections.push_back({linear.base, segments.back(), linear.y});
    }
    ops::DoraLinear(x, projections, model_.compute());
  }

  const LoadedModel& model_;
  const ModelConfig& config_;
  const std::vector<ops::RopeTable>& ropes_;
  const DeltaStateLayout& states_;
  const DecoderBatch& batch_;
};

Decoder::Decoder(const LoadedModel& model, int64_t max_positions)
    : model_(model),
      groups_(model.config()),
      ropes_(MakeRopeTables(model.config(), max_positions)),
      state_layout_(engine::CpuStateLayout(model.config(),
                                           model.compute() == ops::ComputeDType::kBF16 ? 2 : 4)) {}

std::vector<ops::PagedKv> Decoder::AllocateKv(int64_t pages) const {
  const ModelConfig& config = model_.config();
  std::vector<ops::PagedKv> kv;
  for (int64_t slot = 0; slot < groups_.slots; ++slot) {
    kv.push_back(
        ops::AllocatePagedKv(pages, config.num_kv_heads, config.head_dim, model_.compute()));
  }
  return kv;
}

at::Tensor Decoder::Forward(const DecoderBatch& batch, std::vector<ops::PagedKv>& kv) const {
  const Pass pass(model_, ropes_, state_layout_, batch);
  const double eps = model_.config().rms_norm_eps;
  at::Tensor residual = pass.Embed();
  at::Tensor pending;  // output of the last block, not yet added to the residual
  int64_t net = 0;     // the next delta-net
  for (int64_t layer = 0; layer < model_.config().num_layers(); ++layer) {
    const LayerWeights& w = model_.weights().layers[layer];
    const at::Tensor h = pending.defined()
                             ? ops::AddRmsNorm(residual, pending, w.attention_norm, eps)
                             : ops::RmsNorm(residual, w.attention_norm, eps);
    if (model_.config().layers[layer].delta) {
      pending = pass.Delta(layer, net++, h, kv);
    } else {
      const KvGroups::Place& place = groups_.places[static_cast<size_t>(layer - net)];
      pending = pass.Attention(layer, h, batch.sequences[place.group], kv[place.slot]);
    }
    pending = pass.Mlp(layer, ops::AddRmsNorm(residual, pending, w.mlp_norm, eps));
    pass.AddFeatures(layer, pending);
  }
  residual.add_(pending);
  return residual;
}

at::Tensor Decoder::Logits(const at::Tensor& hidden_ND,
                           absl::Span<const AdapterRows> adapters) const {
  const ModelConfig& config = model_.config();
  const at::Tensor h = ops::RmsNorm(hidden_ND, model_.weights().final_norm, config.rms_norm_eps);
  at::Tensor logits = EmptyF32({hidden_ND.size(0), config.vocab_size});
  const std::vector<ops::RowSegment> segments = SegmentsOf(adapters, config.head);
  const ops::Projection head{&model_.weights().head, segments, logits};
  ops::DoraLinear(h, {&head, 1}, model_.compute());
  return logits;
}

}  // namespace dorad::model
