// SIGTERM and SIGINT: the first one requests a drain, the second one a quick end, the third one
// ends the process at once. SIGHUP requests a reload of the configuration. Owned by the serve
// command. Thread-safe.
#pragma once

#include <memory>

#include "absl/synchronization/notification.h"

namespace dorad {

class Signals {
 public:
  // Blocks these signals for the calling thread and all threads that it starts. Construct it before
  // any other thread. Ignores SIGPIPE.
  Signals();

  // Until this call SIGTERM and SIGINT end the process at once with exit code 0: the server does
  // not serve yet.
  void BeginOrderlyEnd();

  enum class Event { kReload, kStop };
  // Waits for the next event. An earlier SIGHUP is not lost. kStop is the last event.
  Event Wait();

  // Requests a drain as a first SIGTERM would, with this exit code. Does not count as a signal: the
  // first real signal after it changes nothing.
  void RequestEnd(int exit_code);

  // Notified by the second SIGTERM or SIGINT; as long-lived as the process.
  const absl::Notification& hurry() const;
  // From now on the next SIGTERM or SIGINT ends the process at once. Returns the exit code so far:
  // 0, that of RequestEnd, or 128 + the number of the signal that requested a quick end.
  int EndOrderlyEnd();

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the thread that waits for signals for ever
};

}  // namespace dorad
