#include "server/rpc/publish_validation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "server/adapter/registry/version.h"
#include "server/rpc/peft_config_json.h"

namespace dorad::rpc {
namespace {

void CheckVersionNumber(int64_t version, std::vector<Violation>* violations) {
  if (version >= 1) return;
  violations->push_back({"version", "ADAPTER_VERSION_INVALID",
                         absl::StrCat(version, " is not a version number: they start with 1")});
}

void CheckTags(const google::protobuf::Map<std::string, std::string>& tags,
               std::vector<Violation>* violations) {
  constexpr size_t kMaxTags = 64;
  constexpr size_t kMaxKeyBytes = 128;
  constexpr size_t kMaxValueBytes = 1024;
  if (tags.size() > kMaxTags) {
    violations->push_back({"tags", "TAGS_INVALID", "more than 64 tags"});
    return;
  }
  for (const auto& [key, value] : tags) {
    if (key.empty() || key.size() > kMaxKeyBytes || value.size() > kMaxValueBytes) {
      violations->push_back({"tags[" + key.substr(0, kMaxKeyBytes) + "]", "TAGS_INVALID",
                             "a key has 1 to 128 bytes and a value at most 1024"});
    }
  }
}

// Empty, and therefore refused, for a message that is too large.
std::string ToBoundedConfigJson(const v1::PeftConfig& config) {
  return config.ByteSizeLong() > kMaxAdapterConfigBytes ? "" : ToAdapterConfigJson(config);
}

}  // namespace

void CheckAdapterName(const std::string& name, std::vector<Violation>* violations) {
  for (Violation& violation : ViolationsOf(adapter::CheckAdapterName(name))) {
    violations->push_back(std::move(violation));
  }
}

absl::Status CheckAdapterVersion(const char* subject, const std::string& name, int64_t version,
                                 const std::string& digest) {
  std::vector<Violation> violations;
  CheckAdapterName(name, &violations);
  CheckVersionNumber(version, &violations);
  if (!digest.empty() && !adapter::IsDigestPrefix(digest)) {
    violations.push_back({"digest", "DIGEST_INVALID",
                          "expected the first 8 to 64 lower-case hexadecimal digits of a digest"});
  }
  if (violations.empty()) return absl::OkStatus();
  return MakeInvalid(subject, std::move(violations));
}

void CheckUploadId(const std::string& id, std::vector<Violation>* violations) {
  constexpr size_t kMaxBytes = 128;
  const bool known = std::all_of(id.begin(), id.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  });
  if (known && !id.empty() && id.size() <= kMaxBytes) return;
  violations->push_back(
      {"upload_id", "UPLOAD_ID_INVALID", "an upload's id is 1 to 128 of [A-Za-z0-9._-]"});
}

void CheckSha256(const char* field, const std::string& sha256, std::vector<Violation>* violations) {
  if (sha256.size() == 32) return;
  violations->push_back({field, "PUBLISH_SHA256_INVALID",
                         absl::StrCat("a SHA-256 has 32 bytes, not ", sha256.size())});
}

void CheckPath(const std::string& path, std::vector<Violation>* violations) {
  if (path.empty()) {
    violations->push_back({"path", "PATH_EMPTY", "the folder of a PEFT adapter is missing"});
  } else if (path.size() > kMaxPathBytes) {
    violations->push_back(
        {"path", "PATH_TOO_LONG", absl::StrCat("a path has at most ", kMaxPathBytes, " bytes")});
  } else if (path.front() != '/') {
    // Relative paths depend on the server's working directory.
    violations->push_back({"path", "PATH_NOT_ABSOLUTE", "the path does not begin with a slash"});
  }
}

template <typename Wire>
adapter::PublishOptions ParsePublishOptions(const Wire& wire, std::vector<Violation>* violations) {
  CheckAdapterName(wire.name(), violations);
  if (wire.has_version()) CheckVersionNumber(wire.version(), violations);
  CheckTags(wire.tags(), violations);
  adapter::PublishOptions options;
  options.name = wire.name();
  if (wire.has_version()) options.version = wire.version();
  options.activate = wire.activate();
  if (wire.has_expected_generation()) options.expected_generation = wire.expected_generation();
  if (wire.has_expected_generation() && !wire.activate()) {
    violations->push_back({"expected_generation", "EXPECTED_GENERATION_WITHOUT_ACTIVATE",
                           "it guards an activation: set activate, or leave it out"});
  }
  options.durable = wire.durable();
  options.pinned = wire.pinned();
  if (wire.has_keep_last()) options.keep_last = wire.keep_last();
  options.tags.insert(wire.tags().begin(), wire.tags().end());
  return options;
}
template adapter::PublishOptions ParsePublishOptions(const v1::PublishBegin&,
                                                     std::vector<Violation>*);
template adapter::PublishOptions ParsePublishOptions(const v1::PublishFromPathRequest&,
                                                     std::vector<Violation>*);
template adapter::PublishOptions ParsePublishOptions(const v1::PublishFromMemoryRequest&,
                                                     std::vector<Violation>*);
template adapter::PublishOptions ParsePublishOptions(const v1::PublishFromPeerRequest&,
                                                     std::vector<Violation>*);

template <typename Wire>
std::string ParseAdapterConfig(const Wire& wire, std::vector<Violation>* violations) {
  const bool typed = wire.has_peft_config();
  std::string json = typed ? ToBoundedConfigJson(wire.peft_config()) : wire.adapter_config_json();
  if (typed && !wire.adapter_config_json().empty()) {
    violations->push_back({"peft_config", "PUBLISH_CONFIG_TWICE",
                           "exactly one of adapter_config_json and peft_config is given"});
  } else if (json.empty() || json.size() > kMaxAdapterConfigBytes) {
    violations->push_back(
        {typed ? "peft_config" : "adapter_config_json", "PUBLISH_CONFIG_SIZE",
         absl::StrCat("a configuration has 1 to ", kMaxAdapterConfigBytes, " bytes of JSON")});
  }
  return json;
}
template std::string ParseAdapterConfig(const v1::PublishBegin&, std::vector<Violation>*);
template std::string ParseAdapterConfig(const v1::PublishFromMemoryRequest&,
                                        std::vector<Violation>*);

}  // namespace dorad::rpc
