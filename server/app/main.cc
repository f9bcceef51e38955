// The program `dorad`: reads the command line and runs the command.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "server/app/cli.h"
#include "server/app/commands.h"
#include "server/platform/process/stack_dump.h"

int main(int argc, char** argv) {
  dorad::InitializeStackDump(argv[0]);
  try {
    const absl::StatusOr<dorad::Command> command =
        dorad::ParseCommandLine(std::vector<std::string>(argv + 1, argv + argc));
    return command.ok() ? dorad::Run(*command) : dorad::Refuse(command.status());
  } catch (const std::exception& e) {
    // For exceptions of libraries, for example when the model's weights do not fit into memory.
    std::fprintf(stderr, "dorad: %s\n", e.what());
    return dorad::kExitSoftware;
  }
}
