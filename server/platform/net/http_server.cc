#include "server/platform/net/http_server.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/instant.h"
#include "server/platform/log.h"
#include "server/platform/net/http_request.h"
#include "server/platform/net/listen_address.h"
#include "server/platform/net/listen_socket.h"
#include "server/platform/net/socket_server.h"
#include "server/platform/net/unique_fd.h"

namespace dorad {
namespace {

using internal::HttpResponse;

constexpr size_t kMaxConnections = 64;
// Time limits for the whole head and for the whole response.
constexpr absl::Duration kHeadTime = absl::Seconds(3);
constexpr absl::Duration kResponseTime = absl::Seconds(5);
// After the response: until the client closes. A close while it still sends would reset the
// connection and could lose the response.
constexpr absl::Duration kLingerTime = absl::Seconds(1);
// A smaller body fits into one packet uncompressed.
constexpr size_t kMinCompressedBytes = 1400;

HttpResponse Probe(bool good, const char* otherwise) {
  return good ? HttpResponse{200, "ok\n"} : HttpResponse{503, otherwise};
}

HttpResponse Route(const MetricsHttpServer::Handlers& handlers, const std::string& path) {
  try {
    if (path == "/metrics") {
      return {200, handlers.metrics(), "text/plain; version=0.0.4; charset=utf-8"};
    }
    if (path == "/healthz") return Probe(handlers.alive(), "the engine makes no progress\n");
    if (path == "/readyz") return Probe(handlers.ready(), "not ready\n");
  } catch (const std::exception& error) {
    LogError("a metrics handler failed", {{"path", path}, {"error", std::string(error.what())}});
    return {500, "internal error\n"};
  }
  return {404, "not found; there are /metrics, /healthz and /readyz\n"};
}

// One request and its response.
class HttpConnection final : public SocketServer::Connection {
 public:
  // The handlers are borrowed.
  HttpConnection(UniqueFd fd, const MetricsHttpServer::Handlers* handlers)
      : fd_(std::move(fd)), handlers_(handlers), deadline_(FromNow(kHeadTime)) {}

  int socket() const override { return fd_.get(); }
  short events() const override { return state_ == State::kResponse ? POLLOUT : POLLIN; }
  Instant deadline() const override { return deadline_; }

  bool Advance() override {
    switch (state_) {
      case State::kHead:
        if (!Receive(&in_)) return false;
        if (!internal::HasHttpHead(in_)) return true;
        Answer();
        return Send();
      case State::kResponse:
        return Send();
      case State::kLinger:
        return Receive(nullptr);
    }
    return false;
  }

 private:
  enum class State { kHead, kResponse, kLinger };

  // Reads the available bytes; false when the client has closed or failed. `keep` null: discards
  // them.
  bool Receive(std::string* keep) const {
    char buffer[4096];
    const ssize_t n = recv(fd_.get(), buffer, sizeof(buffer), 0);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (n > 0 && keep != nullptr) keep->append(buffer, static_cast<size_t>(n));
    return n > 0;
  }

  bool Send() {
    const ssize_t n = send(fd_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    sent_ += static_cast<size_t>(n);
    if (sent_ < out_.size()) return true;
    state_ = State::kLinger;
    deadline_ = FromNow(kLingerTime);
    return shutdown(fd_.get(), SHUT_WR) == 0;
  }

  void Answer() {
    HttpResponse response;
    bool without_body = false;
    const auto request = internal::ParseHttpHead(in_);
    if (in_.size() > internal::kMaxHttpHeadBytes) {
      response = {431, "the request's head is too large\n"};
    } else if (!request.has_value()) {
      response = {400, "expected GET /path HTTP/1.1\n"};
    } else if (request->method != "GET" && request->method != "HEAD") {
      response = {405, "only GET and HEAD\n"};
    } else {
      without_body = request->method == "HEAD";
      response = Route(*handlers_, request->path);
      if (request->takes_gzip && response.body.size() >= kMinCompressedBytes) {
        internal::Compress(&response);
      }
    }
    in_.clear();
    out_ = internal::FormatHttpResponse(response, without_body);
    state_ = State::kResponse;
    deadline_ = FromNow(kResponseTime);
  }

  const UniqueFd fd_;
  const MetricsHttpServer::Handlers* const handlers_;
  Instant deadline_;
  State state_ = State::kHead;
  std::string in_;
  std::string out_;
  size_t sent_ = 0;
};

}  // namespace

struct MetricsHttpServer::Impl {
  Impl(ListenSocket socket, Handlers handlers_in)
      : address(std::move(socket.address)),
        handlers(std::move(handlers_in)),
        server(std::move(socket.fd),
               {.max_connections = kMaxConnections,
                .when_full = SocketServer::WhenFull::kDropOldest,  // a scrape takes milliseconds
                .accept = [this](UniqueFd fd, bool) {
                  return std::make_unique<HttpConnection>(std::move(fd), &handlers);
                }}) {}

  const std::string address;
  const Handlers handlers;
  SocketServer server;  // last: its thread uses the others
};

absl::StatusOr<std::unique_ptr<MetricsHttpServer>> MetricsHttpServer::Start(
    const std::string& listen, Handlers handlers) {
  DORAD_CHECK(handlers.metrics != nullptr && handlers.alive != nullptr &&
              handlers.ready != nullptr);
  DORAD_ASSIGN_OR_RETURN(const ListenAddress address, ParseListenAddress(listen));
  if (address.host.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "LISTEN_ADDRESS",
                     absl::StrCat("metrics are served over TCP, not on ", listen));
  }
  DORAD_ASSIGN_OR_RETURN(ListenSocket socket, ListenTcp(address));
  return std::unique_ptr<MetricsHttpServer>(
      new MetricsHttpServer(std::make_unique<Impl>(std::move(socket), std::move(handlers))));
}

MetricsHttpServer::MetricsHttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsHttpServer::~MetricsHttpServer() = default;

const std::string& MetricsHttpServer::address() const { return impl_->address; }

}  // namespace dorad
