// What a request wants of a step and takes from it.
#include <algorithm>
#include <utility>

#include "server/engine/bad_words.h"
#include "server/engine/request.h"
#include "server/platform/check.h"
#include "server/platform/metrics/metrics.h"

namespace dorad::engine {
namespace {

bool Contains(const std::vector<TokenId>& ids, TokenId id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

Request::Want Request::WantOf(const Chunk& chunk) const {
  const Sequence& sequence = *chunk.sequence;
  Want want;
  if (chunk.position >= sequence.scored && chunk.position < sequence.to_score) {
    ScoreWant rows;
    rows.targets = absl::MakeConstSpan(PromptOf(sequence)).subspan(chunk.position + 1, chunk.count);
    rows.temperature = score ? score->temperature : 1.0f;
    rows.top_k = score ? score->top_k : generate->logprobs.top_k;
    rows.chosen_ids = score ? score->chosen_ids : generate->logprobs.chosen_ids;
    want.score = rows;
  } else if (chunk.samples && chunk.draft.empty()) {
    AppendSampleWant(chunk, samples_[sequence.index].uses,
                     absl::MakeConstSpan(sequence.tokens).subspan(sequence.prompt_tokens), &want);
  } else if (chunk.samples) {
    AppendDraftWants(chunk, &want);
  }
  return want;
}

// A draft goes on from the last token: all rows of its chunk are of generated tokens.
void Request::AppendDraftWants(const Chunk& chunk, Want* to) const {
  const Sequence& sequence = *chunk.sequence;
  std::vector<TokenId> generated(sequence.tokens.begin() + sequence.prompt_tokens,
                                 sequence.tokens.end());
  TokenUses uses = samples_[sequence.index].uses;
  AppendSampleWant(chunk, uses, generated, to);
  for (const TokenId token : chunk.draft) {
    generated.push_back(token);
    if (generate->logits.has_penalties()) uses.AddGenerated(token);
    AppendSampleWant(chunk, uses, generated, to);
  }
  const int64_t known = chunk.count - (chunk.follows >= 0 ? 1 : 0);
  to->tokens.assign(chunk.count - known, StepSequence::kUnknown);
  to->tokens.insert(to->tokens.end(), generated.end() - known, generated.end());
}

void Request::AppendSampleWant(const Chunk& chunk, const TokenUses& uses,
                               absl::Span<const TokenId> generated, Want* to) const {
  SampleWant& sample = to->samples.emplace_back();
  sample.sampling = generate->sampling;
  sample.sample_index = static_cast<uint32_t>(chunk.sequence->index);
  const auto row = static_cast<int64_t>(to->samples.size()) - 1;
  std::optional<size_t> after_unknown;
  if (chunk.follows >= 0) after_unknown = row;
  sample.position = chunk.end() - static_cast<int64_t>(chunk.draft.size()) + row;
  sample.logprobs = &generate->logprobs;
  if (sample.position - chunk.sequence->prompt_tokens < generate->stop.min_tokens) {
    sample.banned = samples_[chunk.sequence->index].banned;
  }
  const LogitParams& logits = generate->logits;
  if (!logits.bad_words.empty()) {
    std::vector<TokenId>& banned =
        to->banned.emplace_back(sample.banned.begin(), sample.banned.end());
    AppendBans(logits.bad_words, generated, after_unknown, &banned,
               &to->conditional_bans.emplace_back());
    sample.banned = banned;
    sample.conditional_bans = to->conditional_bans.back();
  }
  if (logits.any()) sample.logits = &logits;
  if (chunk.draft.empty() || !logits.has_penalties()) {
    sample.uses = uses.list();
  } else {
    sample.uses = to->uses.emplace_back(uses.list().begin(), uses.list().end());
  }
}

void Request::CutDraft(Chunk* chunk, StepOutput* output, const StepEnd& step) const {
  Sequence& sequence = *chunk->sequence;
  if (chunk->draft.empty() || sequence.state == Sequence::State::kEnded) return;
  std::vector<TokenId>& tokens = sequence.tokens;
  const size_t known = tokens.size();
  const size_t sampled = output->tokens.size();
  size_t count = 0;
  for (bool goes_on = true; goes_on;) {
    const TokenId token = output->tokens[count++];
    goes_on = count < sampled && token == chunk->draft[count - 1];
    tokens.push_back(token);
    goes_on = goes_on && FinishOf(sequence, step.rules, step.now).reason == FinishReason::kNone;
  }
  tokens.resize(known);
  output->tokens.resize(count);
  output->logprobs.Keep(count, sampled);
  chunk->count -= static_cast<int64_t>(sampled - count);
}

bool Request::Accept(const Chunk& chunk, StepOutput output, const StepEnd& step) {
  return chunk.samples ? AcceptTokens(chunk, std::move(output), step)
                       : AcceptScores(chunk, std::move(output), step);
}

Finish Request::FinishOf(const Sequence& sequence, const StopRules& rules, Instant now) const {
  const TokenId token = sequence.tokens.back();
  const StopParams& stop = generate->stop;
  if (Contains(stop.stop_token_ids, token) ||
      (!stop.ignore_eos && Contains(rules.eos_token_ids, token))) {
    Finish finish = MakeFinish(sequence, FinishReason::kStop, now);
    finish.stop_token_id = token;
    return finish;
  }
  if (const int32_t match = MatchStopSequence(sequence); match >= 0) {
    Finish finish = MakeFinish(sequence, FinishReason::kStop, now);
    finish.stop_sequence = match;
    return finish;
  }
  const bool full = static_cast<int64_t>(sequence.tokens.size()) >= sequence.most_tokens;
  return full ? MakeFinish(sequence, FinishReason::kLength, now) : Finish();
}

// The first stop sequence that the generated tokens end with; -1: none.
int32_t Request::MatchStopSequence(const Sequence& sequence) const {
  const StopParams& stop = generate->stop;
  if (sequence.generated() <= stop.min_tokens) return -1;
  const auto generated = absl::MakeConstSpan(sequence.tokens).subspan(sequence.prompt_tokens);
  for (size_t i = 0; i < stop.stop_sequences.size(); ++i) {
    if (EndsWith(generated, stop.stop_sequences[i])) return static_cast<int32_t>(i);
  }
  return -1;
}

Finish Request::MakeFinish(const Sequence& sequence, FinishReason reason, Instant now) const {
  Finish finish;
  finish.reason = reason;
  finish.usage.prompt_tokens = static_cast<uint32_t>(sequence.prompt_tokens);
  finish.usage.cached_prompt_tokens = static_cast<uint32_t>(sequence.cached_tokens);
  finish.usage.generated_tokens = static_cast<uint32_t>(sequence.generated());
  finish.usage.preemptions = sequence.preemptions;
  finish.usage.drafts = samples_[sequence.index].drafts;
  finish.usage.queue_time = Between(admitted, started.value_or(now));
  finish.usage.time_to_first_token = Between(admitted, first_token.value_or(now));
  finish.usage.total_time = Between(admitted, now);
  return finish;
}

bool Request::AcceptTokens(const Chunk& chunk, StepOutput output, const StepEnd& step) {
  const Instant now = step.now;
  Metrics* const metrics = step.metrics;
  Sequence* const sequence = chunk.sequence;
  Sample& sample = samples_[sequence->index];
  const size_t sampled = output.tokens.size();
  const bool finite = output.tokens.back() != StepOutput::kNotFinite;
  if (!finite) output.tokens.pop_back();
  output.logprobs.Keep(output.tokens.size(), sampled);
  const auto begin = static_cast<uint32_t>(sequence->generated());
  const auto count = static_cast<uint32_t>(output.tokens.size());
  if (count > 0) {
    SampleDelta delta;
    delta.sample_index = sequence->index;
    sequence->tokens.insert(sequence->tokens.end(), output.tokens.begin(), output.tokens.end());
    if (generate->logits.has_penalties()) {
      for (const TokenId token : output.tokens) sample.uses.AddGenerated(token);
    }
    if (!first_token) {
      first_token = now;
      metrics->TimeToFirstToken(Between(admitted, now));
    }
    if (begin > 0) metrics->InterTokenLatency(Between(sample.last_token, now) / count, count);
    sample.last_token = now;
    Draft(chunk, count, step);
    delta.token_ids = std::move(output.tokens);
    delta.logprobs = std::move(output.logprobs);
    if (sequence->index == 0) delta.prompt_logprobs = std::exchange(prompt_logprobs_, {});
    delta.spans = {VersionSpan::Of(sequence->adapter(), begin, begin + count)};
    if (finite) delta.finish = FinishOf(*sequence, step.rules, now);
    sample.reason = delta.finish.reason;
    if (delta.finished()) metrics->SampleEnded(NameOf(sample.reason));
    stream->Push(std::move(delta));
  }
  if (!finite) {
    PushNonFinite(*sequence, "the model's logits are not finite, or no token may be sampled", now,
                  metrics);
  }
  return sample.reason != FinishReason::kNone;
}

void Request::Draft(const Chunk& chunk, int64_t tokens, const StepEnd& step) {
  Sequence& sequence = *chunk.sequence;
  Sample& sample = samples_[sequence.index];
  if (sample.answer.empty() && !ngrams_) return;
  if (const auto drafted = static_cast<int64_t>(chunk.draft.size()); drafted > 0) {
    // All of them may be right and followed by a token of the sample's own.
    const int64_t right = std::min(tokens, drafted + 1) - 1;
    const bool is_answer = chunk.draft_source == DraftSource::kAnswer;
    (is_answer ? sample.answer_pace : sample.ngram_pace).Verified(right, right == drafted);
    sample.drafts.tokens += static_cast<uint32_t>(drafted);
    sample.drafts.accepted += static_cast<uint32_t>(right);
    step.metrics->DraftTokens(chunk.draft_source, drafted, right);
  }
  const absl::Span<const TokenId> generated =
      absl::MakeConstSpan(sequence.tokens).subspan(sequence.prompt_tokens);
  const LogitParams& logits = generate->logits;
  const bool is_plain = !logits.any() && logits.bad_words.empty();
  const int64_t most = is_plain ? kLongestDraft : kLongestDraftWithLogitParams;
  sample.answer_pace.Came(generated.last(tokens));
  sample.ngram_pace.Came(generated.last(tokens));
  // The source's guess, as a draft if it pays: after the token that the step in flight brings.
  const int64_t coming = sequence.sampling - 1;
  const auto guess = [&](DraftSource source, DraftPace& pace, auto next) {
    const int64_t length = step.trial->rests(source) ? 0 : std::min(most, pace.Next(step.price));
    const auto guessed = next(length > 0 ? coming + length : pace.NextToCompare());
    const int64_t ahead = static_cast<int64_t>(guessed.size()) - coming;
    if (length == 0) {
      if (!guessed.empty()) pace.Compare(guessed);
    } else if (ahead > 0) {
      sequence.draft.assign(guessed.begin(), guessed.end());
      sequence.draft_source = source;
      step.trial->Propose(source, pace.Gain(step.price, static_cast<double>(ahead)));
    }
  };
  sequence.draft.clear();
  if (!sample.answer.empty()) {
    guess(DraftSource::kAnswer, sample.answer_pace,
          [&](int64_t n) { return sample.answer.Next(generated, n); });
  }
  if (!ngrams_) return;
  ngrams_->Add(static_cast<size_t>(sequence.index));
  if (!sequence.draft.empty()) return;
  guess(DraftSource::kNgram, sample.ngram_pace, [&](int64_t n) {
    return n > 0 ? ngrams_->Next(static_cast<size_t>(sequence.index), n) : std::vector<TokenId>();
  });
}

void Request::CompareDraft(Sequence* sequence) {
  Sample& sample = samples_[sequence->index];
  const bool is_answer = sequence->draft_source == DraftSource::kAnswer;
  DraftPace& pace = is_answer ? sample.answer_pace : sample.ngram_pace;
  if (pace.NextToCompare() > 0) pace.Compare(sequence->draft);
  sequence->draft.clear();
}

void Request::PushNonFinite(const Sequence& sequence, const std::string& detail, Instant now,
                            Metrics* metrics) {
  SampleDelta delta;
  delta.sample_index = sequence.index;
  delta.finish = MakeFinish(sequence, FinishReason::kNonFinite, now);
  delta.finish.detail = detail;
  samples_[sequence.index].reason = FinishReason::kNonFinite;
  metrics->NonFiniteLogits();
  metrics->SampleEnded(NameOf(FinishReason::kNonFinite));
  stream->Push(std::move(delta));
}

Logprobs* Request::ScoresOf(const Sequence& sequence) {
  if (generate) return &prompt_logprobs_;
  const size_t adapters = score->leases.size();
  return &result_.scores[sequence.index / adapters][sequence.index % adapters];
}

// Rows recomputed after a preemption have no new results.
bool Request::AcceptScores(const Chunk& chunk, StepOutput output, const StepEnd& step) {
  Sequence& sequence = *chunk.sequence;
  if (sequence.has_scored() || chunk.end() <= sequence.scored) return false;
  DORAD_CHECK(chunk.position == sequence.scored);
  sequence.scored = chunk.end();
  ScoresOf(sequence)->Append(std::move(output.logprobs));
  if (score) {
    score_finite_ = score_finite_ && output.finite;
    return sequence.has_scored();
  }
  if (output.finite) return false;
  PushNonFinite(sequence, "the model's logits for the prompt are not finite", step.now,
                step.metrics);
  return true;
}

}  // namespace dorad::engine
