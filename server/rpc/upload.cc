#include "server/rpc/upload.h"

#include <algorithm>
#include <array>
#include <new>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/file.h"
#include "server/rpc/convert.h"
#include "server/rpc/peft_config_json.h"

namespace dorad::rpc {
namespace {

constexpr absl::Duration kRetryBusy = absl::Seconds(1);

absl::Status Broken(const char* field, const char* reason, std::string description) {
  return MakeInvalid("PublishRequest", {{field, reason, std::move(description)}});
}

std::string ToBytes(const std::array<uint8_t, 32>& digest) {
  return std::string(digest.begin(), digest.end());
}

std::vector<Violation> CheckBegin(const v1::PublishBegin& begin, const std::string& config_json,
                                  int64_t max_bytes) {
  std::vector<Violation> violations;
  CheckAdapterName(begin.name(), &violations);
  if (begin.has_version()) CheckAdapterVersion(begin.version(), &violations);
  CheckTags(begin.tags(), &violations);
  if (begin.has_upload_id()) CheckUploadId(begin.upload_id(), &violations);
  CheckAdapterConfig(begin.has_peft_config(), begin.adapter_config_json(), config_json,
                     &violations);
  if (begin.safetensors_size() == 0 ||
      begin.safetensors_size() > static_cast<uint64_t>(max_bytes)) {
    violations.push_back(
        {"safetensors_size", "PUBLISH_SIZE_OUT_OF_RANGE",
         absl::StrCat(begin.safetensors_size(), " bytes are not in [1, ", max_bytes, "]")});
  }
  const size_t sha_bytes = begin.safetensors_sha256().size();
  if (sha_bytes != 0 && sha_bytes != 32) {
    violations.push_back({"safetensors_sha256", "PUBLISH_SHA256_INVALID",
                          absl::StrCat("a SHA-256 has 32 bytes, not ", sha_bytes)});
  }
  return violations;
}

}  // namespace

void CheckAdapterConfig(bool typed, const std::string& text, const std::string& json,
                        std::vector<Violation>* violations) {
  if (typed && !text.empty()) {
    violations->push_back({"peft_config", "PUBLISH_CONFIG_TWICE",
                           "exactly one of adapter_config_json and peft_config is given"});
  } else if (json.empty() || json.size() > kMaxAdapterConfigBytes) {
    violations->push_back(
        {typed ? "peft_config" : "adapter_config_json", "PUBLISH_CONFIG_SIZE",
         absl::StrCat("a configuration has 1 to ", kMaxAdapterConfigBytes, " bytes of JSON")});
  }
}

std::string ToBoundedConfigJson(const v1::PeftConfig& config) {
  return config.ByteSizeLong() > kMaxAdapterConfigBytes ? "" : ToAdapterConfigJson(config);
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

bool UploadBudget::Reserve(int64_t bytes) {
  while (!TryReserve(bytes)) {
    if (!make_room_ || !make_room_()) return false;
  }
  return true;
}

bool UploadBudget::TryReserve(int64_t bytes) {
  int64_t used = used_.load();
  do {
    if (bytes > max_bytes_ - used) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes));
  return true;
}

void UploadBudget::Release(int64_t bytes) { used_ -= bytes; }

absl::Status Upload::Accept(v1::PublishRequest* part) {
  switch (part->part_case()) {
    case v1::PublishRequest::kBegin:
      if (state_ != State::kStart) break;
      return AcceptBegin(part->mutable_begin());
    case v1::PublishRequest::kChunk:
      if (state_ != State::kReceiving) break;
      return AcceptChunk(part->chunk());
    case v1::PublishRequest::kCommit:
      if (state_ != State::kReceiving) break;
      return AcceptCommit();
    case v1::PublishRequest::PART_NOT_SET:
      break;
  }
  return Broken("part", "PUBLISH_OUT_OF_ORDER",
                "parts are one begin, then chunks, then one commit");
}

absl::Status Upload::AcceptBegin(v1::PublishBegin* begin) {
  typed_config_ = begin->has_peft_config();
  config_ = typed_config_ ? ToBoundedConfigJson(begin->peft_config())
                          : std::move(*begin->mutable_adapter_config_json());
  std::vector<Violation> violations = CheckBegin(*begin, config_, max_bytes_);
  if (!violations.empty()) return MakeInvalid("PublishBegin", std::move(violations));
  // Now, not when all the bytes have come.
  if (begin->durable() && !has_store_) return adapter::StoreNotConfigured();
  size_ = begin->safetensors_size();
  start_ = SteadyNow();
  options_.name = std::move(*begin->mutable_name());
  if (begin->has_version()) options_.version = begin->version();
  options_.activate = begin->activate();
  if (begin->has_expected_generation()) {
    options_.expected_generation = begin->expected_generation();
  }
  options_.durable = begin->durable();
  options_.pinned = begin->pinned();
  if (begin->has_keep_last()) options_.keep_last = begin->keep_last();
  options_.tags.insert(begin->tags().begin(), begin->tags().end());
  expected_sha256_ = begin->safetensors_sha256();
  state_ = State::kReceiving;
  return absl::OkStatus();
}

absl::Status Upload::AcceptChunk(const v1::PublishChunk& chunk) {
  const std::string& data = chunk.data();
  if (data.empty() || data.size() > kMaxChunkBytes) {
    return Broken("chunk.data", "PUBLISH_CHUNK_SIZE",
                  absl::StrCat(data.size(), " bytes are not in [1, ", kMaxChunkBytes, "]"));
  }
  if (chunk.offset() != image_.size()) {
    return Broken("chunk.offset", "PUBLISH_OFFSET_MISMATCH",
                  absl::StrCat(chunk.offset(), " instead of ", image_.size(),
                               ": chunks come in order and without gaps"));
  }
  if (data.size() > size_ - image_.size()) {
    return Broken("chunk.data", "PUBLISH_SIZE_MISMATCH",
                  absl::StrCat("more than the announced ", size_, " bytes"));
  }
  DORAD_RETURN_IF_ERROR(Grow(data.size()));
  const auto* bytes = reinterpret_cast<const std::byte*>(data.data());
  image_.insert(image_.end(), bytes, bytes + data.size());
  sha256_.Update(data.data(), data.size());
  return absl::OkStatus();
}

absl::Status Upload::AcceptCommit() {
  if (image_.size() != size_) {
    return Broken("commit", "PUBLISH_SIZE_MISMATCH",
                  absl::StrCat(image_.size(), " bytes came of the announced ", size_));
  }
  if (!expected_sha256_.empty()) {
    const std::array<uint8_t, 32> digest = sha256_.Final();
    if (ToBytes(digest) != expected_sha256_) {
      return Broken("safetensors_sha256", "PUBLISH_SHA256_MISMATCH",
                    absl::StrCat("the bytes that came have SHA-256 ", ToHex(digest)));
    }
  }
  read_time_ = Since(start_);
  state_ = State::kCommitted;
  return absl::OkStatus();
}

absl::Status Upload::Grow(size_t bytes) {
  if (image_.capacity() - image_.size() >= bytes) return absl::OkStatus();
  // Doubling, but never beyond what was announced.
  const uint64_t wanted = std::max<uint64_t>(2 * image_.capacity(), kMaxChunkBytes);
  const uint64_t capacity = std::max<uint64_t>(std::min(wanted, size_), image_.size() + bytes);
  const int64_t more = static_cast<int64_t>(capacity) - reserved_;
  if (!budget_->Reserve(more)) {
    return WithRetryAfter(MakeError(absl::StatusCode::kResourceExhausted, "PUBLISH_BUSY",
                                    "too many bytes are being uploaded at the same time"),
                          kRetryBusy);
  }
  reserved_ += more;
  try {
    ReserveBytes(capacity, &image_);
  } catch (const std::bad_alloc&) {
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     absl::StrCat("no memory for ", capacity, " bytes of an adapter"));
  }
  return absl::OkStatus();
}

void Upload::GiveBack() { budget_->Release(std::exchange(reserved_, 0)); }

}  // namespace dorad::rpc
