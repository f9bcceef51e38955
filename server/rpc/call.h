// The life of one RPC, the same for all kinds: the caller is authorised before any message is read,
// each message is awaited under a deadline and handled, and the call ends once, with its status in
// the metrics, the log and the trailers.
//
// Subclasses: SingleResponseCall (UnaryCall, PublishCall) and ServerStreamCall. gRPC sees a
// bidirectional stream of bytes in all cases; the wire format is the same. Exceptions do not reach
// gRPC: they end the call with INTERNAL.
//
// gRPC keeps a call alive until OnDone, as does every reference. Lock order: mu_, then those of the
// engine, the registry and the response executor. Thread-safe.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/rpc/call_record.h"
#include "server/rpc/incoming_bytes.h"
#include "server/rpc/message_deadlines.h"
#include "server/rpc/services.h"

namespace dorad::rpc {

// One method of a service. Owned by the service, which outlives its calls.
struct Method {
  std::string path;  // "/dorad.v1.InferenceService/Generate"
  const char* name;  // "Generate"
  // The upper bound of a valid request, in bytes.
  int64_t (*max_bytes)(const Services&);
  MessageDeadlines* deadlines;  // for the call's messages
  // Open to all callers, without metrics and log.
  bool is_probe = false;
};

class Call : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
             public std::enable_shared_from_this<Call> {
 public:
  // Makes and starts a call of a kind. gRPC owns the result.
  template <typename Kind, typename... Args>
  static Call* Start(Args&&... args) {
    const std::shared_ptr<Call> call = std::make_shared<Kind>(std::forward<Args>(args)...);
    call->self_ = call;
    call->Run();
    return call.get();
  }

  // All three are borrowed.
  Call(const Method& method, grpc::CallbackServerContext* context, Services* services);

  CallRecord& record() { return record_; }
  const security::Principal& caller() const { return *record_.caller(); }

  // Counts the call in `open` until its end has been sent. For handlers.
  void CountIn(std::atomic<int>* open) { open_ = std::make_shared<const OpenCount>(open); }

  // Cancels the call's work, then ends the call once no write is outstanding. The first status
  // wins. Both wait for a running handler.
  void Abandon(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

  void OnReadDone(bool ok) final;
  void OnCancel() final;
  void OnDone() final;

 protected:
  // Runs before the first message is read.
  virtual absl::Status OnStart() { return absl::OkStatus(); }
  // A read has ended; its message may still be discarded.
  virtual void OnRead() const {}
  // Handles a message, with no lock held. A failure abandons the call.
  virtual absl::Status OnMessage(grpc::ByteBuffer* bytes) = 0;
  // The status for a client that sends no further message.
  virtual absl::Status NoMessage() const;
  // Cancels the work of OnMessage. Runs at most once, neither during OnMessage nor after the end.
  virtual void CancelWork() {}
  // gRPC is done with the call.
  virtual void Release() {}

  // Reads another message once the handler has returned.
  void ReadNext() { read_next_ = true; }
  // As ParseRequest, with the method's bound.
  absl::Status Parse(grpc::ByteBuffer* bytes, google::protobuf::Message* request) const;
  // A named point of failure; probes have none.
  void Reach(const char* failpoint) const;

  void WriteLocked(const google::protobuf::Message& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Method& method_;
  Services* const services_;
  // The answer of a call with one answer that ends with OK; set by its constructor.
  const google::protobuf::Message* response_message_ = nullptr;
  // Used by the handler, and then under mu_.
  CallRecord record_;
  std::shared_ptr<const OpenCount> open_;

  absl::Mutex mu_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  // The final status of an abandoned call.
  std::optional<absl::Status> abandoned_ ABSL_GUARDED_BY(mu_);
  // True after CancelWork.
  bool work_cancelled_ ABSL_GUARDED_BY(mu_) = false;

 private:
  void Run();
  void TakeMessage(bool ok) ABSL_LOCKS_EXCLUDED(mu_);
  void EndHandling() ABSL_LOCKS_EXCLUDED(mu_);
  // Ends a call that awaits a message.
  void EndRead(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  void EndAbandoned() ABSL_LOCKS_EXCLUDED(mu_);
  void ReadLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  std::shared_ptr<Call> self_;  // until OnDone
  MessageTimer timer_;
  IncomingMessage incoming_;
  grpc::ByteBuffer received_;  // by the outstanding read
  grpc::ByteBuffer sent_ ABSL_GUARDED_BY(mu_);
  bool read_next_ = false;  // used by the handler only
  bool handling_ ABSL_GUARDED_BY(mu_) = true;
  bool reading_ ABSL_GUARDED_BY(mu_) = false;
};

// A call with one answer, which may be given later, from any thread.
template <typename Response>
class SingleResponseCall : public Call {
 public:
  SingleResponseCall(const Method& method, grpc::CallbackServerContext* context, Services* services)
      : Call(method, context, services) {
    response_message_ = &response_;
  }

  // Ends the call unless it has ended: with the current response, if the status is OK.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (!abandoned_) FinishLocked(status);
  }

  // Calls fill(Response*) -> absl::Status, if the call has not ended, and ends it with the result.
  template <typename Fill>
  void Complete(Fill&& fill) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (ended_ || abandoned_) return;
    Guarded(
        method_.name,
        [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
          Reach("rpc_answer");
          FinishLocked(fill(&response_));
        },
        [&](const absl::Status& status) ABSL_NO_THREAD_SAFETY_ANALYSIS { FinishLocked(status); });
  }
  // The same, for handlers that answer at once.
  template <typename Fill>
  absl::Status Answer(Fill&& fill) ABSL_LOCKS_EXCLUDED(mu_) {
    Complete(std::forward<Fill>(fill));
    return absl::OkStatus();
  }

 private:
  Response response_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::rpc
