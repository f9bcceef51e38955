// Parses requests: read after authentication, bounded in size; message_deadlines.h bounds the time.
//
// gRPC's generated services would read the whole request of a unary or server-streaming call first,
// from any caller (raw_service.h).
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace dorad::rpc {

// For requests without large fields.
inline constexpr int64_t kSmallRequestBytes = 1 << 20;

// Fields in a request, at all depths: a field of two bytes can take a hundred once it is parsed.
// More than the largest PublishFromMemory has.
inline constexpr int kMaxRequestFields = 1 << 20;

// Consumes `bytes`. INVALID_ARGUMENT (REQUEST_TOO_LARGE, REQUEST_MALFORMED).
absl::Status ParseRequest(grpc::ByteBuffer* bytes, int64_t max_bytes,
                          google::protobuf::Message* request);

// INVALID_ARGUMENT (REQUEST_MISSING): the client has closed its side without a message, or gRPC has
// refused the message and sends its own status.
absl::Status RequestMissing();

// INVALID_ARGUMENT (REQUEST_TOO_LARGE): more arrived before the message was complete.
absl::Status MessageTooLarge(int64_t max_bytes);

// UNAVAILABLE (MESSAGE_TIMEOUT): the same call may succeed on a better connection.
absl::Status MessageTimedOut(absl::Duration timeout);

}  // namespace dorad::rpc
