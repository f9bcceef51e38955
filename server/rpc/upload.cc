#include "server/rpc/upload.h"

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/adapter/store/store.h"
#include "server/platform/error.h"
#include "server/platform/files/file.h"
#include "server/rpc/publish_validation.h"

namespace dorad::rpc {
namespace {

absl::Status Broken(const char* field, const char* reason, std::string description) {
  return MakeInvalid("PublishRequest", {{field, reason, std::move(description)}});
}

std::string ToBytes(const std::array<uint8_t, 32>& digest) {
  return std::string(digest.begin(), digest.end());
}

void CheckImage(const v1::PublishBegin& begin, int64_t max_bytes,
                std::vector<Violation>* violations) {
  if (begin.safetensors_size() == 0 ||
      begin.safetensors_size() > static_cast<uint64_t>(max_bytes)) {
    violations->push_back(
        {"safetensors_size", "PUBLISH_SIZE_OUT_OF_RANGE",
         absl::StrCat(begin.safetensors_size(), " bytes are not in [1, ", max_bytes, "]")});
  }
  if (!begin.safetensors_sha256().empty()) {
    CheckSha256("safetensors_sha256", begin.safetensors_sha256(), violations);
  }
}

}  // namespace

absl::Status Upload::Accept(v1::PublishRequest* part) {
  switch (part->part_case()) {
    case v1::PublishRequest::kBegin:
      if (state_ != State::kStart) break;
      return AcceptBegin(part->begin());
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

absl::Status Upload::AcceptBegin(const v1::PublishBegin& begin) {
  std::vector<Violation> violations;
  options_ = ParsePublishOptions(begin, &violations);
  if (begin.has_upload_id()) CheckUploadId(begin.upload_id(), &violations);
  std::string config = ParseAdapterConfig(begin, &violations);
  typed_config_ = begin.has_peft_config();
  CheckImage(begin, max_bytes_, &violations);
  if (!violations.empty()) return MakeInvalid("PublishBegin", std::move(violations));
  // Checked now, not after all bytes have arrived.
  if (begin.durable() && !has_store_) return adapter::StoreNotConfigured();
  files_ = std::make_shared<ArrivingFiles>(std::move(config), begin.safetensors_size(), budget_);
  start_ = SteadyNow();
  expected_sha256_ = begin.safetensors_sha256();
  state_ = State::kReceiving;
  return absl::OkStatus();
}

absl::Status Upload::AcceptChunk(const v1::PublishChunk& chunk) {
  const std::string& data = chunk.data();
  if (data.empty() || data.size() > kMaxChunkBytes) {
    return Broken("chunk.data", "PUBLISH_CHUNK_SIZE",
                  absl::StrCat(data.size(), " bytes are not in [1, ", kMaxChunkBytes, "]"));
  }
  if (chunk.offset() != received()) {
    return Broken("chunk.offset", "PUBLISH_OFFSET_MISMATCH",
                  absl::StrCat(chunk.offset(), " instead of ", received(),
                               ": chunks come in order and without gaps"));
  }
  if (data.size() > files_->size() - received()) {
    return Broken("chunk.data", "PUBLISH_SIZE_MISMATCH",
                  absl::StrCat("more than the announced ", files_->size(), " bytes"));
  }
  DORAD_RETURN_IF_ERROR(files_->Append(data));
  sha256_.Update(data.data(), data.size());
  return absl::OkStatus();
}

absl::Status Upload::AcceptCommit() {
  if (received() != files_->size()) {
    return Broken("commit", "PUBLISH_SIZE_MISMATCH",
                  absl::StrCat(received(), " bytes arrived of the announced ", files_->size()));
  }
  if (!expected_sha256_.empty()) {
    const std::array<uint8_t, 32> digest = sha256_.Final();
    if (ToBytes(digest) != expected_sha256_) {
      return Broken("safetensors_sha256", "PUBLISH_SHA256_MISMATCH",
                    absl::StrCat("the received bytes have SHA-256 ", ToHex(digest)));
    }
  }
  read_time_ = Since(start_);
  state_ = State::kCommitted;
  return absl::OkStatus();
}

}  // namespace dorad::rpc
