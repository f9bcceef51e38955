// SIGTERM and SIGINT: the first one asks for an orderly end, the second one for a quick one, the
// third one ends the process at once. SIGHUP asks for the configuration to be read again.
// Thread-safe.
#pragma once

#include <memory>

#include "absl/synchronization/notification.h"

namespace dorad {

class Signals {
 public:
  // Blocks these signals for the calling thread and all threads that it starts; to be made before
  // any other thread. Ignores SIGPIPE.
  Signals();

  // Until then SIGTERM and SIGINT end the process at once, with 0: nobody is served yet.
  void BeginOrderlyEnd();

  enum class Event { kReload, kStop };
  // Waits for the next one; a SIGHUP that came before is not lost. After kStop there is none.
  Event Wait();

  // Asks for the orderly end as a first SIGTERM would, with this exit code. Counts as none: the
  // first signal that comes from outside meanwhile changes nothing.
  void RequestEnd(int exit_code);

  // Notified by the second SIGTERM or SIGINT; as long-lived as the process.
  const absl::Notification& hurry() const;
  // From now on the next SIGTERM or SIGINT ends the process at once. Returns the exit code of the
  // end so far: 0, RequestEnd's, or 128 + the number of the signal that asked for a quick one.
  int EndOrderlyEnd();

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the thread that waits for signals for ever
};

}  // namespace dorad
