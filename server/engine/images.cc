#include "server/engine/images.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"
#include "server/platform/files/elements.h"

namespace dorad::engine {

int64_t PlacedImage::end() const { return begin + image->span(); }

std::string Image::identity() const {
  return absl::StrCat(sha256, from_bytes ? "b" : "", static_cast<int>(dtype), "x", height, "x",
                      width);
}

void Image::RoundPixels() {
  if (pixels.empty() || pixel_dtype() == DType::kBF16) return;
  // In place: memory for megabytes costs as much as the rounding.
  constexpr size_t kAtOnce = 4096;
  uint16_t bits[kAtOnce];
  const size_t size = SizeOf(dtype);
  const size_t count = pixels.size() / size;
  for (size_t i = 0; i < count; i += kAtOnce) {
    const size_t now = std::min(kAtOnce, count - i);
    ToBf16(dtype, {reinterpret_cast<const std::byte*>(pixels.data()) + i * size, now * size}, bits);
    std::memcpy(pixels.data() + i * sizeof(uint16_t), bits, now * sizeof(uint16_t));
  }
  pixels.resize(count * sizeof(uint16_t));
  rounded = true;
}

PromptImages::PromptImages(std::vector<PlacedImage> places) : places_(std::move(places)) {
  DORAD_CHECK(!places_.empty());
  int64_t shift = 0;
  for (const PlacedImage& place : places_) {
    DORAD_CHECK(shifts_.empty() || place.begin >= places_[shifts_.size() - 1].end());
    shift += std::max(place.image->rows, place.image->columns) - place.image->tokens();
    shifts_.push_back(shift);
  }
}

std::shared_ptr<const PromptImages> PromptImages::Of(std::vector<PlacedImage> places) {
  return places.empty() ? nullptr : std::make_shared<const PromptImages>(std::move(places));
}

void PromptImages::Mark(std::vector<TokenId>* tokens) const {
  for (const PlacedImage& place : places_) {
    DORAD_CHECK(place.image->key < Image::kNoToken);
    DORAD_CHECK(place.end() <= static_cast<int64_t>(tokens->size()));
  }
  for (const Run& run : RunsIn(0, end())) {
    std::fill_n(tokens->begin() + run.begin, run.count, places_[run.image].image->key);
  }
}

std::vector<PromptImages::Run> PromptImages::RunsIn(int64_t begin, int64_t end) const {
  std::vector<Run> runs;
  for (size_t i = 0; i < places_.size(); ++i) {
    const Image& image = *places_[i].image;
    const int64_t length = image.row_breaks ? image.columns : image.tokens();
    int64_t position = places_[i].begin;
    for (int64_t first = 0; first < image.tokens(); first += length, position += length + 1) {
      const int64_t from = std::max(position, begin);
      const int64_t to = std::min(position + length, end);
      if (from < to) runs.push_back({i, first + from - position, from, to - from});
    }
  }
  return runs;
}

const PlacedImage* PromptImages::BlockAt(int64_t index) const {
  const auto found =
      std::find_if(places_.begin(), places_.end(), [index](const PlacedImage& place) {
        return place.image->bidirectional && place.begin <= index && index < place.end();
      });
  return found == places_.end() ? nullptr : &*found;
}

int64_t PromptImages::LastSeenBy(int64_t index) const {
  const PlacedImage* const block = BlockAt(index);
  return block == nullptr ? index : block->end() - 1;
}

int64_t PromptImages::StepEnd(int64_t end) const {
  const PlacedImage* const block = BlockAt(end);
  return block == nullptr ? end : block->begin;
}

PromptImages::RotaryPosition PromptImages::PositionOf(int64_t index) const {
  const auto after =
      std::upper_bound(places_.begin(), places_.end(), index,
                       [](int64_t i, const PlacedImage& place) { return i < place.begin; });
  if (after == places_.begin()) return {index, index, index};
  const auto place = static_cast<size_t>(after - places_.begin()) - 1;
  const PlacedImage& image = places_[place];
  if (index >= image.end()) {
    const int64_t position = index + shifts_[place];
    return {position, position, position};
  }
  const int64_t first = image.begin + (place == 0 ? 0 : shifts_[place - 1]);
  const int64_t row = index - image.begin;
  return {first, first + row / image.image->columns, first + row % image.image->columns};
}

}  // namespace dorad::engine
