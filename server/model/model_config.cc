#include "server/model/model_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "server/model/checkpoint.h"
#include "server/model/config_json.h"
#include "server/model/delta_config.h"
#include "server/model/families.h"
#include "server/model/refused_keys.h"
#include "server/model/rope_config.h"

namespace dorad::model {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxConfigBytes = 4 << 20;
constexpr char kConfigFile[] = "config.json";
constexpr char kGenerationFile[] = "generation_config.json";

// Larger numbers are mistakes; products of any two still fit.
constexpr IntRange kVocab{1, 1 << 24};
constexpr IntRange kWidth{1, 1 << 20};
constexpr IntRange kLayers{1, 1024};
constexpr IntRange kHeads{1, 1024};
constexpr IntRange kHeadDim{2, 1024};
constexpr IntRange kPositions{1, 1 << 24};

const Family* FindFamily(Fields& fields) {
  const Json* type = fields.Find("model_type");
  if (type == nullptr || !type->is_string()) {
    fields.Invalid("model_type", type == nullptr ? "is missing" : "must be a string");
    return nullptr;
  }
  std::vector<std::string> names;
  for (const Family& family : Families()) {
    if (*type == family.model_type) return &family;
    names.push_back(family.model_type);
  }
  fields.Unsupported("model_type",
                     absl::StrCat(Shown(*type), " is not one of ", absl::StrJoin(names, ", ")));
  return nullptr;
}

// A classifier or a bare body has the family's model_type, too.
void CheckArchitectures(Fields& fields, const Family& family) {
  const Json* architectures = fields.Find("architectures");
  if (architectures == nullptr || *architectures == Json::array({family.architecture})) return;
  fields.Unsupported("architectures", absl::StrCat("must be [\"", family.architecture, "\"], not ",
                                                   Shown(*architectures)));
}

// The fields of the text decoder: in text_config, or beside vision_config as transformers 4 wrote
// some models.
Fields TextFields(Fields& root, const Family& family) {
  if (!family.has_parts() || !root.Has("text_config")) return root;
  Fields text = root.Child("text_config");
  const Json* type = text.Find("model_type");
  if (type != nullptr && *type != family.text_type) {
    text.Unsupported("model_type", absl::StrCat("must be \"", family.text_type, "\" in a ",
                                                family.model_type, " model, not ", Shown(*type)));
  }
  return text;
}

// Reads the names in the weights' headers. Missing or broken files are reported by the import.
void ReadTensorNames(const std::string& dir, Fields& root, ModelConfig* config) {
  const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(dir);
  if (!checkpoint.ok()) return;
  for (const auto& [name, tensor] : checkpoint->tensors()) {
    absl::string_view module = name;
    if (tensor.shape.size() < 2 || !absl::ConsumeSuffix(&module, ".weight")) continue;
    // Of a family that ties unless told otherwise, transformers keeps a head that is stored.
    const bool is_head =
        std::any_of(config->spellings.begin(), config->spellings.end(),
                    [module](const Spelling& names) { return module == names.head; });
    if (is_head && !root.Has("tie_word_embeddings")) config->tied_embeddings = false;
    if (!config->IsOfOtherPart(name)) continue;
    config->other_modules.push_back(
        absl::StrCat(absl::StartsWith(module, "model.") ? "" : "model.", module));
  }
}

// A wrong size becomes 0, so that it is reported once.
void ReadSizes(Fields& fields, const Family& family, ModelConfig* config) {
  const auto size = [&](const char* key, int64_t Family::Sizes::*fallback, IntRange range) {
    const auto& defaults = family.default_sizes;
    return fields.Int(key, defaults ? std::optional(*defaults.*fallback) : std::nullopt, range);
  };
  using Sizes = Family::Sizes;
  config->vocab_size = size("vocab_size", &Sizes::vocab, kVocab);
  config->hidden_size = size("hidden_size", &Sizes::hidden, kWidth);
  config->intermediate_size = size("intermediate_size", &Sizes::inner, kWidth);
  config->layers.resize(size("num_hidden_layers", &Sizes::layers, kLayers));
  config->num_heads = size("num_attention_heads", &Sizes::heads, kHeads);
  config->context_length =
      fields.Int("max_position_embeddings", family.default_context, kPositions);
  config->rms_norm_eps = fields.Number("rms_norm_eps", family.default_eps, {0.0, 0.1});
}

void ReadHeads(Fields& fields, const Family& family, ModelConfig* config) {
  const int64_t heads = config->num_heads;
  config->num_kv_heads =
      fields.IsNull("num_key_value_heads")
          ? heads
          : fields.Int("num_key_value_heads", family.default_kv_heads.value_or(heads), kHeads);
  if (config->num_kv_heads > 0 && heads % config->num_kv_heads != 0) {
    fields.Invalid("num_key_value_heads", absl::StrCat("must divide num_attention_heads (", heads,
                                                       "), not be ", config->num_kv_heads));
  }
  if (fields.Has("head_dim") || family.default_head_dim != 0) {
    config->head_dim = fields.Int("head_dim", family.default_head_dim, kHeadDim);
  } else if (config->hidden_size > 0 && heads > 0) {
    config->head_dim = config->hidden_size / heads;
    if (config->hidden_size % heads != 0 || config->head_dim < kHeadDim.min ||
        config->head_dim > kHeadDim.max) {
      fields.Invalid("hidden_size", absl::StrCat(config->hidden_size, " does not give ", heads,
                                                 " heads a sensible size"));
    }
  }
  if (config->head_dim % 2 != 0) {
    fields.Invalid("head_dim", absl::StrCat("must be even, not ", config->head_dim));
  }
}

std::optional<Activation> ReadActivation(Fields& fields, const Family& family) {
  const std::string name = fields.Text(family.activation_key, family.default_activation);
  if (name == "silu" || name == "swish") return Activation::kSilu;  // two names of one function
  if (name == "gelu_pytorch_tanh") return Activation::kGeluTanh;
  fields.Unsupported(family.activation_key,
                     absl::StrCat("only silu and gelu_pytorch_tanh are supported, not ",
                                  Shown(*fields.Find(family.activation_key))));
  return std::nullopt;
}

// What all layers have in common.
void ReadLayers(Fields& fields, const Family& family, ModelConfig* config) {
  LayerSpec layer;
  AttentionSpec& attention = layer.attention;
  const bool biases = family.reads_attention_bias && fields.Bool("attention_bias", false);
  attention.qkv_bias = family.qkv_bias || biases;
  attention.output_bias = biases;
  attention.qk_norm = family.qk_norm;
  attention.output_gate = family.output_gate;
  attention.query_scalar = static_cast<double>(config->head_dim);
  if (family.default_query_scalar) {
    attention.query_scalar =
        fields.Number("query_pre_attn_scalar", family.default_query_scalar, {1e-6, 1e6});
  }
  layer.mlp.bias = family.reads_mlp_bias && fields.Bool("mlp_bias", false);
  layer.mlp.activation = ReadActivation(fields, family).value_or(Activation::kSilu);
  layer.output_norms = family.output_norms;
  config->layers.assign(config->layers.size(), layer);
  config->norms_add_one = family.norms_add_one;
  if (family.scales_embedding) {
    config->embedding_scale = std::sqrt(static_cast<double>(config->hidden_size));
  }
}

// For each layer of layer_types whether it slides. Empty when absent or wrong.
std::vector<bool> ReadLayerTypes(Fields& fields, int64_t num_layers) {
  const Json* types = fields.Find("layer_types");
  if (types == nullptr || num_layers == 0) return {};
  if (!types->is_array() || types->size() != static_cast<size_t>(num_layers)) {
    fields.Invalid("layer_types", absl::StrCat("must be a list of ", num_layers, " names"));
    return {};
  }
  std::vector<bool> slides;
  for (const Json& type : *types) {
    if (type != "full_attention" && type != "sliding_attention") {
      fields.Unsupported("layer_types",
                         absl::StrCat(Shown(type), " is neither full nor sliding attention"));
      return {};
    }
    slides.push_back(type == "sliding_attention");
  }
  return slides;
}

// The window in the config, 0: none.
int64_t ReadWindow(Fields& fields, const Family& family) {
  constexpr int64_t kDefaultWindow = 4096;  // of transformers, when the key is absent
  const bool in_use =
      family.windows == Family::kEveryLayer || family.windows == Family::kByPattern ||
      (family.windows == Family::kByLayer && fields.Bool("use_sliding_window", false));
  if (!in_use || fields.IsNull("sliding_window")) return 0;
  return fields.Int("sliding_window", kDefaultWindow, kPositions);
}

// For each layer whether it slides, without layer_types.
std::vector<bool> DefaultTypes(Fields& fields, const Family& family, int64_t window,
                               int64_t layers) {
  std::vector<bool> slides(layers);
  if (family.windows == Family::kByPattern) {
    const int64_t pattern = fields.Int("sliding_window_pattern", 6, {1, INT32_MAX});
    for (int64_t i = 0; i < layers; ++i) slides[i] = (i + 1) % pattern != 0;
  } else {
    const int64_t first =
        fields.Int("max_window_layers", family.default_max_window_layers, {0, INT32_MAX});
    for (int64_t i = first; i < layers; ++i) slides[i] = window > 0;
  }
  return slides;
}

void ReadWindows(Fields& fields, const Family& family, ModelConfig* config) {
  const int64_t layers = config->num_layers();
  const int64_t window = ReadWindow(fields, family);
  std::vector<bool> slides = ReadLayerTypes(fields, layers);
  if (family.windows == Family::kByLayer || family.windows == Family::kByPattern) {
    const std::vector<bool> by_default = DefaultTypes(fields, family, window, layers);
    if (slides.empty()) slides = by_default;
    for (int64_t i = 0; i < layers; ++i) {
      if (slides[i] && window == 0) {
        fields.Invalid("layer_types", absl::StrCat("layer ", i, " slides, but no window is given"));
        return;
      }
      config->layers[i].attention.window = slides[i] ? window : 0;
    }
    return;
  }
  // For any layer_types, transformers' Llama has no windows and its Mistral slides in every layer;
  // but their key/value caches follow layer_types. Where the two differ no result is right.
  if (family.windows == Family::kNone && fields.Has("sliding_window")) {
    fields.Unsupported("sliding_window", "this family has no sliding window");
  }
  for (const bool slide : slides) {
    if (slide != (window > 0)) {
      fields.Unsupported("layer_types", "must agree with sliding_window in every layer");
      break;
    }
  }
  for (LayerSpec& layer : config->layers) layer.attention.window = window;
}

void ReadImageTokens(Fields& root, ModelConfig* config) {
  for (const char* const key : {"image_token_id", "video_token_id", "image_token_index"}) {
    if (!root.Has(key)) continue;
    const int64_t id = root.Int(key, std::nullopt, {0, INT32_MAX});
    config->image_token_ids.push_back(static_cast<int32_t>(id));
  }
}

// One id or a list. nullopt when the key is absent.
std::optional<std::vector<int32_t>> ReadEos(Fields& fields, int64_t vocab_size) {
  constexpr char kKey[] = "eos_token_id";
  if (fields.IsNull(kKey)) return std::vector<int32_t>();
  const Json* value = fields.Find(kKey);
  if (value == nullptr) return std::nullopt;
  std::vector<int32_t> ids;
  for (const Json& id : value->is_array() ? *value : Json::array({*value})) {
    const bool ok =
        id.is_number_integer() && id >= 0 && id < (vocab_size > 0 ? vocab_size : kVocab.max);
    if (!ok) {
      fields.Invalid(kKey, absl::StrCat(Shown(id), " is not a token id below ", vocab_size));
      break;
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

// generation_config.json takes precedence, as in transformers; it may be absent.
absl::Status ReadEosTokens(const std::string& dir, Fields& root, Fields& text, const Family& family,
                           std::vector<Violation>* violations, ModelConfig* config) {
  absl::StatusOr<Json> generation = ReadJsonObject(dir, kGenerationFile, kMaxConfigBytes);
  std::optional<std::vector<int32_t>> ids;
  if (generation.ok()) {
    Fields fields(kGenerationFile, &*generation, violations);
    ids = ReadEos(fields, config->vocab_size);
    if (ids && ids->empty()) ids.reset();  // an empty list does not override the model's own
  } else if (absl::IsInvalidArgument(generation.status())) {
    for (Violation& violation : ViolationsOf(generation.status())) {
      violations->push_back(std::move(violation));
    }
  } else if (!absl::IsNotFound(generation.status())) {
    return generation.status();
  }
  if (!ids) ids = ReadEos(root, config->vocab_size);
  if (!ids) ids = ReadEos(text, config->vocab_size);
  if (!ids && family.default_eos) ids.emplace(1, *family.default_eos);
  config->eos_token_ids = ids.value_or(std::vector<int32_t>());
  return absl::OkStatus();
}

void SetOtherParts(ModelConfig* config) {
  config->other_parts.clear();
  for (const char* const outer : {"", "model."}) {
    for (const char* const part : {"visual.", "vision_tower.", "multi_modal_projector."}) {
      config->other_parts.push_back(absl::StrCat(outer, part));
    }
  }
}

void SetPartNames(ModelConfig* config) {
  // In memory; in the files of Gemma and Mistral; in files of Qwen, and in adapters of transformers
  // before 4.52.
  config->spellings = {{"model.language_model.", "lm_head"},
                       {"language_model.model.", "language_model.lm_head"},
                       {"model.", "lm_head"}};
  SetOtherParts(config);
}

void SpellTower(const char* part, ModelConfig* config) {
  bool first = true;
  for (Spelling& names : config->spellings) {
    const char* const outer = std::exchange(first, false) ? "model." : "";
    names.tower = absl::StrCat(outer, part);
    names.projector = absl::StrCat(outer, config->vision->names.projector);
  }
}

// The tower's convolution and position table are run, but no adapter changes them.
void ServeVision(Fields& root, const Family& family, ModelConfig* config) {
  config->vision = family.read_vision(root, *config);
  const int32_t image = config->vision->image_token_id;
  if (std::count(config->image_token_ids.begin(), config->image_token_ids.end(), image) == 0) {
    config->image_token_ids.push_back(image);
  }
  const TowerNames& names = config->vision->names;
  SpellTower(names.part, config);
  if (*names.other_part != '\0') {
    ModelConfig other = *config;
    SpellTower(names.other_part, &other);
    config->spellings.insert(config->spellings.end(), other.spellings.begin(),
                             other.spellings.end());
  }
  const std::string& tower = config->spellings.front().tower;
  config->other_modules = {tower + names.patch};
  if (config->vision->style.position_table) config->other_modules.push_back(tower + names.table);
  config->other_parts.clear();
  // A head of the tower has no effect on the decoder's rows.
  if (config->vision->style.pools_patches) {
    for (const Spelling& spelling : config->spellings) {
      config->other_parts.push_back(spelling.tower + "head.");
    }
  }
}

}  // namespace

bool ModelConfig::IsOfOtherPart(const std::string& tensor) const {
  return std::any_of(other_parts.begin(), other_parts.end(),
                     [&](const std::string& part) { return absl::StartsWith(tensor, part); });
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& dir) {
  absl::StatusOr<Json> document = ReadJsonObject(dir, kConfigFile, kMaxConfigBytes);
  if (absl::IsNotFound(document.status())) {
    std::error_code ignored;
    return MakeError(
        absl::StatusCode::kNotFound, "MODEL_NOT_FOUND",
        std::filesystem::is_directory(dir, ignored)
            ? absl::StrCat("no Hugging Face model folder at ", dir, ": it has no ", kConfigFile)
            : absl::StrCat("there is no folder ", dir,
                           "; a model is a Hugging Face folder on this host, none is downloaded"));
  }
  DORAD_RETURN_IF_ERROR(document.status());
  std::vector<Violation> violations;
  Fields fields(kConfigFile, &*document, &violations);
  const Family* family = FindFamily(fields);
  const bool has_parts = family != nullptr && family->has_parts();
  const bool has_scalar = family != nullptr && family->default_query_scalar;
  RefuseUnsupportedKeys(fields, has_parts, has_scalar);
  ModelConfig config;
  // The keys of another model type have other meanings: no further checks.
  if (family != nullptr) {
    config.model_type = family->model_type;
    CheckArchitectures(fields, *family);
    Fields text = TextFields(fields, *family);
    if (&text.object() != &fields.object()) RefuseUnsupportedKeys(text, false, has_scalar);
    if (has_parts) SetPartNames(&config);
    for (const char* const part : family->ignored_parts) {
      if (part != nullptr) config.ignored_parts.push_back(part);
    }
    ReadSizes(text, *family, &config);
    config.tied_embeddings = fields.Bool("tie_word_embeddings", family->default_tied);
    if (has_parts) ReadImageTokens(fields, &config);
    if (family->read_vision != nullptr && fields.Has("vision_config")) {
      ServeVision(fields, *family, &config);
      config.vision->byte_pixels = ReadBytePixels(dir, config.vision->channels);
    }
    if (has_parts) ReadTensorNames(dir, fields, &config);
    ReadHeads(text, *family, &config);
    ReadLayers(text, *family, &config);
    if (family->delta_nets) {
      ReadDeltaNets(text, &config);
    } else {
      ReadWindows(text, *family, &config);
    }
    ReadRopeConfig(text, *family, &config);
    config.NumberModules();
    DORAD_RETURN_IF_ERROR(ReadEosTokens(dir, fields, text, *family, &violations, &config));
  }
  if (!violations.empty()) return MakeInvalid(dir, std::move(violations));
  return config;
}

void ModelConfig::NumberModules() {
  int next = 0;
  for (LayerSpec& layer : layers) {
    AttentionSpec& attention = layer.attention;
    if (layer.delta) {
      DeltaSpec& delta = *layer.delta;
      for (int* id : {&delta.qkv, &delta.z, &delta.b, &delta.a, &delta.out}) *id = next++;
    } else {
      for (int* id : {&attention.q, &attention.k, &attention.v, &attention.o}) *id = next++;
    }
    for (int* id : {&layer.mlp.gate, &layer.mlp.up, &layer.mlp.down}) *id = next++;
  }
  embedding = next++;
  head = next++;
  if (vision) vision->NumberModules(next);
}

int64_t ModelConfig::num_delta_layers() const {
  return std::count_if(layers.begin(), layers.end(),
                       [](const LayerSpec& layer) { return layer.delta.has_value(); });
}

int ModelConfig::num_modules() const { return head + 1 + (vision ? vision->num_modules() : 0); }

bool ModelConfig::has_rotary_positions() const {
  return vision && std::any_of(ropes.begin(), ropes.end(),
                               [](const RopeConfig& rope) { return !rope.axes.empty(); });
}

void ModelConfig::DropVision() {
  if (!vision) return;
  for (const Spelling& names : spellings) {
    if (!absl::StartsWith(names.tower, "model.")) continue;
    std::vector<adapter::BaseModule> modules = model::ListModules(*this, names);
    modules.erase(modules.begin(), modules.begin() + head + 1);
    for (adapter::BaseModule& module : modules) other_modules.push_back(std::move(module.name));
  }
  std::sort(other_modules.begin(), other_modules.end());
  SetOtherParts(this);
  vision.reset();
}

}  // namespace dorad::model
