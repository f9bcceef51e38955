// Random requests of sampling, and results against the reference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/sampling/sampling.h"
#include "tests/unit/kernels/sampling_reference.h"

namespace dorad::kernels {

inline constexpr int32_t kMaxTop = 24;

inline bool SameFloats(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}
inline bool SameBits(const Result& a, const Result& b) {
  return a.token == b.token && SameFloats({a.logprob}, {b.logprob}) && a.finite == b.finite &&
         a.top_ids == b.top_ids && SameFloats(a.top_logprobs, b.top_logprobs) &&
         SameFloats(a.chosen_logprobs, b.chosen_logprobs);
}

// An ulp or two: the logarithms and double sums of host and device round differently.
inline bool Near(float a, float b) {
  if (std::isnan(b)) return std::isnan(a);
  if (std::isinf(b)) return a == b;
  return std::abs(a - b) <= 2.4e-7f * std::max(1.0f, std::abs(b));
}
inline bool Near(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!Near(a[i], b[i])) return false;
  }
  return true;
}

inline std::string Describe(const Request& request) {
  const SampleRowSpec& s = request.spec;
  std::ostringstream out;
  out << "vocabulary " << request.logits.size() << " temperature " << s.temperature << " top_k "
      << s.top_k << " top_p " << s.top_p << " min_p " << s.min_p << " mode "
      << static_cast<int>(s.logprob_mode) << " top " << s.top_logprobs << " banned "
      << request.banned.size() << " conditional " << request.conditional.size() << " newest "
      << request.newest << " adjusted " << request.adjusted << " allowed " << request.allowed.size()
      << " biases " << request.biases.size() << " uses " << request.uses.size();
  return out.str();
}

// Rows whose outcome hangs on rounding are counted and not compared.
inline void ExpectAsReference(const std::vector<Request>& requests,
                              const std::vector<Result>& results) {
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

inline std::vector<float> Normal(int size, float deviation, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(size);
  for (float& value : values) value = normal(random);
  return values;
}

// Logits of many shapes: from a few likely tokens to all alike, with ties and impossible ones.
inline std::vector<float> Logits(int size, int kind, std::mt19937& random) {
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

// `count` different ids, or all.
inline std::vector<int32_t> DistinctIds(int vocabulary, int count, std::mt19937& random) {
  std::vector<int32_t> ids(vocabulary);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(std::min(count, vocabulary));
  return ids;
}

template <typename T>
inline T Pick(std::initializer_list<T> values, std::mt19937& random) {
  return values.begin()[random() % values.size()];
}

// Allowed tokens, biases, penalties and conditional bans at random, each in some requests.
inline void Adjust(int vocabulary, Request* request, std::mt19937& random) {
  const auto likely = std::max_element(request->logits.begin(), request->logits.end());
  const auto best = static_cast<int32_t>(likely - request->logits.begin());
  request->adjusted = true;
  if (random() % 3 == 0) {
    request->allowed = DistinctIds(vocabulary, 1 + random() % 500, random);
    request->allowed.push_back(best);
    std::sort(request->allowed.begin(), request->allowed.end());
    request->allowed.erase(std::unique(request->allowed.begin(), request->allowed.end()),
                           request->allowed.end());
  }
  if (random() % 2 == 0) {
    for (const int32_t id : DistinctIds(vocabulary, 1 + random() % 300, random)) {
      request->biases.push_back({id, Pick({-100.0f, -2.5f, -0.1f, 0.3f, 4.0f, 100.0f}, random)});
    }
  }
  if (random() % 4 != 0) {
    request->how.penalised = true;
    request->how.presence_penalty = Pick({0.0f, 0.7f, -2.0f, 2.0f}, random);
    request->how.frequency_penalty = Pick({0.0f, 0.3f, -0.1f, 2.0f}, random);
    request->how.repetition_penalty = Pick({1.0f, 1.3f, 0.8f, 2.0f}, random);
    for (const int32_t id : DistinctIds(vocabulary, random() % 3000, random)) {
      request->uses.push_back({id, Pick({1u, 2u, 3u, 7u, 40u}, random)});
    }
    const auto is_best = [best](const TokenUse& use) { return use.id == best; };
    if (std::none_of(request->uses.begin(), request->uses.end(), is_best)) {
      request->uses.push_back({best, 5});
    }
  }
  if (random() % 2 == 0) {
    request->newest = Pick({best, static_cast<int32_t>(random() % vocabulary)}, random);
    request->conditional = {{request->newest, static_cast<int32_t>(random() % vocabulary)},
                            {static_cast<int32_t>(random() % vocabulary), best}};
    if (random() % 2 == 0) request->conditional.push_back({request->newest, best});
  }
}

inline void MakePlain(Request* request) {
  request->banned.clear();
  request->conditional.clear();
  request->adjusted = false;
}
// Plain, and no list is needed.
inline void MakeSimple(Request* request) {
  MakePlain(request);
  request->spec.top_k = 0;
  request->spec.top_p = 1.0f;
  request->spec.min_p = 0.0f;
  request->spec.top_logprobs = 0;
}

inline Request RandomRequest(int vocabulary, int kind, std::mt19937& random) {
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
  spec.logprob_mode =
      Pick({LogprobMode::kNone, LogprobMode::kRaw, LogprobMode::kRaw, LogprobMode::kProcessed,
            LogprobMode::kProcessed, LogprobMode::kScaled, LogprobMode::kScaled},
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
  if (random() % 2 == 0) Adjust(vocabulary, &request, random);
  if (random() % 2 == 0) {
    for (int i = 0; i < 3; ++i) request.chosen.push_back(random() % vocabulary);
    if (!request.banned.empty()) request.chosen.push_back(request.banned[0]);
  }
  return request;
}

}  // namespace dorad::kernels
