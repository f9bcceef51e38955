#include "server/adapter/peft/peft_config.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/adapter/peft/strict_json.h"

namespace dorad::adapter {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kSubject[] = "adapter_config.json";
constexpr size_t kMaxSelectorNames = 16384;
constexpr size_t kMaxPatterns = 4096;
constexpr int kMaxLayer = 1 << 20;

// Null, false and empty values mean that a feature is not used.
bool IsUnused(const Json& value) {
  return value.is_null() || (value.is_boolean() && !value.get<bool>()) ||
         ((value.is_string() || value.is_array() || value.is_object()) &&
          (value.is_string() ? value.get_ref<const std::string&>().empty() : value.empty()));
}

std::string Shown(const Json& value) {
  // Names a structure instead of printing it: it may be as large as the file.
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  if (value.is_string()) return Quoted(value.get_ref<const std::string&>());
  return value.dump();
}

class ConfigReader {
 public:
  ConfigReader(const Json& document, int max_rank, Violations& violations)
      : document_(document), max_rank_(max_rank), violations_(violations) {}

  PeftConfig Read() {
    const std::map<std::string, std::function<void(const Json&)>> readers = Readers();
    for (const auto& [key, value] : document_.items()) {
      const auto reader = readers.find(key);
      if (reader != readers.end()) {
        reader->second(value);
      } else if (!IsUnused(value)) {
        Add(key.size() <= 128 ? key : "(long key)", "ADAPTER_CONFIG_UNKNOWN_KEY",
            absl::StrCat("the key ", Quoted(key), " is not known to this server and is ",
                         Shown(value), "; only null, false and empty values are accepted"));
      }
    }
    for (const char* key : {"peft_type", "r", "lora_alpha", "target_modules"}) {
      if (!document_.contains(key)) {
        Add(key, "ADAPTER_CONFIG_MISSING_FIELD", "the field is missing; PEFT always writes it");
      }
    }
    CheckCombinations();
    return std::move(config_);
  }

 private:
  using Reader = std::function<void(const Json&)>;

  // field: a top-level one, or "FIELD.ENTRY".
  void Add(const std::string& field, const std::string& reason, const std::string& description) {
    config_.refused.insert(field.substr(0, field.find('.')));
    violations_.Add(absl::StrCat(kSubject, ":", absl::CEscape(field)), reason, description);
  }

  std::map<std::string, Reader> Readers() {
    std::map<std::string, Reader> readers;
    AddUnderstood(readers);
    AddInformational(readers);
    AddRefused(readers);
    return readers;
  }

  void AddUnderstood(std::map<std::string, Reader>& readers) {
    readers["peft_type"] = [this](const Json& value) {
      if (value != "LORA") {
        Add("peft_type", "ADAPTER_TYPE_UNSUPPORTED",
            absl::StrCat("expected \"LORA\", found ", Shown(value)));
      }
    };
    readers["task_type"] = [this](const Json& value) {
      if (!value.is_null() && value != "CAUSAL_LM") {
        Add("task_type", "ADAPTER_TASK_UNSUPPORTED",
            absl::StrCat("expected \"CAUSAL_LM\" or null, found ", Shown(value)));
      }
    };
    readers["bias"] = [this](const Json& value) {
      if (value != "none") {
        Add("bias", "ADAPTER_BIAS_UNSUPPORTED",
            absl::StrCat("trained biases are not served: expected \"none\", found ", Shown(value)));
      }
    };
    readers["r"] = [this](const Json& value) { ReadRank("r", value, &config_.rank); };
    readers["lora_alpha"] = [this](const Json& value) {
      ReadAlpha("lora_alpha", value, &config_.alpha);
    };
    readers["use_dora"] = [this](const Json& value) {
      ReadBool("use_dora", value, &config_.use_dora);
    };
    readers["use_rslora"] = [this](const Json& value) {
      ReadBool("use_rslora", value, &config_.use_rslora);
    };
    // On the linear layers of the families served here PEFT turns the flag off with a warning, so
    // both values mean the same weights.
    readers["fan_in_fan_out"] = [this](const Json& value) {
      bool ignored = false;
      ReadBool("fan_in_fan_out", value, &ignored);
    };
    readers["rank_pattern"] = [this](const Json& value) {
      ReadPatterns<int>("rank_pattern", value, &config_.rank_pattern, &ConfigReader::ReadRank);
    };
    readers["alpha_pattern"] = [this](const Json& value) {
      ReadPatterns<double>("alpha_pattern", value, &config_.alpha_pattern,
                           &ConfigReader::ReadAlpha);
    };
    readers["target_modules"] = [this](const Json& value) { ReadTargets(value); };
    readers["exclude_modules"] = [this](const Json& value) {
      if (!IsUnused(value)) ReadSelector("exclude_modules", value, &config_.exclude);
    };
    readers["layers_to_transform"] = [this](const Json& value) { ReadLayers(value); };
    readers["layers_pattern"] = [this](const Json& value) {
      if (value.is_string() && !IsUnused(value)) {
        config_.layers_pattern = {value.get<std::string>()};
      } else if (!IsUnused(value)) {
        ReadNames("layers_pattern", value, &config_.layers_pattern);
      }
    };
    readers["init_lora_weights"] = [this](const Json& value) { CheckInit(value); };
  }

  // Fields that describe the training or the origin; they have no effect on results.
  void AddInformational(std::map<std::string, Reader>& readers) {
    for (const char* key :
         {"auto_mapping", "base_model_name_or_path", "base_model_class", "parent_library",
          "revision", "peft_version", "inference_mode", "lora_dropout",
          // Only read together with an initialisation or a switch that is refused or harmless.
          "eva_config", "corda_config", "lora_ga_config", "loftq_config", "megatron_core",
          "qalora_group_size"}) {
      readers[key] = [](const Json&) {};
    }
  }

  void Refuse(std::map<std::string, Reader>& readers, const std::string& key,
              const std::string& reason, const std::string& why) {
    readers[key] = [this, key, reason, why](const Json& value) {
      if (!IsUnused(value)) Add(key, reason, absl::StrCat(why, "; found ", Shown(value)));
    };
  }

  void AddRefused(std::map<std::string, Reader>& readers) {
    Refuse(readers, "modules_to_save", "ADAPTER_MODULES_TO_SAVE_UNSUPPORTED",
           "fully trained modules beside the adapter are not served");
    Refuse(readers, "trainable_token_indices", "ADAPTER_TRAINABLE_TOKENS_UNSUPPORTED",
           "trained token embeddings are not served");
    Refuse(readers, "layer_replication", "ADAPTER_LAYER_REPLICATION_UNSUPPORTED",
           "a changed stack of layers is not served");
    Refuse(readers, "lora_bias", "ADAPTER_LORA_BIAS_UNSUPPORTED", "a bias on lora_B is not served");
    Refuse(readers, "megatron_config", "ADAPTER_MEGATRON_UNSUPPORTED",
           "Megatron layers are not served");
    Refuse(readers, "alora_invocation_tokens", "ADAPTER_ALORA_UNSUPPORTED",
           "activated LoRA, which starts at an invocation sequence, is not served");
    Refuse(readers, "target_parameters", "ADAPTER_TARGET_PARAMETERS_UNSUPPORTED",
           "adapters on bare parameters are not served");
    Refuse(readers, "ensure_weight_tying", "ADAPTER_WEIGHT_TYING_UNSUPPORTED",
           "adapters shared by tied layers are not served");
    Refuse(readers, "quantization_config", "ADAPTER_QUANTIZATION_UNSUPPORTED",
           "adapters of a quantised base are not served");
    for (const char* key : {"use_qalora", "use_bdlora", "arrow_config", "velora_config",
                            "kasa_config", "monteclora_config"}) {
      Refuse(readers, key, "ADAPTER_VARIANT_UNSUPPORTED", "this LoRA variant is not served");
    }
  }

  void ReadBool(const std::string& field, const Json& value, bool* out) {
    if (value.is_boolean()) {
      *out = value.get<bool>();
    } else {
      Add(field, "ADAPTER_CONFIG_INVALID",
          absl::StrCat("expected true or false, found ", Shown(value)));
    }
  }

  void ReadRank(const std::string& field, const Json& value, int* out) {
    if (!value.is_number_integer()) {
      Add(field, "ADAPTER_CONFIG_INVALID",
          absl::StrCat("expected an integer, found ", Shown(value)));
    } else if (value.is_number_unsigned() &&
               value.get<uint64_t>() > static_cast<uint64_t>(max_rank_)) {
      Add(field, "ADAPTER_RANK_TOO_LARGE",
          absl::StrCat("rank ", Shown(value), " is above this server's limit of ", max_rank_));
    } else if (value.get<int64_t>() < 1) {
      Add(field, "ADAPTER_CONFIG_INVALID",
          absl::StrCat("expected a rank of at least 1, found ", Shown(value)));
    } else {
      *out = value.get<int>();
    }
  }

  // Zero is a legal scale. A negative alpha is legal arithmetic too, but no training produces one:
  // it is refused as a mistake.
  void ReadAlpha(const std::string& field, const Json& value, double* out) {
    const double alpha = value.is_number() ? value.get<double>() : -1.0;
    if (!value.is_number() || alpha < 0.0 || alpha > std::numeric_limits<float>::max()) {
      Add(field, "ADAPTER_CONFIG_INVALID",
          absl::StrCat("expected a finite number of at least 0, found ", Shown(value)));
    } else {
      *out = alpha;
    }
  }

  template <typename T>
  void ReadPatterns(const std::string& field, const Json& value,
                    std::vector<std::pair<std::string, T>>* out,
                    void (ConfigReader::*read)(const std::string&, const Json&, T*)) {
    if (IsUnused(value)) return;
    if (!value.is_object() || value.size() > kMaxPatterns) {
      Add(field, "ADAPTER_CONFIG_INVALID",
          absl::StrCat("expected an object of at most ", kMaxPatterns, " patterns, found ",
                       Shown(value)));
      return;
    }
    for (const auto& [pattern, entry] : value.items()) {
      T number{};
      (this->*read)(absl::StrCat(field, ".", pattern.substr(0, 128)), entry, &number);
      out->emplace_back(pattern, number);
    }
  }

  // Reads the good entries of a list with bad ones, too. False: not a list.
  bool ReadNames(const std::string& field, const Json& value, std::vector<std::string>* out) {
    const bool is_list = value.is_array() && value.size() <= kMaxSelectorNames;
    bool good = is_list;
    for (size_t i = 0; is_list && i < value.size(); ++i) {
      const Json& entry = value[i];
      const bool is_name = entry.is_string() && !entry.get_ref<const std::string&>().empty();
      if (is_name) out->push_back(entry.get<std::string>());
      good = good && is_name;
    }
    if (!good) {
      Add(field, "ADAPTER_CONFIG_INVALID",
          absl::StrCat("expected a string or a list of at most ", kMaxSelectorNames,
                       " non-empty strings, found ", Shown(value)));
    }
    return is_list;
  }

  void ReadSelector(const std::string& field, const Json& value, ModuleSelector* out) {
    if (value.is_string()) {
      out->kind = ModuleSelector::Kind::kRegex;
      out->regex = value.get<std::string>();
    } else if (ReadNames(field, value, &out->names)) {
      out->kind = ModuleSelector::Kind::kNames;
    }
  }

  void ReadTargets(const Json& value) {
    if (IsUnused(value)) {
      Add("target_modules", "ADAPTER_NO_TARGETS",
          absl::StrCat("no module is targeted: found ", Shown(value)));
      return;
    }
    ReadSelector("target_modules", value, &config_.targets);
    if (absl::AsciiStrToLower(config_.targets.regex) == "all-linear") {
      config_.targets = {ModuleSelector::Kind::kAllLinear, {}, {}};
    }
  }

  void ReadLayers(const Json& value) {
    if (value.is_null()) return;
    std::vector<int> layers;
    const auto is_layer = [](const Json& entry) {
      return entry.is_number_unsigned() && entry.get<uint64_t>() < kMaxLayer;
    };
    bool good = is_layer(value) || (value.is_array() && value.size() <= kMaxSelectorNames &&
                                    std::all_of(value.begin(), value.end(), is_layer));
    if (!good) {
      Add("layers_to_transform", "ADAPTER_CONFIG_INVALID",
          absl::StrCat("expected a layer number or a list of them, found ", Shown(value)));
      return;
    }
    if (value.is_array()) {
      layers = value.get<std::vector<int>>();
    } else {
      layers = {value.get<int>()};
    }
    config_.layers = std::move(layers);
  }

  void CheckInit(const Json& value) {
    if (value.is_null() || value.is_boolean()) return;
    const std::string init =
        value.is_string() ? absl::AsciiStrToLower(value.get<std::string>()) : std::string();
    if (init == "gaussian" || init == "orthogonal" || init == "eva" || init == "mica") return;
    const bool changes_base = absl::StartsWith(init, "pissa") || absl::StartsWith(init, "corda") ||
                              init == "olora" || init == "loftq" || init == "lora_ga";
    Add("init_lora_weights",
        changes_base ? "ADAPTER_INIT_CHANGES_BASE" : "ADAPTER_INIT_UNSUPPORTED",
        changes_base
            ? absl::StrCat("initialisation ", Shown(value), " changes the base weights; save with ",
                           "path_initial_model_for_weight_conversion to get a plain adapter")
            : absl::StrCat("unknown initialisation ", Shown(value)));
  }

  // PEFT refuses these too.
  void CheckCombinations() {
    const bool by_regex = config_.targets.kind == ModuleSelector::Kind::kRegex ||
                          config_.targets.kind == ModuleSelector::Kind::kAllLinear;
    if (by_regex && config_.layers) {
      Add("layers_to_transform", "ADAPTER_CONFIG_INVALID",
          "cannot be combined with a string in target_modules");
    }
    if (by_regex && !config_.layers_pattern.empty()) {
      Add("layers_pattern", "ADAPTER_CONFIG_INVALID",
          "cannot be combined with a string in target_modules");
    } else if (!config_.layers_pattern.empty() && !config_.layers) {
      Add("layers_pattern", "ADAPTER_CONFIG_INVALID", "needs layers_to_transform");
    }
  }

  const Json& document_;
  const int max_rank_;
  PeftConfig config_;
  Violations& violations_;
};

}  // namespace

std::optional<PeftConfig> ParsePeftConfig(const std::string& json, int max_rank,
                                          Violations& violations) {
  const absl::StatusOr<Json> document = ParseStrictJson(json, JsonLimits());
  if (!document.ok()) {
    violations.AddAll(document.status());
    return std::nullopt;
  }
  return ConfigReader(*document, max_rank, violations).Read();
}

}  // namespace dorad::adapter
