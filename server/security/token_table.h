// The content of a tokens file: the principal of each token and certificate, and each tenant's
// quota. The file holds the SHA-256 of each token, never a token. Immutable and therefore
// thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/security/principal.h"

namespace dorad::security {

// A tenant's limits at one time, or in a minute. 0: no limit.
struct Quota {
  int64_t streams = 0;
  int64_t tokens_per_minute = 0;
  int64_t adapters = 0;  // versions that are ready or retiring
  int64_t bytes = 0;     // of their weights
};

struct Tenant {
  std::string adapters;  // prefix of its adapters' names; "": all names
  Quota quota;
};

class TokenTable {
 public:
  // `name` is the file's name for errors. INVALID_ARGUMENT listing every problem with its line
  // (TOKENS_SYNTAX, TOKENS_UNKNOWN_KEY, TOKENS_DUPLICATE, TOKENS_INVALID_VALUE,
  // TOKENS_UNKNOWN_TENANT, TOKENS_PREFIXES_OVERLAP).
  static absl::StatusOr<std::shared_ptr<const TokenTable>> Parse(const std::string& text,
                                                                 const std::string& name);

  // nullptr: unknown token. Takes constant time.
  std::shared_ptr<const Principal> FindToken(std::string_view token) const;
  // nullptr: no entry. common_name: of a certificate that has been verified.
  std::shared_ptr<const Principal> FindCertificate(const std::string& common_name) const;
  // Without limits for a tenant that is not listed.
  Tenant FindTenant(const std::string& tenant) const;

  size_t num_tokens() const { return tokens_.size(); }
  size_t num_certificates() const { return certificates_.size(); }

 private:
  friend class TokenTableReader;
  using Digest = std::array<uint8_t, 32>;
  struct Entry {
    Digest sha256{};
    std::shared_ptr<const Principal> principal;
  };

  std::vector<Entry> tokens_;
  std::map<std::string, std::shared_ptr<const Principal>> certificates_;  // by common name
  std::map<std::string, Tenant> tenants_;
};

}  // namespace dorad::security
