#include "server/engine/images.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"

namespace dorad::engine {

int64_t PlacedImage::end() const { return begin + image->tokens(); }

std::string Image::identity() const {
  return absl::StrCat(sha256, static_cast<int>(dtype), "x", height, "x", width);
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
    std::fill(tokens->begin() + place.begin, tokens->begin() + place.end(), place.image->key);
  }
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
