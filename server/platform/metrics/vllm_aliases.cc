#include "server/platform/metrics/vllm_aliases.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/platform/check.h"

namespace dorad::internal {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Label = ClientMetric::Label;

// One of the server's families: all of its series, or those with one label value.
struct Source {
  const char* family;
  const char* label = nullptr;
  const char* value = nullptr;

  bool Takes(const ClientMetric& series) const {
    return label == nullptr || std::find(series.label.begin(), series.label.end(),
                                         Label{label, value}) != series.label.end();
  }
};

struct Alias {
  const char* name;
  const char* help;
  Source source;
};

// A gauge or counter is the sum of its series; a histogram has one.
constexpr Alias kAliases[] = {
    {"vllm:num_requests_running", "Sequences being computed.", {"dorad_engine_running_sequences"}},
    {"vllm:num_requests_waiting",
     "Sequences waiting for a place in a step.",
     {"dorad_engine_waiting_sequences"}},
    {"vllm:num_preemptions_total",
     "Sequences put back into the queue.",
     {"dorad_engine_preemptions_total"}},
    {"vllm:prompt_tokens_total",
     "Prompt tokens, cached ones included.",
     {"dorad_prompt_tokens_total"}},
    {"vllm:generation_tokens_total", "Tokens generated.", {"dorad_generated_tokens_total"}},
    {"vllm:prefix_cache_queries_total",
     "Prompt tokens looked up in the prefix cache.",
     {"dorad_prefix_cache_queried_tokens_total"}},
    {"vllm:prefix_cache_hits_total",
     "Prompt tokens found in the prefix cache.",
     {"dorad_prefix_cache_hit_tokens_total"}},
    {"vllm:time_to_first_token_seconds",
     "Time to the first token.",
     {"dorad_time_to_first_token_seconds"}},
    {"vllm:inter_token_latency_seconds",
     "Time between two tokens of a sample.",
     {"dorad_inter_token_latency_seconds"}},
    {"vllm:time_per_output_token_seconds",
     "The same, under its older name.",
     {"dorad_inter_token_latency_seconds"}},
    {"vllm:e2e_request_latency_seconds",
     "Time from admission to end of a generation.",
     {"dorad_request_duration_seconds", "kind", "generate"}},
    {"vllm:request_queue_time_seconds",
     "Time from admission to the first step.",
     {"dorad_request_queue_seconds"}},
    {"vllm:spec_decode_num_draft_tokens_total",
     "Guessed tokens that steps verified.",
     {"dorad_draft_tokens_total"}},
    {"vllm:spec_decode_num_accepted_tokens_total",
     "Guessed tokens that were right.",
     {"dorad_draft_accepted_tokens_total"}},
    {"vllm:iteration_tokens_total", "Tokens computed in one step.", {"dorad_engine_step_tokens"}},
};

// vLLM's names of reasons, and ours.
constexpr std::pair<const char*, const char*> kFinishReasons[] = {
    {"stop", "stop"}, {"length", "length"}, {"abort", "aborted"}, {"error", "non_finite"}};

// REQUIRES: it has series from the start.
const MetricFamily& Find(const std::vector<MetricFamily>& families, const char* name) {
  const auto found =
      std::find_if(families.begin(), families.end(),
                   [name](const MetricFamily& family) { return family.name == name; });
  DORAD_CHECK(found != families.end());
  return *found;
}

// The sum of a counter's or gauge's series.
double Sum(const MetricFamily& family, const Source& source) {
  double sum = 0;
  for (const ClientMetric& series : family.metric) {
    if (!source.Takes(series)) continue;
    sum += family.type == MetricType::Gauge ? series.gauge.value : series.counter.value;
  }
  return sum;
}

// Empty without series: the family is then left out.
double Sum(const std::vector<MetricFamily>& own, const Source& source) {
  double sum = 0;
  for (const MetricFamily& family : own) {
    if (family.name == source.family) sum += Sum(family, source);
  }
  return sum;
}

ClientMetric Copy(const MetricFamily& family, const Source& source, std::vector<Label> labels) {
  ClientMetric copy;
  if (family.type == MetricType::Histogram) {
    const auto series =
        std::find_if(family.metric.begin(), family.metric.end(),
                     [&source](const ClientMetric& metric) { return source.Takes(metric); });
    DORAD_CHECK(series != family.metric.end());
    copy.histogram = series->histogram;
  } else {
    copy.gauge.value = copy.counter.value = Sum(family, source);
  }
  copy.label = std::move(labels);
  return copy;
}

ClientMetric GaugeSeries(std::vector<Label> labels, double value) {
  ClientMetric series;
  series.label = std::move(labels);
  series.gauge.value = value;
  return series;
}

}  // namespace

void VllmAliases::SetAdaptersInUse(const std::vector<std::string>& running,
                                   const std::vector<std::string>& waiting) {
  std::string now_running = absl::StrJoin(running, ","), now_waiting = absl::StrJoin(waiting, ",");
  absl::MutexLock lock(&mu_);
  if (now_running == running_ && now_waiting == waiting_) return;
  running_ = std::move(now_running);
  waiting_ = std::move(now_waiting);
  changed_ = now_();
}

// Endpoint pickers take the series with the largest value: there is only one.
MetricFamily VllmAliases::LoraInfo() const {
  absl::MutexLock lock(&mu_);
  return {"vllm:lora_requests_info",
          "Adapters in use; the value is the time of their last change, in seconds since 1970.",
          MetricType::Gauge,
          {GaugeSeries({{"max_lora", absl::StrCat(options_.max_adapters)},
                        {"running_lora_adapters", running_},
                        {"waiting_lora_adapters", waiting_}},
                       absl::ToDoubleSeconds(changed_ - absl::UnixEpoch()))}};
}

std::vector<MetricFamily> VllmAliases::Of(const std::vector<MetricFamily>& own) const {
  const std::vector<Label> labels = {{"engine", "0"}, {"model_name", options_.model_name}};
  const auto with = [&labels](std::initializer_list<Label> more) {
    std::vector<Label> all = labels;
    all.insert(all.end(), more);
    return all;
  };
  std::vector<MetricFamily> families;
  for (const Alias& alias : kAliases) {
    const MetricFamily& family = Find(own, alias.source.family);
    families.push_back({alias.name, alias.help, family.type, {Copy(family, alias.source, labels)}});
  }
  const double pages = Sum(own, {"dorad_kv_pages_capacity"});
  const double usable = pages - Sum(own, {"dorad_kv_pages_released"});
  const double used = usable > 0 ? Sum(own, {"dorad_kv_pages_used"}) / usable : 1;
  families.push_back({"vllm:kv_cache_usage_perc",
                      "Share of the KV cache in use, 0 to 1.",
                      MetricType::Gauge,
                      {GaugeSeries(labels, used)}});
  families.push_back(
      {"vllm:cache_config_info",
       "The KV cache; the value is 1.",
       MetricType::Gauge,
       {GaugeSeries(with({{"block_size", absl::StrCat(options_.kv_page_tokens)},
                          {"num_gpu_blocks", absl::StrCat(static_cast<int64_t>(pages))}}),
                    1)}});
  MetricFamily success{
      "vllm:request_success_total", "Samples that ended, by reason.", MetricType::Counter, {}};
  for (const auto& [theirs, ours] : kFinishReasons) {
    const Source source{"dorad_samples_ended_total", "finish_reason", ours};
    ClientMetric series;
    series.label = with({{"finished_reason", theirs}});
    series.counter.value = Sum(own, source);
    success.metric.push_back(std::move(series));
  }
  families.push_back(std::move(success));
  families.push_back(LoraInfo());
  return families;
}

}  // namespace dorad::internal
