#include "server/backends/cuda/kv_image.h"

#include <algorithm>
#include <limits>
#include <new>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"
#include "server/platform/process/host_memory.h"

namespace dorad::cuda {
namespace {

// As cudaMemcpy2DAsync, which refuses a pitch of 2 GiB and more.
cudaError_t CopyRows(std::byte* to, int64_t to_pitch, const std::byte* from, int64_t from_pitch,
                     int64_t width, int64_t rows, cudaMemcpyKind kind, cudaStream_t stream) {
  if (std::max(to_pitch, from_pitch) <= std::numeric_limits<int32_t>::max()) {
    return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows, kind, stream);
  }
  for (int64_t row = 0; row < rows; ++row) {
    const cudaError_t error =
        cudaMemcpyAsync(to + row * to_pitch, from + row * from_pitch, width, kind, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

absl::StatusOr<KvImage> KvImage::Save(const std::byte* cache, const KvLayout& layout,
                                      absl::Span<const int32_t> pages, const Stream& stream) {
  constexpr char kSaving[] = "saving the KV cache";
  const int64_t planes = layout.planes();
  const int64_t plane_bytes = layout.plane_bytes();
  const int64_t page_bytes = layout.page_bytes();
  KvImage image;
  image.planes_ = planes;
  image.plane_bytes_ = plane_bytes;
  for (const int32_t page : pages) {
    const int64_t at = layout.Offset(page);
    if (image.runs_.empty() || image.runs_.back().at + image.runs_.back().size != at) {
      image.runs_.push_back({at, 0});
    }
    image.runs_.back().size += page_bytes;
  }
  image.bytes_ = static_cast<int64_t>(pages.size()) * page_bytes * planes;
  if (image.bytes_ == 0) return image;
  // Linux overcommits memory and kills the process that uses too much.
  DORAD_RETURN_IF_ERROR(
      CheckHostMemory(image.bytes_, AvailableHostMemory(), "keeping the KV cache"));
  image.data_.reset(new (std::nothrow) std::byte[static_cast<size_t>(image.bytes_)]);
  if (image.data_ == nullptr) {
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     absl::StrCat("there are no ", image.bytes_,
                                  " bytes of host memory for the "
                                  "KV cache"));
  }
  std::byte* to = image.data_.get();
  for (const Run& run : image.runs_) {
    DORAD_RETURN_IF_CUDA_ERROR(CopyRows(to, run.size, cache + run.at, plane_bytes, run.size, planes,
                                        cudaMemcpyDeviceToHost, stream.get()),
                               kSaving);
    to += run.size * planes;
  }
  DORAD_RETURN_IF_ERROR(stream.Synchronize(kSaving));
  return image;
}

absl::Status KvImage::Restore(std::byte* cache, const Stream& stream) const {
  constexpr char kRestoring[] = "restoring the KV cache";
  const std::byte* from = data_.get();
  for (const Run& run : runs_) {
    DORAD_RETURN_IF_CUDA_ERROR(CopyRows(cache + run.at, plane_bytes_, from, run.size, run.size,
                                        planes_, cudaMemcpyHostToDevice, stream.get()),
                               kRestoring);
    from += run.size * planes_;
  }
  return stream.Synchronize(kRestoring);
}

}  // namespace dorad::cuda
