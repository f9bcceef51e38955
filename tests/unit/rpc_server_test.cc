// The services behind a real listener and channel; the engine is real, its model is a fake that
// counts: the token after t is t + 1.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/client_unary_call.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <deque>
#include <limits>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "dorad/v1/adapters.grpc.pb.h"
#include "dorad/v1/control.grpc.pb.h"
#include "dorad/v1/inference.grpc.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/base/error.h"
#include "server/base/unique_fd.h"
#include "server/engine/model_runner.h"
#include "server/rpc/packing.h"
#include "server/rpc/server.h"

namespace dorad::rpc {
namespace {

using testing::ElementsAre;

constexpr int32_t kVocab = 1000;
constexpr int64_t kContext = 512;

class CountingRunner final : public engine::ModelRunner {
 public:
  int64_t kv_pages() const override { return 512; }

  int max_steps_in_flight() const override { return 1; }

  absl::Status Begin(absl::Span<const engine::StepSequence> sequences) override {
    if (step_time > 0) absl::SleepFor(absl::Milliseconds(step_time.load()));
    if (fail) return MakeError(absl::StatusCode::kInternal, "STEP_FAILED", "as told");
    for (const engine::StepSequence& s : sequences) outputs_.push_back(Output(s));
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<engine::StepOutput>> Finish() override {
    return std::exchange(outputs_, {});
  }
  absl::StatusOr<int64_t> ReleaseKv(absl::Span<const int32_t>) override { return 4096; }
  absl::Status RestoreKv() override { return absl::OkStatus(); }

  std::atomic<int> step_time{0};  // milliseconds
  std::atomic<bool> fail{false};

 private:
  static engine::StepOutput Output(const engine::StepSequence& s) {
    engine::StepOutput output;
    if (s.sample != nullptr) {
      output.token = (s.tokens.back() + 1) % kVocab;
      if (s.sample->logprobs != nullptr && s.sample->logprobs->mode != engine::LogprobMode::kNone) {
        output.logprobs.logprobs = {-0.5f};
        for (int k = 0; k < s.sample->logprobs->top_k; ++k) {
          output.logprobs.top_ids.push_back(k);
          output.logprobs.top_logprobs.push_back(-1.0f * k);
        }
        output.logprobs.chosen.assign(s.sample->logprobs->chosen_ids.size(), -2.0f);
      }
    }
    if (s.score != nullptr) {
      for (const int32_t target : s.score->targets) {
        output.logprobs.logprobs.push_back(-1.0f * target);
      }
    }
    return output;
  }

  std::vector<engine::StepOutput> outputs_;  // of the step in flight
};

// Loads nothing: publishes an adapter of the given name at once, or as `status` says.
struct FakePublisher {
  absl::StatusOr<adapter::PublishResult> Publish(const adapter::PublishOptions& options) {
    if (throws) throw std::runtime_error("secret internals");
    if (!status.ok()) return status;
    DORAD_ASSIGN_OR_RETURN(const int64_t version,
                           registry->Reserve(options.name, options.version, options.tags));
    adapter::AdapterSummary summary;
    summary.digest = std::string(64, 'd');
    auto loaded = std::make_shared<adapter::LoadedAdapter>(options.name, version, summary);
    DORAD_ASSIGN_OR_RETURN(
        const int64_t generation,
        registry->Publish(loaded, options.activate, options.expected_generation));
    DORAD_ASSIGN_OR_RETURN(adapter::AdapterRecord record, registry->Get({options.name, version}));
    return adapter::PublishResult{std::move(record), generation};
  }

  adapter::AdapterRegistry* registry = nullptr;
  absl::Status status;
  bool throws = false;
  std::string config;
  std::vector<std::byte> image;
};

std::string ReasonOfWire(const grpc::Status& status) {
  google::rpc::Status wire;
  google::rpc::ErrorInfo info;
  if (!wire.ParseFromString(status.error_details())) return "no details";
  for (const auto& any : wire.details()) {
    if (any.UnpackTo(&info)) return info.reason();
  }
  return "no reason";
}

bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 1000; ++i) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return false;
}

// What grpc.health.v1.Health/Check says of a service; its messages look like these on the wire
// (a name; a number that is 1 for SERVING).
bool IsServing(const std::string& address, const std::string& service) {
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  const grpc::internal::RpcMethod method("/grpc.health.v1.Health/Check",
                                         grpc::internal::RpcMethod::NORMAL_RPC);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  v1::GetRequest request;
  request.set_adapter(service);
  v1::AbortResponse response;
  const grpc::Status status =
      grpc::internal::BlockingUnaryCall(channel.get(), method, &context, request, &response);
  return status.ok() && response.aborted() == 1;
}

class ServerTest : public testing::Test {
 protected:
  ServerTest()
      : metrics_({"test", "test", "test", "cpu", "fp32"}),
        couriers_(2, 0),
        frees_(1, 0),
        registry_(RegistryOptions()) {
    auto runner = std::make_unique<CountingRunner>();
    runner_ = runner.get();
    engine::EngineOptions options;
    options.vocab_size = kVocab;
    options.context_length = kContext;
    options.max_queued_requests = 4;
    options.max_running_sequences = 8;
    engine_ = std::make_unique<engine::Engine>(options, std::move(runner), &metrics_);
    publisher_.registry = &registry_;
    FillServices();
    Server::Options listen;
    listen.listen = "127.0.0.1:0";
    auto server = Server::Start(listen, &services_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    channel_ = grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(),
                                         arguments);
    inference_ = v1::InferenceService::NewStub(channel_);
    adapters_ = v1::AdapterService::NewStub(channel_);
    control_ = v1::ControlService::NewStub(channel_);
  }

  adapter::AdapterRegistry::Options RegistryOptions() {
    adapter::AdapterRegistry::Options options;
    options.executor = [this](std::function<void()> task) { frees_.Submit(std::move(task)); };
    return options;
  }

  void FillServices() {
    services_.engine = engine_.get();
    services_.registry = &registry_;
    services_.metrics = &metrics_;
    services_.couriers = &couriers_;
    services_.uploads = &uploads_;
    services_.publisher.from_bytes = [this](adapter::PublishOptions options, std::string config,
                                            std::vector<std::byte> image, absl::Duration,
                                            adapter::PublishCallback done) {
      publisher_.config = std::move(config);
      publisher_.image = std::move(image);
      done(publisher_.Publish(options));
    };
    services_.publisher.from_path = [this](adapter::PublishOptions options, std::string,
                                           adapter::PublishCallback done) {
      done(publisher_.Publish(options));
    };
    services_.sleep.asleep = [this] {
      absl::MutexLock lock(&asleep_mu_);
      return asleep_;
    };
    services_.memory_by_kind = [] { return std::map<std::string, int64_t>{{"weights", 5}}; };
    services_.max_adapter_bytes = 4 << 20;
  }

  static std::unique_ptr<grpc::ClientContext> Context(int seconds = 20) {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(seconds));
    return context;
  }

  static v1::GenerateRequest Request(int tokens) {
    v1::GenerateRequest request;
    request.set_prompt_token_ids(Pack<int32_t>({10}));
    request.mutable_stop()->set_max_tokens(tokens);
    return request;
  }

  struct Answer {
    grpc::Status status;
    std::vector<v1::GenerateResponse> messages;
    std::multimap<grpc::string_ref, grpc::string_ref> trailers;
    std::unique_ptr<grpc::ClientContext> context;
  };
  Answer Generate(const v1::GenerateRequest& request) {
    Answer answer;
    answer.context = Context();
    const auto reader = inference_->Generate(answer.context.get(), request);
    v1::GenerateResponse message;
    while (reader->Read(&message)) answer.messages.push_back(message);
    answer.status = reader->Finish();
    answer.trailers = answer.context->GetServerTrailingMetadata();
    return answer;
  }

  std::pair<grpc::Status, v1::PublishFromPathResponse> Publish(const std::string& name,
                                                               bool activate = true) {
    v1::PublishFromPathRequest request;
    request.set_name(name);
    request.set_path("/anywhere");
    request.set_activate(activate);
    v1::PublishFromPathResponse response;
    const grpc::Status status = adapters_->PublishFromPath(Context().get(), request, &response);
    return {status, response};
  }

  static v1::PublishRequest BeginUpload(const std::string& id, uint64_t size) {
    v1::PublishRequest part;
    part.mutable_begin()->set_upload_id(id);
    part.mutable_begin()->set_name("up");
    part.mutable_begin()->set_adapter_config_json("{}");
    part.mutable_begin()->set_safetensors_size(size);
    return part;
  }

  // One mebibyte.
  static v1::PublishRequest Chunk(uint64_t offset, char fill) {
    v1::PublishRequest part;
    part.mutable_chunk()->set_offset(offset);
    part.mutable_chunk()->set_data(std::string(1 << 20, fill));
    return part;
  }

  void Drain(absl::Duration timeout, absl::Duration grace) {
    server_->Drain({absl::ZeroDuration(), timeout, grace}, hurry_);
  }

  void GoToSleep(std::vector<std::string> tags) {
    {
      absl::MutexLock lock(&asleep_mu_);
      asleep_ = std::move(tags);
    }
    absl::Notification sleeps;
    engine_->Sleep({}, [&](const absl::StatusOr<int64_t>&) { sleeps.Notify(); });
    sleeps.WaitForNotification();
  }

  // Of a@1, while the disk takes its time; the end cuts short what the drain has not waited for.
  grpc::Status ActivateInADrain() {
    ThreadPool disk(1, 0);
    absl::Notification taken;
    services_.run_change = [&](std::function<void()> change) {
      disk.Submit([change = std::move(change)] {
        absl::SleepFor(absl::Milliseconds(700));
        change();
      });
      taken.Notify();
    };
    v1::ActivateRequest request;
    request.set_name("a");
    request.set_version(1);
    v1::ActivateResponse response;
    grpc::Status status;
    std::thread activate(
        [&] { status = adapters_->Activate(Context().get(), request, &response); });
    taken.WaitForNotification();
    Drain(absl::Seconds(15), absl::ZeroDuration());
    server_->Shutdown(absl::Milliseconds(200));
    activate.join();
    return status;
  }

  v1::GetUploadResponse Uploaded(const std::string& id) {
    v1::GetUploadRequest request;
    request.set_upload_id(id);
    v1::GetUploadResponse response;
    adapters_->GetUpload(Context().get(), request, &response);
    return response;
  }

  Metrics metrics_;
  ThreadPool couriers_;
  ThreadPool frees_;
  adapter::AdapterRegistry registry_;
  UploadStore uploads_{{4 << 20, 8 << 20, absl::Minutes(1)}};
  CountingRunner* runner_ = nullptr;
  std::unique_ptr<engine::Engine> engine_;
  FakePublisher publisher_;
  absl::Mutex asleep_mu_;
  std::vector<std::string> asleep_;
  Services services_;
  std::unique_ptr<Server> server_;
  absl::Notification hurry_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::InferenceService::Stub> inference_;
  std::unique_ptr<v1::AdapterService::Stub> adapters_;
  std::unique_ptr<v1::ControlService::Stub> control_;
};

TEST_F(ServerTest, SendsOneMessageForEachSampleByDefault) {
  v1::GenerateRequest request = Request(5);
  request.set_n(3);
  const Answer answer = Generate(request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  ASSERT_EQ(answer.messages.size(), 3u);
  std::set<uint32_t> samples;
  for (const auto& message : answer.messages) {
    samples.insert(message.sample_index());
    EXPECT_THAT(UnpackIds(message.token_ids()), ElementsAre(11, 12, 13, 14, 15));
    EXPECT_EQ(message.finish().reason(), v1::FINISH_REASON_LENGTH);
    EXPECT_EQ(message.finish().usage().generated_tokens(), 5u);
    EXPECT_THAT(message.request_id(), testing::MatchesRegex("r-[0-9a-f]{16}"));
    EXPECT_EQ(message.seed(), answer.messages[0].seed());
    EXPECT_TRUE(message.logprobs().empty());
  }
  EXPECT_EQ(samples.size(), 3u);
}

TEST_F(ServerTest, StreamsTokensInOrderAndEndsWithTheFinish) {
  runner_->step_time = 2;
  v1::GenerateRequest request = Request(50);
  request.set_response_mode(v1::RESPONSE_MODE_STREAM);
  request.mutable_logprobs()->set_top_k(2);
  request.mutable_logprobs()->set_chosen_token_ids(Pack<int32_t>({3, 4, 5}));
  const Answer answer = Generate(request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_GT(answer.messages.size(), 5u);
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < answer.messages.size(); ++i) {
    const v1::GenerateResponse& message = answer.messages[i];
    const std::vector<int32_t> ids = UnpackIds(message.token_ids());
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    EXPECT_EQ(message.logprobs().size(), 4 * ids.size());
    EXPECT_EQ(message.top_logprobs().k(), 2u);
    EXPECT_EQ(message.top_logprobs().token_ids().size(), 8 * ids.size());
    EXPECT_EQ(message.chosen_logprobs().size(), 12 * ids.size());
    EXPECT_EQ(message.has_finish(), i + 1 == answer.messages.size());
  }
  ASSERT_EQ(tokens.size(), 50u);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(tokens[i], 11 + i);
}

TEST_F(ServerTest, RefusesBadRequestsWithoutInitialMetadata) {
  v1::GenerateRequest request = Request(5);
  request.set_n(0);
  request.set_adapter("NO");
  const Answer answer = Generate(request);
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ReasonOfWire(answer.status), "ADAPTER_NAME_INVALID");
  EXPECT_THAT(answer.status.error_message(), testing::HasSubstr("n: 0 is not in [1, 128]"));
  EXPECT_TRUE(answer.context->GetServerInitialMetadata().empty());
}

TEST_F(ServerTest, NamesEveryCallInItsTrailersAndItsLineOfTheLog) {
  const auto ask = [&](const std::vector<std::pair<std::string, std::string>>& metadata) {
    const auto context = Context();
    for (const auto& [key, value] : metadata) context->AddMetadata(key, value);
    v1::GetInfoResponse info;
    testing::internal::CaptureStderr();
    EXPECT_TRUE(control_->GetInfo(context.get(), v1::GetInfoRequest(), &info).ok());
    const std::string log = testing::internal::GetCapturedStderr();
    const auto trailers = context->GetServerTrailingMetadata();
    const auto found = trailers.find("x-request-id");
    const std::string id =
        found == trailers.end() ? "none" : std::string(found->second.data(), found->second.size());
    EXPECT_THAT(log, testing::HasSubstr("\"request_id\":\"" + id + "\""));
    return std::make_pair(id, log);
  };
  const std::string trace(32, 'a'), other(32, 'b'), rest = "-" + std::string(16, 'c') + "-01";
  EXPECT_THAT(ask({}).first, testing::MatchesRegex("r-[0-9a-f]{16}"));
  EXPECT_EQ(ask({{"x-request-id", "mine"}}).first, "mine");
  EXPECT_NE(ask({{"x-request-id", "not mine!"}}).first, "not mine!");
  EXPECT_THAT(ask({{"x-request-id", "one"}, {"x-request-id", "two"}}).first,
              testing::StartsWith("r-"));
  EXPECT_THAT(ask({{"traceparent", "00-" + trace + rest}}).second,
              testing::HasSubstr("\"trace_id\":\"" + trace + "\""));
  EXPECT_THAT(
      ask({{"traceparent", "00-" + trace + rest}, {"traceparent", "00-" + other + rest}}).second,
      testing::Not(testing::HasSubstr("trace_id")));
}

TEST_F(ServerTest, RefusesAnUnknownAdapter) {
  v1::GenerateRequest request = Request(5);
  request.set_adapter("missing");
  EXPECT_EQ(ReasonOfWire(Generate(request).status), "ADAPTER_NOT_FOUND");
}

TEST_F(ServerTest, ReportsAFailedStep) {
  runner_->fail = true;
  const Answer answer = Generate(Request(5));
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(ReasonOfWire(answer.status), "STEP_FAILED");
  runner_->fail = false;
  EXPECT_TRUE(Generate(Request(5)).status.ok());
}

TEST_F(ServerTest, NamesTheAdapterVersionOfTokens) {
  ASSERT_TRUE(Publish("a").first.ok());
  v1::GenerateRequest request = Request(4);
  request.set_adapter("a");
  const Answer answer = Generate(request);
  ASSERT_EQ(answer.messages.size(), 1u);
  ASSERT_EQ(answer.messages[0].spans_size(), 1);
  const v1::VersionSpan& span = answer.messages[0].spans(0);
  EXPECT_EQ(span.adapter(), "a");
  EXPECT_EQ(span.version(), 1);
  EXPECT_EQ(span.digest(), std::string(64, 'd'));
  EXPECT_EQ(span.begin(), 0u);
  EXPECT_EQ(span.end(), 4u);
  EXPECT_TRUE(Eventually([&] { return registry_.total_leases() == 0; }));
}

TEST_F(ServerTest, GivesAFullQueueARetryHintInTheTrailers) {
  runner_->step_time = 20;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>>> readers;
  const auto start = [&](int samples) {
    v1::GenerateRequest request = Request(400);
    request.set_n(samples);
    contexts.push_back(Context());
    readers.push_back(inference_->Generate(contexts.back().get(), request));
  };
  start(8);  // takes every place
  ASSERT_TRUE(Eventually([&] { return engine_->stats().running_sequences == 8; }));
  for (int i = 0; i < 4; ++i) start(1);
  ASSERT_TRUE(Eventually([&] { return engine_->stats().queued_requests == 4; }));
  const Answer answer = Generate(Request(5));
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOfWire(answer.status), "QUEUE_FULL");
  EXPECT_EQ(answer.trailers.count("grpc-retry-pushback-ms"), 1u);
  for (auto& context : contexts) context->TryCancel();
  for (auto& reader : readers) reader->Finish();
  EXPECT_TRUE(Eventually([&] { return engine_->idle(); }));
}

TEST_F(ServerTest, FreesEverythingWhenTheClientCancels) {
  ASSERT_TRUE(Publish("a").first.ok());
  runner_->step_time = 5;
  v1::GenerateRequest request = Request(400);
  request.set_adapter("a");
  request.set_response_mode(v1::RESPONSE_MODE_STREAM);
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), request);
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  EXPECT_EQ(registry_.total_leases(), 1);
  context->TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] {
    return engine_->idle() && registry_.total_leases() == 0 && services_.open_requests == 0;
  }));
  EXPECT_LT(engine_->stats().steps, 300u) << "the request ran to its end";
}

TEST_F(ServerTest, EndsAtTheDeadline) {
  runner_->step_time = 5;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  const auto reader = inference_->Generate(&context, Request(400));
  v1::GenerateResponse message;
  while (reader->Read(&message)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([&] { return engine_->idle(); }));
  EXPECT_LT(engine_->stats().steps, 300u) << "the request ran to its end";
}

TEST_F(ServerTest, AppliesTheDefaultDeadlineToCallsWithoutOne) {
  services_.default_deadline_seconds = 0.1;
  runner_->step_time = 5;
  grpc::ClientContext context;
  const auto reader = inference_->Generate(&context, Request(400));
  v1::GenerateResponse message;
  while (reader->Read(&message)) {
  }
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(ReasonOfWire(status), "DEADLINE_EXCEEDED");
}

TEST_F(ServerTest, SurvivesManyStreamsThatCancelAtRandom) {
  runner_->step_time = 1;
  std::vector<std::thread> threads;
  std::atomic<int> ended{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 40; ++i) {
        v1::GenerateRequest request = Request(30);
        request.set_n(2);
        if (i % 2 == 0) request.set_response_mode(v1::RESPONSE_MODE_STREAM);
        const auto context = Context();
        const auto reader = inference_->Generate(context.get(), request);
        v1::GenerateResponse message;
        for (int m = 0; m < (i * 7 + t) % 11 && reader->Read(&message); ++m) {
        }
        if (i % 3 != 0) context->TryCancel();
        while (reader->Read(&message)) {
        }
        const grpc::Status status = reader->Finish();
        const grpc::StatusCode code = status.error_code();
        EXPECT_TRUE(code == grpc::StatusCode::OK || code == grpc::StatusCode::CANCELLED ||
                    code == grpc::StatusCode::RESOURCE_EXHAUSTED)
            << code << " " << status.error_message() << " " << ReasonOfWire(status);
        ++ended;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ended, 160);
  EXPECT_TRUE(Eventually([&] { return engine_->idle() && services_.open_requests == 0; }));
  // As of the end of a turn, so it follows.
  EXPECT_TRUE(Eventually([&] { return engine_->stats().kv_pages_used == 0; }));
}

TEST_F(ServerTest, AbortReturnsTheTokensSoFar) {
  runner_->step_time = 5;
  v1::GenerateRequest request = Request(400);
  request.set_request_id("mine");
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), request);
  ASSERT_TRUE(Eventually([&] { return engine_->stats().steps > 3; }));
  v1::AbortRequest abort;
  abort.mutable_requests()->add_request_ids("mine");
  v1::AbortResponse aborted;
  ASSERT_TRUE(inference_->Abort(Context().get(), abort, &aborted).ok());
  EXPECT_EQ(aborted.aborted(), 1u);
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  EXPECT_EQ(message.finish().reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_FALSE(message.token_ids().empty());
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(ServerTest, ScoresUnderSeveralAdapters) {
  ASSERT_TRUE(Publish("a").first.ok());
  v1::ScoreRequest request;
  request.add_sequences()->set_token_ids(Pack<int32_t>({7, 8, 9}));
  request.add_sequences()->set_token_ids(Pack<int32_t>({5}));
  request.add_adapters("");
  request.add_adapters("a@1");
  v1::ScoreResponse response;
  const grpc::Status status = inference_->Score(Context().get(), request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.sequences_size(), 2);
  ASSERT_EQ(response.sequences(0).scores_size(), 2);
  const std::string& packed = response.sequences(0).scores(1).logprobs();
  std::vector<float> logprobs(3);
  ASSERT_EQ(packed.size(), 12u);
  std::memcpy(logprobs.data(), packed.data(), 12);
  EXPECT_TRUE(std::isnan(logprobs[0]));
  EXPECT_EQ(logprobs[1], -8.0f);
  EXPECT_EQ(logprobs[2], -9.0f);
  EXPECT_EQ(response.versions(0).adapter(), "");
  EXPECT_EQ(response.versions(1).version(), 1);
  EXPECT_TRUE(Eventually([&] { return registry_.total_leases() == 0; }));
}

TEST_F(ServerTest, ReceivesAnUploadInChunks) {
  const auto context = Context();
  v1::PublishResponse response;
  const auto writer = adapters_->Publish(context.get(), &response);
  v1::PublishRequest part;
  part.mutable_begin()->set_name("up");
  part.mutable_begin()->set_adapter_config_json("{\"r\": 1}");
  part.mutable_begin()->set_safetensors_size(3 << 20);
  part.mutable_begin()->set_activate(true);
  writer->Write(part);
  for (int i = 0; i < 3; ++i) {
    part.mutable_chunk()->set_offset(i << 20);
    part.mutable_chunk()->set_data(std::string(1 << 20, static_cast<char>('a' + i)));
    writer->Write(part);
  }
  part.mutable_commit();
  writer->Write(part);
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.adapter().name(), "up");
  EXPECT_EQ(response.adapter().state(), v1::ADAPTER_STATE_READY);
  EXPECT_TRUE(response.adapter().active());
  EXPECT_EQ(publisher_.config, "{\"r\": 1}");
  ASSERT_EQ(publisher_.image.size(), size_t{3} << 20);
  EXPECT_EQ(publisher_.image.back(), std::byte{'c'});
}

TEST_F(ServerTest, RefusesAnUploadThatEndsEarly) {
  v1::PublishResponse response;
  const auto context = Context();
  const auto writer = adapters_->Publish(context.get(), &response);
  v1::PublishRequest part;
  part.mutable_begin()->set_name("up");
  part.mutable_begin()->set_adapter_config_json("{}");
  part.mutable_begin()->set_safetensors_size(10);
  writer->Write(part);
  writer->WritesDone();
  EXPECT_EQ(ReasonOfWire(writer->Finish()), "PUBLISH_INCOMPLETE");
  EXPECT_TRUE(registry_.List("", "", 0, 10).empty());
}

TEST_F(ServerTest, GoesOnWithAnUploadWhoseCallWasCancelled) {
  const auto cancelled_context = Context();
  v1::PublishResponse response;
  const auto cancelled = adapters_->Publish(cancelled_context.get(), &response);
  cancelled->Write(BeginUpload("u", 2 << 20));
  cancelled->Write(Chunk(0, 'a'));
  ASSERT_TRUE(Eventually([&] { return Uploaded("u").received_bytes() == 1 << 20; }));
  cancelled_context->TryCancel();
  EXPECT_EQ(cancelled->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return uploads_.idle().uploads == 1; }));
  EXPECT_EQ(Uploaded("u").total_bytes(), 2u << 20);
  EXPECT_FALSE(Uploaded("u").committed());

  const auto context = Context();
  const auto writer = adapters_->Publish(context.get(), &response);
  writer->Write(BeginUpload("u", 2 << 20));
  writer->Write(Chunk(1 << 20, 'b'));
  v1::PublishRequest commit;
  commit.mutable_commit();
  writer->Write(commit);
  const grpc::Status status = writer->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(publisher_.image.size(), size_t{2} << 20);
  EXPECT_EQ(publisher_.image.front(), std::byte{'a'});
  EXPECT_EQ(publisher_.image.back(), std::byte{'b'});
  EXPECT_TRUE(Uploaded("u").committed());
}

TEST_F(ServerTest, ANewerCallTakesAnUploadOver) {
  const auto older_context = Context();
  const auto newer_context = Context();
  v1::PublishResponse ignored, response;
  const auto older = adapters_->Publish(older_context.get(), &ignored);
  older->Write(BeginUpload("u", 1 << 20));
  ASSERT_TRUE(Eventually([&] { return Uploaded("u").total_bytes() == 1 << 20; }));
  const auto newer = adapters_->Publish(newer_context.get(), &response);
  newer->Write(BeginUpload("u", 1 << 20));
  EXPECT_EQ(ReasonOfWire(older->Finish()), "UPLOAD_TAKEN_OVER");
  newer->Write(Chunk(0, 'a'));
  v1::PublishRequest commit;
  commit.mutable_commit();
  newer->Write(commit);
  EXPECT_TRUE(newer->Finish().ok());
  EXPECT_EQ(response.adapter().version(), 1);
}

TEST_F(ServerTest, ACommitWhoseAnswerWasLostIsNotPublishedTwice) {
  int64_t generation = 0;
  for (int i = 0; i < 3; ++i) {
    const auto context = Context();
    v1::PublishResponse response;
    const auto writer = adapters_->Publish(context.get(), &response);
    writer->Write(BeginUpload("u", 1 << 20));
    writer->Write(Chunk(0, 'a'));
    v1::PublishRequest commit;
    commit.mutable_commit();
    writer->Write(commit);
    const grpc::Status status = writer->Finish();
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.adapter().version(), 1);
    if (i == 0) generation = response.generation();
    EXPECT_EQ(response.generation(), generation);
  }
  EXPECT_EQ(registry_.List("", "", 0, 10).size(), 1u);
}

TEST_F(ServerTest, RemembersAnExceptionOfTheLoadAsItsResult) {
  publisher_.throws = true;
  for (int i = 0; i < 2; ++i) {
    const auto context = Context();
    v1::PublishResponse response;
    const auto writer = adapters_->Publish(context.get(), &response);
    writer->Write(BeginUpload("u", 1 << 20));
    writer->Write(Chunk(0, 'a'));
    v1::PublishRequest commit;
    commit.mutable_commit();
    writer->Write(commit);
    EXPECT_EQ(ReasonOfWire(writer->Finish()), "INTERNAL_ERROR");
  }
}

TEST_F(ServerTest, TellsWhichUploadsThereAreNot) {
  v1::GetUploadRequest request;
  v1::GetUploadResponse response;
  EXPECT_EQ(ReasonOfWire(adapters_->GetUpload(Context().get(), request, &response)),
            "UPLOAD_ID_INVALID");
  request.set_upload_id("none");
  const grpc::Status status = adapters_->GetUpload(Context().get(), request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(ReasonOfWire(status), "UPLOAD_NOT_FOUND");
}

TEST_F(ServerTest, TurnsAnExceptionIntoInternalWithoutItsText) {
  publisher_.throws = true;
  const grpc::Status status = Publish("a").first;
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(ReasonOfWire(status), "INTERNAL_ERROR");
  EXPECT_THAT(status.error_message(), testing::Not(testing::HasSubstr("secret")));
}

TEST_F(ServerTest, PassesTheLoadersRefusalOn) {
  publisher_.status = MakeInvalid("adapter", {{"lora_A", "ADAPTER_NOT_FINITE", "has a NaN"}});
  const grpc::Status status = Publish("a").first;
  EXPECT_EQ(ReasonOfWire(status), "ADAPTER_NOT_FINITE");
  EXPECT_THAT(status.error_message(), testing::HasSubstr("lora_A"));
}

TEST_F(ServerTest, ListsInPages) {
  for (const char* name : {"c", "a", "b", "a"}) ASSERT_TRUE(Publish(name).first.ok());
  v1::ListRequest request;
  request.set_page_size(3);
  v1::ListResponse first;
  ASSERT_TRUE(adapters_->List(Context().get(), request, &first).ok());
  std::vector<std::string> seen;
  for (const auto& item : first.adapters()) {
    seen.push_back(absl::StrCat(item.name(), "@", item.version()));
  }
  EXPECT_THAT(seen, ElementsAre("a@1", "a@2", "b@1"));
  request.set_page_token(first.next_page_token());
  v1::ListResponse second;
  ASSERT_TRUE(adapters_->List(Context().get(), request, &second).ok());
  ASSERT_EQ(second.adapters_size(), 1);
  EXPECT_EQ(second.adapters(0).name(), "c");
  EXPECT_TRUE(second.next_page_token().empty());
  request.set_name("b");
  EXPECT_EQ(ReasonOfWire(adapters_->List(Context().get(), request, &second)), "PAGE_TOKEN_INVALID");
}

TEST_F(ServerTest, ActivatesWithAGenerationCheck) {
  ASSERT_TRUE(Publish("a").first.ok());
  const auto [status, second] = Publish("a", /*activate=*/false);
  ASSERT_TRUE(status.ok());
  v1::ActivateRequest request;
  request.set_name("a");
  request.set_version(2);
  request.set_expected_generation(second.generation() + 1);
  v1::ActivateResponse response;
  EXPECT_EQ(ReasonOfWire(adapters_->Activate(Context().get(), request, &response)),
            "GENERATION_MISMATCH");
  request.set_expected_generation(second.generation());
  ASSERT_TRUE(adapters_->Activate(Context().get(), request, &response).ok());
  EXPECT_EQ(response.previous_version(), 1);
  v1::GetRequest get;
  get.set_adapter("a");
  v1::GetResponse got;
  ASSERT_TRUE(adapters_->Get(Context().get(), get, &got).ok());
  EXPECT_EQ(got.adapter().version(), 2);
}

TEST_F(ServerTest, RetiresByForceAndEndsTheHolders) {
  ASSERT_TRUE(Publish("a").first.ok());
  runner_->step_time = 5;
  v1::GenerateRequest request = Request(400);
  request.set_adapter("a");
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), request);
  ASSERT_TRUE(Eventually([&] { return registry_.total_leases() == 1; }));
  v1::RetireRequest retire;
  retire.set_name("a");
  retire.set_version(1);
  retire.set_force(true);
  v1::RetireResponse retired;
  ASSERT_TRUE(adapters_->Retire(Context().get(), retire, &retired).ok());
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  EXPECT_EQ(message.finish().reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_THAT(message.finish().detail(), testing::HasSubstr("a@1"));
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(ServerTest, WatchesEventsInOrderFromAGeneration) {
  ASSERT_TRUE(Publish("a").first.ok());
  const auto context = Context();
  v1::WatchRequest request;
  request.set_from_generation(0);
  const auto reader = adapters_->Watch(context.get(), request);
  v1::WatchResponse event;
  ASSERT_TRUE(reader->Read(&event));
  EXPECT_EQ(event.adapter().name(), "a");
  const int64_t first = event.generation();
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(Publish("b", false).first.ok());
  int64_t last = first;
  for (int published = 0; published < 100;) {
    ASSERT_TRUE(reader->Read(&event));
    EXPECT_GE(event.generation(), last);
    last = event.generation();
    published += event.type() == v1::WATCH_EVENT_TYPE_PUBLISHED && event.adapter().name() == "b";
  }
  context->TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(ServerTest, WatchRefusesGenerationsItCannotServe) {
  for (const auto& [generation, reason] :
       {std::pair<int64_t, std::string>{-1, "GENERATION_INVALID"}, {77, "GENERATION_UNKNOWN"}}) {
    const auto context = Context();
    v1::WatchRequest request;
    request.set_from_generation(generation);
    const auto reader = adapters_->Watch(context.get(), request);
    v1::WatchResponse event;
    EXPECT_FALSE(reader->Read(&event));
    EXPECT_EQ(ReasonOfWire(reader->Finish()), reason);
  }
}

TEST_F(ServerTest, APauseWhoseCallerHasGivenUpIsUndone) {
  runner_->step_time = 5;
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), Request(400));
  ASSERT_TRUE(Eventually([&] { return engine_->stats().steps > 3; }));
  v1::PauseRequest pause;
  pause.set_mode(v1::PAUSE_MODE_WAIT);
  v1::PauseResponse paused;
  const auto impatient = Context();
  std::thread pausing([&] {
    const grpc::Status status = control_->Pause(impatient.get(), pause, &paused);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  });
  v1::GetInfoResponse info;
  EXPECT_TRUE(Eventually([&] {
    EXPECT_TRUE(control_->GetInfo(Context().get(), v1::GetInfoRequest(), &info).ok());
    return info.engine().pausing();
  }));
  EXPECT_FALSE(info.engine().paused());
  EXPECT_EQ(ReasonOfWire(Generate(Request(5)).status), "ENGINE_PAUSED");
  impatient->TryCancel();
  pausing.join();
  EXPECT_TRUE(Eventually([&] { return Generate(Request(5)).status.ok(); }));
  EXPECT_TRUE(engine_->stats().awaited_pauses.empty());
  context->TryCancel();
  (void)reader->Finish();
  EXPECT_TRUE(Eventually([&] { return engine_->idle(); }));
  EXPECT_FALSE(engine_->stats().paused);
}

TEST_F(ServerTest, PausesAndResumes) {
  v1::PauseRequest pause;
  pause.set_mode(v1::PAUSE_MODE_WAIT);
  v1::PauseResponse paused;
  ASSERT_TRUE(control_->Pause(Context().get(), pause, &paused).ok());
  EXPECT_EQ(ReasonOfWire(Generate(Request(5)).status), "ENGINE_PAUSED");
  v1::GetInfoResponse info;
  ASSERT_TRUE(control_->GetInfo(Context().get(), v1::GetInfoRequest(), &info).ok());
  EXPECT_TRUE(info.engine().paused());
  EXPECT_EQ(info.memory_bytes().at("weights"), 5u);
  EXPECT_EQ(info.model().vocab_size(), static_cast<uint32_t>(kVocab));
  v1::ResumeResponse resumed;
  ASSERT_TRUE(control_->Resume(Context().get(), v1::ResumeRequest(), &resumed).ok());
  EXPECT_TRUE(Generate(Request(5)).status.ok());
}

TEST_F(ServerTest, YieldsUntilToldOtherwise) {
  v1::YieldRequest request;
  request.set_yield_id("a");
  v1::YieldResponse yielded;
  EXPECT_EQ(ReasonOfWire(control_->Yield(Context().get(), request, &yielded)),
            "GPU_SHARE_OUT_OF_RANGE");
  request.set_gpu_share(0.25);
  request.mutable_time_to_live()->set_seconds(600);
  ASSERT_TRUE(control_->Yield(Context().get(), request, &yielded).ok());
  EXPECT_EQ(yielded.gpu_share(), 0.25);
  v1::GetInfoResponse info;
  ASSERT_TRUE(control_->GetInfo(Context().get(), v1::GetInfoRequest(), &info).ok());
  EXPECT_EQ(info.engine().gpu_share(), 0.25);
  EXPECT_TRUE(Generate(Request(5)).status.ok());
  v1::EndYieldRequest end;
  end.set_yield_id("a");
  v1::EndYieldResponse ended;
  ASSERT_TRUE(control_->EndYield(Context().get(), end, &ended).ok());
  EXPECT_TRUE(ended.ended());
  ASSERT_TRUE(control_->EndYield(Context().get(), end, &ended).ok());
  EXPECT_FALSE(ended.ended());
  ASSERT_TRUE(control_->GetInfo(Context().get(), v1::GetInfoRequest(), &info).ok());
  EXPECT_EQ(info.engine().gpu_share(), 1);
}

TEST_F(ServerTest, PassesSleepAndWakeOn) {
  rpc::SleepControl::Options asked;
  std::vector<std::string> woken;
  services_.sleep.sleep = [&](rpc::SleepControl::Options options,
                              const rpc::SleepControl::SleepDone& done) {
    asked = options;
    done(std::map<std::string, int64_t>{{"kv", 7}});
  };
  services_.sleep.wake = [&](std::vector<std::string> tags,
                             const std::function<void(absl::Status)>& done) {
    woken = tags;
    done(MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", "as told"));
  };
  services_.sleep.asleep = [] { return std::vector<std::string>{"kv"}; };
  v1::SleepRequest request;
  request.add_tags("kv");
  request.set_keep_kv(true);
  v1::SleepResponse slept;
  ASSERT_TRUE(control_->Sleep(Context().get(), request, &slept).ok());
  EXPECT_EQ(slept.freed_bytes().at("kv"), 7u);
  EXPECT_THAT(asked.tags, ElementsAre("kv"));
  EXPECT_TRUE(asked.keep_kv && !asked.refuse_requests);
  v1::GetInfoResponse info;
  ASSERT_TRUE(control_->GetInfo(Context().get(), v1::GetInfoRequest(), &info).ok());
  EXPECT_THAT(info.engine().sleeping(), ElementsAre("kv"));
  v1::WakeResponse woke;
  EXPECT_EQ(ReasonOfWire(control_->Wake(Context().get(), v1::WakeRequest(), &woke)),
            "OUT_OF_MEMORY");
  EXPECT_TRUE(woken.empty());
}

TEST_F(ServerTest, DrainsRunningRequestsAndRefusesNewOnes) {
  runner_->step_time = 5;
  std::thread drain;
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), Request(40));
  ASSERT_TRUE(Eventually([&] { return engine_->stats().steps > 0; }));
  drain = std::thread([&] { Drain(absl::Seconds(20), absl::Seconds(1)); });
  ASSERT_TRUE(Eventually([&] { return services_.draining.load(); }));
  EXPECT_TRUE(
      Eventually([&] { return ReasonOfWire(Generate(Request(1)).status) == "SHUTTING_DOWN"; }));
  EXPECT_EQ(ReasonOfWire(Publish("late").first), "SHUTTING_DOWN");
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  EXPECT_EQ(UnpackIds(message.token_ids()).size(), 40u);
  EXPECT_TRUE(reader->Finish().ok());
  drain.join();
}

TEST_F(ServerTest, DrainGivesBackTheTokensOfFrozenRequestsAtOnce) {
  runner_->step_time = 5;
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), Request(400));
  ASSERT_TRUE(Eventually([&] { return engine_->stats().steps > 3; }));
  v1::PauseResponse paused;
  ASSERT_TRUE(control_->Pause(Context().get(), v1::PauseRequest(), &paused).ok());
  const absl::Time start = absl::Now();
  std::thread drain([&] { Drain(absl::Seconds(15), absl::Seconds(1)); });
  v1::GenerateResponse message;
  EXPECT_TRUE(reader->Read(&message));
  EXPECT_EQ(message.finish().reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_FALSE(message.token_ids().empty());
  EXPECT_TRUE(reader->Finish().ok());
  drain.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST_F(ServerTest, DrainGivesBackTheTokensOfRequestsThatAreFrozenMeanwhile) {
  runner_->step_time = 5;
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), Request(400));
  ASSERT_TRUE(Eventually([&] { return engine_->stats().steps > 3; }));
  const absl::Time start = absl::Now();
  std::thread drain([&] { Drain(absl::Seconds(15), absl::Seconds(1)); });
  EXPECT_TRUE(Eventually([&] { return services_.draining.load(); }));
  v1::PauseResponse paused;
  EXPECT_TRUE(control_->Pause(Context().get(), v1::PauseRequest(), &paused).ok());
  v1::GenerateResponse message;
  EXPECT_TRUE(reader->Read(&message));
  EXPECT_EQ(message.finish().reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_FALSE(message.token_ids().empty());
  EXPECT_TRUE(reader->Finish().ok());
  drain.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST_F(ServerTest, DrainAnswersAPublishThatHasNoVersionYet) {
  // The disk takes its time for the number, and for what is retired after the version is READY.
  ThreadPool disk(1, 0);
  absl::Notification taken;
  services_.publisher.from_path = [&](adapter::PublishOptions options, const std::string&,
                                      adapter::PublishCallback done) {
    disk.Submit([this, options = std::move(options), done = std::move(done)] {
      absl::SleepFor(absl::Milliseconds(700));
      const absl::StatusOr<adapter::PublishResult> result = publisher_.Publish(options);
      absl::SleepFor(absl::Milliseconds(700));
      done(result);
    });
    taken.Notify();
  };
  v1::PublishFromPathRequest request;
  request.set_name("a");
  request.set_path("/somewhere");
  v1::PublishFromPathResponse response;
  grpc::Status status;
  std::thread publish(
      [&] { status = adapters_->PublishFromPath(Context().get(), request, &response); });
  taken.WaitForNotification();
  Drain(absl::Seconds(15), absl::ZeroDuration());
  server_->Shutdown(absl::Milliseconds(200));
  publish.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.adapter().version(), 1);
}

TEST_F(ServerTest, DrainAnswersAnActivateThatWaitsForTheDisk) {
  ASSERT_TRUE(Publish("a", /*activate=*/false).first.ok());
  const grpc::Status status = ActivateInADrain();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(ServerTest, DrainAnswersAnActivateThoughTheServerSleeps) {
  ASSERT_TRUE(Publish("a", /*activate=*/false).first.ok());
  GoToSleep({"weights", "kv", "adapters"});
  const grpc::Status status = ActivateInADrain();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(ServerTest, DrainWaitsForLoadsUnlessTheWeightsSleep) {
  std::vector<adapter::PublishCallback> held;
  absl::Notification taken;
  services_.publisher.from_path = [&](const adapter::PublishOptions&, const std::string&,
                                      adapter::PublishCallback done) {
    held.push_back(std::move(done));
    taken.Notify();
  };
  grpc::Status status;
  std::thread publish([&] { status = Publish("a").first; });
  taken.WaitForNotification();
  GoToSleep({"kv"});
  std::atomic<bool> drained{false};
  std::thread drain([&] {
    Drain(absl::Seconds(15), absl::ZeroDuration());
    drained = true;
  });
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_FALSE(drained);
  GoToSleep({"kv", "weights"});
  const absl::Time start = absl::Now();
  drain.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  held.front()(absl::CancelledError("as the loader's end says"));
  publish.join();
}

TEST_F(ServerTest, DrainLetsAnUploadFinishAndAnswersIt) {
  const auto context = Context();
  v1::PublishResponse response;
  const auto writer = adapters_->Publish(context.get(), &response);
  writer->Write(BeginUpload("u", 1 << 20));
  ASSERT_TRUE(Eventually([&] { return Uploaded("u").total_bytes() == 1 << 20; }));
  std::thread drain([&] {
    Drain(absl::Seconds(15), absl::ZeroDuration());
    server_->Shutdown(absl::Milliseconds(200));
  });
  EXPECT_TRUE(Eventually([&] { return services_.draining.load(); }));
  absl::SleepFor(absl::Milliseconds(500));
  writer->Write(Chunk(0, 'a'));
  v1::PublishRequest commit;
  commit.mutable_commit();
  writer->Write(commit);
  const grpc::Status status = writer->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.adapter().version(), 1);
  drain.join();
}

TEST_F(ServerTest, DrainWaitsForAnUploadThatStallsNoLongerThanItsTime) {
  const auto context = Context();
  v1::PublishResponse response;
  const auto writer = adapters_->Publish(context.get(), &response);
  writer->Write(BeginUpload("u", 1 << 20));
  ASSERT_TRUE(Eventually([&] { return Uploaded("u").total_bytes() == 1 << 20; }));
  Drain(absl::Milliseconds(200), absl::ZeroDuration());
  server_->Shutdown(absl::Milliseconds(200));
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

// Its answer is far larger than what a client takes that does not ask for it.
TEST_F(ServerTest, DrainWaitsForAScoreWhoseAnswerIsBeingSent) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto stub = v1::InferenceService::NewStub(
      grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), arguments));
  v1::ScoreRequest request;
  for (int i = 0; i < 500; ++i) {
    request.add_sequences()->set_token_ids(Pack<int32_t>(std::vector<int32_t>(kContext, 7)));
  }
  const auto context = Context();
  grpc::CompletionQueue queue;
  const auto next = [&] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  const auto call = stub->AsyncScore(context.get(), request, &queue);
  call->ReadInitialMetadata(nullptr);
  ASSERT_TRUE(next());
  ASSERT_TRUE(Eventually([&] { return engine_->idle(); }));
  std::atomic<bool> drained{false};
  std::thread drain([&] {
    Drain(absl::Seconds(15), absl::ZeroDuration());
    drained = true;
  });
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_FALSE(drained);
  v1::ScoreResponse response;
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  EXPECT_TRUE(next());
  drain.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.sequences_size(), 500);
}

void ExpectAbortedWithTokens(grpc::ClientReader<v1::GenerateResponse>* reader) {
  v1::GenerateResponse message;
  EXPECT_TRUE(reader->Read(&message));
  EXPECT_EQ(message.finish().reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_FALSE(message.token_ids().empty());
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(ServerTest, DrainGivesBackTheTokensOfWhatIsLeftAfterItsTime) {
  runner_->step_time = 50;
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), Request(400));
  ASSERT_TRUE(Eventually([&] { return engine_->stats().steps > 1; }));
  std::thread drain([&] { Drain(absl::Milliseconds(100), absl::Seconds(10)); });
  ExpectAbortedWithTokens(reader.get());
  drain.join();
}

TEST_F(ServerTest, DrainTakesRequestsUntilItsDelayHasPassed) {
  std::thread drain([&] {
    server_->Drain({absl::Hours(1), absl::Seconds(20), absl::Seconds(1)}, hurry_);
  });
  EXPECT_TRUE(Eventually([&] { return !IsServing(server_->address(), "readiness"); }));
  EXPECT_TRUE(IsServing(server_->address(), "liveness"));
  EXPECT_TRUE(Generate(Request(5)).status.ok());
  hurry_.Notify();
  drain.join();
  EXPECT_EQ(ReasonOfWire(Generate(Request(1)).status), "SHUTTING_DOWN");
}

TEST_F(ServerTest, DrainInAHurryGivesBackTheTokensOfWhatRuns) {
  runner_->step_time = 50;
  const auto context = Context();
  const auto reader = inference_->Generate(context.get(), Request(400));
  ASSERT_TRUE(Eventually([&] { return engine_->stats().steps > 1; }));
  std::thread drain([&] { Drain(absl::Hours(1), absl::Seconds(10)); });
  ASSERT_TRUE(Eventually([&] { return services_.draining.load(); }));
  hurry_.Notify();
  ExpectAbortedWithTokens(reader.get());
  drain.join();
}

TEST_F(ServerTest, EachListenerIsHealthyForItsOwnServicesOnly) {
  Server::Options options;
  options.listen = "127.0.0.1:0";
  options.admin_listen = "127.0.0.1:0";
  const auto server = Server::Start(options, &services_);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_TRUE(IsServing((*server)->address(), "dorad.v1.InferenceService"));
  EXPECT_FALSE(IsServing((*server)->address(), "dorad.v1.ControlService"));
  EXPECT_FALSE(IsServing((*server)->admin_address(), "dorad.v1.InferenceService"));
  EXPECT_TRUE(IsServing((*server)->admin_address(), "dorad.v1.AdapterService"));
  EXPECT_TRUE(IsServing((*server)->admin_address(), "dorad.v1.ControlService"));
  EXPECT_TRUE(IsServing((*server)->admin_address(), "readiness"));
}

TEST_F(ServerTest, ShutdownEndsWatchersAndPausedRequests) {
  v1::PauseResponse paused;
  ASSERT_TRUE(control_->Pause(Context().get(), v1::PauseRequest(), &paused).ok());
  const auto stuck_context = Context();
  const auto stuck = inference_->Generate(stuck_context.get(), Request(5));
  const auto watch_context = Context();
  const auto watch = adapters_->Watch(watch_context.get(), v1::WatchRequest());
  watch->WaitForInitialMetadata();
  ASSERT_TRUE(Eventually([&] { return services_.open_requests == 1; }));
  server_->Shutdown(absl::Milliseconds(50));
  EXPECT_EQ(stuck->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServerTest, SaysThatAPortIsInUse) {
  Server::Options options;
  options.listen = server_->address();
  const auto second = Server::Start(options, &services_);
  EXPECT_EQ(ReasonOf(second.status()), "PORT_IN_USE");
  EXPECT_THAT(std::string(second.status().message()), testing::HasSubstr(server_->address()));
}

TEST_F(ServerTest, ListensOnASocketFileAndKeepsOthersFromTakingIt) {
  Server::Options options;
  options.listen = absl::StrCat("unix:", testing::TempDir(), "/dorad-rpc-test-", getpid(), ".sock");
  auto first = Server::Start(options, &services_);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ((*first)->address(), options.listen);
  const auto second = Server::Start(options, &services_);
  EXPECT_EQ(ReasonOf(second.status()), "PORT_IN_USE");
  const auto channel = grpc::CreateChannel(options.listen, grpc::InsecureChannelCredentials());
  v1::GetInfoResponse info;
  EXPECT_TRUE(v1::ControlService::NewStub(channel)
                  ->GetInfo(Context().get(), v1::GetInfoRequest(), &info)
                  .ok());
}

// Such as the handover socket of a server that runs: gRPC would unlink it.
TEST_F(ServerTest, LeavesASocketOfAnotherKindToItsListener) {
  const std::string path =
      absl::StrCat(testing::TempDir(), "/dorad-rpc-test-", getpid(), ".packets");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const auto* name = reinterpret_cast<const sockaddr*>(&address);
  const UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(listener.get(), name, sizeof(address)), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  Server::Options options;
  options.listen = absl::StrCat("unix:", path);
  EXPECT_EQ(ReasonOf(Server::Start(options, &services_).status()), "PORT_IN_USE");
  const UniqueFd client(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(client.get(), name, sizeof(address)), 0);
  unlink(path.c_str());
}

}  // namespace
}  // namespace dorad::rpc
