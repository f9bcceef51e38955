#include "server/model/config_json.h"

#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/platform/files/file.h"

namespace dorad::model {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 32;
constexpr char kInvalid[] = "MODEL_CONFIG_INVALID";

absl::Status Malformed(const std::string& file, const std::string& why) {
  return MakeInvalid(file, {{file, kInvalid, why}});
}

// Checks every parse event; the first problem stops the parser by an exception.
class Guard {
 public:
  struct Objection {
    std::string why;
  };

  bool operator()(int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMaxDepth) throw Objection{absl::StrCat("nested more than ", kMaxDepth, " deep")};
    if (event == Json::parse_event_t::object_start) keys_.emplace_back();
    if (event == Json::parse_event_t::object_end) keys_.pop_back();
    if (event == Json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_.back().insert(key).second) {
        throw Objection{absl::StrCat("the key ", Shown(parsed), " appears twice in one object")};
      }
    }
    return true;
  }

 private:
  std::vector<std::set<std::string>> keys_;  // of the objects that are open
};

std::string RangeText(const std::string& min, const std::string& max) {
  return absl::StrCat("must be between ", min, " and ", max);
}

}  // namespace

std::string Shown(const Json& value) {
  constexpr size_t kShown = 60;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  if (text.size() > kShown) text = text.substr(0, kShown) + "...";
  return text;
}

absl::StatusOr<Json> ReadJsonObject(const std::string& dir, const std::string& file,
                                    uint64_t max_bytes) {
  DORAD_ASSIGN_OR_RETURN(const std::string text, ReadFileText(dir + "/" + file, max_bytes));
  try {
    Json document = Json::parse(text, Guard());
    if (!document.is_object()) return Malformed(file, "is not a JSON object");
    return document;
  } catch (const Guard::Objection& objection) {
    return Malformed(file, objection.why);
  } catch (const Json::exception& error) {
    return Malformed(file, absl::StrCat("is not JSON: ", error.what()));
  }
}

Fields::Fields(std::string path, const Json* object, std::vector<Violation>* violations)
    : path_(std::move(path)), object_(object), violations_(violations) {}

const Json* Fields::Value(const std::string& key) const {
  const auto it = object_->find(key);
  return it == object_->end() ? nullptr : &*it;
}

const Json* Fields::Find(const std::string& key) const {
  const Json* value = Value(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

bool Fields::IsNull(const std::string& key) const {
  const Json* value = Value(key);
  return value != nullptr && value->is_null();
}

std::string Fields::PathOf(const std::string& key) const {
  return absl::StrCat(path_, path_.find(':') == std::string::npos ? ":" : ".", key);
}

void Fields::Invalid(const std::string& key, const std::string& description) {
  violations_->push_back({PathOf(key), kInvalid, description});
}

void Fields::Unsupported(const std::string& key, const std::string& description) {
  violations_->push_back({PathOf(key), "MODEL_UNSUPPORTED", description});
}

int64_t Fields::Int(const std::string& key, std::optional<int64_t> fallback, IntRange range) {
  const Json* value = Value(key);
  if (value == nullptr && fallback) return *fallback;
  if (value == nullptr) {
    Invalid(key, "is missing");
  } else if (!value->is_number_integer()) {
    Invalid(key, absl::StrCat("must be an integer, not ", Shown(*value)));
  } else {
    // An unsigned number beyond int64 is out of every range.
    const bool huge = value->is_number_unsigned() && value->get<uint64_t>() > INT64_MAX;
    const int64_t number = huge ? INT64_MAX : value->get<int64_t>();
    if (!huge && number >= range.min && number <= range.max) return number;
    Invalid(key, absl::StrCat(RangeText(absl::StrCat(range.min), absl::StrCat(range.max)), ", not ",
                              Shown(*value)));
  }
  return fallback.value_or(0);
}

double Fields::Number(const std::string& key, std::optional<double> fallback, NumberRange range) {
  const Json* value = Value(key);
  if (value == nullptr && fallback) return *fallback;
  if (value == nullptr) {
    Invalid(key, "is missing");
  } else if (!value->is_number()) {
    Invalid(key, absl::StrCat("must be a number, not ", Shown(*value)));
  } else {
    const double number = value->get<double>();
    if (number >= range.min && number <= range.max) return number;
    Invalid(key, absl::StrCat(RangeText(absl::StrCat(range.min), absl::StrCat(range.max)), ", not ",
                              Shown(*value)));
  }
  return fallback.value_or(0);
}

bool Fields::Bool(const std::string& key, bool fallback) {
  const Json* value = Value(key);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  Invalid(key, absl::StrCat("must be true or false, not ", Shown(*value)));
  return fallback;
}

std::string Fields::Text(const std::string& key, const std::string& fallback) {
  const Json* value = Value(key);
  if (value == nullptr) return fallback;
  if (value->is_string()) return value->get<std::string>();
  Invalid(key, absl::StrCat("must be a string, not ", Shown(*value)));
  return fallback;
}

Fields Fields::Child(const std::string& key) {
  static const Json* const kEmpty = new Json(Json::object());
  const Json* value = Value(key);
  if (value != nullptr && value->is_object()) return Fields(PathOf(key), value, violations_);
  Invalid(key, "must be an object");
  return Fields(PathOf(key), kEmpty, violations_);
}

}  // namespace dorad::model
