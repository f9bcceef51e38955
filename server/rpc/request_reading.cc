#include "server/rpc/request_reading.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"

namespace dorad::rpc {
namespace {

absl::Status Refused(const char* reason, const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message);
}

}  // namespace

absl::Status ParseRequest(grpc::ByteBuffer* bytes, int64_t max_bytes,
                          google::protobuf::MessageLite* request) {
  // A few bytes on the wire can ask for a hundred times as many once they are parsed.
  const auto size = static_cast<int64_t>(bytes->Length());
  bool parsed = false;
  if (size <= max_bytes) {
    grpc::ProtoBufferReader reader(bytes);
    parsed = request->ParseFromZeroCopyStream(&reader);
  }
  bytes->Clear();
  if (size > max_bytes) {
    return Refused("REQUEST_TOO_LARGE", absl::StrCat("a request of ", size, " bytes; ", max_bytes,
                                                     " are the most that this method takes"));
  }
  if (!parsed) {
    return Refused("REQUEST_MALFORMED", absl::StrCat("the bytes are no ", request->GetTypeName()));
  }
  return absl::OkStatus();
}

absl::Status RequestMissing() {
  return Refused("REQUEST_MISSING", "the call ended before a whole request had come");
}

absl::Status MessageTimedOut() {
  return MakeError(absl::StatusCode::kUnavailable, "MESSAGE_TIMEOUT",
                   "no message came within server.message_timeout_seconds");
}

}  // namespace dorad::rpc
