// Tensors in the memory of another process on this host, as a publish names them.
//
// Whatever that process does meanwhile, each byte is read once, into a copy that is then validated,
// digested, built and stored like a file's: the digest of a version is always that of what it
// serves, and memory that is overwritten too early can spoil a version, but never make it pass for
// another one. Values; PeerMemory is thread-safe.
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

// One piece of memory that was handed over. It stays there, whatever becomes of its owner, as long
// as this object lives.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  // Bytes.
  virtual uint64_t size() const = 0;
  // Copies the bytes from `offset` on. INVALID_ARGUMENT (SHARED_MEMORY_MEMORY_INVALID) when they
  // are not there any more. REQUIRES: they lie within size().
  virtual absl::Status Read(uint64_t offset, absl::Span<std::byte> to) const = 0;
  // Where it lies on the server's GPU; nullptr: it is the host's.
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
  // Whether the process still wants what it has begun; from any thread.
  std::function<bool()> wanted;
  std::string expected_digest;  // of the version; empty: not checked
};

// The tensors as the image of a safetensors file. INVALID_ARGUMENT (ADAPTER_TOO_LARGE, before
// memory is asked for; SHARED_MEMORY_MEMORY_INVALID; SHARED_MEMORY_DIGEST_MISMATCH naming every
// tensor that has not its digest).
absl::StatusOr<ByteBuffer> CopyToImage(const PeerTensors& peer, uint64_t max_bytes);

// The parts of CopyToImage. The header is that of the image, with its length before it; what is
// wrong with names and shapes is found by who reads it. ImageBytes: ADAPTER_TOO_LARGE.
std::string ImageHeader(const PeerTensors& peer);
absl::StatusOr<uint64_t> ImageBytes(const PeerTensors& peer, uint64_t max_bytes);
// Adds SHARED_MEMORY_DIGEST_MISMATCH unless `found`, of the bytes read, is what the tensor's digest
// says.
void CheckTensorDigest(const PeerTensor& tensor, const Digest& found, Violations* violations);

}  // namespace dorad::adapter
