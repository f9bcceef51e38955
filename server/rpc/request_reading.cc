#include "server/rpc/request_reading.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"

namespace dorad::rpc {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

constexpr int kMaxDepth = 32;

// Counts down without keeping anything. False: there are too many, or the bytes are not
// well-formed.
bool CountParts(CodedInputStream* in, const Descriptor* type, int depth, int* left) {
  if (depth > kMaxDepth) return false;
  while (const uint32_t tag = in->ReadTag()) {
    if (WireFormatLite::GetTagWireType(tag) != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      if (!WireFormatLite::SkipField(in, tag)) return false;
      continue;
    }
    if (--*left < 0) return false;
    const FieldDescriptor* field = type->FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    if (field == nullptr || field->type() != FieldDescriptor::TYPE_MESSAGE) {
      if (!WireFormatLite::SkipField(in, tag)) return false;
      continue;
    }
    const CodedInputStream::Limit end = in->ReadLengthAndPushLimit();
    if (!CountParts(in, field->message_type(), depth + 1, left)) return false;
    if (!in->CheckEntireMessageConsumedAndPopLimit(end)) return false;
  }
  return depth > 0 || in->ConsumedEntireMessage();
}

absl::Status Refused(const char* reason, const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message);
}

}  // namespace

absl::Status ParseRequest(grpc::ByteBuffer* bytes, int64_t max_bytes,
                          google::protobuf::Message* request) {
  const auto size = static_cast<int64_t>(bytes->Length());
  if (size > max_bytes) {
    bytes->Clear();
    return Refused("REQUEST_TOO_LARGE", absl::StrCat("a request of ", size, " bytes; ", max_bytes,
                                                     " are the most that this method takes"));
  }
  int parts_left = kMaxRequestParts;
  bool parsed = true;
  {
    grpc::ProtoBufferReader reader(bytes);
    CodedInputStream in(&reader);
    parsed = CountParts(&in, request->GetDescriptor(), 0, &parts_left);
  }
  if (parsed) {
    grpc::ProtoBufferReader reader(bytes);
    parsed = request->ParseFromZeroCopyStream(&reader);
  }
  bytes->Clear();
  if (parts_left < 0) {
    return Refused("REQUEST_TOO_LARGE",
                   absl::StrCat("a request has at most ", kMaxRequestParts, " parts"));
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
