#include "server/rpc/memory_publish.h"

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"
#include "server/rpc/publish_validation.h"
#include "server/rpc/tensor_dtype.h"

namespace dorad::rpc {
namespace {

// As of safetensors files (server/platform/files/safetensors.h).
constexpr int kMaxTensors = 65536;
constexpr size_t kMaxNameBytes = 512;
constexpr int kMaxRank = 8;
constexpr uint64_t kMaxExtent = uint64_t{1} << 48;
constexpr int64_t kMaxBytes = int64_t{1} << 48;  // of all tensors, which may overlap
constexpr size_t kDigestBytes = 32;
constexpr size_t kHexBytes = 64;

// Bytes of the tensor; nullopt: more than kMaxBytes.
std::optional<uint64_t> BytesOf(const v1::MemoryTensor& tensor, DType dtype) {
  uint64_t bytes = SizeOf(dtype);
  for (const uint64_t extent : tensor.shape()) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
    if (extent > kMaxExtent || bytes > kMaxExtent) return std::nullopt;
  }
  return bytes;
}

absl::StatusOr<adapter::PeerTensor> ParseTensor(const v1::MemoryTensor& tensor,
                                                const shared_memory::Session& session) {
  const auto invalid = [](const std::string& why) {
    return MakeError(absl::StatusCode::kInvalidArgument, "SHARED_MEMORY_TENSOR_INVALID", why);
  };
  if (tensor.name().empty() || tensor.name().size() > kMaxNameBytes) {
    return invalid(absl::StrCat("a tensor's name has 1 to ", kMaxNameBytes, " bytes"));
  }
  const std::optional<DType> dtype = ToDType(tensor.dtype());
  if (!dtype) return invalid("the dtype is not F32, F16 or BF16");
  const std::optional<uint64_t> bytes =
      tensor.shape_size() > kMaxRank ? std::nullopt : BytesOf(tensor, *dtype);
  if (!bytes) {
    return invalid("more than 8 dimensions, or more elements than any memory has");
  }
  adapter::PeerTensor parsed;
  parsed.memory = session.memory(tensor.memory());
  if (parsed.memory == nullptr) {
    return invalid(absl::StrCat("the connection has no memory ", tensor.memory()));
  }
  const uint64_t size = parsed.memory->size();
  if (*bytes > size || tensor.offset() > size - *bytes) {
    return invalid(absl::StrCat(*bytes, " bytes at ", tensor.offset(), " do not lie in memory ",
                                tensor.memory(), " of ", size, " bytes"));
  }
  if (!tensor.digest().empty() && tensor.digest().size() != kDigestBytes) {
    return invalid(absl::StrCat("a digest has 32 bytes, not ", tensor.digest().size()));
  }
  parsed.name = tensor.name();
  parsed.dtype = *dtype;
  parsed.shape.assign(tensor.shape().begin(), tensor.shape().end());
  parsed.bytes = *bytes;
  parsed.offset = tensor.offset();
  parsed.digest = tensor.digest();
  return parsed;
}

std::vector<adapter::PeerTensor> ParseTensors(const v1::PublishFromMemoryRequest& request,
                                              const shared_memory::Session& session,
                                              std::vector<Violation>* violations) {
  std::vector<adapter::PeerTensor> tensors;
  if (request.tensors_size() == 0 || request.tensors_size() > kMaxTensors) {
    violations->push_back(
        {"tensors", "SHARED_MEMORY_TENSORS_INVALID",
         absl::StrCat(request.tensors_size(), " tensors are not in [1, ", kMaxTensors, "]")});
    return tensors;
  }
  tensors.reserve(static_cast<size_t>(request.tensors_size()));
  for (int i = 0; i < request.tensors_size(); ++i) {
    auto tensor = ParseTensor(request.tensors(i), session);
    if (tensor.ok()) {
      tensors.push_back(*std::move(tensor));
    } else {
      violations->push_back({absl::StrCat("tensors[", i, "]"), ReasonOf(tensor.status()),
                             std::string(tensor.status().message())});
    }
  }
  return tensors;
}

// Bytes of all tensors. Stops counting above kMaxBytes.
int64_t CountBytes(const std::vector<adapter::PeerTensor>& tensors,
                   std::vector<Violation>* violations) {
  int64_t bytes = 0;
  for (const adapter::PeerTensor& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.bytes);
    if (bytes <= kMaxBytes) continue;
    violations->push_back({"tensors", "SHARED_MEMORY_TENSORS_INVALID",
                           "together they have more bytes than any memory"});
    break;
  }
  return bytes;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const shared_memory::Session>> FindSession(
    const std::string& session_token, const shared_memory::Listener* listener) {
  if (listener != nullptr) return listener->Find(session_token);
  return MakeError(absl::StatusCode::kFailedPrecondition, "SHARED_MEMORY_NOT_CONFIGURED",
                   "the server has no server.shared_memory_socket");
}

absl::StatusOr<MemoryPublish> ParseMemoryPublish(const v1::PublishFromMemoryRequest& request,
                                                 const shared_memory::Listener* listener) {
  DORAD_ASSIGN_OR_RETURN(const std::shared_ptr<const shared_memory::Session> session,
                         FindSession(request.session_token(), listener));
  MemoryPublish publish;
  std::vector<Violation> violations;
  publish.options = ParsePublishOptions(request, &violations);
  publish.config_json = ParseAdapterConfig(request, &violations);
  if (!request.expected_digest().empty() && request.expected_digest().size() != kHexBytes) {
    violations.push_back({"expected_digest", "SHARED_MEMORY_DIGEST_INVALID",
                          "a version's digest has 64 hexadecimal digits"});
  }
  publish.peer.tensors = ParseTensors(request, *session, &violations);
  publish.bytes = CountBytes(publish.peer.tensors, &violations);
  if (!violations.empty()) return MakeInvalid("PublishFromMemoryRequest", std::move(violations));
  publish.peer.expected_digest = request.expected_digest();
  publish.peer.wanted = [session] { return session->open(); };
  return publish;
}

}  // namespace dorad::rpc
