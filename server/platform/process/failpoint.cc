#include "server/platform/process/failpoint.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/platform/error.h"
#include "server/platform/log.h"

namespace dorad {
namespace internal {

std::atomic<bool> failpoint_armed{false};

namespace {
enum class Action { kKill, kThrow, kHang, kDelay };

constexpr unsigned kDelaySeconds = 5;

// Written before failpoint_armed is set.
std::string armed_name;
Action armed_action = Action::kKill;
std::atomic<int> reaches_left{0};
}  // namespace

bool FailpointDue(std::string_view name) {
  return name == armed_name && reaches_left.fetch_sub(1) == 1;
}

void GoWrong() {
  switch (armed_action) {
    case Action::kThrow:
      throw std::runtime_error("failpoint " + armed_name);
    case Action::kHang:
      while (true) pause();
    case Action::kDelay:
      LogWarning("delayed at a failpoint", {{"point", armed_name}});
      (void)sleep(kDelaySeconds);
      return;
    case Action::kKill:
      break;
  }
  (void)kill(getpid(), SIGKILL);
  std::abort();
}

}  // namespace internal

absl::Status ArmFailpoint(std::string_view spec) {
  const size_t equals = spec.find('=');
  const std::string_view place = spec.substr(0, equals);
  const std::string_view action =
      equals == std::string_view::npos ? "kill" : spec.substr(equals + 1);
  const size_t colon = place.find(':');
  const std::string_view name = place.substr(0, colon);
  int reaches = 1;
  const bool valid =
      !name.empty() &&
      (action == "kill" || action == "throw" || action == "hang" || action == "delay") &&
      (colon == std::string_view::npos ||
       (absl::SimpleAtoi(std::string(place.substr(colon + 1)), &reaches) && reaches >= 1));
  if (!valid) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "USAGE",
        absl::StrCat("a failpoint is NAME or NAME:N, perhaps with =kill, =throw, =hang "
                     "or =delay, not \"",
                     std::string(spec), "\""));
  }
  internal::armed_name = std::string(name);
  internal::armed_action = action == "throw"   ? internal::Action::kThrow
                           : action == "hang"  ? internal::Action::kHang
                           : action == "delay" ? internal::Action::kDelay
                                               : internal::Action::kKill;
  internal::reaches_left = reaches;
  internal::failpoint_armed = true;
  return absl::OkStatus();
}

}  // namespace dorad
