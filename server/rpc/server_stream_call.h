// A call with one request that is answered by a stream of messages, whose source wakes the call.
//
// At most one write is outstanding; what a slow reader has not taken is for the source to merge.
// The source only posts a wake-up (it may hold locks of its own and must not be touched from
// there); a thread of the response executor or of gRPC takes, encodes and writes. Lifetime, lock
// order and thread-safety as Call.
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
  // What the source has for the client now.
  struct Turn {
    // Write it; nullptr: nothing.
    const google::protobuf::Message* message = nullptr;
    // Nothing more will come: end with this.
    std::optional<absl::Status> end;
  };
  virtual Turn Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) = 0;

  // For the source to call when there may be something: only posts.
  void Wake();
  // Writes what there is, unless a write is outstanding.
  void Pump() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void PumpLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  std::atomic<bool> wake_posted_{false};
};

}  // namespace dorad::rpc
