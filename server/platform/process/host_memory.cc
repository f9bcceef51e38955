#include "server/platform/process/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"

namespace dorad {
namespace {

// The number after a key: "MemAvailable: 12 kB", "inactive_file 12".
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

std::optional<int64_t> LimitOfGroup(const std::string& folder) {
  return Number(folder + "/memory.max");
}

// The free memory of one group; the page cache counts as free.
std::optional<int64_t> LeftOfGroup(const std::string& folder) {
  const std::optional<int64_t> max = LimitOfGroup(folder);
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

// The minimum of the host's number in /proc/meminfo and those of the process's groups.
int64_t Least(const std::string& root, const std::string& host_key,
              std::optional<int64_t> (*of_group)(const std::string& folder)) {
  int64_t least = std::numeric_limits<int64_t>::max();
  if (const auto kib = NumberAfter(root + "/proc/meminfo", host_key)) least = *kib * 1024;
  // A group's limit also applies to the groups within it.
  for (std::string group = OwnGroup(root);; group.resize(group.rfind('/'))) {
    if (const auto bytes = of_group(absl::StrCat(root, "/sys/fs/cgroup", group))) {
      least = std::min(least, *bytes);
    }
    if (group.rfind('/') == std::string::npos) return least;
  }
}

}  // namespace

int64_t AvailableHostMemory(const std::string& root) {
  return Least(root, "MemAvailable:", LeftOfGroup);
}

int64_t TotalHostMemory(const std::string& root) { return Least(root, "MemTotal:", LimitOfGroup); }

absl::Status CheckHostMemory(int64_t bytes, int64_t available, const std::string& what) {
  if (bytes <= available - available / 10) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                   absl::StrCat(what, " takes ", bytes, " bytes of host memory, of which ",
                                available, " are available"));
}

}  // namespace dorad
