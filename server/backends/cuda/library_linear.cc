#include "server/backends/cuda/library_linear.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/dora/compose.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

// The functions of cuBLAS. It is loaded for the first model that needs it: most do without, and a
// program that is linked with it takes 0.07 s longer to start.
struct Library {
  decltype(&cublasCreate_v2) create;
  decltype(&cublasDestroy_v2) destroy;
  decltype(&cublasSetStream_v2) set_stream;
  // The header declares two of this name; this one takes a cublasComputeType_t.
  cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                         const void*, const void*, cudaDataType, int, const void*, cudaDataType,
                         int, const void*, void*, cudaDataType, int, cublasComputeType_t,
                         cublasGemmAlgo_t);
  decltype(&cublasGetStatusString) describe;
};

template <typename Function>
bool LookUp(void* library, const char* name, Function* function) {
  *function = library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// Nullptr where there is no cuBLAS of this version.
const Library* Load() {
  static const Library* const loaded = []() -> const Library* {
    static Library found;
    const std::string name = absl::StrCat("libcublas.so.", CUBLAS_VER_MAJOR);
    void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    const bool whole = LookUp(library, "cublasCreate_v2", &found.create) &&
                       LookUp(library, "cublasDestroy_v2", &found.destroy) &&
                       LookUp(library, "cublasSetStream_v2", &found.set_stream) &&
                       LookUp(library, "cublasGemmEx", &found.gemm) &&
                       LookUp(library, "cublasGetStatusString", &found.describe);
    return whole ? &found : nullptr;
  }();
  return loaded;
}

absl::Status ToStatus(cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInternal, "CUDA_ERROR",
                   absl::StrCat("a matrix product failed: ", Load()->describe(status)));
}

// out [rows, n] = alpha · x [rows, k] · wᵀ (w: [n, k]) + beta · out. Row-major; leading dimensions
// in elements. cuBLAS is column-major, so the operands are swapped.
absl::Status Multiply(cublasHandle_t handle, int64_t rows, int64_t n, int64_t k, float alpha,
                      const __nv_bfloat16* x, int64_t ldx, const __nv_bfloat16* w, int64_t ldw,
                      float beta, void* out, cudaDataType out_type, int64_t ldo) {
  return ToStatus(Load()->gemm(handle, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(n),
                               static_cast<int>(rows), static_cast<int>(k), &alpha, w, CUDA_R_16BF,
                               static_cast<int>(ldw), x, CUDA_R_16BF, static_cast<int>(ldx), &beta,
                               out, out_type, static_cast<int>(ldo), CUBLAS_COMPUTE_32F,
                               CUBLAS_GEMM_DEFAULT));
}

}  // namespace

absl::StatusOr<LibraryLinear> LibraryLinear::Create(const Stream& stream, int64_t max_rows,
                                                    int64_t max_out, MemoryLedger* ledger) {
  const Library* const library = Load();
  if (library == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_UNAVAILABLE",
                     absl::StrCat("the model needs libcublas.so.", CUBLAS_VER_MAJOR,
                                  ", which is not found: it comes with torch for CUDA"));
  }
  cublasHandle_t handle = nullptr;
  DORAD_RETURN_IF_ERROR(ToStatus(library->create(&handle)));
  LibraryLinear linear(handle, &stream);
  DORAD_RETURN_IF_ERROR(ToStatus(library->set_stream(handle, stream.get())));
  DORAD_ASSIGN_OR_RETURN(linear.scratch_, DeviceBuffer::Allocate(ledger, MemoryLedger::kWorkspace,
                                                                 max_rows * kMaxRank * 2));
  DORAD_ASSIGN_OR_RETURN(linear.sums_, DeviceBuffer::Allocate(ledger, MemoryLedger::kWorkspace,
                                                              max_rows * max_out * 4));
  return linear;
}

LibraryLinear::~LibraryLinear() {
  if (handle_ != nullptr) Load()->destroy(handle_);
}

absl::Status LibraryLinear::Run(const LinearGroup& group, const LinearRows& rows,
                                const __nv_bfloat16* x, float* y) {
  DORAD_RETURN_IF_ERROR(Multiply(handle_, rows.rows, group.out, group.in, 1.0f, x, group.in,
                                 group.weight, group.in, 0.0f, y, CUDA_R_32F, group.out));
  auto* h = scratch_.as<__nv_bfloat16>();  // [rows of one range, rank]
  for (const AdapterRange& range : rows.ranges) {
    const int64_t count = range.end - range.begin;
    int64_t column = 0;
    for (size_t part = 0; part < group.outs.size(); ++part) {
      const int64_t out = group.outs[part];
      float* to = y + range.begin * group.out + column;
      const kernels::DoraFactors factors =
          range.weights == nullptr ? kernels::DoraFactors()
                                   : range.weights->modules()[group.first_module + part];
      if (factors.rank > 0) {
        DORAD_RETURN_IF_ERROR(Multiply(handle_, count, factors.rank, group.in, 1.0f,
                                       x + range.begin * group.in, group.in, factors.a, group.in,
                                       0.0f, h, CUDA_R_16BF, factors.rank));
        DORAD_RETURN_IF_ERROR(Multiply(handle_, count, out, factors.rank, factors.scale, h,
                                       factors.rank, factors.b, factors.ldb, 1.0f, to, CUDA_R_32F,
                                       group.out));
      }
      const float* bias = group.bias == nullptr ? nullptr : group.bias + column;
      if (factors.g != nullptr || bias != nullptr) {
        kernels::ApplyParams apply;
        apply.base = to;
        apply.g = factors.g;
        apply.bias = bias;
        apply.y = to;
        apply.base_ld = apply.y_ld = group.out;
        apply.rows = count;
        apply.out = out;
        apply.y_type = kernels::FloatType::kF32;
        DORAD_RETURN_IF_CUDA_ERROR(kernels::Apply(apply, stream_->get()), "the step");
      }
      column += out;
    }
  }
  return absl::OkStatus();
}

absl::Status LibraryLinear::Run(const LinearGroup& group, const LinearRows& rows,
                                const __nv_bfloat16* x, __nv_bfloat16* y) {
  DORAD_RETURN_IF_ERROR(Run(group, rows, x, sums_.as<float>()));
  kernels::ApplyParams round;
  round.base = sums_.as<float>();
  round.y = y;
  round.base_ld = round.y_ld = round.out = group.out;
  round.rows = rows.rows;
  round.y_type = kernels::FloatType::kBF16;
  return dorad::cuda::ToStatus(kernels::Apply(round, stream_->get()), "the step");
}

}  // namespace dorad::cuda
