#include "server/platform/config/config.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/platform/config/config_schema.h"
#include "server/platform/config/config_value.h"
#include "server/platform/config/yaml_document.h"
#include "server/platform/error.h"
#include "server/platform/files/file.h"

namespace dorad {
namespace {

constexpr uint64_t kMaxFileBytes = 1 << 20;
constexpr size_t kMaxProblems = 100;

std::string DidYouMean(const std::string& nearest) {
  return nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?");
}

// Fills a Config and continues after a problem, so that one run reports all of them.
class ConfigReader {
 public:
  explicit ConfigReader(std::string name) : name_(std::move(name)) {}

  void ReadYaml(const std::string& text) {
    try {
      const YAML::Node document = LoadYamlDocument(text);
      if (!document.IsNull()) ReadDocument(document);
    } catch (const YAML::Exception& error) {
      Report(Place(error.mark), "CONFIG_SYNTAX", error.msg);
    } catch (const std::exception& error) {
      Report(name_, "CONFIG_SYNTAX", error.what());
    }
  }

  // "section.key=value", or "section.map.entry=value".
  void Override(const std::string& text) {
    const size_t equals = text.find('=');
    const std::string path = text.substr(0, equals);
    const std::string place = absl::StrCat("--set ", path);
    const size_t dot = path.find('.');
    if (equals == std::string::npos || dot == std::string::npos) {
      return Report(place, "CONFIG_SYNTAX", "expected section.key=value");
    }
    const std::string section = path.substr(0, dot);
    const std::string name = path.substr(dot + 1);
    const std::string value = text.substr(equals + 1);
    std::string problem;
    if (const ConfigKey* key = FindConfigKey(section, name)) {
      problem = SetFromText(*key, value, &config_);
    } else if (const ConfigKey* map = MapOf(section, name)) {
      problem = SetMapEntry(*map, name.substr(name.find('.') + 1), value, &config_);
    } else {
      return Report(place, "CONFIG_UNKNOWN_KEY",
                    absl::StrCat("unknown key", DidYouMean(NearestConfigKey(section, name))));
    }
    if (!problem.empty()) return Report(place, "CONFIG_INVALID_VALUE", std::move(problem));
    const ConfigKey* map = MapOf(section, name);
    origins_[map == nullptr ? path : map->path()] = "--set";
  }

  absl::StatusOr<Config> Finish(ConfigOrigins* origins) && {
    if (!problems_.empty()) return MakeInvalid("configuration", std::move(problems_));
    if (origins != nullptr) *origins = std::move(origins_);
    return std::move(config_);
  }

 private:
  // "map.entry" of a key that is a map; nullptr otherwise.
  static const ConfigKey* MapOf(const std::string& section, const std::string& name) {
    const size_t dot = name.find('.');
    if (dot == std::string::npos) return nullptr;
    const ConfigKey* key = FindConfigKey(section, name.substr(0, dot));
    return key != nullptr && key->type == ConfigType::kMap ? key : nullptr;
  }

  void ReadDocument(const YAML::Node& root) {
    if (!root.IsMap()) {
      return Report(Place(root.Mark()), "CONFIG_SYNTAX", "expected a map of sections");
    }
    std::set<std::string> seen;
    for (const auto& item : root) {
      const std::string section = KeyText(item.first);
      const std::string place = absl::StrCat(Place(item.first.Mark()), ": ", section);
      if (!seen.insert(section).second) {
        Report(place, "CONFIG_DUPLICATE_KEY", "the section occurs twice");
      } else if (!IsSection(section)) {
        ReportUnknownSection(place, section);
      } else if (item.second.IsMap()) {
        ReadSection(section, item.second);
      } else if (!item.second
                      .IsNull()) {  // an empty section is one with all its keys commented out
        Report(place, "CONFIG_INVALID_VALUE", "expected a map of keys");
      }
    }
  }

  void ReadSection(const std::string& section, const YAML::Node& node) {
    std::set<std::string> seen;
    for (const auto& item : node) {
      const std::string name = KeyText(item.first);
      const std::string place = absl::StrCat(Place(item.first.Mark()), ": ", section, ".", name);
      const ConfigKey* key = FindConfigKey(section, name);
      if (!seen.insert(name).second) {
        Report(place, "CONFIG_DUPLICATE_KEY", "the key occurs twice");
      } else if (key == nullptr) {
        Report(place, "CONFIG_UNKNOWN_KEY",
               absl::StrCat("unknown key", DidYouMean(NearestConfigKey(section, name))));
      } else if (std::string problem = SetFromYaml(*key, item.second, &config_); !problem.empty()) {
        Report(place, "CONFIG_INVALID_VALUE", std::move(problem));
      } else {
        origins_[key->path()] = Place(item.first.Mark());
      }
    }
  }

  void ReportUnknownSection(const std::string& place, const std::string& section) {
    // A key outside of its section is more likely than a misspelt section.
    std::string nearest = NearestConfigSection(section);
    if (nearest.empty()) nearest = NearestConfigKey("", section);
    Report(place, "CONFIG_UNKNOWN_KEY", absl::StrCat("unknown section", DidYouMean(nearest)));
  }

  static bool IsSection(const std::string& name) {
    for (const ConfigKey& key : ConfigKeys()) {
      if (name == key.section) return true;
    }
    return false;
  }

  static std::string KeyText(const YAML::Node& node) {
    constexpr size_t kShown = 96;
    return node.IsScalar() ? node.Scalar().substr(0, kShown) : "(a key that is not text)";
  }

  std::string Place(const YAML::Mark& mark) const {
    return mark.is_null() ? name_ : absl::StrCat(name_, ":", mark.line + 1);
  }

  void Report(std::string place, const char* reason, std::string description) {
    if (problems_.size() < kMaxProblems) {
      problems_.push_back({std::move(place), reason, std::move(description)});
    }
  }

  const std::string name_;
  Config config_;
  ConfigOrigins origins_;
  std::vector<Violation> problems_;
};

}  // namespace

absl::StatusOr<Config> LoadConfig(const std::string& file,
                                  const std::vector<std::string>& overrides,
                                  ConfigOrigins* origins) {
  std::string text;
  if (!file.empty()) {
    DORAD_ASSIGN_OR_RETURN(text, ReadFileText(file, kMaxFileBytes));
  }
  return ParseConfig(text, file, overrides, origins);
}

absl::StatusOr<Config> ParseConfig(const std::string& text, const std::string& name,
                                   const std::vector<std::string>& overrides,
                                   ConfigOrigins* origins) {
  ConfigReader reader(name);
  reader.ReadYaml(text);
  for (const std::string& item : overrides) reader.Override(item);
  return std::move(reader).Finish(origins);
}

std::string ToYaml(const Config& config, const ConfigOrigins* origins) {
  Config copy = config;
  std::string out, section;
  for (const ConfigKey& key : ConfigKeys()) {
    if (section != key.section) {
      section = key.section;
      absl::StrAppend(&out, section, ":\n");
    }
    const std::string value = ValueToYaml(key, &copy);
    std::string comment;
    if (origins != nullptr) {
      const auto origin = origins->find(key.path());
      comment = absl::StrCat("  # ", origin == origins->end() ? "default" : origin->second);
    }
    // The entries of a map have lines of their own.
    if (value.front() == '\n') {
      absl::StrAppend(&out, "  ", key.name, ":", comment, value, "\n");
    } else {
      absl::StrAppend(&out, "  ", key.name, ": ", value, comment, "\n");
    }
  }
  return out;
}

}  // namespace dorad
