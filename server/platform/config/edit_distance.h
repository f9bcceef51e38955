// Finds the known name most similar to a misspelt one. Pure functions and therefore thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/types/span.h"

namespace dorad {

// Names longer than this are not compared: it bounds the work.
inline constexpr size_t kLongestComparedName = 64;

// Levenshtein.
size_t EditDistance(std::string_view a, std::string_view b);

// Whether a name at that distance from `text` may be a misspelling of it.
bool IsNear(size_t distance, std::string_view text);

// "; did you mean NAME?" with the first known name that is near, or "".
std::string DidYouMean(std::string_view text, absl::Span<const char* const> known);

}  // namespace dorad
