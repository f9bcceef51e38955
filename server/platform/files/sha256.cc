#include "server/platform/files/sha256.h"

#include <openssl/evp.h>

#include "server/platform/check.h"

namespace dorad {

struct Sha256::Context {
  EVP_MD_CTX* md = EVP_MD_CTX_new();
  ~Context() { EVP_MD_CTX_free(md); }
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {
  DORAD_CHECK(EVP_DigestInit_ex(context_->md, EVP_sha256(), nullptr) == 1);
}

Sha256::~Sha256() = default;

void Sha256::Update(const void* data, size_t size) {
  DORAD_CHECK(EVP_DigestUpdate(context_->md, data, size) == 1);
}

void Sha256::UpdateFramed(std::string_view text) {
  UpdateU64(text.size());
  Update(text.data(), text.size());
}

void Sha256::UpdateU64(uint64_t value) {
  std::array<uint8_t, 8> bytes;
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<uint8_t>(value >> (8 * i));
  Update(bytes.data(), bytes.size());
}

std::array<uint8_t, 32> Sha256::Final() {
  std::array<uint8_t, 32> digest;
  unsigned size = 0;
  DORAD_CHECK(EVP_DigestFinal_ex(context_->md, digest.data(), &size) == 1 && size == 32);
  return digest;
}

std::array<uint8_t, 32> Sha256Of(std::string_view bytes) {
  Sha256 sha;
  sha.Update(bytes.data(), bytes.size());
  return sha.Final();
}

std::string ToHex(const std::array<uint8_t, 32>& digest) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * digest.size());
  for (uint8_t byte : digest) {
    hex.push_back(kDigits[byte >> 4]);
    hex.push_back(kDigits[byte & 15]);
  }
  return hex;
}

}  // namespace dorad
