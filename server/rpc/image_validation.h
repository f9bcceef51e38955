// Checks of images in requests; no pixel is copied before all of them pass, but for the digest of
// pixels in shared memory, which is that of the copy. Functions without state and therefore
// thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "dorad/v1/inference.pb.h"
#include "server/colocation/listener.h"
#include "server/engine/types.h"
#include "server/rpc/field_validation.h"

namespace dorad::rpc {

using Images = google::protobuf::RepeatedPtrField<v1::Image>;

// A prompt or a sequence of a Score, and the name of its field.
struct ImageText {
  std::string field;
  const std::vector<int32_t>* ids = nullptr;
};

// The images of each text, in the order of their places; nothing when there are violations. Each
// placeholder must belong to an image, and each image must cover placeholders alone. `listener`:
// nullptr without a shared-memory socket. Adds to `violations`.
std::vector<std::vector<engine::PlacedImage>> ReadImages(const Images& images,
                                                         absl::Span<const ImageText> texts,
                                                         const engine::EngineLimits& limits,
                                                         const shared_memory::Listener* listener,
                                                         Violations* violations);

// The most bytes that the images of a request may have, in it and in shared memory.
int64_t MaxImageBytes(const engine::ImageLimits& limits);

}  // namespace dorad::rpc
