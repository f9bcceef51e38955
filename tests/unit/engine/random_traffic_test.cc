// Random traffic: delivered tokens are right, and all pages and requests are released.

#include "server/engine/engine.h"
#include "server/engine/image_store.h"
#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

// A request of random traffic, and what a run of its own gives.
struct Pending {
  std::shared_ptr<TokenStream> stream;
  std::vector<SampleText> expected;
  std::vector<uint32_t> prompt_logprobs;  // bits
  bool cancelled = false;                 // or another end before its last token
};

// No page that a row of the step writes, or a state, is any other sequence's in the same step,
// except one that samples from another's row.
void ExpectPagesApart(absl::Span<const StepSequence> step, int64_t groups) {
  std::map<int32_t, int> users;  // sequences of the step, by page
  for (const StepSequence& s : step) {
    if (s.row_of >= 0) continue;
    for (const auto& pages : {s.pages, s.state, s.state_from}) {
      for (const int32_t page : pages) ++users[page];
    }
  }
  for (const StepSequence& s : step) {
    if (s.row_of >= 0) continue;
    const auto end = s.position + static_cast<int64_t>(s.tokens.size());
    for (int64_t p = s.position / kKvPageTokens * groups; p / groups * kKvPageTokens < end; ++p) {
      EXPECT_EQ(users[s.pages[p]], 1) << "page " << s.pages[p];
    }
    for (const int32_t page : s.state) EXPECT_EQ(users[page], 1) << "state in page " << page;
  }
}

// A sequence of up to three tokens of a sample ends it, and every other sample that has it.
void AddStopSequence(uint32_t choice, GenerateInput* input, std::vector<SampleText>* all) {
  const std::vector<TokenId>& tokens = (*all)[choice % all->size()].tokens;
  const size_t count = 1 + choice / 16 % 3;
  if (tokens.size() < count) return;
  const size_t begin = choice / 64 % (tokens.size() - count + 1);
  const std::vector<TokenId> stop(tokens.begin() + begin, tokens.begin() + begin + count);
  for (SampleText& sample : *all) {
    const auto found =
        std::search(sample.tokens.begin(), sample.tokens.end(), stop.begin(), stop.end());
    if (found != sample.tokens.end()) sample.tokens.erase(found + count, sample.tokens.end());
  }
  input->stop.stop_sequences = {stop};
}

// The sample's tokens, some of them wrong, some lost: a guess that is right in parts.
std::vector<TokenId> Guess(std::mt19937* random, const SampleText& sample) {
  std::vector<TokenId> guess = sample.tokens;
  for (uint32_t i = 0; i < (*random)() % 4; ++i) {
    const size_t place = (*random)() % guess.size();
    if ((*random)() % 2 == 0) guess[place] = static_cast<TokenId>((*random)() % kFakeVocab);
    if ((*random)() % 3 == 0) guess.erase(guess.begin() + place);
    if (guess.empty()) break;
  }
  return guess;
}

// Of a few images, one or two where the prompt has room for them.
void AddImages(std::mt19937* random, ImageStore* store, GenerateInput* input) {
  std::vector<std::vector<PlacedImage>> prompts(1);
  int64_t begin = (*random)() % 8;
  for (uint32_t i = 0; i < 1 + (*random)() % 2; ++i) {
    auto image = std::make_shared<Image>();
    image->sha256 = std::string(32, static_cast<char>('a' + (*random)() % 3));
    image->rows = 1 + image->sha256[0] % 3;
    image->columns = 4;
    image->pixels = "pixels";
    if (begin + image->tokens() > static_cast<int64_t>(input->prompt.size())) break;
    prompts[0].push_back({begin, image});
    begin = prompts[0].back().end() + (*random)() % 8;
  }
  EXPECT_TRUE(store->Resolve("", absl::MakeSpan(prompts)).ok());
  input->images = std::move(prompts[0]);
}

// What has come is right, and complete where the sample ended by itself.
void ExpectRightAsFarAsItGoes(const Outcome& outcome, const std::vector<SampleText>& all) {
  for (const auto& [index, sample] : outcome.samples) {
    const std::vector<TokenId>& expected = all[index].tokens;
    ASSERT_LE(sample.tokens.size(), expected.size());
    EXPECT_TRUE(std::equal(sample.tokens.begin(), sample.tokens.end(), expected.begin()));
    if (sample.finish.reason == FinishReason::kLength ||
        sample.finish.reason == FinishReason::kStop) {
      EXPECT_EQ(sample.tokens, expected);
    }
  }
}

// Random arrivals, cancels, aborts and deadlines over few pages, also while rows are in flight:
// whatever finishes has exactly the tokens of a run of its own, and everything is given back.
TEST_F(EngineTest, RandomTrafficKeepsResultsAndBooks) {
  for (uint32_t seed = 0; seed < 15; ++seed) {
    std::mt19937 random(seed);
    EngineOptions options = DefaultOptions();
    options.max_step_tokens = 1 + random() % 60;
    options.max_running_sequences = 1 + random() % 12;
    options.image_cache_bytes = static_cast<int64_t>(random() % 4) * FakeFeatures::kBytes;
    const int64_t state_pages = seed % 3 == 2 ? 1 + random() % 3 : 0;
    const std::vector<int64_t> windows =
        state_pages > 0 ? std::vector<int64_t>{0} : RandomWindows(&random);
    const auto groups = static_cast<int64_t>(windows.size());
    const int64_t pages =
        (6 + random() % 20) * groups + (1 + random() % 3) * kMostStates * state_pages;
    Start(options, pages, /*max_steps_in_flight=*/1 + seed % 2, /*chunk_pages=*/0, state_pages,
          windows);
    const std::vector<std::shared_ptr<const adapter::LoadedAdapter>> adapters = {
        nullptr, MakeAdapter("a", 1), MakeAdapter("a", 2), MakeAdapter("b", 1),
        MakeAdapter("tower", 1)};
    ImageStore images(1 << 20);
    runner_->pieces_of_image = 1 + static_cast<int>(seed % 3);
    runner_->most_at_once = 1 + seed % 4;
    runner_->on_begin = [groups](absl::Span<const StepSequence> step) {
      ExpectPagesApart(step, groups);
      return absl::OkStatus();
    };
    // Ends that come while a step is computed.
    absl::Mutex mu;
    std::vector<std::pair<std::string, std::shared_ptr<TokenStream>>> victims;
    runner_->on_step = [&, ends = std::mt19937(seed + 1000)]() mutable {
      absl::MutexLock lock(&mu);
      if (victims.empty() || ends() % 4 != 0) return absl::OkStatus();
      const auto& [id, stream] = victims.back();
      if (ends() % 2 == 0) {
        Cancel(stream);
      } else {
        engine_->Abort({.request_ids = {id}}, "random", [](int) {});
      }
      victims.pop_back();
      return absl::OkStatus();
    };
    std::vector<Pending> pending;
    for (int i = 0; i < 120; ++i) {
      GenerateInput input = Input(Prompt(1 + random() % 70, random() % 3), 1 + random() % 30,
                                  adapters[random() % adapters.size()]);
      input.n = 1 + random() % 4;
      input.sampling.temperature = random() % 2;
      input.sampling.seed = random();
      input.stop.ignore_eos = random() % 2;
      input.priority = random() % 3;
      input.bypass_prefix_cache = random() % 4 == 0;
      if (random() % 4 == 0) AddImages(&random, &images, &input);
      Pending p;
      input.logprobs.prompt = input.images.empty() && random() % 3 == 0;
      if (input.logprobs.prompt) {
        p.prompt_logprobs = Bits(ExpectedScores(input.lease.get(), input.prompt));
      }
      for (int s = 0; s < input.n; ++s) {
        p.expected.push_back(Expected(input, s, engine_->limits().context_length,
                                      /*stop_at_eos=*/!input.stop.ignore_eos));
      }
      for (int s = 0; s < input.n && random() % 3 > 0; ++s) {
        input.drafts.push_back(Guess(&random, p.expected[s]));
      }
      input.ngram_drafts = random() % 2;
      if (random() % 3 == 0) AddStopSequence(random(), &input, &p.expected);
      const std::string id = input.request_id;
      if (random() % 12 == 0) {  // last, since it begins here
        input.deadline = absl::Now() + absl::Microseconds(500 + random() % 20000);
        p.cancelled = true;
      }
      p.stream = Submit(std::move(input));
      if (random() % 8 == 0) {
        Cancel(p.stream);
        p.cancelled = true;
      } else if (random() % 10 == 0) {
        engine_->Abort({.request_ids = {id}}, "random", [](int) {});
        p.cancelled = true;
      } else if (random() % 6 == 0) {
        absl::MutexLock lock(&mu);
        victims.emplace_back(id, p.stream);
        p.cancelled = true;
      }
      pending.push_back(std::move(p));
      if (random() % 5 == 0) absl::SleepFor(absl::Microseconds(random() % 2000));
    }
    for (Pending& p : pending) {
      const Outcome outcome = Wait(*p.stream);
      ASSERT_TRUE(p.cancelled || outcome.status.code() != absl::StatusCode::kDeadlineExceeded);
      ASSERT_TRUE(outcome.status.code() != absl::StatusCode::kDeadlineExceeded ||
                  ReasonOf(outcome.status) == "DEADLINE_EXCEEDED");
      ASSERT_NO_FATAL_FAILURE(ExpectRightAsFarAsItGoes(outcome, p.expected));
      if (const auto first = outcome.samples.find(0);
          first != outcome.samples.end() && !first->second.tokens.empty()) {
        EXPECT_EQ(Bits(first->second.prompt_logprobs), p.prompt_logprobs);
      }
      if (!p.cancelled) {
        EXPECT_TRUE(outcome.status.ok()) << outcome.status;
        EXPECT_EQ(outcome.samples.size(), p.expected.size());
      }
    }
    ExpectEverythingBack();
    engine_.reset();
  }
}

// Steps that do not begin, steps that fail with another behind them, rows that are not finite and
// clients that leave: delivered tokens are right, and all pages and requests are released.
TEST_F(EngineTest, RandomFaultsChangeNoTokenAndLoseNothing) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    std::mt19937 random(seed + 100);
    EngineOptions options = DefaultOptions();
    options.max_step_tokens = 4 + random() % 60;
    options.max_running_sequences = 2 + random() % 12;
    const std::vector<int64_t> windows = RandomWindows(&random);
    Start(options, (8 + random() % 20) * static_cast<int64_t>(windows.size()),
          /*max_steps_in_flight=*/1 + seed % 2, /*chunk_pages=*/0, /*state_pages=*/0, windows);
    auto faults = std::make_shared<std::mt19937>(seed);  // the engine's thread
    runner_->on_begin = [faults](auto) {
      return (*faults)() % 60 == 0 ? absl::InternalError("begin") : absl::OkStatus();
    };
    runner_->on_step = [faults] {
      return (*faults)() % 60 == 0 ? absl::InternalError("finish") : absl::OkStatus();
    };
    runner_->poison = 77;
    const auto adapter = MakeAdapter("a", 1);
    std::vector<Pending> pending;
    for (int i = 0; i < 100; ++i) {
      GenerateInput input = Input(Prompt(1 + random() % 50, random() % 3), 1 + random() % 40,
                                  random() % 2 == 0 ? adapter : nullptr);
      input.n = 1 + random() % 3;
      input.sampling.temperature = random() % 2;
      input.sampling.seed = random();
      input.stop.ignore_eos = false;
      Pending p;
      for (int s = 0; s < input.n; ++s) {
        p.expected.push_back(
            Expected(input, s, engine_->limits().context_length, /*stop_at_eos=*/true));
      }
      for (int s = 0; s < input.n && random() % 2 > 0; ++s) {
        input.drafts.push_back(Guess(&random, p.expected[s]));
      }
      p.stream = Submit(std::move(input));
      if (random() % 10 == 0) {
        Cancel(p.stream);
        p.cancelled = true;
      }
      pending.push_back(std::move(p));
      if (random() % 5 == 0) absl::SleepFor(absl::Microseconds(random() % 1000));
    }
    int failed = 0;
    for (Pending& p : pending) {
      const Outcome outcome = Wait(*p.stream);
      failed += outcome.status.code() == absl::StatusCode::kInternal ? 1 : 0;
      EXPECT_TRUE(outcome.status.ok() || outcome.status.code() == absl::StatusCode::kInternal ||
                  (p.cancelled && outcome.status.code() == absl::StatusCode::kCancelled))
          << outcome.status;
      ASSERT_NO_FATAL_FAILURE(ExpectRightAsFarAsItGoes(outcome, p.expected));
    }
    EXPECT_GT(failed, 0) << "the test meant to fail steps";
    EXPECT_LT(failed, 100);
    ExpectEverythingBack();
    engine_.reset();
  }
}

}  // namespace
}  // namespace dorad::engine
