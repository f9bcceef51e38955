#include "server/platform/files/tree_sha256.h"

#include <algorithm>

#include "server/platform/files/sha256.h"

namespace dorad {

Digest TreeSha256(absl::Span<const std::byte> bytes) {
  Sha256 root;
  for (size_t at = 0; at < bytes.size(); at += kTreePieceBytes) {
    Sha256 piece;
    piece.Update(bytes.data() + at, std::min(kTreePieceBytes, bytes.size() - at));
    const Digest digest = piece.Final();
    root.Update(digest.data(), digest.size());
  }
  return root.Final();
}

Digest TreeRoot(absl::Span<const std::byte> digests) {
  Sha256 root;
  root.Update(digests.data(), digests.size());
  return root.Final();
}

}  // namespace dorad
