// Reads the JSON files of a model folder field by field, so that one status names all problems.
// Owned by the reader of the file. Thread-compatible.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/platform/error.h"

namespace dorad::model {

// DIR/file as a JSON object: at most max_bytes, nested at most 32 deep, no key twice in one object
// (readers differ in which one they keep). INVALID_ARGUMENT (MODEL_CONFIG_INVALID), and
// ReadFileText's statuses.
absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& dir, const std::string& file,
                                              uint64_t max_bytes);

// Inclusive bounds of a number.
struct IntRange {
  int64_t min, max;
};
struct NumberRange {
  double min, max;
};

// One JSON object. Problems are added to *violations with the field's path
// ("config.json:rope_scaling.factor"); the getter then returns the fallback, or 0 without one.
class Fields {
 public:
  // path: "config.json" or "config.json:rope_scaling". Borrows both pointers.
  Fields(std::string path, const nlohmann::json* object, std::vector<Violation>* violations);

  // Present and not null.
  bool Has(const std::string& key) const { return Find(key) != nullptr; }
  bool IsNull(const std::string& key) const;
  // nullptr when absent or null.
  const nlohmann::json* Find(const std::string& key) const;
  const nlohmann::json& object() const { return *object_; }

  // `fallback` is the value of an absent key; nullopt makes it required. Null is a wrong type.
  int64_t Int(const std::string& key, std::optional<int64_t> fallback, IntRange range);
  double Number(const std::string& key, std::optional<double> fallback, NumberRange range);
  bool Bool(const std::string& key, bool fallback);
  std::string Text(const std::string& key, const std::string& fallback);

  // The object under `key`, which must be one (REQUIRES: Has(key)); an empty one otherwise.
  Fields Child(const std::string& key);

  void Invalid(const std::string& key, const std::string& description);
  void Unsupported(const std::string& key, const std::string& description);

 private:
  // The value of a present key, null included.
  const nlohmann::json* Value(const std::string& key) const;
  std::string PathOf(const std::string& key) const;

  std::string path_;
  const nlohmann::json* object_;
  std::vector<Violation>* violations_;
};

// A value as JSON text, shortened, for messages.
std::string Shown(const nlohmann::json& value);

}  // namespace dorad::model
