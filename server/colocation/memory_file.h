// A memory file (memfd_create, shm_open) of another process.
//
// It is read, never mapped: its owner may shorten it at any moment. That would kill a process that
// has mapped it, but only fails a read. Owns the descriptor. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/adapter/peft/peer_tensors.h"
#include "server/platform/net/unique_fd.h"

namespace dorad::shared_memory {

// INVALID_ARGUMENT (SHARED_MEMORY_MEMORY_INVALID) unless `fd` is a memory file, can be read and has
// at least `size` bytes: reads of a file on a disk, a pipe or a socket could block.
absl::StatusOr<std::shared_ptr<const adapter::PeerMemory>> OpenMemoryFile(UniqueFd fd,
                                                                          uint64_t size);

}  // namespace dorad::shared_memory
