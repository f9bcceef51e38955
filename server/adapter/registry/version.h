// Identity, state and lease of adapter versions. Torch-free.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/adapter/residency/residency.h"

namespace dorad::adapter {

// "" (base), "name" (its active version), "name@version" or "name@version:digest" as requests write
// it. version 0: active.
struct AdapterRef {
  std::string name;
  int64_t version = 0;
  // The first digits of the digest that the version must have; empty: not checked. Guards against
  // a number from before a restart, where a server without a store begins again at 1.
  std::string digest;

  bool is_base() const { return name.empty(); }
  // Digests do not count: they are checked where a reference is resolved.
  bool operator==(const AdapterRef& other) const {
    return name == other.name && version == other.version;
  }
  // As Parse reads it, without the digest.
  std::string ToString() const;
  // INVALID_ARGUMENT (ADAPTER_NAME_INVALID) for any other text.
  static absl::StatusOr<AdapterRef> Parse(std::string_view text);
};

// Why a request that held the version was aborted.
std::string RetiredByForce(const AdapterRef& version);

// ^[a-z0-9]([a-z0-9._-]{0,126}[a-z0-9])?$
bool IsValidAdapterName(std::string_view name);
// Whether the text may stand after "name@version:": 8 to 64 lower-case hexadecimal digits.
bool IsDigestPrefix(std::string_view text);
// INVALID_ARGUMENT (ADAPTER_NAME_INVALID).
absl::Status CheckAdapterName(std::string_view name);

enum class AdapterState { kLoading, kReady, kRetiring, kGone, kFailed };
enum class AdapterKind { kLora, kDora };

struct LoadTiming {
  absl::Duration read, validate, copy, norms;
  absl::Duration store;  // zero unless durable
  absl::Duration total;  // from the first to the end of the last
};

// Figures of a loaded version's content.
struct AdapterSummary {
  std::string digest;                     // lower-case hex SHA-256 of the canonical content
  AdapterKind kind = AdapterKind::kLora;  // kDora if any module has a magnitude
  int min_rank = 0;
  int max_rank = 0;
  int num_modules = 0;
  int64_t num_parameters = 0;
  int64_t resident_bytes = 0;
  LoadTiming timing;
};

// A loaded version: immutable content whose weights may be evicted. Shared by the registry and the
// leases; the registry drops the last reference on a loader thread.
class LoadedAdapter {
 public:
  // Weights that are never evicted.
  LoadedAdapter(std::string name, int64_t version, AdapterSummary summary,
                std::shared_ptr<const AdapterWeights> weights = nullptr)
      : name_(std::move(name)),
        version_(version),
        summary_(std::move(summary)),
        weights_(std::move(weights)) {}
  LoadedAdapter(std::string name, int64_t version, AdapterSummary summary,
                std::unique_ptr<Residency::Entry> entry)
      : name_(std::move(name)),
        version_(version),
        summary_(std::move(summary)),
        entry_(std::move(entry)) {}

  const std::string& name() const { return name_; }
  int64_t version() const { return version_; }
  const std::string& digest() const { return summary_.digest; }
  const AdapterSummary& summary() const { return summary_; }
  // For Residency::PinAll; nullptr: weights that are never evicted.
  Residency::Entry* entry() const { return entry_.get(); }
  // REQUIRES: a pin is held.
  const AdapterWeights& weights() const { return entry_ ? entry_->weights() : *weights_; }
  bool resident() const { return entry_ == nullptr || entry_->resident(); }
  bool in_host_memory() const { return entry_ != nullptr && entry_->in_host_memory(); }
  bool pinned() const { return entry_ == nullptr || entry_->pinned(); }

  // Set by a forced retirement: requests that hold it must end.
  void Revoke() const { revoked_ = true; }
  bool revoked() const { return revoked_; }

 private:
  const std::string name_;
  const int64_t version_;
  const AdapterSummary summary_;
  const std::shared_ptr<const AdapterWeights> weights_;
  const std::unique_ptr<Residency::Entry> entry_;
  mutable std::atomic<bool> revoked_{false};
};

// The right to use one version, held from admission to the end of a request and released exactly
// once, by destruction. Move-only; an empty lease stands for the base model. Thread-compatible.
class AdapterLease {
 public:
  AdapterLease() = default;
  AdapterLease(std::shared_ptr<const LoadedAdapter> adapter, std::function<void()> release)
      : adapter_(std::move(adapter)), release_(std::move(release)) {}
  AdapterLease(AdapterLease&& other) noexcept
      : adapter_(std::move(other.adapter_)), release_(std::exchange(other.release_, nullptr)) {}
  AdapterLease& operator=(AdapterLease&& other) noexcept {
    if (this != &other) {
      Reset();
      adapter_ = std::move(other.adapter_);
      release_ = std::exchange(other.release_, nullptr);
    }
    return *this;
  }
  AdapterLease(const AdapterLease&) = delete;
  AdapterLease& operator=(const AdapterLease&) = delete;
  ~AdapterLease() { Reset(); }

  // nullptr: the base model.
  const LoadedAdapter* get() const { return adapter_.get(); }
  // Releases the lease; the object is empty afterwards.
  void Reset() {
    adapter_.reset();
    if (auto release = std::exchange(release_, nullptr)) release();
  }

 private:
  std::shared_ptr<const LoadedAdapter> adapter_;
  std::function<void()> release_;
};

}  // namespace dorad::adapter
