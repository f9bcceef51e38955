// Which known name somebody may have meant. Pure functions, hence thread-safe.
#pragma once

#include <cstddef>
#include <string_view>

namespace dorad {

// Names longer than this are not compared: it bounds the work.
inline constexpr size_t kLongestComparedName = 64;

// Levenshtein.
size_t EditDistance(std::string_view a, std::string_view b);

// Whether something at that distance of `text` may be a slip of the pen.
bool IsNear(size_t distance, std::string_view text);

}  // namespace dorad
