// Computes SHA-256 incrementally (OpenSSL). One object a digest; owned by its user. Not
// thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace dorad {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Update(const void* data, size_t size);
  // Adds the length as 8 little-endian bytes, then the text: no two lists of texts collide.
  void UpdateFramed(std::string_view text);
  void UpdateU64(uint64_t value);

  // Ends the computation; the object must not be used afterwards.
  std::array<uint8_t, 32> Final();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

// Of one piece.
std::array<uint8_t, 32> Sha256Of(std::string_view bytes);

// Lower-case hex.
std::string ToHex(const std::array<uint8_t, 32>& digest);

}  // namespace dorad
