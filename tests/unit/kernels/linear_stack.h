// What the tests of the K-extended projection share: a stack of modules with adapters on both
// sides, and a double reference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/dora/linear.h"
#include "tests/unit/kernels/device.h"

namespace dorad::kernels {

template <typename F>
void ParallelFor(int count, F f) {
  const int threads = std::max(1u, std::min(std::thread::hardware_concurrency(), 16u));
  std::vector<std::thread> pool;
  for (int i = 0; i < threads; ++i) {
    pool.emplace_back([=] {
      for (int j = i; j < count; j += threads) f(j);
    });
  }
  for (std::thread& thread : pool) thread.join();
}

inline std::vector<__nv_bfloat16> Bf16s(std::mt19937& random, size_t size, float deviation) {
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<__nv_bfloat16> values(size);
  for (__nv_bfloat16& value : values) value = __float2bfloat16(normal(random));
  return values;
}

inline std::vector<float> Floats(std::mt19937& random, size_t size, float low, float high) {
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> values(size);
  for (float& value : values) value = uniform(random);
  return values;
}

struct ModuleFactors {
  int rank = 0;  // 0: not adapted
  bool lora = false;
};

// One module of one adapter, on both sides.
struct HostFactors {
  std::vector<__nv_bfloat16> a, b;  // b: [out, ldb]
  std::vector<float> g;
  int rank = 0;
  int ldb = 0;
  float scale = 0.0f;
};

// A stack of modules, adapters for it, and a batch of at most `rows` rows.
class Stack {
 public:
  // adapters[slot][part]
  Stack(const DoraLinearShape& shape, const std::vector<std::vector<ModuleFactors>>& adapters,
        bool bias, int rows = kDoraLinearMaxRows, KernelIsa isa = KernelIsa::kSm90)
      : shape_(shape), isa_(isa), random_(1) {
    for (int p = 0; p < shape.parts; ++p) out_ += shape.out[p];
    x_ = Bf16s(random_, size_t{1} * rows * shape.in, 1.0f);
    w_ = Bf16s(random_, size_t{1} * out_ * shape.in, 0.05f);
    if (bias) bias_ = Floats(random_, out_, -1.0f, 1.0f);
    device_x_ = std::make_unique<DeviceBuffer<__nv_bfloat16>>(x_);
    device_w_ = std::make_unique<DeviceBuffer<__nv_bfloat16>>(w_);
    if (bias) device_bias_ = std::make_unique<DeviceBuffer<float>>(bias_);
    std::vector<DoraFactors> table(adapters.size() * (shape.parts + 1));
    factors_.resize(adapters.size());
    for (size_t slot = 0; slot < adapters.size(); ++slot) {
      for (int p = 0; p < shape.parts; ++p) {
        const ModuleFactors& module = adapters[slot][p];
        HostFactors host;
        host.rank = module.rank;
        max_rank_ = std::max(max_rank_, module.rank);
        if (module.rank > 0) {
          host.ldb = (module.rank + 7) / 8 * 8;
          host.scale = 0.5f + 0.25f * static_cast<float>(p);
          host.a = Bf16s(random_, size_t{1} * module.rank * shape.in, 0.05f);
          host.b = Bf16s(random_, size_t{1} * shape.out[p] * host.ldb, 0.05f);
          for (int n = 0; n < shape.out[p]; ++n) {
            for (int k = module.rank; k < host.ldb; ++k) {
              host.b[size_t{1} * n * host.ldb + k] = __float2bfloat16(0.0f);
            }
          }
          if (!module.lora) host.g = Floats(random_, shape.out[p], 0.5f, 1.5f);
          DoraFactors& device = table[slot * (shape.parts + 1) + 1 + p];
          bf16_buffers_.push_back(std::make_unique<DeviceBuffer<__nv_bfloat16>>(host.a));
          device.a = bf16_buffers_.back()->get();
          bf16_buffers_.push_back(std::make_unique<DeviceBuffer<__nv_bfloat16>>(host.b));
          device.b = bf16_buffers_.back()->get();
          if (!module.lora) {
            float_buffers_.push_back(std::make_unique<DeviceBuffer<float>>(host.g));
            device.g = float_buffers_.back()->get();
          }
          device.scale = host.scale;
          device.rank = host.rank;
          device.ldb = host.ldb;
        }
        factors_[slot].push_back(std::move(host));
      }
    }
    table_ = std::make_unique<DeviceBuffer<DoraFactors>>(table);
    std::vector<CUtensorMap> maps(2 * table.size());
    for (size_t i = 0; i < table.size(); ++i) {
      const size_t part = i % (shape.parts + 1);
      if (part == 0 || isa_ != KernelIsa::kSm90) continue;
      EXPECT_EQ(EncodeDoraMaps(table[i], shape.in, shape.out[part - 1], &maps[2 * i]), cudaSuccess);
    }
    maps_ = std::make_unique<DeviceBuffer<CUtensorMap>>(maps);
    workspace_bytes_ = DoraLinearWorkspaceBytes(shape, kDoraLinearMaxRows, max_rank_);
    workspace_ = std::make_unique<DeviceBuffer<uint8_t>>(workspace_bytes_);
    cudaMemset(workspace_->get(), 0, kDoraLinearSignalBytes);
    segments_ = std::make_unique<DeviceBuffer<RowSegment>>(kDoraLinearMaxRows);
    num_segments_ = std::make_unique<DeviceBuffer<int32_t>>(1);
  }

  int out() const { return out_; }

  void SetSegments(const std::vector<RowSegment>& segments) {
    const auto count = static_cast<int32_t>(segments.size());
    cudaMemcpy(segments_->get(), segments.data(), segments.size() * sizeof(RowSegment),
               cudaMemcpyHostToDevice);
    cudaMemcpy(num_segments_->get(), &count, sizeof(count), cudaMemcpyHostToDevice);
  }

  // On the device, where the table and its maps lie; the reference still knows them by their old
  // names.
  void SwapSlots(int a, int b) {
    std::vector<DoraFactors> table = table_->Read();
    std::vector<CUtensorMap> maps = maps_->Read();
    const int modules = shape_.parts + 1;
    std::swap_ranges(table.begin() + a * modules, table.begin() + (a + 1) * modules,
                     table.begin() + b * modules);
    std::swap_ranges(maps.begin() + 2 * a * modules, maps.begin() + 2 * (a + 1) * modules,
                     maps.begin() + 2 * b * modules);
    cudaMemcpy(table_->get(), table.data(), table.size() * sizeof(DoraFactors),
               cudaMemcpyHostToDevice);
    cudaMemcpy(maps_->get(), maps.data(), maps.size() * sizeof(CUtensorMap),
               cudaMemcpyHostToDevice);
  }

  DoraLinearParams Params(int first_row, int rows, void* y, bool y_fp32) const {
    DoraLinearParams params;
    params.shape = shape_;
    params.rows = rows;
    params.max_rank = max_rank_;
    params.x = device_x_->get() + size_t{1} * first_row * shape_.in;
    params.w = device_w_->get();
    params.bias = device_bias_ == nullptr ? nullptr : device_bias_->get();
    params.table = {table_->get(), shape_.parts + 1};
    params.maps = isa_ == KernelIsa::kSm90 ? maps_->get() : nullptr;
    params.first_module = 1;
    params.segments = segments_->get();
    params.num_segments = num_segments_->get();
    params.y = y;
    params.y_fp32 = y_fp32;
    params.isa = isa_;
    params.workspace = workspace_->get();
    params.workspace_bytes = workspace_bytes_;
    return params;
  }

  // Rows [first_row, first_row + rows) of x as a batch; fp32 out.
  std::vector<float> Run(int first_row, int rows, const std::vector<RowSegment>& segments) {
    SetSegments(segments);
    DeviceBuffer<float> y(size_t{1} * rows * out_ + 64);
    EXPECT_EQ(DoraLinear(Params(first_row, rows, y.get(), true), nullptr), cudaSuccess);
    std::vector<float> values = y.Read();
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    for (size_t i = size_t{1} * rows * out_; i < values.size(); ++i) {
      EXPECT_TRUE(std::isnan(values[i])) << "wrote beyond y";
    }
    values.resize(size_t{1} * rows * out_);
    return values;
  }

  std::vector<float> RunBf16(int rows, const std::vector<RowSegment>& segments) {
    SetSegments(segments);
    DeviceBuffer<__nv_bfloat16> y(size_t{1} * rows * out_);
    EXPECT_EQ(DoraLinear(Params(0, rows, y.get(), false), nullptr), cudaSuccess);
    std::vector<float> values;
    for (const __nv_bfloat16 value : y.Read()) values.push_back(__bfloat162float(value));
    return values;
  }

  std::vector<double> Reference(int row, int slot) const {
    std::vector<double> y(out_);
    const int in = shape_.in;
    std::vector<double> x(in);
    for (int k = 0; k < in; ++k) x[k] = __bfloat162float(x_[size_t{1} * row * in + k]);
    int n0 = 0;
    for (int p = 0; p < shape_.parts; ++p) {
      const HostFactors none;
      const HostFactors& factors = slot < 0 ? none : factors_[slot][p];
      std::vector<double> h(factors.rank);
      for (size_t r = 0; r < h.size(); ++r) {
        double sum = 0.0;
        for (int k = 0; k < in; ++k) sum += __bfloat162float(factors.a[r * in + k]) * x[k];
        h[r] = factors.scale * sum;
      }
      for (int n = 0; n < shape_.out[p]; ++n) {
        double sum = 0.0;
        for (int k = 0; k < in; ++k) {
          sum += __bfloat162float(w_[size_t{1} * (n0 + n) * in + k]) * x[k];
        }
        for (size_t r = 0; r < h.size(); ++r) {
          sum += __bfloat162float(factors.b[size_t{1} * n * factors.ldb + r]) * h[r];
        }
        if (!factors.g.empty()) sum *= factors.g[n];
        if (!bias_.empty()) sum += bias_[n0 + n];
        y[n0 + n] = sum;
      }
      n0 += shape_.out[p];
    }
    return y;
  }

  // Compares rows `first_row` + i of x, under `segments` of the batch, with the reference.
  void ExpectClose(const std::vector<float>& y, int first_row, int rows,
                   const std::vector<RowSegment>& segments, double tolerance,
                   const std::string& what) const {
    std::vector<double> worst(rows, 0.0);
    std::vector<double> error(rows, 0.0);
    ParallelFor(rows, [&](int row) {
      const std::vector<double> expected = Reference(first_row + row, SlotOf(segments, row));
      double difference = 0.0;
      double size = 0.0;
      for (int n = 0; n < out_; ++n) {
        const double d = y[size_t{1} * row * out_ + n] - expected[n];
        difference += d * d;
        size += expected[n] * expected[n];
      }
      const double rms = std::sqrt(size / out_);
      for (int n = 0; n < out_; ++n) {
        const double d = std::abs(y[size_t{1} * row * out_ + n] - expected[n]);
        const double relative = d / (rms + std::abs(expected[n]));
        if (!(relative <= worst[row])) worst[row] = relative;
      }
      error[row] = std::sqrt(difference / size);
    });
    int bad = 0;
    for (int row = 0; row < rows; ++row) {
      if (error[row] <= tolerance && worst[row] <= 6 * tolerance) continue;
      if (++bad <= 4) {
        ADD_FAILURE() << what << ": row " << row << " of " << rows << ", slot "
                      << SlotOf(segments, row) << ": error " << error[row] << ", worst "
                      << worst[row];
      }
    }
    EXPECT_EQ(bad, 0) << what;
  }

  static int SlotOf(const std::vector<RowSegment>& segments, int row) {
    for (const RowSegment& segment : segments) {
      if (row >= segment.begin && row < segment.end) return segment.slot;
    }
    return -1;
  }

 private:
  const DoraLinearShape shape_;
  const KernelIsa isa_;
  std::mt19937 random_;
  int out_ = 0;
  int max_rank_ = 0;
  std::vector<__nv_bfloat16> x_, w_;
  std::vector<float> bias_;
  std::vector<std::vector<HostFactors>> factors_;
  std::vector<std::unique_ptr<DeviceBuffer<__nv_bfloat16>>> bf16_buffers_;
  std::vector<std::unique_ptr<DeviceBuffer<float>>> float_buffers_;
  std::unique_ptr<DeviceBuffer<__nv_bfloat16>> device_x_, device_w_;
  std::unique_ptr<DeviceBuffer<float>> device_bias_;
  std::unique_ptr<DeviceBuffer<DoraFactors>> table_;
  std::unique_ptr<DeviceBuffer<CUtensorMap>> maps_;
  std::unique_ptr<DeviceBuffer<uint8_t>> workspace_;
  size_t workspace_bytes_ = 0;
  std::unique_ptr<DeviceBuffer<RowSegment>> segments_;
  std::unique_ptr<DeviceBuffer<int32_t>> num_segments_;
};

// fp32 out differs from the reference by the rounding of h; bf16 out by its own rounding too.
inline constexpr double kFp32Tolerance = 2e-3;
inline constexpr double kBf16Tolerance = 4e-3;

inline void ExpectSameBits(const float* a, const float* b, int count, const std::string& what) {
  if (std::memcmp(a, b, count * sizeof(float)) == 0) return;
  int different = 0;
  int first = -1;
  for (int i = 0; i < count; ++i) {
    if (std::memcmp(a + i, b + i, sizeof(float)) == 0) continue;
    ++different;
    if (first < 0) first = i;
  }
  ADD_FAILURE() << what << ": " << different << " of " << count << " differ, first at " << first
                << ": " << a[first] << ", " << b[first];
}

inline DoraLinearShape Shape(int in, std::vector<int> out) {
  DoraLinearShape shape;
  shape.in = in;
  shape.parts = static_cast<int>(out.size());
  for (size_t p = 0; p < out.size(); ++p) shape.out[p] = out[p];
  return shape;
}

// Ranks from 8 to 768, plain LoRA, modules without adapter.
inline std::vector<std::vector<ModuleFactors>> ManyAdapters(int parts) {
  std::vector<std::vector<ModuleFactors>> adapters = {
      {{384, false}, {384, false}, {384, false}}, {{8, true}, {8, true}, {8, true}},
      {{64, false}, {0, false}, {16, false}},     {{768, false}, {16, true}, {384, false}},
      {{5, false}, {12, false}, {100, false}},    {{0, false}, {0, false}, {0, false}}};
  for (auto& adapter : adapters) adapter.resize(parts);
  return adapters;
}

// [0, rows) dealt to slots -1, 0, 1, ... in uneven pieces.
inline std::vector<RowSegment> Deal(int rows, const std::vector<int>& slots) {
  std::vector<RowSegment> segments;
  int begin = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    const int left = static_cast<int>(slots.size() - i) - 1;
    int end = left == 0 ? rows : begin + std::max(1, (rows - begin) / (left + 2));
    end = std::min(end, rows);
    if (end > begin) segments.push_back({slots[i], begin, end});
    begin = end;
  }
  return segments;
}

}  // namespace dorad::kernels
