// The server side of a request that is answered by a stream of messages, whose source wakes it:
// what Generate and Watch share.
//
// At most one write is outstanding. The source only posts a wake-up (it may hold locks of its own
// and must not be touched from there); a courier thread or gRPC's own takes, encodes and writes.
// Lock order: mu_, then the source's, then the couriers'. Kept alive by gRPC until OnDone and by
// posted wake-ups. Thread-safe.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/base/failpoint.h"
#include "server/rpc/call.h"
#include "server/rpc/message_deadlines.h"
#include "server/rpc/request_reading.h"
#include "server/rpc/services.h"

namespace dorad::rpc {

template <typename Request, typename Response>
class PumpedWriter : public grpc::ServerBidiReactor<grpc::ByteBuffer, Response>,
                     public std::enable_shared_from_this<PumpedWriter<Request, Response>> {
 public:
  using Answer = Response;

  // Makes a Reactor and, if the caller may, reads its request.
  template <typename Reactor>
  static PumpedWriter* StartAs(Services* services, grpc::CallbackServerContext* context) {
    auto reactor = std::make_shared<Reactor>(services, context);
    PumpedWriter* const writer = reactor.get();
    writer->self_ = reactor;
    Guarded(
        writer->method_, [&] { writer->Read(); },
        [&](const absl::Status& status) { writer->Abandon(status); });
    return writer;
  }

  void OnReadDone(bool ok) final {
    Guarded(
        method_, [&] { TakeRequest(ok); }, [this](const absl::Status& status) { Abandon(status); });
    EndBegin();
  }

  void OnWriteDone(bool ok) final {
    Guarded(
        method_,
        [&] {
          {
            absl::MutexLock lock(&mu_);
            writing_ = false;
            // OnCancel, which knows why, comes as well.
            if (!ok && !abandoned_) abandoned_ = record_.CancelStatus();
          }
          Failpoint("rpc_write_done");
          if (!ok) CancelSource();
        },
        [this](const absl::Status& status) { Abandon(status); });
    Pump();
  }

  void OnCancel() final {
    Guarded(
        method_,
        [this] {
          Failpoint("rpc_cancel");
          absl::Status status;
          {
            absl::MutexLock lock(&mu_);
            status = record_.CancelStatus();
          }
          Abandon(status);
        },
        [this](const absl::Status& status) { Abandon(status); });
  }

  void OnDone() final {
    LeaveSource();
    auto self = std::move(self_);
  }

 protected:
  PumpedWriter(const char* method, Services* services, grpc::CallbackServerContext* context)
      : services_(services),
        method_(method),
        record_(method, context, services),
        admission_(record_.admission()),
        caller_(record_.caller()),
        timer_(services->message_deadlines.get()) {}

  // The most bytes that a request worth parsing has.
  virtual int64_t MaxRequestBytes() const { return kSmallRequestBytes; }
  // Makes the source, which may wake the writer from now on; a refusal ends the call before its
  // first message.
  virtual absl::Status Begin(const Request& request) = 0;
  // What the source has for the client now.
  struct Turn {
    bool message = false;             // the response has been filled: write it
    std::optional<absl::Status> end;  // nothing more will come: end with this
  };
  virtual Turn Next(Response* response) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) = 0;
  // The client wants nothing more. May be called more than once, and after a Begin that made no
  // source.
  virtual void CancelSource() {}
  // After this returns the source never calls Wake() again.
  virtual void LeaveSource() = 0;

  // For the source to call when there may be something: only posts.
  void Wake() {
    if (wake_posted_.exchange(true)) return;
    services_->couriers->Submit([self = this->shared_from_this()] {
      // Before the source is looked at, so that nothing pushed after that goes unnoticed.
      self->wake_posted_ = false;
      self->Pump();
    });
  }

  void Pump() ABSL_LOCKS_EXCLUDED(mu_) {
    Guarded(
        method_,
        [this] {
          Failpoint("rpc_pump");
          absl::MutexLock lock(&mu_);
          PumpLocked();
        },
        [this](const absl::Status& status) { Abandon(status); });
  }

  Services* const services_;
  absl::Mutex mu_;

  CallRecord& record() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return record_; }
  // From Begin on.
  const security::Principal& caller() const { return *caller_; }

 private:
  // Until Begin has returned the source is nobody else's to cancel.
  enum class Stage { kReading, kBeginning, kPumping };

  void Read() {
    if (!admission_.ok()) return Abandon(admission_);
    timer_.Start([weak = this->weak_from_this()] {
      if (const auto self = weak.lock()) self->TimeOut();
    });
    this->StartRead(&request_);
  }

  void TimeOut() ABSL_LOCKS_EXCLUDED(mu_) {
    Guarded(
        method_,
        [this] {
          absl::MutexLock lock(&mu_);
          if (stage_ == Stage::kReading) EndLocked(MessageTimedOut());
        },
        [this](const absl::Status& status) { Abandon(status); });
  }

  void TakeRequest(bool ok) ABSL_LOCKS_EXCLUDED(mu_) {
    timer_.Stop();
    {
      absl::MutexLock lock(&mu_);
      if (ended_) return;
      if (!ok) return EndLocked(record_.NoMessageStatus(RequestMissing()));
      stage_ = Stage::kBeginning;
    }
    Failpoint("rpc_handler");
    Request request;
    const int64_t most = std::min(MaxRequestBytes(), services_->max_message_bytes);
    absl::Status status = ParseRequest(&request_, most, &request);
    if (status.ok()) status = Begin(request);
    if (!status.ok()) Abandon(status);
  }

  // What was given up while it began has its source cancelled now.
  void EndBegin() ABSL_LOCKS_EXCLUDED(mu_) {
    std::optional<absl::Status> abandoned;
    {
      absl::MutexLock lock(&mu_);
      if (stage_ != Stage::kBeginning) return;
      stage_ = Stage::kPumping;
      abandoned = abandoned_;
    }
    if (abandoned) Abandon(*abandoned);
  }

  void PumpLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (writing_ || ended_) return;
    if (abandoned_) {
      EndLocked(*abandoned_);
      return;
    }
    const Turn turn = Next(&response_);
    if (turn.message) {
      writing_ = true;
      this->StartWrite(&response_);
    } else if (turn.end) {
      EndLocked(*turn.end);
    }
  }

  // The call ends without what is still to come: now, or when the outstanding write is done.
  void Abandon(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      // First: the source ends when it is cancelled, and its end must not be told instead.
      absl::MutexLock lock(&mu_);
      if (!abandoned_) abandoned_ = status;
      if (stage_ == Stage::kReading) return EndLocked(status);
      if (stage_ == Stage::kBeginning) return;
    }
    CancelSource();
    absl::MutexLock lock(&mu_);
    if (!writing_) EndLocked(*abandoned_);
  }

  void EndLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (ended_) return;
    ended_ = true;
    this->Finish(record_.End(status));
  }

  const char* const method_;
  std::shared_ptr<PumpedWriter> self_;
  std::atomic<bool> wake_posted_{false};
  CallRecord record_ ABSL_GUARDED_BY(mu_);
  const absl::Status admission_;
  const Caller caller_;
  grpc::ByteBuffer request_;  // of the outstanding read
  MessageTimer timer_;
  Stage stage_ ABSL_GUARDED_BY(mu_) = Stage::kReading;
  Response response_ ABSL_GUARDED_BY(mu_);  // of the outstanding write
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  // The status to end with as soon as the outstanding write is done.
  std::optional<absl::Status> abandoned_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::rpc
