#include "server/base/http_request.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace dorad::internal {
namespace {

const char* Phrase(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 431:
      return "Request Header Fields Too Large";
    case 503:
      return "Service Unavailable";
    default:
      return "Internal Server Error";
  }
}

}  // namespace

bool HasHttpHead(std::string_view received) {
  return received.find("\r\n\r\n") != std::string_view::npos ||
         received.find("\n\n") != std::string_view::npos || received.size() > kMaxHttpHeadBytes;
}

std::optional<HttpRequest> ParseHttpHead(std::string_view received) {
  std::string_view line = received.substr(0, received.find('\n'));
  if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  const size_t first = line.find(' ');
  const size_t second = line.rfind(' ');
  if (first == std::string_view::npos || first == second) return std::nullopt;
  const std::string_view method = line.substr(0, first);
  const std::string_view target = line.substr(first + 1, second - first - 1);
  const std::string_view version = line.substr(second + 1);
  if (version != "HTTP/1.1" && version != "HTTP/1.0") return std::nullopt;
  if (method.empty() || !std::all_of(method.begin(), method.end(), absl::ascii_isupper)) {
    return std::nullopt;
  }
  if (target.empty() || target[0] != '/' ||
      !std::all_of(target.begin(), target.end(), absl::ascii_isgraph)) {
    return std::nullopt;
  }
  return HttpRequest{std::string(method), std::string(target.substr(0, target.find('?')))};
}

std::string FormatHttpResponse(const HttpResponse& response, bool without_body) {
  std::string text = absl::StrCat("HTTP/1.1 ", response.status, " ", Phrase(response.status),
                                  "\r\nContent-Type: ", response.content_type,
                                  "\r\nContent-Length: ", response.body.size(),
                                  "\r\nCache-Control: no-store\r\nConnection: close\r\n",
                                  response.status == 405 ? "Allow: GET, HEAD\r\n" : "", "\r\n");
  if (!without_body) text += response.body;
  return text;
}

}  // namespace dorad::internal
