#include "server/model/refused_keys.h"

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace dorad::model {
namespace {

using Json = nlohmann::json;

struct RefusedKey {
  const char* key;
  const char* what;
};

// Neutral when null, false, 0 or empty.
constexpr RefusedKey kFeatures[] = {
    {"quantization_config", "quantised weights"},
    {"compression_config", "compressed weights"},
    {"audio_config", "a model with audio"},
    {"is_encoder_decoder", "an encoder"},
    {"add_cross_attention", "cross attention"},
    {"num_local_experts", "a mixture of experts"},
    {"num_experts", "a mixture of experts"},
    {"n_routed_experts", "a mixture of experts"},
    {"kv_lora_rank", "latent attention"},
    {"per_layer_config", "a configuration for each layer"},
    {"attention_chunk_size", "chunked attention"},
    {"use_bidirectional_attention", "attention in both directions"},
    {"alibi", "linear position biases"},
    {"no_rope_layers", "layers without rotary embedding"},
    {"rope_interleave", "interleaved rotary pairs"},
    {"clip_qkv", "clipped queries and keys"},
    {"qk_layernorm", "layer norms on queries and keys"},
    {"attn_logit_softcapping", "capped attention logits"},
    {"final_logit_softcapping", "capped logits"},
    {"scale_depth", "scaled residuals"},
};

constexpr RefusedKey kParts[] = {
    {"vision_config", "a model with images"},
    {"text_config", "a model of several parts"},
};

constexpr RefusedKey kScalar[] = {{"query_pre_attn_scalar", "a scale of its own in attention"}};

// Neutral when null or 1.
constexpr RefusedKey kMultipliers[] = {
    {"attention_multiplier", "a scale of its own in attention"},
    {"embedding_multiplier", "scaled embeddings"},
    {"residual_multiplier", "scaled residuals"},
    {"logits_scaling", "scaled logits"},
    {"logit_scale", "scaled logits"},
    {"scale_emb", "scaled embeddings"},
};

bool IsOff(const Json& value) {
  if (value.is_boolean()) return !value.get<bool>();
  if (value.is_number()) return value.get<double>() == 0.0;
  return value.is_string() ? value.get_ref<const std::string&>().empty() : value.empty();
}

void Refuse(Fields& config, const RefusedKey& key, const Json& value) {
  config.Unsupported(key.key, absl::StrCat(key.what, " is not supported: ", Shown(value)));
}

}  // namespace

void RefuseUnsupportedKeys(Fields& config, bool has_parts, bool has_scalar) {
  const auto refuse = [&config](absl::Span<const RefusedKey> keys) {
    for (const RefusedKey& refused : keys) {
      const Json* value = config.Find(refused.key);
      if (value != nullptr && !IsOff(*value)) Refuse(config, refused, *value);
    }
  };
  refuse(kFeatures);
  if (!has_parts) refuse(kParts);
  if (!has_scalar) refuse(kScalar);
  for (const RefusedKey& refused : kMultipliers) {
    const Json* value = config.Find(refused.key);
    const bool is_one = value != nullptr && value->is_number() && value->get<double>() == 1.0;
    if (value != nullptr && !is_one) Refuse(config, refused, *value);
  }
  const Json* causal = config.Find("is_causal");
  if (causal != nullptr && *causal != true) {
    Refuse(config, {"is_causal", "attention in both directions"}, *causal);
  }
  const Json* code = config.Find("auto_map");
  if (code != nullptr && (code->contains("AutoModelForCausalLM") || code->contains("AutoModel"))) {
    Refuse(config, {"auto_map", "a model with code of its own"}, *code);
  }
}

}  // namespace dorad::model
