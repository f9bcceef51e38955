#include "server/app/cli.h"

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "server/platform/config/edit_distance.h"
#include "server/platform/error.h"

namespace dorad {
namespace {

absl::Status Usage(const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "USAGE",
                   absl::StrCat(message, " (see dorad --help)"));
}

// Iterates over the arguments; a flag's value is the next argument or, after '=', part of the flag.
class Arguments {
 public:
  explicit Arguments(const std::vector<std::string>& arguments) : arguments_(arguments) {}

  // Advances to the next argument. False at the end.
  bool Next() {
    if (position_ == arguments_.size()) return false;
    word_ = arguments_[position_++];
    value_.reset();
    const size_t equals = word_.find('=');
    if (word_.rfind("--", 0) == 0 && equals != std::string::npos) {
      value_ = word_.substr(equals + 1);
      word_.resize(equals);
    }
    return true;
  }

  const std::string& word() const { return word_; }
  bool has_inline_value() const { return value_.has_value(); }

  absl::StatusOr<std::string> Value() {
    if (!value_) {
      if (position_ == arguments_.size()) return Usage(absl::StrCat(word_, " needs a value"));
      value_ = arguments_[position_++];
    }
    if (value_->empty()) return Usage(absl::StrCat(word_, " needs a value"));
    return *value_;
  }

 private:
  const std::vector<std::string>& arguments_;
  size_t position_ = 0;
  std::string word_;
  std::optional<std::string> value_;
};

absl::Status AddAdapter(const std::string& value, Command* command) {
  const size_t equals = value.find('=');
  if (equals == std::string::npos || equals == 0 || equals + 1 == value.size()) {
    return Usage(absl::StrCat("--adapter takes name=DIR, not \"", value, "\""));
  }
  command->adapters.emplace_back(value.substr(0, equals), value.substr(equals + 1));
  return absl::OkStatus();
}

constexpr const char* kVerbs[] = {"serve", "check-config", "print-config", "check-adapter"};
constexpr const char* kVerbList = "serve, check-config, print-config or check-adapter";
constexpr const char* kFlags[] = {"--model", "--config", "--set", "--adapter", "--help"};

// The argument without a flag.
absl::Status TakePositional(const std::string& value, Command* command) {
  if (command->verb == Command::Verb::kCheckConfig ||
      command->verb == Command::Verb::kCheckAdapter) {
    if (!command->path.empty()) return Usage(absl::StrCat("a second argument, \"", value, "\""));
    command->path = value;
    return absl::OkStatus();
  }
  if (command->model) return Usage(absl::StrCat("a second model, \"", value, "\""));
  command->model = value;
  return absl::OkStatus();
}

absl::Status ParseArgument(Arguments* arguments, Command* command) {
  const std::string word = arguments->word();
  if (word == "--help" && !arguments->has_inline_value()) {
    command->verb = Command::Verb::kHelp;
    return absl::OkStatus();
  }
  if (word.rfind('-', 0) != 0) return TakePositional(word, command);
  if (!absl::c_linear_search(kFlags, word) || word == "--help") {
    return Usage(absl::StrCat("unknown argument \"", word, "\"", DidYouMean(word, kFlags)));
  }
  DORAD_ASSIGN_OR_RETURN(std::string value, arguments->Value());
  if (word == "--adapter") return AddAdapter(value, command);
  if (word == "--model") command->model = value;
  if (word == "--config") command->config_file = value;
  if (word == "--set") command->overrides.push_back(value);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Command> ParseCommandLine(const std::vector<std::string>& arguments) {
  Arguments words(arguments);
  Command command;
  if (!words.Next()) return Usage(absl::StrCat("a command is missing: ", kVerbList));
  const std::string verb = words.word();
  if (verb == "--help" || verb == "-h" || verb == "help") return command;
  if (verb == "--version") {
    command.verb = Command::Verb::kVersion;
    return command;
  }
  if (verb == "serve") {
    command.verb = Command::Verb::kServe;
  } else if (verb == "print-config") {
    command.verb = Command::Verb::kPrintConfig;
  } else if (verb == "check-config") {
    command.verb = Command::Verb::kCheckConfig;
  } else if (verb == "check-adapter") {
    command.verb = Command::Verb::kCheckAdapter;
  } else {
    return Usage(
        absl::StrCat("unknown command \"", verb, "\": ", kVerbList, DidYouMean(verb, kVerbs)));
  }
  bool is_empty = true;
  for (; words.Next(); is_empty = false) {
    DORAD_RETURN_IF_ERROR(ParseArgument(&words, &command));
  }
  if (command.verb == Command::Verb::kCheckConfig && is_empty) {
    return Usage("dorad check-config needs a FILE, a MODEL or flags");
  }
  if (command.verb == Command::Verb::kCheckAdapter) {
    if (command.path.empty()) return Usage("dorad check-adapter needs the adapter's folder");
    if (!command.adapters.empty()) return Usage("dorad check-adapter takes DIR without --adapter");
  }
  return command;
}

const char* HelpText() {
  return R"(dorad: serves one base model and many DoRA and LoRA adapters over gRPC.

  dorad serve [MODEL] [--config FILE] [--set section.key=value]... [--adapter name=DIR]...
      MODEL, --model DIR  Hugging Face folder (also model.path)
      --config FILE       YAML; deploy/dorad.yaml lists every key with its default
      --set section.key=value
                          overrides the file
      --adapter name=DIR  PEFT folder that is loaded and activated before the server is ready,
                          unless the store has an active version of that name
      Prints "dorad ready grpc=HOST:PORT metrics=http://HOST:PORT/metrics" when it serves.
      SIGTERM or SIGINT: lets running requests finish, then ends; a second one ends them, too.
      SIGHUP: reads the file again and applies the keys that can change.

  dorad check-config [FILE | MODEL] [the flags of serve]
      Reports errors that a start would find before it loads anything.
  dorad print-config [the arguments of serve]
      Prints the configuration in effect as YAML, each value with its origin.
  dorad check-adapter DIR --model DIR [--config FILE] [--set section.key=value]...
      Validates a PEFT folder against the model's config.json, without the model's weights.
      Prints what it is, its digest and the checks that only a server makes, as YAML.
  dorad --version
  dorad --help

Exit codes: 0 ended as asked, 64 usage, 70 the engine stopped making progress,
71 a listener accepted no connections any more, 78 configuration, model, adapter or listener,
128 + N ended early by a second signal N.
)";
}

}  // namespace dorad
