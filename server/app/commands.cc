#include "server/app/commands.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/app/adapter_check.h"
#include "server/app/app.h"
#include "server/app/config_check.h"
#include "server/app/options_from_config.h"
#include "server/app/signals.h"
#include "server/platform/config/config.h"
#include "server/platform/error.h"
#include "server/platform/log.h"
#include "server/platform/process/failpoint.h"
#include "server/platform/process/service_manager.h"

namespace dorad {
namespace {

// A caller's text (a path, a key) must not start a new line.
std::string OneLine(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ') c = ' ';
  }
  return text;
}

void PrintProblem(const char* before, const std::string& text, const std::string& reason) {
  std::fprintf(stderr, "dorad: %s%s%s\n", before, OneLine(text).c_str(),
               reason.empty() ? "" : absl::StrCat(" [", reason, "]").c_str());
}

// The message without the list of problems. REQUIRES: !violations.empty().
std::string SubjectOf(const absl::Status& status, const std::vector<Violation>& violations) {
  const std::string text(status.message());
  return text.substr(0, text.find(": " + violations[0].field));
}

// One line for each problem, each with its reason.
void PrintError(const absl::Status& status) {
  const std::vector<Violation> violations = ViolationsOf(status);
  std::string text(status.message());
  if (violations.size() > 1) {
    // The message lists only the first few violations; this prints all.
    const size_t omitted = OmittedViolationsOf(status);
    std::fprintf(stderr, "dorad: %zu problems: %s\n", violations.size() + omitted,
                 OneLine(SubjectOf(status, violations)).c_str());
    for (const Violation& v : violations) {
      PrintProblem("  ", v.field + ": " + v.description, v.reason);
    }
    if (omitted > 0) PrintProblem("  ", absl::StrCat("and ", omitted, " more"), "");
    return;
  }
  PrintProblem("", text, violations.empty() ? ReasonOf(status) : violations[0].reason);
}

absl::StatusOr<Config> ReadConfig(const Command& command, ConfigOrigins* origins = nullptr) {
  DORAD_ASSIGN_OR_RETURN(Config config,
                         LoadConfig(command.config_file, command.overrides, origins));
  if (command.model) config.model.path = *command.model;
  config.adapters.preload.insert(config.adapters.preload.end(), command.adapters.begin(),
                                 command.adapters.end());
  if (origins != nullptr) {
    if (command.model) (*origins)["model.path"] = "--model";
    if (!command.adapters.empty()) (*origins)["adapters.preload"] = "--adapter";
  }
  return config;
}

// The configuration for a command that needs a model.
absl::StatusOr<Config> ReadConfigWithModel(const Command& command) {
  DORAD_ASSIGN_OR_RETURN(Config config, ReadConfig(command));
  if (config.model.path.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "MODEL_MISSING",
                     command.verb == Command::Verb::kServe
                         ? "no model: say dorad serve MODEL or set model.path"
                         : "no model: give --model DIR or set model.path");
  }
  return config;
}

int Fail(const absl::Status& status, int code) {
  PrintError(status);
  return code;
}

// As Fail, after the configuration is known: lines of the log for programs, text for people.
int FailStart(const Config& config, const absl::Status& status) {
  if (config.log.format != "json" || isatty(STDERR_FILENO) == 1) return Fail(status, kExitConfig);
  constexpr char kWhat[] = "the server does not start";
  const std::vector<Violation> violations = ViolationsOf(status);
  if (violations.size() <= 1) {
    LogError(kWhat, {{"reason", ReasonOf(status)}, {"error", std::string(status.message())}});
    return kExitConfig;
  }
  const std::string subject = SubjectOf(status, violations);
  for (const Violation& v : violations) {
    LogError(
        kWhat,
        {{"reason", v.reason}, {"subject", subject}, {"where", v.field}, {"error", v.description}});
  }
  if (const size_t omitted = OmittedViolationsOf(status); omitted > 0) {
    LogError(kWhat, {{"more_problems", static_cast<int64_t>(omitted)}});
  }
  return kExitConfig;
}

// Each connection takes a descriptor; the soft limit is low only for programs with select().
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) LogWarning("cannot raise the limit of descriptors");
}

int Serve(const Command& command) {
  Signals signals;
  absl::StatusOr<std::unique_ptr<App>> app;  // outlives the manager's thread, which uses it
  const std::unique_ptr<ServiceManager> manager = ServiceManager::FromEnvironment();
  const absl::StatusOr<Config> config = ReadConfigWithModel(command);
  if (!config.ok()) return Fail(config.status(), kExitConfig);
  ApplyLogging(config->log);
  if (const char* failpoint = std::getenv("DORAD_FAILPOINT")) {
    const absl::Status armed = ArmFailpoint(failpoint);
    if (!armed.ok()) return Fail(armed, kExitUsage);
    LogWarning("a failpoint is armed: the process will fail there", {{"failpoint", failpoint}});
  }
  RaiseDescriptorLimit();
  app = App::Start(*config, [&signals] { signals.RequestEnd(kExitUnresponsive); });
  if (!app.ok()) return FailStart(*config, app.status());
  signals.BeginOrderlyEnd();
  std::printf("%s\n", (*app)->ReadyLine().c_str());
  std::fflush(stdout);
  manager->Ready("serving");
  manager->KeepAlive([&app] { return (*app)->alive(); });
  while (signals.Wait() == Signals::Event::kReload) {
    manager->Reloading();
    (*app)->Reload(ReadConfigWithModel(command));
    manager->Ready("serving");
  }
  manager->Stopping("finishing running requests");
  (*app)->Stop(signals.hurry());
  const int code = signals.EndOrderlyEnd();
  // An early end skips the destructors, which would wait for loads and steps; durable data is on
  // the disk.
  if (code != kExitOk) _exit(code);
  return code;
}

// check-config's argument: a folder is serve's MODEL, else it is the configuration file.
absl::StatusOr<Command> WithPath(Command command) {
  std::error_code error;
  const bool is_model = std::filesystem::is_directory(command.path, error);
  if (command.path.empty()) return command;
  if (is_model ? command.model.has_value() : !command.config_file.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "USAGE",
                     absl::StrCat("a second ", is_model ? "model" : "configuration file", ", \"",
                                  command.path, "\" (see dorad --help)"));
  }
  if (is_model) {
    command.model = command.path;
  } else {
    command.config_file = command.path;
  }
  return command;
}

int CheckConfig(const Command& given) {
  const absl::StatusOr<Command> command = WithPath(given);
  if (!command.ok()) return Fail(command.status(), kExitUsage);
  const absl::StatusOr<Config> config = ReadConfig(*command);
  if (!config.ok()) return Fail(config.status(), kExitConfig);
  const absl::Status checked = CheckStart(*config);
  if (!checked.ok()) return Fail(checked, kExitConfig);
  std::printf("%s: fine%s\n",
              command->config_file.empty() ? "configuration" : command->config_file.c_str(),
              config->model.path.empty() ? "; it names no model" : "");
  return kExitOk;
}

int CheckAdapter(const Command& command) {
  const absl::StatusOr<Config> config = ReadConfigWithModel(command);
  if (!config.ok()) return Fail(config.status(), kExitConfig);
  const absl::StatusOr<adapter::AdapterSummary> found = CheckAdapterFiles(command.path, *config);
  if (!found.ok()) return Fail(found.status(), kExitConfig);
  std::fputs(ToYaml(*found).c_str(), stdout);
  return kExitOk;
}

int PrintConfig(const Command& command) {
  ConfigOrigins origins;
  const absl::StatusOr<Config> config = ReadConfig(command, &origins);
  if (!config.ok()) return Fail(config.status(), kExitConfig);
  std::fputs(ToYaml(*config, &origins).c_str(), stdout);
  return kExitOk;
}

}  // namespace

int Refuse(const absl::Status& usage) { return Fail(usage, kExitUsage); }

int Run(const Command& command) {
  switch (command.verb) {
    case Command::Verb::kServe:
      return Serve(command);
    case Command::Verb::kCheckConfig:
      return CheckConfig(command);
    case Command::Verb::kPrintConfig:
      return PrintConfig(command);
    case Command::Verb::kCheckAdapter:
      return CheckAdapter(command);
    case Command::Verb::kVersion:
      std::printf("dorad %s\n", DORAD_VERSION);
      return kExitOk;
    case Command::Verb::kHelp:
      std::fputs(HelpText(), stdout);
      return kExitOk;
  }
  return kExitSoftware;
}

}  // namespace dorad
