#include "server/security/listener_policy.h"

#include "tests/unit/support/test.h"

namespace dorad::security {
namespace {

// "field reason" of each problem.
std::vector<std::string> Problems(const ServerConfig& server, const SecurityConfig& security) {
  std::vector<std::string> problems;
  for (const Violation& v : ViolationsOf(CheckListenerPolicy(server, security))) {
    problems.push_back(v.field + " " + v.reason);
  }
  return problems;
}

using List = std::vector<std::string>;

ServerConfig Listening(const std::string& address) {
  ServerConfig server;
  server.grpc_listen = address;
  return server;
}

TEST(ListenerPolicyTest, AllowsWhatOnlyThisHostReaches) {
  for (const char* address : {"127.0.0.1:1", "127.9.8.7:1", "localhost:1", "[::1]:1", "unix:/s"}) {
    EXPECT_EQ(Problems(Listening(address), {}), List()) << address;
    SecurityConfig tokens;
    tokens.tokens_file = "t";
    EXPECT_EQ(Problems(Listening(address), tokens), List()) << address;
  }
}

TEST(ListenerPolicyTest, RefusesListenersThatOthersReachWithoutTlsAndCredentials) {
  for (const char* address : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "[fe80::1]:1", "myhost:1",
                              "127.0.0.1.evil.example:1", "[::ffff:10.0.0.1]:1"}) {
    EXPECT_EQ(Problems(Listening(address), {}),
              (List{"server.grpc_listen LISTENER_NOT_ENCRYPTED",
                    "server.grpc_listen LISTENER_NOT_AUTHENTICATED"}))
        << address;
  }
}

TEST(ListenerPolicyTest, NeedsBothEncryptionAndCredentials) {
  const ServerConfig server = Listening("0.0.0.0:1");
  SecurityConfig security;
  security.tokens_file = "t";
  EXPECT_EQ(Problems(server, security), List{"server.grpc_listen LISTENER_NOT_ENCRYPTED"});
  security.tls_cert = "c";
  security.tls_key = "k";
  EXPECT_EQ(Problems(server, security), List());
  security.tokens_file = "";
  EXPECT_EQ(Problems(server, security), List{"server.grpc_listen LISTENER_NOT_AUTHENTICATED"});
  security.tls_client_ca = "ca";
  EXPECT_EQ(Problems(server, security), List());
}

TEST(ListenerPolicyTest, AppliesToTheAdminListenerAndNotToMetrics) {
  ServerConfig server = Listening("127.0.0.1:1");
  server.admin_listen = "0.0.0.0:2";
  server.metrics_listen = "0.0.0.0:3";
  EXPECT_EQ(Problems(server, {}), (List{"server.admin_listen LISTENER_NOT_ENCRYPTED",
                                        "server.admin_listen LISTENER_NOT_AUTHENTICATED"}));
}

TEST(ListenerPolicyTest, CanBeToldToAllowIt) {
  SecurityConfig security;
  security.allow_insecure = true;
  EXPECT_EQ(Problems(Listening("0.0.0.0:1"), security), List());
}

TEST(ListenerPolicyTest, RefusesHalfOfTls) {
  SecurityConfig security;
  security.tls_cert = "c";
  EXPECT_EQ(Problems({}, security), List{"security.tls_key TLS_INCOMPLETE"});
  security = {};
  security.tls_key = "k";
  EXPECT_EQ(Problems({}, security), List{"security.tls_cert TLS_INCOMPLETE"});
  security = {};
  security.tls_client_ca = "ca";
  EXPECT_EQ(Problems({}, security), List{"security.tls_cert TLS_INCOMPLETE"});
}

}  // namespace
}  // namespace dorad::security
