// SIGTERM and SIGINT: the first one asks for an orderly end, the second one ends the process at
// once. Thread-safe.
#pragma once

#include <memory>

namespace dorad {

class Signals {
 public:
  // Blocks both signals for the calling thread and all threads that it starts; to be made before
  // any other thread. Ignores SIGPIPE.
  Signals();

  // Until then the first signal, too, ends the process at once (with 128 + its number).
  void BeginOrderlyEnd();
  // Waits for the first signal.
  void Wait();

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the thread that waits for signals for ever
};

}  // namespace dorad
