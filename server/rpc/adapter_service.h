// dorad.v1.AdapterService over the registry and the loader. Owned by Server. Thread-safe.
#pragma once

#include "dorad/v1/adapters.grpc.pb.h"
#include "server/rpc/services.h"

namespace dorad::rpc {

class AdapterService final : public v1::AdapterService::CallbackService {
 public:
  explicit AdapterService(Services* services) : services_(services) {}

  grpc::ServerReadReactor<v1::PublishRequest>* Publish(grpc::CallbackServerContext* context,
                                                       v1::PublishResponse* response) override;
  grpc::ServerUnaryReactor* GetUpload(grpc::CallbackServerContext* context,
                                      const v1::GetUploadRequest* request,
                                      v1::GetUploadResponse* response) override;
  grpc::ServerUnaryReactor* PublishFromPath(grpc::CallbackServerContext* context,
                                            const v1::PublishFromPathRequest* request,
                                            v1::PublishFromPathResponse* response) override;
  grpc::ServerUnaryReactor* PublishFromMemory(grpc::CallbackServerContext* context,
                                              const v1::PublishFromMemoryRequest* request,
                                              v1::PublishFromMemoryResponse* response) override;
  grpc::ServerUnaryReactor* Activate(grpc::CallbackServerContext* context,
                                     const v1::ActivateRequest* request,
                                     v1::ActivateResponse* response) override;
  grpc::ServerUnaryReactor* Get(grpc::CallbackServerContext* context, const v1::GetRequest* request,
                                v1::GetResponse* response) override;
  grpc::ServerUnaryReactor* List(grpc::CallbackServerContext* context,
                                 const v1::ListRequest* request,
                                 v1::ListResponse* response) override;
  grpc::ServerWriteReactor<v1::WatchResponse>* Watch(grpc::CallbackServerContext* context,
                                                     const v1::WatchRequest* request) override;
  grpc::ServerUnaryReactor* Retire(grpc::CallbackServerContext* context,
                                   const v1::RetireRequest* request,
                                   v1::RetireResponse* response) override;

 private:
  Services* const services_;
};

}  // namespace dorad::rpc
