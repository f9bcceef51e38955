#include "server/adapter/peft/targets.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "server/adapter/peft/module_key.h"
#include "server/adapter/peft/pattern.h"
#include "server/platform/config/edit_distance.h"

namespace dorad::adapter {
namespace {

constexpr char kSubject[] = "adapter_config.json";

std::string FieldName(const std::string& field) { return absl::StrCat(kSubject, ":", field); }

// Compiles the regular expressions of one configuration, and notes failures.
class PatternReader {
 public:
  explicit PatternReader(Violations& violations) : violations_(violations) {}

  // nullopt for a refused expression, and for all that follow once the budget is exceeded.
  std::optional<Pattern> Read(const std::string& field, const std::string& expression) {
    if (too_costly_) return std::nullopt;
    absl::StatusOr<Pattern> pattern = Pattern::Compile(expression, budget_);
    if (pattern.ok()) return std::move(pattern).value();
    const std::string reason = ReasonOf(pattern.status());
    too_costly_ = reason == "ADAPTER_PATTERNS_TOO_COSTLY";
    violations_.Add(FieldName(field), reason, std::string(pattern.status().message()));
    return std::nullopt;
  }

 private:
  Violations& violations_;
  PatternBudget budget_;
  bool too_costly_ = false;
};

// PEFT's list form: an entry matches a module by its whole name or by its last components.
class NameSet {
 public:
  explicit NameSet(const std::vector<std::string>& names) : names_(names.begin(), names.end()) {}

  bool HasWhole(const std::string& name) const { return names_.contains(name); }

  // All matching entries, the whole name first.
  std::vector<std::string> Fitting(const std::string& name) const {
    std::vector<std::string> fitting;
    size_t begin = 0;
    while (true) {
      const std::string suffix = name.substr(begin);
      if (names_.contains(suffix)) fitting.push_back(suffix);
      const size_t dot = name.find('.', begin);
      if (dot == std::string::npos) return fitting;
      begin = dot + 1;
    }
  }

 private:
  absl::flat_hash_set<std::string> names_;
};

// Whether target_modules, exclude_modules, layers_to_transform and layers_pattern select a module.
class Matcher {
 public:
  Matcher(const PeftConfig& config, PatternReader& patterns)
      : config_(config),
        targets_(config.targets.names),
        exclude_(config.exclude.names),
        layers_(config.layers ? config.layers->begin() : kNoLayers.begin(),
                config.layers ? config.layers->end() : kNoLayers.end()) {
    if (config.targets.kind == ModuleSelector::Kind::kRegex) {
      target_regex_ = patterns.Read("target_modules", config.targets.regex);
      good_ = target_regex_.has_value();
    }
    if (config.exclude.kind == ModuleSelector::Kind::kRegex) {
      exclude_regex_ = patterns.Read("exclude_modules", config.exclude.regex);
      good_ = good_ && exclude_regex_;
    }
    if (layers_.empty()) return;
    if (config.layers_pattern.empty()) {
      Append(patterns.Read("layers_to_transform", R"(.*?\.[^.]*\.(?P<idx>\d+)\.)"));
    }
    for (const std::string& pattern : config.layers_pattern) {
      Append(patterns.Read("layers_pattern",
                           absl::StrCat(R"((?:^|.*?\.))", pattern, R"(\.(?P<idx>\d+)\.)")));
    }
  }

  bool Selects(const BaseModule& module) {
    switch (config_.targets.kind) {
      case ModuleSelector::Kind::kNone:
        return false;
      case ModuleSelector::Kind::kAllLinear:
        return module.kind == ModuleKind::kLinear && !module.is_output_head &&
               !Excluded(module.name);
      case ModuleSelector::Kind::kRegex:
        return target_regex_ && target_regex_->FullMatch(module.name) && !Excluded(module.name);
      case ModuleSelector::Kind::kNames:
        return SelectsByName(module.name);
    }
    return false;
  }

  // Whether every expression could be read.
  bool good() const { return good_; }
  // Entries of target_modules that have matched some module so far, selected in the end or not.
  const absl::flat_hash_set<std::string>& used_names() const { return used_names_; }

 private:
  inline static const std::vector<int> kNoLayers;

  void Append(std::optional<Pattern> pattern) {
    good_ = good_ && pattern;
    if (pattern) layer_patterns_.push_back(*std::move(pattern));
  }

  bool Excluded(const std::string& name) const {
    if (exclude_regex_) return exclude_regex_->FullMatch(name);
    return !exclude_.Fitting(name).empty();
  }

  bool SelectsByName(const std::string& name) {
    const std::vector<std::string> fitting = targets_.Fitting(name);
    used_names_.insert(fitting.begin(), fitting.end());
    if (fitting.empty() || Excluded(name)) return false;
    // A whole name is selected in spite of layers_to_transform.
    return targets_.HasWhole(name) || layers_.empty() || InLayers(name);
  }

  bool InLayers(const std::string& name) const {
    for (const Pattern& pattern : layer_patterns_) {
      // The first pattern that matches decides.
      int layer = -1;
      if (pattern.MatchIndex(name, &layer)) return layers_.contains(layer);
    }
    return false;
  }

  const PeftConfig& config_;
  const NameSet targets_;
  const NameSet exclude_;
  const absl::flat_hash_set<int> layers_;
  std::optional<Pattern> target_regex_;
  std::optional<Pattern> exclude_regex_;
  std::vector<Pattern> layer_patterns_;
  bool good_ = true;
  absl::flat_hash_set<std::string> used_names_;
};

// rank_pattern or alpha_pattern: the value of the first entry that matches a name.
template <typename T>
class Overrides {
 public:
  Overrides(const std::string& field, const std::vector<std::pair<std::string, T>>& entries,
            PatternReader& patterns) {
    for (const auto& [key, value] : entries) {
      if (auto plain = ModuleKey::Parse(key)) {
        entries_.emplace_back(*std::move(plain), value);
      } else if (auto pattern = patterns.Read(field, absl::StrCat(R"((.*\.)?()", key, ")$"))) {
        entries_.emplace_back(*std::move(pattern), value);
      } else {
        good_ = false;
      }
    }
  }

  // Whether every expression could be read.
  bool good() const { return good_; }

  T Get(const std::string& name, T otherwise) const {
    for (const auto& [key, value] : entries_) {
      if (Fits(key, name)) return value;
    }
    return otherwise;
  }

 private:
  using Key = std::variant<ModuleKey, Pattern>;

  static bool Fits(const Key& key, const std::string& name) {
    if (const auto* plain = std::get_if<ModuleKey>(&key)) return plain->Fits(name);
    return std::get<Pattern>(key).MatchStart(name);
  }

  std::vector<std::pair<Key, T>> entries_;
  bool good_ = true;
};

// "; did you mean q_proj?" with the most similar end of a module's name that has as many
// components, or "".
std::string SimilarModule(const std::string& name, const BaseModules& modules) {
  if (name.size() > kLongestComparedName) return "";
  const auto components = std::count(name.begin(), name.end(), '.') + 1;
  std::set<std::string> ends;
  for (const BaseModule& module : modules.all()) {
    size_t begin = module.name.size() + 1;
    for (auto i = components; i > 0 && begin > 1; --i) {
      const size_t dot = module.name.rfind('.', begin - 2);
      begin = dot == std::string::npos ? 0 : dot + 1;
    }
    ends.insert(module.name.substr(begin));
  }
  std::pair<size_t, std::string> nearest(kLongestComparedName, "");
  for (const std::string& end : ends) {
    const size_t distance = EditDistance(name, end);
    if (IsNear(distance, end)) nearest = std::min(nearest, {distance, end});
  }
  return nearest.second.empty() ? "" : absl::StrCat("; did you mean ", nearest.second, "?");
}

}  // namespace

Targets ResolveTargets(const PeftConfig& config, const BaseModules& modules,
                       Violations& violations) {
  constexpr int kMaxSuggestions = 16;  // bounds the work
  PatternReader patterns(violations);
  Matcher matcher(config, patterns);
  Targets targets;
  targets.complete = matcher.good() && !config.Refuses({"target_modules", "exclude_modules",
                                                        "layers_to_transform", "layers_pattern"});
  const Overrides<int> ranks("rank_pattern", config.rank_pattern, patterns);
  const Overrides<double> alphas("alpha_pattern", config.alpha_pattern, patterns);
  const bool ranks_known = ranks.good() && !config.Refuses({"r", "rank_pattern"});
  for (int id = 0; id < modules.size(); ++id) {
    const BaseModule& module = modules.all()[id];
    if (!matcher.Selects(module)) continue;
    Target target;
    target.module_id = id;
    target.rank = ranks_known ? ranks.Get(module.name, config.rank) : 0;
    target.alpha = alphas.Get(module.name, config.alpha);
    target.scale = config.use_rslora ? target.alpha / std::sqrt(static_cast<double>(target.rank))
                                     : target.alpha / target.rank;
    targets.list.push_back(target);
  }
  std::vector<std::string> not_served;
  for (const BaseModule& module : modules.not_served()) {
    if (matcher.Selects(module)) not_served.push_back(module.name);
  }
  if (!not_served.empty()) {
    violations.Add(FieldName("target_modules"), "ADAPTER_PART_NOT_SERVED",
                   absl::StrCat("selects ", not_served.size(), " modules that an adapter cannot ",
                                "change here, as ", not_served.front(),
                                ": train with exclude_modules for the model's other parts"));
  }
  int unknown = 0;
  for (const std::string& name : config.targets.names) {
    if (matcher.used_names().contains(name)) continue;
    targets.complete = false;
    violations.Add(FieldName("target_modules"), "ADAPTER_TARGET_UNKNOWN",
                   absl::StrCat(Quoted(name),
                                " fits no module of the base model that an adapter can change here",
                                ++unknown <= kMaxSuggestions ? SimilarModule(name, modules) : ""));
  }
  if (targets.list.empty() && targets.complete) {
    targets.complete = false;
    violations.Add(FieldName("target_modules"), "ADAPTER_NO_TARGETS",
                   "target_modules, exclude_modules and layers_to_transform together select no "
                   "module of the base model");
  }
  // A module that a refused selection names may be meant to be excluded.
  if (config.Refuses({"exclude_modules", "layers_to_transform", "layers_pattern"}) ||
      !matcher.good()) {
    targets.list.clear();
  }
  return targets;
}

}  // namespace dorad::adapter
