#include "server/rpc/call_context.h"

#include <algorithm>
#include <cstddef>

namespace dorad::rpc {
namespace {

constexpr size_t kMaxRequestIdBytes = 128;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

bool IsLowerHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return IsDigit(c) || (c >= 'a' && c <= 'f'); });
}

bool IsZero(std::string_view text) { return text.find_first_not_of('0') == std::string_view::npos; }

}  // namespace

bool IsRequestId(std::string_view text) {
  if (text.empty() || text.size() > kMaxRequestIdBytes) return false;
  return std::all_of(text.begin(), text.end(), [](char c) {
    return IsDigit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '_' ||
           c == '-';
  });
}

std::string TraceIdOf(std::string_view traceparent) {
  // version "-" trace id "-" parent id "-" flags
  constexpr size_t kLength = 2 + 1 + 32 + 1 + 16 + 1 + 2;
  if (traceparent.size() < kLength) return "";
  const std::string_view version = traceparent.substr(0, 2);
  const std::string_view trace = traceparent.substr(3, 32);
  const std::string_view parent = traceparent.substr(36, 16);
  const std::string_view flags = traceparent.substr(53, 2);
  for (const size_t dash : {size_t{2}, size_t{35}, size_t{52}}) {
    if (traceparent[dash] != '-') return "";
  }
  for (const std::string_view part : {version, trace, parent, flags}) {
    if (!IsLowerHex(part)) return "";
  }
  if (version == "ff" || IsZero(trace) || IsZero(parent)) return "";
  if (traceparent.size() > kLength && (version == "00" || traceparent[kLength] != '-')) return "";
  return std::string(trace);
}

}  // namespace dorad::rpc
