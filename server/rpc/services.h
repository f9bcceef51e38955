// The inputs of the gRPC services, and their common state. Filled by App, which owns all pointed-to
// objects and keeps them alive longer than the services. Immutable once the server runs (except the
// atomics) and therefore thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/adapter/publish/publisher.h"
#include "server/adapter/registry/registry.h"
#include "server/adapter/store/store.h"
#include "server/colocation/listener.h"
#include "server/colocation/sleep_control.h"
#include "server/engine/engine.h"
#include "server/engine/image_store.h"
#include "server/model/weight_layout.h"
#include "server/platform/metrics/metrics.h"
#include "server/platform/thread_pool.h"
#include "server/rpc/incoming_bytes.h"
#include "server/rpc/message_deadlines.h"
#include "server/rpc/peers.h"
#include "server/rpc/request_validation.h"
#include "server/rpc/upload_store.h"
#include "server/security/authority.h"
#include "server/security/quotas.h"

namespace dorad::rpc {

// The constant part of GetInfo.
struct ServerInfo {
  std::string version;
  std::string device;
  std::string instruction_set;  // of a GPU
  std::string model_type;
  std::string model_name;
  std::string model_digest;
  std::string compute_dtype;
  std::string kv_dtype;
  int64_t hidden_size = 0;
  int64_t num_layers = 0;
  int64_t num_parameters = 0;
  int64_t whole_context_length = 0;    // of the model; a small KV cache serves less
  int64_t whole_context_kv_bytes = 0;  // engine.kv_bytes that serve it
  std::vector<int32_t> eos_token_ids;
  int64_t max_adapter_rank = 0;
  bool deterministic = false;
  std::string shared_memory_socket;  // absolute path; "": none
  absl::Time start_time;
};

// Counts an open call or load in one of Services' numbers; a drain waits for zero.
class OpenCount {
 public:
  explicit OpenCount(std::atomic<int>* open) : open_(open) { ++*open_; }
  ~OpenCount() { --*open_; }
  OpenCount(const OpenCount&) = delete;
  OpenCount& operator=(const OpenCount&) = delete;

 private:
  std::atomic<int>* const open_;
};

struct Services {
  engine::Engine* engine = nullptr;
  engine::ImageStore* images = nullptr;
  adapter::AdapterRegistry* registry = nullptr;
  Metrics* metrics = nullptr;
  // Encodes the engine's results and passes them to gRPC; outlives the engine.
  ThreadPool* response_executor = nullptr;
  UploadStore* uploads = nullptr;
  Peers* peers = nullptr;
  const adapter::Store* store = nullptr;  // nullptr: no version is durable
  adapter::AdapterPublisher* publisher = nullptr;
  const shared_memory::Listener* shared_memory =
      nullptr;  // nullptr: nothing can be published from memory
  // Runs a change of the registry: inline, or on a thread that may wait for the store's disk.
  std::function<void(std::function<void()>)> run_change = [](const std::function<void()>& change) {
    change();
  };
  // Addresses of the base weights; nullptr without a shared-memory socket.
  const model::WeightLayout* weight_layout = nullptr;
  std::function<std::map<std::string, int64_t>()> memory_by_kind;
  std::function<int64_t()> shared_weight_bytes = [] { return 0; };
  SleepControl* sleep = nullptr;
  // Identifies callers and their rights. Both nullptr: no authentication.
  const security::Authority* authority = nullptr;
  security::Quotas* quotas = nullptr;

  // The current limits of requests.
  RequestLimits limits() const { return {engine->limits(), max_message_bytes}; }
  absl::Duration default_deadline() const { return absl::Seconds(default_deadline_seconds.load()); }

  ServerInfo info;
  int64_t max_message_bytes = RequestLimits().max_message_bytes;
  int64_t max_adapter_bytes = 0;
  // Bounds the wait for each message of a call.
  std::unique_ptr<MessageDeadlines> message_deadlines;
  // Bounds the bytes of each message of a call.
  IncomingBytes incoming;
  std::atomic<double> default_deadline_seconds{0};  // for calls without one; 0: none
  // Set: publishing is refused.
  std::atomic<bool> draining{false};
  std::atomic<int> open_requests{0};  // Generate and Score calls whose end has not been sent
  std::atomic<int> open_loads{0};     // Publish* calls without an answer
  std::atomic<int> open_changes{0};   // Activate and Retire without an answer
};

}  // namespace dorad::rpc
