// The content of a tokens file: the principal of each token and certificate, and each tenant's
// quota. The file holds the SHA-256 of each token, never a token. Immutable, hence thread-safe.
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

// The most that a tenant may use at the same time, or in a minute. 0: no limit.
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
  // `name` stands for the file in errors. INVALID_ARGUMENT listing every problem with its line
  // (TOKENS_SYNTAX, TOKENS_UNKNOWN_KEY, TOKENS_DUPLICATE, TOKENS_INVALID_VALUE,
  // TOKENS_UNKNOWN_TENANT, TOKENS_PREFIXES_OVERLAP).
  static absl::StatusOr<std::shared_ptr<const TokenTable>> Parse(const std::string& text,
                                                                 const std::string& name);

  // nullptr: nobody has this token. Takes the same time whoever has it.
  std::shared_ptr<const Principal> FindToken(std::string_view token) const;
  // nullptr: no entry. common_name: of a certificate that has been verified.
  std::shared_ptr<const Principal> FindCertificate(const std::string& common_name) const;
  // Without limits when the file does not list the tenant.
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
