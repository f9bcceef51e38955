#include "server/app/bounded_end.h"

#include <unistd.h>

#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "server/app/cli.h"
#include "server/base/log.h"
#include "server/base/stack_dump.h"

namespace dorad {
namespace {

// For what a process that hangs still says.
constexpr absl::Duration kLastWords = absl::Seconds(10);

const char* NameOf(BoundedEnd::Part part) {
  switch (part) {
    case BoundedEnd::Part::kCalls:
      return "calls, or clients that do not take their answers";
    case BoundedEnd::Part::kChanges:
      return "changes of the registry";
    case BoundedEnd::Part::kStep:
      return "a step of the engine";
    case BoundedEnd::Part::kLoads:
      return "loads of adapters";
  }
  return "";
}

// A step ends soon, or never. gRPC waits for clients to take what it has begun to write, also of
// calls that were cancelled; changes and loads may wait for a disk, and nobody was told that they
// are done.
int CodeOf(BoundedEnd::Part part) {
  return part == BoundedEnd::Part::kStep ? kExitSoftware : kExitOk;
}

}  // namespace

void EndSoon(int code) {
  std::thread([code] {
    absl::SleepFor(kLastWords);
    _exit(code);
  }).detach();
}

void BoundedEnd::Begin(absl::Duration time) {
  std::thread([time, shared = part_] {
    absl::SleepFor(time);
    const Part part = *shared;
    const int code = CodeOf(part);
    EndSoon(code);
    LogError("the end takes too long; ending the process",
             {{"waits_for", std::string(NameOf(part))}});
    DumpStacks();
    _exit(code);
  }).detach();
}

}  // namespace dorad
