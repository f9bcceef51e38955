#include "server/model/byte_pixels.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/model/config_json.h"

namespace dorad::model {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxBytes = 1 << 20;
constexpr char kWholeFile[] = "processor_config.json";  // of transformers 5
constexpr char kFile[] = "preprocessor_config.json";
constexpr char kPart[] = "image_processor";

// One number for each channel.
std::vector<double> ReadChannels(Fields& fields, const char* key, int64_t channels,
                                 NumberRange range) {
  const Json* list = fields.Find(key);
  const auto is_number = [range](const Json& value) {
    return value.is_number() && value >= range.min && value <= range.max;
  };
  if (list == nullptr || !list->is_array() || static_cast<int64_t>(list->size()) != channels ||
      !std::all_of(list->begin(), list->end(), is_number)) {
    fields.Invalid(
        key, absl::StrCat("must be ", channels, " numbers in [", range.min, ", ", range.max, "]"));
    return std::vector<double>(channels, 1.0);
  }
  return list->get<std::vector<double>>();
}

std::vector<float> ReadNumbers(Fields& fields, int64_t channels) {
  constexpr NumberRange kMeans{-1e6, 1e6};
  constexpr NumberRange kDeviations{1e-6, 1e6};
  const bool rescales = fields.Bool("do_rescale", true);
  const double factor = rescales ? fields.Number("rescale_factor", 1.0 / 255.0, {0.0, 1e6}) : 1.0;
  const bool normalizes = fields.Bool("do_normalize", true);
  std::vector<double> means(channels, 0.0), deviations(channels, 1.0);
  if (normalizes) {
    means = ReadChannels(fields, "image_mean", channels, kMeans);
    deviations = ReadChannels(fields, "image_std", channels, kDeviations);
  }
  std::vector<float> numbers;
  numbers.reserve(channels * BytePixels::kValues);
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t byte = 0; byte < BytePixels::kValues; ++byte) {
      const auto scaled = static_cast<float>(static_cast<double>(byte) * factor);
      numbers.push_back((scaled - static_cast<float>(means[c])) /
                        static_cast<float>(deviations[c]));
    }
  }
  return numbers;
}

// The settings of the image processor, and their file. NOT_FOUND, and ReadJsonObject's statuses.
absl::StatusOr<std::pair<std::string, Json>> ReadSettings(const std::string& dir) {
  absl::StatusOr<Json> whole = ReadJsonObject(dir, kWholeFile, kMaxBytes);
  if (!whole.ok() && !absl::IsNotFound(whole.status())) return whole.status();
  if (whole.ok() && whole->contains(kPart) && (*whole)[kPart].is_object()) {
    return std::pair(absl::StrCat(kWholeFile, ":", kPart), (*whole)[kPart]);
  }
  absl::StatusOr<Json> own = ReadJsonObject(dir, kFile, kMaxBytes);
  if (own.ok()) return std::pair(std::string(kFile), *std::move(own));
  if (!absl::IsNotFound(own.status())) return own.status();
  return absl::NotFoundError(
      absl::StrCat(dir, " has neither ", kFile, " nor a ", kWholeFile, " with an ", kPart));
}

}  // namespace

BytePixels ReadBytePixels(const std::string& dir, int64_t channels) {
  const auto settings = ReadSettings(dir);
  if (!settings.ok()) return {{}, std::string(settings.status().message())};
  std::vector<Violation> violations;
  Fields fields(settings->first, &settings->second, &violations);
  std::vector<float> numbers = ReadNumbers(fields, channels);
  if (violations.empty()) return {std::move(numbers), ""};
  return {{}, absl::StrCat(violations[0].field, " ", violations[0].description)};
}

}  // namespace dorad::model
