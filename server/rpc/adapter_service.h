// dorad.v1.AdapterService over the registry and the loader. Owned by Server. Thread-safe.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "dorad/v1/adapters.pb.h"
#include "server/rpc/raw_service.h"
#include "server/rpc/services.h"
#include "server/rpc/unary_call.h"

namespace dorad::rpc {

class AdapterService final : public RawService {
 public:
  explicit AdapterService(Services* services);

 private:
  absl::Status GetUpload(const UnaryPtr<v1::GetUploadResponse>& call,
                         const v1::GetUploadRequest& request);
  absl::Status PublishFromPath(const UnaryPtr<v1::PublishFromPathResponse>& call,
                               const v1::PublishFromPathRequest& request);
  absl::Status PublishFromPeer(const UnaryPtr<v1::PublishFromPeerResponse>& call,
                               const v1::PublishFromPeerRequest& request);
  absl::Status PublishFromMemory(const UnaryPtr<v1::PublishFromMemoryResponse>& call,
                                 const v1::PublishFromMemoryRequest& request);
  absl::Status Activate(const UnaryPtr<v1::ActivateResponse>& call,
                        const v1::ActivateRequest& request);
  absl::Status Get(const UnaryPtr<v1::GetResponse>& call, const v1::GetRequest& request);
  absl::Status List(const UnaryPtr<v1::ListResponse>& call, const v1::ListRequest& request);
  absl::Status Retire(const UnaryPtr<v1::RetireResponse>& call, const v1::RetireRequest& request);
};

}  // namespace dorad::rpc
