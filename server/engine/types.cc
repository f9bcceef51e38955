#include "server/engine/types.h"

#include <iterator>
#include <utility>

namespace dorad::engine {
namespace {

template <typename T>
void MoveAppend(std::vector<T>& to, std::vector<T>&& from) {
  if (to.empty()) {
    to = std::move(from);
  } else {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  }
}

}  // namespace

int64_t ImageLimits::block_rows() const {
  if (!bidirectional) return 0;
  const int64_t side = merge > 0 ? fixed_side / merge : 0;
  const int64_t tokens = side > 0 ? side * side : max_tokens;
  return tokens <= max_tokens ? tokens : 0;
}

int64_t ImageLimits::max_bytes() const {
  constexpr int64_t kMaxElementBytes = 4;
  return max_tokens * merge * merge * patch_elements * kMaxElementBytes;
}

const char* NameOf(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return "none";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAborted:
      return "aborted";
    case FinishReason::kNonFinite:
      return "non_finite";
  }
  return "unknown";
}

void Logprobs::Append(Logprobs&& other) {
  MoveAppend(logprobs, std::move(other.logprobs));
  MoveAppend(top_ids, std::move(other.top_ids));
  MoveAppend(top_logprobs, std::move(other.top_logprobs));
  MoveAppend(chosen, std::move(other.chosen));
}

void Logprobs::Keep(size_t count, size_t positions) {
  if (count == positions) return;
  const auto keep = [&](auto& values) { values.resize(values.size() / positions * count); };
  keep(logprobs);
  keep(top_ids);
  keep(top_logprobs);
  keep(chosen);
}

VersionSpan VersionSpan::Of(const adapter::LoadedAdapter* adapter, uint32_t begin, uint32_t end) {
  VersionSpan span;
  if (adapter != nullptr) {
    span.adapter = adapter->name();
    span.version = adapter->version();
    span.digest = adapter->digest();
  }
  span.begin = begin;
  span.end = end;
  return span;
}

void SampleDelta::Append(SampleDelta&& later) {
  MoveAppend(token_ids, std::move(later.token_ids));
  logprobs.Append(std::move(later.logprobs));
  prompt_logprobs.Append(std::move(later.prompt_logprobs));
  for (VersionSpan& span : later.spans) {
    if (!spans.empty() && spans.back().end == span.begin && spans.back().digest == span.digest &&
        spans.back().adapter == span.adapter && spans.back().version == span.version) {
      spans.back().end = span.end;
    } else {
      spans.push_back(std::move(span));
    }
  }
  finish = std::move(later.finish);
}

}  // namespace dorad::engine
