#include "server/engine/request.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/platform/error.h"
#include "server/platform/metrics/metrics.h"

namespace dorad::engine {
namespace {

Instant ToInstant(absl::Time deadline, Instant now) {
  if (deadline == absl::InfiniteFuture()) return Instant::max();
  // Far deadlines would overflow the steady clock's range.
  const absl::Duration left = std::min(deadline - absl::Now(), absl::Hours(24 * 365));
  return now + absl::ToChronoNanoseconds(left);
}

// "": the base.
std::string NameOf(const adapter::AdapterLease& lease) {
  return lease.get() == nullptr ? std::string() : lease.get()->name();
}

PrefixNode RootOf(const adapter::AdapterLease& lease, const std::string& salt,
                  const std::string& tenant) {
  return PrefixRoot(lease.get() == nullptr ? std::string() : lease.get()->digest(), salt, tenant);
}

}  // namespace

Request::Request(GenerateInput input, std::shared_ptr<TokenStream> stream, Instant admitted)
    : generate(std::move(input)),
      stream(std::move(stream)),
      admitted(admitted),
      deadline(ToInstant(generate->deadline, admitted)) {}

Request::Request(ScoreInput input, std::shared_ptr<ScoreTicket> ticket, Instant admitted)
    : score(std::move(input)),
      ticket(std::move(ticket)),
      admitted(admitted),
      deadline(ToInstant(score->deadline, admitted)) {}

template <typename Condition>
const adapter::LoadedAdapter* Request::FirstHeld(Condition condition) const {
  const auto matches = [&condition](const adapter::AdapterLease& lease) {
    return lease.get() != nullptr && condition(*lease.get());
  };
  if (generate && matches(generate->lease)) return generate->lease.get();
  const std::vector<adapter::AdapterLease>& others = generate ? earlier_ : score->leases;
  const auto found = std::find_if(others.begin(), others.end(), matches);
  return found == others.end() ? nullptr : found->get();
}

bool Request::Holds(const adapter::AdapterRef& adapter) const {
  return FirstHeld([&adapter](const adapter::LoadedAdapter& held) {
           return held.name() == adapter.name &&
                  (adapter.version == 0 || held.version() == adapter.version);
         }) != nullptr;
}

const adapter::LoadedAdapter* Request::Revoked() const {
  return FirstHeld([](const adapter::LoadedAdapter& held) { return held.revoked(); });
}

Instant Request::ExplainAt() const {
  constexpr std::chrono::milliseconds kMost{250};
  if (deadline == Instant::max()) return deadline;
  return deadline - std::min<Instant::duration>(kMost, (deadline - admitted) / 20);
}

std::vector<std::string> Request::adapters() const {
  std::set<std::string> names;
  if (generate) {
    names.insert(base().adapter.ToString());
  } else {
    for (const adapter::AdapterLease& lease : score->leases) names.insert(NameOf(lease));
  }
  names.erase("");
  return {names.begin(), names.end()};
}

adapter::AdapterLease Request::NewerVersion() const {
  if (!generate || !generate->follow) return {};
  absl::StatusOr<adapter::AdapterLease> lease = generate->follow();
  // Without an active version there is no switch.
  if (!lease.ok() || lease->get() == generate->lease.get()) return {};
  return *std::move(lease);
}

void Request::Switch(adapter::AdapterLease lease, Scheduler* scheduler) {
  const PrefixNode root = RootOf(lease, generate->cache_salt, generate->tenant);
  earlier_.push_back(std::exchange(generate->lease, std::move(lease)));
  const adapter::LoadedAdapter* const adapter = generate->lease.get();
  for (const auto& sequence : sequences) {
    if (sequence->state == Sequence::State::kEnded) continue;
    sequence->DropPins();  // the leases of their versions may be released
    if (sequence->generated() == 0 && sequence->to_score > 0) {
      // One version computes them all: that of the first token.
      sequence->scored = 0;
      prompt_logprobs_ = FirstRow();
    }
    if (generate->in_flight != InFlightPolicy::kSwitchKeepKv || sequence->generated() == 0) {
      scheduler->Restart(sequence.get(), adapter, root);
      continue;
    }
    sequence->SwitchKeepingKv(adapter);
  }
  DropUnusedLeases();
}

void Request::DropUnusedLeases() {
  const auto is_unused = [this](const adapter::AdapterLease& lease) {
    for (const auto& sequence : sequences) {
      if (sequence->state == Sequence::State::kEnded) continue;
      for (const KvSpan& span : sequence->kv_spans) {
        if (span.adapter == lease.get()) return false;
      }
    }
    return true;
  };
  earlier_.erase(std::remove_if(earlier_.begin(), earlier_.end(), is_unused), earlier_.end());
}

int64_t Request::load_tokens() const {
  if (generate) return static_cast<int64_t>(generate->prompt.size()) * generate->n;
  int64_t tokens = 0;
  for (const auto& sequence : score->sequences) tokens += static_cast<int64_t>(sequence.size());
  return tokens * static_cast<int64_t>(score->leases.size());
}

Sequence* Request::AddSequence(const std::vector<TokenId>& tokens,
                               const std::shared_ptr<const PromptImages>& images,
                               const adapter::LoadedAdapter* adapter, const PrefixNode& root,
                               bool use_prefix_cache) {
  auto sequence = std::make_unique<Sequence>();
  sequence->request = this;
  sequence->index = static_cast<int32_t>(sequences.size());
  sequence->kv_spans.front().adapter = adapter;
  sequence->priority = base().priority;
  sequence->tokens = tokens;
  sequence->images = images;
  if (images != nullptr) images->Mark(&sequence->tokens);
  sequence->prompt_tokens = static_cast<int64_t>(tokens.size());
  sequence->use_prefix_cache = use_prefix_cache;
  sequence->root = root;
  sequences.push_back(std::move(sequence));
  return sequences.back().get();
}

void Request::MakeSequences(const StopRules& rules, bool prefix_cache) {
  if (generate) {
    const PrefixNode root = RootOf(generate->lease, generate->cache_salt, generate->tenant);
    const auto prompt_tokens = static_cast<int64_t>(generate->prompt.size());
    const auto images = PromptImages::Of(std::move(generate->images));
    for (int32_t i = 0; i < generate->n; ++i) {
      Sequence* const sequence = AddSequence(generate->prompt, images, generate->lease.get(), root,
                                             prefix_cache && !generate->bypass_prefix_cache);
      sequence->most_tokens = std::max(
          prompt_tokens + 1, std::min(prompt_tokens + generate->stop.max_tokens, rules.max_length));
      if (i > 0) sequence->leader = sequences.front().get();
      Sample sample;
      if (generate->stop.min_tokens > 0) {
        sample.banned = generate->stop.stop_token_ids;
        if (!generate->stop.ignore_eos) {
          sample.banned.insert(sample.banned.end(), rules.eos_token_ids.begin(),
                               rules.eos_token_ids.end());
        }
      }
      if (generate->logits.repetition_penalty != 1.0f) sample.uses.AddPrompt(generate->prompt);
      if (i < static_cast<int32_t>(generate->drafts.size())) {
        sample.answer = ExpectedAnswer(std::move(generate->drafts[i]));
      }
      samples_.push_back(std::move(sample));
    }
    if (generate->ngram_drafts) {
      std::vector<const std::vector<TokenId>*> texts;
      for (const auto& sequence : sequences) texts.push_back(&sequence->tokens);
      ngrams_.emplace(std::move(texts), prompt_tokens);
    }
    if (generate->logprobs.prompt) {
      sequences.front()->to_score = prompt_tokens - 1;
      prompt_logprobs_ = FirstRow();
    }
    unfinished_sequences = generate->n;
    return;
  }
  result_.scores.resize(score->sequences.size());
  std::vector<PrefixNode> roots;
  for (const adapter::AdapterLease& lease : score->leases) {
    roots.push_back(RootOf(lease, std::string(), score->tenant));
    result_.versions.push_back(VersionSpan::Of(lease.get(), 0, 0));
  }
  for (size_t i = 0; i < score->sequences.size(); ++i) {
    const auto images =
        score->images.empty() ? nullptr : PromptImages::Of(std::move(score->images[i]));
    for (size_t j = 0; j < score->leases.size(); ++j) {
      Sequence* const sequence =
          AddSequence(score->sequences[i], images, score->leases[j].get(), roots[j], prefix_cache);
      sequence->most_tokens = sequence->prompt_tokens;
      sequence->to_score = sequence->goal();
      result_.scores[i].push_back(FirstRow());
      if (sequence->goal() > 0) {
        ++unfinished_sequences;
      } else {
        sequence->state = Sequence::State::kEnded;
      }
    }
  }
}

void Request::Enter(uint64_t* arrival) {
  for (const auto& sequence : sequences) {
    sequence->arrival = (*arrival)++;
    sequence->tenant = base().tenant;
  }
}

// The row of token 0, which no row predicts.
Logprobs Request::FirstRow() const {
  constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
  const int32_t top_k = score ? score->top_k : generate->logprobs.top_k;
  Logprobs row;
  row.logprobs.assign(1, kNone);
  row.top_ids.assign(top_k, -1);
  row.top_logprobs.assign(top_k, kNone);
  row.chosen.assign(score ? score->chosen_ids.size() : generate->logprobs.chosen_ids.size(), kNone);
  return row;
}

void Request::End(const Ending& how, Instant now, Metrics* metrics) {
  absl::Status status = how.status;
  if (how.aborted && score) {
    status = MakeError(absl::StatusCode::kAborted, "REQUEST_ABORTED", *how.aborted);
  } else if (how.aborted) {
    AbortSamples(*how.aborted, now, metrics);
  }
  if (score && status.ok() && !score_finite_) {
    status = MakeError(absl::StatusCode::kInternal, "LOGITS_NOT_FINITE",
                       "the model's logits are not finite");
    metrics->NonFiniteLogits();
  }
  std::string outcome = status.ok() ? "ok" : absl::StatusCodeToString(status.code());
  absl::AsciiStrToLower(&outcome);
  const RequestKind kind = generate ? RequestKind::kGenerate : RequestKind::kScore;
  metrics->RequestEnded(kind, outcome, Between(admitted, now));
  if (!status.ok()) metrics->RequestFailed(kind, ReasonOf(status));
  CountUse(metrics);
  LogEnd(now);
  // Releases the leases first: a caller that sees the end must not see them still held.
  if (generate) {
    generate->lease.Reset();
    earlier_.clear();
    stream->Close(status);
  } else {
    score->leases.clear();
    if (status.ok()) {
      ticket->Finish(std::move(result_));
    } else {
      ticket->Finish(status);
    }
  }
}

void Request::AbortSamples(const std::string& detail, Instant now, Metrics* metrics) {
  for (const auto& sequence : sequences) {
    Sample& sample = samples_[sequence->index];
    if (sample.reason != FinishReason::kNone) continue;
    sample.reason = FinishReason::kAborted;
    SampleDelta delta;
    delta.sample_index = sequence->index;
    delta.finish = MakeFinish(*sequence, FinishReason::kAborted, now);
    delta.finish.detail = detail;
    metrics->SampleEnded(NameOf(FinishReason::kAborted));
    stream->Push(std::move(delta));
  }
}

// Counts tokens by name; several versions of one name count once.
void Request::CountUse(Metrics* metrics) const {
  if (generate) {
    Metrics::AdapterUse use{.requests = 1};
    for (const auto& sequence : sequences) {
      use.prompt_tokens += sequence->generated() > 0 ? sequence->prompt_tokens : 0;
      use.generated_tokens += sequence->generated();
    }
    metrics->AdapterUsed(NameOf(generate->lease), use);
    return;
  }
  const size_t adapters = score->leases.size();
  for (size_t i = 0; i < adapters; ++i) {
    Metrics::AdapterUse use{.requests = 1};
    for (size_t cell = i; cell < sequences.size(); cell += adapters) {
      use.scored_tokens += sequences[cell]->scored;
    }
    metrics->AdapterUsed(NameOf(score->leases[i]), use);
  }
}

void Request::LogEnd(Instant now) {
  RequestBase& request = generate ? static_cast<RequestBase&>(*generate) : *score;
  // Releases the log outside the engine thread if possible: the last owner writes the line.
  const std::shared_ptr<RequestLog> held_log = std::exchange(request.log, nullptr);
  if (held_log == nullptr) return;
  RequestLog& log = *held_log;
  int64_t generated = 0;
  int64_t cached = 0;
  int64_t preemptions = 0;
  for (const auto& sequence : sequences) {
    generated += sequence->generated();
    cached += sequence->cached_tokens;
    preemptions += sequence->preemptions;
  }
  const adapter::LoadedAdapter* held = generate ? generate->lease.get() : nullptr;
  if (held != nullptr) {
    log.Set("adapter_version", held->version());
    log.Set("digest", held->digest().substr(0, 12));
  }
  std::set<std::string> reasons;
  for (const Sample& sample : samples_) {
    if (sample.reason != FinishReason::kNone) reasons.insert(NameOf(sample.reason));
  }
  if (!reasons.empty()) log.Set("finish", absl::StrJoin(reasons, ","));
  log.Set("samples", static_cast<int64_t>(sequences.size()));
  log.Set("prompt_tokens", sequences.empty() ? int64_t{0} : sequences.front()->prompt_tokens);
  log.Set("generated_tokens", generated);
  log.Set("cached_tokens", cached);
  log.Set("preemptions", preemptions);
  log.Set("queue_seconds", absl::ToDoubleSeconds(Between(admitted, started.value_or(now))));
  if (first_token) {
    log.Set("ttft_seconds", absl::ToDoubleSeconds(Between(admitted, *first_token)));
  }
}

}  // namespace dorad::engine
