#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/sampling/sampling.h"
#include "tests/unit/kernels_device.h"

namespace dorad::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One row and what is wanted of it.
struct Request {
  std::vector<float> logits;
  SampleRowSpec spec;  // ranges are filled in by Batch
  std::vector<int32_t> banned;
  std::vector<int32_t> chosen;
};

struct Result {
  int32_t token = -1;
  float logprob = 0.0f;
  bool finite = true;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
  std::vector<float> chosen_logprobs;
  // Of the reference: a running sum came so close to its target that rounding may decide.
  bool close = false;
};

// --- The CPU's semantics (server/ops/sampling.cc), by sorting everything. ---

// Its exponential, and its sums of 1024 terms in the AVX-512 order.
float ReferenceExp(float x) {
  if (x < -87.3f) return 0.0f;
  const float magic = 12582912.0f;
  const volatile float shifted = std::fma(x, 1.44269504f, magic);
  const float n = shifted - magic;
  float r = std::fma(n, -0.693145752f, x);
  r = std::fma(n, -1.42860677e-6f, r);
  float p = 1.0f / 5040;
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f}) p = std::fma(p, r, c);
  const volatile float pr = p * r;
  const volatile float y = std::fma(pr, r, r) + 1.0f;
  return std::ldexp(y, static_cast<int>(n));
}

double BlockSum(const std::vector<float>& z, size_t begin, float maximum) {
  float columns[64] = {};
  for (size_t i = begin; i < std::min(begin + 1024, z.size()); ++i) {
    columns[i % 64] += ReferenceExp(z[i] - maximum);
  }
  float lanes[16];
  for (int i = 0; i < 16; ++i) {
    lanes[i] = (columns[i] + columns[i + 16]) + (columns[i + 32] + columns[i + 48]);
  }
  for (int apart : {8, 4, 2, 1}) {
    for (int i = 0; i < apart; ++i) lanes[i] += lanes[i + apart];
  }
  return lanes[0];
}

struct ReferenceRow {
  std::vector<float> z;
  std::vector<int32_t> order;
  float maximum = -kInfinity;
  double total = 0.0;
  bool usable = true;

  ReferenceRow(const std::vector<float>& logits, float temperature,
               const std::vector<int32_t>& banned)
      : z(logits) {
    float largest = -kInfinity;
    for (float x : logits) {
      if (!(x < kInfinity)) usable = false;
      largest = std::max(largest, x);
    }
    if (!(largest > -kInfinity)) usable = false;
    if (!usable) return;
    if (temperature != 1.0f) {
      for (float& x : z) {
        const volatile float distance = x - largest;
        x = distance / temperature;
      }
    }
    for (int32_t id : banned) z[id] = -kInfinity;
    maximum = *std::max_element(z.begin(), z.end());
    usable = maximum > -kInfinity;
    if (!usable) return;
    for (size_t i = 0; i < z.size(); i += 1024) total += BlockSum(z, i, maximum);
    order.resize(z.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return z[a] > z[b]; });
  }
  float LogProb(float value, double sum) const {
    return static_cast<float>(static_cast<double>(value) - maximum - std::log(sum));
  }
};

bool Close(double a, double b, double total) { return std::abs(a - b) < 1e-8 * total; }

void ReferenceFull(const ReferenceRow& row, int32_t token, const Request& request, bool candidates,
                   Result* result) {
  result->logprob = token < 0 ? kNan : row.LogProb(row.z[token], row.total);
  for (int i = 0; i < request.spec.top_logprobs; ++i) {
    const bool present =
        i < static_cast<int>(row.z.size()) && (!candidates || row.z[row.order[i]] > -kInfinity);
    result->top_ids.push_back(present ? row.order[i] : -1);
    result->top_logprobs.push_back(present ? row.LogProb(row.z[row.order[i]], row.total)
                                           : -kInfinity);
  }
  for (int32_t id : request.chosen) {
    result->chosen_logprobs.push_back(row.LogProb(row.z[id], row.total));
  }
}

double ReferenceUniform(const SampleRowSpec& spec) {
  uint32_t c[4] = {static_cast<uint32_t>(spec.position), static_cast<uint32_t>(spec.position >> 32),
                   spec.sample_index, 0};
  uint32_t k[2] = {static_cast<uint32_t>(spec.seed), static_cast<uint32_t>(spec.seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
        static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
    std::copy(next, next + 4, c);
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return static_cast<double>((static_cast<uint64_t>(c[0]) << 32 | c[1]) >> 11) * 0x1p-53;
}

Result ReferenceUnusable(const Request& request, bool lists) {
  Result result;
  result.finite = false;
  result.logprob = kNan;
  if (lists) {
    result.top_ids.assign(request.spec.top_logprobs, -1);
    result.top_logprobs.assign(request.spec.top_logprobs, kNan);
    result.chosen_logprobs.assign(request.chosen.size(), kNan);
  }
  return result;
}

Result Reference(const Request& request) {
  const SampleRowSpec& spec = request.spec;
  const int vocabulary = static_cast<int>(request.logits.size());
  const bool greedy = spec.temperature == 0.0f;
  const bool processed = spec.logprob_mode == LogprobMode::kProcessed;
  const ReferenceRow row(request.logits, greedy ? 1.0f : spec.temperature, request.banned);
  if (!row.usable) {
    return ReferenceUnusable(request, spec.logprob_mode != LogprobMode::kNone);
  }
  Result result;
  const double uniform = ReferenceUniform(spec);
  if (greedy) {
    result.token = row.order[0];
    if (processed) {
      for (int i = 0; i < spec.top_logprobs; ++i) {
        result.top_ids.push_back(i == 0 ? result.token : -1);
        result.top_logprobs.push_back(i == 0 ? 0.0f : -kInfinity);
      }
      for (int32_t id : request.chosen) {
        result.chosen_logprobs.push_back(id == result.token ? 0.0f : -kInfinity);
      }
    }
  } else if ((spec.top_k <= 0 || spec.top_k >= vocabulary) && spec.top_p >= 1.0f &&
             spec.min_p <= 0.0f) {
    const double target = uniform * row.total;
    double running = 0.0;
    size_t block = 0;
    while (block + 1024 < row.z.size()) {
      const double sum = BlockSum(row.z, block, row.maximum);
      if (running + sum > target) break;
      running += sum;
      block += 1024;
    }
    for (size_t i = block; i < std::min(block + 1024, row.z.size()); ++i) {
      running += ReferenceExp(row.z[i] - row.maximum);
      result.close = result.close || std::abs(running - target) < 1e-13 * row.total;
      if (running > target && result.token < 0) result.token = static_cast<int32_t>(i);
    }
    if (result.token < 0) {
      for (size_t i = block; i < std::min(block + 1024, row.z.size()); ++i) {
        if (ReferenceExp(row.z[i] - row.maximum) > 0.0f) result.token = static_cast<int32_t>(i);
      }
    }
    if (processed) ReferenceFull(row, result.token, request, true, &result);
  } else {
    std::vector<float> weights;
    for (int32_t id : row.order) weights.push_back(ReferenceExp(row.z[id] - row.maximum));
    const bool by_count = spec.top_k > 0 && spec.top_k < vocabulary;
    size_t kept = by_count ? spec.top_k : vocabulary;
    if (spec.top_p < 1.0f) {
      double all = by_count ? 0.0 : row.total;
      if (by_count) {
        for (size_t i = 0; i < kept; ++i) all += weights[i];
      }
      const double mass = static_cast<double>(spec.top_p) * all;
      double running = 0.0;
      size_t size = 0;
      bool reached = false;
      while (size < kept && !reached) {
        running += weights[size++];
        reached = running >= mass;
        result.close = result.close || Close(running, mass, all);
      }
      kept = size;
      // Units of 2^-45 leave the last of many to rounding.
      if (kept > static_cast<size_t>(kMostListed) / 2) {
        result.close = result.close || Close(running - weights[kept - 1], mass, all);
      }
    }
    while (kept > 1 && (weights[kept - 1] < spec.min_p || weights[kept - 1] == 0.0f)) --kept;
    double total = 0.0;
    for (size_t i = 0; i < kept; ++i) total += weights[i];
    const double target = uniform * total;
    double running = 0.0;
    size_t drawn = kept - 1;
    for (size_t i = 0; i < kept; ++i) {
      running += weights[i];
      result.close = result.close || Close(running, target, total);
      if (running > target) {
        drawn = i;
        break;
      }
    }
    result.token = row.order[drawn];
    if (processed) {
      result.logprob = row.LogProb(row.z[result.token], total);
      std::vector<float> logprobs(vocabulary, -kInfinity);
      for (size_t i = 0; i < kept; ++i) {
        logprobs[row.order[i]] = row.LogProb(row.z[row.order[i]], total);
      }
      for (size_t i = 0; i < static_cast<size_t>(spec.top_logprobs); ++i) {
        result.top_ids.push_back(i < kept ? row.order[i] : -1);
        result.top_logprobs.push_back(i < kept ? logprobs[row.order[i]] : -kInfinity);
      }
      for (int32_t id : request.chosen) result.chosen_logprobs.push_back(logprobs[id]);
    }
  }
  if (spec.logprob_mode == LogprobMode::kRaw) {
    ReferenceFull(ReferenceRow(request.logits, 1.0f, {}), result.token, request, false, &result);
  }
  return result;
}

// --- The kernel. ---

constexpr int32_t kMaxTop = 24;

// All requests as one batch; logits begin `shift` floats beyond an aligned address, and rows are
// `padding` floats longer than the vocabulary.
class Batch {
 public:
  Batch(const std::vector<Request>& requests, int shift, int padding)
      : vocabulary_(static_cast<int>(requests[0].logits.size())), requests_(requests) {
    const int64_t ld = vocabulary_ + padding;
    std::vector<float> logits(shift + requests.size() * ld, kNan);
    std::vector<int32_t> banned;
    std::vector<int32_t> chosen;
    std::vector<SampleRowSpec> specs;
    for (size_t r = 0; r < requests.size(); ++r) {
      const Request& request = requests[r];
      std::copy(request.logits.begin(), request.logits.end(), logits.begin() + shift + r * ld);
      SampleRowSpec spec = request.spec;
      spec.banned_begin = static_cast<int32_t>(banned.size());
      spec.banned_count = static_cast<int32_t>(request.banned.size());
      spec.chosen_begin = static_cast<int32_t>(chosen.size());
      spec.chosen_count = static_cast<int32_t>(request.chosen.size());
      banned.insert(banned.end(), request.banned.begin(), request.banned.end());
      chosen.insert(chosen.end(), request.chosen.begin(), request.chosen.end());
      specs.push_back(spec);
      begins_.push_back(spec.chosen_begin);
    }
    const size_t rows = requests.size();
    logits_ = std::make_unique<DeviceBuffer<float>>(logits);
    specs_ = std::make_unique<DeviceBuffer<SampleRowSpec>>(specs);
    banned_ = std::make_unique<DeviceBuffer<int32_t>>(banned);
    chosen_ = std::make_unique<DeviceBuffer<int32_t>>(chosen);
    tokens_ = std::make_unique<DeviceBuffer<int32_t>>(rows);
    logprobs_ = std::make_unique<DeviceBuffer<float>>(rows);
    finite_ = std::make_unique<DeviceBuffer<uint8_t>>(rows);
    top_ids_ = std::make_unique<DeviceBuffer<int32_t>>(rows * kMaxTop);
    top_logprobs_ = std::make_unique<DeviceBuffer<float>>(rows * kMaxTop);
    chosen_logprobs_ = std::make_unique<DeviceBuffer<float>>(chosen.size());
    params_.logits = logits_->get() + shift;
    params_.specs = specs_->get();
    params_.banned = banned_->get();
    params_.chosen_ids = chosen_->get();
    params_.out = {tokens_->get(),  logprobs_->get(),     finite_->get(),
                   top_ids_->get(), top_logprobs_->get(), chosen_logprobs_->get()};
    params_.logits_ld = ld;
    params_.rows = static_cast<int32_t>(rows);
    params_.vocabulary = vocabulary_;
    params_.max_top = kMaxTop;
  }

  SampleParams& params() { return params_; }
  const DeviceBuffer<SampleRowSpec>& specs() const { return *specs_; }

  // After a run. Lists as long as wanted.
  std::vector<Result> Read(bool score = false) const {
    const auto tokens = tokens_->Read();
    const auto logprobs = logprobs_->Read();
    const auto finite = finite_->Read();
    const auto top_ids = top_ids_->Read();
    const auto top_logprobs = top_logprobs_->Read();
    const auto chosen = chosen_logprobs_->Read();
    std::vector<Result> results(tokens.size());
    for (size_t r = 0; r < results.size(); ++r) {
      Result& result = results[r];
      result.token = tokens[r];
      result.logprob = logprobs[r];
      result.finite = finite[r] != 0;
      if (!score && requests_[r].spec.logprob_mode == LogprobMode::kNone) continue;
      const size_t top = requests_[r].spec.top_logprobs;
      result.top_ids.assign(top_ids.begin() + r * kMaxTop, top_ids.begin() + r * kMaxTop + top);
      result.top_logprobs.assign(top_logprobs.begin() + r * kMaxTop,
                                 top_logprobs.begin() + r * kMaxTop + top);
      result.chosen_logprobs.assign(chosen.begin() + begins_[r],
                                    chosen.begin() + begins_[r] + requests_[r].chosen.size());
    }
    return results;
  }

 private:
  const int vocabulary_;
  const std::vector<Request> requests_;
  std::vector<int32_t> begins_;
  SampleParams params_;
  std::unique_ptr<DeviceBuffer<float>> logits_, logprobs_, top_logprobs_, chosen_logprobs_;
  std::unique_ptr<DeviceBuffer<SampleRowSpec>> specs_;
  std::unique_ptr<DeviceBuffer<int32_t>> banned_, chosen_, tokens_, top_ids_;
  std::unique_ptr<DeviceBuffer<uint8_t>> finite_;
};

std::vector<Result> SampleAll(const std::vector<Request>& requests, int shift = 0,
                              int padding = 0) {
  Batch batch(requests, shift, padding);
  EXPECT_EQ(Sample(batch.params(), nullptr), cudaSuccess);
  std::vector<Result> results = batch.Read();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  return results;
}
Result SampleOne(const Request& request) { return SampleAll({request})[0]; }

std::vector<Result> ScoreAll(const std::vector<Request>& requests,
                             const std::vector<int32_t>& targets) {
  Batch batch(requests, 0, 0);
  const std::vector<SampleRowSpec> specs = batch.specs().Read();
  std::vector<ScoreRowSpec> scores;
  for (size_t r = 0; r < requests.size(); ++r) {
    scores.push_back({targets[r], specs[r].temperature, specs[r].top_logprobs,
                      specs[r].chosen_begin, specs[r].chosen_count});
  }
  const DeviceBuffer<ScoreRowSpec> device_scores(scores);
  const SampleParams& p = batch.params();
  ScoreParams params;
  params.logits = p.logits;
  params.specs = device_scores.get();
  params.chosen_ids = p.chosen_ids;
  params.out = p.out;
  params.logits_ld = p.logits_ld;
  params.rows = p.rows;
  params.vocabulary = p.vocabulary;
  params.max_top = p.max_top;
  EXPECT_EQ(Score(params, nullptr), cudaSuccess);
  return batch.Read(true);
}

bool SameFloats(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}
bool SameBits(const Result& a, const Result& b) {
  return a.token == b.token && SameFloats({a.logprob}, {b.logprob}) && a.finite == b.finite &&
         a.top_ids == b.top_ids && SameFloats(a.top_logprobs, b.top_logprobs) &&
         SameFloats(a.chosen_logprobs, b.chosen_logprobs);
}

// An ulp or two: the logarithms and double sums of host and device round differently.
bool Near(float a, float b) {
  if (std::isnan(b)) return std::isnan(a);
  if (std::isinf(b)) return a == b;
  return std::abs(a - b) <= 2.4e-7f * std::max(1.0f, std::abs(b));
}
bool Near(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!Near(a[i], b[i])) return false;
  }
  return true;
}

std::string Describe(const Request& request) {
  const SampleRowSpec& s = request.spec;
  std::ostringstream out;
  out << "vocabulary " << request.logits.size() << " temperature " << s.temperature << " top_k "
      << s.top_k << " top_p " << s.top_p << " min_p " << s.min_p << " mode "
      << static_cast<int>(s.logprob_mode) << " top " << s.top_logprobs << " banned "
      << request.banned.size();
  return out.str();
}

// Rows whose outcome hangs on rounding are counted and not compared.
void ExpectAsReference(const std::vector<Request>& requests, const std::vector<Result>& results) {
  int close = 0;
  for (size_t r = 0; r < requests.size(); ++r) {
    SCOPED_TRACE(testing::Message() << "row " << r << ": " << Describe(requests[r]));
    const Result expected = Reference(requests[r]);
    if (expected.close) {
      ++close;
      continue;
    }
    EXPECT_EQ(results[r].token, expected.token);
    EXPECT_EQ(results[r].finite, expected.finite);
    EXPECT_TRUE(Near(results[r].logprob, expected.logprob))
        << results[r].logprob << " " << expected.logprob;
    EXPECT_EQ(results[r].top_ids, expected.top_ids);
    EXPECT_TRUE(Near(results[r].top_logprobs, expected.top_logprobs));
    EXPECT_TRUE(Near(results[r].chosen_logprobs, expected.chosen_logprobs));
  }
  EXPECT_LE(close, 1 + requests.size() / 10);
}

std::vector<float> Normal(int size, float deviation, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(size);
  for (float& value : values) value = normal(random);
  return values;
}

// Logits of many shapes: from a few likely tokens to all alike, with ties and impossible ones.
std::vector<float> Logits(int size, int kind, std::mt19937& random) {
  switch (kind % 8) {
    case 0:
      return Normal(size, 4.0f, random);
    case 1: {  // a model that knows what it wants
      std::vector<float> x = Normal(size, 1.5f, random);
      for (int i = 0; i < 30; ++i) x[random() % size] = 18.0f - 0.3f * static_cast<float>(i);
      return x;
    }
    case 2:
      return Normal(size, 0.01f, random);
    case 3: {  // ties
      std::vector<float> x = Normal(size, 3.0f, random);
      for (float& v : x) v = std::round(v);
      return x;
    }
    case 4: {  // most are impossible
      std::vector<float> x = Normal(size, 2.0f, random);
      for (float& v : x) v = random() % 16 != 0 ? -kInfinity : v;
      x[random() % size] = 1.0f;
      return x;
    }
    case 5:
      return std::vector<float>(size, 1.25f);
    case 6:
      return Normal(size, 40.0f, random);
    default: {  // masked with a large number, large offset
      std::vector<float> x = Normal(size, 2.0f, random);
      for (float& v : x) v = random() % 3 != 0 ? v + 300.0f : -1e30f;
      x[0] = 300.0f;
      return x;
    }
  }
}

template <typename T>
T Pick(std::initializer_list<T> values, std::mt19937& random) {
  return values.begin()[random() % values.size()];
}

Request RandomRequest(int vocabulary, int kind, std::mt19937& random) {
  Request request;
  request.logits = Logits(vocabulary, kind, random);
  SampleRowSpec& spec = request.spec;
  spec.seed = random() | static_cast<uint64_t>(random()) << 32;
  spec.position = random() % 5000;
  spec.sample_index = random() % 8;
  spec.temperature = Pick({0.0f, 1.0f, 1.0f, 0.7f, 0.3f, 1.5f, 3.0f}, random);
  spec.top_k = Pick({0, 0, 0, 1, 5, 50, 800, 2047, 5000, vocabulary - 1}, random);
  spec.top_k = std::max(spec.top_k, 0);
  spec.top_p = Pick({1.0f, 1.0f, 1.0f, 0.95f, 0.9f, 0.5f, 0.0f, 0.999f}, random);
  spec.min_p = Pick({0.0f, 0.0f, 0.0f, 0.05f, 0.5f, 1e-4f, 1.0f}, random);
  spec.logprob_mode = Pick({LogprobMode::kNone, LogprobMode::kRaw, LogprobMode::kRaw,
                            LogprobMode::kProcessed, LogprobMode::kProcessed},
                           random);
  spec.top_logprobs = Pick({0, 0, 1, 5, kMaxTop}, random);
  if (random() % 3 == 0) {
    const int count = std::min<int>(1 + random() % 6, vocabulary - 1);
    for (int i = 0; i < count; ++i) request.banned.push_back(random() % vocabulary);
    // The likeliest, too: bans must change the maximum.
    const auto best = std::max_element(request.logits.begin(), request.logits.end());
    if (vocabulary > 8) {
      request.banned.push_back(static_cast<int32_t>(best - request.logits.begin()));
    }
  }
  if (random() % 2 == 0) {
    for (int i = 0; i < 3; ++i) request.chosen.push_back(random() % vocabulary);
    if (!request.banned.empty()) request.chosen.push_back(request.banned[0]);
  }
  return request;
}

class SamplingKernelTest : public KernelTest {};

TEST_F(SamplingKernelTest, MixedRowsGiveTheCpusResults) {
  struct Size {
    int vocabulary, rows, padding;
  };
  // Less than a chunk, a chunk's edges, fewer chunks than blocks, real vocabularies, the largest;
  // rows that are aligned and rows that are not.
  for (const Size size :
       {Size{1, 40, 0}, Size{5, 80, 3}, Size{64, 80, 0}, Size{1000, 160, 0}, Size{1023, 80, 0},
        Size{1024, 80, 0}, Size{1025, 80, 3}, Size{8192, 80, 0}, Size{8193, 80, 3},
        Size{49152, 96, 4}, Size{151936, 64, 0}, Size{262144, 24, 0}, Size{151937, 16, 0},
        Size{kMostVocabulary, 8, 0}}) {
    std::mt19937 random(size.vocabulary);
    std::vector<Request> requests;
    for (int r = 0; r < size.rows; ++r) {
      requests.push_back(RandomRequest(size.vocabulary, r, random));
    }
    ExpectAsReference(requests, SampleAll(requests, 0, size.padding));
    if (HasFailure()) return;
  }
}

TEST_F(SamplingKernelTest, ARowDependsOnItselfOnly) {
  std::mt19937 random(3);
  std::vector<Request> requests;
  for (int r = 0; r < 80; ++r) requests.push_back(RandomRequest(12000, r, random));
  const std::vector<Result> together = SampleAll(requests);
  const std::vector<Result> unaligned = SampleAll(requests, 1, 1);
  std::vector<Request> reversed(requests.rbegin(), requests.rend());
  const std::vector<Result> backwards = SampleAll(reversed, 0, 8);
  for (size_t r = 0; r < requests.size(); ++r) {
    SCOPED_TRACE(testing::Message() << "row " << r << ": " << Describe(requests[r]));
    EXPECT_TRUE(SameBits(together[r], SampleOne(requests[r])));
    EXPECT_TRUE(SameBits(together[r], unaligned[r]));
    EXPECT_TRUE(SameBits(together[r], backwards[requests.size() - 1 - r]));
  }
}

TEST_F(SamplingKernelTest, ScoreGivesTheCpusResults) {
  std::mt19937 random(4);
  for (int vocabulary : {3, 1500, 151936}) {
    std::vector<Request> requests;
    std::vector<int32_t> targets;
    for (int r = 0; r < 32; ++r) {
      Request request = RandomRequest(vocabulary, r, random);
      request.banned.clear();
      request.spec.temperature = std::max(request.spec.temperature, 0.1f);
      request.spec.logprob_mode = LogprobMode::kRaw;
      targets.push_back(r % 4 == 0 ? -1 : static_cast<int32_t>(random() % vocabulary));
      requests.push_back(request);
    }
    const std::vector<Result> results = ScoreAll(requests, targets);
    for (size_t r = 0; r < requests.size(); ++r) {
      SCOPED_TRACE(testing::Message() << "row " << r << ": " << Describe(requests[r]));
      const ReferenceRow row(requests[r].logits, requests[r].spec.temperature, {});
      Result expected;
      ReferenceFull(row, targets[r], requests[r], false, &expected);
      EXPECT_EQ(results[r].token, targets[r]);
      EXPECT_TRUE(results[r].finite);
      EXPECT_TRUE(Near(results[r].logprob, expected.logprob))
          << results[r].logprob << " " << expected.logprob;
      EXPECT_EQ(results[r].top_ids, expected.top_ids);
      EXPECT_TRUE(Near(results[r].top_logprobs, expected.top_logprobs));
      EXPECT_TRUE(Near(results[r].chosen_logprobs, expected.chosen_logprobs));
    }
  }
}

TEST_F(SamplingKernelTest, RawSampleAndScoreAgreeToTheBit) {
  std::mt19937 random(5);
  std::vector<Request> requests;
  for (int r = 0; r < 64; ++r) {
    Request request = RandomRequest(30000, r, random);
    request.spec.logprob_mode = LogprobMode::kRaw;
    requests.push_back(request);
  }
  const std::vector<Result> sampled = SampleAll(requests);
  std::vector<int32_t> targets;
  for (const Result& result : sampled) targets.push_back(result.token);
  for (Request& request : requests) request.spec.temperature = 1.0f;
  const std::vector<Result> scored = ScoreAll(requests, targets);
  for (size_t r = 0; r < requests.size(); ++r) {
    EXPECT_TRUE(SameBits(sampled[r], scored[r])) << Describe(requests[r]);
  }
}

TEST_F(SamplingKernelTest, LogprobsAreTheLogSoftmaxInDouble) {
  std::mt19937 random(6);
  for (float temperature : {1.0f, 0.6f, 2.0f}) {
    Request request;
    request.logits = Normal(151936, 3.0f, random);
    request.spec.temperature = temperature;
    request.spec.logprob_mode = LogprobMode::kProcessed;
    double total = 0.0;
    for (float x : request.logits) total += std::exp(static_cast<double>(x) / temperature);
    const Result result = SampleOne(request);
    EXPECT_NEAR(result.logprob,
                static_cast<double>(request.logits[result.token]) / temperature - std::log(total),
                3e-6);
  }
}

// Pearson's statistic of draws at many positions against the probabilities in double.
TEST_F(SamplingKernelTest, DrawsFollowTheDistribution) {
  std::mt19937 random(7);
  constexpr int kVocabulary = 60;
  constexpr int kDraws = 20000;
  const std::vector<float> logits = Normal(kVocabulary, 1.0f, random);
  struct Setting {
    float temperature, top_p, min_p;
    int top_k;
  };
  for (const Setting s : {Setting{1.0f, 1.0f, 0.0f, 0}, Setting{0.5f, 1.0f, 0.0f, 0},
                          Setting{1.0f, 1.0f, 0.0f, 20}, Setting{1.3f, 0.8f, 0.0f, 0},
                          Setting{1.0f, 1.0f, 0.2f, 0}, Setting{0.8f, 0.9f, 0.05f, 30}}) {
    std::vector<Request> requests(kDraws);
    for (int i = 0; i < kDraws; ++i) {
      requests[i].logits = logits;
      requests[i].spec.temperature = s.temperature;
      requests[i].spec.top_k = s.top_k;
      requests[i].spec.top_p = s.top_p;
      requests[i].spec.min_p = s.min_p;
      requests[i].spec.seed = 77;
      requests[i].spec.position = i / 4;
      requests[i].spec.sample_index = i % 4;
    }
    std::vector<int> order(kVocabulary);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    std::vector<double> p(kVocabulary, 0.0);
    double sum = 0.0;
    const int most = s.top_k > 0 ? s.top_k : kVocabulary;
    for (int i = 0; i < most; ++i) {
      p[order[i]] = std::exp(static_cast<double>(logits[order[i]]) / s.temperature);
      sum += p[order[i]];
    }
    double running = 0.0;
    double kept = 0.0;
    for (int i = 0; i < kVocabulary; ++i) {
      double& q = p[order[i]];
      if (running >= s.top_p * sum || q < s.min_p * p[order[0]]) q = 0.0;
      running += q;
      kept += q;
    }
    std::vector<int> counts(kVocabulary, 0);
    for (const Result& result : SampleAll(requests)) ++counts[result.token];
    double statistic = 0.0;
    int freedom = -1;
    for (int i = 0; i < kVocabulary; ++i) {
      if (p[i] == 0.0) {
        EXPECT_EQ(counts[i], 0) << i;
        continue;
      }
      const double expected = kDraws * p[i] / kept;
      statistic += (counts[i] - expected) * (counts[i] - expected) / expected;
      ++freedom;
    }
    EXPECT_LT(statistic, freedom + 4.0 * std::sqrt(2.0 * freedom))
        << s.temperature << " " << s.top_k;
  }
}

TEST_F(SamplingKernelTest, GreedyTakesTheSmallestIdOfTheLargest) {
  std::mt19937 random(8);
  Request request;
  request.logits = Normal(150000, 1.0f, random);
  request.spec.temperature = 0.0f;
  request.spec.logprob_mode = LogprobMode::kProcessed;
  request.spec.top_logprobs = 2;
  for (const auto& [low, high] : {std::pair{300, 700}, {3, 149999}, {40000, 40001}, {5, 5}}) {
    Request tied = request;
    tied.logits[low] = tied.logits[high] = 9.0f;
    tied.chosen = {low, high};
    const Result result = SampleOne(tied);
    EXPECT_EQ(result.token, low);
    EXPECT_EQ(result.logprob, 0.0f);
    EXPECT_EQ(result.top_ids, (std::vector<int32_t>{low, -1}));
    tied.banned = {low};
    EXPECT_EQ(SampleOne(tied).token, low == high ? Reference(tied).token : high);
  }
  // Zeros of either sign are equal.
  Request zeros;
  zeros.logits = std::vector<float>(4000, -1.0f);
  zeros.logits[1000] = -0.0f;
  zeros.logits[3000] = 0.0f;
  zeros.spec.temperature = 0.0f;
  EXPECT_EQ(SampleOne(zeros).token, 1000);
  zeros.spec.temperature = 1.0f;
  zeros.spec.top_k = 1;
  EXPECT_EQ(SampleOne(zeros).token, 1000);
}

TEST_F(SamplingKernelTest, RowsThatCannotBeSampledAreFlagged) {
  std::mt19937 random(9);
  std::vector<Request> requests;
  for (int vocabulary : {3000}) {
    for (int fault = 0; fault < 6; ++fault) {
      for (int spec = 0; spec < 6; ++spec) {
        Request request = RandomRequest(vocabulary, 0, random);
        request.spec.temperature = spec % 2 == 0 ? 1.0f : 0.5f;
        request.spec.top_logprobs = 2;
        request.banned.clear();
        if (fault == 0) request.logits[vocabulary - 1] = kNan;
        if (fault == 1) request.logits[0] = kInfinity;
        if (fault == 2) std::fill(request.logits.begin(), request.logits.end(), -kInfinity);
        if (fault == 3) {
          request.banned.resize(vocabulary);
          std::iota(request.banned.begin(), request.banned.end(), 0);
        }
        if (fault == 4) {
          std::fill(request.logits.begin(), request.logits.end(), -kInfinity);
          request.logits[7] = 1.0f;
          request.banned = {7};
        }
        requests.push_back(request);
      }
    }
  }
  const std::vector<Result> results = SampleAll(requests);
  for (size_t r = 0; r < results.size(); ++r) EXPECT_EQ(results[r].finite, r / 6 == 5) << r;
  ExpectAsReference(requests, results);
}

TEST_F(SamplingKernelTest, TinyAndHugeTemperatures) {
  std::mt19937 random(10);
  std::vector<Request> requests;
  for (float temperature : {1e-38f, 1e-30f, 1e-6f, 1e6f, 1e30f}) {
    for (int kind = 0; kind < 8; ++kind) {
      Request request = RandomRequest(5000, kind, random);
      request.spec.temperature = temperature;
      requests.push_back(request);
    }
  }
  ExpectAsReference(requests, SampleAll(requests));
}

TEST_F(SamplingKernelTest, RowsBeyondThoseInUseAreLeftAlone) {
  std::mt19937 random(11);
  std::vector<Request> requests;
  for (int r = 0; r < 4; ++r) requests.push_back(RandomRequest(100, 0, random));
  Batch batch(requests, 0, 0);
  const DeviceBuffer<int32_t> in_use(std::vector<int32_t>{2});
  batch.params().rows_in_use = in_use.get();
  DORAD_ASSERT_CUDA(Sample(batch.params(), nullptr));
  const std::vector<Result> results = batch.Read();
  EXPECT_GE(results[1].token, 0);
  EXPECT_EQ(results[2].token, -1);  // as the buffer was
  EXPECT_TRUE(std::isnan(results[3].logprob));
}

TEST_F(SamplingKernelTest, OneGraphServesWhateverTheSpecificationsSay) {
  std::mt19937 random(12);
  std::vector<Request> first;
  std::vector<Request> second;
  for (int r = 0; r < 16; ++r) {
    first.push_back(RandomRequest(9000, r, random));
    second.push_back(first.back());
    second.back().spec = RandomRequest(9000, r, random).spec;
  }
  Batch batch(first, 0, 0);
  Batch other(second, 0, 0);
  cudaStream_t stream;
  DORAD_ASSERT_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  DORAD_ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  DORAD_ASSERT_CUDA(Sample(batch.params(), stream));
  DORAD_ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  DORAD_ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  DORAD_ASSERT_CUDA(cudaGraphLaunch(executable, stream));
  ExpectAsReference(first, batch.Read());
  DORAD_ASSERT_CUDA(cudaMemcpy(batch.specs().get(), other.specs().get(),
                               sizeof(SampleRowSpec) * first.size(), cudaMemcpyDeviceToDevice));
  DORAD_ASSERT_CUDA(cudaGraphLaunch(executable, stream));
  DORAD_ASSERT_CUDA(cudaStreamSynchronize(stream));
  std::vector<int32_t> tokens(first.size());
  DORAD_ASSERT_CUDA(cudaMemcpy(tokens.data(), batch.params().out.tokens,
                               tokens.size() * sizeof(int32_t), cudaMemcpyDeviceToHost));
  for (size_t r = 0; r < second.size(); ++r) {
    const Result expected = Reference(second[r]);
    EXPECT_TRUE(expected.close || tokens[r] == expected.token) << Describe(second[r]);
  }
  DORAD_ASSERT_CUDA(cudaGraphExecDestroy(executable));
  DORAD_ASSERT_CUDA(cudaGraphDestroy(graph));
  DORAD_ASSERT_CUDA(cudaStreamDestroy(stream));
}

TEST_F(SamplingKernelTest, RefusesBadSizesAndTakesNone) {
  SampleParams params;
  params.vocabulary = 100;
  params.logits_ld = 100;
  EXPECT_EQ(Sample(params, nullptr), cudaSuccess);
  params.rows = -1;
  EXPECT_EQ(Sample(params, nullptr), cudaErrorInvalidValue);
  params.rows = 1;
  params.vocabulary = kMostVocabulary + 1;
  params.logits_ld = params.vocabulary;
  EXPECT_EQ(Sample(params, nullptr), cudaErrorInvalidValue);
  params.vocabulary = 100;
  params.logits_ld = 99;
  EXPECT_EQ(Sample(params, nullptr), cudaErrorInvalidValue);
  params.logits_ld = 100;
  params.max_top = kMostTopLogprobs + 1;
  EXPECT_EQ(Sample(params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace dorad::kernels
