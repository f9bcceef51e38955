#include "server/base/failpoint.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/base/error.h"

namespace dorad {
namespace internal {

std::atomic<bool> failpoint_armed{false};

namespace {
// Written before failpoint_armed is set.
std::string armed_name;
std::atomic<int> reaches_left{0};
}  // namespace

bool FailpointDue(std::string_view name) {
  return name == armed_name && reaches_left.fetch_sub(1) == 1;
}

void Die() {
  (void)kill(getpid(), SIGKILL);
  std::abort();
}

}  // namespace internal

absl::Status ArmFailpoint(std::string_view spec) {
  const size_t colon = spec.find(':');
  const std::string_view name = spec.substr(0, colon);
  int reaches = 1;
  const bool valid =
      !name.empty() &&
      (colon == std::string_view::npos ||
       (absl::SimpleAtoi(std::string(spec.substr(colon + 1)), &reaches) && reaches >= 1));
  if (!valid) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "USAGE",
        absl::StrCat("a failpoint is NAME or NAME:N, not \"", std::string(spec), "\""));
  }
  internal::armed_name = std::string(name);
  internal::reaches_left = reaches;
  internal::failpoint_armed = true;
  return absl::OkStatus();
}

}  // namespace dorad
