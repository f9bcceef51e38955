// dorad.v1.AdapterService over the registry and the loader. Owned by Server. Thread-safe.
#pragma once

#include <memory>

#include "dorad/v1/adapters.pb.h"
#include "server/rpc/late_service.h"
#include "server/rpc/services.h"
#include "server/rpc/unary_call.h"

namespace dorad::rpc {

class AdapterService final : public LateService {
 public:
  explicit AdapterService(Services* services);

 private:
  void GetUpload(const std::shared_ptr<UnaryCall<v1::GetUploadResponse>>& call,
                 const v1::GetUploadRequest& request);
  void PublishFromPath(const std::shared_ptr<UnaryCall<v1::PublishFromPathResponse>>& call,
                       const v1::PublishFromPathRequest& request);
  void PublishFromMemory(const std::shared_ptr<UnaryCall<v1::PublishFromMemoryResponse>>& call,
                         const v1::PublishFromMemoryRequest& request);
  void Activate(const std::shared_ptr<UnaryCall<v1::ActivateResponse>>& call,
                const v1::ActivateRequest& request);
  void Get(const std::shared_ptr<UnaryCall<v1::GetResponse>>& call, const v1::GetRequest& request);
  void List(const std::shared_ptr<UnaryCall<v1::ListResponse>>& call,
            const v1::ListRequest& request);
  void Retire(const std::shared_ptr<UnaryCall<v1::RetireResponse>>& call,
              const v1::RetireRequest& request);
};

}  // namespace dorad::rpc
