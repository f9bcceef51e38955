// Reads a call's id and trace context from its metadata. Pure functions and therefore thread-safe.
#pragma once

#include <string>
#include <string_view>

namespace dorad::rpc {

inline constexpr char kRequestIdKey[] = "x-request-id";
inline constexpr char kTraceparentKey[] = "traceparent";

// Whether an x-request-id is valid: 1 to 128 of [A-Za-z0-9._-].
bool IsRequestId(std::string_view text);

// The trace id of a W3C traceparent header, 32 lower-case hex digits; "" for malformed text. Of
// later versions of the header, only the fields of today's version are read.
std::string TraceIdOf(std::string_view traceparent);

}  // namespace dorad::rpc
