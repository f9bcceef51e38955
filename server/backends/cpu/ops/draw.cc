#include "server/backends/cpu/ops/draw.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "server/backends/cpu/simd/kernels.h"

namespace dorad::ops {
namespace {

using cpu::ActiveKernels;
using cpu::Candidate;
using cpu::LogitRow;

// Up to here candidates are taken one by one.
constexpr size_t kFew = 64;

// The candidate in the lead. Others are compared by lower bounds of E / weight first, with a margin
// for the rounding of those: keys decide.
class Race {
 public:
  // The first candidate is the likeliest, which leaves little room to the others.
  Race(const LogitRow& row, const Noise& noise, Candidate last)
      : row_(row), noise_(noise), last_(last) {
    const int32_t likeliest = row.ArgMax();
    Enter(likeliest, row[likeliest], 0.0f);
  }

  int32_t winner() const { return winner_; }
  float limit() const { return limit_; }

  // least: a lower bound of E.
  void Enter(int32_t id, float logit, float least) {
    const double distance = static_cast<double>(logit) - static_cast<double>(row_.maximum());
    if (!(least < limit_ * std::exp(static_cast<float>(distance)))) return;
    const int64_t key = noise_.Key(id, distance);
    if (key < key_ || (key == key_ && id > winner_)) return;
    key_ = key;
    winner_ = id;
    limit_ = 1.001f * static_cast<float>(std::exp(-Noise::ValueOf(key)));
  }

  void Enter(const Candidate& candidate) {
    const int64_t group = GroupOf(candidate.id);
    const int64_t member = MemberOf(candidate.id);
    const uint32_t word = noise_.GroupWord(group);
    Enter(candidate.id, candidate.logit,
          Noise::LeastOfGroup(word) +
              Noise::LeastOfMember(word, noise_.MemberWord(group, member), member));
  }

  void EnterGroup(int64_t group, uint32_t word) {
    PhiloxWords counter = noise_.counter();
    counter[3] = Noise::kMembers | static_cast<uint32_t>(group * kGroupSize / 4);
    uint32_t words[kGroupSize];
    ActiveKernels().philox(counter.data(), noise_.key().data(), kGroupSize / 4, words);
    const float weight = std::exp(row_.maxima()[group] - row_.maximum());
    for (int64_t member = 0; member < kGroupSize; ++member) {
      const float least =
          Noise::LeastOfGroup(word) + Noise::LeastOfMember(word, words[member], member);
      if (!(least < limit_ * weight)) continue;
      const int64_t id = IdOf(group, member);
      if (id >= row_.size()) return;
      const Candidate candidate = {row_[id], static_cast<int32_t>(id)};
      if (!Before(last_, candidate)) Enter(candidate.id, candidate.logit, least);
    }
  }

 private:
  const LogitRow& row_;
  const Noise& noise_;
  const Candidate last_;  // those behind are no candidates
  int64_t key_ = -1;
  int32_t winner_ = -1;
  float limit_ = std::numeric_limits<float>::infinity();
};

void EnterAll(const LogitRow& row, const Noise& noise, Race* race) {
  const auto groups = static_cast<int64_t>(row.maxima().size());
  std::vector<uint32_t> words(groups);
  std::vector<float> bounds(groups);
  ActiveKernels().philox(noise.counter().data(), noise.key().data(), groups / 4, words.data());
  ActiveKernels().group_bounds(words.data(), row.maxima().data(), groups, row.maximum(),
                               bounds.data());
  // The most promising one first: the fewer of the others are entered.
  const auto first = std::min_element(bounds.begin(), bounds.end()) - bounds.begin();
  race->EnterGroup(first, words[first]);
  for (int64_t group = 0; group < groups; ++group) {
    if (bounds[group] < race->limit() && group != first) race->EnterGroup(group, words[group]);
  }
}

}  // namespace

int32_t Draw(const LogitRow& row, const Noise& noise) {
  Race race(row, noise, {-std::numeric_limits<float>::infinity(), 0});
  EnterAll(row, noise, &race);
  return race.winner();
}

int32_t Draw(const LogitRow& row, absl::Span<const Candidate> candidates, const Noise& noise) {
  Race race(row, noise, candidates.back());
  if (candidates.size() > kFew) {
    EnterAll(row, noise, &race);
  } else {
    for (const Candidate& candidate : candidates.subspan(1)) race.Enter(candidate);
  }
  return race.winner();
}

}  // namespace dorad::ops
