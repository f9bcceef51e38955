// The services behind a real listener and channel; the engine is real, its model is a fake that
// counts: the token after t is t + 1.
#pragma once

#include <grpcpp/grpcpp.h>

#include "dorad/v1/adapters.grpc.pb.h"
#include "dorad/v1/control.grpc.pb.h"
#include "dorad/v1/inference.grpc.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/adapter/publish/publisher.h"
#include "server/colocation/sleep_control.h"
#include "server/engine/model_runner.h"
#include "server/platform/files/byte_buffer.h"
#include "server/rpc/message_deadlines.h"
#include "server/rpc/packing.h"
#include "server/rpc/server.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {

inline constexpr int32_t kVocab = 1000;
inline constexpr int64_t kContext = 512;

class CountingRunner final : public engine::ModelRunner {
 public:
  int64_t kv_pages() const override { return 512; }

  int max_steps_in_flight() const override { return 1; }

  absl::Status Begin(absl::Span<const engine::StepSequence> sequences) override {
    if (step_time > 0) absl::SleepFor(absl::Milliseconds(step_time.load()));
    if (fail) return MakeError(absl::StatusCode::kInternal, "STEP_FAILED", "injected");
    for (const engine::StepSequence& s : sequences) {
      const auto last = s.row_of >= 0 ? sequences[s.row_of].tokens.back() : s.tokens.back();
      outputs_.push_back(Output(s, last));
    }
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
  static engine::StepOutput Output(const engine::StepSequence& s, engine::TokenId last) {
    engine::StepOutput output;
    if (!s.samples.empty()) {
      const engine::LogprobParams* const logprobs = s.samples[0].logprobs;
      output.tokens = {(last + 1) % kVocab};
      if (logprobs != nullptr && logprobs->mode != engine::LogprobMode::kNone) {
        output.logprobs.logprobs = {-0.5f};
        for (int k = 0; k < logprobs->top_k; ++k) {
          output.logprobs.top_ids.push_back(k);
          output.logprobs.top_logprobs.push_back(-1.0f * k);
        }
        output.logprobs.chosen.assign(logprobs->chosen_ids.size(), -2.0f);
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

// Loads nothing: publishes an adapter of the given name at once, or as `status` or `on_publish`
// say.
struct FakePublisher final : adapter::AdapterPublisher {
  void Publish(adapter::PublishOptions options, adapter::AdapterSource source,
               adapter::PublishCallback done) override {
    if (auto* bytes = std::get_if<adapter::BytesSource>(&source)) {
      config = std::move(bytes->adapter_config_json);
      image = *bytes->safetensors;
    }
    if (on_publish) return on_publish(options, std::move(done));
    done(PublishNow(options));
  }

  absl::StatusOr<adapter::PublishResult> PublishNow(const adapter::PublishOptions& options) {
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
  std::function<void(const adapter::PublishOptions&, adapter::PublishCallback)> on_publish;
  std::string config;
  ByteBuffer image;
};

// Sleeps and wakes at once, or fails on demand.
class FakeSleep final : public SleepControl {
 public:
  void Sleep(Tags tags, Options options, SleepDone done) override {
    asked_options = options;
    SetAsleep(tags);
    done(std::map<std::string, int64_t>{{"kv", 7}});
  }
  void Wake(Tags tags, std::function<void(absl::Status)> done) override {
    woken = std::move(tags);
    done(wake_status);
  }
  Tags asleep() const override {
    absl::MutexLock lock(&mu_);
    return asleep_;
  }
  void SetAsleep(Tags tags) {
    absl::MutexLock lock(&mu_);
    asleep_ = std::move(tags);
  }

  Options asked_options;
  Tags woken;
  absl::Status wake_status;

 private:
  mutable absl::Mutex mu_;
  Tags asleep_;
};

inline std::string ReasonOfWire(const grpc::Status& status) {
  google::rpc::Status wire;
  google::rpc::ErrorInfo info;
  if (!wire.ParseFromString(status.error_details())) return "no details";
  for (const auto& any : wire.details()) {
    if (any.UnpackTo(&info)) return info.reason();
  }
  return "no reason";
}

// Whether grpc.health.v1.Health/Check says SERVING of a service.
inline bool IsServing(const std::string& address, const std::string& service) {
  const auto stub = grpc::health::v1::Health::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  grpc::health::v1::HealthCheckResponse response;
  return stub->Check(&context, request, &response).ok() &&
         response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

class ServerTest : public testing::Test {
 protected:
  ServerTest()
      : metrics_({"test", "test", "test", "cpu", "fp32"}),
        response_executor_(2, 0),
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
    services_.images = &images_;
    services_.registry = &registry_;
    services_.metrics = &metrics_;
    services_.response_executor = &response_executor_;
    services_.message_deadlines = std::make_unique<MessageDeadlines>(absl::Seconds(60));
    services_.uploads = &uploads_;
    services_.peers = &peers_;
    services_.publisher = &publisher_;
    services_.sleep = &sleep_;
    services_.memory_by_kind = [] { return std::map<std::string, int64_t>{{"weights", 5}}; };
    services_.max_adapter_bytes = 4 << 20;
  }

  static std::unique_ptr<grpc::ClientContext> Context(int seconds = 60) {
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
    sleep_.SetAsleep(std::move(tags));
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
    Drain(absl::Minutes(1), absl::ZeroDuration());
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
  ThreadPool response_executor_;
  ThreadPool frees_;
  adapter::AdapterRegistry registry_;
  Peers peers_{Peers::Options()};
  UploadStore uploads_{{4 << 20, 8 << 20, absl::Minutes(1)}};
  CountingRunner* runner_ = nullptr;
  std::unique_ptr<engine::Engine> engine_;
  FakePublisher publisher_;
  FakeSleep sleep_;
  engine::ImageStore images_{1 << 20};
  Services services_;
  std::unique_ptr<Server> server_;
  absl::Notification hurry_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::InferenceService::Stub> inference_;
  std::unique_ptr<v1::AdapterService::Stub> adapters_;
  std::unique_ptr<v1::ControlService::Stub> control_;
};

}  // namespace dorad::rpc
