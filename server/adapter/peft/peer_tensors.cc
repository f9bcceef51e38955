#include "server/adapter/peft/peer_tensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/adapter/peft/violations.h"
#include "server/platform/error.h"
#include "server/platform/files/file.h"
#include "server/platform/files/sha256.h"

namespace dorad::adapter {
namespace {

constexpr char kSubject[] = "adapter_model.safetensors";
// Bytes of one read.
constexpr uint64_t kPieceBytes = 1 << 20;

absl::Status Append(const PeerTensor& tensor, ByteBuffer* image, Violations* violations) {
  const size_t begin = image->size();
  for (uint64_t done = 0; done < tensor.bytes;) {
    const size_t piece = static_cast<size_t>(std::min(kPieceBytes, tensor.bytes - done));
    const size_t at = image->size();
    image->resize(at + piece);
    const absl::Span<std::byte> to(image->data() + at, piece);
    DORAD_RETURN_IF_ERROR(tensor.memory->Read(tensor.offset + done, to));
    done += piece;
  }
  if (!tensor.digest.empty()) {
    const absl::Span<const std::byte> bytes = absl::MakeConstSpan(*image).subspan(begin);
    CheckTensorDigest(tensor, TreeSha256(bytes), violations);
  }
  return absl::OkStatus();
}

}  // namespace

std::string ImageHeader(const PeerTensors& peer) {
  std::string text = "{";
  uint64_t end = 0;
  for (const PeerTensor& tensor : peer.tensors) {
    const uint64_t begin = end;
    end += tensor.bytes;
    absl::StrAppend(&text, text.size() > 1 ? "," : "", nlohmann::json(tensor.name).dump(),
                    R"(:{"dtype":")", NameOf(tensor.dtype), R"(","shape":[)",
                    absl::StrJoin(tensor.shape, ","), R"(],"data_offsets":[)", begin, ",", end,
                    "]}");
  }
  text += "}";
  text.append((8 - text.size() % 8) % 8, ' ');  // The format asks for 8-byte aligned data.
  std::string prefix;
  for (int i = 0; i < 8; ++i) {
    prefix.push_back(static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i)));
  }
  return prefix + text;
}

absl::StatusOr<uint64_t> ImageBytes(const PeerTensors& peer, uint64_t max_bytes) {
  uint64_t bytes = ImageHeader(peer).size();
  for (const PeerTensor& tensor : peer.tensors) {
    if (bytes > max_bytes || tensor.bytes > max_bytes - bytes) {
      return MakeInvalid(kSubject,
                         {{kSubject, "ADAPTER_TOO_LARGE",
                           absl::StrCat("the tensors have more than ", max_bytes, " bytes")}});
    }
    bytes += tensor.bytes;
  }
  return bytes;
}

void CheckTensorDigest(const PeerTensor& tensor, const Digest& found, Violations* violations) {
  if (tensor.digest.empty() || std::memcmp(found.data(), tensor.digest.data(), found.size()) == 0) {
    return;
  }
  violations->Add(tensor.name, "SHARED_MEMORY_DIGEST_MISMATCH",
                  absl::StrCat("the bytes read have the digest ", ToHex(found),
                               ": the memory was written to before the publish was answered"));
}

absl::StatusOr<ByteBuffer> CopyToImage(const PeerTensors& peer, uint64_t max_bytes) {
  DORAD_ASSIGN_OR_RETURN(const uint64_t bytes, ImageBytes(peer, max_bytes));
  const std::string header = ImageHeader(peer);
  ByteBuffer image;
  ReserveBytes(bytes, &image);
  const auto* text = reinterpret_cast<const std::byte*>(header.data());
  image.assign(text, text + header.size());
  Violations violations;
  for (const PeerTensor& tensor : peer.tensors) {
    DORAD_RETURN_IF_ERROR(Append(tensor, &image, &violations));
  }
  DORAD_RETURN_IF_ERROR(violations.ToStatus(kSubject));
  return image;
}

}  // namespace dorad::adapter
