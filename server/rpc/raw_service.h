// A gRPC service whose calls start before their requests are read, so that unauthenticated callers
// cannot fill the server's memory.
//
// gRPC's generated services read the whole request of a unary or server-streaming call before they
// start the call. The public alternative, grpc::CallbackGenericService, is not used: gRPC's
// reflection lists registered services only, and a generic service registers none. raw_service.cc
// registers the methods through the base classes of generated code, and is the one user of gRPC's
// internals. Owned by Server. Thread-safe once it is built.
#pragma once

#include <grpcpp/impl/service_type.h>
#include <grpcpp/server_context.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "server/rpc/call.h"
#include "server/rpc/message_deadlines.h"
#include "server/rpc/request_reading.h"
#include "server/rpc/services.h"
#include "server/rpc/unary_call.h"

namespace dorad::rpc {

class RawService : public grpc::Service {
 public:
  const char* name() const { return name_; }

 protected:
  using MaxBytes = int64_t (*)(const Services&);
  template <int64_t kBytes>
  static int64_t AtMost(const Services&) {
    return kBytes;
  }

  // name: "dorad.v1.InferenceService". deadlines: borrowed. is_probe: as Method's.
  RawService(const char* name, Services* services)
      : RawService(name, services, services->message_deadlines.get(), /*is_probe=*/false) {}
  RawService(const char* name, Services* services, MessageDeadlines* deadlines, bool is_probe)
      : services_(services), name_(name), deadlines_(deadlines), is_probe_(is_probe) {}

  // A call with one answer: (this->*handle)(call, request). Methods are literals.
  template <typename Self, typename Request, typename Response>
  void AddUnary(const char* method,
                absl::Status (Self::*handle)(const UnaryPtr<Response>&, const Request&),
                MaxBytes max_bytes = AtMost<kSmallRequestBytes>) {
    using Unary = UnaryCall<Response>;
    Register(method, max_bytes,
             [services = services_, dispatch = Unary::template ParseFor<Request>(
                                        std::bind_front(handle, static_cast<Self*>(this)))](
                 const Method& of, grpc::CallbackServerContext* context) {
               return Call::Start<Unary>(of, context, services, &dispatch);
             });
  }

  // A call of a kind that is constructed from method, context, services and `more`.
  template <typename Kind, typename... More>
  void AddStream(const char* method, MaxBytes max_bytes = AtMost<kSmallRequestBytes>,
                 More... more) {
    Register(
        method, max_bytes,
        [services = services_, more...](const Method& of, grpc::CallbackServerContext* context) {
          return Call::Start<Kind>(of, context, services, more...);
        });
  }

  Services* const services_;

 private:
  using StartCall = std::function<Call*(const Method&, grpc::CallbackServerContext*)>;
  void Register(const char* method, MaxBytes max_bytes, StartCall start);

  const char* const name_;
  MessageDeadlines* const deadlines_;
  const bool is_probe_;
  std::deque<Method> methods_;  // borrowed by gRPC and by calls: they stay where they are
};

}  // namespace dorad::rpc
