#include "server/rpc/encode.h"

#include <algorithm>

#include "server/rpc/packing.h"
#include "server/rpc/status.h"

namespace dorad::rpc {
namespace {

constexpr size_t kMaxFailureBytes = 4096;

v1::FinishReason ToWire(engine::FinishReason reason) {
  switch (reason) {
    case engine::FinishReason::kNone:
      return v1::FINISH_REASON_UNSPECIFIED;
    case engine::FinishReason::kStop:
      return v1::FINISH_REASON_STOP;
    case engine::FinishReason::kLength:
      return v1::FINISH_REASON_LENGTH;
    case engine::FinishReason::kAborted:
      return v1::FINISH_REASON_ABORTED;
    case engine::FinishReason::kNonFinite:
      return v1::FINISH_REASON_NON_FINITE;
  }
  return v1::FINISH_REASON_UNSPECIFIED;
}

v1::AdapterState ToWire(adapter::AdapterState state) {
  switch (state) {
    case adapter::AdapterState::kLoading:
      return v1::ADAPTER_STATE_LOADING;
    case adapter::AdapterState::kReady:
      return v1::ADAPTER_STATE_READY;
    case adapter::AdapterState::kRetiring:
      return v1::ADAPTER_STATE_RETIRING;
    case adapter::AdapterState::kGone:
      return v1::ADAPTER_STATE_GONE;
    case adapter::AdapterState::kFailed:
      return v1::ADAPTER_STATE_FAILED;
  }
  return v1::ADAPTER_STATE_UNSPECIFIED;
}

v1::WatchEventType ToWire(adapter::EventType type) {
  switch (type) {
    case adapter::EventType::kPublished:
      return v1::WATCH_EVENT_TYPE_PUBLISHED;
    case adapter::EventType::kActivated:
      return v1::WATCH_EVENT_TYPE_ACTIVATED;
    case adapter::EventType::kRetired:
      return v1::WATCH_EVENT_TYPE_RETIRED;
    case adapter::EventType::kGone:
      return v1::WATCH_EVENT_TYPE_GONE;
    case adapter::EventType::kFailed:
      return v1::WATCH_EVENT_TYPE_FAILED;
  }
  return v1::WATCH_EVENT_TYPE_UNSPECIFIED;
}

void Encode(const engine::VersionSpan& span, v1::VersionSpan* to) {
  to->set_adapter(span.adapter);
  to->set_version(span.version);
  to->set_digest(span.digest);
  to->set_begin(span.begin);
  to->set_end(span.end);
}

// Any message with the fields that GenerateResponse and SequenceScore share.
template <typename Message>
void EncodeLogprobs(const engine::Logprobs& logprobs, int32_t k, Message* to) {
  if (!logprobs.logprobs.empty()) to->set_logprobs(Pack(logprobs.logprobs));
  if (k > 0) {
    v1::TopLogprobs* top = to->mutable_top_logprobs();
    top->set_k(static_cast<uint32_t>(k));
    top->set_token_ids(Pack(logprobs.top_ids));
    top->set_logprobs(Pack(logprobs.top_logprobs));
  }
  if (!logprobs.chosen.empty()) to->set_chosen_logprobs(Pack(logprobs.chosen));
}

void Encode(const engine::Finish& finish, v1::Finish* to) {
  to->set_reason(ToWire(finish.reason));
  if (finish.stop_token_id >= 0) to->set_stop_token_id(finish.stop_token_id);
  if (finish.stop_sequence >= 0) to->set_stop_sequence(static_cast<uint32_t>(finish.stop_sequence));
  to->set_detail(finish.detail);
  v1::Usage* usage = to->mutable_usage();
  usage->set_prompt_tokens(finish.usage.prompt_tokens);
  usage->set_cached_prompt_tokens(finish.usage.cached_prompt_tokens);
  usage->set_generated_tokens(finish.usage.generated_tokens);
  usage->set_preemptions(finish.usage.preemptions);
  usage->set_draft_tokens(finish.usage.drafts.tokens);
  usage->set_accepted_draft_tokens(finish.usage.drafts.accepted);
  EncodeDuration(finish.usage.queue_time, usage->mutable_queue_time());
  EncodeDuration(finish.usage.time_to_first_token, usage->mutable_time_to_first_token());
  EncodeDuration(finish.usage.total_time, usage->mutable_total_time());
}

void Encode(const adapter::LoadTiming& timing, v1::LoadTiming* to) {
  EncodeDuration(timing.read, to->mutable_read());
  EncodeDuration(timing.validate, to->mutable_validate());
  EncodeDuration(timing.copy, to->mutable_copy());
  EncodeDuration(timing.norms, to->mutable_norms());
  EncodeDuration(timing.total, to->mutable_total());
}

void Encode(const adapter::AdapterSummary& summary, v1::AdapterVersion* to) {
  to->set_kind(summary.kind == adapter::AdapterKind::kDora ? v1::ADAPTER_KIND_DORA
                                                           : v1::ADAPTER_KIND_LORA);
  to->set_min_rank(static_cast<uint32_t>(summary.min_rank));
  to->set_max_rank(static_cast<uint32_t>(summary.max_rank));
  to->set_num_modules(static_cast<uint32_t>(summary.num_modules));
  to->set_num_parameters(static_cast<uint64_t>(summary.num_parameters));
  to->set_resident_bytes(static_cast<uint64_t>(summary.resident_bytes));
  Encode(summary.timing, to->mutable_timing());
}

}  // namespace

void EncodeDuration(absl::Duration duration, google::protobuf::Duration* to) {
  const int64_t seconds = absl::IDivDuration(duration, absl::Seconds(1), &duration);
  to->set_seconds(seconds);
  to->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
}

void Encode(const GenerateHeader& header, const engine::SampleDelta& delta,
            v1::GenerateResponse* to) {
  to->Clear();
  to->set_request_id(header.request_id);
  to->set_seed(header.seed);
  to->set_sample_index(static_cast<uint32_t>(delta.sample_index));
  to->set_token_ids(Pack(delta.token_ids));
  EncodeLogprobs(delta.logprobs, header.top_logprobs, to);
  if (!delta.prompt_logprobs.logprobs.empty()) {
    EncodeLogprobs(delta.prompt_logprobs, header.top_logprobs, to->mutable_prompt_logprobs());
  }
  for (const engine::VersionSpan& span : delta.spans) Encode(span, to->add_spans());
  if (delta.finished()) Encode(delta.finish, to->mutable_finish());
}

void Encode(const std::string& request_id, int32_t top_logprobs, const engine::ScoreResult& result,
            v1::ScoreResponse* to) {
  to->set_request_id(request_id);
  for (const auto& sequence : result.scores) {
    v1::ScoredSequence* scored = to->add_sequences();
    for (const engine::Logprobs& logprobs : sequence) {
      EncodeLogprobs(logprobs, top_logprobs, scored->add_scores());
    }
  }
  for (const engine::VersionSpan& span : result.versions) Encode(span, to->add_versions());
}

void Encode(const adapter::AdapterRecord& record, v1::AdapterVersion* to) {
  to->set_name(record.name);
  to->set_version(record.version);
  to->set_state(ToWire(record.state));
  if (record.state == adapter::AdapterState::kFailed) {
    to->set_failure(Presentable(std::string(record.failure.message()), kMaxFailureBytes));
  }
  to->set_digest(record.summary.digest);
  to->set_active(record.active);
  to->set_durable(record.durable);
  to->set_resident(record.resident);
  to->set_in_host_memory(record.in_host_memory);
  const bool loaded = record.state == adapter::AdapterState::kReady ||
                      record.state == adapter::AdapterState::kRetiring ||
                      record.state == adapter::AdapterState::kGone;
  if (loaded) Encode(record.summary, to);
  to->set_leases(static_cast<uint32_t>(std::max(record.leases, 0)));
  absl::Duration since_epoch = record.create_time - absl::UnixEpoch();
  const int64_t seconds = absl::IDivDuration(since_epoch, absl::Seconds(1), &since_epoch);
  to->mutable_create_time()->set_seconds(seconds);
  to->mutable_create_time()->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(since_epoch)));
  to->mutable_tags()->insert(record.tags.begin(), record.tags.end());
}

void Encode(const adapter::RegistryEvent& event, v1::WatchResponse* to) {
  to->Clear();
  to->set_generation(event.generation);
  to->set_type(ToWire(event.type));
  Encode(event.adapter, to->mutable_adapter());
}

}  // namespace dorad::rpc
