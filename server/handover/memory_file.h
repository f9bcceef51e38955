// A memory file (memfd_create, shm_open) of another process.
//
// It is read, never mapped: its owner may shorten it at any moment, which would kill a process that
// has it mapped, and fails a read in order. Owns the descriptor. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/adapter/peer_tensors.h"
#include "server/base/unique_fd.h"

namespace dorad::handover {

// INVALID_ARGUMENT (HANDOVER_MEMORY_INVALID) unless `fd` is a file in memory, can be read and has
// at least `size` bytes: a file on a disk, a pipe or a socket could keep its reader waiting.
absl::StatusOr<std::shared_ptr<const adapter::PeerMemory>> OpenMemoryFile(UniqueFd fd,
                                                                          uint64_t size);

}  // namespace dorad::handover
