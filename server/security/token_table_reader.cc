// Reads the tokens file (YAML). Continues after a problem, so that one run reports all of them.
#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/platform/config/config_value.h"
#include "server/platform/config/edit_distance.h"
#include "server/platform/config/yaml_document.h"
#include "server/platform/error.h"
#include "server/security/token_table.h"

namespace dorad::security {
namespace {

constexpr size_t kMaxProblems = 100;
constexpr size_t kMaxNameBytes = 128;
constexpr size_t kHexDigits = 64;
constexpr int64_t kMaxCount = int64_t{1} << 50;

using Keys = std::vector<const char*>;

// [A-Za-z0-9._-], so that names can be joined with other separators and written to logs.
bool IsName(const std::string& text) {
  const bool known = std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  });
  return known && !text.empty() && text.size() <= kMaxNameBytes;
}

// Whether the text is a prefix of a valid adapter name; "" is one.
bool IsAdapterPrefix(const std::string& text) {
  const auto known = [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return absl::ascii_islower(byte) || absl::ascii_isdigit(byte) || c == '.' || c == '_' ||
           c == '-';
  };
  return text.size() <= kMaxNameBytes && std::all_of(text.begin(), text.end(), known) &&
         (text.empty() || absl::ascii_isalnum(static_cast<unsigned char>(text[0])));
}

}  // namespace

// What the file says may be a token in the wrong place: messages repeat none of it, except words
// close to known ones.
class TokenTableReader {
 public:
  explicit TokenTableReader(std::string name) : name_(std::move(name)) {}

  absl::StatusOr<std::shared_ptr<const TokenTable>> Read(const std::string& text) && {
    try {
      ReadDocument(LoadYamlDocument(text));
    } catch (const YAML::Exception& error) {
      Report(Place(error.mark), "TOKENS_SYNTAX", error.msg);
    } catch (const std::exception& error) {
      Report(name_, "TOKENS_SYNTAX", error.what());
    }
    if (!problems_.empty()) return MakeInvalid("tokens", std::move(problems_));
    return std::make_shared<const TokenTable>(std::move(table_));
  }

 private:
  using Fields = std::map<std::string, YAML::Node>;

  void ReadDocument(const YAML::Node& root) {
    const std::optional<Fields> sections =
        ReadMap(root, "the file", {"tokens", "certificates", "tenants"});
    if (!sections) return;
    // Tenants first: the others refer to them.
    if (sections->count("tenants") > 0) ReadTenants(sections->at("tenants"));
    ForEachEntry(*sections, "tokens", [this](const YAML::Node& node) { ReadToken(node); });
    ForEachEntry(*sections, "certificates",
                 [this](const YAML::Node& node) { ReadCertificate(node); });
  }

  template <typename Each>
  void ForEachEntry(const Fields& sections, const char* section, Each each) {
    const auto found = sections.find(section);
    if (found == sections.end() || found->second.IsNull()) return;
    if (!found->second.IsSequence()) {
      return Report(PlaceOf(found->second, section), "TOKENS_INVALID_VALUE", "expected a list");
    }
    for (const YAML::Node& node : found->second) each(node);
  }

  void ReadTenants(const YAML::Node& node) {
    if (node.IsNull()) return;
    if (!node.IsMap()) {
      return Report(PlaceOf(node, "tenants"), "TOKENS_INVALID_VALUE",
                    "expected a map of name: {adapters, quota}");
    }
    for (const auto& item : node) {
      const std::string tenant = item.first.IsScalar() ? item.first.Scalar() : "";
      const std::string place = PlaceOf(item.first, "tenants");
      if (!IsName(tenant)) {
        Report(place, "TOKENS_INVALID_VALUE", "a name is 1 to 128 of [A-Za-z0-9._-]");
      } else if (!table_.tenants_.try_emplace(tenant).second) {
        Report(place, "TOKENS_DUPLICATE", "the tenant occurs twice");
      } else {
        ReadTenant(item.second, &table_.tenants_[tenant]);
      }
    }
    CheckPrefixesAreApart(node);
  }

  void ReadTenant(const YAML::Node& node, Tenant* tenant) {
    const std::optional<Fields> fields = ReadMap(node, "a tenant", {"adapters", "quota"});
    if (!fields) return;
    tenant->adapters = ReadPrefix(*fields).value_or("");
    if (fields->count("quota") == 0) return;
    const YAML::Node& quota = fields->at("quota");
    const std::optional<Fields> limits =
        ReadMap(quota, "quota", {"streams", "tokens_per_minute", "adapters", "bytes"});
    if (!limits) return;
    tenant->quota.streams = ReadCount(*limits, "streams");
    tenant->quota.tokens_per_minute = ReadCount(*limits, "tokens_per_minute");
    tenant->quota.adapters = ReadCount(*limits, "adapters");
    tenant->quota.bytes = ReadCount(*limits, "bytes");
    // Live versions are counted by name.
    if (tenant->adapters.empty() && (tenant->quota.adapters > 0 || tenant->quota.bytes > 0)) {
      Report(PlaceOf(quota, "quota"), "TOKENS_INVALID_VALUE",
             "adapters and bytes are counted by name: the tenant needs a prefix, `adapters`");
    }
  }

  void ReadToken(const YAML::Node& node) {
    const std::optional<Fields> fields =
        ReadMap(node, "a token", {"name", "tenant", "sha256", "roles", "adapters"});
    if (!fields) return;
    TokenTable::Entry entry;
    entry.principal = ReadPrincipal(node, *fields);
    const std::string hex = ReadText(node, *fields, "sha256");
    const bool is_hex = hex.size() == kHexDigits && std::all_of(hex.begin(), hex.end(), [](char c) {
                          return absl::ascii_isxdigit(static_cast<unsigned char>(c));
                        });
    if (!is_hex) {
      if (fields->count("sha256") > 0) {
        Report(PlaceOf(fields->at("sha256"), "sha256"), "TOKENS_INVALID_VALUE",
               "expected 64 hexadecimal digits: the token's SHA-256, not the token");
      }
      return;
    }
    const std::string bytes = absl::HexStringToBytes(hex);
    std::copy(bytes.begin(), bytes.end(), entry.sha256.begin());
    for (const TokenTable::Entry& other : table_.tokens_) {
      if (other.sha256 == entry.sha256) {
        return Report(PlaceOf(node, "sha256"), "TOKENS_DUPLICATE", "the token occurs twice");
      }
    }
    table_.tokens_.push_back(std::move(entry));
  }

  void ReadCertificate(const YAML::Node& node) {
    const std::optional<Fields> fields =
        ReadMap(node, "a certificate", {"name", "tenant", "common_name", "roles", "adapters"});
    if (!fields) return;
    auto principal = ReadPrincipal(node, *fields);
    const std::string common_name = ReadText(node, *fields, "common_name");
    if (common_name.empty()) return;
    if (!table_.certificates_.emplace(common_name, std::move(principal)).second) {
      Report(PlaceOf(node, "common_name"), "TOKENS_DUPLICATE", "the common name occurs twice");
    }
  }

  std::shared_ptr<const Principal> ReadPrincipal(const YAML::Node& node, const Fields& fields) {
    auto principal = std::make_shared<Principal>();
    principal->name = ReadName(node, fields, "name");
    if (!principal->name.empty() && !names_.insert(principal->name).second) {
      Report(PlaceOf(node, "name"), "TOKENS_DUPLICATE", "the name occurs twice");
    }
    principal->tenant = ReadName(node, fields, "tenant");
    principal->roles = ReadRoles(node, fields);
    const std::string tenants = table_.FindTenant(principal->tenant).adapters;
    CheckTenantIsListed(node, *principal);
    const std::optional<std::string> own = ReadPrefix(fields);
    principal->adapters = own.value_or(tenants);
    if (!absl::StartsWith(principal->adapters, tenants)) {
      Report(PlaceOf(node, "adapters"), "TOKENS_INVALID_VALUE",
             absl::StrCat("does not begin with its tenant's \"", tenants, "\""));
    }
    if (principal->roles.Has(Role::kAdmin) && !principal->adapters.empty()) {
      Report(PlaceOf(node, "adapters"), "TOKENS_INVALID_VALUE",
             "an admin works on the whole server and has no prefix");
    }
    return principal;
  }

  // A misspelt tenant would have no limits. An admin has none anyway.
  void CheckTenantIsListed(const YAML::Node& node, const Principal& principal) {
    const std::string& tenant = principal.tenant;
    const bool is_listed = table_.tenants_.count(tenant) > 0;
    if (table_.tenants_.empty() || is_listed || tenant.empty()) return;
    if (principal.roles.Has(Role::kAdmin)) return;
    Keys listed;
    for (const auto& [name, limits] : table_.tenants_) listed.push_back(name.c_str());
    Report(PlaceOf(node, "tenant"), "TOKENS_UNKNOWN_TENANT",
           absl::StrCat("is not among the tenants", DidYouMean(tenant, listed)));
  }

  // With prefixes "team-a." and "team-" the owner of team-a.x would be ambiguous.
  void CheckPrefixesAreApart(const YAML::Node& node) {
    for (auto a = table_.tenants_.begin(); a != table_.tenants_.end(); ++a) {
      for (auto b = std::next(a); b != table_.tenants_.end(); ++b) {
        const std::string& one = a->second.adapters;
        const std::string& other = b->second.adapters;
        if (one.empty() || other.empty() || one == other) continue;  // on purpose
        if (!absl::StartsWith(one, other) && !absl::StartsWith(other, one)) continue;
        Report(PlaceOf(node, "tenants"), "TOKENS_PREFIXES_OVERLAP",
               absl::StrCat(a->first, " has \"", one, "\" and ", b->first, " \"", other,
                            "\": one of them would have the other's adapters"));
      }
    }
  }

  Roles ReadRoles(const YAML::Node& node, const Fields& fields) {
    Roles roles;
    const auto found = fields.find("roles");
    if (found != fields.end() && found->second.IsSequence()) {
      for (const YAML::Node& item : found->second) {
        const std::string role = item.IsScalar() ? item.Scalar() : "";
        if (role == "infer") {
          roles = roles | Role::kInfer;
        } else if (role == "publish") {
          roles = roles | Role::kPublish;
        } else if (role == "admin") {
          roles = roles | Role::kAdmin;
        } else {
          Report(PlaceOf(item, "roles"), "TOKENS_INVALID_VALUE",
                 "a role is infer, publish or admin");
        }
      }
      if (found->second.size() > 0) return roles;
    }
    Report(PlaceOf(node, "roles"), "TOKENS_INVALID_VALUE",
           "expected a list of infer, publish and admin");
    return roles;
  }

  // nullopt: not given.
  std::optional<std::string> ReadPrefix(const Fields& fields) {
    const auto found = fields.find("adapters");
    if (found == fields.end()) return std::nullopt;
    if (found->second.IsScalar() && IsAdapterPrefix(found->second.Scalar())) {
      return found->second.Scalar();
    }
    Report(PlaceOf(found->second, "adapters"), "TOKENS_INVALID_VALUE",
           "expected the beginning of an adapter's name, [a-z0-9][a-z0-9._-]*");
    return std::nullopt;
  }

  int64_t ReadCount(const Fields& fields, const char* key) {
    const auto found = fields.find(key);
    if (found == fields.end()) return 0;
    int64_t value = 0;
    const bool parsed = found->second.IsScalar() && ParseBytes(found->second.Scalar(), &value);
    if (parsed && value >= 1 && value <= kMaxCount) return value;
    Report(PlaceOf(found->second, key), "TOKENS_INVALID_VALUE",
           "expected a whole number, at least 1 (KiB, MiB, GiB and TiB may follow); leave it out "
           "for no limit");
    return 0;
  }

  std::string ReadName(const YAML::Node& node, const Fields& fields, const char* key) {
    std::string text = ReadText(node, fields, key);
    if (text.empty() || IsName(text)) return text;
    Report(PlaceOf(node, key), "TOKENS_INVALID_VALUE", "a name is 1 to 128 of [A-Za-z0-9._-]");
    return "";
  }

  // Reports an entry without this text.
  std::string ReadText(const YAML::Node& node, const Fields& fields, const char* key) {
    const auto found = fields.find(key);
    if (found != fields.end() && found->second.IsScalar() && !found->second.Scalar().empty()) {
      return found->second.Scalar();
    }
    Report(PlaceOf(node, key), "TOKENS_INVALID_VALUE", "is missing, or no text");
    return "";
  }

  // The values by key; nullopt when the node is no map. Reports unknown and repeated keys.
  std::optional<Fields> ReadMap(const YAML::Node& node, const std::string& what,
                                const Keys& known) {
    Fields fields;
    if (!node.IsMap()) {
      Report(Place(node.Mark()), "TOKENS_SYNTAX",
             absl::StrCat(what, ": expected a map of ", absl::StrJoin(known, ", ")));
      return std::nullopt;
    }
    for (const auto& item : node) {
      const std::string key = item.first.IsScalar() ? item.first.Scalar() : "";
      const bool is_known =
          std::any_of(known.begin(), known.end(), [&key](const char* name) { return key == name; });
      if (!is_known) {
        const std::string nearest = DidYouMean(key, known);
        Report(PlaceOf(item.first, nearest.empty() ? what : key), "TOKENS_UNKNOWN_KEY",
               absl::StrCat("unknown key", nearest.empty() ? OneOf(known) : nearest));
      } else if (!fields.emplace(key, item.second).second) {
        Report(PlaceOf(item.first, key), "TOKENS_DUPLICATE", "the key occurs twice");
      }
    }
    return fields;
  }

  static std::string OneOf(const Keys& known) {
    return absl::StrCat("; known are ", absl::StrJoin(known, ", "));
  }

  std::string Place(const YAML::Mark& mark) const {
    return mark.is_null() ? name_ : absl::StrCat(name_, ":", mark.line + 1);
  }
  std::string PlaceOf(const YAML::Node& node, const std::string& what) const {
    return absl::StrCat(Place(node.Mark()), ": ", what);
  }

  void Report(std::string place, const char* reason, std::string description) {
    if (problems_.size() < kMaxProblems) {
      problems_.push_back({std::move(place), reason, std::move(description)});
    }
  }

  const std::string name_;
  TokenTable table_;
  std::set<std::string> names_;
  std::vector<Violation> problems_;
};

absl::StatusOr<std::shared_ptr<const TokenTable>> TokenTable::Parse(const std::string& text,
                                                                    const std::string& name) {
  return TokenTableReader(name).Read(text);
}

}  // namespace dorad::security
