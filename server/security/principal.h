// A caller and its rights. Plain values and therefore thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace dorad::security {

enum class Role : uint8_t { kInfer = 1, kPublish = 2, kAdmin = 4 };

// A set of roles. kAdmin includes every other role.
class Roles {
 public:
  constexpr Roles() = default;
  constexpr Roles(Role role) : bits_(static_cast<uint8_t>(role)) {}  // NOLINT: a role is a set

  constexpr Roles operator|(Roles other) const { return Roles(bits_ | other.bits_); }
  constexpr bool Has(Role role) const {
    return (bits_ & (static_cast<uint8_t>(role) | static_cast<uint8_t>(Role::kAdmin))) != 0;
  }
  // Whether one of the roles in `wanted` is in this set.
  constexpr bool HasAnyOf(Roles wanted) const {
    return (bits_ & (wanted.bits_ | static_cast<uint8_t>(Role::kAdmin))) != 0;
  }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr bool operator==(const Roles&) const = default;

 private:
  constexpr explicit Roles(int bits) : bits_(static_cast<uint8_t>(bits)) {}
  uint8_t bits_ = 0;
};

constexpr Roles operator|(Role a, Role b) { return Roles(a) | Roles(b); }

struct Principal {
  std::string name;    // of a token or certificate; empty: no authentication
  std::string tenant;  // its principals share requests, uploads and prefixes
  Roles roles;
  std::string adapters;  // prefix of its adapters' names; empty: all adapters

  // Whether it may use, see and (with the role) change an adapter of this name. The base model ("")
  // is open to all.
  bool MayTouch(std::string_view adapter) const {
    return adapter.empty() || adapter.substr(0, adapters.size()) == adapters;
  }

  bool operator==(const Principal&) const = default;
};

// The caller of a server without tokens and certificates: one tenant, all rights.
inline Principal Anyone() { return {"", "", Role::kAdmin, ""}; }

}  // namespace dorad::security
