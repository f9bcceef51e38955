// A call with one request and a stream of messages, whose source wakes the call.
//
// At most one write is outstanding; the source merges messages for a slow reader. The source only
// posts a wake-up (it may hold locks of its own and must not be used from there); a thread of the
// response executor or of gRPC takes, encodes and writes. Lifetime, lock order and thread-safety as
// Call.
#pragma once

#include <google/protobuf/message.h>

#include <atomic>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "server/rpc/call.h"

namespace dorad::rpc {

class ServerStreamCall : public Call {
 public:
  using Call::Call;

  void OnWriteDone(bool ok) final;

 protected:
  // The source's next action.
  struct Turn {
    // Write it; nullptr: nothing.
    const google::protobuf::Message* message = nullptr;
    // No message follows: ends the call with this status.
    std::optional<absl::Status> end;
  };
  virtual Turn Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) = 0;

  // For the source, after each change: only posts.
  void Wake();
  // Writes the next message, unless a write is outstanding.
  void Pump() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void PumpLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  std::atomic<bool> wake_posted_{false};
};

}  // namespace dorad::rpc
