// Listeners: health, shutdown, ports and socket files.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "server/platform/net/unique_fd.h"
#include "tests/unit/rpc/server_fixture.h"

namespace dorad::rpc {
namespace {

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
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(server_->address()));
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

TEST_F(ServerTest, ASocketFileIsAtNoTimeForOtherUsers) {
  const std::string path = absl::StrCat(testing::TempDir(), "/dorad-rpc-test-", getpid(), ".mode");
  Server::Options options;
  options.listen = absl::StrCat("unix:", path);
  const mode_t before = umask(0);
  std::atomic<bool> ended{false};
  std::atomic<mode_t> seen{0};
  std::thread looking([&] {
    struct stat info;
    while (!ended) {
      if (stat(path.c_str(), &info) == 0) seen |= info.st_mode;
    }
  });
  for (int i = 0; i < 20; ++i) {
    const auto server = Server::Start(options, &services_);
    EXPECT_TRUE(server.ok()) << server.status();
    struct stat info;
    EXPECT_EQ(stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0660);
  }
  ended = true;
  looking.join();
  EXPECT_EQ(seen & S_IRWXO, 0);
  EXPECT_EQ(umask(before), 0);
}

// Such as the shared-memory socket of a server that runs: gRPC would unlink it.
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
