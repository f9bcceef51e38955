// The one table of configuration keys. Parsing, --set, ToYaml, validation and the tests of the
// documentation use it. A new key needs a member in config.h and a line in config_schema.cc. The
// table is constant after its first use and therefore thread-safe.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "server/platform/config/config.h"

namespace dorad {

using ConfigStringMap = std::vector<std::pair<std::string, std::string>>;
// A pointer to a key's field in a Config.
using ConfigField = std::variant<std::string*, int64_t*, double*, bool*, std::vector<std::string>*,
                                 ConfigStringMap*>;

enum class ConfigType {
  kText,
  kChoice,  // one of `choices`
  kListen,  // host:port, [v6]:port or unix:PATH
  kTcp,     // host:port or [v6]:port
  kInteger,
  kBytes,      // 1048576, 512MiB, 2GiB
  kByteLimit,  // the same, or a share of the total: 0.5
  kSeconds,    // a decimal number
  kShare,      // a decimal number
  kBoolean,
  kFolders,   // list of absolute paths
  kNetworks,  // list of IP addresses and address/bits
  kMap,       // name: text
};

struct ConfigKey {
  const char* section;
  const char* name;
  ConfigType type;
  std::function<ConfigField(Config&)> field;
  double min, max;  // of kInteger, kBytes, kSeconds and kShare, both allowed
  std::vector<std::string> choices;
  bool may_be_empty;  // only of kListen and kTcp
  bool may_be_auto;   // only of kInteger and kBytes: the text "auto" is the value 0

  std::string path() const { return std::string(section) + "." + name; }
};

// In the order of config.h.
const std::vector<ConfigKey>& ConfigKeys();

// nullptr: no such key.
const ConfigKey* FindConfigKey(std::string_view section, std::string_view name);

// The allowed values, for messages and documentation: "integer, 1 to 4096".
std::string DescribeValues(const ConfigKey& key);

// The known "section.name" most similar to the given one, or "". A name in the wrong section is
// found by its name.
std::string NearestConfigKey(const std::string& section, const std::string& name);
std::string NearestConfigSection(const std::string& section);

// 1048576 as "1MiB": the largest unit without a fraction.
std::string FormatBytes(int64_t bytes);
// The shortest decimal text that reads back as the same number.
std::string FormatDecimal(double value);

}  // namespace dorad
