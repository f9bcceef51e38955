#include "server/platform/metrics/metrics.h"

#include <unistd.h>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "server/platform/files/file.h"
#include "tests/unit/support/test.h"

namespace dorad {
namespace {

Metrics::Info Info() {
  Metrics::Info info{"1.2.3", "smol", "llama", "cpu", "fp32", "fp8"};
  info.commit = "0123456789ab";
  info.top_adapters = 2;
  return info;
}

std::vector<std::string> Split(const std::string& text, char at) {
  return absl::StrSplit(text, at);
}

// Touches every metric, so that families without fixed labels show up as well.
void PinAll(Metrics* metrics) {
  metrics->RequestAdmitted(RequestKind::kGenerate);
  metrics->RequestRefused(RequestKind::kScore, "QUEUE_FULL");
  metrics->RequestEnded(RequestKind::kGenerate, "stop", absl::Milliseconds(20));
  metrics->RequestFailed(RequestKind::kScore, "SHUTTING_DOWN");
  metrics->SampleEnded("length");
  metrics->PromptTokens(10, 6);
  metrics->GeneratedTokens(7);
  metrics->ScoredTokens(8);
  metrics->QueueTime(absl::Milliseconds(1));
  metrics->TimeToFirstToken(absl::Milliseconds(40));
  metrics->InterTokenLatency(absl::Milliseconds(4), 3);
  metrics->StepDone({absl::Milliseconds(5), 4, 100, 2});
  metrics->StepPhaseDone(StepPhase::kSchedule, absl::Milliseconds(1));
  metrics->StepPhaseDone(StepPhase::kLaunch, absl::Milliseconds(2));
  metrics->StepPhaseDone(StepPhase::kCompute, absl::Milliseconds(3));
  metrics->StepPhaseDone(StepPhase::kProcess, absl::Milliseconds(4));
  metrics->Preemptions(2);
  metrics->StepsThrottled(absl::Milliseconds(250));
  metrics->SetEngine({.requests = 9,
                      .frozen_requests = 2,
                      .paused_adapters = 1,
                      .running_sequences = 3,
                      .waiting_sequences = 7,
                      .queued_requests = 4,
                      .queued_tokens = 50,
                      .kv_pages_total = 100,
                      .kv_pages_used = 60,
                      .kv_pages_cached = 30,
                      .kv_pages_released = 8,
                      .paused = true,
                      .gpu_share = 0.5});
  metrics->PrefixCache(16, 6);
  metrics->DraftTokens(DraftSource::kAnswer, 30, 20);
  metrics->DraftTokens(DraftSource::kNgram, 8, 1);
  metrics->NonFiniteLogits();
  metrics->AdapterUsed("policy", {1, 20, 7, 0});
  metrics->SetAdaptersInUse({"a", "b@2"}, {"c"});
  metrics->AdapterStall(absl::Milliseconds(70));
  metrics->AdapterLoaded({{"read", absl::Milliseconds(3)}, {"total", absl::Milliseconds(9)}});
  metrics->AdapterLoadFailed("ADAPTER_NOT_FINITE");
  metrics->PeerBytes(300, 0);
  metrics->PeerBytes(0, 400);
  metrics->SetAdapters({.ready = 2,
                        .retiring = 1,
                        .loading = 1,
                        .resident_bytes = 4096,
                        .host_bytes = 2048,
                        .away = 3,
                        .evictions = 4,
                        .reloads_from_host = 5,
                        .reloads_from_store = 1,
                        .leases = 5,
                        .generation = 9,
                        .unactivated = 6,
                        .active_numbers = 70,
                        .active_checksum = 4'294'967'295});
  metrics->SetStore({700, 2, 8192, 12, absl::Milliseconds(30), 1, {{"STORE_FULL", 3}}});
  metrics->SetMemory("weights", 1 << 20);
  metrics->SetDevice({800, 1000, 200, 50, 150, 3, 4});
  metrics->MemoryReleased("adapters", 70);
  metrics->KvMemoryGrown(60);
  metrics->SetSleeping("kv", true);
  metrics->CallDenied("TOKEN_MISSING");
  metrics->SetSecurity({1, 2, absl::FromUnixSeconds(2'000'000'000)});
  metrics->RpcStarted("Generate");
  metrics->RpcHandled("Generate", "OK", absl::Milliseconds(30));
}

// The value of one series as Prometheus text writes it; "" when it is not there.
std::string Value(const std::string& text, const std::string& series) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::ConsumePrefix(&line, absl::StrCat(series, " "))) return std::string(line);
  }
  return "";
}

TEST(MetricsTest, ExportsWhatHappened) {
  Metrics metrics(Info());
  PinAll(&metrics);
  const std::string text = metrics.Render();
  const std::map<std::string, std::string> expected = {
      {R"(dorad_build_info{commit="0123456789ab",cuda="no",version="1.2.3"})", "1"},
      {R"(dorad_model_info{compute_dtype="fp32",device="cpu",instruction_set="",kv_dtype="fp8",model="smol",model_type="llama"})",
       "1"},
      {R"(dorad_requests_admitted_total{kind="generate"})", "1"},
      {R"(dorad_requests_admitted_total{kind="score"})", "0"},
      {R"(dorad_requests_refused_total{kind="score",reason="QUEUE_FULL"})", "1"},
      {R"(dorad_requests_ended_total{kind="generate",outcome="stop"})", "1"},
      {R"(dorad_request_duration_seconds_count{kind="generate"})", "1"},
      {R"(dorad_request_duration_seconds_bucket{kind="generate",le="0.01"})", "0"},
      {R"(dorad_request_duration_seconds_bucket{kind="generate",le="0.025"})", "1"},
      {R"(dorad_requests_failed_total{kind="score",reason="SHUTTING_DOWN"})", "1"},
      {R"(dorad_samples_ended_total{finish_reason="length"})", "1"},
      {R"(dorad_prompt_tokens_total{source="computed"})", "10"},
      {R"(dorad_prompt_tokens_total{source="cached"})", "6"},
      {"dorad_generated_tokens_total", "7"},
      {"dorad_scored_tokens_total", "8"},
      {"dorad_request_queue_seconds_sum", "0.001"},
      {"dorad_time_to_first_token_seconds_sum", "0.04"},
      {"dorad_inter_token_latency_seconds_count", "3"},
      {"dorad_inter_token_latency_seconds_sum", "0.012"},
      {"dorad_engine_step_seconds_sum", "0.005"},
      {R"(dorad_engine_step_rows_sum{phase="decode"})", "4"},
      {R"(dorad_engine_step_rows_sum{phase="prefill"})", "100"},
      {"dorad_engine_step_adapters_sum", "2"},
      {"dorad_engine_step_tokens_sum", "104"},
      {R"(dorad_engine_step_phase_seconds_total{phase="schedule"})", "0.001"},
      {R"(dorad_engine_step_phase_seconds_total{phase="launch"})", "0.002"},
      {R"(dorad_engine_step_phase_seconds_total{phase="compute"})", "0.003"},
      {R"(dorad_engine_step_phase_seconds_total{phase="process"})", "0.004"},
      {"dorad_engine_preemptions_total", "2"},
      {"dorad_engine_throttled_seconds_total", "0.25"},
      {"dorad_engine_gpu_share", "0.5"},
      {"dorad_engine_requests", "9"},
      {"dorad_engine_frozen_requests", "2"},
      {"dorad_engine_paused_adapters", "1"},
      {"dorad_engine_running_sequences", "3"},
      {"dorad_engine_waiting_sequences", "7"},
      {"dorad_engine_queued_requests", "4"},
      {"dorad_engine_queued_tokens", "50"},
      {"dorad_engine_paused", "1"},
      {"dorad_kv_pages_capacity", "100"},
      {"dorad_kv_pages_used", "60"},
      {"dorad_kv_pages_cached", "30"},
      {"dorad_kv_pages_released", "8"},
      {"dorad_prefix_cache_queried_tokens_total", "16"},
      {"dorad_prefix_cache_hit_tokens_total", "6"},
      {R"(dorad_draft_tokens_total{source="answer"})", "30"},
      {R"(dorad_draft_accepted_tokens_total{source="answer"})", "20"},
      {R"(dorad_draft_tokens_total{source="ngram"})", "8"},
      {R"(dorad_draft_accepted_tokens_total{source="ngram"})", "1"},
      {"dorad_nonfinite_logits_total", "1"},
      {R"(dorad_adapter_requests_total{adapter="policy"})", "1"},
      {"dorad_adapter_requests_total{adapter=\"(base)\"}", "0"},
      {R"(dorad_adapter_tokens_total{adapter="policy",kind="prompt"})", "20"},
      {R"(dorad_adapter_tokens_total{adapter="policy",kind="generated"})", "7"},
      {R"(dorad_adapters_in_use{state="running"})", "2"},
      {R"(dorad_adapters_in_use{state="waiting"})", "1"},
      {"dorad_adapter_stall_seconds_sum", "0.07"},
      {"dorad_adapter_loads_total", "1"},
      {R"(dorad_adapter_load_failures_total{reason="ADAPTER_NOT_FINITE"})", "1"},
      {R"(dorad_adapter_load_seconds_count{stage="read"})", "1"},
      {R"(dorad_adapter_load_seconds_sum{stage="total"})", "0.009"},
      {R"(dorad_adapter_versions{state="ready"})", "2"},
      {R"(dorad_adapter_versions{state="retiring"})", "1"},
      {R"(dorad_adapter_versions{state="loading"})", "1"},
      {"dorad_adapter_resident_bytes", "4096"},
      {"dorad_adapter_evicted_versions", "3"},
      {"dorad_adapter_evictions_total", "4"},
      {R"(dorad_adapter_reloads_total{from="host"})", "5"},
      {R"(dorad_adapter_reloads_total{from="store"})", "1"},
      {"dorad_adapter_host_bytes", "2048"},
      {"dorad_adapter_leases", "5"},
      {"dorad_adapter_generation", "9"},
      {"dorad_adapter_unactivated_versions", "6"},
      {"dorad_adapter_active_version_numbers", "70"},
      {"dorad_adapter_active_checksum", "4294967295"},
      {R"(dorad_peer_bytes_total{direction="sent"})", "300"},
      {R"(dorad_peer_bytes_total{direction="received"})", "400"},
      {"dorad_store_journal_bytes", "700"},
      {"dorad_store_objects", "2"},
      {"dorad_store_object_bytes", "8192"},
      {"dorad_store_appends_total", "12"},
      {"dorad_store_append_seconds_total", "0.03"},
      {"dorad_store_compactions_total", "1"},
      {R"(dorad_store_failures_total{reason="STORE_FULL"})", "3"},
      {R"(dorad_memory_bytes{kind="weights"})", "1048576"},
      {"dorad_memory_limit_bytes", "800"},
      {"dorad_device_memory_bytes", "1000"},
      {"dorad_device_memory_free_bytes", "200"},
      {"dorad_device_memory_pooled_bytes", "50"},
      {"dorad_device_memory_others_bytes", "150"},
      {R"(dorad_memory_refusals_total{by="limit"})", "3"},
      {R"(dorad_memory_refusals_total{by="reserve"})", "4"},
      {R"(dorad_memory_released_bytes_total{from="adapters"})", "70"},
      {"dorad_kv_grown_bytes_total", "60"},
      {R"(dorad_sleeping{tag="kv"})", "1"},
      {R"(dorad_rpc_started_total{method="Generate"})", "1"},
      {R"(dorad_rpc_handled_total{code="OK",method="Generate"})", "1"},
      {R"(dorad_rpc_handling_seconds_sum{method="Generate"})", "0.03"},
  };
  for (const auto& [series, value] : expected) {
    double expected_number = 0, number = -1;
    EXPECT_TRUE(absl::SimpleAtod(value, &expected_number));
    EXPECT_TRUE(absl::SimpleAtod(Value(text, series), &number)) << series;
    EXPECT_NEAR(number, expected_number, 1e-9) << series;
  }
}

TEST(MetricsTest, ExportsTheProcess) {
  Metrics metrics(Info());
  const auto number = [](const std::string& text, const char* name) {
    double value = -1;
    EXPECT_TRUE(absl::SimpleAtod(Value(text, name), &value)) << name;
    return value;
  };
  const std::string before = metrics.Render();
  EXPECT_GT(number(before, "process_resident_memory_bytes"), 1 << 20);
  EXPECT_LT(number(before, "process_resident_memory_bytes"), 1 << 30);
  EXPECT_GE(number(before, "process_virtual_memory_bytes"),
            number(before, "process_resident_memory_bytes"));
  EXPECT_GT(number(before, "process_max_fds"), 16);
  const double started = number(before, "process_start_time_seconds");
  EXPECT_NEAR(started, absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()), 600);

  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  std::atomic<bool> stop = false;
  std::thread spinning([&stop] {
    while (!stop) {
    }
  });
  std::string after;
  EXPECT_TRUE(Eventually([&] {
    after = metrics.Render();
    return number(after, "process_cpu_seconds_total") >
           number(before, "process_cpu_seconds_total") + .005;
  }));
  stop = true;
  spinning.join();
  close(pipes[0]);
  close(pipes[1]);
  EXPECT_EQ(number(after, "process_open_fds"), number(before, "process_open_fds") + 2);
  // At least one more: a sanitizer starts a thread of its own with the first of ours.
  EXPECT_GT(number(after, "process_threads"), number(before, "process_threads"));
}

TEST(MetricsTest, CountsLabelValuesBeyondTheBoundAsOther) {
  Metrics metrics(Info());
  for (int i = 0; i < 1000; ++i) metrics.AdapterLoadFailed(absl::StrCat("REASON_", i));
  metrics.AdapterLoadFailed("REASON_0");
  const std::string text = metrics.Render();
  EXPECT_EQ(Value(text, R"(dorad_adapter_load_failures_total{reason="REASON_0"})"), "2");
  EXPECT_EQ(Value(text, R"(dorad_adapter_load_failures_total{reason="other"})"), "748")
      << "of 256 values four have been there from the start";
  EXPECT_THAT(text, Not(HasSubstr("REASON_999")));
}

TEST(MetricsTest, EscapesLabels) {
  Metrics metrics({"1", "a\"b\\c\nd", "llama", "cpu", "fp32"});
  EXPECT_THAT(metrics.Render(), HasSubstr(R"(model="a\"b\\c\nd")"));
}

TEST(MetricsTest, NeverLetsASumFall) {
  Metrics metrics(Info());
  metrics.QueueTime(-absl::Seconds(5));
  EXPECT_EQ(Value(metrics.Render(), "dorad_request_queue_seconds_sum"), "0");
}

TEST(MetricsTest, CountsExactlyFromManyThreadsWhileScraped) {
  Metrics metrics(Info());
  constexpr int kThreads = 4, kTimes = 500;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&metrics, t] {
      for (int i = 0; i < kTimes; ++i) {
        PinAll(&metrics);
        metrics.RpcHandled(absl::StrCat("Method", i % 7), absl::StrCat("CODE_", t),
                           absl::ZeroDuration());
        if (i % 100 == 0) metrics.Render();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string text = metrics.Render();
  EXPECT_EQ(Value(text, "dorad_generated_tokens_total"), absl::StrCat(7 * kThreads * kTimes));
  EXPECT_EQ(Value(text, R"(dorad_rpc_handled_total{code="OK",method="Generate"})"),
            absl::StrCat(kThreads * kTimes));
}

// "name type label,label" of every exported family, from the text format.
std::set<std::string> ExportedFamilies(const std::string& text) {
  std::map<std::string, std::string> types;
  std::map<std::string, std::set<std::string>> labels;
  std::string family;
  for (const std::string& line : Split(text, '\n')) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (absl::StartsWith(line, "# TYPE ")) {
      family = words[2];
      types[family] = words[3];
    } else if (!absl::StartsWith(line, "#") && absl::StrContains(line, "{")) {
      const size_t open = line.find('{'), close = line.rfind('}');
      for (const std::string& pair : Split(line.substr(open + 1, close - open - 1), ',')) {
        const std::string name = pair.substr(0, pair.find('='));
        if (name != "le") labels[family].insert(name);
      }
    }
  }
  std::set<std::string> families;
  for (const auto& [name, type] : types) {
    families.insert(absl::StrCat(name, " ", type, " ", absl::StrJoin(labels[name], ", ")));
  }
  return families;
}

// docs/reference/metrics.md has one row for each: | `name` | type | labels | meaning |.
TEST(MetricsDocsTest, DocumentationListsExactlyWhatIsExported) {
  const std::string here = __FILE__;
  const auto docs = ReadFileText(
      here.substr(0, here.rfind("tests/unit/")) + "docs/reference/metrics.md", 1 << 20);
  ASSERT_TRUE(docs.ok()) << docs.status();
  std::set<std::string> documented;
  for (const std::string& line : Split(*docs, '\n')) {
    if (!absl::StartsWith(line, "| `") || absl::StartsWith(line, "| `vllm:")) continue;
    const std::vector<std::string> cells = absl::StrSplit(line, " | ");
    ASSERT_EQ(cells.size(), 4) << line;
    std::string name(absl::StripPrefix(cells[0], "| `"));
    name.pop_back();
    const std::string labels = cells[2] == "–" ? "" : cells[2];
    documented.insert(absl::StrCat(name, " ", cells[1], " ", labels));
  }
  Metrics metrics(Info());
  PinAll(&metrics);
  EXPECT_EQ(ExportedFamilies(metrics.Render()), documented);
}

TEST(MetricsDocsTest, EveryMetricHasHelp) {
  Metrics metrics(Info());
  PinAll(&metrics);
  const std::string text = metrics.Render();
  for (const std::string& family : ExportedFamilies(text)) {
    const std::string name = family.substr(0, family.find(' '));
    EXPECT_THAT(text, HasSubstr(absl::StrCat("# HELP ", name, " "))) << name;
    EXPECT_TRUE(absl::StartsWith(name, "dorad_") || absl::StartsWith(name, "process_")) << name;
  }
}

}  // namespace
}  // namespace dorad
