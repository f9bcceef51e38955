// A range of IP addresses: "10.0.0.0/8", "fd00::/8", or one address. Plain values and therefore
// thread-safe.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace dorad {

class Network {
 public:
  // nullopt: not an address, or address/bits. Bits behind the prefix must be zero.
  static std::optional<Network> Parse(const std::string& text);
  // IPv4 and IPv6; an IPv4 address counts as the same when it comes mapped into IPv6.
  bool Contains(const sockaddr& address) const;

 private:
  using Address = std::array<uint8_t, 16>;  // IPv6; IPv4 mapped into it
  static std::optional<Address> ToAddress(const sockaddr& address);
  // The address with the bits behind the prefix cleared.
  Address Prefix(Address address) const;

  Address prefix_{};
  int bits_ = 0;
};

}  // namespace dorad
