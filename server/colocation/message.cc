#include "server/colocation/message.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::shared_memory {
namespace {

constexpr char kMagic[] = "DORADMEM";
constexpr char kWeightsMagic[] = "DORADGET";
constexpr size_t kMagicBytes = 8;
constexpr size_t kKindAt = 8, kZeroAt = 12, kSizeAt = 16, kHandleAt = 24, kUuidAt = 88;
// No machine has more; sums of sizes stay far from overflow.
constexpr uint64_t kMaxSize = uint64_t{1} << 48;

absl::Status Invalid(const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "SHARED_MEMORY_MESSAGE_INVALID", message);
}

void AddNumber(uint32_t value, std::string* to) {
  for (int i = 0; i < 4; ++i) to->push_back(static_cast<char>(value >> (8 * i)));
}

uint64_t Number(absl::Span<const std::byte> message, size_t at, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) {
    value |= std::to_integer<uint64_t>(message[at + i]) << (8 * i);
  }
  return value;
}

bool AllZero(absl::Span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

absl::StatusOr<MemoryRegistration> ParseRegistration(absl::Span<const std::byte> message,
                                                     size_t num_fds) {
  if (message.size() != kRegistrationBytes ||
      std::memcmp(message.data(), kMagic, kMagicBytes) != 0) {
    return Invalid(
        absl::StrCat("a registration has ", kRegistrationBytes, " bytes and begins with ", kMagic));
  }
  const uint64_t kind = Number(message, kKindAt, 4);
  const bool is_file = kind == static_cast<uint64_t>(MemoryKind::kFile);
  if (!is_file && kind != static_cast<uint64_t>(MemoryKind::kCudaIpc)) {
    return Invalid(absl::StrCat("unknown kind of memory: ", kind));
  }
  if (num_fds != (is_file ? 1 : 0)) {
    return Invalid(
        absl::StrCat(num_fds, " descriptors were sent instead of ", is_file ? "1" : "0"));
  }
  if (Number(message, kZeroAt, 4) != 0 || (is_file && !AllZero(message.subspan(kHandleAt)))) {
    return Invalid("a part of the registration that must be 0 is not");
  }
  MemoryRegistration registration;
  registration.kind = static_cast<MemoryKind>(kind);
  registration.size = Number(message, kSizeAt, 8);
  if (registration.size == 0 || registration.size > kMaxSize) {
    return Invalid(absl::StrCat("a size of ", registration.size, " bytes"));
  }
  std::memcpy(registration.ipc_handle.data(), message.data() + kHandleAt, kIpcHandleBytes);
  std::memcpy(registration.device_uuid.data(), message.data() + kUuidAt, kDeviceUuidBytes);
  return registration;
}

bool IsWeightsRequest(absl::Span<const std::byte> message) {
  return message.size() >= kMagicBytes &&
         std::memcmp(message.data(), kWeightsMagic, kMagicBytes) == 0;
}

absl::StatusOr<size_t> ParseWeightsRequest(absl::Span<const std::byte> message, size_t num_fds) {
  DORAD_CHECK(IsWeightsRequest(message));
  if (message.size() != kWeightsRequestBytes || num_fds != 0) {
    return Invalid(absl::StrCat("a request for weights has ", kWeightsRequestBytes,
                                " bytes and no descriptor"));
  }
  return Number(message, kMagicBytes, 8);
}

std::string FormatAnswer(uint32_t index, const std::string& session_token,
                         const absl::Status& refusal) {
  DORAD_CHECK(session_token.size() == kSessionTokenBytes);
  std::string answer;
  AddNumber(static_cast<uint32_t>(refusal.code()), &answer);
  AddNumber(index, &answer);
  answer += session_token;
  if (!refusal.ok()) absl::StrAppend(&answer, ReasonOf(refusal), " ", refusal.message());
  answer.resize(std::min(answer.size(), kMaxAnswerBytes));
  return answer;
}

}  // namespace dorad::shared_memory
