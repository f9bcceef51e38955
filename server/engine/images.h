// Images in prompts: what a request brings, the places in a sequence, and the positions that the
// rotary embedding gives to its rows. Plain values, immutable after construction and therefore
// thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "server/engine/types.h"
#include "server/platform/files/safetensors_header.h"

namespace dorad::engine {

// Pixels as the model's processor makes them: patches in the order of the tower's merged blocks.
struct Image {
  std::string sha256;             // of the pixels as they came, 32 bytes
  DType dtype = DType::kF32;      // of the pixels as they came
  bool from_bytes = false;        // they came as bytes; `pixels` are the numbers of those
  bool rounded = false;           // `pixels` are those, rounded to bf16
  int64_t height = 0, width = 0;  // in patches
  int64_t rows = 0, columns = 0;  // of tokens
  bool row_breaks = false;        // in a prompt a token of the text stands between two rows
  // Each row of the decoder sees all rows of its image: one step computes them.
  bool bidirectional = false;
  std::string pixels;  // [height * width, patch elements]; "": the server shall have them
  // In a sequence's tokens it stands for each of the image's; below kNoToken. ImageStore gives it;
  // different images have different ones.
  TokenId key = 0;

  static constexpr TokenId kNoToken = -1;

  // Of `pixels`.
  DType pixel_dtype() const { return rounded ? DType::kBF16 : dtype; }
  void RoundPixels();
  int64_t tokens() const { return rows * columns; }
  // From the first token to the last in a prompt.
  int64_t span() const { return tokens() + (row_breaks ? rows - 1 : 0); }
  // Whether the token at a place of the span is the text's.
  bool is_break(int64_t place) const { return row_breaks && place % (columns + 1) == columns; }
  // The same for equal images only.
  std::string identity() const;
};

// Images of one prompt, ascending, without overlap.
class PromptImages {
 public:
  explicit PromptImages(std::vector<PlacedImage> places);
  // nullptr: there are none.
  static std::shared_ptr<const PromptImages> Of(std::vector<PlacedImage> places);

  absl::Span<const PlacedImage> places() const { return places_; }
  // Tokens of an image that follow each other.
  struct Run {
    size_t image = 0;   // of places()
    int64_t first = 0;  // of the image's tokens
    int64_t begin = 0;  // its position
    int64_t count = 0;
  };
  // Those at the positions [begin, end).
  std::vector<Run> RunsIn(int64_t begin, int64_t end) const;
  // The last position that a row sees.
  int64_t LastSeenBy(int64_t index) const;
  // The last position, at most `end`, before which a step may end.
  int64_t StepEnd(int64_t end) const;
  // The position after the last image.
  int64_t end() const { return places_.back().end(); }
  // Writes the images' keys into the places of their tokens.
  void Mark(std::vector<TokenId>* tokens) const;

  // Time, height and width of a row, in a model with three positions. An image's rows have the
  // positions of its grid; the text after it goes on behind the largest (transformers:
  // get_rope_index of Qwen3-VL).
  struct RotaryPosition {
    int64_t time = 0, height = 0, width = 0;
  };
  RotaryPosition PositionOf(int64_t index) const;

 private:
  // The bidirectional image with this position; nullptr: none.
  const PlacedImage* BlockAt(int64_t index) const;

  std::vector<PlacedImage> places_;
  std::vector<int64_t> shifts_;  // of the text after each image, relative to its index
};

// What a decoder needs of an image, in the device's memory. Made by a runner; immutable.
class ImageFeatures {
 public:
  virtual ~ImageFeatures() = default;
  virtual int64_t bytes() const = 0;
};

}  // namespace dorad::engine
