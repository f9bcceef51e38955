// A listener on the loopback for tests of single services.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

namespace dorad::rpc {

struct Loopback {
  std::unique_ptr<grpc::Server> server;
  std::shared_ptr<grpc::Channel> channel;
};

// The service is borrowed.
inline Loopback ListenOnLoopback(grpc::Service* service) {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(service);
  Loopback loopback;
  loopback.server = builder.BuildAndStart();
  loopback.channel =
      grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials());
  return loopback;
}

}  // namespace dorad::rpc
