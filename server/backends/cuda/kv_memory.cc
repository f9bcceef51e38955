#include "server/backends/cuda/kv_memory.h"

#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

constexpr char kKind[] = "kv";

}  // namespace

absl::StatusOr<KvMemory> KvMemory::Create(const KvLayout& layout, int64_t pages,
                                          MemoryLedger* ledger) {
  KvMemory memory;
  memory.ledger_ = ledger;
  memory.layout_ = layout;
  const int64_t chunks = layout.ChunksFor(pages);
  DORAD_ASSIGN_OR_RETURN(memory.addresses_,
                         AddressRange::Reserve(chunks * layout.chunk_bytes(), kKind));
  CUdeviceptr at = memory.addresses_.address();
  for (int64_t i = 0; i < chunks; ++i) {
    memory.chunks_.emplace_back(ledger, kKind, at, layout.chunk_bytes());
    at += static_cast<CUdeviceptr>(layout.chunk_bytes());
  }
  std::vector<MappedMemory*> all;
  for (MappedMemory& chunk : memory.chunks_) all.push_back(&chunk);
  DORAD_RETURN_IF_ERROR(memory.MapAll(all));
  return memory;
}

absl::Status KvMemory::CopyPage(int32_t from, int32_t to, const Stream& stream) {
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemcpy2DAsync(as() + layout_.Offset(to), layout_.plane_bytes(),
                        as() + layout_.Offset(from), layout_.plane_bytes(), layout_.page_bytes(),
                        layout_.planes(), cudaMemcpyDeviceToDevice, stream.get()),
      "copying a KV page");
  return absl::OkStatus();
}

int64_t KvMemory::UnmapAll() {
  unmapped_.clear();
  for (MappedMemory& chunk : chunks_) {
    if (!chunk.mapped()) continue;
    chunk.Unmap();
    unmapped_.push_back(&chunk);
  }
  return static_cast<int64_t>(unmapped_.size()) * layout_.chunk_bytes();
}

absl::Status KvMemory::MapAgain() { return MapAll(unmapped_); }

absl::Status KvMemory::MapAll(absl::Span<MappedMemory* const> chunks) {
  // Checks the device once: each check is slow.
  const int64_t bytes = static_cast<int64_t>(chunks.size()) * layout_.chunk_bytes();
  DORAD_RETURN_IF_ERROR(ledger_->Reserve(kKind, bytes, MemoryLedger::Source::kDevice));
  ledger_->Release(kKind, bytes);
  for (size_t i = 0; i < chunks.size(); ++i) {
    absl::Status status = chunks[i]->Map(MemoryLedger::Source::kGranted);
    if (status.ok()) continue;
    while (i > 0) chunks[--i]->Unmap();
    return status;
  }
  return absl::OkStatus();
}

}  // namespace dorad::cuda
