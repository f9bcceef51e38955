// Reads an adapter from any source into weights for a backend: read, validate, digest, copy, norms.
// Owned by AdapterLoader. Thread-safe; runs on loader threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "server/adapter/peft/base_modules.h"
#include "server/adapter/peft/tensors.h"
#include "server/adapter/publish/builder.h"
#include "server/adapter/publish/publisher.h"
#include "server/adapter/registry/version.h"
#include "server/adapter/residency/residency.h"
#include "server/platform/files/safetensors.h"
#include "server/platform/instant.h"

namespace dorad::adapter {

// The content of an unpublished version.
struct Content {
  AdapterSummary summary;  // timing.store and timing.total are not set
  std::shared_ptr<const AdapterWeights> weights;
  std::string config_json;
  std::shared_ptr<const SafetensorsFile> file;  // nullptr: the tensors went from GPU to GPU
};

// Kind, ranks and counts; the other fields stay empty.
AdapterSummary Summarise(const AdapterTensors& tensors);

// ABORTED (SHARED_MEMORY_CLOSED) when the owner of the source's memory has disconnected. `wanted`
// is null for other sources.
absl::Status CheckWanted(const std::function<bool()>& wanted);

class AdapterReader {
 public:
  struct Options {
    int max_rank = 1024;
    int64_t max_adapter_bytes = int64_t{16} << 30;
    // Folders under which an untrusted PathSource may lie; empty: none.
    std::vector<std::string> allowed_roots;
  };

  // The pointers are borrowed and outlive the reader.
  AdapterReader(Options options, const BaseModules* modules, AdapterBuilder* builder,
                Residency* residency)
      : options_(std::move(options)),
        modules_(*modules),
        builder_(*builder),
        residency_(*residency) {}

  // needs_file: the caller needs Content::file, so tensors on a GPU are read through host memory.
  // An exception of a library becomes a status: RESOURCE_EXHAUSTED (OUT_OF_MEMORY), INTERNAL.
  // `name` is for messages.
  absl::StatusOr<Content> Read(AdapterSource source, bool needs_file, const std::string& name);

 private:
  absl::StatusOr<Content> ReadAny(AdapterSource& source, bool needs_file, const std::string& name);
  absl::StatusOr<Content> ReadDevice(const MemorySource& source, const std::string& name);
  // Without enough memory, idle weights of other versions are evicted.
  struct Stages {
    Instant start, read, validated;
  };
  // Builds the adapter while another thread computes the digest.
  absl::StatusOr<Content> BuildBesideDigest(
      const Stages& stages, const AdapterTensors& tensors, const std::string& expected_digest,
      const std::string& name, absl::FunctionRef<absl::StatusOr<std::string>()> compute_digest);
  // Where memory is short, idle weights of other versions make room.
  absl::StatusOr<BuiltAdapter> Build(const AdapterTensors& tensors);

  const Options options_;
  const BaseModules& modules_;
  AdapterBuilder& builder_;
  Residency& residency_;
};

}  // namespace dorad::adapter
