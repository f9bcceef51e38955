// The pixels of images that requests have brought, by tenant and content, so that later requests
// can name them by digest. Those used least recently are dropped first. Owned by App. Thread-safe.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/engine/images.h"

namespace dorad::engine {

class ImageStore {
 public:
  // max_bytes: of pixels; images of running requests may exceed it.
  explicit ImageStore(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // Stores the images that have pixels, and replaces each image by the stored one.
  // FAILED_PRECONDITION (IMAGE_MISSING) with the digests of images without pixels that are not
  // stored.
  absl::Status Resolve(const std::string& tenant, absl::Span<std::vector<PlacedImage>> prompts);

  struct Use {
    int64_t images = 0;
    int64_t bytes = 0;
  };
  Use use() const;

 private:
  struct Entry {
    std::shared_ptr<const Image> image;
    std::list<std::string>::iterator place;  // in order_
  };

  bool Contains(const std::string& name) const ABSL_LOCKS_EXCLUDED(mu_);
  std::shared_ptr<const Image> Find(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::shared_ptr<const Image> Add(const std::string& name, std::shared_ptr<Image> image)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Evict() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int64_t max_bytes_;
  mutable absl::Mutex mu_;
  absl::flat_hash_map<std::string, Entry> entries_ ABSL_GUARDED_BY(mu_);
  std::list<std::string> order_ ABSL_GUARDED_BY(mu_);  // least recently used first
  int64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint32_t next_key_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace dorad::engine
