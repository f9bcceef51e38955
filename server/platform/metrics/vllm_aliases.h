// The server's metrics under vLLM's names, for existing dashboards, autoscalers and endpoint
// pickers. Made at each scrape from the server's own families, so that nothing is counted twice.
// Their names have a colon, which promtool's lint dislikes.
//
// Owned by Metrics. Thread-safe.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "prometheus/metric_family.h"

namespace dorad::internal {

class VllmAliases {
 public:
  struct Options {
    std::string model_name;
    int kv_page_tokens = 0;
    int max_adapters = 0;  // in one step
  };
  explicit VllmAliases(Options options, std::function<absl::Time()> now = absl::Now)
      : options_(std::move(options)), now_(std::move(now)) {}

  // Names of adapters with running and with waiting requests.
  void SetAdaptersInUse(const std::vector<std::string>& running,
                        const std::vector<std::string>& waiting);

  // `own`: all families of the server.
  std::vector<prometheus::MetricFamily> Of(const std::vector<prometheus::MetricFamily>& own) const;

  // vllm:lora_requests_info alone.
  prometheus::MetricFamily LoraInfo() const;

 private:
  const Options options_;
  const std::function<absl::Time()> now_;
  mutable absl::Mutex mu_;
  std::string running_ ABSL_GUARDED_BY(mu_);
  std::string waiting_ ABSL_GUARDED_BY(mu_);
  absl::Time changed_ ABSL_GUARDED_BY(mu_) = now_();
};

}  // namespace dorad::internal
