#include "server/app/signals.h"

#include <signal.h>
#include <unistd.h>

#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/platform/log.h"

namespace dorad {

struct Signals::State {
  enum class Phase { kStarting, kServing, kStoppingByItself, kStopping, kHurrying, kEnding };

  void Handle(int number) {
    absl::MutexLock lock(&mu);
    if (number == SIGHUP) {
      reload = true;
      return;
    }
    switch (phase) {
      case Phase::kStarting:
        LogInfo("asked to end before serving", {{"signal", int64_t{number}}});
        _exit(0);
      case Phase::kServing:
      case Phase::kStoppingByItself:
        phase = Phase::kStopping;
        break;
      case Phase::kStopping:
        phase = Phase::kHurrying;
        exit_code = 128 + number;
        hurry.Notify();
        break;
      case Phase::kHurrying:
      case Phase::kEnding:
        _exit(128 + number);
    }
  }

  sigset_t set;
  absl::Notification hurry;
  absl::Mutex mu;
  Phase phase ABSL_GUARDED_BY(mu) = Phase::kStarting;
  bool reload ABSL_GUARDED_BY(mu) = false;
  int exit_code ABSL_GUARDED_BY(mu) = 0;
};

Signals::Signals() : state_(std::make_shared<State>()) {
  signal(SIGPIPE, SIG_IGN);
  sigemptyset(&state_->set);
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&state_->set, number);
  pthread_sigmask(SIG_BLOCK, &state_->set, nullptr);
  std::thread([state = state_] {
    while (true) {
      int number = 0;
      if (sigwait(&state->set, &number) == 0) state->Handle(number);
    }
  }).detach();
}

void Signals::BeginOrderlyEnd() {
  absl::MutexLock lock(&state_->mu);
  if (state_->phase == State::Phase::kStarting) state_->phase = State::Phase::kServing;
}

void Signals::RequestEnd(int exit_code) {
  absl::MutexLock lock(&state_->mu);
  if (state_->phase > State::Phase::kServing) return;
  state_->phase = State::Phase::kStoppingByItself;
  state_->exit_code = exit_code;
}

Signals::Event Signals::Wait() {
  State& state = *state_;
  absl::MutexLock lock(&state.mu);
  const auto has_come = [&state]() ABSL_SHARED_LOCKS_REQUIRED(state.mu) {
    return state.reload || state.phase != State::Phase::kServing;
  };
  state.mu.Await(absl::Condition(&has_come));
  if (state.phase != State::Phase::kServing) return Event::kStop;
  state.reload = false;
  return Event::kReload;
}

const absl::Notification& Signals::hurry() const { return state_->hurry; }

int Signals::EndOrderlyEnd() {
  absl::MutexLock lock(&state_->mu);
  state_->phase = State::Phase::kEnding;
  return state_->exit_code;
}

}  // namespace dorad
