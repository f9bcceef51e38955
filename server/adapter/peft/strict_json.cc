#include "server/adapter/peft/strict_json.h"

#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "server/adapter/peft/violations.h"

namespace dorad::adapter {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kSubject[] = "adapter_config.json";

// Checks each parse event. Dropped values cost no memory, so a hostile document is bounded while it
// is being read.
class Guard {
 public:
  explicit Guard(const JsonLimits& limits)
      : limits_(limits), keys_(static_cast<size_t>(limits.max_depth) + 1) {}

  // depth counts the enclosing values; false drops the value. Dropped values report starts and keys
  // but no ends, so a stack here would be wrong.
  bool operator()(int depth, Json::parse_event_t event, Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start:
      case Json::parse_event_t::array_start:
        if (depth >= limits_.max_depth) return TooDeep();
        if (event == Json::parse_event_t::object_start) keys_[depth + 1].clear();
        return true;
      case Json::parse_event_t::key:
        return depth <= limits_.max_depth && Key(depth, parsed.get_ref<const std::string&>());
      default:
        return true;
    }
  }

  const Violations& violations() const { return violations_; }

 private:
  bool TooDeep() {
    if (!too_deep_) {
      violations_.Add(kSubject, "ADAPTER_CONFIG_TOO_DEEP",
                      absl::StrCat("values are nested more than ", limits_.max_depth, " deep"));
    }
    too_deep_ = true;
    return false;
  }

  bool Key(int depth, const std::string& key) {
    absl::flat_hash_set<std::string>& seen = keys_[depth];
    if (seen.size() >= limits_.max_keys) {
      if (!too_wide_) {
        violations_.Add(kSubject, "ADAPTER_CONFIG_TOO_LARGE",
                        absl::StrCat("an object has more than ", limits_.max_keys, " keys"));
      }
      too_wide_ = true;
      return false;
    }
    if (!seen.insert(key).second) {
      violations_.Add(kSubject, "ADAPTER_CONFIG_DUPLICATE_KEY",
                      absl::StrCat("the key ", Quoted(key), " appears twice in one object"));
      return false;
    }
    return true;
  }

  const JsonLimits& limits_;
  // Keys seen in the object that is open at each depth.
  std::vector<absl::flat_hash_set<std::string>> keys_;
  Violations violations_;
  bool too_deep_ = false;
  bool too_wide_ = false;
};

absl::Status NotJson(const std::string& why) {
  return MakeInvalid(kSubject, {{kSubject, "ADAPTER_CONFIG_NOT_JSON", why}});
}

}  // namespace

absl::StatusOr<Json> ParseStrictJson(const std::string& text, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    return MakeInvalid(kSubject, {{kSubject, "ADAPTER_CONFIG_TOO_LARGE",
                                   absl::StrCat("the file has ", text.size(), " bytes; at most ",
                                                limits.max_bytes, " are read")}});
  }
  Guard guard(limits);
  Json document;
  try {
    document = Json::parse(text, [&guard](int depth, Json::parse_event_t event, Json& parsed) {
      return guard(depth, event, parsed);
    });
  } catch (const Json::parse_error& error) {
    return NotJson(absl::StrCat("the text is not valid JSON near byte ", error.byte));
  } catch (const Json::exception& error) {
    // A number beyond the range of double.
    return NotJson(absl::StrCat("the text cannot be read as JSON: ", absl::CEscape(error.what())));
  }
  DORAD_RETURN_IF_ERROR(guard.violations().ToStatus(kSubject));
  if (!document.is_object()) return NotJson("the top level is not an object");
  return document;
}

}  // namespace dorad::adapter
