#include "server/rpc/upload.h"

#include <algorithm>
#include <array>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/adapter/store/store.h"
#include "server/platform/error.h"
#include "server/platform/files/file.h"
#include "server/rpc/publish_validation.h"

namespace dorad::rpc {
namespace {

constexpr absl::Duration kRetryBusy = absl::Seconds(1);

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
  const size_t sha_bytes = begin.safetensors_sha256().size();
  if (sha_bytes != 0 && sha_bytes != 32) {
    violations->push_back({"safetensors_sha256", "PUBLISH_SHA256_INVALID",
                           absl::StrCat("a SHA-256 has 32 bytes, not ", sha_bytes)});
  }
}

}  // namespace

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
  config_ = ParseAdapterConfig(begin, &violations);
  typed_config_ = begin.has_peft_config();
  CheckImage(begin, max_bytes_, &violations);
  if (!violations.empty()) return MakeInvalid("PublishBegin", std::move(violations));
  // Checked now, not after all bytes have arrived.
  if (begin.durable() && !has_store_) return adapter::StoreNotConfigured();
  size_ = begin.safetensors_size();
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
  if (chunk.offset() != image_.size()) {
    return Broken("chunk.offset", "PUBLISH_OFFSET_MISMATCH",
                  absl::StrCat(chunk.offset(), " instead of ", image_.size(),
                               ": chunks come in order and without gaps"));
  }
  if (data.size() > size_ - image_.size()) {
    return Broken("chunk.data", "PUBLISH_SIZE_MISMATCH",
                  absl::StrCat("more than the announced ", size_, " bytes"));
  }
  DORAD_RETURN_IF_ERROR(ReserveFor(data.size()));
  const auto* bytes = reinterpret_cast<const std::byte*>(data.data());
  image_.insert(image_.end(), bytes, bytes + data.size());
  sha256_.Update(data.data(), data.size());
  return absl::OkStatus();
}

absl::Status Upload::AcceptCommit() {
  if (image_.size() != size_) {
    return Broken("commit", "PUBLISH_SIZE_MISMATCH",
                  absl::StrCat(image_.size(), " bytes arrived of the announced ", size_));
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

absl::Status Upload::ReserveFor(size_t bytes) {
  // At least the kernel's unit of allocation: a huge page.
  constexpr uint64_t kStep = 2 << 20;
  const uint64_t wanted = (image_.size() + bytes + kStep - 1) / kStep * kStep;
  const int64_t more = static_cast<int64_t>(std::min(wanted, size_)) - reserved_;
  if (more <= 0) return absl::OkStatus();
  if (!budget_->Reserve(more)) {
    return WithRetryAfter(MakeError(absl::StatusCode::kResourceExhausted, "PUBLISH_BUSY",
                                    "too many bytes are being uploaded at the same time"),
                          kRetryBusy);
  }
  reserved_ += more;
  if (image_.capacity() >= size_) return absl::OkStatus();
  // Reserves address space for the whole file; it takes no memory until it is written. A growing
  // buffer would be copied, and both copies would take memory for a time.
  try {
    ReserveBytes(size_, &image_);
  } catch (const std::bad_alloc&) {
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     absl::StrCat("no memory for ", size_, " bytes of an adapter"));
  }
  return absl::OkStatus();
}

void Upload::GiveBack() { budget_->Release(std::exchange(reserved_, 0)); }

}  // namespace dorad::rpc
