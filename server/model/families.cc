#include "server/model/families.h"

#include "server/model/vision_readers.h"

namespace dorad::model {
namespace {

constexpr Family Gemma3Text() {
  return {.model_type = "gemma3_text",
          .architecture = "Gemma3ForCausalLM",
          .activation_key = "hidden_activation",
          .default_activation = "gelu_pytorch_tanh",
          .default_sizes = {{262208, 2304, 9216, 26, 8}},
          .default_kv_heads = 4,
          .default_head_dim = 256,
          .default_context = 131072,
          .default_theta = 1e6,
          .default_query_scalar = 256.0,
          .default_local_theta = 10000.0,
          .default_eos = 1,
          .windows = Family::kByPattern,
          .default_tied = true,
          .reads_attention_bias = true,
          .qk_norm = true,
          .output_norms = true,
          .norms_add_one = true,
          .scales_embedding = true};
}

constexpr Family Gemma3() {
  Family family = Gemma3Text();
  family.text_type = family.model_type;
  family.model_type = "gemma3";
  family.architecture = "Gemma3ForConditionalGeneration";
  family.read_vision = ReadGemma3Vision;
  return family;
}

constexpr Family Qwen35Text() {
  return {.model_type = "qwen3_5_text",
          .architecture = "Qwen3_5ForCausalLM",
          .default_sizes = {{248320, 4096, 12288, 32, 16}},
          .default_kv_heads = 4,
          .default_head_dim = 256,
          .default_context = 32768,
          .delta_nets = true,
          .reads_attention_bias = true,
          .qk_norm = true,
          .output_gate = true,
          .norms_add_one = true,
          .default_rotary_part = 0.25,
          .mrope = true,
          .default_mrope = {11, 11, 10},
          .ignored_parts = {"mtp.", "model.visual."}};
}

constexpr Family Qwen35() {
  Family family = Qwen35Text();
  family.text_type = family.model_type;
  family.model_type = "qwen3_5";
  family.architecture = "Qwen3_5ForConditionalGeneration";
  family.ignored_parts = {"mtp."};
  family.read_vision = ReadQwen35Vision;
  return family;
}

constexpr Family kFamilies[] = {
    {.model_type = "llama",
     .architecture = "LlamaForCausalLM",
     .default_context = 2048,
     .default_eos = 2,
     .reads_attention_bias = true,
     .reads_mlp_bias = true},
    {.model_type = "mistral",
     .architecture = "MistralForCausalLM",
     .default_kv_heads = 8,
     .default_context = 4096 * 32,
     .default_eos = 2,
     .windows = Family::kEveryLayer},
    {.model_type = "qwen2",
     .architecture = "Qwen2ForCausalLM",
     .default_kv_heads = 32,
     .default_context = 32768,
     .windows = Family::kByLayer,
     .qkv_bias = true},
    {.model_type = "qwen3",
     .architecture = "Qwen3ForCausalLM",
     .default_kv_heads = 32,
     .default_head_dim = 128,
     .default_context = 32768,
     .windows = Family::kByLayer,
     .reads_attention_bias = true,
     .qk_norm = true},
    {.model_type = "mistral3",
     .architecture = "Mistral3ForConditionalGeneration",
     .text_type = "mistral",
     .default_sizes = {{32000, 4096, 14336, 32, 32}},
     .default_kv_heads = 8,
     .default_context = 4096 * 32,
     .default_eos = 2,
     .windows = Family::kEveryLayer,
     .default_tied = true,
     .read_vision = ReadMistral3Vision},
    {.model_type = "qwen2_5_vl",
     .architecture = "Qwen2_5_VLForConditionalGeneration",
     .text_type = "qwen2_5_vl_text",
     .default_sizes = {{152064, 8192, 29568, 80, 64}},
     .default_kv_heads = 8,
     .default_context = 32768,
     .default_eps = 1e-5,
     .default_theta = 1e6,
     .default_max_window_layers = 80,
     .default_eos = 151645,
     .windows = Family::kByLayer,
     .qkv_bias = true,
     .mrope = true,
     .default_mrope = {16, 24, 24},
     .mrope_order = Family::kInSections,
     .read_vision = ReadQwen25Vision},
    {.model_type = "qwen3_vl",
     .architecture = "Qwen3VLForConditionalGeneration",
     .text_type = "qwen3_vl_text",
     .default_sizes = {{151936, 4096, 22016, 32, 32}},
     .default_kv_heads = 32,
     .default_head_dim = 128,
     .default_context = 128000,
     .default_theta = 5e5,
     .reads_attention_bias = true,
     .qk_norm = true,
     .mrope = true,
     .default_mrope = {24, 20, 20},
     .read_vision = ReadQwen3Vision},
    Qwen35(),
    Qwen35Text(),
    Gemma3(),
    Gemma3Text(),
};

}  // namespace

absl::Span<const Family> Families() { return kFamilies; }

}  // namespace dorad::model
