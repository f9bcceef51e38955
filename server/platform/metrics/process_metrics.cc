#include "server/platform/metrics/process_metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"

namespace dorad::internal {
namespace {

prometheus::Gauge& AddGauge(prometheus::Registry* registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(*registry).Add({});
}

// Fields of /proc/self/stat from the third on: the second, the program's name, may contain anything
// and ends at the last parenthesis.
std::vector<std::string> StatFields() {
  std::ifstream in("/proc/self/stat");
  std::string line;
  std::getline(in, line);
  const size_t end = line.rfind(')');
  if (end == std::string::npos) return {};
  return absl::StrSplit(line.substr(end + 1), ' ', absl::SkipEmpty());
}

// Field `number`, counted as in proc(5).
std::optional<double> StatField(const std::vector<std::string>& fields, size_t number) {
  double value = 0;
  const size_t index = number - 3;
  if (index >= fields.size() || !absl::SimpleAtod(fields[index], &value)) return std::nullopt;
  return value;
}

std::optional<double> BootTime() {
  std::ifstream in("/proc/stat");
  std::string key;
  double value = 0;
  while (in >> key) {
    if (key == "btime" && in >> value) return value;
    in.ignore(1 << 20, '\n');
  }
  return std::nullopt;
}

double StartTime() {
  const std::optional<double> ticks = StatField(StatFields(), 22);
  const std::optional<double> boot = BootTime();
  if (!ticks || !boot) return 0;
  return *boot + *ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

std::optional<double> CountOpenFds() {
  DIR* dir = opendir("/proc/self/fd");
  if (dir == nullptr) return std::nullopt;
  int count = 0;
  while (const dirent* entry = readdir(dir)) count += entry->d_name[0] != '.' ? 1 : 0;
  closedir(dir);
  return count - 1;  // without the folder's own
}

}  // namespace

ProcessMetrics::ProcessMetrics(prometheus::Registry* registry)
    : cpu_seconds_(prometheus::BuildCounter()
                       .Name("process_cpu_seconds_total")
                       .Help("User and system CPU time of the process in seconds.")
                       .Register(*registry)
                       .Add({})),
      resident_bytes_(AddGauge(registry, "process_resident_memory_bytes",
                               "Resident memory of the process in bytes.")),
      virtual_bytes_(AddGauge(registry, "process_virtual_memory_bytes",
                              "Virtual memory of the process in bytes.")),
      open_fds_(AddGauge(registry, "process_open_fds", "Open file descriptors.")),
      max_fds_(AddGauge(registry, "process_max_fds", "Limit of open file descriptors.")),
      threads_(AddGauge(registry, "process_threads", "Threads of the process.")) {
  AddGauge(registry, "process_start_time_seconds",
           "Start of the process in seconds since the Unix epoch.")
      .Set(StartTime());
  Refresh();
}

void ProcessMetrics::Refresh() {
  const std::vector<std::string> fields = StatFields();
  if (const auto pages = StatField(fields, 24)) {
    resident_bytes_.Set(*pages * static_cast<double>(sysconf(_SC_PAGESIZE)));
  }
  if (const auto bytes = StatField(fields, 23)) virtual_bytes_.Set(*bytes);
  if (const auto threads = StatField(fields, 20)) threads_.Set(*threads);
  if (const auto fds = CountOpenFds()) open_fds_.Set(*fds);
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) max_fds_.Set(static_cast<double>(limit.rlim_cur));
  timespec cpu;
  if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu) == 0) {
    // Two concurrent scrapes must not both add the same difference.
    absl::MutexLock lock(&mu_);
    const double now = static_cast<double>(cpu.tv_sec) + 1e-9 * static_cast<double>(cpu.tv_nsec);
    if (now > cpu_seconds_.Value()) cpu_seconds_.Increment(now - cpu_seconds_.Value());
  }
}

}  // namespace dorad::internal
