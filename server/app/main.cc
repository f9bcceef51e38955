// The program `dorad`: reads the command line and runs the command.
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "server/app/cli.h"
#include "server/app/commands.h"
#include "server/platform/process/stack_dump.h"

namespace {

int Main(const std::vector<std::string>& arguments) {
  try {
    const absl::StatusOr<dorad::Command> command = dorad::ParseCommandLine(arguments);
    return command.ok() ? dorad::Run(*command) : dorad::Refuse(command.status());
  } catch (const std::exception& e) {
    // For exceptions of libraries, for example when the model's weights do not fit into memory.
    std::fprintf(stderr, "dorad: %s\n", e.what());
    return dorad::kExitSoftware;
  }
}

}  // namespace

int main(int argc, char** argv) {
  dorad::InitializeStackDump(argv[0]);
  const int code = Main(std::vector<std::string>(argv + 1, argv + argc));
  // Without the destructors of static objects: those of libtorch undo its 3,000 registrations one
  // by one, a quarter of a short command's time.
  std::fflush(nullptr);
  _exit(code);
}
