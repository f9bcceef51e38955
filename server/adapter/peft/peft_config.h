// A PEFT adapter_config.json, as far as it changes a result.
//
// Fail closed: a field that changes the computation is understood or refused, and an unknown key is
// accepted only with a value that means "not used" (null, false, empty). docs/guides/adapters.md
// lists the fields. Plain data; functions are thread-safe.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/adapter/peft/violations.h"

namespace dorad::adapter {

// Selects modules.
struct ModuleSelector {
  enum class Kind { kNone, kNames, kRegex, kAllLinear };
  Kind kind = Kind::kNone;
  std::vector<std::string> names;  // kNames: a module's whole name or its last components
  std::string regex;               // kRegex: matched against the whole name
};

struct PeftConfig {
  int rank = 0;
  double alpha = 0.0;
  bool use_dora = false;
  bool use_rslora = false;  // s = alpha / sqrt(rank) instead of alpha / rank
  // Regular expressions on the last components of a module's name; the first match counts.
  std::vector<std::pair<std::string, int>> rank_pattern;
  std::vector<std::pair<std::string, double>> alpha_pattern;
  ModuleSelector targets;
  ModuleSelector exclude;
  // Only these layers; nullopt or empty: all.
  std::optional<std::vector<int>> layers;
  // Names of the list of layers; empty: the first number in a module's name is its layer.
  std::vector<std::string> layers_pattern;
  // Top-level fields with a violation: their values above mean nothing.
  std::set<std::string> refused;

  bool Refuses(std::initializer_list<const char*> fields) const {
    return std::any_of(fields.begin(), fields.end(),
                       [this](const char* field) { return refused.count(field) > 0; });
  }
};

// Adds every violation (reasons: docs/guides/adapters.md). Returns what could be read, for checks
// that go on after a violation; nullopt: nothing.
std::optional<PeftConfig> ParsePeftConfig(const std::string& json, int max_rank,
                                          Violations& violations);

}  // namespace dorad::adapter
