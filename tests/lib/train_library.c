// What tests/lib/train_library.py builds: the interface of libdorad_train.so, computed on the CPU.
#include <math.h>
#include <stdint.h>
#include <string.h>


// Refuses what the interface does not allow: the codes tell the tests what was wrong.
static int check(const void* stream, int32_t type) {
  return stream != (void*)42 ? 901 : type != 0 ? 902 + type : 0;
}

int dorad_train_abi(void) { return ABI; }

int dorad_train_check_device(void) { return OTHER_DEVICE ? 209 : 0; }

int dorad_compose_forward(const void* base, const void* lora, const float* g, void* delta,
                          void* inner, int64_t rows, int64_t out, float scale, int32_t type,
                          void* stream) {
  if (check(stream, type)) return check(stream, type);
  const float *x = base, *y = lora;
  for (int64_t i = 0; i < rows * out; ++i) {
    ((float*)delta)[i] = (g[i % out] - 1) * x[i] + g[i % out] * (scale * y[i]);
    if (inner) ((float*)inner)[i] = x[i] + scale * y[i];
  }
  return 0;
}

int64_t dorad_compose_backward_workspace(int64_t rows, int64_t out) { return 100 * rows + out; }

int dorad_compose_backward(const void* grad, const void* inner, const float* g, void* d_base,
                           void* d_lora, float* d_g, void* workspace, int64_t workspace_bytes,
                           int64_t rows, int64_t out, float scale, int32_t type, void* stream) {
  if (check(stream, type)) return check(stream, type);
  if (!d_g != !inner) return 910;
  if (d_g && (!workspace || workspace_bytes != 100 * rows + out)) return 911;
  if (d_g) memset(workspace, 0xff, workspace_bytes), memset(d_g, 0, out * sizeof(float));
  const float *dy = grad, *in = inner;
  for (int64_t i = 0; i < rows * out; ++i) {
    if (d_base) ((float*)d_base)[i] = (g[i % out] - 1) * dy[i];
    if (d_lora) ((float*)d_lora)[i] = scale * g[i % out] * dy[i];
    if (d_g) d_g[i % out] += dy[i] * in[i];
  }
  return 0;
}

// Refuses other than the tests' function and handle. Sums in double.
static int check_linear(const void* gemm, const void* handle, const void* stream, int32_t type) {
  return gemm != (void*)7 || handle != (void*)8 ? 930 : check(stream, type);
}

static void multiply(int64_t m, int64_t n, int64_t k, double alpha, const float* left, int64_t lm,
                     int64_t lk, const float* right, int64_t rk, int64_t rn, int add, float* to) {
  for (int64_t i = 0; i < m * n; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < k; ++j) {
      sum += (double)left[i / n * lm + j * lk] * right[j * rk + i % n * rn];
    }
    to[i] = (float)(alpha * sum + (add ? to[i] : 0));
  }
}

struct dorad_linear {
  const float *w, *a, *b;
  float *norm, *g, *inner;
  const float *m, *bias;
  float* y;
  const float* dy;
  float *d_b, *d_m;
  int64_t out, rank;
  double scale;
};

int64_t dorad_linears_forward_bytes(const struct dorad_linear* linears, int32_t count, int64_t rows,
                                    int64_t in, int32_t type, int32_t factor_type,
                                    int32_t makes_norms) {
  int64_t bytes = 3 * rows + type + factor_type;
  for (int i = 0; makes_norms && i < count; ++i) bytes += in + 2 * linears[i].out + linears[i].rank;
  return bytes;
}

int64_t dorad_linears_backward_bytes(const struct dorad_linear* linears, int32_t count,
                                     int64_t rows, int64_t in, int32_t type, int32_t factor_type) {
  int64_t most = 0, ranks = 0;
  for (int i = 0; i < count; ++i) {
    if (linears[i].out > most) most = linears[i].out;
    ranks += linears[i].rank;
  }
  return 4 * rows * (most + ranks) + in + type + factor_type;
}

static float* row_norms(const float* w, const float* a, const float* b, int64_t out, int64_t in,
                        int64_t rank, double scale, float* norm) {
  for (int64_t o = 0; o < out; ++o) {
    double sum = 0;
    for (int64_t i = 0; i < in; ++i) {
      double product = 0;
      for (int64_t r = 0; r < rank; ++r) product += (double)b[o * rank + r] * a[r * in + i];
      sum += pow(w[o * in + i] + scale * product, 2);
    }
    norm[o] = (float)sqrt(sum);
  }
  return norm;
}

static int64_t ranks_of(const struct dorad_linear* linears, int32_t count) {
  int64_t ranks = 0;
  for (int i = 0; i < count; ++i) ranks += linears[i].rank;
  return ranks;
}

// to [m, n] with rows of `ld`.
static void multiply_to(int64_t m, int64_t n, int64_t k, double alpha, const float* left,
                        int64_t lm, int64_t lk, const float* right, int64_t rk, int64_t rn,
                        int add, float* to, int64_t ld) {
  for (int64_t i = 0; i < m; ++i) {
    multiply(1, n, k, alpha, left + i * lm, 0, lk, right, rk, rn, add, to + i * ld);
  }
}

int dorad_linears_forward(void* gemm, void* handle, const struct dorad_linear* linears,
                          int32_t count, const void* x, void* h, void* workspace,
                          int64_t workspace_bytes, int64_t rows, int64_t in, float eps,
                          int32_t type, int32_t factor_type, int32_t m_type, void* stream) {
  if (check_linear(gemm, handle, stream, type)) return check_linear(gemm, handle, stream, type);
  if (factor_type != 0 || m_type != 0) return 931;
  const int makes = !!linears[0].m;
  if (workspace_bytes != dorad_linears_forward_bytes(linears, count, rows, in, 0, 0, makes)) {
    return 932;
  }
  memset(workspace, 0xff, workspace_bytes);
  const int64_t ranks = ranks_of(linears, count);
  float* h_of = h;
  for (const struct dorad_linear* l = linears; l < linears + count; ++l) {
    if (!!l->m != makes || !l->y || !l->inner || l->dy || l->d_b || l->d_m) return 933;
    if (l->m) {
      row_norms(l->w, l->a, l->b, l->out, in, l->rank, l->scale, l->norm);
      for (int64_t o = 0; o < l->out; ++o) {
        l->g[o] = l->m[o] / (l->norm[o] < eps ? eps : l->norm[o]);
      }
    }
    multiply_to(rows, l->rank, in, 1, x, in, 1, l->a, 1, in, 0, h_of, ranks);
    multiply(rows, l->out, in, 1, x, in, 1, l->w, 1, in, 0, l->inner);
    multiply(rows, l->out, l->rank, l->scale, h_of, ranks, 1, l->b, 1, l->rank, 1, l->inner);
    for (int64_t i = 0; i < rows * l->out; ++i) {
      l->y[i] = l->g[i % l->out] * l->inner[i] + (l->bias ? l->bias[i % l->out] : 0);
    }
    h_of += l->rank;
  }
  return 0;
}

int dorad_linears_backward(void* gemm, void* handle, const struct dorad_linear* linears,
                           int32_t count, const void* x, const void* h, void* d_x, void* d_a,
                           void* workspace, int64_t workspace_bytes, int64_t rows, int64_t in,
                           float eps, int32_t type, int32_t factor_type, int32_t m_type,
                           int32_t sum_type, void* stream) {
  if (check_linear(gemm, handle, stream, type)) return check_linear(gemm, handle, stream, type);
  if (factor_type != 0 || m_type != 0 || sum_type != 0) return 931;
  if (workspace_bytes != dorad_linears_backward_bytes(linears, count, rows, in, 0, 0)) return 911;
  memset(workspace, 0xff, workspace_bytes);
  const int64_t ranks = ranks_of(linears, count);
  float* const d_h = workspace;
  float* const d_inner = d_h + rows * ranks;
  int64_t rank = 0;
  int wants_b = 0;
  for (const struct dorad_linear* l = linears; l < linears + count; rank += l->rank, ++l) {
    if (!l->dy || !l->inner != !l->d_m || l->m || l->y || l->bias) return 932;
    wants_b |= !!l->d_b;
    for (int64_t o = 0; l->d_m && o < l->out; ++o) {
      double sum = 0;
      for (int64_t r = 0; r < rows; ++r) {
        sum += (double)l->dy[r * l->out + o] * l->inner[r * l->out + o];
      }
      l->d_m[o] = (float)(sum / (l->norm[o] < eps ? eps : l->norm[o]));
    }
    for (int64_t i = 0; i < rows * l->out; ++i) d_inner[i] = l->g[i % l->out] * l->dy[i];
    multiply_to(rows, l->rank, l->out, l->scale, d_inner, l->out, 1, l->b, l->rank, 1, 0,
                d_h + rank, ranks);
    if (d_x) multiply(rows, in, l->out, 1, d_inner, l->out, 1, l->w, in, 1, rank > 0, d_x);
    if (d_x) multiply(rows, in, l->rank, 1, d_h + rank, ranks, 1, l->a, in, 1, 1, d_x);
    if (d_a) {
      multiply(l->rank, in, rows, 1, d_h + rank, 1, ranks, x, in, 1, 0, (float*)d_a + rank * in);
    }
    if (l->d_b) {
      multiply(l->out, l->rank, rows, l->scale, d_inner, 1, l->out, (const float*)h + rank, ranks,
               1, 0, l->d_b);
    }
  }
  return !x != !d_a || !h != !wants_b ? 933 : 0;
}

static double widened(const void* values, int64_t i) {
  uint32_t bits = (uint32_t)((const uint16_t*)values)[i] << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

static uint16_t rounded(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float half(const void* values, int64_t i, int32_t type) {
  if (type == 0) return ((const float*)values)[i];
  if (type == 1) return (float)widened(values, i);
  return (float)((const _Float16*)values)[i];
}

int dorad_three_terms(const void* a, const void* b, void* to_a, void* to_b, int64_t out, int64_t in,
                      int64_t rank, int32_t type, void* stream) {
  if (stream != (void*)42) return 901;
  uint16_t *wide = to_a, *tall = to_b;
  for (int64_t i = 0; i < rank * in; ++i) {
    uint16_t high = rounded(half(a, i, type));
    wide[i] = wide[rank * in + i] = high;
    wide[2 * rank * in + i] = rounded(half(a, i, type) - (float)widened(&high, 0));
  }
  for (int64_t i = 0; i < out * rank; ++i) {
    uint16_t high = rounded(half(b, i, type));
    uint16_t* row = tall + i / rank * 3 * rank + i % rank;
    row[0] = rounded(half(b, i, type) - (float)widened(&high, 0));
    row[rank] = row[2 * rank] = high;
  }
  return 0;
}

int64_t dorad_direct_norm_workspace(int64_t out, int64_t in, int64_t rank) {
  return 4 * out + in + rank;
}

int dorad_direct_norm(const void* w, const void* a, const void* b, const float* base_sq,
                      float* norm, void* workspace, int64_t workspace_bytes, int64_t out,
                      int64_t in, int64_t rank, int64_t ldb, double scale, int32_t w_by_in,
                      void* stream) {
  if (stream != (void*)42) return 901;
  if (base_sq || ldb < rank || workspace_bytes != 4 * out + in + rank) return 920;
  if (((uintptr_t)w | (uintptr_t)a | (uintptr_t)b) % 16 || in % 8 || ldb % 8) return 921;
  if (w_by_in && out % 8) return 922;
  memset(workspace, 0xff, workspace_bytes);
  for (int64_t o = 0; o < out; ++o) {
    double sum = 0;
    for (int64_t i = 0; i < in; ++i) {
      double product = 0;
      for (int64_t r = 0; r < rank; ++r) {
        product += widened(b, o * ldb + r) * widened(a, r * in + i);
      }
      double t = widened(w, w_by_in ? i * out + o : o * in + i) + scale * product;
      sum += t * t;
    }
    norm[o] = (float)sqrt(sum);
  }
  return 0;
}
