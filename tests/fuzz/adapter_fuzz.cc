// libFuzzer target: whatever the two files of an adapter are, it is either refused with reasons or
// every tensor of it belongs to a module of the base and has its shape.
//
// An input is the configuration, a line feed and the header of the weights; the data behind it is
// made up (zeros, as many as the header asks for, up to a bound), because random lengths never fit.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "server/adapter/peft/validate.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "tests/unit/support/adapter_fixture.h"

namespace {

using Shape = std::vector<int64_t>;

constexpr int kMaxRank = 64;
constexpr size_t kMaxData = 1 << 16;

// The largest number in the text that may be an end of data: what a header's tensors take.
size_t LargestNumber(const std::string& header) {
  size_t largest = 0, number = 0;
  for (const char c : header) {
    if (c < '0' || c > '9') {
      number = 0;
      continue;
    }
    number = number * 10 + static_cast<size_t>(c - '0');
    if (number > kMaxData) number = 0;
    largest = std::max(largest, number);
  }
  return largest;
}

ByteBuffer Image(const std::string& header) {
  ByteBuffer image(8 + header.size() + LargestNumber(header), std::byte{0});
  const uint64_t length = header.size();
  std::memcpy(image.data(), &length, 8);
  if (!header.empty()) std::memcpy(image.data() + 8, header.data(), header.size());
  return image;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const dorad::adapter::BaseModules modules = dorad::test::MakeModules();
  const std::string text(reinterpret_cast<const char*>(data), size);
  const size_t line_end = text.find('\n');
  const std::string config = text.substr(0, line_end);
  const std::string header =
      line_end == std::string::npos ? std::string() : text.substr(line_end + 1);
  const auto valid =
      dorad::adapter::ValidateAdapter(config, dorad::Share(Image(header)), modules, kMaxRank);
  if (!valid.ok()) {
    DORAD_CHECK(valid.status().code() == absl::StatusCode::kInvalidArgument);
    DORAD_CHECK(!dorad::ReasonOf(valid.status()).empty());
    DORAD_CHECK(valid.status().message().size() < 65536);
    return 0;
  }
  DORAD_CHECK(!valid->tensors.modules.empty());
  for (const dorad::adapter::ModuleTensors& module : valid->tensors.modules) {
    const dorad::adapter::Target& target = module.target;
    DORAD_CHECK(target.module_id >= 0 && target.module_id < modules.size());
    const dorad::adapter::BaseModule& base = modules.all()[static_cast<size_t>(target.module_id)];
    const bool linear = base.kind == dorad::adapter::ModuleKind::kLinear;
    DORAD_CHECK(target.rank >= 1 && target.rank <= kMaxRank);
    DORAD_CHECK(module.a.shape == Shape({target.rank, linear ? base.cols : base.rows}));
    DORAD_CHECK(module.b.shape == Shape({base.magnitude_size(), target.rank}));
    if (module.magnitude == nullptr) continue;
    DORAD_CHECK(module.magnitude->num_elements() == base.magnitude_size());
  }
  return 0;
}
