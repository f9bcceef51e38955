// libFuzzer target: whatever a packet on the shared-memory socket is, it is refused or a
// registration or a request whose numbers have their bounds. The first byte is the number of
// descriptors.
#include <cstdint>
#include <string>

#include "server/colocation/message.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace {

void CheckRefusal(const absl::Status& status) {
  DORAD_CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  DORAD_CHECK(dorad::ReasonOf(status) == "SHARED_MEMORY_MESSAGE_INVALID");
  const std::string session_token(dorad::shared_memory::kSessionTokenBytes, 't');
  const std::string answer = dorad::shared_memory::FormatAnswer(0, session_token, status);
  DORAD_CHECK(answer.size() <= dorad::shared_memory::kMaxAnswerBytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t num_fds = data[0] % 4;
  const absl::Span<const std::byte> message(reinterpret_cast<const std::byte*>(data + 1), size - 1);
  const auto registration = dorad::shared_memory::ParseRegistration(message, num_fds);
  if (dorad::shared_memory::IsWeightsRequest(message)) {
    DORAD_CHECK(!registration.ok());
    const auto piece = dorad::shared_memory::ParseWeightsRequest(message, num_fds);
    if (!piece.ok()) CheckRefusal(piece.status());
  }
  if (!registration.ok()) {
    CheckRefusal(registration.status());
    return 0;
  }
  const bool is_file = registration->kind == dorad::shared_memory::MemoryKind::kFile;
  DORAD_CHECK(num_fds == (is_file ? 1u : 0u));
  DORAD_CHECK(registration->size > 0 && registration->size <= uint64_t{1} << 48);
  return 0;
}
