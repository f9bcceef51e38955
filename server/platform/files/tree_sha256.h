// The digest of a tensor's bytes: SHA-256 over the SHA-256 of each piece of 16 KiB, so that pieces
// can be hashed in parallel, also on a GPU (kernels/hash/). Functions are thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace dorad {

using Digest = std::array<uint8_t, 32>;

// The size of a piece. The last piece may be shorter; an empty tensor has no pieces.
inline constexpr size_t kTreePieceBytes = 16 << 10;

Digest TreeSha256(absl::Span<const std::byte> bytes);

// The digest over the pieces' digests, concatenated in order.
Digest TreeRoot(absl::Span<const std::byte> digests);

}  // namespace dorad
