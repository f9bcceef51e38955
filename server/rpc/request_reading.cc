#include "server/rpc/request_reading.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"

namespace dorad::rpc {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

constexpr int kMaxDepth = 32;

// Counts fields down without storing them. False: too many, or malformed bytes.
bool CountFields(CodedInputStream* in, const Descriptor* type, int depth, int* left) {
  constexpr int kPackedBytes = 8;  // of a list of numbers count as a field
  if (depth > kMaxDepth) return false;
  while (const uint32_t tag = in->ReadTag()) {
    if (--*left < 0) return false;
    const WireFormatLite::WireType wire = WireFormatLite::GetTagWireType(tag);
    if (wire == WireFormatLite::WIRETYPE_START_GROUP) return false;  // proto3 has none
    if (wire != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      if (!WireFormatLite::SkipField(in, tag)) return false;
      continue;
    }
    uint32_t length = 0;
    if (!in->ReadVarint32(&length) || length > INT32_MAX) return false;
    const FieldDescriptor* field = type->FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    if (field != nullptr && field->type() == FieldDescriptor::TYPE_MESSAGE) {
      const CodedInputStream::Limit end = in->PushLimit(static_cast<int>(length));
      if (!CountFields(in, field->message_type(), depth + 1, left)) return false;
      if (!in->CheckEntireMessageConsumedAndPopLimit(end)) return false;
      continue;
    }
    if (field != nullptr && field->is_packable()) *left -= static_cast<int>(length / kPackedBytes);
    if (*left < 0 || !in->Skip(static_cast<int>(length))) return false;
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
  int fields_left = kMaxRequestFields;
  bool parsed = true;
  {
    grpc::ProtoBufferReader reader(bytes);
    CodedInputStream in(&reader);
    parsed = CountFields(&in, request->GetDescriptor(), 0, &fields_left);
  }
  if (parsed) {
    grpc::ProtoBufferReader reader(bytes);
    parsed = request->ParseFromZeroCopyStream(&reader);
  }
  bytes->Clear();
  if (fields_left < 0) {
    return Refused("REQUEST_TOO_LARGE",
                   absl::StrCat("a request has at most ", kMaxRequestFields, " fields"));
  }
  if (!parsed) {
    return Refused("REQUEST_MALFORMED",
                   absl::StrCat("the bytes are not a ", request->GetTypeName()));
  }
  return absl::OkStatus();
}

absl::Status RequestMissing() {
  return Refused("REQUEST_MISSING", "the call ended before a whole request arrived");
}

absl::Status MessageTooLarge(int64_t max_bytes) {
  return Refused("REQUEST_TOO_LARGE",
                 absl::StrCat("more bytes arrived before the request was complete; ", max_bytes,
                              " are the most that this method takes"));
}

absl::Status MessageTimedOut(absl::Duration timeout) {
  return MakeError(absl::StatusCode::kUnavailable, "MESSAGE_TIMEOUT",
                   absl::StrCat("no message arrived within ", absl::FormatDuration(timeout)));
}

}  // namespace dorad::rpc
