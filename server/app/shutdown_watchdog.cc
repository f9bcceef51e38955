#include "server/app/shutdown_watchdog.h"

#include <unistd.h>

#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "server/app/cli.h"
#include "server/platform/log.h"
#include "server/platform/process/stack_dump.h"

namespace dorad {
namespace {

// Time for the log of a process that hangs.
constexpr absl::Duration kLastWords = absl::Seconds(10);

const char* NameOf(ShutdownWatchdog::Part part) {
  switch (part) {
    case ShutdownWatchdog::Part::kCalls:
      return "calls, or clients that do not read their answers";
    case ShutdownWatchdog::Part::kChanges:
      return "changes of the registry";
    case ShutdownWatchdog::Part::kStep:
      return "a step of the engine";
    case ShutdownWatchdog::Part::kLoads:
      return "loads of adapters";
  }
  return "";
}

// A step that does not end in time never ends: a failure. Calls wait for clients, also for slow
// readers of cancellations; changes and loads may wait for a disk, and their callers have no answer
// yet: no failure.
int CodeOf(ShutdownWatchdog::Part part) {
  return part == ShutdownWatchdog::Part::kStep ? kExitSoftware : kExitOk;
}

}  // namespace

void EndSoon(int code) {
  std::thread([code] {
    absl::SleepFor(kLastWords);
    _exit(code);
  }).detach();
}

void ShutdownWatchdog::Begin(absl::Duration time) {
  std::thread([time, shared = part_] {
    absl::SleepFor(time);
    const Part part = *shared;
    const int code = CodeOf(part);
    EndSoon(code);
    LogError("the shutdown takes too long; ending the process",
             {{"waits_for", std::string(NameOf(part))}});
    DumpStacks();
    _exit(code);
  }).detach();
}

}  // namespace dorad
