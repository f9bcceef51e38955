#include "server/rpc/upload_load.h"

#include <utility>

#include "server/rpc/call_record.h"
#include "server/rpc/peft_config_json.h"
#include "server/rpc/upload.h"

namespace dorad::rpc {

void LoadUpload(Services* services, const char* method, UploadStream* stream, LoadHolds holds,
                bool of_peer) {
  const std::shared_ptr<Upload> upload = stream->TakeUpload();
  // The upload keeps its bytes, and its share of the budget, until the load has ended.
  const adapter::PublishCallback done =
      [upload, holds = std::move(holds),
       complete = stream->Completion()](absl::StatusOr<adapter::PublishResult> result) {
        for (const auto& hold : {holds.room, holds.stream}) {
          if (hold != nullptr) hold->Release();
        }
        if (!result.ok() && upload->typed_config()) result = NamePeftConfigFields(result.status());
        complete(std::move(result));
      };
  Guarded(
      method,
      [&] {
        adapter::PublishOptions options = upload->TakeOptions();
        options.of_peer = of_peer;
        services->publisher->Publish(
            std::move(options),
            adapter::BytesSource{upload->config(), upload->image(), upload->read_time()}, done);
      },
      [&](const absl::Status& status) { done(status); });
}

}  // namespace dorad::rpc
