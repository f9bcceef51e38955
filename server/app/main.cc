// The program `dorad`.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "server/app/app.h"
#include "server/app/cli.h"
#include "server/app/signals.h"
#include "server/base/config.h"
#include "server/base/error.h"
#include "server/base/failpoint.h"
#include "server/base/log.h"

namespace dorad {
namespace {

// A caller's text (a path, a key) must not start a line of its own.
std::string OneLine(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ') c = ' ';
  }
  return text;
}

// One line for each problem.
void PrintError(const absl::Status& status) {
  const std::vector<Violation> violations = ViolationsOf(status);
  std::string text(status.message());
  if (violations.size() > 1) {
    // The message lists the first few, after the part that failed; here is room for all.
    std::fprintf(stderr, "dorad: %zu problems: %s\n", violations.size(),
                 OneLine(text.substr(0, text.find(": " + violations[0].field))).c_str());
    for (const Violation& v : violations) {
      std::fprintf(stderr, "dorad:   %s\n", OneLine(v.field + ": " + v.description).c_str());
    }
    return;
  }
  std::fprintf(stderr, "dorad: %s\n", OneLine(std::move(text)).c_str());
}

absl::StatusOr<Config> ReadConfig(const Command& command) {
  DORAD_ASSIGN_OR_RETURN(Config config, LoadConfig(command.config_file, command.overrides));
  if (command.model) config.model.path = *command.model;
  config.adapters.preload.insert(config.adapters.preload.end(), command.adapters.begin(),
                                 command.adapters.end());
  return config;
}

int Fail(const absl::Status& status, int code) {
  PrintError(status);
  return code;
}

int Serve(const Command& command) {
  Signals signals;
  const absl::StatusOr<Config> config = ReadConfig(command);
  if (!config.ok()) return Fail(config.status(), kExitConfig);
  if (config->model.path.empty()) {
    return Fail(MakeError(absl::StatusCode::kInvalidArgument, "MODEL_MISSING",
                          "no model: say --model DIR or set model.path"),
                kExitConfig);
  }
  LogLevel level = LogLevel::kInfo;
  ParseLogLevel(config->log.level, &level);
  SetLogging(level, config->log.format == "json");
  if (const char* failpoint = std::getenv("DORAD_FAILPOINT")) {
    const absl::Status armed = ArmFailpoint(failpoint);
    if (!armed.ok()) return Fail(armed, kExitUsage);
    LogWarning("a failpoint is armed: the process will kill itself", {{"failpoint", failpoint}});
  }
  absl::StatusOr<std::unique_ptr<App>> app = App::Start(*config);
  if (!app.ok()) return Fail(app.status(), kExitConfig);
  signals.BeginOrderlyEnd();
  std::printf("%s\n", (*app)->ReadyLine().c_str());
  std::fflush(stdout);
  signals.Wait();
  (*app)->Stop();
  return kExitOk;
}

int CheckConfig(const Command& command) {
  const absl::StatusOr<Config> config = LoadConfig(command.config_file, command.overrides);
  if (!config.ok()) return Fail(config.status(), kExitConfig);
  std::printf("%s: fine\n", command.config_file.c_str());
  return kExitOk;
}

int Main(const std::vector<std::string>& arguments) {
  const absl::StatusOr<Command> command = ParseCommandLine(arguments);
  if (!command.ok()) return Fail(command.status(), kExitUsage);
  switch (command->verb) {
    case Command::Verb::kServe:
      return Serve(*command);
    case Command::Verb::kCheckConfig:
      return CheckConfig(*command);
    case Command::Verb::kVersion:
      std::printf("dorad %s\n", DORAD_VERSION);
      return kExitOk;
    case Command::Verb::kHelp:
      std::fputs(HelpText(), stdout);
      return kExitOk;
  }
  return kExitSoftware;
}

}  // namespace
}  // namespace dorad

int main(int argc, char** argv) {
  try {
    return dorad::Main(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& e) {
    // Libraries throw, for example when memory for the KV cache is not to be had.
    std::fprintf(stderr, "dorad: %s\n", e.what());
    return dorad::kExitSoftware;
  }
}
