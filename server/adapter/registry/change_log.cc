#include "server/adapter/registry/change_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/platform/error.h"

namespace dorad::adapter {
namespace {

using Json = nlohmann::ordered_json;

// 1: digests hashed the tensors' bytes themselves. 2: no record of whether ephemeral versions
// became READY.
constexpr int64_t kFormat = 3;
constexpr int64_t kFormatBefore = 2;

constexpr std::pair<Change::Type, const char*> kTypes[] = {
    {Change::Type::kStarted, "started"},     {Change::Type::kReserved, "reserved"},
    {Change::Type::kServed, "served"},       {Change::Type::kPublished, "published"},
    {Change::Type::kActivated, "activated"}, {Change::Type::kRetired, "retired"},
};

const char* NameOf(Change::Type type) {
  return std::find_if(std::begin(kTypes), std::end(kTypes),
                      [type](const auto& entry) { return entry.first == type; })
      ->second;
}

absl::Status NotAChange(std::string_view json) {
  return MakeError(absl::StatusCode::kDataLoss, "STORE_DAMAGED",
                   absl::StrCat("the store's journal has a record that this version of dorad does "
                                "not understand: ",
                                std::string(json.substr(0, 200))));
}

// The members of one record; notes whether all requested ones exist.
class Members {
 public:
  explicit Members(const Json& json) : json_(json) {}

  template <typename T>
  void Read(const char* key, bool (Json::*is)() const noexcept, T* value) {
    const auto found = json_.find(key);
    if (found == json_.end() || !((*found).*is)()) {
      good_ = false;
      return;
    }
    *value = found->get<T>();
    ++read_;
  }
  void Text(const char* key, std::string* value) { Read(key, &Json::is_string, value); }
  void Integer(const char* key, int64_t* value) { Read(key, &Json::is_number_integer, value); }

  void Tags(std::map<std::string, std::string>* tags) {
    Json object;
    Read("tags", &Json::is_object, &object);
    for (const auto& [key, value] : object.items()) {
      good_ = good_ && value.is_string();
      if (value.is_string()) (*tags)[key] = value.get<std::string>();
    }
  }

  bool all_read() const { return good_ && read_ == json_.size(); }

 private:
  const Json& json_;
  bool good_ = true;
  size_t read_ = 0;
};

}  // namespace

std::string ToJson(const Change& change) {
  Json json = {{"type", NameOf(change.type)}, {"generation", change.generation}};
  if (change.type == Change::Type::kStarted) {
    json["format"] = kFormat;
    json["base"] = change.base;
    json["floor"] = change.floor;
    return json.dump();
  }
  json["name"] = change.name;
  json["version"] = change.version;
  if (change.type == Change::Type::kPublished) {
    json["object"] = change.stored.object;
    json["digest"] = change.stored.digest;
    json["create_time_ns"] = absl::ToUnixNanos(change.stored.create_time);
    json["tags"] = Json::object();
    for (const auto& [key, value] : change.stored.tags) json["tags"][key] = value;
    json["pinned"] = change.stored.pinned;
    json["activate"] = change.activate;
  }
  return json.dump();
}

absl::StatusOr<Change> ParseChange(std::string_view text, int64_t* format) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return NotAChange(text);
  Members members(json);
  Change change;
  std::string type;
  members.Text("type", &type);
  members.Integer("generation", &change.generation);
  const auto known = std::find_if(std::begin(kTypes), std::end(kTypes),
                                  [&type](const auto& entry) { return type == entry.second; });
  if (known == std::end(kTypes)) return NotAChange(text);
  change.type = known->first;
  if (change.type == Change::Type::kStarted) {
    members.Integer("format", format);
    members.Text("base", &change.base);
    if (*format == kFormat) {
      members.Integer("floor", &change.floor);
    } else if (*format != kFormatBefore) {
      return NotAChange(text);
    }
  } else {
    members.Text("name", &change.name);
    members.Integer("version", &change.version);
  }
  if (change.type == Change::Type::kPublished) {
    int64_t create_time_ns = 0;
    members.Text("object", &change.stored.object);
    members.Text("digest", &change.stored.digest);
    members.Integer("create_time_ns", &create_time_ns);
    members.Tags(&change.stored.tags);
    members.Read("pinned", &Json::is_boolean, &change.stored.pinned);
    members.Read("activate", &Json::is_boolean, &change.activate);
    change.stored.create_time = absl::FromUnixNanos(create_time_ns);
  }
  if (!members.all_read()) return NotAChange(text);
  // In that format such a version may have become READY.
  if (*format == kFormatBefore && change.type == Change::Type::kReserved) {
    change.type = Change::Type::kServed;
  }
  return change;
}

void StoredState::Apply(const Change& change) {
  generation = std::max(generation, change.generation);
  if (change.type == Change::Type::kStarted) {
    base = change.base;
    floor = std::max(floor, change.floor);
    for (auto& [name, entry] : names) {
      if (entry.versions.count(entry.active) == 0) entry.active = 0;
    }
    return;
  }
  Name& entry = names[change.name];
  entry.last_version = std::max(entry.last_version, change.version);
  if (change.type != Change::Type::kReserved) {
    entry.last_served = std::max(entry.last_served, change.version);
  }
  switch (change.type) {
    case Change::Type::kStarted:
    case Change::Type::kReserved:
    case Change::Type::kServed:
      break;
    case Change::Type::kPublished:
      entry.versions[change.version] = change.stored;
      if (change.activate) entry.active = change.version;
      break;
    case Change::Type::kActivated:
      entry.active = change.version;
      break;
    case Change::Type::kRetired:
      entry.versions.erase(change.version);
      if (entry.active == change.version) entry.active = 0;
      break;
  }
}

void StoredState::ForgetIdleNames() {
  const auto is_idle = [](const Name& entry) {
    return entry.versions.empty() && entry.active == 0;
  };
  std::erase_if(names, [&](const auto& item) {
    return is_idle(item.second) && item.second.last_served == 0;
  });
  if (names.size() < kMaxNames) return;
  std::erase_if(names, [&](const auto& item) {
    if (!is_idle(item.second)) return false;
    floor = std::max(floor, item.second.last_served);
    return true;
  });
}

std::vector<Change> StoredState::ToChanges() const {
  std::vector<Change> changes = {
      {.type = Change::Type::kStarted, .generation = generation, .base = base, .floor = floor}};
  for (const auto& [name, entry] : names) {
    Change change = {.generation = generation, .name = name};
    for (const auto& [version, stored] : entry.versions) {
      change.type = Change::Type::kPublished;
      change.version = version;
      change.stored = stored;
      change.activate = version == entry.active;
      changes.push_back(change);
    }
    const auto note = [&](Change::Type type, int64_t version) {
      changes.push_back({.type = type, .generation = generation, .name = name, .version = version});
    };
    if (change.version < entry.last_served) note(Change::Type::kServed, entry.last_served);
    if (entry.last_served < entry.last_version) {
      note(Change::Type::kReserved, entry.last_version);
    }
    if (entry.active != 0 && entry.versions.count(entry.active) == 0) {
      note(Change::Type::kActivated, entry.active);
    }
  }
  return changes;
}

}  // namespace dorad::adapter
