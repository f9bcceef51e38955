// Telling UTF-8 from other bytes. Pure, hence thread-safe.
#pragma once

#include <cstddef>
#include <string_view>

namespace dorad {

// Bytes of the well-formed UTF-8 sequence (no overlong form, no surrogate, at most U+10FFFF) that
// `text` begins with; 0 when it begins with none, also when it is empty.
size_t Utf8SequenceLength(std::string_view text);

bool IsValidUtf8(std::string_view text);

}  // namespace dorad
