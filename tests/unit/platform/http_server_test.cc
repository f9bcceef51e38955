#include "server/platform/net/http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <zlib.h>

#include "server/platform/net/http_request.h"
#include "server/platform/net/listen_address.h"
#include "server/platform/net/unique_fd.h"
#include "tests/unit/support/test.h"

namespace dorad {
namespace {

class HttpServerTest : public ::testing::Test {
 protected:
  HttpServerTest() {
    auto server = MetricsHttpServer::Start(
        "127.0.0.1:0", {[this] { return Render(); }, [this] { return alive_.load(); },
                        [this] { return ready_.load(); }});
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  std::string Render() {
    if (throws_) throw std::runtime_error("no");
    return metrics_;
  }

  int Port() const {
    const auto address = ParseListenAddress(server_->address());
    EXPECT_TRUE(address.ok()) << address.status();
    return address->port;
  }

  // A connected socket that gives up reading after ten seconds.
  UniqueFd Connect() const {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in name = {};
    name.sin_family = AF_INET;
    name.sin_port = htons(static_cast<uint16_t>(Port()));
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const timeval patience = {10, 0};
    setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
    return fd;
  }

  static bool Send(const UniqueFd& fd, const std::string& text) {
    return send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(text.size());
  }

  // What the server sends until it closes; "TIMEOUT" at the end when it does not.
  static std::string ReceiveAll(const UniqueFd& fd) {
    std::string text;
    char buffer[65536];
    while (true) {
      const ssize_t n = recv(fd.get(), buffer, sizeof(buffer), 0);
      if (n < 0) return text + (errno == EAGAIN ? "TIMEOUT" : "");
      if (n == 0) return text;
      text.append(buffer, static_cast<size_t>(n));
    }
  }

  // Whether the server has neither sent anything nor closed the connection.
  static bool IsOpen(const UniqueFd& fd) {
    char byte;
    return recv(fd.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
  }

  std::string Exchange(const std::string& request) const {
    const UniqueFd fd = Connect();
    EXPECT_TRUE(Send(fd, request));
    return ReceiveAll(fd);
  }

  std::string Get(const std::string& path) const {
    return Exchange(absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: x\r\n\r\n"));
  }

  std::string metrics_ = "up 1\n";
  std::atomic<bool> alive_ = true, ready_ = true, throws_ = false;
  std::unique_ptr<MetricsHttpServer> server_;
};

TEST_F(HttpServerTest, ServesMetricsAndProbes) {
  const std::string metrics = Get("/metrics");
  EXPECT_THAT(metrics, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(metrics, HasSubstr("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
  EXPECT_THAT(metrics, HasSubstr("Content-Length: 5\r\n"));
  EXPECT_THAT(metrics, EndsWith("\r\n\r\nup 1\n"));
  EXPECT_THAT(Get("/metrics?name[]=up"), EndsWith("up 1\n"));
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 200 "));
  ready_ = false;
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 503 "));
  alive_ = false;
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 503 "));
}

std::string Inflate(const std::string& bytes) {
  std::string text(1 << 20, '\0');
  z_stream stream = {};
  EXPECT_EQ(inflateInit2(&stream, MAX_WBITS + 16), Z_OK);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(text.data());
  stream.avail_out = static_cast<uInt>(text.size());
  EXPECT_EQ(inflate(&stream, Z_FINISH), Z_STREAM_END);
  text.resize(stream.total_out);
  inflateEnd(&stream);
  return text;
}

TEST_F(HttpServerTest, CompressesAScrapeForClientsThatAcceptIt) {
  for (int i = 0; i < 1000; ++i) absl::StrAppend(&metrics_, "dorad_adapter_requests ", i, "\n");
  const auto get = [this](const std::string& accepted) {
    return Exchange(
        absl::StrCat("GET /metrics HTTP/1.1\r\naccept-encoding:", accepted, "\r\n\r\n"));
  };
  for (const char* accepted : {"gzip", " deflate, GZIP;q=0.5", "gzip ; q=1"}) {
    const std::string response = get(accepted);
    EXPECT_THAT(response, HasSubstr("Content-Encoding: gzip\r\n")) << accepted;
    const std::string body = response.substr(response.find("\r\n\r\n") + 4);
    EXPECT_THAT(response, HasSubstr(absl::StrCat("Content-Length: ", body.size(), "\r\n")));
    EXPECT_LT(body.size(), metrics_.size() / 4);
    EXPECT_EQ(Inflate(body), metrics_);
  }
  for (const char* accepted : {"", "deflate", "gzip;q=0", "gzip;q=x", "xgzip"}) {
    const std::string response = get(accepted);
    EXPECT_THAT(response, Not(HasSubstr("Content-Encoding"))) << accepted;
    EXPECT_THAT(response, EndsWith(metrics_)) << accepted;
  }
}

TEST_F(HttpServerTest, AnswersHeadWithoutBody) {
  const std::string head = Exchange("HEAD /metrics HTTP/1.1\r\n\r\n");
  EXPECT_THAT(head, HasSubstr("Content-Length: 5\r\n"));
  EXPECT_THAT(head, EndsWith("\r\n\r\n"));
}

TEST_F(HttpServerTest, RefusesWhatItDoesNotServe) {
  EXPECT_THAT(Get("/"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(Get("/metrics/"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(Get("/../metrics"), StartsWith("HTTP/1.1 404 "));
  const std::string post = Exchange("POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc");
  EXPECT_THAT(post, StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(post, HasSubstr("Allow: GET, HEAD\r\n"));
  for (const char* request :
       {"\r\n\r\n", "GET\r\n\r\n", "GET /metrics\r\n\r\n", "GET  /metrics HTTP/1.1\r\n\r\n",
        "GET metrics HTTP/1.1\r\n\r\n", "get /metrics HTTP/1.1\r\n\r\n",
        "GET /metrics HTTP/2.0\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET /\x01 HTTP/1.1\r\n\r\n", "\x16\x03\x01\n\n"}) {
    EXPECT_THAT(Exchange(request), StartsWith("HTTP/1.1 400 ")) << request;
  }
  EXPECT_THAT(Exchange("GET /metrics HTTP/1.1\r\nX: " + std::string(9000, 'x')),
              StartsWith("HTTP/1.1 431 "));
}

TEST_F(HttpServerTest, SurvivesAHandlerThatThrows) {
  throws_ = true;
  EXPECT_THAT(Get("/metrics"), StartsWith("HTTP/1.1 500 "));
  throws_ = false;
  EXPECT_THAT(Get("/metrics"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpServerTest, TakesARequestInPieces) {
  const UniqueFd fd = Connect();
  for (const char* piece : {"GET /met", "rics HTTP/1.0\r", "\n", "\r", "\n"}) {
    ASSERT_TRUE(Send(fd, piece));
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_THAT(ReceiveAll(fd), EndsWith("up 1\n"));
}

TEST_F(HttpServerTest, SendsResponsesLargerThanTheSocketTakes) {
  metrics_ = std::string(32 << 20, 'm');
  const UniqueFd fd = Connect();
  ASSERT_TRUE(Send(fd, "GET /metrics HTTP/1.1\r\n\r\n"));
  absl::SleepFor(absl::Milliseconds(100));  // the socket's buffers are full by now
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200 "));
  const std::string response = ReceiveAll(fd);
  EXPECT_EQ(response.size() - response.find("\r\n\r\n") - 4, metrics_.size());
}

TEST_F(HttpServerTest, HalfOpenConnectionsDoNotDelayAScrape) {
  std::vector<UniqueFd> half_open;
  for (int i = 0; i < 20; ++i) {
    half_open.push_back(Connect());
    ASSERT_TRUE(Send(half_open.back(), i % 2 == 0 ? "GET /metrics HT" : ""));
  }
  EXPECT_THAT(Get("/metrics"), EndsWith("up 1\n"));
  for (const UniqueFd& fd : half_open) EXPECT_TRUE(IsOpen(fd)) << "the scrape waited for its end";
  // And they are closed after a few seconds.
  for (const UniqueFd& fd : half_open) EXPECT_EQ(ReceiveAll(fd), "");
}

TEST_F(HttpServerTest, MoreConnectionsThanPlacesDoNotDelayAScrape) {
  std::vector<UniqueFd> half_open;
  for (int i = 0; i < 200; ++i) half_open.push_back(Connect());
  EXPECT_THAT(Get("/metrics"), EndsWith("up 1\n"));
  EXPECT_TRUE(IsOpen(half_open.back())) << "the scrape waited for its end";
}

// Bytes that trickle in must not extend the deadline.
TEST_F(HttpServerTest, ClosesAConnectionThatTrickles) {
  const UniqueFd fd = Connect();
  // Until the request line would be too long, which takes far more than the deadline.
  int sent = 0;
  for (; sent < 8000 && Send(fd, "x"); ++sent) absl::SleepFor(absl::Milliseconds(100));
  EXPECT_LT(sent, 8000);
}

// Without descriptors accept() fails; the server must neither spin nor stay unresponsive
// afterwards.
TEST_F(HttpServerTest, RecoversFromRunningOutOfDescriptors) {
  std::vector<UniqueFd> waiting;
  for (int i = 0; i < 3; ++i) waiting.push_back(Connect());
  absl::SleepFor(absl::Milliseconds(50));
  const UniqueFd late(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {static_cast<rlim_t>(late.get()), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  name.sin_port = htons(static_cast<uint16_t>(Port()));
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const timeval patience = {10, 0};
  setsockopt(late.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  ASSERT_EQ(connect(late.get(), reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  rusage start, end;
  ASSERT_EQ(getrusage(RUSAGE_SELF, &start), 0);
  absl::SleepFor(absl::Milliseconds(500));
  ASSERT_EQ(getrusage(RUSAGE_SELF, &end), 0);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  const auto micros = [](const timeval& t) { return t.tv_sec * 1000000 + t.tv_usec; };
  EXPECT_LT(
      micros(end.ru_utime) + micros(end.ru_stime) - micros(start.ru_utime) - micros(start.ru_stime),
      200000);
  ASSERT_TRUE(Send(late, "GET /metrics HTTP/1.1\r\n\r\n"));
  EXPECT_THAT(ReceiveAll(late), EndsWith("up 1\n"));
}

TEST_F(HttpServerTest, SecondServerOnTheSamePortFails) {
  const auto second = MetricsHttpServer::Start(
      server_->address(), {[] { return ""; }, [] { return true; }, [] { return true; }});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(second.status()), "PORT_IN_USE");
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(server_->address()));
  // The port can be taken again at once after the first has gone.
  const std::string address = server_->address();
  EXPECT_THAT(Get("/metrics"), EndsWith("up 1\n"));
  server_.reset();
  const auto third = MetricsHttpServer::Start(
      address, {[] { return ""; }, [] { return true; }, [] { return true; }});
  EXPECT_TRUE(third.ok()) << third.status();
}

TEST_F(HttpServerTest, EndsWithConnectionsOpen) {
  const UniqueFd idle = Connect();
  absl::SleepFor(absl::Milliseconds(20));
  server_.reset();
  EXPECT_EQ(ReceiveAll(idle), "");
}

TEST(HttpServerStartTest, RefusesAddressesItCannotListenOn) {
  const auto reason = [](const std::string& listen) {
    return ReasonOf(MetricsHttpServer::Start(
                        listen, {[] { return ""; }, [] { return true; }, [] { return true; }})
                        .status());
  };
  EXPECT_EQ(reason("localhost"), "LISTEN_ADDRESS");
  EXPECT_EQ(reason("unix:/tmp/x"), "LISTEN_ADDRESS");
  EXPECT_EQ(reason("host.invalid:0"), "LISTEN_ADDRESS");
  EXPECT_EQ(reason("192.0.2.1:0"), "LISTEN_FAILED");  // an address no machine has
}

TEST(ListenAddressTest, KnowsWhichListenersCollide) {
  const auto collide = [](const char* a, const char* b) {
    const bool forth = Collide(*ParseListenAddress(a), *ParseListenAddress(b));
    EXPECT_EQ(forth, Collide(*ParseListenAddress(b), *ParseListenAddress(a))) << a << " " << b;
    return forth;
  };
  EXPECT_TRUE(collide("127.0.0.1:7", "127.0.0.1:7"));
  EXPECT_TRUE(collide("localhost:7", "127.0.0.1:7"));
  EXPECT_TRUE(collide("localhost:7", "[::1]:7"));
  EXPECT_TRUE(collide("0.0.0.0:7", "192.0.2.1:7"));
  EXPECT_TRUE(collide("[::]:7", "127.0.0.1:7"));
  EXPECT_TRUE(collide("unix:/a", "unix:/a"));
  EXPECT_TRUE(collide("unix:/a/x", "unix:/a/./b/..//x"));
  EXPECT_FALSE(collide("127.0.0.1:0", "127.0.0.1:0"));
  EXPECT_FALSE(collide("127.0.0.1:7", "127.0.0.1:8"));
  EXPECT_FALSE(collide("127.0.0.1:7", "127.0.0.2:7"));
  EXPECT_FALSE(collide("unix:/a", "unix:/b"));
  EXPECT_FALSE(collide("unix:a", "unix:/a"));
  EXPECT_FALSE(collide("unix:/a", "127.0.0.1:7"));
}

TEST(ListenAddressTest, SplitsHostAndPort) {
  const auto v4 = ParseListenAddress("0.0.0.0:80");
  ASSERT_TRUE(v4.ok());
  EXPECT_EQ(v4->host, "0.0.0.0");
  EXPECT_EQ(v4->port, 80);
  const auto v6 = ParseListenAddress("[::1]:0");
  ASSERT_TRUE(v6.ok());
  EXPECT_EQ(v6->host, "::1");
  EXPECT_EQ(JoinHostPort(v6->host, 7), "[::1]:7");
  const auto file = ParseListenAddress("unix:/run/a:b");
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->unix_path, "/run/a:b");
  EXPECT_EQ(file->host, "");
  EXPECT_FALSE(ParseListenAddress("unix:").ok());
  EXPECT_FALSE(ParseListenAddress("unix:/" + std::string(107, 'x')).ok());
  EXPECT_FALSE(ParseListenAddress("a b:1").ok());
  EXPECT_FALSE(ParseListenAddress("a/b:1").ok());
}

}  // namespace
}  // namespace dorad
