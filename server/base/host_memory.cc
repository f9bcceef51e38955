#include "server/base/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"

namespace dorad {
namespace {

// The number behind a key: "MemAvailable: 12 kB", "inactive_file 12".
std::optional<int64_t> NumberAfter(const std::string& path, const std::string& key) {
  std::ifstream in(path);
  std::string line;
  while (std::getline(in, line)) {
    std::istringstream words(line);
    std::string name;
    int64_t number = 0;
    if (words >> name && name == key && words >> number) return number;
  }
  return std::nullopt;
}

std::optional<int64_t> Number(const std::string& path) {
  std::ifstream in(path);
  int64_t number = 0;
  if (in >> number) return number;
  return std::nullopt;  // also "max"
}

// What one group leaves; files that are only cached make room.
std::optional<int64_t> LeftOfGroup(const std::string& folder) {
  const std::optional<int64_t> max = Number(folder + "/memory.max");
  const std::optional<int64_t> current = Number(folder + "/memory.current");
  if (!max || !current) return std::nullopt;
  const int64_t cached = NumberAfter(folder + "/memory.stat", "inactive_file").value_or(0);
  return std::max<int64_t>(0, *max - *current + cached);
}

// "/a/b" of "0::/a/b"; inside of a namespace "/".
std::string OwnGroup(const std::string& root) {
  std::ifstream in(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(in, line)) {
    if (line.rfind("0::", 0) == 0) return line.substr(3);
  }
  return "/";
}

}  // namespace

int64_t AvailableHostMemory(const std::string& root) {
  int64_t available = std::numeric_limits<int64_t>::max();
  if (const auto kib = NumberAfter(root + "/proc/meminfo", "MemAvailable:")) {
    available = *kib * 1024;
  }
  // A group's limit holds for all groups within it.
  for (std::string group = OwnGroup(root);; group.resize(group.rfind('/'))) {
    if (const auto left = LeftOfGroup(absl::StrCat(root, "/sys/fs/cgroup", group))) {
      available = std::min(available, *left);
    }
    if (group.rfind('/') == std::string::npos) return available;
  }
}

absl::Status CheckHostMemory(int64_t bytes, int64_t available, const std::string& what) {
  if (bytes <= available - available / 10) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                   absl::StrCat(what, " takes ", bytes, " bytes of host memory, of which ",
                                available, " are available"));
}

}  // namespace dorad
