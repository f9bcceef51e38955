#include "server/model/rope_config.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dorad::model {
namespace {

using Json = nlohmann::json;

constexpr NumberRange kFactor{1.0, 1e6};
constexpr NumberRange kPositive{1e-6, 1e6};
constexpr IntRange kPositions{1, int64_t{1} << 24};

// Keys that transformers reads for some type. "finetuned" appears in early YaRN models and is never
// read.
constexpr std::array kKnownKeys = {"rope_type",       "type",
                                   "rope_theta",      "factor",
                                   "beta_fast",       "original_max_position_embeddings",
                                   "beta_slow",       "partial_rotary_factor",
                                   "mscale",          "attention_factor",
                                   "mscale_all_dim",  "truncate",
                                   "short_factor",    "long_factor",
                                   "low_freq_factor", "high_freq_factor",
                                   "finetuned"};

constexpr std::pair<const char*, RopeKind> kKinds[] = {
    {"default", RopeKind::kDefault},    {"linear", RopeKind::kLinear},
    {"dynamic", RopeKind::kDynamicNtk}, {"llama3", RopeKind::kLlama3},
    {"yarn", RopeKind::kYarn},          {"longrope", RopeKind::kLongRope}};

// The key of the scaling; empty: none. transformers lets rope_scaling replace rope_parameters as a
// whole, its theta included; two different ones are more likely an accident.
std::string ScalingKey(Fields& fields) {
  const Json* parameters = fields.Find("rope_parameters");
  const Json* scaling = fields.Find("rope_scaling");
  if (parameters != nullptr && scaling != nullptr && *parameters != *scaling) {
    fields.Invalid("rope_scaling", "differs from rope_parameters: give only one of them");
  }
  if (scaling != nullptr && !scaling->empty()) return "rope_scaling";
  return parameters != nullptr && !parameters->empty() ? "rope_parameters" : "";
}

// Of a rotary embedding with three positions.
bool IsMropeKey(const std::string& key) {
  return key == "mrope_section" || key == "mrope_interleaved";
}

// Of each frequency: by turns as far as the sections go, or one section after the other
// (transformers: recomposition_frequencies of Qwen3-VL and of Qwen2.5-VL).
std::vector<uint8_t> ReadAxes(Fields& rope, const Family& family, int64_t half) {
  std::array<int64_t, 3> sections = family.default_mrope;
  if (const Json* const list = rope.Find("mrope_section"); list != nullptr) {
    bool ok = list->is_array() && list->size() == sections.size();
    for (size_t i = 0; ok && i < sections.size(); ++i) {
      ok = (*list)[i].is_number_unsigned() && (*list)[i] <= half;
      if (ok) sections[i] = (*list)[i].get<int64_t>();
    }
    if (!ok) {
      rope.Invalid("mrope_section",
                   absl::StrCat("must be three numbers of frequencies, at most ", half));
    }
  }
  std::vector<uint8_t> axes(half, 0);
  if (family.mrope_order == Family::kInSections) {
    if (sections[0] + sections[1] + sections[2] != half) {
      rope.Invalid("mrope_section", absl::StrCat("must have a sum of ", half, ", not of ",
                                                 sections[0] + sections[1] + sections[2]));
      return axes;
    }
    std::fill_n(axes.begin() + sections[0], sections[1], 1);
    std::fill_n(axes.begin() + sections[0] + sections[1], sections[2], 2);
    return axes;
  }
  for (uint8_t axis = 1; axis < 3; ++axis) {
    for (int64_t i = axis; i < std::min(3 * sections[axis], half); i += 3) axes[i] = axis;
  }
  return axes;
}

void CheckKeys(Fields& rope, const Family& family) {
  for (const auto& [key, value] : rope.object().items()) {
    if (value.is_null() || std::count(kKnownKeys.begin(), kKnownKeys.end(), key) > 0) continue;
    if (family.mrope && IsMropeKey(key)) continue;
    rope.Unsupported(key, value.is_object()
                              ? "parameters for each type of layer are not supported"
                              : absl::StrCat("is not a key this server knows: ", Shown(value)));
  }
}

RopeKind ReadKind(Fields& rope, const Family& family) {
  // The newer name wins, as in transformers.
  const std::string key = rope.Has("rope_type") ? "rope_type" : "type";
  const std::string name = rope.Text(key, "default");
  if (family.mrope && name == "mrope") return RopeKind::kDefault;  // of transformers 4
  for (const auto& [known, kind] : kKinds) {
    if (name == known) return kind;
  }
  rope.Unsupported(key, absl::StrCat("the rotary embedding \"", name,
                                     "\" is not one of default, linear, dynamic, llama3, yarn, "
                                     "longrope"));
  return RopeKind::kDefault;
}

// transformers lets the key beside the dictionary win over the one in it.
int64_t OriginalMaxPosition(Fields& fields, Fields& rope, int64_t context_length) {
  constexpr char kKey[] = "original_max_position_embeddings";
  if (fields.Has(kKey)) return fields.Int(kKey, std::nullopt, kPositions);
  return rope.Int(kKey, context_length, kPositions);
}

// Null means "derive it" where it does in transformers.
double NumberOrNull(Fields& rope, const std::string& key, double derived, NumberRange range) {
  return rope.Has(key) ? rope.Number(key, derived, range) : derived;
}

void ReadLlama3(Fields& rope, RopeConfig* out) {
  out->factor = rope.Number("factor", std::nullopt, kFactor);
  out->low_freq_factor = rope.Number("low_freq_factor", std::nullopt, kPositive);
  out->high_freq_factor = rope.Number("high_freq_factor", std::nullopt, kPositive);
  if (out->high_freq_factor > 0.0 && out->high_freq_factor <= out->low_freq_factor) {
    rope.Invalid("high_freq_factor", "must be greater than low_freq_factor");
  }
}

void ReadYarn(Fields& rope, int64_t context_length, RopeConfig* out) {
  const double implied =
      static_cast<double>(context_length) / static_cast<double>(out->original_max_position);
  out->factor = rope.IsNull("factor") ? implied : rope.Number("factor", std::nullopt, kFactor);
  out->attention_factor = NumberOrNull(rope, "attention_factor", 0.0, kPositive);
  // transformers writes `or 32`, `or 1` and `mscale and mscale_all_dim`: zero counts as absent.
  out->beta_fast = NumberOrNull(rope, "beta_fast", 0.0, {0.0, 1e6});
  out->beta_slow = NumberOrNull(rope, "beta_slow", 0.0, {0.0, 1e6});
  if (out->beta_fast == 0.0) out->beta_fast = 32.0;
  if (out->beta_slow == 0.0) out->beta_slow = 1.0;
  if (out->beta_fast < out->beta_slow) rope.Invalid("beta_fast", "must not be below beta_slow");
  out->mscale = NumberOrNull(rope, "mscale", 0.0, {0.0, 1e6});
  out->mscale_all_dim = NumberOrNull(rope, "mscale_all_dim", 0.0, {0.0, 1e6});
  out->truncate = rope.Bool("truncate", true);
}

std::vector<double> ReadFactors(Fields& rope, const std::string& key, int64_t size) {
  std::vector<double> factors;
  const Json* list = rope.Find(key);
  const bool ok = list != nullptr && list->is_array() && list->size() == static_cast<size_t>(size);
  if (ok) {
    for (const Json& value : *list) {
      const double factor = value.is_number() ? value.get<double>() : 0.0;
      if (factor > 0.0 && factor <= 1e6) factors.push_back(factor);
    }
  }
  if (factors.size() != static_cast<size_t>(size)) {
    rope.Invalid(key, absl::StrCat("must be a list of ", size, " positive numbers"));
    factors.assign(size, 1.0);
  }
  return factors;
}

void ReadLongRope(Fields& rope, ModelConfig* config, RopeConfig* out) {
  out->short_factor = ReadFactors(rope, "short_factor", out->width / 2);
  out->long_factor = ReadFactors(rope, "long_factor", out->width / 2);
  const double implied =
      static_cast<double>(config->context_length) / static_cast<double>(out->original_max_position);
  out->factor = NumberOrNull(rope, "factor", implied, kPositive);
  out->attention_factor = NumberOrNull(rope, "attention_factor", 0.0, kPositive);
  if (out->original_max_position == 1) {
    rope.Invalid("original_max_position_embeddings", "must be at least 2");
  }
  // Beyond this length transformers uses the long factors for the whole sequence, but keeps cached
  // keys unchanged: its answer depends on the order of its inputs.
  config->context_length = std::min(config->context_length, out->original_max_position);
}

// The part of a head that turns. The rotary embedding's own key wins over the one beside it.
double ReadRotaryPart(Fields& fields, Fields& rope, const Family& family) {
  constexpr char kKey[] = "partial_rotary_factor";
  if (family.default_rotary_part != 1.0) {
    const double outer = NumberOrNull(fields, kKey, family.default_rotary_part, {1e-3, 1.0});
    return NumberOrNull(rope, kKey, outer, {1e-3, 1.0});
  }
  for (Fields* place : {&fields, &rope}) {
    if (NumberOrNull(*place, kKey, 1.0, {0.0, 1e6}) != 1.0) {
      place->Unsupported(kKey, "only a full rotary embedding (1.0) is supported");
    }
  }
  return 1.0;
}

// One table. fields: the decoder's; theta_key and default_theta: of the base beside `rope`.
RopeConfig ReadRope(Fields& fields, Fields& rope, const Family& family, const char* theta_key,
                    double default_theta, ModelConfig* config) {
  static const NumberRange kTheta{1.0 + 1e-6, 1e12};
  CheckKeys(rope, family);
  RopeConfig out;
  out.width = static_cast<int64_t>(static_cast<double>(config->head_dim) *
                                   ReadRotaryPart(fields, rope, family));
  if (config->head_dim > 0 && (out.width < 2 || out.width % 2 != 0)) {
    rope.Invalid("partial_rotary_factor",
                 absl::StrCat("must give an even number of a head's ", config->head_dim,
                              " elements, not ", out.width));
    out.width = 2;
  }
  if (family.default_mrope != Family().default_mrope) {
    out.axes = ReadAxes(rope, family, out.width / 2);
  }
  const double outer_theta = fields.Number(theta_key, default_theta, kTheta);
  out.theta = rope.Number("rope_theta", outer_theta, kTheta);
  out.kind = ReadKind(rope, family);
  switch (out.kind) {
    case RopeKind::kDefault:
      break;
    case RopeKind::kLinear:
      out.factor = rope.Number("factor", std::nullopt, kFactor);
      break;
    case RopeKind::kDynamicNtk:
      out.factor = rope.Number("factor", std::nullopt, kFactor);
      out.original_max_position = config->context_length;
      if (out.width == 2) fields.Invalid("head_dim", "must be at least 4 for dynamic scaling");
      break;
    case RopeKind::kLlama3:
      out.original_max_position = OriginalMaxPosition(fields, rope, config->context_length);
      ReadLlama3(rope, &out);
      break;
    case RopeKind::kYarn:
      out.original_max_position = OriginalMaxPosition(fields, rope, config->context_length);
      ReadYarn(rope, config->context_length, &out);
      break;
    case RopeKind::kLongRope:
      out.original_max_position = OriginalMaxPosition(fields, rope, config->context_length);
      ReadLongRope(rope, config, &out);
      break;
  }
  return out;
}

constexpr char kFull[] = "full_attention";
constexpr char kSliding[] = "sliding_attention";

// A table for layers that see everything, then one for those that slide.
std::vector<RopeConfig> ReadRopesByKind(Fields& fields, const Family& family, const Fields& none,
                                        ModelConfig* config) {
  Fields full = none, sliding = none;
  if (const std::string key = ScalingKey(fields); key == "rope_parameters") {
    Fields kinds = fields.Child(key);
    for (const auto& [kind, value] : kinds.object().items()) {
      if (kind != kFull && kind != kSliding) kinds.Unsupported(kind, "is not a kind of layer");
    }
    if (kinds.Has(kFull)) full = kinds.Child(kFull);
    if (kinds.Has(kSliding)) sliding = kinds.Child(kSliding);
  } else if (!key.empty()) {
    full = fields.Child(key);
    if (full.Has("type") && !full.Has("rope_type")) {
      full.Unsupported("type", "transformers 5 does not read it here: give rope_type");
    }
  }
  RopeConfig global = ReadRope(fields, full, family, "rope_theta", family.default_theta, config);
  RopeConfig local = ReadRope(fields, sliding, family, "rope_local_base_freq",
                              *family.default_local_theta, config);
  for (LayerSpec& layer : config->layers) layer.attention.rope = layer.attention.window > 0 ? 1 : 0;
  return {std::move(global), std::move(local)};
}

}  // namespace

void ReadRopeConfig(Fields& fields, const Family& family, ModelConfig* config) {
  static const Json* const kEmpty = new Json(Json::object());
  std::vector<Violation> ignored;
  Fields none("", kEmpty, &ignored);
  if (family.default_local_theta) {
    config->ropes = ReadRopesByKind(fields, family, none, config);
    return;
  }
  const std::string key = ScalingKey(fields);
  Fields rope = key.empty() ? none : fields.Child(key);
  config->ropes = {ReadRope(fields, rope, family, "rope_theta", family.default_theta, config)};
}

}  // namespace dorad::model
