#include "server/backends/cpu/simd/variant.h"
