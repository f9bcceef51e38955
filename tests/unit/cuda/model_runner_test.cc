#include "server/backends/cuda/model_runner.h"

#include <algorithm>
#include <set>

#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/decoder.h"
#include "server/backends/cuda/kv_layout.h"
#include "server/model/kv_groups.h"
#include "tests/unit/cuda/model_forms.h"
#include "tests/unit/kernels/device.h"

namespace dorad::cuda {
namespace {

using engine::StepOutput;
using engine::StepSequence;
using engine::TokenId;

constexpr int64_t kPages = 256;

struct Form {
  const char* name;
  model::ModelConfig (*config)();
};

// A sequence that is generated: what the engine would know of it.
struct Line {
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;
  std::vector<int32_t> pages;
  std::vector<int32_t> state;
  engine::SampleWant want;
  std::vector<engine::TokenUse> uses;
  const adapter::LoadedAdapter* adapter = nullptr;
  int64_t begun = 0;   // positions
  int32_t index = -1;  // in the step that began last
  size_t first_step = 0;
};

class CudaModelRunnerTest : public kernels::KernelTest, public testing::WithParamInterface<Form> {
 protected:
  void SetUp() override {
    kernels::KernelTest::SetUp();
    if (IsSkipped()) return;
    model_ = Must(CudaModel::Random(GetParam().config(), 1, &ledger_));
    for (const int rank : {8, 64}) {
      adapters_.push_back(std::make_unique<adapter::LoadedAdapter>(
          "a", rank, adapter::AdapterSummary(),
          Must(MakeRandomAdapter(*model_, rank, static_cast<uint32_t>(rank), &ledger_))));
    }
    raw_.mode = engine::LogprobMode::kRaw;
    raw_.top_k = 2;
    penalised_.frequency_penalty = 0.01f;
  }

  // Prompts of different lengths over the base and both adapters; the later ones come when the
  // earlier ones decode, so that some steps are mixed.
  std::deque<Line> Lines() const {
    std::deque<Line> lines;
    for (int i = 0; i < 7; ++i) {
      Line& line = lines.emplace_back();
      for (int t = 0; t < 3 + 11 * (i % 3); ++t) line.tokens.push_back((17 * i + 29 * t) % 1000);
      const int pages = static_cast<int>(kMostBlocks) * Groups();
      for (int p = 0; p < pages; ++p) line.pages.push_back(PageAt(pages * i + p));
      for (int p = 0; p < StatePages(); ++p) {
        line.state.push_back(PageAt(pages * 7 + StatePages() * i + p));
      }
      line.want.sampling.temperature = i % 2 == 0 ? 0.0f : 0.8f;
      line.want.sampling.seed = static_cast<uint64_t>(i);
      line.want.logprobs = &raw_;
      if (i % 3 != 0) line.adapter = adapters_[i % 3 - 1].get();
      line.first_step = i < 4 ? 0 : 2 * i;
    }
    return lines;
  }

  // `steps` steps, each begun when `ahead` others are in flight.
  std::vector<Line> Generate(size_t steps, int ahead) {
    auto runner = Must(MakeCudaModelRunner(model_.get(), {kv_pages_, 128, 256, 8}, &ledger_));
    for (const int32_t chunk : away_) runner->kv_chunks()->Unmap(chunk);
    EXPECT_GT(runner->max_steps_in_flight(), ahead);
    std::deque<Line> lines = Lines();
    std::deque<std::vector<Line*>> in_flight;
    const auto finish = [&] {
      const std::vector<StepOutput> outputs = Must(runner->Finish());
      for (size_t i = 0; i < outputs.size(); ++i) {
        Line& line = *in_flight.front()[i];
        line.tokens.push_back(outputs[i].tokens.at(0));
        for (const float value : outputs[i].logprobs.logprobs) line.logprobs.push_back(value);
        for (const float value : outputs[i].logprobs.top_logprobs) line.logprobs.push_back(value);
      }
      in_flight.pop_front();
    };
    for (size_t step = 0; step < steps; ++step) {
      std::vector<Line*> in_step;
      for (Line& line : lines) {
        if (step >= line.first_step) in_step.push_back(&line);
      }
      // Whatever the order, a row finds the one that it follows.
      std::rotate(in_step.begin(), in_step.begin() + step % in_step.size(), in_step.end());
      std::vector<StepSequence> sequences;
      for (Line* const at : in_step) {
        Line& line = *at;
        const auto known = static_cast<int64_t>(line.tokens.size());
        StepSequence s;
        s.position = line.begun;
        if (line.begun == known) {
          s.follows = line.index;
          s.tokens = absl::MakeConstSpan(line.tokens).subspan(0, 1);  // anything
        } else {
          s.tokens = absl::MakeConstSpan(line.tokens).subspan(line.begun);
        }
        line.begun += static_cast<int64_t>(s.tokens.size());
        line.want.position = line.begun;
        // The device adds the token that a row follows.
        line.uses = UsesOf(line.tokens);
        line.want.logits = &penalised_;
        line.want.uses = line.uses;
        if (forgets_) ForgetBehind(s.position, &line);
        s.pages = line.pages;
        s.state = line.state;
        s.adapter = line.adapter;
        s.samples = {&line.want, 1};
        line.index = static_cast<int32_t>(sequences.size());
        sequences.push_back(s);
      }
      EXPECT_TRUE(runner->Begin(sequences).ok());
      in_flight.push_back(std::move(in_step));
      if (static_cast<int>(in_flight.size()) > ahead) finish();
    }
    while (!in_flight.empty()) finish();
    return {lines.begin(), lines.end()};
  }

  static std::vector<engine::TokenUse> UsesOf(const std::vector<TokenId>& tokens) {
    std::vector<engine::TokenUse> uses;
    for (const TokenId token : std::set(tokens.begin(), tokens.end())) {
      const auto count = std::count(tokens.begin(), tokens.end(), token);
      uses.push_back({token, static_cast<uint32_t>(count) * engine::TokenUse::kGenerated});
    }
    return uses;
  }

  // As the engine does: the pages that no row sees any more are others' now.
  static void ForgetBehind(int64_t position, Line* line) {
    const std::vector<int64_t> windows = model::KvGroups(GetParam().config()).windows;
    for (size_t at = 0; at < line->pages.size(); ++at) {
      const auto block = static_cast<int64_t>(at / windows.size());
      const int64_t window = windows[at % windows.size()];
      if (block < engine::FirstBlockSeen(window, position)) line->pages[at] = -1;
    }
  }

  static int Groups() {
    return static_cast<int>(model::KvGroups(GetParam().config()).windows.size());
  }
  static int StatePages() { return static_cast<int>(StateLayoutOf(GetParam().config()).pages()); }

  // Every second page lies in the cache's last chunk, if there are three.
  int32_t PageAt(int32_t index) const {
    const auto chunk = static_cast<int32_t>(KvLayoutOf(GetParam().config()).chunk_pages());
    return kv_pages_ > 2 * chunk && index % 2 == 1 ? 2 * chunk + index : index;
  }

  MemoryLedger ledger_;
  int64_t kv_pages_ = kPages;
  std::vector<int32_t> away_;  // chunks of the cache
  bool forgets_ = true;
  engine::LogprobParams raw_;
  engine::LogitParams penalised_;
  std::unique_ptr<CudaModel> model_;
  std::vector<std::unique_ptr<adapter::LoadedAdapter>> adapters_;
};

TEST_P(CudaModelRunnerTest, PagesServeAlikeWhereverTheyLieAndWhateverIsAway) {
  const std::vector<Line> expected = Generate(24, 1);
  kv_pages_ = 3 * KvLayoutOf(GetParam().config()).chunk_pages() - kSparePages;
  away_ = {1};
  const std::vector<Line> got = Generate(24, 1);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].tokens, expected[i].tokens);
    EXPECT_EQ(got[i].logprobs, expected[i].logprobs);
  }
}

TEST_P(CudaModelRunnerTest, PagesBehindAWindowAreNotRead) {
  const std::vector<Line> without = Generate(40, 1);
  forgets_ = false;
  const std::vector<Line> with = Generate(40, 1);
  for (size_t i = 0; i < with.size(); ++i) {
    EXPECT_EQ(with[i].tokens, without[i].tokens) << i;
    EXPECT_EQ(with[i].logprobs, without[i].logprobs) << i;
  }
}

// In pieces that are computed as tiles of rows, at places where windows begin behind them.
TEST_P(CudaModelRunnerTest, PromptsInPiecesHaveTheBitsOfWholeOnes) {
  constexpr int64_t kPrompt = 120;
  const auto generate = [&](int64_t piece) {
    auto runner = Must(MakeCudaModelRunner(model_.get(), {kv_pages_, 128, 256, 8}, &ledger_));
    Line line = Lines()[0];
    line.tokens.clear();
    for (int64_t t = 0; t < kPrompt; ++t) line.tokens.push_back((31 * t + 7) % 1000);
    line.want.position = kPrompt;
    StepOutput output;
    for (; line.begun < kPrompt; line.begun += piece) {
      StepSequence s;
      s.position = line.begun;
      s.tokens = absl::MakeConstSpan(line.tokens).subspan(line.begun, piece);
      ForgetBehind(s.position, &line);
      s.pages = line.pages;
      s.state = line.state;
      if (line.begun + piece == kPrompt) s.samples = {&line.want, 1};
      EXPECT_TRUE(runner->Begin({s}).ok());
      output = Must(runner->Finish()).at(0);
    }
    return std::pair(output.tokens, output.logprobs.top_logprobs);
  };
  const auto whole = generate(kPrompt);
  EXPECT_EQ(whole.first.size(), 1u);
  for (const int64_t piece : {60, 40, 5}) EXPECT_EQ(generate(piece), whole) << piece;
}

TEST_P(CudaModelRunnerTest, StepsInFlightGiveTheSameBitsAsOneAtATime) {
  const std::vector<Line> one = Generate(40, 0);
  const std::vector<Line> two = Generate(40, 1);
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].tokens, two[i].tokens) << i;
    EXPECT_EQ(one[i].logprobs, two[i].logprobs) << i;
    EXPECT_EQ(one[i].tokens.size(), Lines()[i].tokens.size() + 40 - one[i].first_step);
  }
}

// A guess follows a token that is not known yet, and another row follows its first one: the prompt,
// then its token with two guesses (one right), then the next token by itself. Of a graph, or beside
// a prompt.
TEST_P(CudaModelRunnerTest, GuessesMayFollowAndBeFollowed) {
  if (StatePages() > 0) return;  // there is no way back from a guess
  const std::vector<Line> expected = Generate(20, 0);
  const std::deque<Line> all = Lines();
  const std::vector<Line> lines(all.begin(), all.begin() + 4);  // which begin together
  for (const bool beside_prompt : {false, true}) {
    // What the steps point to.
    std::deque<std::vector<engine::TokenUse>> uses;
    std::deque<std::vector<engine::SampleWant>> wants;
    std::deque<std::vector<TokenId>> rows;
    // The last rows of a line sample; `before`: its tokens before the first of them, if known.
    const auto sequence = [&](const Line& line, int64_t position, int32_t follows,
                              std::vector<TokenId> tokens, size_t sampled,
                              std::vector<TokenId> before) {
      StepSequence s;
      s.position = position;
      s.follows = follows;
      std::vector<engine::SampleWant>& samples = wants.emplace_back();
      for (size_t row = tokens.size() - sampled; row < tokens.size(); ++row) {
        if (follows >= 0 && row > 0) before.push_back(tokens[row]);
        engine::SampleWant want = line.want;
        want.position = position + static_cast<int64_t>(row) + 1;
        want.logits = &penalised_;
        want.uses = uses.emplace_back(UsesOf(before));
        samples.push_back(want);
      }
      s.samples = samples;
      s.tokens = rows.emplace_back(std::move(tokens));
      s.pages = line.pages;
      s.adapter = line.adapter;
      return s;
    };
    std::vector<StepSequence> steps[3];
    for (size_t i = 0; i < lines.size(); ++i) {
      const Line& line = lines[i];
      const auto index = static_cast<int32_t>(i);
      const auto known = static_cast<int64_t>(line.tokens.size());
      const TokenId* const next = expected[i].tokens.data() + known;
      std::vector<TokenId> with_first = line.tokens;
      with_first.push_back(next[0]);
      const TokenId wrong = (next[2] + 1) % 1000;
      constexpr TokenId kOpen = StepSequence::kUnknown;
      steps[0].push_back(sequence(line, 0, -1, line.tokens, 1, line.tokens));
      steps[1].push_back(sequence(line, known, index, {kOpen, next[1], wrong}, 3, line.tokens));
      steps[2].push_back(sequence(line, known + 1, index, {kOpen}, 1, with_first));
    }
    if (beside_prompt) steps[1].push_back(sequence(all[5], 0, -1, all[5].tokens, 0, {}));
    auto runner = Must(MakeCudaModelRunner(model_.get(), {kv_pages_, 128, 256, 8}, &ledger_));
    ASSERT_TRUE(runner->Begin(steps[0]).ok());
    ASSERT_TRUE(runner->Begin(steps[1]).ok());
    (void)Must(runner->Finish());
    ASSERT_TRUE(runner->Begin(steps[2]).ok());
    const std::vector<StepOutput> guessed = Must(runner->Finish());
    const std::vector<StepOutput> followed = Must(runner->Finish());
    for (size_t i = 0; i < lines.size(); ++i) {
      const size_t known = lines[i].tokens.size();
      const TokenId* const next = expected[i].tokens.data() + known;
      ASSERT_EQ(guessed[i].tokens.size(), 3u);
      EXPECT_EQ(guessed[i].tokens[0], next[1]);
      EXPECT_EQ(guessed[i].tokens[1], next[2]) << "the first guess was right";
      EXPECT_EQ(followed[i].tokens, std::vector{next[2]}) << "as if there were no guess";
      const size_t values = expected[i].logprobs.size() / (expected[i].tokens.size() - known);
      EXPECT_EQ(guessed[i].logprobs.logprobs[0], expected[i].logprobs[values]);
      EXPECT_EQ(guessed[i].logprobs.logprobs[1], expected[i].logprobs[2 * values]);
      EXPECT_EQ(followed[i].logprobs.logprobs[0], expected[i].logprobs[2 * values]);
    }
  }
}

// Batches of one graph, and beyond: by blocks of rows, and in one launch.
TEST_P(CudaModelRunnerTest, RowsOfLargeBatchesHaveTheBitsOfSmallOnes) {
  constexpr int kLines = 450;
  const auto generate = [&](int at_once) {
    auto runner = Must(MakeCudaModelRunner(
        model_.get(), {kLines * (Groups() + StatePages()), 128, 4 * kLines, kLines}, &ledger_));
    std::deque<Line> lines(kLines);
    for (int i = 0; i < kLines; ++i) {
      lines[i].tokens = {i, 7 * i % 1000, 5};
      for (int p = 0; p < Groups(); ++p) lines[i].pages.push_back(Groups() * i + p);
      for (int p = 0; p < StatePages(); ++p) {
        lines[i].state.push_back(kLines * Groups() + StatePages() * i + p);
      }
      lines[i].want.sampling.temperature = 0.8f;
      lines[i].want.sampling.seed = static_cast<uint64_t>(i);
      lines[i].want.logprobs = &raw_;
      if (i % 3 != 0) lines[i].adapter = adapters_[i % 3 - 1].get();
    }
    for (int step = 0; step < 5; ++step) {
      for (int first = 0; first < kLines; first += at_once) {
        std::vector<StepSequence> sequences;
        const int end = std::min(kLines, first + at_once);
        for (int i = first; i < end; ++i) {
          Line& line = lines[i];
          StepSequence s;
          s.position = line.begun;
          s.tokens = absl::MakeConstSpan(line.tokens).subspan(line.begun);
          line.begun = line.want.position = static_cast<int64_t>(line.tokens.size());
          s.pages = line.pages;
          s.state = line.state;
          s.adapter = line.adapter;
          s.samples = {&line.want, 1};
          sequences.push_back(s);
        }
        EXPECT_TRUE(runner->Begin(sequences).ok());
        const std::vector<StepOutput> outputs = Must(runner->Finish());
        for (int i = first; i < end; ++i) {
          const StepOutput& output = outputs[i - first];
          lines[i].tokens.push_back(output.tokens.at(0));
          for (const float value : output.logprobs.logprobs) lines[i].logprobs.push_back(value);
        }
      }
    }
    return lines;
  };
  const std::deque<Line> expected = generate(90);
  for (const int at_once : {300, kLines}) {
    const std::deque<Line> got = generate(at_once);
    for (int i = 0; i < kLines; ++i) {
      ASSERT_EQ(got[i].tokens, expected[i].tokens) << at_once << " " << i;
      ASSERT_EQ(got[i].logprobs, expected[i].logprobs) << at_once << " " << i;
    }
  }
}

// Three sequences of one prompt: the first computes it, the second takes its last row and copies
// its unfinished page, the third comes later, shares a page and copies the next. With a recurrence
// both go on from the first one's state, and there is no third: no state is kept inside a prompt.
TEST_P(CudaModelRunnerTest, RowsOfOthersAndCopiedPagesGiveTheSameBits) {
  const std::vector<TokenId> prompt = Lines()[2].tokens;  // 25 tokens: a page and nine of the next
  for (const adapter::LoadedAdapter* adapter :
       {static_cast<const adapter::LoadedAdapter*>(nullptr),
        static_cast<const adapter::LoadedAdapter*>(adapters_[1].get())}) {
    auto runner = Must(MakeCudaModelRunner(model_.get(), {kv_pages_, 128, 256, 8}, &ledger_));
    std::deque<Line> lines(3);
    for (Line& line : lines) {
      line.tokens = prompt;
      line.want.sampling.temperature = 0.8f;
      line.want.sampling.seed = 5;
      line.want.logprobs = &raw_;
      line.adapter = adapter;
    }
    const int groups = Groups();
    const auto pages_of = [groups](std::vector<int32_t> blocks) {
      std::vector<int32_t> pages;
      for (const int32_t block : blocks) {
        for (int32_t group = 0; group < groups; ++group) pages.push_back(groups * block + group);
      }
      return pages;
    };
    lines[0].pages = pages_of({4, 1, 2, 3});
    lines[1].pages = pages_of({4, 5, 6, 7});
    lines[2].pages = pages_of({4, 8, 9, 10});
    const std::vector<int32_t> copied = pages_of({1});
    std::vector<int32_t> states[3];
    for (int i = 0; i < 3 * StatePages(); ++i) {
      states[i / StatePages()].push_back(11 * groups + i);
    }
    const int most = StatePages() > 0 ? 2 : 3;
    const auto begun = static_cast<int64_t>(prompt.size());
    for (int step = 0; step < 20; ++step) {
      std::vector<StepSequence> sequences;
      std::vector<Line*> in_step;
      for (int i = 0; i < (step < 4 ? 2 : most); ++i) {
        Line& line = lines[i];
        StepSequence s;
        if (i == 1 && step == 0) {
          s.row_of = 0;
          line.begun = begun;
        } else {
          const bool late = i == 2 && step == 4;
          if (late) line.begun = begun - 1;
          if (late || (i == 1 && step == 1)) s.copy_from = copied;
          s.tokens = absl::MakeConstSpan(line.tokens).subspan(line.begun);
        }
        s.position = line.begun;
        line.begun += static_cast<int64_t>(s.tokens.size());
        line.want.position = static_cast<int64_t>(line.tokens.size());
        s.pages = line.pages;
        if (step == 0 && i == 0) s.state = states[0];
        if (step > 0) s.state = states[i + 1 < most ? 1 : 2];
        if (step == 1) s.state_from = states[0];
        s.adapter = line.adapter;
        s.samples = {&line.want, 1};
        sequences.push_back(s);
        in_step.push_back(&line);
      }
      ASSERT_TRUE(runner->Begin(sequences).ok());
      const std::vector<StepOutput> outputs = Must(runner->Finish());
      for (size_t i = 0; i < outputs.size(); ++i) {
        in_step[i]->tokens.push_back(outputs[i].tokens.at(0));
        for (const float value : outputs[i].logprobs.logprobs) {
          in_step[i]->logprobs.push_back(value);
        }
      }
    }
    EXPECT_EQ(lines[1].tokens, lines[0].tokens);
    EXPECT_EQ(lines[1].logprobs, lines[0].logprobs);
    if (most == 2) continue;
    for (Line* line : {&lines[0], &lines[2]}) line->tokens.resize(prompt.size() + 16);
    lines[0].logprobs.resize(16);
    EXPECT_EQ(lines[2].tokens, lines[0].tokens);
    EXPECT_EQ(lines[2].logprobs, lines[0].logprobs);
  }
}

INSTANTIATE_TEST_SUITE_P(, CudaModelRunnerTest,
                         testing::Values(Form{"Qwen3", SmallQwen3}, Form{"Gemma3", SmallGemma3},
                                         Form{"Qwen35", SmallQwen35},
                                         Form{"Qwen3Fp8", WithFp8Kv<SmallQwen3>},
                                         Form{"Gemma3Fp8", WithFp8Kv<SmallGemma3>},
                                         Form{"Qwen35Fp8", WithFp8Kv<SmallQwen35>}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dorad::cuda
