// Early return for CUDA statuses. Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#define DORAD_CUDA_RETURN_IF_ERROR(expression)                              \
  do {                                                                      \
    if (const cudaError_t status_ = (expression); status_ != cudaSuccess) { \
      return status_;                                                       \
    }                                                                       \
  } while (false)
