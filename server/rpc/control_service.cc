#include "server/rpc/control_service.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/rpc/access.h"
#include "server/rpc/encode.h"
#include "server/rpc/memory_publish.h"
#include "server/rpc/unary_call.h"

namespace dorad::rpc {
namespace {

void FillModel(const Services& services, v1::ModelInfo* to) {
  const ServerInfo& info = services.info;
  const engine::EngineLimits limits = services.engine->limits();
  to->set_model_type(info.model_type);
  to->set_name(info.model_name);
  to->set_vocab_size(static_cast<uint32_t>(limits.vocab_size));
  to->set_hidden_size(static_cast<uint32_t>(info.hidden_size));
  to->set_num_layers(static_cast<uint32_t>(info.num_layers));
  to->set_context_length(static_cast<uint32_t>(limits.context_length));
  to->set_num_parameters(static_cast<uint64_t>(info.num_parameters));
  to->set_digest(info.model_digest);
  to->mutable_eos_token_ids()->Add(info.eos_token_ids.begin(), info.eos_token_ids.end());
  to->set_compute_dtype(info.compute_dtype);
  to->set_whole_context_length(static_cast<uint32_t>(info.whole_context_length));
  to->set_whole_context_kv_bytes(static_cast<uint64_t>(info.whole_context_kv_bytes));
}

void FillLimits(const Services& services, v1::Limits* to) {
  const engine::EngineLimits limits = services.engine->limits();
  to->set_max_tokens(static_cast<uint32_t>(limits.max_tokens));
  to->set_max_n(static_cast<uint32_t>(limits.max_n));
  to->set_max_logprobs_k(static_cast<uint32_t>(limits.max_logprobs_k));
  to->set_max_chosen_ids(static_cast<uint32_t>(limits.max_chosen_ids));
  to->set_max_queued_requests(static_cast<uint32_t>(limits.max_queued_requests));
  to->set_max_queued_tokens(static_cast<uint64_t>(limits.max_queued_tokens));
  to->set_max_adapter_rank(static_cast<uint32_t>(services.info.max_adapter_rank));
  to->set_max_adapter_bytes(static_cast<uint64_t>(services.max_adapter_bytes));
  to->set_max_draft_tokens(static_cast<uint64_t>(limits.max_draft_tokens));
  if (!limits.images.served()) return;
  to->set_max_images(static_cast<uint32_t>(limits.images.max_images));
  to->set_max_image_tokens(static_cast<uint32_t>(limits.images.max_tokens));
}

void FillEngine(const Services& services, const security::Principal& caller, v1::EngineInfo* to) {
  const engine::EngineStats stats = services.engine->stats();
  to->set_running_sequences(static_cast<uint32_t>(stats.running_sequences));
  to->set_queued_requests(static_cast<uint32_t>(stats.queued_requests));
  to->set_kv_pages_total(static_cast<uint64_t>(stats.kv_pages_total));
  to->set_kv_pages_used(static_cast<uint64_t>(stats.kv_pages_used));
  to->set_kv_pages_cached(static_cast<uint64_t>(stats.kv_pages_cached));
  to->set_kv_page_tokens(static_cast<uint32_t>(stats.kv_page_tokens));
  to->set_kv_layer_groups(static_cast<uint32_t>(stats.kv_layer_groups));
  to->set_kv_dtype(services.info.kv_dtype);
  to->set_steps(stats.steps);
  to->set_paused(stats.paused);
  for (const adapter::AdapterRef& ref : stats.paused_adapters) {
    if (caller.MayTouch(ref.name)) to->add_paused_adapters(ref.ToString());
  }
  for (const adapter::AdapterRef& ref : stats.pending_pauses) {
    if (ref.is_base()) {
      to->set_pausing(true);
    } else if (caller.MayTouch(ref.name)) {
      to->add_pausing_adapters(ref.ToString());
    }
  }
  to->set_frozen_requests(static_cast<uint32_t>(stats.frozen_requests));
  for (const std::string& tag : services.sleep->asleep()) to->add_sleeping(tag);
  to->set_gpu_share(stats.gpu_share);
  to->set_deterministic(services.info.deterministic);
  to->set_adapter_leases(static_cast<uint32_t>(services.registry->total_leases()));
}

// Whether the caller may stop the requests of the scope.
absl::Status CheckScope(const security::Principal& caller, const adapter::AdapterRef& scope) {
  return scope.is_base() ? CheckIsAdmin(caller) : CheckAdapterAccess(caller, scope.name);
}

void FillInfo(const Services& services, const security::Principal& caller,
              v1::GetInfoResponse* to) {
  to->set_version(services.info.version);
  to->set_device(services.info.device);
  to->set_instruction_set(services.info.instruction_set);
  FillModel(services, to->mutable_model());
  FillLimits(services, to->mutable_limits());
  FillEngine(services, caller, to->mutable_engine());
  to->set_generation(services.registry->generation());
  EncodeDuration(absl::Now() - services.info.start_time, to->mutable_uptime());
  for (const auto& [kind, bytes] : services.memory_by_kind()) {
    (*to->mutable_memory_bytes())[kind] = static_cast<uint64_t>(bytes);
  }
  // A path of this host, for publishers from memory.
  if (caller.roles.Has(security::Role::kPublish)) {
    to->set_shared_memory_socket(services.info.shared_memory_socket);
  }
  to->set_shared_weight_bytes(static_cast<uint64_t>(services.shared_weight_bytes()));
  const Metrics::PeerTraffic peers = services.metrics->peer_traffic();
  to->set_peer_bytes_sent(static_cast<uint64_t>(peers.sent));
  to->set_peer_bytes_received(static_cast<uint64_t>(peers.received));
}

v1::TensorDtype EncodeDtype(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return v1::TENSOR_DTYPE_F32;
    case DType::kF16:
      return v1::TENSOR_DTYPE_F16;
    case DType::kBF16:
      return v1::TENSOR_DTYPE_BF16;
  }
  DORAD_CHECK(false);
}

void FillWeights(const model::WeightLayout& layout, v1::ShareBaseWeightsResponse* to) {
  to->mutable_piece_bytes()->Add(layout.piece_bytes.begin(), layout.piece_bytes.end());
  to->set_digest(layout.digest);
  to->set_device_uuid(layout.device_uuid);
  for (const model::LaidOutTensor& tensor : layout.tensors) {
    v1::BaseTensor* out = to->add_tensors();
    out->set_name(tensor.name);
    out->mutable_shape()->Add(tensor.checkpoint.shape.begin(), tensor.checkpoint.shape.end());
    out->set_checkpoint_dtype(EncodeDtype(tensor.checkpoint.dtype));
    out->set_sha256(tensor.checkpoint.sha256.data(), tensor.checkpoint.sha256.size());
    if (!tensor.place) continue;
    out->set_dtype(EncodeDtype(tensor.place->dtype));
    out->set_offset(tensor.place->offset);
  }
}

}  // namespace

ControlService::ControlService(Services* services)
    : RawService("dorad.v1.ControlService", services) {
  AddUnary("GetInfo", &ControlService::GetInfo);
  AddUnary("Pause", &ControlService::Pause);
  AddUnary("Resume", &ControlService::Resume);
  AddUnary("Sleep", &ControlService::Sleep);
  AddUnary("Wake", &ControlService::Wake);
  AddUnary("ShareBaseWeights", &ControlService::ShareBaseWeights);
  AddUnary("LimitGpuShare", &ControlService::LimitGpuShare);
  AddUnary("EndGpuShareLimit", &ControlService::EndGpuShareLimit);
}

absl::Status ControlService::GetInfo(const UnaryPtr<v1::GetInfoResponse>& call,
                                     const v1::GetInfoRequest& /*request*/) {
  return call->Answer([&](v1::GetInfoResponse* to) {
    FillInfo(*services_, call->caller(), to);
    return absl::OkStatus();
  });
}

absl::Status ControlService::Pause(const UnaryPtr<v1::PauseResponse>& call,
                                   const v1::PauseRequest& request) {
  DORAD_ASSIGN_OR_RETURN(ParsedPause pause, ParsePause(request));
  DORAD_RETURN_IF_ERROR(CheckScope(call->caller(), pause.scope));
  if (!request.allow_missing() || !pause.scope.digest.empty()) {
    DORAD_RETURN_IF_ERROR(services_->registry->CheckExists(pause.scope));
  }
  engine::Engine::PauseOptions options{pause.mode, std::move(pause.scope)};
  const security::Principal& caller = call->caller();
  if (!caller.roles.Has(security::Role::kAdmin)) options.tenant = caller.tenant;
  const uint64_t pause_id =
      services_->engine->Pause(std::move(options), [call](const absl::StatusOr<int>& affected) {
        call->Complete([&affected](v1::PauseResponse* to) {
          if (affected.ok()) to->set_affected(static_cast<uint32_t>(*affected));
          return affected.status();
        });
      });
  // No caller would learn of a pause that takes effect later.
  call->set_on_cancel([engine = services_->engine, pause_id] { engine->CancelPause(pause_id); });
  return absl::OkStatus();
}

absl::Status ControlService::Resume(const UnaryPtr<v1::ResumeResponse>& call,
                                    const v1::ResumeRequest& request) {
  DORAD_ASSIGN_OR_RETURN(adapter::AdapterRef scope, adapter::AdapterRef::Parse(request.adapter()));
  DORAD_RETURN_IF_ERROR(CheckScope(call->caller(), scope));
  if (!scope.digest.empty()) DORAD_RETURN_IF_ERROR(services_->registry->CheckExists(scope));
  services_->engine->Resume(std::move(scope), [call] { call->End(absl::OkStatus()); });
  return absl::OkStatus();
}

absl::Status ControlService::Sleep(const UnaryPtr<v1::SleepResponse>& call,
                                   const v1::SleepRequest& request) {
  DORAD_ASSIGN_OR_RETURN(std::vector<std::string> tags, ParseSleepTags(request.tags()));
  const SleepControl::Options options{request.keep_kv(), request.refuse_requests()};
  services_->sleep->Sleep(std::move(tags), options, [call](const auto& freed) {
    call->Complete([&freed](v1::SleepResponse* to) {
      if (!freed.ok()) return freed.status();
      for (const auto& [tag, bytes] : *freed) {
        (*to->mutable_freed_bytes())[tag] = static_cast<uint64_t>(bytes);
      }
      return absl::OkStatus();
    });
  });
  return absl::OkStatus();
}

absl::Status ControlService::Wake(const UnaryPtr<v1::WakeResponse>& call,
                                  const v1::WakeRequest& request) {
  DORAD_ASSIGN_OR_RETURN(std::vector<std::string> tags, ParseSleepTags(request.tags()));
  services_->sleep->Wake(std::move(tags),
                         [call](const absl::Status& status) { call->End(status); });
  return absl::OkStatus();
}

absl::Status ControlService::ShareBaseWeights(const UnaryPtr<v1::ShareBaseWeightsResponse>& call,
                                              const v1::ShareBaseWeightsRequest& request) {
  DORAD_RETURN_IF_ERROR(FindSession(request.session_token(), services_->shared_memory).status());
  return call->Answer([this](v1::ShareBaseWeightsResponse* to) {
    DORAD_CHECK(services_->weight_layout != nullptr);
    FillWeights(*services_->weight_layout, to);
    return absl::OkStatus();
  });
}

absl::Status ControlService::LimitGpuShare(const UnaryPtr<v1::LimitGpuShareResponse>& call,
                                           const v1::LimitGpuShareRequest& request) {
  DORAD_ASSIGN_OR_RETURN(engine::Engine::GpuShareLimit options, ParseGpuShareLimit(request));
  services_->engine->LimitGpuShare(std::move(options), [call](const absl::StatusOr<double>& share) {
    call->Complete([&share](v1::LimitGpuShareResponse* to) {
      if (share.ok()) to->set_gpu_share(*share);
      return share.status();
    });
  });
  return absl::OkStatus();
}

absl::Status ControlService::EndGpuShareLimit(const UnaryPtr<v1::EndGpuShareLimitResponse>& call,
                                              const v1::EndGpuShareLimitRequest& request) {
  DORAD_RETURN_IF_ERROR(CheckLimitId(request));
  services_->engine->EndGpuShareLimit(request.limit_id(), [call](bool ended) {
    call->Complete([ended](v1::EndGpuShareLimitResponse* to) {
      to->set_ended(ended);
      return absl::OkStatus();
    });
  });
  return absl::OkStatus();
}

}  // namespace dorad::rpc
