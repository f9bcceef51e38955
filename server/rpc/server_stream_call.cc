#include "server/rpc/server_stream_call.h"

#include <memory>

namespace dorad::rpc {

void ServerStreamCall::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    if (abandoned_ && work_cancelled_) return FinishLocked(*abandoned_);
  }
  Guarded(
      method_.name,
      [&] {
        Reach("rpc_write_done");
        // OnCancel runs as well.
        if (!ok) Abandon(record_.CancelStatus());
      },
      [this](const absl::Status& status) { Abandon(status); });
  Pump();
}

void ServerStreamCall::Wake() {
  if (wake_posted_.exchange(true)) return;
  services_->response_executor->Submit(
      [self = std::static_pointer_cast<ServerStreamCall>(shared_from_this())] {
        // Cleared before the source is read, so that a later push posts a new wake-up.
        self->wake_posted_ = false;
        self->Pump();
      });
}

void ServerStreamCall::Pump() {
  Guarded(
      method_.name,
      [this] {
        Reach("rpc_pump");
        absl::MutexLock lock(&mu_);
        PumpLocked();
      },
      [this](const absl::Status& status) { Abandon(status); });
}

void ServerStreamCall::PumpLocked() {
  if (writing_ || ended_ || abandoned_) return;
  const Turn turn = Next();
  if (turn.message != nullptr) {
    WriteLocked(*turn.message);
  } else if (turn.end) {
    FinishLocked(*turn.end);
  }
}

}  // namespace dorad::rpc
