// Runs the commands of `dorad`. Called by main() on the main thread, one command a process.
#pragma once

#include "server/app/cli.h"

namespace dorad {

// Runs the command; its problems go to stderr, one a line. Returns the exit code.
int Run(const Command& command);
// The same for a command line that ParseCommandLine refused.
int Refuse(const absl::Status& usage);

}  // namespace dorad
