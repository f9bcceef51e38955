// A decoder as data, read from a Hugging Face config.json: what each layer computes, and with which
// modules. Torch-free. Plain values, thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/adapter/peft/base_modules.h"
#include "server/model/vision_config.h"

namespace dorad::model {

enum class RopeKind { kDefault, kLinear, kDynamicNtk, kLlama3, kYarn, kLongRope };

// One table of rotary angles: transformers' modeling_rope_utils, by its names.
struct RopeConfig {
  RopeKind kind = RopeKind::kDefault;
  int64_t width = 0;  // of the part of a head that turns, even
  // With three positions: for each frequency (width / 2) the one that turns it, 0 time, 1 height,
  // 2 width. Empty: all are equal.
  std::vector<uint8_t> axes;
  double theta = 10000.0;
  double factor = 1.0;
  int64_t original_max_position = 0;
  // llama3
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  // yarn
  double attention_factor = 0.0;  // 0: derived from factor (and mscale)
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double mscale = 0.0;
  double mscale_all_dim = 0.0;
  bool truncate = true;
  // longrope
  std::vector<double> long_factor;
  std::vector<double> short_factor;
};

enum class Activation { kSilu, kGeluTanh };

// Modules by their ids: places in ListModules' result.
struct AttentionSpec {
  int q = 0, k = 0, v = 0, o = 0;
  bool qkv_bias = false;
  bool output_bias = false;
  bool qk_norm = false;
  // q gives a query and a gate for each head, and the output is multiplied by sigmoid(gate).
  bool output_gate = false;
  int rope = 0;               // of ModelConfig::ropes
  int64_t window = 0;         // the last positions that a row sees, its own included; 0: all
  double query_scalar = 0.0;  // scores are divided by its square root
};

// A gated delta-net (transformers: Qwen3_5GatedDeltaNet): a short convolution over the sequence,
// then a recurrence whose state is a matrix for each value head.
struct DeltaSpec {
  int qkv = 0, z = 0, b = 0, a = 0, out = 0;
};

// Of all delta-nets of a model.
struct DeltaSizes {
  int64_t key_heads = 0;    // of queries and keys
  int64_t value_heads = 0;  // a multiple of key_heads
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t convolution = 0;  // rows that an output of the convolution sees

  int64_t key_size() const { return key_heads * key_dim; }
  int64_t value_size() const { return value_heads * value_dim; }
  int64_t qkv_size() const { return 2 * key_size() + value_size(); }
};

struct MlpSpec {
  int gate = 0, up = 0, down = 0;
  bool bias = false;
  Activation activation = Activation::kSilu;
};

// x += mixer(norm(x)), then x += mlp(norm(x)). The mixer is `delta` if it is set, else `attention`.
struct LayerSpec {
  AttentionSpec attention;
  std::optional<DeltaSpec> delta;
  MlpSpec mlp;
  // The outputs of both are normed too, before they are added.
  bool output_norms = false;
};

// The names of modules: body + "layers.3.mlp.up_proj", body + "embed_tokens", head,
// tower + "blocks.3.attn.qkv", projector + "mm_soft_emb_norm".
struct Spelling {
  std::string body;
  std::string head;
  std::string tower = "";
  std::string projector = "";  // of tensors alone
};

struct ModelConfig {
  std::string model_type;  // of families.h
  // In memory, as adapters have them, then others of files and older adapters.
  std::vector<Spelling> spellings = {{"model.", "lm_head"}};
  // Of a model of several parts: the beginnings of the names of tensors that are not held, and the
  // modules of the checkpoint there, by their names in memory.
  std::vector<std::string> other_parts;
  std::vector<std::string> other_modules;
  std::optional<VisionConfig> vision;  // nullopt: no tower is served
  // The beginnings of the names of tensors that transformers does not load either.
  std::vector<std::string> ignored_parts;

  bool IsOfOtherPart(const std::string& tensor) const;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t context_length = 0;  // max_position_embeddings
  double rms_norm_eps = 1e-6;
  bool norms_add_one = false;  // a norm's factor is 1 + its tensor
  // The factor of embeddings, before it is rounded to the dtype of computation.
  double embedding_scale = 1.0;
  bool tied_embeddings = false;
  std::vector<LayerSpec> layers;
  DeltaSizes delta;  // zeros without delta-nets
  std::vector<RopeConfig> ropes = {{}};
  int embedding = 0;  // module ids
  int head = 0;
  // Of images and videos in prompts: placeholders and their frames.
  std::vector<int32_t> image_token_ids;
  std::vector<int32_t> eos_token_ids;  // of generation_config.json, else of config.json
  // The cache has keys and values in eight bits, not in the dtype of computation (engine.kv_dtype).
  bool fp8_kv = false;

  int64_t q_size() const { return num_heads * head_dim; }
  int64_t kv_size() const { return num_kv_heads * head_dim; }
  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  // Layers with keys and values, and layers with a recurrent state.
  int64_t num_attention_layers() const { return num_layers() - num_delta_layers(); }
  int64_t num_delta_layers() const;

  int num_modules() const;
  // Whether rows of images have three positions of the rotary embedding: time, height and width.
  bool has_rotary_positions() const;
  // Makes the tower a part that is not served.
  void DropVision();

  // Gives every module its id, those of the tower after the decoder's. Modules with the same input
  // have consecutive ones.
  void NumberModules();
};

// Reads DIR/config.json and DIR/generation_config.json (optional). INVALID_ARGUMENT listing every
// problem (MODEL_UNSUPPORTED names an architecture or feature that this server does not have;
// MODEL_CONFIG_INVALID an impossible value), NOT_FOUND (MODEL_NOT_FOUND).
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& dir);

// Names and shapes of all adaptable modules, indexed by their ids.
std::vector<adapter::BaseModule> ListModules(const ModelConfig& config, const Spelling& names);
// The same in every spelling.
adapter::BaseModules MakeModules(const ModelConfig& config);

// Inverse frequencies [width / 2] for sequences up to position `length`, and the factor of cos and
// sin.
struct RopeFrequencies {
  std::vector<double> inverse;
  double attention_scale = 1.0;
};
RopeFrequencies ComputeRopeFrequencies(const RopeConfig& rope, int64_t length);

// cos and sin, times the attention scale, of positions [0, positions): [positions, width / 2] each.
// As in transformers, angles are formed in fp32 from fp32 inverse frequencies: at large positions
// the rounding of the angle is visible in the result.
void FillRopeTable(const RopeConfig& rope, int64_t positions, float* cos, float* sin);

}  // namespace dorad::model
