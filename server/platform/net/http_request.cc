#include "server/platform/net/http_request.h"

#include <zlib.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

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

// Whether a header "Accept-Encoding: gzip, deflate;q=0.5" among the lines of a head names gzip with
// a weight above 0.
bool TakesGzip(std::string_view head) {
  for (absl::string_view line : absl::StrSplit(absl::string_view(head.data(), head.size()), '\n')) {
    const std::vector<absl::string_view> header = absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (header.size() != 2 || !absl::EqualsIgnoreCase(header[0], "accept-encoding")) continue;
    for (absl::string_view coding : absl::StrSplit(header[1], ',')) {
      const std::vector<absl::string_view> parts = absl::StrSplit(coding, ';');
      if (!absl::EqualsIgnoreCase(absl::StripAsciiWhitespace(parts[0]), "gzip")) continue;
      absl::string_view weight = parts.size() > 1 ? absl::StripAsciiWhitespace(parts[1]) : "";
      double value = 1;
      if (absl::ConsumePrefix(&weight, "q=") && !absl::SimpleAtod(weight, &value)) return false;
      return value > 0;
    }
  }
  return false;
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
  return HttpRequest{std::string(method), std::string(target.substr(0, target.find('?'))),
                     TakesGzip(received)};
}

void Compress(HttpResponse* response) {
  constexpr int kGzip = 16;  // zlib's flag for this format
  constexpr int kMemory = 8;
  z_stream stream = {};
  // The fastest level: better compression would cost the engine's cores more than it saves.
  if (deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, MAX_WBITS + kGzip, kMemory,
                   Z_DEFAULT_STRATEGY) != Z_OK) {
    return;
  }
  std::string out(deflateBound(&stream, response->body.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(response->body.data());
  stream.avail_in = static_cast<uInt>(response->body.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  const bool whole = deflate(&stream, Z_FINISH) == Z_STREAM_END;
  out.resize(stream.total_out);
  deflateEnd(&stream);
  if (!whole) return;
  response->body = std::move(out);
  response->content_encoding = "gzip";
}

std::string FormatHttpResponse(const HttpResponse& response, bool without_body) {
  std::string text = absl::StrCat("HTTP/1.1 ", response.status, " ", Phrase(response.status),
                                  "\r\nContent-Type: ", response.content_type,
                                  "\r\nContent-Length: ", response.body.size(),
                                  "\r\nCache-Control: no-store\r\nConnection: close\r\n");
  if (!response.content_encoding.empty()) {
    absl::StrAppend(&text, "Content-Encoding: ", response.content_encoding, "\r\n");
  }
  absl::StrAppend(&text, response.status == 405 ? "Allow: GET, HEAD\r\n" : "", "\r\n");
  if (!without_body) text += response.body;
  return text;
}

}  // namespace dorad::internal
