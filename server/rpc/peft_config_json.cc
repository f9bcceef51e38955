#include "server/rpc/peft_config_json.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/platform/error.h"

namespace dorad::rpc {
namespace {

constexpr char kFile[] = "adapter_config.json";
constexpr char kMessage[] = "peft_config";

template <typename T>
std::string Json(const T& value) {
  return nlohmann::json(value).dump();
}

template <typename List>
std::string JsonList(const List& list) {
  return Json(std::vector<typename List::value_type>(list.begin(), list.end()));
}

std::string JsonSelector(const v1::ModuleSelector& selector) {
  switch (selector.selector_case()) {
    case v1::ModuleSelector::kList:
      return JsonList(selector.list().names());
    case v1::ModuleSelector::kRegex:
      return Json(selector.regex());
    case v1::ModuleSelector::SELECTOR_NOT_SET:
      return "null";
  }
  return "null";
}

std::string Join(char open, const std::vector<std::string>& members, char close) {
  return absl::StrCat(std::string(1, open), absl::StrJoin(members, ","), std::string(1, close));
}

}  // namespace

// Writes text, not a JSON object: an object would lose the order and repetition of patterns.
std::string ToAdapterConfigJson(const v1::PeftConfig& config) {
  std::vector<std::string> members = {"\"peft_type\":\"LORA\""};
  const auto add = [&members](const char* key, const std::string& json) {
    members.push_back(absl::StrCat("\"", key, "\":", json));
  };
  if (config.has_r()) add("r", Json(config.r()));
  if (config.has_lora_alpha()) add("lora_alpha", Json(config.lora_alpha()));
  add("use_dora", Json(config.use_dora()));
  add("use_rslora", Json(config.use_rslora()));
  if (config.has_target_modules()) add("target_modules", JsonSelector(config.target_modules()));
  if (config.has_exclude_modules()) add("exclude_modules", JsonSelector(config.exclude_modules()));
  std::vector<std::string> ranks, alphas;
  for (const v1::RankPattern& entry : config.rank_pattern()) {
    ranks.push_back(absl::StrCat(Json(entry.pattern()), ":", Json(entry.rank())));
  }
  for (const v1::AlphaPattern& entry : config.alpha_pattern()) {
    alphas.push_back(absl::StrCat(Json(entry.pattern()), ":", Json(entry.alpha())));
  }
  add("rank_pattern", Join('{', ranks, '}'));
  add("alpha_pattern", Join('{', alphas, '}'));
  if (config.layers_to_transform_size() > 0) {
    add("layers_to_transform", JsonList(config.layers_to_transform()));
  }
  if (config.layers_pattern_size() > 0) add("layers_pattern", JsonList(config.layers_pattern()));
  return Join('{', members, '}');
}

absl::Status NamePeftConfigFields(const absl::Status& refusal) {
  const std::string prefix = absl::StrCat(kFile, ":");
  std::vector<Violation> violations = ViolationsOf(refusal);
  bool renamed = false;
  for (Violation& violation : violations) {
    if (absl::StartsWith(violation.field, prefix)) {
      violation.field = absl::StrCat(kMessage, ".", violation.field.substr(prefix.size()));
    } else if (violation.field == kFile) {
      violation.field = kMessage;
    } else {
      continue;
    }
    renamed = true;
  }
  if (!renamed) return refusal;
  return MakeInvalid("adapter", std::move(violations), OmittedViolationsOf(refusal));
}

}  // namespace dorad::rpc
