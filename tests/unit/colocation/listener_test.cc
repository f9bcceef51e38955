#include "server/colocation/listener.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "server/colocation/unix_socket.h"
#include "tests/unit/support/test.h"

namespace dorad::shared_memory {
namespace {

struct Answer {
  uint32_t code = 99;  // no answer
  uint32_t index = 0;
  std::string session_token;
  std::string text;
  std::vector<UniqueFd> fds;
};

std::string MakeRegistration(uint32_t kind, uint64_t size) {
  std::string registration("DORADMEM");
  registration.resize(kRegistrationBytes);
  std::memcpy(registration.data() + 8, &kind, sizeof(kind));
  std::memcpy(registration.data() + 16, &size, sizeof(size));
  return registration;
}

std::string AskForWeights(uint64_t first) {
  std::string request("DORADGET");
  request.append(reinterpret_cast<const char*>(&first), sizeof(first));
  return request;
}

// A file in memory with the numbers 0, 1, 2, ...
UniqueFd MakeMemory(size_t size) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC));
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i);
  EXPECT_EQ(write(fd.get(), bytes.data(), size), static_cast<ssize_t>(size));
  return fd;
}

int OpenDescriptors() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    (void)entry;
    ++count;
  }
  return count;
}

// Weights of a few pieces: memory files of 1, 2, 3, ... bytes.
class Pieces final : public WeightsLease {
 public:
  Pieces(size_t count, std::atomic<int>* leases) : count_(count), leases_(*leases) { ++leases_; }
  ~Pieces() override { --leases_; }

  absl::StatusOr<std::vector<UniqueFd>> Share(size_t first, size_t max) const override {
    std::vector<UniqueFd> fds;
    for (size_t i = first; i < count_ && fds.size() < max; ++i) fds.push_back(MakeMemory(i + 1));
    return fds;
  }

 private:
  const size_t count_;
  std::atomic<int>& leases_;
};

off_t SizeOf(const UniqueFd& fd) {
  struct stat info;
  return fstat(fd.get(), &info) == 0 ? info.st_size : -1;
}

// The other end.
class Peer {
 public:
  explicit Peer(const std::string& path) : fd_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    connected_ =
        connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }

  bool connected() const { return connected_; }

  Answer Send(const std::string& message, const std::vector<int>& fds = {}) {
    iovec from = {const_cast<char*>(message.data()), message.size()};
    msghdr header = {};
    header.msg_iov = &from;
    header.msg_iovlen = 1;
    std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
    if (!fds.empty()) {
      header.msg_control = control.data();
      header.msg_controllen = control.size();
      cmsghdr* part = CMSG_FIRSTHDR(&header);
      part->cmsg_level = SOL_SOCKET;
      part->cmsg_type = SCM_RIGHTS;
      part->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(part), fds.data(), fds.size() * sizeof(int));
    }
    (void)sendmsg(fd_.get(), &header, MSG_NOSIGNAL);
    return Receive();
  }

  Answer Receive() {
    char buffer[kMaxAnswerBytes + 1];
    char control[CMSG_SPACE(kMaxSentFds * sizeof(int))];
    iovec into = {buffer, sizeof(buffer)};
    msghdr header = {};
    header.msg_iov = &into;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    const ssize_t n = recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC);
    Answer answer;
    if (n < 24) return answer;
    for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr;
         part = CMSG_NXTHDR(&header, part)) {
      for (size_t at = CMSG_LEN(0); at < part->cmsg_len; at += sizeof(int)) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(part) + at - CMSG_LEN(0), sizeof(fd));
        answer.fds.emplace_back(fd);
      }
    }
    std::memcpy(&answer.code, buffer, 4);
    std::memcpy(&answer.index, buffer + 4, 4);
    answer.session_token.assign(buffer + 8, kSessionTokenBytes);
    answer.text.assign(buffer + 24, static_cast<size_t>(n) - 24);
    return answer;
  }

  // The server has closed its end.
  bool Ended() {
    pollfd polled = {fd_.get(), POLLRDHUP, 0};
    return poll(&polled, 1, 20000) == 1;
  }

 private:
  UniqueFd fd_;
  bool connected_ = false;
};

class SharedMemoryListenerTest : public ::testing::Test {
 protected:
  SharedMemoryListenerTest() {
    options_.path = (std::filesystem::path(::testing::TempDir()) /
                     absl::StrCat("shared_memory_", getpid(), ".sock"))
                        .string();
  }

  void Start() {
    auto started = Listener::Start(options_);
    ASSERT_TRUE(started.ok()) << started.status();
    listener_ = *std::move(started);
  }

  Answer RegisterFile(Peer& peer, int fd, uint64_t size) {
    return peer.Send(MakeRegistration(1, size), {fd});
  }

  Listener::Options options_;
  std::unique_ptr<Listener> listener_;
};

TEST_F(SharedMemoryListenerTest, HoldsWhatWasHandedOverUntilTheConnectionEnds) {
  Start();
  const UniqueFd memory = MakeMemory(100);
  std::string session_token;
  {
    Peer peer(options_.path);
    const Answer first = RegisterFile(peer, memory.get(), 100);
    const Answer second = RegisterFile(peer, memory.get(), 60);
    EXPECT_EQ(first.code, 0u) << first.text;
    EXPECT_EQ(first.index, 0u);
    EXPECT_EQ(second.index, 1u);
    EXPECT_EQ(first.session_token, second.session_token);
    session_token = first.session_token;
    const auto session = listener_->Find(session_token);
    ASSERT_TRUE(session.ok()) << session.status();
    EXPECT_TRUE((*session)->open());
    EXPECT_EQ((*session)->memory(1)->size(), 60u);
    EXPECT_EQ((*session)->memory(2), nullptr);
    std::vector<std::byte> bytes(3);
    ASSERT_TRUE((*session)->memory(0)->Read(97, absl::MakeSpan(bytes)).ok());
    EXPECT_EQ(std::to_integer<int>(bytes[2]), 99);
    EXPECT_EQ(listener_->stats().connections, 1);
    EXPECT_EQ(listener_->stats().memory_bytes, 160);
  }
  EXPECT_TRUE(Eventually([&] { return !listener_->Find(session_token).ok(); }));
  EXPECT_EQ(ReasonOf(listener_->Find(session_token).status()), "SHARED_MEMORY_SESSION_UNKNOWN");
  EXPECT_EQ(listener_->stats().memory_bytes, 0);
}

TEST_F(SharedMemoryListenerTest, WhoReadsKeepsTheMemoryButIsToldThatItIsNotWanted) {
  Start();
  auto peer = std::make_unique<Peer>(options_.path);
  const UniqueFd memory = MakeMemory(10);
  const auto session = *listener_->Find(RegisterFile(*peer, memory.get(), 10).session_token);
  peer.reset();
  // The kernel says so before the listener's thread has run.
  EXPECT_FALSE(session->open());
  EXPECT_TRUE(Eventually([&] { return listener_->stats().connections == 0; }));
  std::vector<std::byte> bytes(10);
  EXPECT_TRUE(session->memory(0)->Read(0, absl::MakeSpan(bytes)).ok());
}

TEST_F(SharedMemoryListenerTest, EveryConnectionHasASessionTokenOfItsOwn) {
  Start();
  const UniqueFd memory = MakeMemory(10);
  Peer one(options_.path), other(options_.path);
  EXPECT_NE(RegisterFile(one, memory.get(), 10).session_token,
            RegisterFile(other, memory.get(), 10).session_token);
}

TEST_F(SharedMemoryListenerTest, RefusesOtherUsers) {
  for (const std::optional<uint32_t> user :
       {std::optional<uint32_t>(geteuid() + 1), std::optional<uint32_t>()}) {
    options_.peer_user = [user](int) { return user; };
    Start();
    Peer peer(options_.path);
    const UniqueFd memory = MakeMemory(10);
    const Answer answer = RegisterFile(peer, memory.get(), 10);
    EXPECT_EQ(answer.code, static_cast<uint32_t>(absl::StatusCode::kPermissionDenied));
    EXPECT_THAT(answer.text, StartsWith("SHARED_MEMORY_PEER_REFUSED "));
    EXPECT_EQ(answer.session_token, std::string(kSessionTokenBytes, '\0'));
    EXPECT_TRUE(peer.Ended());
    listener_.reset();
  }
}

TEST_F(SharedMemoryListenerTest, KnowsThePeersUser) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
  const UniqueFd one(ends[0]), other(ends[1]);
  EXPECT_EQ(Listener::PeerUser(one.get()), geteuid());
  EXPECT_EQ(Listener::PeerUser(-1), std::nullopt);
}

TEST_F(SharedMemoryListenerTest, TheSocketFileIsItsOwnersAloneAndGoesWithIt) {
  Start();
  struct stat info;
  ASSERT_EQ(stat(options_.path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(ReasonOf(Listener::Start(options_).status()), "SHARED_MEMORY_SOCKET_IN_USE");
  EXPECT_TRUE(Peer(options_.path).connected()) << "a second listener took the file away";
  listener_.reset();
  EXPECT_NE(stat(options_.path.c_str(), &info), 0);
}

TEST_F(SharedMemoryListenerTest, ReplacesADeadProcesssSocketButNoOtherFile) {
  { ASSERT_TRUE(ListenUnix(options_.path).ok()); }
  Start();
  listener_.reset();
  const UniqueFd file(open(options_.path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
  EXPECT_EQ(ReasonOf(Listener::Start(options_).status()), "SHARED_MEMORY_SOCKET_IN_USE");
  EXPECT_EQ(unlink(options_.path.c_str()), 0);
}

TEST_F(SharedMemoryListenerTest, RefusesPathsThatNoSocketCanHave) {
  for (const std::string& path : {std::string(200, 'x'), std::string("a\0b", 3)}) {
    options_.path = path;
    EXPECT_EQ(ReasonOf(Listener::Start(options_).status()), "LISTEN_ADDRESS");
  }
}

TEST_F(SharedMemoryListenerTest, RefusesBrokenRegistrationsAndClosesTheirDescriptors) {
  Start();
  const UniqueFd memory = MakeMemory(10);
  const int fd = memory.get();
  const std::string good = MakeRegistration(1, 10);
  std::string magic = good, zero = good, handle = good;
  magic[0] = 'd';
  zero[12] = 1;
  handle[30] = 1;
  const int before = OpenDescriptors();
  const std::vector<std::pair<std::string, std::vector<int>>> broken = {
      {good.substr(0, kRegistrationBytes - 1), {fd}},  // truncated
      {good + "x", {fd}},                              // too long
      {"x", {fd}},
      {magic, {fd}},
      {zero, {fd}},
      {handle, {fd}},
      {good, {}},        // a descriptor too few
      {good, {fd, fd}},  // too many
      {good, std::vector<int>(50, fd)},
      {MakeRegistration(3, 10), {}},
      {MakeRegistration(2, 10), {fd}},
      {MakeRegistration(1, 0), {fd}},
      {MakeRegistration(1, UINT64_MAX), {fd}},
  };
  for (const auto& [message, fds] : broken) {
    Peer peer(options_.path);
    const Answer answer = peer.Send(message, fds);
    EXPECT_EQ(answer.code, static_cast<uint32_t>(absl::StatusCode::kInvalidArgument));
    EXPECT_THAT(answer.text, StartsWith("SHARED_MEMORY_MESSAGE_INVALID "));
    EXPECT_TRUE(peer.Ended());
  }
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() == before; }));
}

TEST_F(SharedMemoryListenerTest, RefusesWhatIsNoMemoryOrTooShort) {
  Start();
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd out(ends[0]), in(ends[1]);
  const UniqueFd program(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  const UniqueFd memory = MakeMemory(10);
  const UniqueFd unreadable(
      open(absl::StrCat("/proc/self/fd/", memory.get()).c_str(), O_WRONLY | O_CLOEXEC));
  ASSERT_TRUE(unreadable.ok());
  for (const auto& [fd, size] : std::vector<std::pair<int, uint64_t>>{
           {out.get(), 1}, {program.get(), 1}, {unreadable.get(), 10}, {memory.get(), 11}}) {
    Peer peer(options_.path);
    EXPECT_THAT(RegisterFile(peer, fd, size).text, StartsWith("SHARED_MEMORY_MEMORY_INVALID "));
  }
}

TEST_F(SharedMemoryListenerTest, MemoryThatBecomesShorterFailsItsReader) {
  Start();
  Peer peer(options_.path);
  const UniqueFd memory = MakeMemory(10000);
  const auto session = *listener_->Find(RegisterFile(peer, memory.get(), 10000).session_token);
  ASSERT_EQ(ftruncate(memory.get(), 5000), 0);
  std::vector<std::byte> bytes(10000);
  const absl::Status status = session->memory(0)->Read(0, absl::MakeSpan(bytes));
  EXPECT_EQ(ReasonOf(status), "SHARED_MEMORY_MEMORY_INVALID");
  EXPECT_THAT(std::string(status.message()), HasSubstr("shorter"));
}

TEST_F(SharedMemoryListenerTest, BoundsConnectionsFilesAndMemories) {
  options_.max_connections = 2;
  options_.max_files = 3;
  Start();
  const UniqueFd memory = MakeMemory(10);
  Peer one(options_.path);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(RegisterFile(one, memory.get(), 10).code, 0u);
  Peer other(options_.path);
  EXPECT_EQ(RegisterFile(other, memory.get(), 10).code, 0u);
  Peer third(options_.path);
  EXPECT_THAT(third.Receive().text, StartsWith("SHARED_MEMORY_TOO_MANY "));
  EXPECT_THAT(RegisterFile(one, memory.get(), 10).text, StartsWith("SHARED_MEMORY_TOO_MANY "));
  EXPECT_TRUE(one.Ended());
  EXPECT_EQ(RegisterFile(other, memory.get(), 10).code, 0u) << "others suffer";
  listener_.reset();

  options_.max_files = 16;
  options_.max_memories = 2;
  Start();
  Peer last(options_.path);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(RegisterFile(last, memory.get(), 10).code, 0u);
  EXPECT_THAT(RegisterFile(last, memory.get(), 10).text, StartsWith("SHARED_MEMORY_TOO_MANY "));
}

TEST_F(SharedMemoryListenerTest, ASilentConnectionIsEndedAndOneThatHandedOverIsNot) {
  options_.first_registration_time = absl::Seconds(1);
  Start();
  Peer silent(options_.path), useful(options_.path);
  const UniqueFd memory = MakeMemory(10);
  const Answer answer = RegisterFile(useful, memory.get(), 10);
  EXPECT_TRUE(silent.Ended());
  EXPECT_TRUE(listener_->Find(answer.session_token).ok());
}

TEST_F(SharedMemoryListenerTest, LeasesTheWeightsPiecesUntilTheConnectionEnds) {
  std::atomic<int> leases{0};
  options_.lease_weights = [&] {
    return std::make_shared<const Pieces>(kMaxPiecesAtOnce + 3, &leases);
  };
  options_.first_registration_time = absl::Seconds(1);
  Start();
  const int before = OpenDescriptors();
  std::string session_token;
  {
    Peer peer(options_.path);
    const Answer first = peer.Send(AskForWeights(0));
    EXPECT_EQ(first.code, 0u) << first.text;
    EXPECT_EQ(first.index, kMaxPiecesAtOnce);
    ASSERT_EQ(first.fds.size(), kMaxPiecesAtOnce);
    EXPECT_EQ(SizeOf(first.fds[5]), 6);
    const Answer rest = peer.Send(AskForWeights(kMaxPiecesAtOnce));
    ASSERT_EQ(rest.fds.size(), 3u);
    EXPECT_EQ(SizeOf(rest.fds[0]), static_cast<off_t>(kMaxPiecesAtOnce + 1));
    const Answer none = peer.Send(AskForWeights(UINT64_MAX));
    EXPECT_EQ(none.code, 0u) << none.text;
    EXPECT_TRUE(none.fds.empty());
    EXPECT_EQ(leases, 1) << "of one connection";
    absl::SleepFor(2 * options_.first_registration_time);
    session_token = first.session_token;
    EXPECT_TRUE(listener_->Find(session_token).ok()) << "its time was over";
    const UniqueFd memory = MakeMemory(10);
    EXPECT_EQ(RegisterFile(peer, memory.get(), 10).session_token, session_token);
    Peer other(options_.path);
    EXPECT_EQ(other.Send(AskForWeights(0)).code, 0u);
    EXPECT_EQ(leases, 2);
  }
  EXPECT_TRUE(Eventually([&] { return leases == 0; }));
  EXPECT_FALSE(listener_->Find(session_token).ok());
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() == before; }));
}

TEST_F(SharedMemoryListenerTest, LeasesNothingToOtherUsersOrOnBrokenRequests) {
  std::atomic<int> leases{0};
  options_.lease_weights = [&] { return std::make_shared<const Pieces>(1, &leases); };
  Start();
  const UniqueFd memory = MakeMemory(10);
  const std::vector<std::pair<std::string, std::vector<int>>> broken = {
      {AskForWeights(0) + "x", {}}, {"DORADGET", {}}, {AskForWeights(0), {memory.get()}}};
  for (const auto& [message, fds] : broken) {
    Peer peer(options_.path);
    EXPECT_THAT(peer.Send(message, fds).text, StartsWith("SHARED_MEMORY_MESSAGE_INVALID "));
    EXPECT_TRUE(peer.Ended());
  }
  listener_.reset();
  options_.peer_user = [](int) { return geteuid() + 1; };
  Start();
  Peer peer(options_.path);
  const Answer answer = peer.Send(AskForWeights(0));
  EXPECT_THAT(answer.text, StartsWith("SHARED_MEMORY_PEER_REFUSED "));
  EXPECT_TRUE(answer.fds.empty());
  EXPECT_TRUE(peer.Ended());
  EXPECT_EQ(leases, 0);
}

TEST_F(SharedMemoryListenerTest, AWeightsRefusalEndsTheConnection) {
  Start();
  EXPECT_THAT(Peer(options_.path).Send(AskForWeights(0)).text,
              StartsWith("SHARED_MEMORY_MESSAGE_INVALID the server has no weights"));
  listener_.reset();
  options_.lease_weights = [] {
    return absl::StatusOr<std::shared_ptr<const WeightsLease>>(
        MakeError(absl::StatusCode::kUnavailable, "SERVER_SLEEPING", "injected"));
  };
  Start();
  Peer peer(options_.path);
  EXPECT_EQ(peer.Send(AskForWeights(0)).text, "SERVER_SLEEPING injected");
  EXPECT_TRUE(peer.Ended());
}

TEST_F(SharedMemoryListenerTest, MemoryOnAGpuNeedsAnOpener) {
  Start();
  EXPECT_THAT(Peer(options_.path).Send(MakeRegistration(2, 10)).text,
              StartsWith("SHARED_MEMORY_DEVICE_UNSUPPORTED "));
  listener_.reset();
  MemoryRegistration seen;
  options_.open_device = [&](const MemoryRegistration& registration)
      -> absl::StatusOr<std::shared_ptr<const adapter::PeerMemory>> {
    seen = registration;
    return MakeError(absl::StatusCode::kInvalidArgument, "SHARED_MEMORY_MEMORY_INVALID",
                     "injected");
  };
  Start();
  std::string registration = MakeRegistration(2, 1234);
  registration[24] = 'h';
  registration[88] = 'u';
  EXPECT_EQ(Peer(options_.path).Send(registration).text, "SHARED_MEMORY_MEMORY_INVALID injected");
  EXPECT_EQ(seen.size, 1234u);
  EXPECT_EQ(std::to_integer<char>(seen.ipc_handle[0]), 'h');
  EXPECT_EQ(std::to_integer<char>(seen.device_uuid[0]), 'u');
}

}  // namespace
}  // namespace dorad::shared_memory
