#include "server/engine/admission.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/metrics/metrics.h"

namespace dorad::engine {
namespace {

constexpr absl::Duration kRetryQueueFull = absl::Milliseconds(200);
constexpr absl::Duration kRetryPaused = absl::Seconds(1);
constexpr absl::Duration kRetryShuttingDown = absl::Seconds(1);

}  // namespace

absl::Status ShuttingDown() {
  // Behind a load balancer the retry reaches another server.
  return WithRetryAfter(
      MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "the server is shutting down"),
      kRetryShuttingDown);
}

absl::Status EnginePaused(const Pauses::Stop& stop) {
  return WithRetryAfter(
      WithMetadata(
          MakeError(absl::StatusCode::kUnavailable, "ENGINE_PAUSED",
                    absl::StrCat("new requests are refused: ", Pauses::Explain(stop, SteadyNow()))),
          "paused", stop.scope.is_base() ? "all" : stop.scope.ToString()),
      kRetryPaused);
}

absl::StatusOr<RequestHandle> Admission::Admit(std::unique_ptr<Request> request, Enter enter) {
  const int64_t tokens = request->load_tokens();
  const RequestKind kind = request->generate ? RequestKind::kGenerate : RequestKind::kScore;
  const std::vector<std::string> adapters = request->adapters();
  RequestHandle handle{request->key()};
  absl::MutexLock lock(&mu_);
  if (absl::Status status = Check(*request, tokens); !status.ok()) {
    metrics_->RequestRefused(kind, ReasonOf(status));
    return status;
  }
  handle.number = request->number = next_number_++;
  ++queue_.requests;
  queue_.tokens += tokens;
  for (const std::string& adapter : adapters) ++users_[adapter].waiting;
  metrics_->RequestAdmitted(kind);
  inbox_.push_back([enter = std::move(enter), entering = request.get()] { enter(entering); });
  live_.emplace(handle.key, std::move(request));
  return handle;
}

absl::Status Admission::Check(const Request& request, int64_t tokens) const {
  if (closing_ || draining_) return ShuttingDown();
  for (const Pauses::Stop& stop : refused_) {
    if (Pauses::Covers(stop.scope, request)) return EnginePaused(stop);
  }
  if (sleeping_) {
    return WithRetryAfter(MakeError(absl::StatusCode::kUnavailable, "SERVER_SLEEPING",
                                    "the server sleeps; Wake ends it"),
                          kRetryPaused);
  }
  if (request.deadline <= request.admitted) {
    return MakeError(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
                     "the deadline passed before admission");
  }
  if (live_.contains(request.key())) {
    return MakeError(absl::StatusCode::kAlreadyExists, "REQUEST_ID_IN_USE",
                     absl::StrCat("a running request has the id ", request.base().request_id));
  }
  // An empty queue accepts one request of any size: validation has bounded it.
  if (queue_.requests > 0 && (queue_.requests >= limits_.max_queued_requests ||
                              queue_.tokens + tokens > limits_.max_queued_tokens)) {
    return WithRetryAfter(MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                                    absl::StrCat("the queue holds ", queue_.requests,
                                                 " requests and ", queue_.tokens, " tokens")),
                          kRetryQueueFull);
  }
  return absl::OkStatus();
}

void Admission::Post(Message message) {
  absl::MutexLock lock(&mu_);
  inbox_.push_back(std::move(message));
}

void Admission::SetSleeping(bool refuses) {
  absl::MutexLock lock(&mu_);
  sleeping_ = refuses;
}

void Admission::StopAdmission() {
  absl::MutexLock lock(&mu_);
  draining_ = true;
}

void Admission::Close() {
  absl::MutexLock lock(&mu_);
  closing_ = true;
}

EngineLimits Admission::limits() const {
  absl::MutexLock lock(&mu_);
  return limits_;
}

void Admission::SetLimits(const EngineLimits& limits) {
  absl::MutexLock lock(&mu_);
  limits_ = limits;
}

bool Admission::idle() const {
  absl::MutexLock lock(&mu_);
  return inbox_.empty() && live_.empty();
}

int64_t Admission::live_count() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int64_t>(live_.size());
}

Admission::Queue Admission::queue() const {
  absl::MutexLock lock(&mu_);
  return queue_;
}

AdaptersInUse Admission::adapters_in_use() const {
  AdaptersInUse in_use;
  absl::MutexLock lock(&mu_);
  for (const auto& [adapter, users] : users_) {
    if (users.running > 0) in_use.running.push_back(adapter);
    if (users.waiting > 0) in_use.waiting.push_back(adapter);
  }
  return in_use;
}

std::vector<Admission::Message> Admission::Take(absl::Duration patience, bool* stop) {
  absl::MutexLock lock(&mu_);
  if (patience > absl::ZeroDuration()) {
    const auto wake = [this]()
                          ABSL_SHARED_LOCKS_REQUIRED(mu_) { return closing_ || !inbox_.empty(); };
    mu_.AwaitWithTimeout(absl::Condition(&wake), patience);
  }
  *stop = closing_;
  return std::exchange(inbox_, {});
}

void Admission::SetRefused(std::vector<Pauses::Stop> pauses) {
  absl::MutexLock lock(&mu_);
  refused_ = std::move(pauses);
}

void Admission::Started(const Request& request) {
  const std::vector<std::string> adapters = request.adapters();
  absl::MutexLock lock(&mu_);
  --queue_.requests;
  queue_.tokens -= request.load_tokens();
  for (const std::string& adapter : adapters) {
    Users& users = users_[adapter];
    --users.waiting;
    ++users.running;
  }
}

std::vector<Request*> Admission::Live() const {
  std::vector<Request*> live;
  absl::MutexLock lock(&mu_);
  live.reserve(live_.size());
  for (const auto& [key, request] : live_) {
    if (request->entered) live.push_back(request.get());
  }
  return live;
}

Request* Admission::Find(const std::string& key) const {
  absl::MutexLock lock(&mu_);
  const auto found = live_.find(key);
  return found == live_.end() ? nullptr : found->second.get();
}

std::unique_ptr<Request> Admission::Ended(Request* request) {
  const std::vector<std::string> adapters = request->adapters();
  absl::MutexLock lock(&mu_);
  for (const std::string& adapter : adapters) {
    const auto users = users_.find(adapter);
    if (--users->second.running == 0 && users->second.waiting == 0) users_.erase(users);
  }
  auto node = live_.extract(request->key());
  DORAD_CHECK(!node.empty() && node.mapped().get() == request);
  return std::move(node.mapped());
}

}  // namespace dorad::engine
