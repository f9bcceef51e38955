// Writes begin and end of every kernel and copy of a CUDA program, those inside of graphs too, for
// step_profile.py. A library that the CUDA driver loads into the program:
//
//   CUDA_INJECTION64_PATH=libkernel_trace.so KERNEL_TRACE=FILE PROGRAM...
//
// A line each: begin and end in nanoseconds, and the name.
#include <cupti.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr size_t kBufferBytes = 8 << 20;

std::FILE* out = nullptr;

void Request(uint8_t** buffer, size_t* size, size_t* max_records) {
  *size = kBufferBytes;
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(ACTIVITY_RECORD_ALIGNMENT, kBufferBytes));
  *max_records = 0;  // as many as fit
}

void Line(uint64_t begin, uint64_t end, const char* name) {
  std::fprintf(out, "%llu %llu %s\n", static_cast<unsigned long long>(begin),
               static_cast<unsigned long long>(end), name);
}

void Complete(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
      Line(kernel->start, kernel->end, kernel->name);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
      Line(copy->start, copy->end, "memcpy");
    }
  }
  std::free(buffer);
}

void Finish() {
  cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  std::fclose(out);
}

}  // namespace

// Called by the driver.
extern "C" int InitializeInjection() {
  const char* path = std::getenv("KERNEL_TRACE");
  if (path != nullptr) out = std::fopen(path, "w");
  if (out == nullptr || cuptiActivityRegisterCallbacks(Request, Complete) != CUPTI_SUCCESS ||
      cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) != CUPTI_SUCCESS ||
      cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY) != CUPTI_SUCCESS) {
    std::fprintf(stderr, "kernel_trace: KERNEL_TRACE names no file, or CUPTI cannot be used\n");
    return 0;
  }
  std::atexit(Finish);
  return 1;
}
