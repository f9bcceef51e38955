#include "server/adapter/publish/reader.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/adapter/peft/digest.h"
#include "server/adapter/peft/folder.h"
#include "server/adapter/peft/validate.h"
#include "server/platform/error.h"
#include "server/platform/exception.h"
#include "server/platform/instant.h"

namespace dorad::adapter {
namespace {

constexpr char kSubject[] = "adapter_model.safetensors";

absl::Status CheckDigest(const std::string& expected, const std::string& digest) {
  if (expected.empty() || expected == digest) return absl::OkStatus();
  return MakeInvalid(kSubject, {{"expected_digest", "SHARED_MEMORY_DIGEST_MISMATCH",
                                 absl::StrCat("the content has the digest ", digest)}});
}

}  // namespace

AdapterSummary Summarise(const AdapterTensors& tensors) {
  AdapterSummary summary;
  for (const ModuleTensors& module : tensors.modules) {
    const int rank = module.target.rank;
    summary.min_rank = summary.num_modules == 0 ? rank : std::min(summary.min_rank, rank);
    summary.max_rank = std::max(summary.max_rank, rank);
    ++summary.num_modules;
    summary.num_parameters += module.a.num_elements() + module.b.num_elements();
    if (module.magnitude != nullptr) {
      summary.kind = AdapterKind::kDora;
      summary.num_parameters += module.magnitude->num_elements();
    }
  }
  return summary;
}

absl::Status CheckWanted(const std::function<bool()>& wanted) {
  if (wanted == nullptr || wanted()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kAborted, "SHARED_MEMORY_CLOSED",
                   "the shared-memory connection was closed before the version was published");
}

absl::StatusOr<Content> AdapterReader::Read(AdapterSource source, bool needs_file,
                                            const std::string& name) {
  try {
    // Once on each thread of the pool.
    static thread_local const bool prepared = (builder_.PrepareThread(), true);
    (void)prepared;
    return ReadAny(source, needs_file, name);
  } catch (...) {
    return StatusOfException("the load of adapter " + name, "INTERNAL");
  }
}

absl::StatusOr<Content> AdapterReader::ReadAny(AdapterSource& source, bool needs_file,
                                               const std::string& name) {
  Stages stages;
  stages.start = SteadyNow();
  AdapterFiles files;
  std::string expected_digest;
  absl::Duration received;
  if (auto* path = std::get_if<PathSource>(&source)) {
    DORAD_ASSIGN_OR_RETURN(files,
                           ReadAdapterFolder(path->path.empty() ? "." : path->path,
                                             {options_.allowed_roots, path->trusted, path->admit},
                                             options_.max_adapter_bytes));
  } else if (auto* memory = std::get_if<MemorySource>(&source)) {
    DORAD_RETURN_IF_ERROR(CheckWanted(memory->tensors.wanted));
    if (LiesOnDevice(memory->tensors) && !needs_file) return ReadDevice(*memory, name);
    files.config_json = std::move(memory->adapter_config_json);
    expected_digest = memory->tensors.expected_digest;
    DORAD_ASSIGN_OR_RETURN(
        ByteBuffer image,
        CopyToImage(memory->tensors, static_cast<uint64_t>(options_.max_adapter_bytes)));
    files.safetensors = Share(std::move(image));
  } else {
    auto& bytes = std::get<BytesSource>(source);
    received = bytes.read;
    files = {std::move(bytes.adapter_config_json), std::move(bytes.safetensors)};
    if (files.safetensors->size() > static_cast<uint64_t>(options_.max_adapter_bytes)) {
      return MakeInvalid(
          kSubject,
          {{kSubject, "ADAPTER_TOO_LARGE",
            absl::StrCat("the file has more than ", options_.max_adapter_bytes, " bytes")}});
    }
  }
  stages.read = SteadyNow();
  DORAD_ASSIGN_OR_RETURN(ValidAdapter valid,
                         ValidateAdapter(files.config_json, std::move(files.safetensors), modules_,
                                         options_.max_rank));
  const AdapterTensors& tensors = valid.tensors;
  DORAD_RETURN_IF_ERROR(builder_.CheckBaseCopies(tensors));
  stages.validated = SteadyNow();
  DORAD_ASSIGN_OR_RETURN(Content content,
                         BuildBesideDigest(stages, tensors, expected_digest, name,
                                           [&] { return ContentDigest(tensors, modules_); }));
  content.summary.timing.read += received;
  content.config_json = std::move(files.config_json);
  content.file = std::move(valid.file);
  return content;
}

absl::StatusOr<Content> AdapterReader::ReadDevice(const MemorySource& source,
                                                  const std::string& name) {
  const PeerTensors& peer = source.tensors;
  Stages stages;
  stages.start = SteadyNow();
  DORAD_RETURN_IF_ERROR(CheckForm(peer, static_cast<uint64_t>(options_.max_adapter_bytes)));
  absl::StatusOr<std::unique_ptr<DeviceTensors>> device;
  (void)residency_.WithRoom([&] {
    device = builder_.CopyOnDevice(peer);
    return device.status();
  });
  if (!device.ok()) return device.status();
  stages.read = SteadyNow();
  DORAD_ASSIGN_OR_RETURN(AdapterTensors tensors,
                         ValidateTensors(source.adapter_config_json, (*device)->tensors(),
                                         TensorPlace::kDevice, modules_, options_.max_rank));
  DORAD_ASSIGN_OR_RETURN(const BaseCopiesOnHost host, BaseCopiesOnHost::Bring(**device, &tensors));
  DORAD_RETURN_IF_ERROR(builder_.CheckBaseCopies(tensors));
  stages.validated = SteadyNow();
  return BuildBesideDigest(stages, tensors, peer.expected_digest, name,
                           [&] { return DigestOnDevice(**device, peer, tensors, modules_); });
}

absl::StatusOr<Content> AdapterReader::BuildBesideDigest(
    const Stages& stages, const AdapterTensors& tensors, const std::string& expected_digest,
    const std::string& name, absl::FunctionRef<absl::StatusOr<std::string>()> compute_digest) {
  absl::StatusOr<std::string> digest;
  std::jthread hashing([&] {
    try {
      digest = compute_digest();
    } catch (...) {
      digest = StatusOfException("the digest of adapter " + name, "INTERNAL");
    }
  });
  absl::StatusOr<BuiltAdapter> built = Build(tensors);
  hashing.join();
  DORAD_RETURN_IF_ERROR(digest.status());
  DORAD_RETURN_IF_ERROR(CheckDigest(expected_digest, *digest));
  if (!built.ok()) return built.status();
  Content content;
  AdapterSummary& summary = content.summary;
  summary = Summarise(tensors);
  summary.digest = *std::move(digest);
  summary.resident_bytes = built->bytes;
  summary.timing.read = Between(stages.start, stages.read);
  summary.timing.validate = Between(stages.read, stages.validated);
  summary.timing.copy = built->copy;
  summary.timing.norms = built->norms;
  content.weights = std::move(built->weights);
  return content;
}

absl::StatusOr<BuiltAdapter> AdapterReader::Build(const AdapterTensors& tensors) {
  absl::StatusOr<BuiltAdapter> built;
  (void)residency_.WithRoom([&] {
    built = builder_.Build(tensors);
    return built.status();
  });
  return built;
}

}  // namespace dorad::adapter
