// Recognises well-formed UTF-8. Pure functions and therefore thread-safe.
#pragma once

#include <cstddef>
#include <string_view>

namespace dorad {

// The length in bytes of the well-formed UTF-8 sequence (no overlong form, no surrogate, at most
// U+10FFFF) at the beginning of `text`; 0 when there is none, also when `text` is empty.
size_t Utf8SequenceLength(std::string_view text);

bool IsValidUtf8(std::string_view text);

}  // namespace dorad
