#include "server/platform/metrics/vllm_aliases.h"

#include "server/platform/metrics/metrics.h"
#include "tests/unit/support/test.h"

namespace dorad {
namespace {

Metrics::Info WithAliases() {
  Metrics::Info info{"1", "smol", "llama", "cpu", "fp32"};
  info.vllm_aliases = true;
  info.kv_page_tokens = 16;
  info.max_adapters_in_step = 64;
  return info;
}

// Every series of vLLM's names.
std::map<std::string, std::string> Aliases(Metrics& metrics) {
  std::map<std::string, std::string> series;
  const std::string text = metrics.Render();
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::StartsWith(line, "vllm:")) continue;
    const size_t space = line.rfind(' ');
    series[std::string(line.substr(0, space))] = std::string(line.substr(space + 1));
  }
  return series;
}

constexpr char kLabels[] = R"({engine="0",model_name="smol"})";

TEST(VllmAliasesTest, AreOffByDefault) {
  Metrics metrics({"1", "smol", "llama", "cpu", "fp32"});
  EXPECT_THAT(metrics.Render(), Not(HasSubstr("vllm:")));
}

TEST(VllmAliasesTest, SayWhatTheServersOwnMetricsSay) {
  Metrics metrics(WithAliases());
  metrics.PromptTokens(10, 6);
  metrics.GeneratedTokens(7);
  metrics.PrefixCache(16, 6);
  metrics.Preemptions(2);
  metrics.TimeToFirstToken(absl::Milliseconds(40));
  metrics.InterTokenLatency(absl::Milliseconds(4), 3);
  metrics.QueueTime(absl::Milliseconds(8));
  metrics.RequestEnded(RequestKind::kScore, "ok", absl::Seconds(9));
  metrics.RequestEnded(RequestKind::kGenerate, "ok", absl::Seconds(2));
  metrics.StepDone({absl::Milliseconds(5), 4, 100, 2});
  metrics.SampleEnded("length");
  metrics.SampleEnded("aborted");
  Metrics::EngineGauges gauges;
  gauges.running_sequences = 3;
  gauges.waiting_sequences = 4;
  gauges.kv_pages_total = 100;
  gauges.kv_pages_used = 60;
  gauges.kv_pages_released = 20;
  metrics.SetEngine(gauges);
  const auto series = Aliases(metrics);
  const std::map<std::string, std::string> expected = {
      {absl::StrCat("vllm:num_requests_running", kLabels), "3"},
      {absl::StrCat("vllm:num_requests_waiting", kLabels), "4"},
      {absl::StrCat("vllm:kv_cache_usage_perc", kLabels), "0.75"},
      {absl::StrCat("vllm:num_preemptions_total", kLabels), "2"},
      {absl::StrCat("vllm:prompt_tokens_total", kLabels), "16"},
      {absl::StrCat("vllm:generation_tokens_total", kLabels), "7"},
      {absl::StrCat("vllm:prefix_cache_queries_total", kLabels), "16"},
      {absl::StrCat("vllm:prefix_cache_hits_total", kLabels), "6"},
      {absl::StrCat("vllm:time_to_first_token_seconds_count", kLabels), "1"},
      {absl::StrCat("vllm:inter_token_latency_seconds_count", kLabels), "3"},
      {absl::StrCat("vllm:time_per_output_token_seconds_count", kLabels), "3"},
      {absl::StrCat("vllm:e2e_request_latency_seconds_sum", kLabels), "2"},
      {absl::StrCat("vllm:request_queue_time_seconds_count", kLabels), "1"},
      {absl::StrCat("vllm:iteration_tokens_total_sum", kLabels), "104"},
      {R"(vllm:request_success_total{engine="0",model_name="smol",finished_reason="length"})", "1"},
      {R"(vllm:request_success_total{engine="0",model_name="smol",finished_reason="abort"})", "1"},
      {R"(vllm:request_success_total{engine="0",model_name="smol",finished_reason="stop"})", "0"},
      {R"(vllm:cache_config_info{engine="0",model_name="smol",block_size="16",num_gpu_blocks="100"})",
       "1"},
  };
  for (const auto& [name, value] : expected) EXPECT_THAT(series, Contains(Pair(name, value)));
}

std::map<std::string, std::string> LoraInfo(Metrics& metrics) {
  std::map<std::string, std::string> found;
  for (const auto& [name, value] : Aliases(metrics)) {
    if (absl::StartsWith(name, "vllm:lora_requests_info")) found.emplace(name, value);
  }
  return found;
}

TEST(VllmAliasesTest, AdaptersInUseAreOneSeriesWhateverChanges) {
  Metrics metrics(WithAliases());
  EXPECT_THAT(LoraInfo(metrics), SizeIs(1)) << "also before the first request";
  metrics.SetAdaptersInUse({"a", "b@7"}, {"c"});
  EXPECT_EQ(
      LoraInfo(metrics).begin()->first,
      R"(vllm:lora_requests_info{max_lora="64",running_lora_adapters="a,b@7",waiting_lora_adapters="c"})");
  metrics.SetAdaptersInUse({}, {"c"});
  EXPECT_THAT(LoraInfo(metrics), SizeIs(1));
  EXPECT_THAT(LoraInfo(metrics).begin()->first,
              HasSubstr(R"(running_lora_adapters="",waiting_lora_adapters="c")"));
}

TEST(VllmAliasesTest, AdaptersInUseBearTheTimeOfTheirLastChange) {
  absl::Time now = absl::FromUnixSeconds(1000);
  internal::VllmAliases aliases({"smol", 16, 64}, [&now] { return now; });
  const auto changed = [&] {
    aliases.SetAdaptersInUse({"a"}, {});
    return aliases.LoraInfo().metric.at(0).gauge.value;
  };
  now += absl::Seconds(5);
  EXPECT_EQ(changed(), 1005);
  now += absl::Seconds(5);
  EXPECT_EQ(changed(), 1005) << "the same adapters";
  aliases.SetAdaptersInUse({}, {"a"});
  EXPECT_EQ(aliases.LoraInfo().metric.at(0).gauge.value, 1010);
}

}  // namespace
}  // namespace dorad
