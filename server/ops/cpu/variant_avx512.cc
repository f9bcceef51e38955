#include "server/ops/cpu/variant.h"
