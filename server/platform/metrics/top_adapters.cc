#include "server/platform/metrics/top_adapters.h"

#include <algorithm>
#include <utility>

namespace dorad::internal {
namespace {

constexpr absl::Duration kPeriod = absl::Minutes(1);
constexpr char kBase[] = "(base)";  // not a valid adapter name
constexpr char kOther[] = "other";

void Add(const Metrics::AdapterUse& use, Metrics::AdapterUse* to) {
  to->requests += use.requests;
  to->prompt_tokens += use.prompt_tokens;
  to->generated_tokens += use.generated_tokens;
  to->scored_tokens += use.scored_tokens;
}

// A request counts as a token, so that requests without tokens count too.
int64_t Weight(const Metrics::AdapterUse& use) {
  return use.requests + use.prompt_tokens + use.generated_tokens + use.scored_tokens;
}

prometheus::ClientMetric Series(std::vector<prometheus::ClientMetric::Label> labels,
                                int64_t value) {
  prometheus::ClientMetric series;
  series.label = std::move(labels);
  series.counter.value = static_cast<double>(value);
  return series;
}

}  // namespace

TopAdapters::TopAdapters(int slots, std::function<absl::Time()> now)
    : slots_(static_cast<size_t>(slots)), now_(std::move(now)), dealt_(now_()) {}

void TopAdapters::Count(const std::string& name, const Metrics::AdapterUse& use) {
  absl::MutexLock lock(&mu_);
  if (name.empty()) return Add(use, &base_);
  if (name == kOther) return Add(use, &other_);
  auto holder = holders_.find(name);
  if (holder == holders_.end() && holders_.size() < slots_) {
    holder = holders_.try_emplace(name).first;
  }
  if (holder != holders_.end()) {
    Add(use, &holder->second.use);
    holder->second.recent += Weight(use);
    return;
  }
  Add(use, &other_);
  if (watched_.contains(name) || watched_.size() < kMaxWatched) watched_[name] += Weight(use);
}

void TopAdapters::Announce(const std::string& name) {
  absl::MutexLock lock(&mu_);
  if (name != kOther && holders_.size() < slots_) holders_.try_emplace(name);
}

std::vector<prometheus::MetricFamily> TopAdapters::Collect() {
  using prometheus::MetricType;
  prometheus::MetricFamily requests{"dorad_adapter_requests_total",
                                    "Requests that ended, by adapter: the busiest, and others.",
                                    MetricType::Counter,
                                    {}};
  prometheus::MetricFamily tokens{
      "dorad_adapter_tokens_total", "Their tokens, by adapter and kind.", MetricType::Counter, {}};
  const auto add = [&](const std::string& name, const Metrics::AdapterUse& use) {
    requests.metric.push_back(Series({{"adapter", name}}, use.requests));
    const std::pair<const char*, int64_t> kinds[] = {{"prompt", use.prompt_tokens},
                                                     {"generated", use.generated_tokens},
                                                     {"scored", use.scored_tokens}};
    for (const auto& [kind, count] : kinds) {
      tokens.metric.push_back(Series({{"adapter", name}, {"kind", kind}}, count));
    }
  };
  absl::MutexLock lock(&mu_);
  add(kBase, base_);
  add(kOther, other_);
  for (const auto& [name, holder] : holders_) add(name, holder.use);
  if (const absl::Time now = now_(); now - dealt_ >= kPeriod) {
    for (const std::string& name : Deal(now)) add(name, {});
  }
  return {std::move(requests), std::move(tokens)};
}

std::vector<std::string> TopAdapters::Deal(absl::Time now) {
  using Rank = std::pair<int64_t, std::string>;
  std::vector<Rank> newcomers, holders;
  for (const auto& [name, recent] : watched_) newcomers.emplace_back(recent, name);
  for (const auto& [name, holder] : holders_) holders.emplace_back(holder.recent, name);
  std::sort(newcomers.rbegin(), newcomers.rend());
  std::sort(holders.begin(), holders.end());
  std::vector<std::string> seated;
  for (size_t i = 0; i < std::min(newcomers.size(), holders.size()); ++i) {
    if (newcomers[i].first <= 2 * holders[i].first) break;
    holders_.erase(holders[i].second);
    holders_.try_emplace(newcomers[i].second);
    seated.push_back(newcomers[i].second);
  }
  for (auto& [name, holder] : holders_) holder.recent = 0;
  watched_.clear();
  dealt_ = now;
  return seated;
}

}  // namespace dorad::internal
