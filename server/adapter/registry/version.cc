#include "server/adapter/registry/version.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/platform/error.h"

namespace dorad::adapter {
namespace {

constexpr size_t kMaxNameLength = 128;
constexpr char kNameForm[] = "[a-z0-9]([a-z0-9._-]{0,126}[a-z0-9])?";
// Limit on quoted text of a caller.
constexpr size_t kShownBytes = 80;

// Of a version's digest in a reference.
constexpr size_t kMinDigestDigits = 8;
constexpr size_t kMaxDigestDigits = 64;

bool IsAlnum(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); }

}  // namespace

bool IsValidAdapterName(std::string_view name) {
  if (name.empty() || name.size() > kMaxNameLength) return false;
  if (!IsAlnum(name.front()) || !IsAlnum(name.back())) return false;
  for (char c : name) {
    if (!IsAlnum(c) && c != '.' && c != '_' && c != '-') return false;
  }
  return true;
}

bool IsDigestPrefix(std::string_view text) {
  return text.size() >= kMinDigestDigits && text.size() <= kMaxDigestDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

absl::Status CheckAdapterName(std::string_view name) {
  if (IsValidAdapterName(name)) return absl::OkStatus();
  return MakeInvalid("name", {{"name", "ADAPTER_NAME_INVALID",
                               absl::StrCat("\"", std::string(name.substr(0, kShownBytes)),
                                            "\" is not of the form ", kNameForm)}});
}

std::string AdapterRef::ToString() const {
  return version == 0 ? name : absl::StrCat(name, "@", version);
}

std::string RetiredByForce(const AdapterRef& version) {
  return absl::StrCat("adapter ", version.ToString(), " was retired by force");
}

absl::StatusOr<AdapterRef> AdapterRef::Parse(std::string_view text) {
  AdapterRef ref;
  if (text.empty()) return ref;
  const size_t at = text.find('@');
  ref.name = std::string(text.substr(0, at));
  bool valid = IsValidAdapterName(ref.name);
  if (valid && at != std::string_view::npos) {
    const std::string_view pin = text.substr(at + 1);
    const size_t colon = pin.find(':');
    if (colon != std::string_view::npos) {
      ref.digest = std::string(pin.substr(colon + 1));
      valid = IsDigestPrefix(ref.digest);
    }
    const std::string number(pin.substr(0, colon));
    valid = valid && !number.empty() && number.size() <= 18 &&
            number.find_first_not_of("0123456789") == std::string::npos && number[0] != '0' &&
            absl::SimpleAtoi(number, &ref.version);
  }
  if (!valid) {
    // Shows a bounded part of the caller's text, escaped by the transport.
    const std::string shown(text.substr(0, kShownBytes));
    return MakeInvalid("adapter",
                       {{"adapter", "ADAPTER_NAME_INVALID",
                         absl::StrCat("\"", shown, shown.size() < text.size() ? "…" : "",
                                      "\" is not \"\", \"name\", \"name@version\" or "
                                      "\"name@version:digest\" with name ",
                                      kNameForm, ", version >= 1 and ", kMinDigestDigits, " to ",
                                      kMaxDigestDigits, " digits of the digest")}});
  }
  return ref;
}

}  // namespace dorad::adapter
