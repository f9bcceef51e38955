// Generate, Abort and Score through the services.

#include "tests/unit/rpc/server_fixture.h"

namespace dorad::rpc {
namespace {

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
    EXPECT_THAT(message.request_id(), MatchesRegex("r-[0-9a-f]{16}"));
    EXPECT_EQ(message.seed(), answer.messages[0].seed());
    EXPECT_TRUE(message.logprobs().empty());
  }
  EXPECT_EQ(samples.size(), 3u);
}

TEST_F(ServerTest, StreamsTokensInOrderAndEndsWithTheFinish) {
  runner_->step_time = 10;
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
  EXPECT_THAT(answer.status.error_message(), HasSubstr("n: 0 is not in [1, 128]"));
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
    EXPECT_THAT(log, HasSubstr("\"request_id\":\"" + id + "\""));
    return std::make_pair(id, log);
  };
  const std::string trace(32, 'a'), other(32, 'b'), rest = "-" + std::string(16, 'c') + "-01";
  EXPECT_THAT(ask({}).first, MatchesRegex("r-[0-9a-f]{16}"));
  EXPECT_EQ(ask({{"x-request-id", "mine"}}).first, "mine");
  EXPECT_NE(ask({{"x-request-id", "not mine!"}}).first, "not mine!");
  EXPECT_THAT(ask({{"x-request-id", "one"}, {"x-request-id", "two"}}).first, StartsWith("r-"));
  EXPECT_THAT(ask({{"traceparent", "00-" + trace + rest}}).second,
              HasSubstr("\"trace_id\":\"" + trace + "\""));
  EXPECT_THAT(
      ask({{"traceparent", "00-" + trace + rest}, {"traceparent", "00-" + other + rest}}).second,
      Not(HasSubstr("trace_id")));
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
  runner_->step_time = 50;
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
  runner_->step_time = 20;
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
  runner_->step_time = 20;
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
  runner_->step_time = 50;
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
  runner_->step_time = 50;
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

}  // namespace
}  // namespace dorad::rpc
