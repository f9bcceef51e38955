// Tensors in the memory of another process on this host (a trainer), as a publish names them.
//
// Each byte is read once, into a copy. The copy is validated, digested, built and stored like a
// file, so the digest of a version always matches the served weights. A process that overwrites its
// memory too early can spoil its version but cannot pass it off as another one. Values; PeerMemory
// is thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/adapter/peft/violations.h"
#include "server/platform/files/byte_buffer.h"
#include "server/platform/files/safetensors.h"
#include "server/platform/files/tree_sha256.h"

namespace dorad::adapter {

// One region of shared memory. It stays mapped while this object lives, even if its owner ends.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  // Bytes.
  virtual uint64_t size() const = 0;
  // Copies the bytes from `offset` on. INVALID_ARGUMENT (SHARED_MEMORY_MEMORY_INVALID) when the
  // memory has shrunk. REQUIRES: they lie within size().
  virtual absl::Status Read(uint64_t offset, absl::Span<std::byte> to) const = 0;
  // Its address on the server's GPU; nullptr: host memory.
  virtual const std::byte* device_data() const { return nullptr; }
};

struct PeerTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  uint64_t bytes = 0;  // as dtype and shape say
  std::shared_ptr<const PeerMemory> memory;
  uint64_t offset = 0;  // in memory
  std::string digest;   // TreeSha256 of the bytes; empty: not checked
};

struct PeerTensors {
  std::vector<PeerTensor> tensors;
  // Whether the process still wants the version; called from any thread.
  std::function<bool()> wanted;
  std::string expected_digest;  // of the version; empty: not checked
};

// The tensors as the bytes of a safetensors file. INVALID_ARGUMENT (ADAPTER_TOO_LARGE, before
// memory is allocated; SHARED_MEMORY_MEMORY_INVALID; SHARED_MEMORY_DIGEST_MISMATCH naming every
// tensor whose digest differs).
absl::StatusOr<ByteBuffer> CopyToImage(const PeerTensors& peer, uint64_t max_bytes);

// The parts of CopyToImage. The header includes its length; the reader validates names and shapes.
// ImageBytes: ADAPTER_TOO_LARGE.
std::string ImageHeader(const PeerTensors& peer);
absl::StatusOr<uint64_t> ImageBytes(const PeerTensors& peer, uint64_t max_bytes);
// Adds SHARED_MEMORY_DIGEST_MISMATCH unless `found`, the digest of the bytes read, equals the
// tensor's.
void CheckTensorDigest(const PeerTensor& tensor, const Digest& found, Violations* violations);

}  // namespace dorad::adapter
