#include "server/engine/image_store.h"

#include <map>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/platform/error.h"

namespace dorad::engine {
namespace {

// Tenants share nothing, as in the prefix cache.
std::string NameOf(const std::string& tenant, const Image& image) {
  return absl::StrCat(tenant, " ", image.identity());
}

}  // namespace

absl::Status ImageStore::Resolve(const std::string& tenant,
                                 absl::Span<std::vector<PlacedImage>> prompts) {
  // New ones, outside of the lock, which the other requests need: an image has megabytes.
  std::map<std::string, std::shared_ptr<Image>> copies;
  for (const std::vector<PlacedImage>& places : prompts) {
    for (const PlacedImage& place : places) {
      if (place.image->key != 0 || place.image->pixels.empty()) continue;
      const std::string name = NameOf(tenant, *place.image);
      if (copies.contains(name) || Contains(name)) continue;
      copies[name] = std::make_shared<Image>(*place.image);
    }
  }
  std::set<std::string> missing;
  absl::MutexLock lock(&mu_);
  // A request may bring the pixels once and name them in other places. Its own images are all kept
  // until it has them.
  for (const bool with_pixels : {true, false}) {
    for (std::vector<PlacedImage>& places : prompts) {
      for (PlacedImage& place : places) {
        if (place.image->key != 0 || place.image->pixels.empty() == with_pixels) continue;
        const std::string name = NameOf(tenant, *place.image);
        std::shared_ptr<const Image> stored = Find(name);
        if (stored == nullptr && !with_pixels) {
          missing.insert(absl::BytesToHexString(place.image->sha256));
          continue;
        }
        if (stored == nullptr) {
          std::shared_ptr<Image>& copy = copies[name];
          // Evicted since.
          if (copy == nullptr) copy = std::make_shared<Image>(*place.image);
          stored = Add(name, std::move(copy));
        }
        place.image = std::move(stored);
      }
    }
  }
  Evict();
  if (missing.empty()) return absl::OkStatus();
  const std::string digests = absl::StrJoin(missing, ",");
  return WithMetadata(MakeError(absl::StatusCode::kFailedPrecondition, "IMAGE_MISSING",
                                absl::StrCat("the server does not have the images with SHA-256 ",
                                             digests, ": send them with their data")),
                      "sha256", digests);
}

bool ImageStore::Contains(const std::string& name) const {
  absl::MutexLock lock(&mu_);
  return entries_.contains(name);
}

std::shared_ptr<const Image> ImageStore::Find(const std::string& name) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return nullptr;
  order_.splice(order_.end(), order_, found->second.place);
  return found->second.image;
}

std::shared_ptr<const Image> ImageStore::Add(const std::string& name,
                                             std::shared_ptr<Image> image) {
  // The prefix cache compares keys. They repeat after 2³¹ images: long after the pages of the
  // first ones were dropped.
  constexpr uint32_t kKeys = 0x7FFFFFFE;
  image->key = Image::kNoToken - 1 - static_cast<TokenId>(next_key_++ % kKeys);
  bytes_ += static_cast<int64_t>(image->pixels.size());
  entries_[name] = {image, order_.insert(order_.end(), name)};
  return image;
}

void ImageStore::Evict() {
  while (bytes_ > max_bytes_) {
    const auto oldest = entries_.find(order_.front());
    bytes_ -= static_cast<int64_t>(oldest->second.image->pixels.size());
    entries_.erase(oldest);
    order_.pop_front();
  }
}

ImageStore::Use ImageStore::use() const {
  absl::MutexLock lock(&mu_);
  return {static_cast<int64_t>(entries_.size()), bytes_};
}

}  // namespace dorad::engine
