#include "server/rpc/raw_service.h"

#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/support/byte_buffer.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace dorad::rpc {

void RawService::Register(const char* name, MaxBytes max_bytes, StartCall start) {
  const int index = static_cast<int>(methods_.size());
  const Method& method = methods_.emplace_back(
      Method{absl::StrCat("/", name_, "/", name), name, max_bytes, deadlines_, is_probe_});
  AddMethod(new grpc::internal::RpcServiceMethod(
      method.path.c_str(), grpc::internal::RpcMethod::BIDI_STREAMING, nullptr));
  MarkMethodRawCallback(
      index, new grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, grpc::ByteBuffer>(
                 [&method, start = std::move(start)](grpc::CallbackServerContext* context) {
                   return start(method, context);
                 }));
}

}  // namespace dorad::rpc
