// libFuzzer target: whatever a packet on the handover socket is, it is refused or an offer or a
// request whose numbers have their bounds. The first byte is the number of descriptors.
#include <cstdint>
#include <string>

#include "server/base/check.h"
#include "server/base/error.h"
#include "server/handover/message.h"

namespace {

void CheckRefusal(const absl::Status& status) {
  DORAD_CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  DORAD_CHECK(dorad::ReasonOf(status) == "HANDOVER_MESSAGE_INVALID");
  const std::string ticket(dorad::handover::kTicketBytes, 't');
  const std::string answer = dorad::handover::FormatAnswer(0, ticket, status);
  DORAD_CHECK(answer.size() <= dorad::handover::kMaxAnswerBytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t num_fds = data[0] % 4;
  const absl::Span<const std::byte> message(reinterpret_cast<const std::byte*>(data + 1), size - 1);
  const auto offer = dorad::handover::ParseOffer(message, num_fds);
  if (dorad::handover::IsWeightsRequest(message)) {
    DORAD_CHECK(!offer.ok());
    const auto piece = dorad::handover::ParseWeightsRequest(message, num_fds);
    if (!piece.ok()) CheckRefusal(piece.status());
  }
  if (!offer.ok()) {
    CheckRefusal(offer.status());
    return 0;
  }
  const bool is_file = offer->kind == dorad::handover::MemoryKind::kFile;
  DORAD_CHECK(num_fds == (is_file ? 1u : 0u));
  DORAD_CHECK(offer->size > 0 && offer->size <= uint64_t{1} << 48);
  return 0;
}
