// An engine whose adapters can be paused.
#pragma once

#include "server/engine/pauses.h"
#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {

class PausesTest : public EngineTest {
 protected:
  int Pause(PauseMode mode, adapter::AdapterRef scope) {
    absl::Notification done;
    int affected = -1;
    engine_->Pause({mode, std::move(scope)}, [&](absl::StatusOr<int> count) {
      affected = count.value_or(-1);
      done.Notify();
    });
    done.WaitForNotification();
    return affected;
  }

  void Resume(adapter::AdapterRef scope) {
    absl::Notification done;
    engine_->Resume(std::move(scope), [&] { done.Notify(); });
    done.WaitForNotification();
  }

  // A Pause(WAIT), whose end is not waited for.
  struct Waiting {
    uint64_t pause_id = 0;
    absl::Notification over;
    absl::StatusOr<int> result = -1;
  };
  std::unique_ptr<Waiting> BeginWait(const adapter::AdapterRef& scope) {
    auto waiting = std::make_unique<Waiting>();
    waiting->pause_id =
        engine_->Pause({PauseMode::kWait, scope}, [w = waiting.get()](absl::StatusOr<int> result) {
          w->result = std::move(result);
          w->over.Notify();
        });
    return waiting;
  }

  // How a request of the adapter goes that is sent now.
  absl::Status Try(std::shared_ptr<const adapter::LoadedAdapter> adapter) {
    auto stream = std::make_shared<TokenStream>(/*final_only=*/false);
    const absl::Status status =
        engine_->Submit(Input(Prompt(5), 3, std::move(adapter)), stream).status();
    return status.ok() ? Wait(*stream).status : status;
  }

  // Steps that take so long that a pause comes before the end of what runs.
  void StartSlowly() {
    Start(DefaultOptions(), 64);
    runner_->on_step = [] {
      absl::SleepFor(absl::Microseconds(200));
      return absl::OkStatus();
    };
  }

  // Nothing of the stream within the time in which others end.
  void ExpectSilent(TokenStream& stream) {
    while (stream.Take()) {
    }
    EXPECT_TRUE(Wait(*Submit(Input(Prompt(7), 30))).status.ok());
    EXPECT_FALSE(stream.Take().has_value());
    EXPECT_FALSE(stream.Ended().has_value());
  }

  const adapter::AdapterRef a_{"a", 0};
  const adapter::AdapterRef a1_{"a", 1};
};

}  // namespace dorad::engine
