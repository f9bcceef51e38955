#include "server/platform/net/network.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/numbers.h"

namespace dorad {
namespace {

constexpr int kMappedBits = 96;  // of ::ffff:0:0/96
constexpr std::array<uint8_t, 12> kMapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

}  // namespace

std::optional<Network::Address> Network::ToAddress(const sockaddr& address) {
  Address bytes{};
  if (address.sa_family == AF_INET) {
    std::copy(kMapped.begin(), kMapped.end(), bytes.begin());
    std::memcpy(bytes.data() + kMapped.size(),
                &reinterpret_cast<const sockaddr_in&>(address).sin_addr, 4);
    return bytes;
  }
  if (address.sa_family != AF_INET6) return std::nullopt;
  std::memcpy(bytes.data(), &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr,
              bytes.size());
  return bytes;
}

Network::Address Network::Prefix(Address address) const {
  for (int bit = bits_; bit < 128; ++bit) {
    address[bit / 8] &= static_cast<uint8_t>(~(0x80 >> (bit % 8)));
  }
  return address;
}

std::optional<Network> Network::Parse(const std::string& text) {
  const size_t slash = text.find('/');
  const std::string host = text.substr(0, slash);
  sockaddr_in v4 = {};
  sockaddr_in6 v6 = {};
  v4.sin_family = AF_INET;
  v6.sin6_family = AF_INET6;
  const bool is_v4 = inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1;
  if (!is_v4 && inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) != 1) return std::nullopt;
  const std::optional<Address> address = ToAddress(is_v4 ? reinterpret_cast<const sockaddr&>(v4)
                                                         : reinterpret_cast<const sockaddr&>(v6));
  const int most = is_v4 ? 32 : 128;
  int bits = most;
  if (slash != std::string::npos &&
      (!absl::SimpleAtoi(text.substr(slash + 1), &bits) || bits < 0 || bits > most)) {
    return std::nullopt;
  }
  Network network;
  network.bits_ = is_v4 ? kMappedBits + bits : bits;
  network.prefix_ = network.Prefix(*address);
  if (network.prefix_ != *address) return std::nullopt;
  return network;
}

bool Network::Contains(const sockaddr& address) const {
  const std::optional<Address> bytes = ToAddress(address);
  return bytes && Prefix(*bytes) == prefix_;
}

}  // namespace dorad
