#include "server/rpc/arriving_files.h"

#include <algorithm>
#include <new>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"

namespace dorad::rpc {
namespace {

constexpr absl::Duration kRetryBusy = absl::Seconds(1);

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

ArrivingFiles::ArrivingFiles(std::string config_json, uint64_t size,
                             std::shared_ptr<UploadBudget> budget)
    : config_json_(std::move(config_json)), size_(size), budget_(std::move(budget)) {}

ArrivingFiles::~ArrivingFiles() { budget_->Release(reserved_); }

absl::Status ArrivingFiles::Append(std::string_view data) {
  DORAD_RETURN_IF_ERROR(ReserveFor(data.size()));
  const auto* bytes = reinterpret_cast<const std::byte*>(data.data());
  image_->insert(image_->end(), bytes, bytes + data.size());
  absl::MutexLock lock(&mu_);
  received_.store(image_->size(), std::memory_order_release);
  changed_.SignalAll();
  return absl::OkStatus();
}

void ArrivingFiles::End() {
  absl::MutexLock lock(&mu_);
  ended_ = true;
  changed_.SignalAll();
}

uint64_t ArrivingFiles::Await(uint64_t offset, absl::Duration most) const {
  const absl::Time end = absl::Now() + most;
  absl::MutexLock lock(&mu_);
  while (received() <= offset && !ended_) {
    if (changed_.WaitWithDeadline(&mu_, end)) break;
  }
  return received();
}

bool ArrivingFiles::ended() const {
  absl::MutexLock lock(&mu_);
  return ended_;
}

std::string_view ArrivingFiles::Bytes(uint64_t offset, uint64_t count) const {
  return {reinterpret_cast<const char*>(image_->data()) + offset, count};
}

absl::Status ArrivingFiles::ReserveFor(uint64_t bytes) {
  // At least the kernel's unit of allocation: a huge page.
  constexpr uint64_t kStep = 2 << 20;
  const uint64_t wanted = (image_->size() + bytes + kStep - 1) / kStep * kStep;
  const int64_t more = static_cast<int64_t>(std::min(wanted, size_)) - reserved_;
  if (more <= 0) return absl::OkStatus();
  if (!budget_->Reserve(more)) {
    return WithRetryAfter(MakeError(absl::StatusCode::kResourceExhausted, "PUBLISH_BUSY",
                                    "too many bytes are being uploaded at the same time"),
                          kRetryBusy);
  }
  reserved_ += more;
  if (image_->capacity() >= size_) return absl::OkStatus();
  // Reserves address space for the whole file; it takes no memory until it is written. A growing
  // buffer would be copied, and both copies would take memory for a time.
  try {
    ReserveBytes(size_, image_.get());
  } catch (const std::bad_alloc&) {
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     absl::StrCat("no memory for ", size_, " bytes of an adapter"));
  }
  return absl::OkStatus();
}

}  // namespace dorad::rpc
