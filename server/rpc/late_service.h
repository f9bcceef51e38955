// A gRPC service whose calls begin before their requests are read, so that nobody fills the
// server's memory before he has shown who he is.
//
// gRPC's generated services have it read the whole request of a unary or server-streaming call
// first. To gRPC the methods of this one are streams, which read when they are ready to; on the
// wire nothing differs. Built of the same parts as generated code. Owned by Server. Thread-safe
// once it is built.
#pragma once

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/request_reading.h"
#include "server/rpc/services.h"
#include "server/rpc/unary_call.h"

namespace dorad::rpc {

class LateService : public grpc::Service {
 public:
  const char* name() const { return name_; }

 protected:
  // The most bytes that a request worth parsing has.
  using MaxBytes = int64_t (*)(const Services&);

  // name: "dorad.v1.InferenceService".
  LateService(const char* name, Services* services) : services_(services), name_(name) {}

  // A call with one answer: (this->*handle)(call, request). Methods are literals.
  template <typename Self, typename Request, typename Response>
  void AddUnary(
      const char* method,
      void (Self::*handle)(const std::shared_ptr<UnaryCall<Response>>&, const Request&),
      MaxBytes max_bytes = [](const Services&) { return kSmallRequestBytes; }) {
    using Call = UnaryCall<Response>;
    auto handler = std::make_shared<const typename Call::Handler>(
        [self = static_cast<Self*>(this), handle, max_bytes](const std::shared_ptr<Call>& call,
                                                             grpc::ByteBuffer* bytes) {
          Request request;
          const Services& of = *self->services_;
          const int64_t most = std::min(max_bytes(of), of.max_message_bytes);
          const absl::Status parsed = ParseRequest(bytes, most, &request);
          if (!parsed.ok()) return call->End(parsed);
          (self->*handle)(call, request);
        });
    Add(method, grpc::internal::RpcMethod::BIDI_STREAMING,
        new grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, Response>(
            [method, handler, services = services_](grpc::CallbackServerContext* context) {
              return Call::Start(method, context, services, handler.get());
            }));
  }

  // A call with a stream of answers, of a kind of PumpedWriter.
  template <typename Reactor>
  void AddServerStream(const char* method) {
    Add(method, grpc::internal::RpcMethod::BIDI_STREAMING,
        new grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, typename Reactor::Answer>(
            [services = services_](grpc::CallbackServerContext* context) {
              return Reactor::template StartAs<Reactor>(services, context);
            }));
  }

  // A call with a stream of requests, which gRPC leaves to be read anyway.
  template <typename Reactor, typename Response>
  void AddClientStream(const char* method) {
    Add(method, grpc::internal::RpcMethod::CLIENT_STREAMING,
        new grpc::internal::CallbackClientStreamingHandler<grpc::ByteBuffer, Response>(
            [services = services_](grpc::CallbackServerContext* context, Response* response) {
              return Reactor::Start(services, context, response);
            }));
  }

  // A method of another kind; takes the handler.
  void Add(const char* method, grpc::internal::RpcMethod::RpcType type,
           grpc::internal::MethodHandler* handler) {
    const int index = static_cast<int>(paths_.size());
    paths_.push_back(absl::StrCat("/", name_, "/", method));
    AddMethod(new grpc::internal::RpcServiceMethod(paths_.back().c_str(), type, nullptr));
    MarkMethodCallback(index, handler);
  }

  Services* const services_;

 private:
  const char* const name_;
  std::deque<std::string> paths_;  // borrowed by gRPC: stays where it is
};

}  // namespace dorad::rpc
