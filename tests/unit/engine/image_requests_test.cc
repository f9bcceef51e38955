// Requests with images: their rows, what is computed for them, and how often.

#include "server/engine/engine.h"
#include "server/engine/image_store.h"
#include "tests/unit/support/engine_fixture.h"

namespace dorad::engine {
namespace {

class ImageRequestsTest : public EngineTest {
 protected:
  static EngineOptions Options(int64_t cache_bytes = 10 * FakeFeatures::kBytes) {
    EngineOptions options = DefaultOptions();
    options.image_cache_bytes = cache_bytes;
    return options;
  }

  // The stored image of 2 x 3 tokens.
  std::shared_ptr<const Image> Picture(char name) {
    auto image = std::make_shared<Image>();
    image->sha256 = std::string(32, name);
    image->rows = 2;
    image->columns = 3;
    image->pixels = std::string(8, name);
    std::vector<std::vector<PlacedImage>> prompts = {{{0, image}}};
    EXPECT_TRUE(store_.Resolve("", absl::MakeSpan(prompts)).ok());
    return prompts[0][0].image;
  }

  GenerateInput WithImages(std::vector<char> names, int64_t max_tokens,
                           std::shared_ptr<const adapter::LoadedAdapter> adapter = nullptr) {
    const auto count = static_cast<int64_t>(names.size());
    GenerateInput input = Input(Prompt(5 + 10 * count), max_tokens, std::move(adapter));
    for (int64_t i = 0; i < count; ++i) {
      input.images.push_back({5 + 10 * i, Picture(names[static_cast<size_t>(i)])});
    }
    return input;
  }

  void ExpectRight(GenerateInput input) {
    const SampleText expected = Expected(input, 0, 512);
    const Outcome outcome = Wait(*Submit(std::move(input)));
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.samples.at(0).tokens, expected.tokens);
  }

  ImageStore store_{1 << 20};
};

TEST_F(ImageRequestsTest, AnImageStandsInItsPlaceInChunksAndPages) {
  for (const int64_t step_tokens : {1, 7, 64}) {
    EngineOptions options = Options();
    options.max_step_tokens = step_tokens;
    Start(options, 64);
    ExpectRight(WithImages({'a'}, 8));
    ExpectRight(WithImages({'a', 'b'}, 8));
    ExpectRight(WithImages({'b', 'b'}, 8, MakeAdapter("p", 1)));
    ExpectEverythingBack();
  }
}

TEST_F(ImageRequestsTest, PrefixesOfDifferentImagesAreNotShared) {
  Start(Options(), 64);
  ExpectRight(WithImages({'a', 'a', 'a'}, 4));
  ExpectRight(WithImages({'b', 'a', 'a'}, 4));
  ExpectRight(WithImages({'a', 'a', 'b'}, 4));
  GenerateInput again = WithImages({'a', 'a', 'a'}, 4);
  const Outcome outcome = Wait(*Submit(std::move(again)));
  EXPECT_GT(outcome.samples.at(0).finish.usage.cached_prompt_tokens, 30u);
}

TEST_F(ImageRequestsTest, OneComputationServesAllSamplesRequestsAndAdaptersOfTheText) {
  Start(Options(), 64);
  GenerateInput many = WithImages({'a'}, 4);
  many.n = 4;
  EXPECT_TRUE(Wait(*Submit(std::move(many))).status.ok());
  ExpectRight(WithImages({'a', 'a'}, 4));
  ExpectRight(WithImages({'a'}, 4, MakeAdapter("p", 1)));
  EXPECT_EQ(runner_->images_encoded, 1);
  ExpectRight(WithImages({'a'}, 4, MakeAdapter("tower", 1)));
  ExpectRight(WithImages({'a'}, 4, MakeAdapter("tower", 2)));
  ExpectRight(WithImages({'a'}, 4, MakeAdapter("tower", 1)));
  EXPECT_EQ(runner_->images_encoded, 3);
}

TEST_F(ImageRequestsTest, ACacheWithoutRoomServesPromptsWithSeveralImages) {
  Start(Options(/*cache_bytes=*/0), 64);
  std::vector<std::shared_ptr<TokenStream>> streams;
  std::vector<SampleText> expected;
  for (int i = 0; i < 8; ++i) {
    GenerateInput input = WithImages({'a', static_cast<char>('b' + i), 'z'}, 6);
    expected.push_back(Expected(input, 0, 512));
    streams.push_back(Submit(std::move(input)));
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    const Outcome outcome = Wait(*streams[i]);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.samples.at(0).tokens, expected[i].tokens);
  }
  ExpectEverythingBack();
}

TEST_F(ImageRequestsTest, AFailureEndsTheRequestOfTheImageOnly) {
  Start(Options(), 64);
  runner_->on_encode = [](const Image& image) {
    return image.sha256[0] == 'x' ? absl::InternalError("boom") : absl::OkStatus();
  };
  auto bad = Submit(WithImages({'a', 'x'}, 4));
  auto good = Submit(WithImages({'a'}, 4));
  auto text = Submit(Input(Prompt(5), 4));
  EXPECT_EQ(Wait(*bad).status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(Wait(*good).status.ok());
  EXPECT_TRUE(Wait(*text).status.ok());
  ExpectEverythingBack();
}

TEST_F(ImageRequestsTest, ImagesThatWaitTogetherAreComputedTogether) {
  for (const int64_t cache_bytes : {int64_t{0}, 10 * FakeFeatures::kBytes}) {
    Start(Options(cache_bytes), 256);
    runner_->most_at_once = 4;
    absl::Notification begun, submitted;
    int steps = 0;  // as the next two, of the engine thread
    std::string order;
    std::vector<int> at;
    runner_->on_step = [&] {
      if (++steps == 1) {
        begun.Notify();
        submitted.WaitForNotification();
      }
      return absl::OkStatus();
    };
    runner_->on_encode = [&](const Image& image) {
      order += image.sha256[0];
      at.push_back(steps);
      return absl::OkStatus();
    };
    std::vector<SampleText> expected;
    std::vector<std::shared_ptr<TokenStream>> streams;
    const auto submit = [&](GenerateInput input) {
      expected.push_back(Expected(input, 0, 512));
      streams.push_back(Submit(std::move(input)));
    };
    submit(Input(Prompt(5), 1));
    begun.WaitForNotification();
    submit(WithImages({'b', 'c'}, 4));
    submit(WithImages({'d'}, 4, MakeAdapter("tower", 1)));  // on its own: another adapter
    submit(WithImages({'c', 'e'}, 4));
    submitted.Notify();
    for (size_t i = 0; i < streams.size(); ++i) {
      const Outcome outcome = Wait(*streams[i]);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      EXPECT_EQ(outcome.samples.at(0).tokens, expected[i].tokens);
    }
    EXPECT_EQ(order, "bced");
    ASSERT_EQ(at.size(), 4u);
    EXPECT_EQ(at[0], at[2]);
    ExpectEverythingBack();
  }
}

TEST_F(ImageRequestsTest, StepsOfOthersGoOnBetweenPiecesOfImages) {
  EngineOptions options = Options();
  options.prefix_cache = false;
  Start(options, 64);
  runner_->pieces_of_image = 3;
  absl::Notification begun, submitted;
  int steps = 0;  // as the next, of the engine thread
  std::vector<int> at;
  runner_->on_step = [&] {
    if (++steps == 3) {
      begun.Notify();
      submitted.WaitForNotification();
    }
    return absl::OkStatus();
  };
  runner_->on_encode = [&](const Image&) {
    at.push_back(steps);
    return absl::OkStatus();
  };
  auto text = Submit(Input(Prompt(5), 200));
  begun.WaitForNotification();
  auto images = Submit(WithImages({'a', 'b', 'c', 'd'}, 4));
  submitted.Notify();
  EXPECT_TRUE(Wait(*images).status.ok());
  EXPECT_TRUE(Wait(*text).status.ok());
  ASSERT_EQ(at.size(), 12u);
  EXPECT_EQ(runner_->images_encoded, 4);
  for (size_t i = 1; i < at.size(); ++i) EXPECT_GT(at[i], at[i - 1]);
}

TEST_F(ImageRequestsTest, AnImageThatHasBegunIsFinishedBeforeOneOfAHigherPriority) {
  Start(Options(/*cache_bytes=*/0), 64);
  runner_->pieces_of_image = 3;
  absl::Notification begun, submitted;
  std::string order;  // engine thread
  runner_->on_encode = [&](const Image& image) {
    order += image.sha256[0];
    if (order.size() == 1) {
      begun.Notify();
      submitted.WaitForNotification();
    }
    return absl::OkStatus();
  };
  auto first = Submit(WithImages({'a'}, 4));
  begun.WaitForNotification();
  GenerateInput urgent = WithImages({'b'}, 4);
  urgent.priority = -1;
  auto second = Submit(std::move(urgent));
  submitted.Notify();
  EXPECT_TRUE(Wait(*first).status.ok());
  EXPECT_TRUE(Wait(*second).status.ok());
  EXPECT_EQ(order, "aaabbb");
}

TEST_F(ImageRequestsTest, ACancelledRequestLeavesNothingBehind) {
  Start(Options(), 64);
  std::atomic<bool> hold{true};
  runner_->on_encode = [&](const Image&) {
    while (hold) absl::SleepFor(absl::Microseconds(100));
    return absl::OkStatus();
  };
  auto first = Submit(WithImages({'a', 'b'}, 50));
  auto second = Submit(WithImages({'b', 'c'}, 4));
  Cancel(first);
  hold = false;
  EXPECT_EQ(Wait(*first).status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(Wait(*second).status.ok());
  ExpectEverythingBack();
}

TEST_F(ImageRequestsTest, ScoresAreThoseOfThePlaceholders) {
  Start(Options(), 64);
  GenerateInput input = WithImages({'a'}, 2);
  input.logprobs.prompt = true;
  std::vector<TokenId> shown = input.prompt;
  const FakeFeatures features(*input.images[0].image, nullptr);
  std::fill(shown.begin() + 5, shown.begin() + 11, features.token);
  std::vector<float> expected = {std::numeric_limits<float>::quiet_NaN()};
  for (size_t t = 1; t < shown.size(); ++t) {
    const uint64_t hash = FakeHash(nullptr, absl::MakeConstSpan(shown).first(t));
    expected.push_back(FakeLogprob(hash, input.prompt[t]));
  }
  const Outcome outcome = Wait(*Submit(std::move(input)));
  EXPECT_EQ(Bits(outcome.samples.at(0).prompt_logprobs), Bits(expected));
}

}  // namespace
}  // namespace dorad::engine
