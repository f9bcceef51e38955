// What a caller's metadata says of a call besides the message: its id and its place in a
// distributed trace. Pure functions, hence thread-safe.
#pragma once

#include <string>
#include <string_view>

namespace dorad::rpc {

inline constexpr char kRequestIdKey[] = "x-request-id";
inline constexpr char kTraceparentKey[] = "traceparent";

// Whether an x-request-id can be taken: 1 to 128 of [A-Za-z0-9._-].
bool IsRequestId(std::string_view text);

// The trace id of a W3C traceparent header, 32 lower-case hex digits; "" for anything that is not
// one to the letter. Of later versions of the header the part that is defined today is read.
std::string TraceIdOf(std::string_view traceparent);

}  // namespace dorad::rpc
