// The supported model families: one row of a table each, with the differences between them.
// Torch-free. Constants, thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "absl/types/span.h"

namespace dorad::model {

class Fields;
struct ModelConfig;
struct VisionConfig;

// The defaults are transformers' for absent keys.
struct Family {
  const char* model_type;
  const char* architecture;
  // Of text_config, in a model of several parts: the text decoder is served, and the other parts'
  // weights are not held. nullptr: the model is a text decoder.
  const char* text_type = nullptr;
  const char* activation_key = "hidden_act";
  const char* default_activation = "silu";
  struct Sizes {
    int64_t vocab, hidden, inner, layers, heads;
  };
  // nullopt: must be given. transformers 4 wrote the text of several parts without its defaults.
  std::optional<Sizes> default_sizes;
  std::optional<int64_t> default_kv_heads;  // nullopt: as many as heads
  int64_t default_head_dim = 0;             // 0: hidden_size / heads
  int64_t default_context = 0;
  double default_eps = 1e-6;
  double default_theta = 10000.0;
  // Of query_pre_attn_scalar; nullopt: head_dim is the scalar, and the key is refused.
  std::optional<double> default_query_scalar;
  // Of rope_local_base_freq; nullopt: layers that slide have no rotary table of their own.
  std::optional<double> default_local_theta;
  int64_t default_max_window_layers = 28;  // of kByLayer
  std::optional<int32_t> default_eos;
  enum Windows { kNone, kEveryLayer, kByLayer, kByPattern } windows = kNone;
  bool delta_nets = false;  // by layer_types or full_attention_interval
  bool default_tied = false;
  bool qkv_bias = false;              // always
  bool reads_attention_bias = false;  // of q, k, v and o
  bool reads_mlp_bias = false;
  bool qk_norm = false;
  bool output_gate = false;
  bool output_norms = false;
  bool norms_add_one = false;
  bool scales_embedding = false;  // by the root of hidden_size
  // Of partial_rotary_factor; 1: other factors are refused.
  double default_rotary_part = 1.0;
  // The rotary embedding has three positions (time, height, width); they are equal in text.
  bool mrope = false;
  std::array<int64_t, 3> default_mrope = {};  // frequencies of each position
  enum MropeOrder { kByTurns, kInSections } mrope_order = kByTurns;
  // Tensors of these beginnings are not loaded (transformers: _keys_to_ignore_on_load_unexpected).
  std::array<const char*, 2> ignored_parts = {};
  // Reads the tower; nullptr: it is not served.
  VisionConfig (*read_vision)(Fields& root, const ModelConfig& text) = nullptr;

  bool has_parts() const { return text_type != nullptr; }
};

absl::Span<const Family> Families();

}  // namespace dorad::model
