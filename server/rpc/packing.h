// Packed little-endian int32 and float32 in protobuf `bytes`. Pure and therefore thread-safe.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "server/platform/check.h"

namespace dorad::rpc {

static_assert(std::endian::native == std::endian::little, "packing copies bytes as they are");

template <typename T>
std::string Pack(const std::vector<T>& values) {
  static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, float>);
  std::string bytes(values.size() * sizeof(T), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// REQUIRES: bytes.size() is a multiple of 4.
template <typename T>
std::vector<T> Unpack(const std::string& bytes) {
  static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, float>);
  DORAD_CHECK(bytes.size() % sizeof(T) == 0);
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}
inline std::vector<int32_t> UnpackIds(const std::string& bytes) { return Unpack<int32_t>(bytes); }
inline std::vector<float> UnpackFloats(const std::string& bytes) { return Unpack<float>(bytes); }

}  // namespace dorad::rpc
