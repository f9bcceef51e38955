#include "server/platform/net/listen_address.h"

#include <filesystem>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/platform/error.h"

namespace dorad {
namespace {

constexpr size_t kMaxUnixPath = 107;  // sockaddr_un.sun_path less its NUL

absl::Status Refuse(const std::string& text, const char* why) {
  return MakeError(absl::StatusCode::kInvalidArgument, "LISTEN_ADDRESS",
                   absl::StrCat("'", text, "' is not a listener address: ", why));
}

bool ParsePort(const std::string& text, int* port) {
  if (text.empty() || text.size() > 5) return false;
  for (const char c : text) {
    if (!absl::ascii_isdigit(static_cast<unsigned char>(c))) return false;
  }
  return absl::SimpleAtoi(text, port) && *port <= 65535;
}

std::filesystem::path Normal(const std::string& path) {
  return std::filesystem::absolute(path).lexically_normal();
}

}  // namespace

absl::StatusOr<ListenAddress> ParseListenAddress(const std::string& text) {
  ListenAddress address;
  if (absl::StartsWith(text, "unix:")) {
    address.unix_path = text.substr(5);
    if (address.unix_path.empty()) return Refuse(text, "the path after unix: is missing");
    if (address.unix_path.size() > kMaxUnixPath) {
      return Refuse(text, "the path has more than 107 bytes");
    }
    return address;
  }
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return Refuse(text, "expected host:port, [v6]:port or unix:PATH");
  address.host = text.substr(0, colon);
  if (!ParsePort(text.substr(colon + 1), &address.port)) {
    return Refuse(text, "the port must be a number from 0 to 65535");
  }
  const bool bracketed = absl::StartsWith(address.host, "[") && absl::EndsWith(address.host, "]");
  if (bracketed) address.host = address.host.substr(1, address.host.size() - 2);
  if (!bracketed && absl::StrContains(address.host, ":")) {
    return Refuse(text, "an IPv6 address needs brackets, as in [::1]:9464");
  }
  if (address.host.empty()) {
    return Refuse(text, "the host is missing (0.0.0.0 means all interfaces)");
  }
  for (const char c : address.host) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c)) || c == '[' || c == ']' || c == '/') {
      return Refuse(text, "the host has invalid characters");
    }
  }
  return address;
}

bool Collide(const ListenAddress& a, const ListenAddress& b) {
  if (a.unix_path.empty() != b.unix_path.empty()) return false;
  if (!a.unix_path.empty()) return Normal(a.unix_path) == Normal(b.unix_path);
  if (a.port == 0 || a.port != b.port) return false;
  const auto is_any = [](const std::string& host) { return host == "0.0.0.0" || host == "::"; };
  const auto is_local = [](const std::string& host) {
    return host == "127.0.0.1" || host == "::1";
  };
  if (a.host == b.host || is_any(a.host) || is_any(b.host)) return true;
  return (a.host == "localhost" && is_local(b.host)) || (b.host == "localhost" && is_local(a.host));
}

std::string JoinHostPort(const std::string& host, int port) {
  const bool v6 = absl::StrContains(host, ":");
  return absl::StrCat(v6 ? "[" : "", host, v6 ? "]:" : ":", port);
}

}  // namespace dorad
