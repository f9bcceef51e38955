#include "server/security/token_table.h"

#include <openssl/crypto.h>

#include <cstring>

#include "server/platform/files/sha256.h"

namespace dorad::security {

std::shared_ptr<const Principal> TokenTable::FindToken(std::string_view token) const {
  const Digest digest = Sha256Of(token);
  // Compares with every entry completely: the time must not reveal anything about the digests.
  size_t found = tokens_.size();
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const bool equal = CRYPTO_memcmp(digest.data(), tokens_[i].sha256.data(), digest.size()) == 0;
    found = equal ? i : found;
  }
  return found < tokens_.size() ? tokens_[found].principal : nullptr;
}

std::shared_ptr<const Principal> TokenTable::FindCertificate(const std::string& common_name) const {
  const auto found = certificates_.find(common_name);
  return found == certificates_.end() ? nullptr : found->second;
}

Tenant TokenTable::FindTenant(const std::string& tenant) const {
  const auto found = tenants_.find(tenant);
  return found == tenants_.end() ? Tenant() : found->second;
}

}  // namespace dorad::security
