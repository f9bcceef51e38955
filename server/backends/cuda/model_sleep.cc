// The life of the weights' memory after loading: sleep and leases.
#include <algorithm>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "server/backends/cuda/model.h"
#include "server/backends/cuda/page_copier.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/log.h"

namespace dorad::cuda {
namespace {

absl::Status Asleep() {
  return WithRetryAfter(MakeError(absl::StatusCode::kUnavailable, "SERVER_SLEEPING",
                                  "the base model's weights are asleep; Wake brings them back"),
                        absl::Seconds(1));
}

}  // namespace

absl::StatusOr<CudaModel::Use> CudaModel::UseWeights() const {
  mu_.ReaderLock();
  Use use(&mu_);
  absl::MutexLock lock(&state_mu_);
  if (!asleep_) return use;
  return Asleep();
}

absl::Status CudaModel::KeepHostCopy() {
  DORAD_ASSIGN_OR_RETURN(PageCopier copier, PageCopier::Create());
  absl::MutexLock lock(&mu_);
  const int64_t pages = PinnedPages::PagesFor(memory_.bytes());
  DORAD_ASSIGN_OR_RETURN(host_, PinnedPages::Create(pages * PinnedPages::kPageBytes));
  DORAD_ASSIGN_OR_RETURN(host_pages_, host_->Take(pages));
  return copier.FromDevice(host_pages_, memory_.as<std::byte>(), memory_.bytes(),
                           "copying the weights to host memory");
}

int64_t CudaModel::Sleep() {
  {
    absl::MutexLock lock(&state_mu_);
    if (std::exchange(asleep_, true)) return 0;
  }
  absl::MutexLock lock(&mu_);  // waits for current uses
  if (leased()) {
    LogInfo("leased weights stay on the GPU", {{"bytes", memory_.size()}});
    return 0;
  }
  LetGo();
  return memory_.mapped() ? 0 : memory_.size();
}

absl::Status CudaModel::Wake() {
  absl::MutexLock lock(&mu_);
  if (!memory_.mapped()) {
    DORAD_RETURN_IF_ERROR(memory_.Map());
    if (absl::Status status = Restore(); !status.ok()) {
      memory_.Unmap();
      return status;
    }
  }
  absl::MutexLock state_lock(&state_mu_);
  asleep_ = false;
  return absl::OkStatus();
}

absl::Status CudaModel::BeginSharing() {
  DORAD_CHECK(shareable_);
  absl::MutexLock lock(&state_mu_);
  if (asleep_) return Asleep();
  ++shares_;
  return absl::OkStatus();
}

void CudaModel::EndSharing() {
  {
    absl::MutexLock lock(&state_mu_);
    if (--shares_ > 0 || !asleep_) return;
  }
  absl::MutexLock lock(&mu_);
  if (!LetGo()) return;
  LogInfo("the last lease has ended: the sleeping weights leave the GPU",
          {{"bytes", memory_.size()}});
}

// A Wake or another end may have taken mu_ before.
bool CudaModel::LetGo() {
  if (!asleep() || leased() || !memory_.mapped()) return false;
  memory_.Unmap();
  return true;
}

absl::StatusOr<std::vector<UniqueFd>> CudaModel::Share(size_t first, size_t max) const {
  DORAD_CHECK(leased());
  const size_t pieces = layout_.piece_bytes.size();
  std::vector<UniqueFd> fds;
  for (size_t i = std::min(first, pieces); i < pieces && fds.size() < max; ++i) {
    DORAD_ASSIGN_OR_RETURN(UniqueFd fd, memory_.Share(i));
    fds.push_back(std::move(fd));
  }
  return fds;
}

}  // namespace dorad::cuda
