// The command line of `dorad`. Pure functions and therefore thread-safe.
//
// Not CLI11: it would save some 40 lines, and repeated values, empty values, messages and exit
// codes would each need a setting against its defaults.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace dorad {

// Exit codes (from sysexits.h where it has one).
inline constexpr int kExitOk = 0;
inline constexpr int kExitUsage = 64;
inline constexpr int kExitSoftware = 70;      // also: the engine stopped making progress
inline constexpr int kExitUnresponsive = 71;  // a listener accepted no connections any more
inline constexpr int kExitConfig = 78;        // configuration, model, adapter or listener
// 128 + N: a second signal N cut the drain short.

struct Command {
  enum class Verb { kServe, kPrintConfig, kCheckConfig, kCheckAdapter, kVersion, kHelp };
  Verb verb = Verb::kHelp;
  // The argument without a flag. check-config: the configuration file or the model's folder;
  // check-adapter: the adapter's folder. Empty for the other commands, whose argument is `model`.
  std::string path;
  std::string config_file;
  std::optional<std::string> model;
  std::vector<std::string> overrides;                         // section.key=value
  std::vector<std::pair<std::string, std::string>> adapters;  // name, folder
};

// arguments: without the program's name. INVALID_ARGUMENT (USAGE).
absl::StatusOr<Command> ParseCommandLine(const std::vector<std::string>& arguments);

const char* HelpText();

}  // namespace dorad
