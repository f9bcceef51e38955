#include "server/backends/cuda/mapped_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/backends/cuda/driver.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

// Bytes of one piece: with fewer, larger pieces, allocating and mapping are some ten times faster
// than page by page.
constexpr int64_t kPieceBytes = 64 << 20;

CUmemAllocationProp OfThisDevice(bool shareable) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  if (shareable) properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  return properties;
}

}  // namespace

absl::StatusOr<AddressRange> AddressRange::Reserve(int64_t bytes, const std::string& kind) {
  DORAD_ASSIGN_OR_RETURN(const Driver* driver, Driver::Get());
  AddressRange range;
  DORAD_RETURN_IF_ERROR(
      driver->ToStatus(driver->address_reserve(&range.address_, bytes, kMappedPageBytes, 0, 0),
                       absl::StrCat("reserving addresses for ", kind)));
  range.bytes_ = bytes;
  return range;
}

AddressRange::~AddressRange() {
  if (address_ == 0) return;
  const Driver& driver = **Driver::Get();
  (void)driver.ToStatus(driver.address_free(address_, bytes_), "freeing addresses");
}

absl::StatusOr<MappedMemory> MappedMemory::Create(MemoryLedger* ledger, std::string kind,
                                                  int64_t bytes, bool shareable) {
  const int64_t size = RoundUp(std::max<int64_t>(bytes, 1), kMappedPageBytes);
  DORAD_ASSIGN_OR_RETURN(AddressRange addresses, AddressRange::Reserve(size, kind));
  MappedMemory memory(ledger, std::move(kind), addresses.address(), bytes);
  memory.shareable_ = shareable;
  memory.own_addresses_ = std::move(addresses);
  DORAD_RETURN_IF_ERROR(memory.Map());
  return memory;
}

MappedMemory::MappedMemory(MemoryLedger* ledger, std::string kind, CUdeviceptr address,
                           int64_t bytes)
    : ledger_(ledger),
      kind_(std::move(kind)),
      address_(address),
      bytes_(bytes),
      size_(RoundUp(std::max<int64_t>(bytes, 1), kMappedPageBytes)) {}

MappedMemory::~MappedMemory() {
  if (mapped()) Unmap();
}

absl::Status MappedMemory::Map(MemoryLedger::Source source) {
  DORAD_CHECK(!mapped());
  DORAD_RETURN_IF_ERROR(ledger_->Reserve(kind_, size_, source));
  absl::Status status = MapPieces();
  if (status.ok()) return status;
  UnmapPieces();
  ledger_->Release(kind_, size_);
  return status;
}

absl::Status MappedMemory::MapPieces() {
  const Driver& driver = **Driver::Get();
  const std::string what = absl::StrCat("mapping ", size_, " bytes for ", kind_);
  const CUmemAllocationProp properties = OfThisDevice(shareable_);
  for (int64_t at = 0; at < size_; at += kPieceBytes) {
    const int64_t bytes = std::min(kPieceBytes, size_ - at);
    CUmemGenericAllocationHandle piece = 0;
    DORAD_RETURN_IF_ERROR(driver.ToStatus(driver.create(&piece, bytes, &properties, 0), what));
    const absl::Status status =
        driver.ToStatus(driver.map(address_ + at, bytes, 0, piece, 0), what);
    if (!status.ok()) {
      (void)driver.release(piece);
      return status;
    }
    pieces_.push_back(piece);
  }
  CUmemAccessDesc access = {};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return driver.ToStatus(driver.set_access(address_, size_, &access, 1), what);
}

void MappedMemory::Unmap() {
  DORAD_CHECK(mapped());
  UnmapPieces();
  ledger_->Release(kind_, size_);
}

void MappedMemory::UnmapPieces() {
  const Driver& driver = **Driver::Get();
  const std::string what = absl::StrCat("giving back the memory of ", kind_);
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i) * kPieceBytes;
    (void)driver.ToStatus(driver.unmap(address_ + at, std::min(kPieceBytes, size_ - at)), what);
    (void)driver.ToStatus(driver.release(pieces_[i]), what);
  }
  pieces_.clear();
}

std::vector<uint64_t> MappedMemory::piece_bytes() const {
  std::vector<uint64_t> bytes;
  for (int64_t at = 0; at < size_; at += kPieceBytes) {
    bytes.push_back(static_cast<uint64_t>(std::min(kPieceBytes, size_ - at)));
  }
  return bytes;
}

absl::StatusOr<UniqueFd> MappedMemory::Share(size_t piece) const {
  DORAD_CHECK(shareable_ && piece < pieces_.size());
  const Driver& driver = **Driver::Get();
  int fd = -1;
  DORAD_RETURN_IF_ERROR(driver.ToStatus(
      driver.export_handle(&fd, pieces_[piece], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
      absl::StrCat("sharing the memory of ", kind_)));
  return UniqueFd(fd);
}

void MappedMemory::Swap(MappedMemory& other) noexcept {
  std::swap(ledger_, other.ledger_);
  std::swap(kind_, other.kind_);
  std::swap(shareable_, other.shareable_);
  std::swap(own_addresses_, other.own_addresses_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  std::swap(size_, other.size_);
  std::swap(pieces_, other.pieces_);
}

}  // namespace dorad::cuda
