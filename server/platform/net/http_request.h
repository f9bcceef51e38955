// The part of HTTP/1.x for scrapes and probes: reads the head of a request and writes a whole
// response. Pure functions and therefore thread-safe.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace dorad::internal {

constexpr size_t kMaxHttpHeadBytes = 8192;

struct HttpRequest {
  std::string method;
  std::string path;  // without the query
  bool takes_gzip = false;
};

struct HttpResponse {
  int status = 200;
  std::string body;
  std::string content_type = "text/plain; charset=utf-8";
  std::string content_encoding;  // "": none
};

// Whether `received` holds a whole head (or more bytes than a valid one).
bool HasHttpHead(std::string_view received);

// nullopt when the first line is not "METHOD /path HTTP/1.x". REQUIRES: HasHttpHead(received).
std::optional<HttpRequest> ParseHttpHead(std::string_view received);

// Compresses the body with gzip. Leaves it unchanged when memory is short.
void Compress(HttpResponse* response);

// Status line, headers and body; "Connection: close" always. without_body: for HEAD.
std::string FormatHttpResponse(const HttpResponse& response, bool without_body);

}  // namespace dorad::internal
