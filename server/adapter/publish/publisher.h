// The interface for publishing: sources of an adapter's files, options and results.
// AdapterPublisher is implemented by AdapterLoader; tests use a fake.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <variant>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/adapter/peft/folder.h"
#include "server/adapter/peft/peer_tensors.h"
#include "server/adapter/registry/registry.h"
#include "server/platform/files/byte_buffer.h"

namespace dorad::adapter {

struct PublishOptions {
  std::string name;
  std::optional<int64_t> version;
  bool activate = false;
  std::optional<int64_t> expected_generation;
  bool durable = false;  // survives a restart
  bool pinned = false;   // its weights stay resident
  std::map<std::string, std::string> tags;
  std::optional<int64_t> keep_last;  // instead of LoaderOptions'
  // The number is another server's: it need not be above the others of its name here.
  bool of_peer = false;
};

// An upload, from a client or from another server.
struct BytesSource {
  std::string adapter_config_json;
  SharedBytes safetensors;  // other servers may be receiving them from here
  absl::Duration read;      // time the caller spent receiving the bytes
};

// A PEFT folder on the server's host.
struct PathSource {
  std::string path;
  bool trusted = false;       // by the operator: it need not lie beneath an allowed root
  SizeCheck admit = nullptr;  // null: any size
};

// Memory of another process on this host.
struct MemorySource {
  std::string adapter_config_json;
  PeerTensors tensors;
};

using AdapterSource = std::variant<BytesSource, PathSource, MemorySource>;

struct PublishResult {
  AdapterRecord adapter;
  int64_t generation = 0;
};
using PublishCallback = std::function<void(absl::StatusOr<PublishResult>)>;

class AdapterPublisher {
 public:
  virtual ~AdapterPublisher() = default;

  // Returns at once. `done` runs exactly once, on a loader thread or, for an immediate refusal, on
  // the caller's. UNAVAILABLE (SERVER_SLEEPING) while the base weights, which norms need, are
  // asleep; RESOURCE_EXHAUSTED (LOAD_QUEUE_FULL) with a retry hint; FAILED_PRECONDITION
  // (STORE_NOT_CONFIGURED); statuses of Store. For a path also PERMISSION_DENIED (PATH_NOT_ALLOWED)
  // unless it lies, after resolving links, beneath an allowed root. For memory also ABORTED
  // (SHARED_MEMORY_CLOSED) when its owner disconnects before the version is published,
  // INVALID_ARGUMENT (SHARED_MEMORY_DIGEST_MISMATCH) and statuses of CopyToImage; after `done`
  // nothing reads the memory.
  virtual void Publish(PublishOptions options, AdapterSource source, PublishCallback done) = 0;
};

}  // namespace dorad::adapter
