#include "server/rpc/call.h"

#include <grpcpp/support/proto_buffer_writer.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "server/platform/process/failpoint.h"
#include "server/rpc/request_reading.h"

namespace dorad::rpc {
namespace {

void Serialize(const google::protobuf::Message& message, grpc::ByteBuffer* to) {
  constexpr int kBlockBytes = 1 << 20;
  const size_t size = message.ByteSizeLong();
  if (size > std::numeric_limits<int>::max()) throw std::length_error("a response over 2 GiB");
  to->Clear();
  if (size == 0) {
    const grpc::Slice nothing;
    *to = grpc::ByteBuffer(&nothing, 1);
    return;
  }
  grpc::ProtoBufferWriter writer(to, kBlockBytes, static_cast<int>(size));
  message.SerializeToZeroCopyStream(&writer);
}

int64_t MaxBytes(const Method& method, const Services& services) {
  return std::min(method.max_bytes(services), services.max_message_bytes);
}

}  // namespace

Call::Call(const Method& method, grpc::CallbackServerContext* context, Services* services)
    : method_(method),
      services_(services),
      record_(method.name, context, services, method.is_probe),
      timer_(method.deadlines),
      incoming_(&services->incoming, context->peer(), MaxBytes(method, *services)) {}

void Call::Run() {
  Guarded(
      method_.name,
      [this] {
        absl::Status status = record_.admission();
        if (status.ok()) status = OnStart();
        if (!status.ok()) {
          // A stranger gets no room for its message.
          if (record_.caller() != nullptr) incoming_.Refuse();
          return Abandon(status);
        }
        ReadNext();
      },
      [this](const absl::Status& status) { Abandon(status); });
  EndHandling();
}

void Call::OnReadDone(bool ok) {
  Guarded(
      method_.name,
      [&] {
        OnRead();
        TakeMessage(ok);
      },
      [this](const absl::Status& status) { Abandon(status); });
  EndHandling();
}

void Call::TakeMessage(bool ok) {
  timer_.Stop();
  {
    absl::MutexLock lock(&mu_);
    reading_ = false;
    // The call has already ended for the client.
    if (ended_ || abandoned_) return incoming_.Stop();
    handling_ = true;
  }
  if (ok) incoming_.Take(static_cast<int64_t>(received_.Length()));
  if (!ok) return Abandon(record_.NoMessageStatus(NoMessage()));
  Reach("rpc_handler");
  const absl::Status status = OnMessage(&received_);
  if (!status.ok()) Abandon(status);
}

// Ends a call that was abandoned during the handler.
void Call::EndHandling() {
  {
    absl::MutexLock lock(&mu_);
    if (!handling_) return;
    handling_ = false;
    const bool reads = std::exchange(read_next_, false) && !ended_ && !abandoned_;
    if (reads) return ReadLocked();
    incoming_.Stop();
    if (ended_ || !abandoned_) return;
  }
  EndAbandoned();
}

void Call::ReadLocked() {
  reading_ = true;
  timer_.Start([weak = weak_from_this()] {
    if (const auto call = weak.lock()) {
      call->EndRead(MessageTimedOut(call->method_.deadlines->timeout()));
    }
  });
  incoming_.Start([weak = weak_from_this()] {
    if (const auto call = weak.lock()) call->EndRead(MessageTooLarge(call->incoming_.most()));
  });
  StartRead(&received_);
}

void Call::EndRead(const absl::Status& status) {
  Guarded(
      method_.name,
      [&] {
        {
          absl::MutexLock lock(&mu_);
          if (!reading_ || ended_ || abandoned_) return;
          abandoned_ = status;
        }
        EndAbandoned();
      },
      [this](const absl::Status& status) { Abandon(status); });
}

void Call::Abandon(const absl::Status& status) {
  {
    // Set first: the end of cancelled work must not send another status.
    absl::MutexLock lock(&mu_);
    if (ended_ || abandoned_) return;
    abandoned_ = status;
    if (handling_) return;
  }
  EndAbandoned();
}

void Call::EndAbandoned() {
  Guarded(
      method_.name, [this] { CancelWork(); }, [](const absl::Status& /*logged*/) {});
  absl::MutexLock lock(&mu_);
  work_cancelled_ = true;
  if (!writing_) FinishLocked(*abandoned_);
}

void Call::OnCancel() {
  Guarded(
      method_.name,
      [this] {
        Reach("rpc_cancel");
        Abandon(record_.CancelStatus());
      },
      [this](const absl::Status& status) { Abandon(status); });
}

void Call::OnDone() {
  Release();
  incoming_.Stop();
  open_.reset();  // holders of the call may outlive the services
  const auto self = std::move(self_);
}

absl::Status Call::NoMessage() const { return RequestMissing(); }

absl::Status Call::Parse(grpc::ByteBuffer* bytes, google::protobuf::Message* request) const {
  return ParseRequest(bytes, MaxBytes(method_, *services_), request);
}

void Call::Reach(const char* failpoint) const {
  if (!method_.is_probe) Failpoint(failpoint);
}

void Call::WriteLocked(const google::protobuf::Message& message) {
  Serialize(message, &sent_);
  writing_ = true;
  StartWrite(&sent_);
}

void Call::FinishLocked(const absl::Status& status) {
  if (ended_) return;
  ended_ = true;
  absl::Status end = status;
  if (end.ok() && response_message_ != nullptr) {
    Guarded(
        method_.name,
        [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { Serialize(*response_message_, &sent_); },
        [&end](const absl::Status& failed) { end = failed; });
  }
  const grpc::Status sent = record_.End(end);
  if (sent.ok() && response_message_ != nullptr) {
    StartWriteAndFinish(&sent_, grpc::WriteOptions(), sent);
  } else {
    Finish(sent);
  }
}

}  // namespace dorad::rpc
