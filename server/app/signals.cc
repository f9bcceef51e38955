#include "server/app/signals.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"

namespace dorad {

struct Signals::State {
  sigset_t set;
  std::atomic<bool> orderly{false};
  absl::Notification first;
};

Signals::Signals() : state_(std::make_shared<State>()) {
  signal(SIGPIPE, SIG_IGN);
  sigemptyset(&state_->set);
  sigaddset(&state_->set, SIGTERM);
  sigaddset(&state_->set, SIGINT);
  pthread_sigmask(SIG_BLOCK, &state_->set, nullptr);
  std::thread([state = state_] {
    while (true) {
      int number = 0;
      if (sigwait(&state->set, &number) != 0) continue;
      if (!state->orderly || state->first.HasBeenNotified()) _exit(128 + number);
      state->first.Notify();
    }
  }).detach();
}

void Signals::BeginOrderlyEnd() { state_->orderly = true; }

void Signals::Wait() { state_->first.WaitForNotification(); }

}  // namespace dorad
