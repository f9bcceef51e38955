// Uploads, AdapterService and its Watch through the services.
#include "tests/unit/rpc/server_fixture.h"

namespace dorad::rpc {
namespace {

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
  EXPECT_THAT(status.error_message(), Not(HasSubstr("secret")));
}

TEST_F(ServerTest, PassesTheLoadersRefusalOn) {
  publisher_.status = MakeInvalid("adapter", {{"lora_A", "ADAPTER_NOT_FINITE", "has a NaN"}});
  const grpc::Status status = Publish("a").first;
  EXPECT_EQ(ReasonOfWire(status), "ADAPTER_NOT_FINITE");
  EXPECT_THAT(status.error_message(), HasSubstr("lora_A"));
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

TEST_F(ServerTest, ChangesNoVersionWithAnotherDigest) {
  const auto [status, published] = Publish("a");
  ASSERT_TRUE(status.ok());
  const auto activate = [&](const std::string& digest) {
    v1::ActivateRequest request;
    request.set_name("a");
    request.set_version(1);
    request.set_digest(digest);
    v1::ActivateResponse response;
    return adapters_->Activate(Context().get(), request, &response);
  };
  const auto retire = [&](const std::string& digest) {
    v1::RetireRequest request;
    request.set_name("a");
    request.set_version(1);
    request.set_digest(digest);
    v1::RetireResponse response;
    return adapters_->Retire(Context().get(), request, &response);
  };
  const auto pause = [&](const std::string& digest) {
    v1::PauseRequest request;
    request.set_adapter("a@1:" + digest);
    request.set_allow_missing(true);
    v1::PauseResponse response;
    return control_->Pause(Context().get(), request, &response);
  };
  const std::string own = published.adapter().digest();
  const std::string other = own[0] == '0' ? "1" + own.substr(1) : "0" + own.substr(1);
  EXPECT_EQ(ReasonOfWire(activate(other)), "ADAPTER_NOT_FOUND");
  EXPECT_EQ(ReasonOfWire(retire(other)), "ADAPTER_NOT_FOUND");
  EXPECT_EQ(ReasonOfWire(pause(other)), "ADAPTER_NOT_FOUND");
  EXPECT_EQ(ReasonOfWire(activate("latest")), "DIGEST_INVALID");
  EXPECT_TRUE(pause(own).ok());
  EXPECT_TRUE(activate(own.substr(0, 12)).ok());
  EXPECT_TRUE(retire(own.substr(0, 12)).ok());
}

TEST_F(ServerTest, RetiresByForceAndEndsTheHolders) {
  ASSERT_TRUE(Publish("a").first.ok());
  runner_->step_time = 50;
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
  EXPECT_THAT(message.finish().detail(), HasSubstr("a@1"));
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

}  // namespace
}  // namespace dorad::rpc
