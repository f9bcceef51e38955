#include "server/rpc/field_validation.h"

#include <algorithm>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/rpc/packing.h"
#include "server/rpc/request_validation.h"

namespace dorad::rpc {
namespace {

// The number of bad ids listed by value; the rest is counted.
constexpr int kNamedIds = 8;

void CheckIds(const std::string& field, const std::vector<int32_t>& ids, int32_t vocab_size,
              Violations* violations) {
  int64_t bad = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < vocab_size) continue;
    if (++bad > kNamedIds) continue;
    Add(violations, absl::StrCat(field, "[", i, "]"), "TOKEN_ID_OUT_OF_RANGE",
        absl::StrCat("token id ", ids[i], " is not in [0, ", vocab_size, ")"));
  }
  if (bad > kNamedIds) {
    Add(violations, field, "TOKEN_ID_OUT_OF_RANGE",
        absl::StrCat(bad - kNamedIds, " more token ids are out of range"));
  }
}

}  // namespace

std::string FloatRange(const char* range, float value) {
  return absl::StrCat(value, " is not in ", range);
}

std::vector<int32_t> ReadIds(const std::string& field, const std::string& bytes, int64_t max_ids,
                             const char* too_many_reason, int32_t vocab_size,
                             Violations* violations) {
  if (bytes.size() % kIdBytes != 0) {
    Add(violations, field, "TOKEN_BYTES_INVALID",
        absl::StrCat(bytes.size(), " bytes are not a list of packed int32"));
    return {};
  }
  const int64_t count = static_cast<int64_t>(bytes.size()) / kIdBytes;
  if (count > max_ids) {
    Add(violations, field, too_many_reason,
        absl::StrCat(count, " token ids are more than ", max_ids));
    return {};
  }
  std::vector<int32_t> ids = UnpackIds(bytes);
  CheckIds(field, ids, vocab_size, violations);
  return ids;
}

void CheckNoImages(const std::string& field, const std::vector<int32_t>& ids,
                   const engine::EngineLimits& limits, Violations* violations) {
  for (const int32_t image : limits.image_token_ids) {
    const auto found = std::find(ids.begin(), ids.end(), image);
    if (found == ids.end()) continue;
    Add(violations, absl::StrCat(field, "[", found - ids.begin(), "]"), "IMAGE_UNSUPPORTED",
        absl::StrCat("token id ", image, " stands for an image, and this server serves text"));
  }
}

void CheckId(const char* field, const char* reason, const std::string& id, Violations* violations) {
  const bool printable =
      std::all_of(id.begin(), id.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (id.empty() || id.size() > kMaxRequestIdBytes || !printable) {
    Add(violations, field, reason,
        absl::StrCat("an id has 1 to ", kMaxRequestIdBytes,
                     " printable ASCII characters without spaces"));
  }
}

adapter::AdapterRef ReadAdapter(const std::string& field, const std::string& text,
                                Violations* violations) {
  absl::StatusOr<adapter::AdapterRef> ref = adapter::AdapterRef::Parse(text);
  if (ref.ok()) return *std::move(ref);
  for (Violation& violation : ViolationsOf(ref.status())) {
    violation.field = field;
    violations->push_back(std::move(violation));
  }
  return {};
}

int32_t ReadTopLogprobs(const std::string& field, uint32_t k, const engine::EngineLimits& limits,
                        Violations* violations) {
  const uint32_t max = static_cast<uint32_t>(std::min(limits.max_logprobs_k, limits.vocab_size));
  if (k > max) {
    Add(violations, field, "LOGPROBS_K_OUT_OF_RANGE", absl::StrCat(k, " is not in [0, ", max, "]"));
    return 0;
  }
  return static_cast<int32_t>(k);
}

int64_t BytesPerToken(int32_t top_k, size_t chosen_ids) {
  return 8 + 8 * int64_t{top_k} + 4 * static_cast<int64_t>(chosen_ids);
}

void CheckResponseSize(const std::string& field, int64_t tokens, int64_t cells,
                       int64_t bytes_per_token, int64_t max_message_bytes, Violations* violations) {
  constexpr int64_t kFraming = 16 << 10;
  constexpr int64_t kCellFraming = 32;
  const int64_t room = max_message_bytes - kFraming - cells * kCellFraming;
  const int64_t max_tokens = std::max<int64_t>(room, 0) / bytes_per_token;
  if (tokens <= max_tokens) return;
  Add(violations, field, "RESPONSE_TOO_LARGE",
      absl::StrCat("with these log-probabilities a response may have ", max_tokens, " tokens, and ",
                   tokens, " are asked for"));
}

}  // namespace dorad::rpc
