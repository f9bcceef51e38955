// A call with one request and one answer. Lifetime and thread-safety as Call.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>

#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/rpc/call.h"

namespace dorad::rpc {

template <typename Response>
class UnaryCall final : public SingleResponseCall<Response> {
 public:
  // Ends the call now or later, or returns its failure.
  template <typename Request>
  using Handler = std::function<absl::Status(const std::shared_ptr<UnaryCall>&, const Request&)>;

  // Parses the request's bytes and passes it to a Handler. Borrowed.
  using Dispatch = std::function<absl::Status(UnaryCall*, grpc::ByteBuffer*)>;

  UnaryCall(const Method& method, grpc::CallbackServerContext* context, Services* services,
            const Dispatch* dispatch)
      : SingleResponseCall<Response>(method, context, services), dispatch_(dispatch) {}

  template <typename Request>
  static Dispatch ParseFor(Handler<Request> handler) {
    return [handler = std::move(handler)](UnaryCall* call, grpc::ByteBuffer* bytes) {
      Request request;
      const absl::Status status = call->Parse(bytes, &request);
      if (!status.ok()) return status;
      return handler(std::static_pointer_cast<UnaryCall>(call->shared_from_this()), request);
    };
  }

  // Runs once if the call is abandoned: the client has disconnected, or the handler has failed. For
  // handlers.
  void set_on_cancel(std::function<void()> on_cancel) ABSL_LOCKS_EXCLUDED(this->mu_) {
    absl::MutexLock lock(&this->mu_);
    on_cancel_ = std::move(on_cancel);
  }

 private:
  absl::Status OnMessage(grpc::ByteBuffer* bytes) override { return (*dispatch_)(this, bytes); }
  void CancelWork() override {
    if (const auto on_cancel = TakeOnCancel()) on_cancel();
  }
  void Release() override { TakeOnCancel(); }  // breaks a cycle of references

  std::function<void()> TakeOnCancel() ABSL_LOCKS_EXCLUDED(this->mu_) {
    absl::MutexLock lock(&this->mu_);
    return std::exchange(on_cancel_, nullptr);
  }

  const Dispatch* const dispatch_;
  std::function<void()> on_cancel_ ABSL_GUARDED_BY(this->mu_);
};

// The pointer that handlers of a method get.
template <typename Response>
using UnaryPtr = std::shared_ptr<UnaryCall<Response>>;

}  // namespace dorad::rpc
