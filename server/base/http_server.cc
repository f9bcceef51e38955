#include "server/base/http_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <list>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/error.h"
#include "server/base/http_request.h"
#include "server/base/listen_socket.h"
#include "server/base/log.h"

namespace dorad {
namespace {

using Clock = std::chrono::steady_clock;
using internal::HttpResponse;

constexpr size_t kMaxConnections = 64;
// The whole head must arrive, the whole response must be taken, in these times.
constexpr std::chrono::milliseconds kHeadTime(3000);
constexpr std::chrono::milliseconds kResponseTime(5000);
// After the response: until the client closes. Closing while it still sends would reset the
// connection and could take the response with it.
constexpr std::chrono::milliseconds kLingerTime(1000);
// Without descriptors accept() fails at once and for ever; look again after this.
constexpr std::chrono::milliseconds kAcceptPause(100);

struct Connection {
  enum class State { kHead, kResponse, kLinger };
  UniqueFd fd;
  Clock::time_point deadline;
  State state = State::kHead;
  std::string in;
  std::string out;
  size_t sent = 0;
};

// Reads what is there; false when the peer has closed or failed. `keep` null: thrown away.
bool Receive(int fd, std::string* keep) {
  char buffer[4096];
  const ssize_t n = recv(fd, buffer, sizeof(buffer), 0);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  if (n > 0 && keep != nullptr) keep->append(buffer, static_cast<size_t>(n));
  return n > 0;
}

}  // namespace

struct MetricsHttpServer::Impl {
  Impl(ListenSocket socket, Handlers handlers_in)
      : listener(std::move(socket.fd)),
        address(std::move(socket.address)),
        handlers(std::move(handlers_in)),
        wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    DORAD_CHECK(wake.ok());
    thread = std::thread([this] { Run(); });
  }

  ~Impl() {
    const uint64_t one = 1;
    DORAD_CHECK(write(wake.get(), &one, sizeof(one)) == sizeof(one));
    thread.join();
  }

  void Run() {
    std::vector<pollfd> polled;
    while (true) {
      polled.clear();
      polled.push_back({wake.get(), POLLIN, 0});
      const bool accepting = Clock::now() >= accept_after;
      polled.push_back({accepting ? listener.get() : -1, POLLIN, 0});
      for (const Connection& connection : connections) {
        const bool writing = connection.state == Connection::State::kResponse;
        polled.push_back({connection.fd.get(), static_cast<short>(writing ? POLLOUT : POLLIN), 0});
      }
      const int ready = poll(polled.data(), polled.size(), TimeoutMillis());
      DORAD_CHECK(ready >= 0 || errno == EINTR);
      if (ready < 0) continue;
      if (polled[0].revents != 0) return;
      auto event = polled.begin() + 2;
      for (auto it = connections.begin(); it != connections.end(); ++event) {
        const bool keep = event->revents == 0 || Advance(&*it);
        it = keep && Clock::now() < it->deadline ? std::next(it) : connections.erase(it);
      }
      if (polled[1].revents != 0) AcceptWaiting();
    }
  }

  // Until the next deadline; -1 is for ever.
  int TimeoutMillis() const {
    const Clock::time_point now = Clock::now();
    Clock::time_point next = Clock::time_point::max();
    if (accept_after > now) next = accept_after;
    for (const Connection& connection : connections) next = std::min(next, connection.deadline);
    if (next == Clock::time_point::max()) return -1;
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(next - now).count();
    return static_cast<int>(std::max<int64_t>(0, wait));
  }

  // A bounded number at a time, so that a flood of connections does not keep others waiting.
  void AcceptWaiting() {
    for (size_t i = 0; i < kMaxConnections && Accept(); ++i) {
    }
  }

  // False when there is none, or none can be taken.
  bool Accept() {
    UniqueFd fd(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.ok()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        if (!connections.empty()) connections.pop_front();
        accept_after = Clock::now() + kAcceptPause;
      }
      return false;
    }
    // The oldest has had the most time; a scrape takes milliseconds.
    if (connections.size() == kMaxConnections) connections.pop_front();
    Connection connection;
    connection.fd = std::move(fd);
    connection.deadline = Clock::now() + kHeadTime;
    connections.push_back(std::move(connection));
    return true;
  }

  // Does what the connection is ready for; false when it is over.
  bool Advance(Connection* connection) {
    switch (connection->state) {
      case Connection::State::kHead:
        if (!Receive(connection->fd.get(), &connection->in)) return false;
        if (!internal::HasHttpHead(connection->in)) return true;
        Answer(connection);
        return Send(connection);
      case Connection::State::kResponse:
        return Send(connection);
      case Connection::State::kLinger:
        return Receive(connection->fd.get(), nullptr);
    }
    return false;
  }

  bool Send(Connection* connection) {
    const std::string& out = connection->out;
    const ssize_t n = send(connection->fd.get(), out.data() + connection->sent,
                           out.size() - connection->sent, MSG_NOSIGNAL);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    connection->sent += static_cast<size_t>(n);
    if (connection->sent < out.size()) return true;
    connection->state = Connection::State::kLinger;
    connection->deadline = Clock::now() + kLingerTime;
    return shutdown(connection->fd.get(), SHUT_WR) == 0;
  }

  void Answer(Connection* connection) {
    HttpResponse response;
    bool without_body = false;
    const auto request = internal::ParseHttpHead(connection->in);
    if (connection->in.size() > internal::kMaxHttpHeadBytes) {
      response = {431, "the request's head is too large\n"};
    } else if (!request.has_value()) {
      response = {400, "expected GET /path HTTP/1.1\n"};
    } else if (request->method != "GET" && request->method != "HEAD") {
      response = {405, "only GET and HEAD\n"};
    } else {
      without_body = request->method == "HEAD";
      response = Route(request->path);
    }
    connection->in.clear();
    connection->out = internal::FormatHttpResponse(response, without_body);
    connection->state = Connection::State::kResponse;
    connection->deadline = Clock::now() + kResponseTime;
  }

  HttpResponse Route(const std::string& path) const {
    try {
      if (path == "/metrics") {
        return {200, handlers.metrics(), "text/plain; version=0.0.4; charset=utf-8"};
      }
      if (path == "/healthz") return Probe(handlers.alive(), "the engine gives no sign of life\n");
      if (path == "/readyz") return Probe(handlers.ready(), "not ready\n");
    } catch (const std::exception& error) {
      LogError("a metrics handler failed", {{"path", path}, {"error", std::string(error.what())}});
      return {500, "internal error\n"};
    }
    return {404, "not found; there are /metrics, /healthz and /readyz\n"};
  }

  static HttpResponse Probe(bool good, const char* otherwise) {
    return good ? HttpResponse{200, "ok\n"} : HttpResponse{503, otherwise};
  }

  const UniqueFd listener;
  const std::string address;
  const Handlers handlers;
  const UniqueFd wake;
  // Below: only used by the thread. Oldest connection first.
  std::list<Connection> connections;
  Clock::time_point accept_after = Clock::time_point::min();
  std::thread thread;
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
