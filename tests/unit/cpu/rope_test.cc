// Expected values: transformers 5.17, the rope functions of modeling_rope_utils and of Llama, on a
// LlamaConfig with the same parameters.

#include "server/model/model_config.h"
#include "tests/unit/support/test.h"

namespace dorad::model {
namespace {

RopeConfig Config(int64_t width, int64_t context, RopeKind kind, double theta) {
  RopeConfig rope;
  rope.width = width;
  rope.original_max_position = context;
  rope.kind = kind;
  rope.theta = theta;
  return rope;
}

std::vector<float> Inverse(const RopeConfig& rope, int64_t length) {
  const RopeFrequencies frequencies = ComputeRopeFrequencies(rope, length);
  return {frequencies.inverse.begin(), frequencies.inverse.end()};
}

RopeConfig LongRope() {
  RopeConfig rope = Config(20, 128, RopeKind::kLongRope, 10000.0);
  rope.original_max_position = 128;
  rope.factor = 8.0;
  for (int i = 0; i < 10; ++i) {
    rope.short_factor.push_back(1.0 + 0.1 * i);
    rope.long_factor.push_back(2.0 + 0.7 * i);
  }
  return rope;
}

const std::vector<float> kDefault20 = {1,
                                       0.398107171,
                                       0.158489317,
                                       0.0630957261,
                                       0.0251188632,
                                       0.00999999978,
                                       0.00398107059,
                                       0.00158489333,
                                       0.000630957307,
                                       0.0002511887};

TEST(RopeTest, DefaultIsThePlainPowers) {
  const RopeConfig rope = Config(20, 128, RopeKind::kDefault, 10000.0);
  EXPECT_THAT(Inverse(rope, 128), Pointwise(FloatEq(), kDefault20));
  EXPECT_EQ(ComputeRopeFrequencies(rope, 128).attention_scale, 1.0);
}

TEST(RopeTest, LinearDividesByTheFactor) {
  RopeConfig rope = Config(20, 128, RopeKind::kLinear, 10000.0);
  rope.factor = 2.5;
  EXPECT_THAT(
      Inverse(rope, 128),
      Pointwise(FloatEq(), std::vector<float>{0.400000006, 0.159242868, 0.0633957237, 0.0252382904,
                                              0.0100475457, 0.00399999972, 0.00159242819,
                                              0.00063395733, 0.000252382917, 0.000100475481}));
}

TEST(RopeTest, DynamicIsDefaultWithinTheContext) {
  RopeConfig rope = Config(20, 128, RopeKind::kDynamicNtk, 10000.0);
  rope.factor = 2.3;
  EXPECT_THAT(Inverse(rope, 100), Pointwise(FloatEq(), kDefault20));
  EXPECT_THAT(Inverse(rope, 128), Pointwise(FloatEq(), kDefault20));
}

TEST(RopeTest, DynamicRaisesTheBaseBeyondTheContext) {
  RopeConfig rope = Config(20, 128, RopeKind::kDynamicNtk, 10000.0);
  rope.factor = 2.3;
  EXPECT_THAT(
      Inverse(rope, 300),
      Pointwise(FloatEq(), std::vector<float>{1, 0.340426505, 0.115890212, 0.0394520909,
                                              0.0134305386, 0.00457211165, 0.00155646773,
                                              0.000529863057, 0.000180379371, 6.14059463e-05}));
}

TEST(RopeTest, Llama3SmoothsBetweenTheWavelengths) {
  RopeConfig rope = Config(64, 131072, RopeKind::kLlama3, 500000.0);
  rope.factor = 32.0;
  rope.low_freq_factor = 1.0;
  rope.high_freq_factor = 4.0;
  rope.original_max_position = 8192;
  EXPECT_THAT(Inverse(rope, 131072), Pointwise(FloatEq(), std::vector<float>{1,
                                                                             0.663601279,
                                                                             0.440366626,
                                                                             0.292227834,
                                                                             0.193922758,
                                                                             0.128687382,
                                                                             0.0853971019,
                                                                             0.0566696189,
                                                                             0.0376060307,
                                                                             0.0249554086,
                                                                             0.0165604409,
                                                                             0.0109895291,
                                                                             0.00729266508,
                                                                             0.00483942125,
                                                                             0.00321144611,
                                                                             0.00129054801,
                                                                             0.000429556705,
                                                                             9.70828623e-05,
                                                                             1.94616387e-05,
                                                                             1.29147675e-05,
                                                                             8.57025589e-06,
                                                                             5.68723226e-06,
                                                                             3.77405445e-06,
                                                                             2.50446715e-06,
                                                                             1.66196742e-06,
                                                                             1.10288363e-06,
                                                                             7.31874934e-07,
                                                                             4.85673127e-07,
                                                                             3.22293289e-07,
                                                                             2.1387423e-07,
                                                                             1.41927202e-07,
                                                                             9.41830649e-08}));
}

TEST(RopeTest, YarnInterpolatesLowFrequenciesAndScalesAttention) {
  RopeConfig rope = Config(80, 131072, RopeKind::kYarn, 1000000.0);
  rope.factor = 4.0;
  rope.original_max_position = 32768;
  EXPECT_THAT(Inverse(rope, 131072), Pointwise(FloatEq(), std::vector<float>{1,
                                                                             0.707945764,
                                                                             0.501187205,
                                                                             0.354813397,
                                                                             0.251188636,
                                                                             0.177827939,
                                                                             0.125892535,
                                                                             0.0891250968,
                                                                             0.0630957335,
                                                                             0.0446683653,
                                                                             0.0316227786,
                                                                             0.0223872103,
                                                                             0.0158489291,
                                                                             0.0112201869,
                                                                             0.00794328284,
                                                                             0.00523999846,
                                                                             0.00343819824,
                                                                             0.0022418953,
                                                                             0.00145110011,
                                                                             0.000930990675,
                                                                             0.000590909098,
                                                                             0.000370062713,
                                                                             0.000227812299,
                                                                             0.000137087016,
                                                                             7.99236295e-05,
                                                                             4.44569851e-05,
                                                                             3.14731442e-05,
                                                                             2.22812687e-05,
                                                                             1.5773936e-05,
                                                                             1.11670861e-05,
                                                                             7.90569356e-06,
                                                                             5.59680484e-06,
                                                                             3.96223231e-06,
                                                                             2.80504673e-06,
                                                                             1.98581984e-06,
                                                                             1.40585337e-06,
                                                                             9.95268238e-07,
                                                                             7.04595664e-07,
                                                                             4.98815666e-07,
                                                                             3.53134283e-07}));
  EXPECT_DOUBLE_EQ(ComputeRopeFrequencies(rope, 1).attention_scale, 1.138629436111989);
}

TEST(RopeTest, YarnHonoursMscaleBetasAndTruncate) {
  RopeConfig rope = Config(40, 4096, RopeKind::kYarn, 10000.0);
  rope.factor = 16.0;
  rope.original_max_position = 256;
  rope.mscale = 0.707;
  rope.mscale_all_dim = 1.1;
  rope.beta_fast = 16.0;
  rope.beta_slow = 2.0;
  rope.truncate = false;
  EXPECT_THAT(Inverse(rope, 4096), Pointwise(FloatEq(), std::vector<float>{1,
                                                                           0.630957305,
                                                                           0.398107171,
                                                                           0.200585663,
                                                                           0.0936553702,
                                                                           0.0383304954,
                                                                           0.0110849356,
                                                                           0.00248817005,
                                                                           0.00156992895,
                                                                           0.000990558416,
                                                                           0.000624999986,
                                                                           0.000394348317,
                                                                           0.000248816912,
                                                                           0.00015699293,
                                                                           9.90558328e-05,
                                                                           6.2500003e-05,
                                                                           3.94348317e-05,
                                                                           2.48816923e-05,
                                                                           1.56992937e-05,
                                                                           9.90558328e-06}));
  EXPECT_DOUBLE_EQ(ComputeRopeFrequencies(rope, 1).attention_scale, 0.9165026748433066);
}

TEST(RopeTest, YarnTakesAnExplicitAttentionFactor) {
  RopeConfig rope = Config(16, 4096, RopeKind::kYarn, 10000.0);
  rope.factor = 8.0;
  rope.original_max_position = 512;
  rope.attention_factor = 1.3;
  EXPECT_THAT(Inverse(rope, 4096),
              Pointwise(FloatEq(),
                        std::vector<float>{1, 0.247052938, 0.0562500022, 0.01087033, 0.00124999997,
                                           0.000395284733, 0.000125000006, 3.95284733e-05}));
  EXPECT_EQ(ComputeRopeFrequencies(rope, 1).attention_scale, 1.3);
}

TEST(RopeTest, LongRopeChangesFactorsBeyondTheOriginalLength) {
  const RopeConfig rope = LongRope();
  EXPECT_THAT(
      Inverse(rope, 128),
      Pointwise(FloatEq(), std::vector<float>{1, 0.361915618, 0.132074416, 0.0485351756,
                                              0.0179420449, 0.00666666683, 0.00248816912,
                                              0.000932290161, 0.000350531831, 0.000132204572}));
  EXPECT_THAT(Inverse(rope, 129),
              Pointwise(FloatEq(),
                        {0.5, 0.147447094, 0.0466145016, 0.0153892031, 0.00523309642, 0.00181818183,
                         0.000642108207, 0.000229694677, 8.30206918e-05, 3.02637e-05}));
  EXPECT_DOUBLE_EQ(ComputeRopeFrequencies(rope, 1).attention_scale, 1.1952286093343936);
}

}  // namespace
}  // namespace dorad::model
