#include "server/platform/net/network.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

bool Contains(const std::string& network, const std::string& host) {
  const std::optional<Network> parsed = Network::Parse(network);
  EXPECT_TRUE(parsed) << network;
  sockaddr_in v4 = {};
  sockaddr_in6 v6 = {};
  v4.sin_family = AF_INET;
  v6.sin6_family = AF_INET6;
  if (inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) {
    return parsed->Contains(reinterpret_cast<const sockaddr&>(v4));
  }
  EXPECT_EQ(inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr), 1) << host;
  return parsed->Contains(reinterpret_cast<const sockaddr&>(v6));
}

TEST(NetworkTest, HoldsTheAddressesOfItsPrefix) {
  EXPECT_TRUE(Contains("10.0.0.0/8", "10.255.0.1"));
  EXPECT_FALSE(Contains("10.0.0.0/8", "11.0.0.1"));
  EXPECT_TRUE(Contains("10.0.0.128/25", "10.0.0.200"));
  EXPECT_FALSE(Contains("10.0.0.128/25", "10.0.0.127"));
  EXPECT_TRUE(Contains("0.0.0.0/0", "192.0.2.1"));
  EXPECT_TRUE(Contains("127.0.0.1", "127.0.0.1"));
  EXPECT_FALSE(Contains("127.0.0.1", "127.0.0.2"));
  EXPECT_TRUE(Contains("fd00::/8", "fdab::1"));
  EXPECT_FALSE(Contains("fd00::/8", "fe80::1"));
  EXPECT_TRUE(Contains("::1", "::1"));
}

TEST(NetworkTest, AMappedIpv4AddressIsTheSame) {
  EXPECT_TRUE(Contains("10.0.0.0/8", "::ffff:10.1.2.3"));
  EXPECT_TRUE(Contains("::ffff:10.0.0.0/104", "10.1.2.3"));
  EXPECT_FALSE(Contains("0.0.0.0/0", "::1"));
}

TEST(NetworkTest, RefusesOtherTexts) {
  for (const char* text : {"", "localhost", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0.0/", "10.0.0/8",
                           "10.0.0.1/8", "fd00::/129", "fd00::1/8", "/8", "10.0.0.0/8/8"}) {
    EXPECT_FALSE(Network::Parse(text)) << text;
  }
}

}  // namespace
}  // namespace dorad
