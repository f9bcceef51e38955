#include "server/platform/config/config_value.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "server/platform/check.h"
#include "server/platform/config/yaml_document.h"
#include "server/platform/files/utf8.h"
#include "server/platform/net/listen_address.h"
#include "server/platform/net/network.h"

namespace dorad {
namespace {

constexpr char kAuto[] = "auto";

std::string Expected(const ConfigKey& key, const std::string& text) {
  constexpr size_t kShown = 80;
  return absl::StrCat("'", text.substr(0, kShown), text.size() > kShown ? "..." : "",
                      "' is not valid; expected ", DescribeValues(key));
}

// Values become paths, addresses and log fields; a NUL or broken UTF-8 would change there.
std::string CheckText(const std::string& text) {
  if (text.find('\0') != std::string::npos) return "the text contains a NUL";
  if (!IsValidUtf8(text)) return "the text is not UTF-8";
  return "";
}

// Decimal digits with an optional sign; no octal, no exponent, no blanks.
bool ParseInteger(const std::string& text, int64_t* value) {
  const size_t sign = !text.empty() && text[0] == '-' ? 1 : 0;
  if (text.size() == sign) return false;
  if (!std::all_of(text.begin() + sign, text.end(), absl::ascii_isdigit)) return false;
  return absl::SimpleAtoi(text, value);
}

// A share needs a decimal point, so that 1 means one byte.
bool ParseShare(const std::string& text, double* value) {
  return absl::StrContains(text, '.') && absl::SimpleAtod(text, value) && *value > 0 && *value <= 1;
}

std::string SetNumber(const ConfigKey& key, const std::string& text, int64_t* field) {
  if (key.may_be_auto && text == kAuto) {
    *field = 0;
    return "";
  }
  int64_t value = 0;
  const bool parsed =
      key.type == ConfigType::kBytes ? ParseBytes(text, &value) : ParseInteger(text, &value);
  const auto in_range = [&] {
    return static_cast<double>(value) >= key.min && static_cast<double>(value) <= key.max;
  };
  if (!parsed || !in_range()) return Expected(key, text);
  *field = value;
  return "";
}

std::string SetDecimal(const ConfigKey& key, const std::string& text, double* field) {
  double value = 0;
  if (!absl::SimpleAtod(text, &value) || !std::isfinite(value) || value < key.min ||
      value > key.max) {
    return Expected(key, text);
  }
  *field = value;
  return "";
}

std::string SetBoolean(const ConfigKey& key, const std::string& text, bool* field) {
  if (text != "true" && text != "false") return Expected(key, text);
  *field = text == "true";
  return "";
}

std::string SetString(const ConfigKey& key, const std::string& text, std::string* field) {
  if (std::string problem = CheckText(text); !problem.empty()) return problem;
  const bool listens = key.type == ConfigType::kListen || key.type == ConfigType::kTcp;
  if (listens && !(text.empty() && key.may_be_empty)) {
    const absl::StatusOr<ListenAddress> address = ParseListenAddress(text);
    if (!address.ok()) return std::string(address.status().message());
    if (key.type == ConfigType::kTcp && address->host.empty()) return Expected(key, text);
  }
  if (key.type == ConfigType::kChoice && !absl::c_linear_search(key.choices, text)) {
    return Expected(key, text);
  }
  double share = 0;
  int64_t bytes = 0;
  if (key.type == ConfigType::kByteLimit && !ParseShare(text, &share) &&
      !(ParseBytes(text, &bytes) && bytes > 0)) {
    return Expected(key, text);
  }
  *field = text;
  return "";
}

// A scalar's text; false for null, lists and maps.
bool IsText(const YAML::Node& node) { return node.IsScalar(); }

std::string SetList(const ConfigKey& key, const YAML::Node& node, std::vector<std::string>* field) {
  if (!node.IsSequence()) return absl::StrCat("expected a ", DescribeValues(key));
  std::vector<std::string> list;
  for (const YAML::Node& item : node) {
    if (!IsText(item)) return absl::StrCat("expected a ", DescribeValues(key));
    const std::string& text = item.Scalar();
    if (std::string problem = CheckText(text); !problem.empty()) return problem;
    if (key.type == ConfigType::kFolders && !absl::StartsWith(text, "/")) {
      return absl::StrCat("'", text, "' is not an absolute path");
    }
    if (key.type == ConfigType::kNetworks && !Network::Parse(text)) {
      return absl::StrCat("'", text, "' is neither an IP address nor address/bits");
    }
    list.push_back(text);
  }
  *field = std::move(list);
  return "";
}

std::string SetMap(const ConfigKey& key, const YAML::Node& node, Config* config) {
  if (!node.IsMap()) return absl::StrCat("expected a ", DescribeValues(key));
  Config parsed;
  std::set<std::string> names;
  for (const auto& item : node) {
    if (!IsText(item.first) || !IsText(item.second)) {
      return absl::StrCat("expected a ", DescribeValues(key));
    }
    const std::string& name = item.first.Scalar();
    if (!names.insert(name).second) return absl::StrCat("'", name, "' occurs twice");
    std::string problem = SetMapEntry(key, name, item.second.Scalar(), &parsed);
    if (!problem.empty()) return problem;
  }
  *std::get<ConfigStringMap*>(key.field(*config)) =
      std::move(*std::get<ConfigStringMap*>(key.field(parsed)));
  return "";
}

std::string Quote(const std::string& text) {
  YAML::Emitter emitter;
  emitter << YAML::DoubleQuoted << text;
  return emitter.c_str();
}

std::string FormatMap(const ConfigStringMap& map) {
  if (map.empty()) return "{}";
  std::string out;
  for (const auto& [name, value] : map) {
    absl::StrAppend(&out, "\n    ", Quote(name), ": ", Quote(value));
  }
  return out;
}

}  // namespace

bool ParseBytes(const std::string& text, int64_t* value) {
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  absl::string_view digits = text;
  int shift = 0;
  for (int unit = 0; unit < 4 && shift == 0; ++unit) {
    if (absl::ConsumeSuffix(&digits, kUnits[unit])) shift = 10 * (unit + 1);
  }
  digits = absl::StripTrailingAsciiWhitespace(digits);
  int64_t count = 0;
  if (!ParseInteger(std::string(digits), &count)) return false;
  return !__builtin_mul_overflow(count, int64_t{1} << shift, value);
}

int64_t ByteLimit(const std::string& value, int64_t total) {
  double share = 0;
  if (ParseShare(value, &share)) return static_cast<int64_t>(share * static_cast<double>(total));
  int64_t bytes = 0;
  DORAD_CHECK(ParseBytes(value, &bytes));
  return bytes;
}

std::string SetFromText(const ConfigKey& key, const std::string& text, Config* config) {
  const ConfigField field = key.field(*config);
  if (auto* const* value = std::get_if<std::string*>(&field)) return SetString(key, text, *value);
  if (auto* const* value = std::get_if<int64_t*>(&field)) return SetNumber(key, text, *value);
  if (auto* const* value = std::get_if<double*>(&field)) return SetDecimal(key, text, *value);
  if (auto* const* value = std::get_if<bool*>(&field)) return SetBoolean(key, text, *value);
  try {
    return SetFromYaml(key, LoadYamlDocument(text), config);
  } catch (const std::exception& error) {
    return absl::StrCat("not YAML: ", error.what());
  }
}

std::string SetFromYaml(const ConfigKey& key, const YAML::Node& node, Config* config) {
  const ConfigField field = key.field(*config);
  if (auto* const* value = std::get_if<std::vector<std::string>*>(&field)) {
    return SetList(key, node, *value);
  }
  if (std::holds_alternative<ConfigStringMap*>(field)) return SetMap(key, node, config);
  if (node.IsNull()) {
    return absl::StrCat(
        "the value is missing; expected ", DescribeValues(key),
        std::holds_alternative<std::string*>(field) ? " (\"\" is the empty text)" : "");
  }
  if (!IsText(node)) {
    return absl::StrCat("expected ", DescribeValues(key), ", not a ",
                        node.IsMap() ? "map" : "list");
  }
  return SetFromText(key, node.Scalar(), config);
}

std::string SetMapEntry(const ConfigKey& key, const std::string& name, const std::string& value,
                        Config* config) {
  if (name.empty()) return "a name is missing";
  if (value.empty()) return absl::StrCat("the folder of '", name, "' is missing");
  for (const std::string* text : {&name, &value}) {
    if (std::string problem = CheckText(*text); !problem.empty()) return problem;
  }
  auto& map = *std::get<ConfigStringMap*>(key.field(*config));
  for (auto& entry : map) {
    if (entry.first == name) {
      entry.second = value;
      return "";
    }
  }
  map.emplace_back(name, value);
  return "";
}

std::string ValueToYaml(const ConfigKey& key, Config* config) {
  const ConfigField field = key.field(*config);
  if (auto* const* value = std::get_if<std::string*>(&field)) return Quote(**value);
  if (auto* const* value = std::get_if<int64_t*>(&field)) {
    if (key.may_be_auto && **value == 0) return kAuto;
    return key.type == ConfigType::kBytes ? FormatBytes(**value) : absl::StrCat(**value);
  }
  if (auto* const* value = std::get_if<double*>(&field)) return FormatDecimal(**value);
  if (auto* const* value = std::get_if<bool*>(&field)) return **value ? "true" : "false";
  if (auto* const* value = std::get_if<std::vector<std::string>*>(&field)) {
    return absl::StrCat(
        "[",
        absl::StrJoin(**value, ", ",
                      [](std::string* out, const std::string& text) { out->append(Quote(text)); }),
        "]");
  }
  return FormatMap(*std::get<ConfigStringMap*>(field));
}

}  // namespace dorad
