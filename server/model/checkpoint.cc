#include "server/model/checkpoint.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/model/config_json.h"
#include "server/platform/error.h"
#include "server/platform/files/sha256.h"
#include "server/platform/parallel_for.h"

namespace dorad::model {
namespace {

using Json = nlohmann::json;

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr uint64_t kMaxIndexBytes = 64 << 20;
constexpr uint64_t kMaxShardBytes = uint64_t{1} << 42;
constexpr uint64_t kBlockBytes = 1 << 20;
constexpr int kMaxReaders = 16;

bool Exists(const std::string& dir, const std::string& name) {
  std::error_code error;  // opening the file reports errors
  return std::filesystem::exists(std::filesystem::path(dir) / name, error);
}

absl::Status NoWeights(const std::string& dir) {
  for (const char* other : {"pytorch_model.bin", "pytorch_model.bin.index.json",
                            "consolidated.safetensors", "tf_model.h5", "flax_model.msgpack"}) {
    if (Exists(dir, other)) {
      return MakeError(absl::StatusCode::kInvalidArgument, "MODEL_FORMAT_UNSUPPORTED",
                       absl::StrCat(dir, " has ", other, " but no ", kSingleFile,
                                    ": save the model with transformers' save_pretrained"));
    }
  }
  return MakeError(absl::StatusCode::kNotFound, "MODEL_NOT_FOUND",
                   absl::StrCat(dir, " has neither ", kSingleFile, " nor ", kIndexFile));
}

// A shard must lie directly in the model's folder.
bool IsShardName(const std::string& name) {
  return name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos &&
         name.size() <= 255 && name.front() != '.' && absl::EndsWith(name, ".safetensors");
}

// Tensor name -> file name.
absl::StatusOr<std::map<std::string, std::string>> ReadIndex(const std::string& dir) {
  DORAD_ASSIGN_OR_RETURN(const Json document, ReadJsonObject(dir, kIndexFile, kMaxIndexBytes));
  std::vector<Violation> violations;
  std::map<std::string, std::string> index;
  const auto weight_map = document.find("weight_map");
  if (weight_map == document.end() || !weight_map->is_object() || weight_map->empty()) {
    violations.push_back({absl::StrCat(kIndexFile, ":weight_map"), "MODEL_INDEX_INVALID",
                          "must be an object with at least one tensor"});
  } else {
    for (const auto& [tensor, file] : weight_map->items()) {
      if (file.is_string() && !file.get_ref<const std::string&>().empty() &&
          IsShardName(file.get_ref<const std::string&>())) {
        index.emplace(tensor, file.get<std::string>());
      } else {
        violations.push_back({absl::StrCat(kIndexFile, ":weight_map.", tensor),
                              "MODEL_INDEX_INVALID",
                              absl::StrCat(Shown(file),
                                           " is not the name of a .safetensors file "
                                           "in this folder")});
      }
    }
  }
  if (!violations.empty()) return MakeInvalid(dir, std::move(violations));
  return index;
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& dir) {
  Checkpoint checkpoint;
  // The single file wins, as in transformers.
  if (Exists(dir, kSingleFile)) {
    DORAD_ASSIGN_OR_RETURN(Shard shard, OpenShard(dir, kSingleFile));
    checkpoint.shards_.push_back(std::move(shard));
    for (const auto& [name, entry] : checkpoint.shards_.front().header.tensors) {
      checkpoint.tensors_[name] = {entry.dtype, entry.shape};
    }
    return checkpoint;
  }
  if (!Exists(dir, kIndexFile)) return NoWeights(dir);
  DORAD_ASSIGN_OR_RETURN(const auto index, ReadIndex(dir));
  DORAD_RETURN_IF_ERROR(checkpoint.AddShards(dir, index));
  return checkpoint;
}

absl::StatusOr<Checkpoint::Shard> Checkpoint::OpenShard(const std::string& dir,
                                                        const std::string& name) {
  const std::string path = absl::StrCat(dir, "/", name);
  DORAD_ASSIGN_OR_RETURN(RegularFile file, RegularFile::Open(path, kMaxShardBytes));
  if (file.size() < kSafetensorsPrefixBytes) {
    return MakeInvalid(path, {{"header", "SAFETENSORS_HEADER_TOO_SMALL",
                               absl::StrCat("the file has only ", file.size(), " bytes")}});
  }
  const auto text = [](const ByteBuffer& bytes) {
    return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  ByteBuffer prefix;
  DORAD_RETURN_IF_ERROR(file.Append(kSafetensorsPrefixBytes, &prefix));
  DORAD_ASSIGN_OR_RETURN(const uint64_t length,
                         SafetensorsHeaderLength(text(prefix), file.size(), path));
  ByteBuffer header;
  DORAD_RETURN_IF_ERROR(file.Append(length, &header));
  DORAD_ASSIGN_OR_RETURN(
      SafetensorsHeader parsed,
      ParseSafetensorsHeader(text(header), file.size() - kSafetensorsPrefixBytes - length, path));
  return Shard{std::move(file), std::move(parsed), kSafetensorsPrefixBytes + length};
}

absl::Status Checkpoint::AddShards(const std::string& dir,
                                   const std::map<std::string, std::string>& index) {
  std::vector<Violation> violations;
  const auto violate = [&](const std::string& tensor, const std::string& what) {
    violations.push_back({tensor, "MODEL_INDEX_INVALID", what});
  };
  std::set<std::string> files;
  for (const auto& [tensor, file] : index) files.insert(file);
  for (const std::string& file : files) {
    absl::StatusOr<Shard> shard = OpenShard(dir, file);
    if (absl::IsNotFound(shard.status())) {
      violate(file, "is named by the index, but does not exist");
      continue;
    }
    DORAD_RETURN_IF_ERROR(shard.status());
    for (const auto& [tensor, entry] : shard->header.tensors) {
      const auto listed = index.find(tensor);
      if (listed == index.end()) {
        violate(tensor, absl::StrCat("is in ", file, ", but not in the index"));
      } else if (listed->second != file) {
        violate(tensor, absl::StrCat("is in ", file, ", but the index says ", listed->second));
      } else {
        tensors_[tensor] = {entry.dtype, entry.shape};
      }
    }
    for (const auto& [tensor, listed] : index) {
      if (listed == file && shard->header.tensors.count(tensor) == 0) {
        violate(tensor, absl::StrCat("is not in ", file, ", where the index says it is"));
      }
    }
    shards_.push_back(*std::move(shard));
  }
  return violations.empty() ? absl::OkStatus() : MakeInvalid(dir, std::move(violations));
}

absl::Status Checkpoint::ReadAll(BlockSink sink) {
  struct Task {
    const Shard* shard;
    const std::string* name;
    uint64_t begin;
  };
  std::vector<Task> tasks;
  for (const Shard& shard : shards_) {
    const auto first = static_cast<std::ptrdiff_t>(tasks.size());
    for (const auto& [name, entry] : shard.header.tensors) {
      tasks.push_back({&shard, &name, entry.begin});
    }
    // In the file's order, which disks and the kernel's read-ahead like.
    std::sort(tasks.begin() + first, tasks.end(),
              [](const Task& a, const Task& b) { return a.begin < b.begin; });
  }
  return ParallelFor(UsableCores(kMaxReaders), tasks.size(), [&](size_t i) -> absl::Status {
    const Task& task = tasks[i];
    DORAD_ASSIGN_OR_RETURN(tensors_.at(*task.name).sha256,
                           ReadTensor(*task.shard, *task.name, sink));
    return absl::OkStatus();
  });
}

absl::StatusOr<std::array<uint8_t, 32>> Checkpoint::ReadTensor(const Shard& shard,
                                                               const std::string& name,
                                                               BlockSink sink) {
  const SafetensorsEntry& entry = shard.header.tensors.at(name);
  const uint64_t size = entry.end - entry.begin;
  ByteBuffer memory(std::min(kBlockBytes, size));
  Sha256 hash;
  for (uint64_t offset = 0; offset < size;) {
    const auto block = absl::MakeSpan(memory).first(std::min(kBlockBytes, size - offset));
    DORAD_RETURN_IF_ERROR(shard.file.ReadAt(shard.data_begin + entry.begin + offset, block));
    hash.Update(block.data(), block.size());
    DORAD_RETURN_IF_ERROR(sink(name, offset, block));
    offset += block.size();
  }
  return hash.Final();
}

std::string Checkpoint::Digest() const {
  Sha256 hash;
  hash.UpdateU64(tensors_.size());
  for (const auto& [name, tensor] : tensors_) {
    hash.UpdateFramed(name);
    hash.UpdateFramed(NameOf(tensor.dtype));
    hash.UpdateU64(tensor.shape.size());
    for (const int64_t dimension : tensor.shape) hash.UpdateU64(static_cast<uint64_t>(dimension));
    hash.Update(tensor.sha256.data(), tensor.sha256.size());
  }
  return ToHex(hash.Final());
}

}  // namespace dorad::model
