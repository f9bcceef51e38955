#include "server/rpc/image_validation.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/engine/images.h"
#include "server/platform/error.h"
#include "server/platform/files/sha256.h"
#include "server/rpc/memory_publish.h"
#include "server/rpc/tensor_dtype.h"

namespace dorad::rpc {
namespace {

constexpr size_t kDigestBytes = 32;
// Larger extents are mistakes; products of two still fit.
constexpr uint32_t kMaxExtent = 1 << 20;

std::string DigestOf(const std::string& data) {
  const std::array<uint8_t, kDigestBytes> digest = Sha256Of(data);
  return std::string(digest.begin(), digest.end());
}

// Pixels to be read.
struct SharedPixels {
  std::shared_ptr<const adapter::PeerMemory> memory;  // nullptr: they came with the request
  size_t bytes = 0;
};

// One image's checks, except of its place.
class ImageReader {
 public:
  ImageReader(const v1::Image& wire, std::string field, const engine::ImageLimits& limits,
              const shared_memory::Listener* listener, Violations* violations)
      : wire_(wire),
        field_(std::move(field)),
        limits_(limits),
        listener_(listener),
        violations_(*violations) {}

  // nullopt: it has violations. Without its pixels.
  std::optional<engine::Image> Read() {
    const size_t before = violations_.size();
    engine::Image image;
    ReadGrid(&image);
    const std::optional<DType> dtype = ReadDType(&image);
    if (violations_.size() == before) {
      image.dtype = *dtype;
      CheckData(image);
    }
    if (violations_.size() > before) return std::nullopt;
    image.sha256 = wire_.sha256().empty() ? DigestOf(wire_.data()) : wire_.sha256();
    return image;
  }

  // Of `pixels`.
  std::optional<DType> ReadDType(engine::Image* image) {
    image->from_bytes = wire_.dtype() == v1::TENSOR_DTYPE_U8;
    if (!image->from_bytes) {
      const std::optional<DType> dtype = ToDType(wire_.dtype());
      if (!dtype) Complain("dtype", "IMAGE_DTYPE_INVALID", "must be F32, F16, BF16 or U8");
      return dtype;
    }
    if (limits_.byte_pixels->numbers.empty()) {
      Complain("dtype", "IMAGE_BYTES_UNSUPPORTED",
               absl::StrCat("the server cannot normalize bytes: ", limits_.byte_pixels->problem));
    }
    return DType::kF32;
  }

  // Of the image that Read has returned.
  const SharedPixels& shared() const { return shared_; }

 private:
  void Complain(const char* name, const char* reason, std::string text) {
    Add(&violations_, absl::StrCat(field_, ".", name), reason, std::move(text));
  }

  void ReadGrid(engine::Image* image) {
    const auto& grid = wire_.grid();
    if (grid.size() != 3) {
      return Complain(
          "grid", "IMAGE_GRID_INVALID",
          absl::StrCat("must be time, height and width, not ", grid.size(), " numbers"));
    }
    if (grid[0] != 1) {
      return Complain("grid", "VIDEO_UNSUPPORTED",
                      absl::StrCat("videos are not served: time must be 1, not ", grid[0]));
    }
    const auto merge = static_cast<uint32_t>(limits_.merge);
    for (const uint32_t extent : {grid[1], grid[2]}) {
      if (extent > 0 && extent <= kMaxExtent && extent % merge == 0) continue;
      return Complain("grid", "IMAGE_GRID_INVALID",
                      absl::StrCat("[", absl::StrJoin(grid, ", "),
                                   "]: height and width must be multiples of ", merge));
    }
    const auto side = static_cast<uint32_t>(limits_.fixed_side);
    if (side > 0 && (grid[1] != side || grid[2] != side)) {
      return Complain("grid", "IMAGE_GRID_INVALID",
                      absl::StrCat("[", absl::StrJoin(grid, ", "), "]: images of this model have ",
                                   side, " x ", side, " patches"));
    }
    image->height = grid[1];
    image->width = grid[2];
    image->bidirectional = limits_.bidirectional;
    image->rows = image->height / limits_.merge;
    image->columns = image->width / limits_.merge;
    image->row_breaks = limits_.row_breaks;
    if (image->tokens() > limits_.max_tokens) {
      return Complain(
          "grid", "IMAGE_TOO_LARGE",
          absl::StrCat(
              image->tokens(), " tokens are more than ", limits_.max_tokens,
              limits_.bidirectional ? " (limits.max_image_tokens, engine.max_step_tokens)" : ""));
    }
    if (wire_.length() != image->tokens()) {
      Complain("length", "IMAGE_LENGTH_MISMATCH",
               absl::StrCat(wire_.length(), " placeholders, but the grid has ", image->tokens(),
                            " tokens"));
    }
  }

  void CheckData(const engine::Image& image) {
    const std::string& digest = wire_.sha256();
    if (!digest.empty() && digest.size() != kDigestBytes) {
      return Complain("sha256", "IMAGE_DIGEST_INVALID",
                      absl::StrCat(digest.size(), " bytes are not a SHA-256"));
    }
    const auto expected = static_cast<size_t>(image.height * image.width * limits_.patch_elements) *
                          (image.from_bytes ? 1 : SizeOf(image.dtype));
    if (wire_.has_memory()) return CheckMemory(expected);
    if (wire_.data().empty()) {
      if (digest.empty()) {
        Complain("data", "IMAGE_DATA_MISSING", "an image has data, a sha256 or both");
      }
      return;
    }
    if (wire_.data().size() != expected) {
      return Complain(
          "data", "IMAGE_DATA_SIZE",
          absl::StrCat(wire_.data().size(), " bytes, but ", image.height * image.width,
                       " patches of ", limits_.patch_elements, " pixels have ", expected));
    }
    if (!digest.empty() && DigestOf(wire_.data()) != digest) {
      Complain("sha256", "IMAGE_DIGEST_MISMATCH", "is not the digest of the data");
    }
  }

  void CheckMemory(size_t expected) {
    const auto complain = [&](std::string text) {
      Complain("memory", "IMAGE_MEMORY_INVALID", std::move(text));
    };
    if (!wire_.data().empty()) return complain("an image has data or memory, not both");
    if (wire_.sha256().empty()) return complain("pixels in shared memory need their sha256");
    const v1::ImageMemory& place = wire_.memory();
    const auto session = FindSession(place.session_token(), listener_);
    if (!session.ok()) return complain(std::string(session.status().message()));
    std::shared_ptr<const adapter::PeerMemory> memory = (*session)->memory(place.memory());
    if (memory == nullptr) {
      return complain(absl::StrCat("the connection has no memory ", place.memory()));
    }
    if (memory->device_data() != nullptr) {
      return complain("pixels are read from memory files, not from a GPU");
    }
    const uint64_t size = memory->size();
    if (expected > size || place.offset() > size - expected) {
      return complain(absl::StrCat(expected, " bytes at ", place.offset(), " do not lie in memory ",
                                   place.memory(), " of ", size, " bytes"));
    }
    shared_ = {std::move(memory), expected};
  }

  const v1::Image& wire_;
  const std::string field_;
  const engine::ImageLimits& limits_;
  const shared_memory::Listener* const listener_;
  Violations& violations_;
  SharedPixels shared_;
};

// The image's copy of its pixels.
std::string CopyOf(const v1::Image& wire, const std::string& field, const SharedPixels& shared,
                   Violations* violations) {
  if (shared.memory == nullptr) return wire.data();
  std::string pixels(shared.bytes, '\0');
  const absl::Status read = shared.memory->Read(
      wire.memory().offset(), {reinterpret_cast<std::byte*>(pixels.data()), pixels.size()});
  if (!read.ok()) {
    Add(violations, field + ".memory", "IMAGE_MEMORY_INVALID", std::string(read.message()));
  } else if (DigestOf(pixels) != wire.sha256()) {
    Add(violations, field + ".sha256", "IMAGE_DIGEST_MISMATCH", "is not the digest of the memory");
  }
  return pixels;
}

// The processor's numbers for bytes. A patch has its channels one after the other.
std::string NumbersOf(const std::string& bytes, const engine::ImageLimits& limits) {
  const std::vector<float>& numbers = limits.byte_pixels->numbers;
  const size_t channels = numbers.size() / model::BytePixels::kValues;
  const size_t run = static_cast<size_t>(limits.patch_elements) / channels;
  std::string pixels(bytes.size() * sizeof(float), '\0');
  char* to = pixels.data();
  for (size_t i = 0; i < bytes.size(); ++i, to += sizeof(float)) {
    const size_t channel = i / run % channels;
    const auto byte = static_cast<uint8_t>(bytes[i]);
    std::memcpy(to, &numbers[channel * model::BytePixels::kValues + byte], sizeof(float));
  }
  return pixels;
}

// Checks that the image's place follows the text's last image and holds placeholders alone, but for
// the breaks between its rows.
void CheckPlace(const engine::PlacedImage& place, const std::string& field, const ImageText& text,
                int64_t after, const engine::EngineLimits& limits, Violations* violations) {
  const int64_t begin = place.begin;
  const int64_t end = place.end();
  const auto size = static_cast<int64_t>(text.ids->size());
  if (begin < after || end > size) {
    Add(violations, field + ".offset", "IMAGE_PLACE_INVALID",
        absl::StrCat("tokens [", begin, ", ", end, ") are not within [", after, ", ", size,
                     "), after the image before"));
    return;
  }
  // The rows of an image see each other: a step that scores or samples its last one could not end
  // elsewhere, and two images without text between them would be one.
  if (place.image->bidirectional && (end == size || (*text.ids)[end] == limits.images.token_id)) {
    return Add(violations, field + ".offset", "IMAGE_PLACE_INVALID",
               absl::StrCat("a token of text must follow the image, at ", end));
  }
  const auto& placeholders = limits.image_token_ids;
  for (int64_t i = begin; i < end; ++i) {
    const int32_t id = (*text.ids)[i];
    const bool is_break = place.image->is_break(i - begin);
    const bool ok = is_break ? std::count(placeholders.begin(), placeholders.end(), id) == 0
                             : id == limits.images.token_id;
    if (ok) continue;
    return Add(violations, field + ".offset", "IMAGE_PLACE_INVALID",
               absl::StrCat(text.field, "[", i, "] is ", id, ", not ",
                            is_break ? "a break between the image's rows"
                                     : absl::StrCat("the placeholder ", limits.images.token_id)));
  }
}

// No placeholder stands outside of the images.
void CheckRest(const ImageText& text, const std::vector<engine::PlacedImage>& places,
               const engine::EngineLimits& limits, Violations* violations) {
  size_t next = 0;
  for (size_t i = 0; i < text.ids->size(); ++i) {
    while (next < places.size() && static_cast<int64_t>(i) >= places[next].end()) ++next;
    const bool in_image = next < places.size() && static_cast<int64_t>(i) >= places[next].begin;
    const int32_t id = (*text.ids)[i];
    if (in_image ||
        std::count(limits.image_token_ids.begin(), limits.image_token_ids.end(), id) == 0) {
      continue;
    }
    Add(violations, absl::StrCat(text.field, "[", i, "]"), "IMAGE_UNEXPECTED",
        absl::StrCat("token id ", id, " stands for an image or a video, and no image is there"));
    return;
  }
}

}  // namespace

std::vector<std::vector<engine::PlacedImage>> ReadImages(const Images& images,
                                                         absl::Span<const ImageText> texts,
                                                         const engine::EngineLimits& limits,
                                                         const shared_memory::Listener* listener,
                                                         Violations* violations) {
  if (!limits.images.served()) {
    if (!images.empty()) {
      Add(violations, "images", "IMAGE_UNSUPPORTED", "this server serves text");
    }
    for (const ImageText& text : texts) {
      CheckNoImages(text.field, *text.ids, limits, violations);
    }
    return std::vector<std::vector<engine::PlacedImage>>(texts.size());
  }
  const size_t before = violations->size();
  std::vector<std::vector<engine::PlacedImage>> placed(texts.size());
  std::vector<std::shared_ptr<engine::Image>> read;
  std::vector<SharedPixels> shared;
  size_t shared_bytes = 0;
  for (int i = 0; i < images.size(); ++i) {
    const v1::Image& wire = images[i];
    const std::string field = absl::StrCat("images[", i, "]");
    if (wire.sequence() >= texts.size()) {
      Add(violations, field + ".sequence", "IMAGE_PLACE_INVALID",
          absl::StrCat("there is no sequence ", wire.sequence()));
      continue;
    }
    std::vector<engine::PlacedImage>& places = placed[wire.sequence()];
    if (static_cast<int64_t>(places.size()) >= limits.images.max_images) {
      Add(violations, "images", "IMAGES_TOO_MANY",
          absl::StrCat("more than ", limits.images.max_images, " images in one prompt"));
      return placed;
    }
    ImageReader reader(wire, field, limits.images, listener, violations);
    std::optional<engine::Image> image = reader.Read();
    if (!image) continue;
    shared.push_back(reader.shared());
    shared_bytes += shared.back().bytes * (image->from_bytes ? sizeof(float) : 1);
    const ImageText& text = texts[wire.sequence()];
    read.push_back(std::make_shared<engine::Image>(*std::move(image)));
    const engine::PlacedImage place{wire.offset(), read.back()};
    CheckPlace(place, field, text, places.empty() ? 0 : places.back().end(), limits, violations);
    places.push_back(place);
  }
  if (violations->size() > before) return placed;
  for (size_t i = 0; i < texts.size(); ++i) CheckRest(texts[i], placed[i], limits, violations);
  if (shared_bytes > static_cast<size_t>(MaxImageBytes(limits.images))) {
    Add(violations, "images", "IMAGES_TOO_LARGE",
        absl::StrCat(shared_bytes, " bytes in shared memory are more than ",
                     MaxImageBytes(limits.images), ", those of limits.max_images"));
  }
  for (int i = 0; i < images.size() && violations->size() == before; ++i) {
    read[i]->pixels = CopyOf(images[i], absl::StrCat("images[", i, "]"), shared[i], violations);
    if (read[i]->from_bytes) read[i]->pixels = NumbersOf(read[i]->pixels, limits.images);
    if (limits.images.rounds_pixels) read[i]->RoundPixels();
  }
  return placed;
}

int64_t MaxImageBytes(const engine::ImageLimits& limits) {
  return limits.served() ? limits.max_images * limits.max_bytes() : 0;
}

}  // namespace dorad::rpc
