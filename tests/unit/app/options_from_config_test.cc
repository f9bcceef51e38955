#include "server/app/options_from_config.h"

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

TEST(OptionsFromConfigTest, ClampsToInt32) {
  EXPECT_EQ(ToInt32(7), 7);
  EXPECT_EQ(ToInt32(int64_t{1} << 40), std::numeric_limits<int32_t>::max());
}

TEST(OptionsFromConfigTest, TheDeviceDecidesAutomaticValues) {
  Config config;
  config.model.device = "cpu";
  Config cpu = Resolved(config);
  EXPECT_EQ(cpu.model.compute_dtype, "fp32");
  EXPECT_EQ(cpu.engine.kv_dtype, "fp32");
  config.model.device = "cuda";
  const Config cuda = Resolved(config);
  EXPECT_EQ(cuda.model.compute_dtype, "bf16");
  EXPECT_EQ(cuda.engine.kv_dtype, "bf16");
  for (const auto member : {&EngineConfig::max_step_tokens, &EngineConfig::max_running_sequences}) {
    EXPECT_GT(cpu.engine.*member, 0);
    EXPECT_GT(cuda.engine.*member, cpu.engine.*member);
  }
  EXPECT_EQ(cuda.engine.kv_bytes, 0) << "the backend chooses it";
  config.model.device = "auto";
  EXPECT_EQ(Resolved(config).model.device, Backend::ChooseDevice().name);
}

TEST(OptionsFromConfigTest, GivenValuesStay) {
  Config config;
  config.model.device = "cuda";
  config.model.compute_dtype = "fp32";
  config.engine.max_step_tokens = 7;
  config.engine.max_running_sequences = 8;
  config.server.max_concurrent_streams = 9;
  const Config resolved = Resolved(config);
  EXPECT_EQ(resolved.model.compute_dtype, "fp32");
  EXPECT_EQ(resolved.engine.max_step_tokens, 7);
  EXPECT_EQ(resolved.engine.max_running_sequences, 8);
  EXPECT_EQ(resolved.server.max_concurrent_streams, 9);
  EXPECT_TRUE(ChosenValues(resolved, resolved, {.kv_bytes = 1}).size() == 1) << "engine.kv_bytes";
}

TEST(OptionsFromConfigTest, TheEngineGetsItsLimitsAndTheModels) {
  Config config;
  config.engine.max_step_tokens = 1;
  config.engine.max_running_sequences = 2;
  config.engine.prefix_cache = false;
  config.engine.gpu_share = 0.5;
  config.limits.max_tokens = 3;
  config.limits.max_n = 4;
  config.limits.max_logprobs_k = 5;
  config.limits.max_chosen_ids = 6;
  config.limits.max_stop_ids = 7;
  config.limits.max_stop_sequences = 19;
  config.limits.max_stop_sequence_tokens = 20;
  config.limits.max_logit_biases = 16;
  config.limits.max_allowed_ids = 17;
  config.limits.max_bad_word_tokens = 18;
  config.limits.max_draft_tokens = 19;
  config.engine.ngram_drafts = true;
  config.limits.max_score_tokens = 8;
  config.limits.max_queued_requests = 9;
  config.limits.max_queued_tokens = 10;
  Backend::Info model;
  model.vocab_size = 11;
  model.context_length = 12;
  model.kv_min_pages = 13;
  model.eos_token_ids = {14, 15};
  const engine::EngineOptions options = ToEngineOptions(config, model);
  EXPECT_EQ(options.max_step_tokens, 1);
  EXPECT_EQ(options.max_running_sequences, 2);
  EXPECT_FALSE(options.prefix_cache);
  EXPECT_EQ(options.gpu_share, 0.5);
  EXPECT_EQ(options.max_tokens, 3);
  EXPECT_EQ(options.max_n, 4);
  EXPECT_EQ(options.max_logprobs_k, 5);
  EXPECT_EQ(options.max_chosen_ids, 6);
  EXPECT_EQ(options.max_stop_ids, 7);
  EXPECT_EQ(options.max_stop_sequences, 19);
  EXPECT_EQ(options.max_stop_sequence_tokens, 20);
  EXPECT_EQ(options.max_logit_biases, 16);
  EXPECT_EQ(options.max_allowed_ids, 17);
  EXPECT_EQ(options.max_bad_word_tokens, 18);
  EXPECT_EQ(options.max_draft_tokens, 19);
  EXPECT_TRUE(options.ngram_drafts);
  EXPECT_EQ(options.max_score_tokens, 8);
  EXPECT_EQ(options.max_queued_requests, 9);
  EXPECT_EQ(options.max_queued_tokens, 10);
  EXPECT_EQ(options.vocab_size, 11);
  EXPECT_EQ(options.context_length, 12);
  EXPECT_EQ(options.kv_min_pages, 13);
  EXPECT_THAT(options.eos_token_ids, ElementsAre(14, 15));
}

TEST(OptionsFromConfigTest, LoadsAndUploadsAreBoundedByTheSameSize) {
  Config config;
  config.adapters.max_rank = 1;
  config.adapters.max_bytes = 100;
  config.adapters.keep_last = 2;
  config.adapters.allowed_roots = {"/a", "/b"};
  config.adapters.upload_ttl_seconds = 1.5;
  const adapter::LoaderOptions loads = ToLoaderOptions(config);
  EXPECT_EQ(loads.read.max_rank, 1);
  EXPECT_EQ(loads.read.max_adapter_bytes, 100);
  EXPECT_EQ(loads.keep_last, 2);
  EXPECT_THAT(loads.read.allowed_roots, ElementsAre("/a", "/b"));
  const rpc::UploadStore::Options uploads = ToUploadOptions(config, /*has_store=*/true);
  EXPECT_EQ(uploads.max_image_bytes, 100);
  EXPECT_EQ(uploads.max_bytes, 200);
  EXPECT_EQ(uploads.time_to_live, absl::Milliseconds(1500));
  EXPECT_TRUE(uploads.has_store);
}

TEST(OptionsFromConfigTest, TheInstructionSetIsTheBackendsChoice) {
  const Backend::Info info{.instruction_set = "mma"};
  EXPECT_EQ(ToServerInfo({}, info).instruction_set, "mma");
  EXPECT_EQ(ToMetricsInfo({}, info).instruction_set, "mma");
}

TEST(OptionsFromConfigTest, TheKvCacheHasTheComputationsNumbersOrEightBits) {
  Config config;
  config.model.device = "cpu";
  config.model.compute_dtype = "bf16";
  EXPECT_EQ(ToServerInfo(Resolved(config), {}).kv_dtype, "bf16");
  EXPECT_EQ(ToMetricsInfo(Resolved(config), {}).kv_dtype, "bf16");
  config.engine.kv_dtype = "fp8";
  EXPECT_EQ(ToServerInfo(Resolved(config), {}).kv_dtype, "fp8");
  EXPECT_EQ(ToMetricsInfo(Resolved(config), {}).kv_dtype, "fp8");
}

TEST(OptionsFromConfigTest, ClientsAreToldTheHandoverSocketsAbsolutePath) {
  Config config;
  EXPECT_EQ(ToServerInfo(config, {}).shared_memory_socket, "");
  config.server.shared_memory_socket = "/run/dorad.sock";
  EXPECT_EQ(ToServerInfo(config, {}).shared_memory_socket, "/run/dorad.sock");
  config.server.shared_memory_socket = "dorad.sock";
  EXPECT_EQ(ToServerInfo(config, {}).shared_memory_socket.front(), '/');
}

}  // namespace
}  // namespace dorad
