#include "server/engine/prefix_writers.h"

#include <algorithm>

#include "server/platform/check.h"

namespace dorad::engine {

void PrefixWriters::Publish(Sequence* sequence) {
  Withdraw(sequence);
  const int64_t begin = sequence->registered_pages * kKvPageTokens;
  const int64_t count = std::min(kKvPageTokens, sequence->prompt_tokens - 1 - begin);
  if (count <= 0) return;
  sequence->writes.emplace(sequence->node,
                           absl::MakeConstSpan(sequence->tokens).subspan(begin, count));
  writers_[*sequence->writes].push_back(sequence);
}

void PrefixWriters::Withdraw(Sequence* sequence) {
  if (!sequence->writes.has_value()) return;
  const auto found = writers_.find(*sequence->writes);
  DORAD_CHECK(found != writers_.end());
  auto& writers = found->second;
  writers.erase(std::find(writers.begin(), writers.end(), sequence));
  if (writers.empty()) writers_.erase(found);
  sequence->writes.reset();
}

const Sequence* PrefixWriters::Find(const PrefixKey& next) const {
  const auto found = writers_.find(next);
  return found == writers_.end() ? nullptr : found->second.front();
}

}  // namespace dorad::engine
