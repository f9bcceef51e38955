// libFuzzer target: whatever a request's bytes are, the server's conversion refuses them with
// reasons that fit into trailers, or gives the engine and the loader nothing beyond the limits.
//
// The first byte chooses the message. A Publish stream is a list of parts, each behind its length
// in two bytes.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dorad/v1/adapters.pb.h"
#include "dorad/v1/control.pb.h"
#include "dorad/v1/inference.pb.h"
#include "google/rpc/status.pb.h"
#include "server/adapter/registry/version.h"
#include "server/colocation/listener.h"
#include "server/colocation/message.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/net/unique_fd.h"
#include "server/rpc/memory_publish.h"
#include "server/rpc/page_token.h"
#include "server/rpc/publish_validation.h"
#include "server/rpc/request_validation.h"
#include "server/rpc/status.h"
#include "server/rpc/upload.h"

namespace dorad {
namespace {

constexpr size_t kMemoryBytes = 1 << 16;
constexpr int64_t kMaxImageBytes = 1 << 20;

rpc::RequestLimits Limits() {
  rpc::RequestLimits limits;
  limits.engine = {.vocab_size = 100,
                   .context_length = 64,
                   .max_tokens = 32,
                   .max_n = 8,
                   .max_logprobs_k = 5,
                   .max_chosen_ids = 10,
                   .max_stop_ids = 4,
                   .max_stop_sequences = 3,
                   .max_stop_sequence_tokens = 5,
                   .max_logit_biases = 6,
                   .max_allowed_ids = 7,
                   .max_bad_word_tokens = 8,
                   .max_draft_tokens = 9,
                   .max_score_tokens = 256,
                   .max_queued_requests = 16,
                   .max_queued_tokens = 1024};
  return limits;
}

void CheckStatus(const absl::Status& status) {
  const grpc::Status wire = rpc::ToGrpc(status);
  if (status.ok()) return;
  DORAD_CHECK(status.code() != absl::StatusCode::kInternal);
  DORAD_CHECK(!ReasonOf(status).empty());
  DORAD_CHECK(wire.error_message().size() <= rpc::kMaxMessageBytes);
  google::rpc::Status details;
  DORAD_CHECK(details.ParseFromString(wire.error_details()));
  DORAD_CHECK(details.details_size() > 0);
}

void CheckIds(const std::vector<int32_t>& ids, size_t most) {
  DORAD_CHECK(ids.size() <= most);
  for (const int32_t id : ids) DORAD_CHECK(id >= 0 && id < Limits().engine.vocab_size);
}

void Check(const v1::GenerateRequest& request) {
  const engine::EngineLimits limits = Limits().engine;
  const auto input = rpc::ParseGenerate(request, Limits(), {"default", 1});
  CheckStatus(input.status());
  if (!input.ok()) return;
  DORAD_CHECK(!input->prompt.empty());
  CheckIds(input->prompt, static_cast<size_t>(limits.context_length));
  CheckIds(input->stop.stop_token_ids, static_cast<size_t>(limits.max_stop_ids));
  DORAD_CHECK(input->stop.stop_sequences.size() <= static_cast<size_t>(limits.max_stop_sequences));
  for (const std::vector<int32_t>& sequence : input->stop.stop_sequences) {
    DORAD_CHECK(!sequence.empty());
    CheckIds(sequence, static_cast<size_t>(limits.max_stop_sequence_tokens));
  }
  CheckIds(input->logprobs.chosen_ids, static_cast<size_t>(limits.max_chosen_ids));
  const engine::LogitParams& logits = input->logits;
  CheckIds(logits.bias_ids, static_cast<size_t>(limits.max_logit_biases));
  CheckIds(logits.allowed_ids, static_cast<size_t>(limits.max_allowed_ids));
  DORAD_CHECK(logits.biases.size() == logits.bias_ids.size());
  for (const float bias : logits.biases) DORAD_CHECK(bias >= -100 && bias <= 100);
  size_t bad_tokens = 0;
  for (const std::vector<int32_t>& word : logits.bad_words) {
    DORAD_CHECK(!word.empty());
    bad_tokens += word.size();
    CheckIds(word, static_cast<size_t>(limits.max_bad_word_tokens));
  }
  DORAD_CHECK(bad_tokens <= static_cast<size_t>(limits.max_bad_word_tokens));
  DORAD_CHECK(input->drafts.size() <= static_cast<size_t>(input->n));
  for (const std::vector<int32_t>& draft : input->drafts) {
    CheckIds(draft, static_cast<size_t>(limits.max_draft_tokens));
  }
  DORAD_CHECK(logits.presence_penalty >= -2 && logits.presence_penalty <= 2);
  DORAD_CHECK(logits.frequency_penalty >= -2 && logits.frequency_penalty <= 2);
  DORAD_CHECK(logits.repetition_penalty > 0 && logits.repetition_penalty <= 100);
  DORAD_CHECK(input->n >= 1 && input->n <= limits.max_n);
  DORAD_CHECK(input->stop.max_tokens >= 1 && input->stop.max_tokens <= limits.max_tokens);
  DORAD_CHECK(input->stop.min_tokens >= 0 && input->stop.min_tokens <= input->stop.max_tokens);
  DORAD_CHECK(input->sampling.temperature >= 0 && input->sampling.temperature <= 100);
  DORAD_CHECK(input->sampling.top_p > 0 && input->sampling.top_p <= 1);
  DORAD_CHECK(input->sampling.min_p >= 0 && input->sampling.min_p <= 1);
  DORAD_CHECK(input->sampling.top_k >= 0);
  DORAD_CHECK(input->logprobs.top_k >= 0 && input->logprobs.top_k <= limits.max_logprobs_k);
  DORAD_CHECK(!input->request_id.empty() && input->request_id.size() <= rpc::kMaxRequestIdBytes);
  DORAD_CHECK(input->cache_salt.size() <= rpc::kMaxCacheSaltBytes);
}

void Check(const v1::ScoreRequest& request) {
  const engine::EngineLimits limits = Limits().engine;
  const auto parsed = rpc::ParseScore(request, Limits(), {"default", 1});
  CheckStatus(parsed.status());
  if (!parsed.ok()) return;
  DORAD_CHECK(!parsed->input.sequences.empty() && !parsed->adapters.empty());
  int64_t tokens = 0;
  for (const std::vector<int32_t>& sequence : parsed->input.sequences) {
    CheckIds(sequence, static_cast<size_t>(limits.context_length));
    tokens += static_cast<int64_t>(sequence.size() * parsed->adapters.size());
  }
  DORAD_CHECK(tokens <= limits.max_score_tokens);
  CheckIds(parsed->input.chosen_ids, static_cast<size_t>(limits.max_chosen_ids));
  DORAD_CHECK(parsed->input.top_k >= 0 && parsed->input.top_k <= limits.max_logprobs_k);
  DORAD_CHECK(parsed->input.temperature > 0);
}

void Check(const v1::AbortRequest& request) {
  const auto target = rpc::ParseAbort(request);
  CheckStatus(target.status());
  if (!target.ok()) return;
  DORAD_CHECK(target->all || !target->adapter.is_base() || !target->request_ids.empty());
}

void Check(const v1::PauseRequest& request) { CheckStatus(rpc::ParsePause(request).status()); }

void Check(const v1::LimitGpuShareRequest& request) {
  const auto options = rpc::ParseGpuShareLimit(request);
  CheckStatus(options.status());
  if (!options.ok()) return;
  DORAD_CHECK(options->share >= rpc::kMinGpuShare && options->share <= 1);
  DORAD_CHECK(options->time > absl::ZeroDuration());
  DORAD_CHECK(options->time <= rpc::kMaxGpuShareTime);
}

void Check(const v1::EndGpuShareLimitRequest& request) { CheckStatus(rpc::CheckLimitId(request)); }

void Check(const v1::ListRequest& request) {
  const auto position = rpc::ParsePageToken(request.page_token(), request.name());
  CheckStatus(position.status());
  if (!position.ok()) return;
  const auto again = rpc::ParsePageToken(rpc::MakePageToken(*position), request.name());
  DORAD_CHECK(again.ok() && again->name == position->name && again->version == position->version);
}

// What Get, Resume and all who name an adapter do with it.
void Check(const v1::GetRequest& request) {
  const auto ref = adapter::AdapterRef::Parse(request.adapter());
  CheckStatus(ref.status());
  if (!ref.ok()) return;
  DORAD_CHECK(ref->is_base() || adapter::IsValidAdapterName(ref->name));
  const auto again = adapter::AdapterRef::Parse(ref->ToString());
  DORAD_CHECK(again.ok() && *again == *ref);
}

// As PublishFromPath, Activate and Retire begin.
void Check(const v1::PublishFromPathRequest& request) {
  std::vector<Violation> violations;
  rpc::ParsePublishOptions(request, &violations);
  rpc::CheckPath(request.path(), &violations);
  CheckStatus(rpc::CheckAdapterVersion("ActivateRequest", request.name(), request.version()));
  if (!violations.empty()) CheckStatus(MakeInvalid("PublishFromPathRequest", violations));
}

void CheckUpload(std::string_view bytes) {
  rpc::Upload upload(kMaxImageBytes, /*has_store=*/true,
                     std::make_shared<rpc::UploadBudget>(kMaxImageBytes));
  while (bytes.size() >= 2) {
    const size_t length = static_cast<uint8_t>(bytes[0]) * 256u + static_cast<uint8_t>(bytes[1]);
    const std::string_view part = bytes.substr(2, length);
    bytes.remove_prefix(2 + part.size());
    v1::PublishRequest request;
    if (!request.ParseFromArray(part.data(), static_cast<int>(part.size()))) return;
    const absl::Status status = upload.Accept(&request);
    CheckStatus(status);
    DORAD_CHECK(upload.received() <= static_cast<uint64_t>(kMaxImageBytes));
    if (!status.ok() || upload.committed()) break;
  }
  if (!upload.committed()) return;
  DORAD_CHECK(adapter::IsValidAdapterName(upload.TakeOptions().name));
  DORAD_CHECK(!upload.TakeConfig().empty());
}

// A connection with one registered memory.
class SharedMemory {
 public:
  SharedMemory() {
    std::string folder = (std::filesystem::temp_directory_path() / "request_fuzz.XXXXXX").string();
    DORAD_CHECK(mkdtemp(folder.data()) != nullptr);
    shared_memory::Listener::Options options;
    options.path = folder + "/socket";
    auto listener = shared_memory::Listener::Start(options);
    DORAD_CHECK(listener.ok());
    listener_ = *std::move(listener);
    Connect(options.path);
    std::filesystem::remove_all(folder);
  }

  const shared_memory::Listener* listener() const { return listener_.get(); }
  const std::string& session_token() const { return session_token_; }

 private:
  void Connect(const std::string& path) {
    const UniqueFd memory(memfd_create("fuzz", MFD_CLOEXEC));
    DORAD_CHECK(ftruncate(memory.get(), kMemoryBytes) == 0);
    socket_ = UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    DORAD_CHECK(path.size() < sizeof(address.sun_path));
    std::memcpy(address.sun_path, path.c_str(), path.size());
    DORAD_CHECK(
        connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
    std::array<char, shared_memory::kRegistrationBytes> registration{};
    std::memcpy(registration.data(), "DORADMEM\1", 9);
    const uint64_t size = kMemoryBytes;
    std::memcpy(registration.data() + 16, &size, sizeof(size));
    iovec piece{registration.data(), registration.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = memory.get();
    std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    DORAD_CHECK(sendmsg(socket_.get(), &message, 0) == static_cast<ssize_t>(registration.size()));
    std::array<char, shared_memory::kMaxAnswerBytes> answer{};
    DORAD_CHECK(recv(socket_.get(), answer.data(), answer.size(), 0) >= 24 && answer[0] == 0);
    session_token_.assign(answer.data() + 8, shared_memory::kSessionTokenBytes);
  }

  std::unique_ptr<shared_memory::Listener> listener_;
  UniqueFd socket_;
  std::string session_token_;
};

void Check(v1::PublishFromMemoryRequest request) {
  static const SharedMemory shared_memory;
  // Nobody guesses a session_token.
  request.set_session_token(shared_memory.session_token());
  const auto publish = rpc::ParseMemoryPublish(request, shared_memory.listener());
  CheckStatus(publish.status());
  if (!publish.ok()) return;
  for (const adapter::PeerTensor& tensor : publish->peer.tensors) {
    DORAD_CHECK(tensor.offset <= kMemoryBytes && tensor.bytes <= kMemoryBytes - tensor.offset);
  }
  const auto image = adapter::CopyToImage(publish->peer, kMaxImageBytes);
  if (image.ok()) {
    DORAD_CHECK(image->size() <= static_cast<size_t>(kMaxImageBytes));
    (void)SafetensorsFile::Parse(Share(*image), "memory");
  } else {
    CheckStatus(image.status());
  }
}

template <typename Request>
void CheckBytes(std::string_view bytes) {
  Request request;
  if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  Check(request);
}

void CheckInput(std::string_view bytes) {
  const std::string_view message = bytes.substr(1);
  switch (static_cast<uint8_t>(bytes[0]) % 11) {
    case 0:
      return CheckBytes<v1::GenerateRequest>(message);
    case 1:
      return CheckBytes<v1::ScoreRequest>(message);
    case 2:
      return CheckBytes<v1::AbortRequest>(message);
    case 3:
      return CheckBytes<v1::PauseRequest>(message);
    case 4:
      return CheckBytes<v1::LimitGpuShareRequest>(message);
    case 5:
      return CheckBytes<v1::EndGpuShareLimitRequest>(message);
    case 6:
      return CheckBytes<v1::ListRequest>(message);
    case 7:
      return CheckBytes<v1::GetRequest>(message);
    case 8:
      return CheckBytes<v1::PublishFromPathRequest>(message);
    case 9:
      return CheckBytes<v1::PublishFromMemoryRequest>(message);
    default:
      return CheckUpload(message);
  }
}

}  // namespace
}  // namespace dorad

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 0) dorad::CheckInput({reinterpret_cast<const char*>(data), size});
  return 0;
}
