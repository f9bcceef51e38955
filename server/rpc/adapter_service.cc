#include "server/rpc/adapter_service.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/admission.h"
#include "server/platform/error.h"
#include "server/rpc/access.h"
#include "server/rpc/encode.h"
#include "server/rpc/fetch_call.h"
#include "server/rpc/memory_publish.h"
#include "server/rpc/page_token.h"
#include "server/rpc/peer_transfer.h"
#include "server/rpc/peers.h"
#include "server/rpc/peft_config_json.h"
#include "server/rpc/publish_call.h"
#include "server/rpc/publish_validation.h"
#include "server/rpc/unary_call.h"
#include "server/rpc/watch_call.h"

namespace dorad::rpc {
namespace {

constexpr uint32_t kDefaultPageSize = 100;
constexpr uint32_t kMaxPageSize = 1000;

absl::StatusOr<adapter::PublishOptions> ParsePublish(const v1::PublishFromPathRequest& request) {
  std::vector<Violation> violations;
  adapter::PublishOptions options = ParsePublishOptions(request, &violations);
  CheckPath(request.path(), &violations);
  if (!violations.empty()) return MakeInvalid("PublishFromPathRequest", std::move(violations));
  return options;
}

// Runs body() on the thread for registry changes; an exception ends the call.
template <typename Response, typename Body>
void RunChange(Services* services, const UnaryPtr<Response>& call, Body body) {
  auto open = std::make_shared<const OpenCount>(&services->open_changes);
  services->run_change([call, body = std::move(body), open = std::move(open)] {
    Guarded(call->record().method(), body,
            [&call](const absl::Status& status) { call->End(status); });
  });
}

// Resources of a publish until its answer.
struct Admitted {
  std::shared_ptr<const OpenCount> open;
  PublishRoom room;
  PublishRoom file;  // of a path's bytes, from the moment that their number is known
  std::shared_ptr<security::Quotas::Hold> stream;  // nullptr: none
};

// Ends a publish's call with the loader's result. typed_config: the request had a PeftConfig.
template <typename Response>
adapter::PublishCallback AnswerTo(const UnaryPtr<Response>& call, bool typed_config,
                                  Admitted admitted) {
  return [call, typed_config,
          admitted = std::move(admitted)](const absl::StatusOr<adapter::PublishResult>& result) {
    // Released before the answer: the client may publish the next version at once.
    for (const auto& hold : {admitted.room, admitted.file, admitted.stream}) {
      if (hold != nullptr) hold->Release();
    }
    call->Complete([&](Response* to) {
      if (!result.ok()) {
        return typed_config ? NamePeftConfigFields(result.status()) : result.status();
      }
      call->record().NameAdapter({result->adapter.name, result->adapter.version});
      Encode(result->adapter, to->mutable_adapter());
      to->set_generation(result->generation);
      return absl::OkStatus();
    });
  };
}

// Authorises the caller and reserves room.
absl::StatusOr<Admitted> AdmitPublish(Services* services, const CallRecord& call,
                                      const std::string& name, int64_t bytes) {
  const security::Principal& caller = *call.caller();
  DORAD_RETURN_IF_ERROR(CheckAdapterAccess(caller, name));
  Admitted admitted;
  // Counted before the check: a drain that begins later waits for this publish.
  admitted.open = std::make_shared<const OpenCount>(&services->open_loads);
  if (services->draining) return engine::ShuttingDown();
  DORAD_ASSIGN_OR_RETURN(admitted.room,
                         ReservePublish(*services, caller, {.versions = 1, .bytes = bytes}));
  admitted.stream = call.stream();
  return admitted;
}

absl::Status Get(const adapter::AdapterRegistry& registry, const security::Principal& caller,
                 const v1::GetRequest& request, v1::GetResponse* response) {
  DORAD_ASSIGN_OR_RETURN(const adapter::AdapterRef ref,
                         adapter::AdapterRef::Parse(request.adapter()));
  if (ref.is_base()) {
    return MakeInvalid("GetRequest", {{"adapter", "ADAPTER_NAME_INVALID",
                                       "the base model is no adapter; name one"}});
  }
  DORAD_RETURN_IF_ERROR(CheckAdapterAccess(caller, ref.name));
  DORAD_ASSIGN_OR_RETURN(const adapter::AdapterRecord record, registry.Get(ref));
  Encode(record, response->mutable_adapter());
  response->set_generation(registry.generation());
  return absl::OkStatus();
}

absl::Status GetUpload(const UploadStore& uploads, const security::Principal& caller,
                       const v1::GetUploadRequest& request, v1::GetUploadResponse* response) {
  std::vector<Violation> violations;
  CheckUploadId(request.upload_id(), &violations);
  if (!violations.empty()) return MakeInvalid("GetUploadRequest", std::move(violations));
  DORAD_ASSIGN_OR_RETURN(const UploadStore::Progress progress,
                         uploads.Find(request.upload_id(), caller.tenant));
  response->set_received_bytes(progress.received);
  response->set_total_bytes(progress.total);
  response->set_committed(progress.committed);
  EncodeDuration(progress.time_left, response->mutable_time_left());
  return absl::OkStatus();
}

absl::Status List(const adapter::AdapterRegistry& registry, const security::Principal& caller,
                  const v1::ListRequest& request, v1::ListResponse* response) {
  std::vector<Violation> violations;
  if (!request.name().empty()) CheckAdapterName(request.name(), &violations);
  const uint32_t size = request.has_page_size() ? request.page_size() : kDefaultPageSize;
  if (size < 1 || size > kMaxPageSize) {
    violations.push_back({"page_size", "PAGE_SIZE_OUT_OF_RANGE",
                          absl::StrCat(size, " is not in [1, ", kMaxPageSize, "]")});
  }
  if (!violations.empty()) return MakeInvalid("ListRequest", std::move(violations));
  DORAD_RETURN_IF_ERROR(CheckAdapterAccess(caller, request.name()));
  PagePosition after;
  if (!request.page_token().empty()) {
    DORAD_ASSIGN_OR_RETURN(after, ParsePageToken(request.page_token(), request.name()));
  }
  // Names with the caller's prefix are adjacent in the order of names.
  if (after.name < caller.adapters) after = {request.name(), caller.adapters, 0};
  response->set_generation(registry.generation());
  // Reads one record more than a page, to know whether another page follows.
  std::vector<adapter::AdapterRecord> records =
      registry.List(request.name(), after.name, after.version, static_cast<int>(size) + 1);
  while (!records.empty() && !caller.MayTouch(records.back().name)) records.pop_back();
  if (records.size() > size) {
    records.resize(size);
    response->set_next_page_token(
        MakePageToken({request.name(), records.back().name, records.back().version}));
  }
  for (const adapter::AdapterRecord& record : records) Encode(record, response->add_adapters());
  return absl::OkStatus();
}

// The numbers of a running server never repeat: the version stays the one that is checked here.
template <typename Request>
absl::Status CheckDigest(const adapter::AdapterRegistry& registry, const Request& request) {
  if (request.digest().empty()) return absl::OkStatus();
  return registry.Get({request.name(), request.version(), request.digest()}).status();
}

void Retire(const Services& services, const UnaryPtr<v1::RetireResponse>& call,
            const adapter::AdapterRef& ref, bool force) {
  const auto retirement = services.registry->Retire(ref.name, ref.version, force);
  const auto complete = [call, retirement] {
    call->Complete([&](v1::RetireResponse* to) {
      if (!retirement.ok()) return retirement.status();
      Encode(retirement->adapter, to->mutable_adapter());
      to->set_generation(retirement->generation);
      return absl::OkStatus();
    });
  };
  if (!retirement.ok() || !force) {
    complete();
    return;
  }
  engine::AbortTarget holders;
  holders.adapter = {ref.name, ref.version};
  services.engine->Abort(std::move(holders), adapter::RetiredByForce(ref),
                         [complete](int) { complete(); });
}

}  // namespace

AdapterService::AdapterService(Services* services)
    : RawService("dorad.v1.AdapterService", services) {
  AddStream<PublishCall>("Publish", PublishCall::MaxMessageBytes);
  AddUnary("GetUpload", &AdapterService::GetUpload);
  AddUnary("PublishFromPath", &AdapterService::PublishFromPath);
  // Names every tensor of an adapter; refused without a shared-memory socket.
  AddUnary("PublishFromMemory", &AdapterService::PublishFromMemory, [](const Services& of) {
    return of.shared_memory == nullptr ? kSmallRequestBytes : of.max_message_bytes;
  });
  AddUnary("PublishFromPeer", &AdapterService::PublishFromPeer);
  AddStream<FetchCall>("FetchAdapter");
  AddUnary("Activate", &AdapterService::Activate);
  AddUnary("Get", &AdapterService::Get);
  AddUnary("List", &AdapterService::List);
  AddStream<WatchCall>("Watch");
  AddUnary("Retire", &AdapterService::Retire);
}

absl::Status AdapterService::GetUpload(const UnaryPtr<v1::GetUploadResponse>& call,
                                       const v1::GetUploadRequest& request) {
  return call->Answer([&](v1::GetUploadResponse* to) {
    return rpc::GetUpload(*services_->uploads, call->caller(), request, to);
  });
}

absl::Status AdapterService::PublishFromPath(const UnaryPtr<v1::PublishFromPathResponse>& call,
                                             const v1::PublishFromPathRequest& request) {
  DORAD_ASSIGN_OR_RETURN(adapter::PublishOptions options, ParsePublish(request));
  // The loader learns the size, and reserves the bytes before it reads them.
  DORAD_ASSIGN_OR_RETURN(Admitted admitted,
                         AdmitPublish(services_, call->record(), options.name, /*bytes=*/0));
  call->record().NameAdapter({options.name, options.version.value_or(0)});
  admitted.file = std::make_shared<security::Quotas::Hold>();
  adapter::PathSource source{request.path()};
  source.admit = [services = services_, caller = call->record().caller(),
                  file = admitted.file](int64_t bytes) -> absl::Status {
    DORAD_ASSIGN_OR_RETURN(const PublishRoom room,
                           ReservePublish(*services, *caller, {.versions = 0, .bytes = bytes}));
    if (room != nullptr) *file = std::move(*room);
    return absl::OkStatus();
  };
  services_->publisher->Publish(std::move(options), std::move(source),
                                AnswerTo(call, /*typed_config=*/false, std::move(admitted)));
  return absl::OkStatus();
}

absl::Status AdapterService::PublishFromPeer(const UnaryPtr<v1::PublishFromPeerResponse>& call,
                                             const v1::PublishFromPeerRequest& request) {
  DORAD_ASSIGN_OR_RETURN(ListenAddress peer, PeerTransfer::Check(request));
  DORAD_ASSIGN_OR_RETURN(Admitted admitted,
                         AdmitPublish(services_, call->record(), request.name(),
                                      static_cast<int64_t>(request.safetensors_size())));
  call->record().NameAdapter({request.name(), request.version()});
  LoadHolds holds{admitted.open, admitted.room, admitted.stream};
  const auto transfer = std::make_shared<PeerTransfer>(
      services_, "PublishFromPeer", request, std::move(peer), call->caller().tenant,
      std::move(holds), AnswerTo(call, /*typed_config=*/false, std::move(admitted)));
  DORAD_RETURN_IF_ERROR(
      services_->peers->Start(Peers::Direction::kIn, [transfer] { transfer->Run(); }));
  call->set_on_cancel(
      [transfer] { transfer->Cancel(absl::CancelledError("the caller has gone")); });
  return absl::OkStatus();
}

absl::Status AdapterService::PublishFromMemory(const UnaryPtr<v1::PublishFromMemoryResponse>& call,
                                               const v1::PublishFromMemoryRequest& request) {
  DORAD_ASSIGN_OR_RETURN(MemoryPublish publish,
                         ParseMemoryPublish(request, services_->shared_memory));
  DORAD_ASSIGN_OR_RETURN(Admitted admitted, AdmitPublish(services_, call->record(),
                                                         publish.options.name, publish.bytes));
  call->record().NameAdapter({publish.options.name, publish.options.version.value_or(0)});
  services_->publisher->Publish(
      std::move(publish.options),
      adapter::MemorySource{std::move(publish.config_json), std::move(publish.peer)},
      AnswerTo(call, request.has_peft_config(), std::move(admitted)));
  return absl::OkStatus();
}

absl::Status AdapterService::Activate(const UnaryPtr<v1::ActivateResponse>& call,
                                      const v1::ActivateRequest& request) {
  DORAD_RETURN_IF_ERROR(
      CheckAdapterVersion("ActivateRequest", request.name(), request.version(), request.digest()));
  DORAD_RETURN_IF_ERROR(CheckAdapterAccess(call->caller(), request.name()));
  DORAD_RETURN_IF_ERROR(CheckDigest(*services_->registry, request));
  call->record().NameAdapter({request.name(), request.version()});
  std::optional<int64_t> expected;
  if (request.has_expected_generation()) expected = request.expected_generation();
  // The request is freed before the change runs.
  RunChange(services_, call,
            [call, registry = services_->registry, name = request.name(),
             version = request.version(), expected] {
              const auto activation = registry->Activate(name, version, expected);
              call->Complete([&](v1::ActivateResponse* to) {
                if (!activation.ok()) return activation.status();
                Encode(activation->adapter, to->mutable_adapter());
                to->set_previous_version(activation->previous_version);
                to->set_generation(activation->generation);
                return absl::OkStatus();
              });
            });
  return absl::OkStatus();
}

absl::Status AdapterService::Get(const UnaryPtr<v1::GetResponse>& call,
                                 const v1::GetRequest& request) {
  return call->Answer([&](v1::GetResponse* to) {
    return rpc::Get(*services_->registry, call->caller(), request, to);
  });
}

absl::Status AdapterService::List(const UnaryPtr<v1::ListResponse>& call,
                                  const v1::ListRequest& request) {
  return call->Answer([&](v1::ListResponse* to) {
    return rpc::List(*services_->registry, call->caller(), request, to);
  });
}

absl::Status AdapterService::Retire(const UnaryPtr<v1::RetireResponse>& call,
                                    const v1::RetireRequest& request) {
  DORAD_RETURN_IF_ERROR(
      CheckAdapterVersion("RetireRequest", request.name(), request.version(), request.digest()));
  DORAD_RETURN_IF_ERROR(CheckAdapterAccess(call->caller(), request.name()));
  DORAD_RETURN_IF_ERROR(CheckDigest(*services_->registry, request));
  call->record().NameAdapter({request.name(), request.version()});
  RunChange(services_, call,
            [call, services = services_, name = request.name(), version = request.version(),
             force = request.force()] {
              rpc::Retire(*services, call, {name, version}, force);
            });
  return absl::OkStatus();
}

}  // namespace dorad::rpc
