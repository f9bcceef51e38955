// Passes a committed upload to the loader. Pure function and therefore thread-safe.
#pragma once

#include <memory>

#include "server/rpc/access.h"
#include "server/rpc/services.h"
#include "server/rpc/upload_store.h"
#include "server/security/quotas.h"

namespace dorad::rpc {

// What a publish holds until its load has ended.
struct LoadHolds {
  std::shared_ptr<const OpenCount> open;
  PublishRoom room;                                // nullptr: there is no quota
  std::shared_ptr<security::Quotas::Hold> stream;  // nullptr: none
};

// After UploadStream::Next::kLoad. The result goes to the stream's Completion, after `holds` has
// been released: a client that sees the end may publish the next version at once. of_peer: as
// PublishOptions'.
void LoadUpload(Services* services, const char* method, UploadStream* stream, LoadHolds holds,
                bool of_peer = false);

}  // namespace dorad::rpc
