// Tensors of a shared-memory publish that lie on the server's GPU: copied, hashed and built there.
//
// The caller owns the objects; immutable and therefore thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/adapter/peft/base_modules.h"
#include "server/adapter/peft/peer_tensors.h"
#include "server/adapter/peft/tensors.h"
#include "server/platform/files/safetensors.h"
#include "server/platform/files/tree_sha256.h"

namespace dorad::adapter {

// Copies of a trainer's tensors on the GPU. No other process can write to them.
class DeviceTensors {
 public:
  virtual ~DeviceTensors() = default;
  // By name. Their bytes lie on the device, aligned to their elements.
  const std::map<std::string, TensorView>& tensors() const { return tensors_; }
  // Copies a part of a tensor's bytes to the host.
  virtual absl::Status Read(const std::byte* from, absl::Span<std::byte> to) const = 0;
  // TreeSha256 of each tensor, by the place of its bytes. Computed on the device.
  virtual absl::StatusOr<std::map<const std::byte*, Digest>> Digests() const = 0;

 protected:
  std::map<std::string, TensorView> tensors_;
};

// Whether every tensor lies on the server's GPU.
bool LiesOnDevice(const PeerTensors& peer);

// The checks of names, shapes and size of a strict safetensors reader. INVALID_ARGUMENT
// (SAFETENSORS_*, ADAPTER_TOO_LARGE).
absl::Status CheckForm(const PeerTensors& peer, uint64_t max_bytes);

// Copies of base weights are compared on the host: copies those among `tensors` to host memory. The
// result owns the memory.
class BaseCopiesOnHost {
 public:
  static absl::StatusOr<BaseCopiesOnHost> Bring(const DeviceTensors& device,
                                                AdapterTensors* tensors);

 private:
  struct Copy {
    std::vector<std::byte> bytes;
    TensorView view;
  };
  std::vector<std::unique_ptr<Copy>> copies_;
};

// The content digest of `tensors`, views into `device`. INVALID_ARGUMENT
// (SHARED_MEMORY_DIGEST_MISMATCH) naming every tensor whose digest differs from the one in `peer`.
absl::StatusOr<std::string> DigestOnDevice(const DeviceTensors& device, const PeerTensors& peer,
                                           const AdapterTensors& tensors,
                                           const BaseModules& modules);

}  // namespace dorad::adapter
