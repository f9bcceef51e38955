#include "server/backends/cuda/decoder.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/decoder/activation.h"
#include "kernels/decoder/delta.h"
#include "kernels/decoder/embedding.h"
#include "kernels/decoder/rms_norm.h"
#include "kernels/vision/pointwise.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

constexpr char kStep[] = "the step";

kernels::DeltaShape DeltaShapeOf(const model::DeltaSizes& sizes) {
  return {static_cast<int32_t>(sizes.key_heads), static_cast<int32_t>(sizes.value_heads),
          static_cast<int32_t>(sizes.key_dim), static_cast<int32_t>(sizes.value_dim),
          static_cast<int32_t>(sizes.convolution)};
}

kernels::AttentionShape AttentionShapeOf(const model::ModelConfig& config) {
  return {static_cast<int32_t>(config.num_heads), static_cast<int32_t>(config.num_kv_heads),
          static_cast<int32_t>(config.head_dim)};
}

}  // namespace

absl::Status CheckDecoder(const model::ModelConfig& config) {
  const kernels::AttentionShape shape = AttentionShapeOf(config);
  for (const model::RopeConfig& rope : config.ropes) {
    if (!config.fp8_kv || kernels::HasFp8Attention(shape, static_cast<int32_t>(rope.width))) {
      continue;
    }
    return MakeInvalid(
        "engine",
        {{"engine.kv_dtype", "KV_DTYPE_UNSUPPORTED",
          absl::StrCat("fp8 needs a head_dim (", shape.head_dim,
                       ") of 64, 128 or 256, at most 16 query heads for each key head (",
                       shape.heads / shape.kv_heads, "), and a rotary embedding (", rope.width,
                       " elements) of whole heads, or of a multiple of 4 up to half of a head")}});
  }
  const model::DeltaSizes& sizes = config.delta;
  if (config.num_delta_layers() == 0 || kernels::IsDeltaShape(DeltaShapeOf(sizes))) {
    return absl::OkStatus();
  }
  return MakeInvalid(
      "model", {{"model.path", "MODEL_UNSUPPORTED",
                 absl::StrCat("on a GPU linear_key_head_dim (", sizes.key_dim,
                              ") must be a multiple of 4 and at most 128, linear_value_head_dim (",
                              sizes.value_dim, ") a multiple of 4, and linear_conv_kernel_dim (",
                              sizes.convolution, ") at most 4")}});
}

absl::StatusOr<std::unique_ptr<CudaDecoder>> CudaDecoder::Create(const CudaModel* model,
                                                                 const Options& options,
                                                                 MemoryLedger* ledger,
                                                                 const Stream* stream) {
  std::vector<const LinearGroup*> groups = {&model->head()};
  for (const LayerWeights& layer : model->layers()) {
    for (const LinearGroup* group : {&layer.qkv, &layer.o, &layer.delta.qkvz, &layer.delta.ba,
                                     &layer.delta.out, &layer.gate_up, &layer.down}) {
      if (group->out > 0) groups.push_back(group);
    }
  }
  const int64_t most_rows = std::max(options.max_rows, options.max_logits_rows);
  DORAD_ASSIGN_OR_RETURN(Linear linear,
                         Linear::Create(groups, most_rows, model->isa(), ledger, stream));
  std::unique_ptr<CudaDecoder> decoder(new CudaDecoder(model, options, stream, std::move(linear)));
  DORAD_RETURN_IF_ERROR(decoder->AllocateAll(ledger));
  DORAD_RETURN_IF_CUDA_ERROR(kernels::LeastSharedPositions(decoder->Shape(), model->isa(),
                                                           &decoder->least_shared_positions_),
                             "the decoder");
  DORAD_RETURN_IF_ERROR(decoder->UploadRope());
  return decoder;
}

absl::StatusOr<int64_t> CudaDecoder::ReleaseKv(absl::Span<const int32_t> keep) {
  std::vector<int32_t> pages(keep.begin(), keep.end());
  for (int32_t& page : pages) page += kSparePages;
  DORAD_ASSIGN_OR_RETURN(kv_image_,
                         KvImage::Save(kv_memory_.as(), kv_memory_.layout(), pages, stream_));
  return kv_memory_.UnmapAll();
}

absl::Status CudaDecoder::RestoreKv() {
  DORAD_RETURN_IF_ERROR(kv_memory_.MapAgain());
  absl::Status status = kv_image_.Restore(kv_memory_.as(), stream_);
  if (status.ok()) {
    kv_image_ = KvImage();
  } else {
    (void)kv_memory_.UnmapAll();
  }
  return status;
}

absl::Status CudaDecoder::AllocateAll(MemoryLedger* ledger) {
  const model::ModelConfig& config = model_.config();
  const KvLayout layout_of_kv = KvLayoutOf(config);
  DORAD_ASSIGN_OR_RETURN(kv_memory_,
                         KvMemory::Create(layout_of_kv, options_.kv_pages + kSparePages, ledger));
  const int64_t plane = layout_of_kv.plane_bytes() / static_cast<int64_t>(sizeof(__nv_bfloat16));
  for (int64_t i = 0; i < groups_.slots; ++i) {
    __nv_bfloat16* k = kv_memory_.as<__nv_bfloat16>() + 2 * i * plane;
    kv_.push_back({k, k + plane});
    if (!config.fp8_kv) continue;
    const FactorsPlace factors = FactorsPlaceOf(config, i);
    kv_.back().factors = kv_memory_.as<__nv_bfloat16>() + factors.plane * plane +
                         factors.offset / static_cast<int64_t>(sizeof(__nv_bfloat16));
  }

  const int64_t rows = options_.max_rows;
  int64_t wide = 0, narrow = std::max(config.q_size(), config.intermediate_size);
  for (const LayerWeights& layer : model_.layers()) {
    wide = std::max({wide, layer.qkv.out, layer.delta.qkvz.out, layer.gate_up.out});
    narrow = std::max(narrow, layer.delta.out.in);
  }
  Layout layout;
  struct RopeAt {
    int64_t cos, sin, axes;
  };
  std::vector<RopeAt> ropes_at;
  for (const model::RopeConfig& rope : config.ropes) {
    const int64_t bytes = options_.max_positions * (rope.width / 2) * 4;
    ropes_at.push_back({layout.Add(bytes), layout.Add(bytes),
                        rope.axes.empty() ? -1 : layout.Add(rope.width / 2)});
  }
  const int64_t residual_at = layout.Add(rows * config.hidden_size * 4);
  const int64_t normed_at =
      layout.Add(std::max(rows, options_.max_logits_rows) * config.hidden_size * 2);
  const int64_t wide_at = layout.Add(rows * wide * 2);
  const int64_t narrow_at = layout.Add(rows * narrow * 2);
  const int64_t delta_at = layout.Add(rows * config.hidden_size * 4);
  const int64_t q_at = layout.Add(rows * config.q_size() * 2);
  const bool has_deltas = config.num_delta_layers() > 0;
  const int64_t mixed_at = layout.Add(has_deltas ? rows * config.delta.qkv_size() * 4 : 0);
  const int64_t factors_at = layout.Add(has_deltas ? rows * 2 * config.delta.value_heads * 4 : 0);
  const int64_t logits_at = layout.Add(options_.max_logits_rows * config.vocab_size * 4);
  const size_t plan_bytes = kernels::AttentionWorkspaceBytes(
      Shape(), static_cast<int32_t>(rows), static_cast<int32_t>(options_.max_positions));
  std::vector<int64_t> plans_at;
  for (size_t group = 0; group < groups_.windows.size(); ++group) {
    plans_at.push_back(layout.Add(static_cast<int64_t>(plan_bytes)));
  }
  DORAD_ASSIGN_OR_RETURN(workspace_,
                         DeviceBuffer::Allocate(ledger, MemoryLedger::kWorkspace, layout.bytes()));
  for (const RopeAt& at : ropes_at) {
    ropes_.push_back({workspace_.as<float>(at.cos), workspace_.as<float>(at.sin),
                      at.axes < 0 ? nullptr : workspace_.as<uint8_t>(at.axes)});
  }
  residual_ = workspace_.as<float>(residual_at);
  normed_ = workspace_.as<__nv_bfloat16>(normed_at);
  wide_ = workspace_.as<__nv_bfloat16>(wide_at);
  narrow_ = workspace_.as<__nv_bfloat16>(narrow_at);
  delta_ = workspace_.as<float>(delta_at);
  q_ = workspace_.as<__nv_bfloat16>(q_at);
  mixed_ = workspace_.as<float>(mixed_at);
  factors_ = workspace_.as<float>(factors_at);
  logits_ = workspace_.as<float>(logits_at);
  for (const int64_t at : plans_at) {
    plans_.push_back({workspace_.as<>(at), plan_bytes, static_cast<int32_t>(rows)});
    DORAD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(workspace_.as<>(at), 0xFF, plan_bytes, stream_.get()), kStep);
  }
  return absl::OkStatus();
}

absl::Status CudaDecoder::UploadRope() {
  for (size_t i = 0; i < ropes_.size(); ++i) {
    const model::RopeConfig& rope = model_.config().ropes[i];
    std::vector<float> cos(static_cast<size_t>(options_.max_positions * (rope.width / 2)));
    std::vector<float> sin(cos.size());
    model::FillRopeTable(rope, options_.max_positions, cos.data(), sin.data());
    const size_t bytes = cos.size() * sizeof(float);
    // Copies on the stream that reads them, so that no other stream has to wait.
    for (const auto& [to, from] :
         {std::pair(ropes_[i].cos, cos.data()), std::pair(ropes_[i].sin, sin.data())}) {
      DORAD_RETURN_IF_CUDA_ERROR(
          cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_.get()), kStep);
    }
    if (!rope.axes.empty()) {
      DORAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(ropes_[i].axes, rope.axes.data(), rope.axes.size(),
                                                 cudaMemcpyHostToDevice, stream_.get()),
                                 kStep);
    }
    DORAD_RETURN_IF_ERROR(stream_.Synchronize(kStep));
  }
  return absl::OkStatus();
}

kernels::AttentionShape CudaDecoder::Shape() const { return AttentionShapeOf(model_.config()); }

absl::Status CudaDecoder::Norm(int64_t rows, bool first, const float* delta_weight,
                               const float* weight) {
  kernels::AddRmsNormParams params;
  params.rows = static_cast<int32_t>(rows);
  params.size = static_cast<int32_t>(model_.config().hidden_size);
  params.residual = residual_;
  params.delta = first ? nullptr : delta_;
  params.delta_weight = first ? nullptr : delta_weight;
  params.weight = weight;
  params.eps = static_cast<float>(model_.config().rms_norm_eps);
  params.out = normed_;
  return ToStatus(kernels::AddRmsNorm(params, stream_.get()), kStep);
}

absl::Status CudaDecoder::Activate(int64_t layer, int64_t rows) {
  const auto count = static_cast<int32_t>(rows);
  const auto size = static_cast<int32_t>(model_.config().intermediate_size);
  switch (model_.config().layers[layer].mlp.activation) {
    case model::Activation::kSilu:
      return ToStatus(kernels::SiluMul(wide_, count, size, narrow_, stream_.get()), kStep);
    case model::Activation::kGeluTanh:
      return ToStatus(kernels::GeluTanhMul(wide_, count, size, narrow_, stream_.get()), kStep);
  }
  DORAD_CHECK(false);
}

absl::Status CudaDecoder::Attention(int64_t layer, const model::KvGroups::Place& place,
                                    const kernels::StepRows& rows, const LinearRows& linear,
                                    const StepForm& form) {
  const model::ModelConfig& config = model_.config();
  const model::AttentionSpec& spec = config.layers[layer].attention;
  const LayerWeights& w = model_.layers()[layer];
  DORAD_RETURN_IF_ERROR(linear_.Run(w.qkv, linear, normed_, wide_));
  kernels::RopeAppendParams rope;
  rope.rows = rows;
  rope.shape = Shape();
  rope.width = static_cast<int32_t>(config.ropes[spec.rope].width);
  rope.has_gates = spec.output_gate;
  rope.qkv = wide_;
  rope.q_norm = w.q_norm;
  rope.k_norm = w.k_norm;
  rope.eps = static_cast<float>(config.rms_norm_eps);
  rope.cos = ropes_[spec.rope].cos;
  rope.sin = ropes_[spec.rope].sin;
  rope.axes = ropes_[spec.rope].axes;
  rope.q = q_;
  rope.cache = kv_[place.slot];
  kernels::PagedAttentionParams attention;
  attention.isa = model_.isa();
  attention.rows = rows;
  attention.shape = rope.shape;
  attention.q = q_;
  attention.cache = kv_[place.slot];
  attention.softmax_scale = 1.0f / std::sqrt(static_cast<float>(spec.query_scalar));
  attention.window = static_cast<int32_t>(spec.window);
  attention.row_tiles = form.row_tiles();
  attention.shares = form.shares;
  attention.workspace = plans_[place.group];
  attention.out = narrow_;
  if (form.single_rows) {
    // Every sequence has one row, and writes to a page of its own.
    DORAD_RETURN_IF_CUDA_ERROR(kernels::AppendAttention(rope, attention, stream_.get()), kStep);
  } else {
    DORAD_RETURN_IF_CUDA_ERROR(kernels::RopeAppend(rope, stream_.get()), kStep);
    DORAD_RETURN_IF_CUDA_ERROR(kernels::PagedAttention(attention, stream_.get()), kStep);
  }
  if (spec.output_gate) {
    DORAD_RETURN_IF_CUDA_ERROR(kernels::GateHeads(wide_, w.qkv.out, rows.rows, rope.shape.heads,
                                                  rope.shape.head_dim, narrow_, stream_.get()),
                               kStep);
  }
  return linear_.Run(w.o, linear, narrow_, delta_);
}

absl::Status CudaDecoder::Delta(int64_t layer, int64_t number, const kernels::StepRows& rows,
                                const LinearRows& linear, const StepForm& form) {
  const model::ModelConfig& config = model_.config();
  const DeltaWeights& w = model_.layers()[layer].delta;
  const KvLayout& kv = kv_memory_.layout();
  DORAD_RETURN_IF_ERROR(linear_.Run(w.qkvz, linear, normed_, wide_));
  DORAD_RETURN_IF_ERROR(linear_.Run(w.ba, linear, normed_, factors_));
  kernels::DeltaParams delta;
  delta.isa = model_.isa();
  delta.rows = rows;
  delta.single_rows = form.single_rows;
  delta.shape = DeltaShapeOf(config.delta);
  delta.states = {kv_memory_.as<>(),
                  kv.plane_bytes(),
                  static_cast<int32_t>(kv.page_bytes()),
                  static_cast<int32_t>(states_.pages()),
                  static_cast<int32_t>(number * states_.net_blocks()),
                  static_cast<int32_t>(states_.tile()),
                  static_cast<int32_t>(states_.state_blocks())};
  delta.qkvz = wide_;
  delta.factors = factors_;
  delta.convolution = w.convolution;
  delta.decay_log = w.decay_log;
  delta.time_bias = w.time_bias;
  delta.norm = w.norm;
  delta.eps = static_cast<float>(config.rms_norm_eps);
  delta.mixed = mixed_;
  delta.out = narrow_;
  DORAD_RETURN_IF_CUDA_ERROR(kernels::DeltaConvolution(delta, stream_.get()), kStep);
  DORAD_RETURN_IF_CUDA_ERROR(kernels::DeltaRule(delta, stream_.get()), kStep);
  DORAD_RETURN_IF_CUDA_ERROR(kernels::DeltaNorm(delta, stream_.get()), kStep);
  return linear_.Run(w.out, linear, narrow_, delta_);
}

absl::Status CudaDecoder::Mlp(int64_t layer, const LinearRows& linear) {
  const LayerWeights& w = model_.layers()[layer];
  DORAD_RETURN_IF_ERROR(linear_.Run(w.gate_up, linear, normed_, wide_));
  DORAD_RETURN_IF_ERROR(Activate(layer, linear.rows));
  return linear_.Run(w.down, linear, narrow_, delta_);
}

absl::Status CudaDecoder::PlanAttention(absl::Span<const kernels::StepRows> rows,
                                        const StepForm& form) {
  for (size_t group = 0; group < plans_.size(); ++group) {
    kernels::AttentionPlanParams plan;
    plan.isa = model_.isa();
    plan.rows = rows[group];
    plan.shape = Shape();
    plan.window = static_cast<int32_t>(groups_.windows[group]);
    plan.row_tiles = form.row_tiles();
    plan.shares = form.shares;
    plan.is_fp8 = model_.config().fp8_kv;
    plan.workspace = plans_[group];
    DORAD_RETURN_IF_CUDA_ERROR(kernels::PlanAttention(plan, stream_.get()), kStep);
  }
  return absl::OkStatus();
}

absl::Status CudaDecoder::EmbedImages(absl::Span<const ImageRows> images) {
  const int64_t width = model_.config().hidden_size;
  for (const ImageRows& rows : images) {
    DORAD_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(residual_ + rows.begin * width, rows.features->Row(0, rows.first),
                        rows.count * width * sizeof(float), cudaMemcpyDeviceToDevice,
                        stream_.get()),
        kStep);
  }
  return absl::OkStatus();
}

absl::Status CudaDecoder::AddFeatures(int64_t layer, absl::Span<const ImageRows> images) {
  const int64_t width = model_.config().hidden_size;
  for (const ImageRows& rows : images) {
    if (layer + 1 >= rows.features->levels()) continue;
    DORAD_RETURN_IF_CUDA_ERROR(
        kernels::AddInPlace(delta_ + rows.begin * width, rows.features->Row(layer + 1, rows.first),
                            rows.count * width, stream_.get()),
        kStep);
  }
  return absl::OkStatus();
}

absl::Status CudaDecoder::Forward(absl::Span<const kernels::StepRows> by_group,
                                  const LinearRows& linear, absl::Span<const ImageRows> images,
                                  const StepForm& form) {
  const model::ModelConfig& config = model_.config();
  const kernels::StepRows& rows = by_group.front();
  DORAD_CHECK(rows.rows <= options_.max_rows);
  kernels::EmbedParams embed;
  embed.rows = rows;
  embed.weight = model_.embedding();
  embed.size = static_cast<int32_t>(config.hidden_size);
  // As transformers has it: in the dtype of the weights.
  embed.factor = __bfloat162float(__float2bfloat16_rn(static_cast<float>(config.embedding_scale)));
  embed.adapters = linear.table;
  embed.module = config.embedding;
  embed.segments = linear.segments;
  embed.out = residual_;
  DORAD_RETURN_IF_CUDA_ERROR(kernels::Embed(embed, stream_.get()), kStep);
  DORAD_RETURN_IF_ERROR(EmbedImages(images));
  DORAD_RETURN_IF_ERROR(PlanAttention(by_group, form));
  int64_t net = 0;                     // the next delta-net
  const float* output_norm = nullptr;  // of the last layer's output, not yet added
  for (int64_t layer = 0; layer < config.num_layers(); ++layer) {
    const LayerWeights& w = model_.layers()[layer];
    DORAD_RETURN_IF_ERROR(Norm(rows.rows, /*first=*/layer == 0, output_norm, w.attention_norm));
    if (config.layers[layer].delta) {
      DORAD_RETURN_IF_ERROR(Delta(layer, net++, rows, linear, form));
    } else {
      const model::KvGroups::Place& place = groups_.places[static_cast<size_t>(layer - net)];
      DORAD_RETURN_IF_ERROR(Attention(layer, place, by_group[place.group], linear, form));
    }
    DORAD_RETURN_IF_ERROR(Norm(rows.rows, /*first=*/false, w.attention_output_norm, w.mlp_norm));
    DORAD_RETURN_IF_ERROR(Mlp(layer, linear));
    DORAD_RETURN_IF_ERROR(AddFeatures(layer, images));
    output_norm = w.mlp_output_norm;
  }
  // Adds the last output and norms all rows; Logits norms again for a subset of rows.
  return Norm(rows.rows, /*first=*/false, output_norm, model_.final_norm());
}

absl::StatusOr<const float*> CudaDecoder::Logits(const LogitsBlock& block) {
  DORAD_CHECK(block.linear.rows <= options_.max_logits_rows);
  if (block.row_indices == nullptr) {
    DORAD_RETURN_IF_ERROR(linear_.Run(model_.head(), block.linear, normed_, logits_));
    return logits_;
  }
  kernels::AddRmsNormParams norm;
  norm.rows = static_cast<int32_t>(block.linear.rows);
  norm.size = static_cast<int32_t>(model_.config().hidden_size);
  norm.residual = residual_;
  norm.weight = model_.final_norm();
  norm.eps = static_cast<float>(model_.config().rms_norm_eps);
  norm.gather = block.row_indices;
  norm.out = normed_;
  DORAD_RETURN_IF_CUDA_ERROR(kernels::AddRmsNorm(norm, stream_.get()), kStep);
  DORAD_RETURN_IF_ERROR(linear_.Run(model_.head(), block.linear, normed_, logits_));
  return logits_;
}

}  // namespace dorad::cuda
