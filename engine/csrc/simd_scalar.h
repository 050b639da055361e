// Vectors of 4 floats through compiler vector extensions: whatever the baseline of the target has (SSE2, NEON, or
// plain scalar code). With ASV_EMULATE_PAIRS vectors of 16, and products of bf16 pairs: the shapes of simd_avx512.h, for tests
// of what is built on them. Included by a translation unit inside its anonymous namespace.
#if defined(ASV_EMULATE_PAIRS)
constexpr int W = 16;
constexpr int kTileRows = 8;
constexpr int kMaxVec = 3;
constexpr int kDotAcc = 24;
#else
constexpr int W = 4;
constexpr int kTileRows = 4;
constexpr int kMaxVec = 2;
constexpr int kDotAcc = 4;
#endif
typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef uint32_t VU __attribute__((vector_size(4 * W)));
typedef uint16_t VH __attribute__((vector_size(2 * W)));

static inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  __builtin_memcpy(&out, &bits, 4);
  return out;
}
static inline bf16 narrow(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (x != x) return bf16{0x7fc0};
  return bf16{uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
static inline V v_zero() { return V{}; }
static inline V v_set(float x) { return x - V{}; }
static inline V v_load(const float *p) {
  V x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
static inline V v_load(const bf16 *p) {
  VH x;
  __builtin_memcpy(&x, p, sizeof x);
  return (V)(__builtin_convertvector(x, VU) << 16);
}
static inline V v_loadn(const float *p, int n) {
  V x = v_zero();
  for (int i = 0; i < n; ++i) x[i] = p[i];
  return x;
}
static inline V v_loadn(const bf16 *p, int n) {
  V x = v_zero();
  for (int i = 0; i < n; ++i) x[i] = widen(p[i]);
  return x;
}
static inline void v_store(float *p, V x) { __builtin_memcpy(p, &x, sizeof x); }
static inline void v_storen(float *p, V x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x[i];
}
static inline void v_storen(bf16 *p, V x, int n) {
  for (int i = 0; i < n; ++i) p[i] = narrow(x[i]);
}
static inline void v_store(bf16 *p, V x) { v_storen(p, x, W); }
static inline V v_add(V a, V b) { return a + b; }
static inline V v_sub(V a, V b) { return a - b; }
static inline V v_mul(V a, V b) { return a * b; }
static inline V v_div(V a, V b) { return a / b; }
static inline V v_reciprocal(V x) { return v_set(1.0f) / x; }
static inline V v_fma(V a, V b, V c) { return a * b + c; }
static inline V v_select(VI mask, V x, V y) { return (V)((mask & (VI)x) | (~mask & (VI)y)); }
static inline V v_max(V a, V b) { return v_select((VI)(a > b), a, b); }
static inline V v_min(V a, V b) { return v_select((VI)(a < b), a, b); }
static inline V v_where_less(V a, V b, V x, V y) { return v_select((VI)(a < b), x, y); }
static inline float v_sum(V x) {
  float sums[W];
  v_store(sums, x);
  for (int n = W / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  return sums[0];
}
static inline void v_sum4(V a, V b, V c, V d, float *out) {
  out[0] = v_sum(a);
  out[1] = v_sum(b);
  out[2] = v_sum(c);
  out[3] = v_sum(d);
}
static inline V v_round(V x) {
  for (int i = 0; i < W; ++i) x[i] = rintf(x[i]);
  return x;
}
static inline V v_scale2(V x, V n) {
  n = v_max(n, v_set(-200.0f));
  for (int i = 0; i < W; ++i) x[i] = ldexpf(x[i], int(n[i]));
  return x;
}

static inline void v_transpose(V r[W]) {
  for (int i = 0; i < W; ++i)
    for (int j = i + 1; j < W; ++j) {
      float swap = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = swap;
    }
}

static inline void v_transpose_8xW(const float *in, int ld, float *out, int ldout) {
  for (int row = 0; row < 8; ++row)
    for (int lane = 0; lane < W; ++lane) out[lane * ldout + row] = in[row * ld + lane];
}

struct MulF32 {
  using Elem = float;
  using B = V;
  static constexpr int kPerUnit = 1;
  static inline B load(const char *p) { return v_load((const float *)p); }
  static inline B broadcast(const char *p) { return v_set(*(const float *)p); }
  static inline V mac(V acc, B a, B b) { return v_fma(a, b, acc); }
};

#if defined(ASV_EMULATE_PAIRS)
#define ASV_HAVE_BF16 1
// Products of bf16 pairs: two elements of each operand per 4-byte unit, summed in f32.
struct MulBF16 {
  using Elem = bf16;
  using B = VU;
  static constexpr int kPerUnit = 2;
  static inline B load(const char *p) {
    B x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  static inline B broadcast(const char *p) {
    uint32_t unit;
    __builtin_memcpy(&unit, p, 4);
    return unit - B{};
  }
  static inline B loadn(const bf16 *p, int n) {
    B x = {};
    __builtin_memcpy(&x, p, size_t(n) * 2);
    return x;
  }
  static inline V even(B x) { return (V)(x << 16); }
  static inline V odd(B x) { return (V)(x & 0xffff0000u); }
  static inline V mac(V acc, B a, B b) { return acc + odd(a) * odd(b) + even(a) * even(b); }
};

// Two rows of 16 floats to 16 units of (even, odd) bf16.
static inline void v_store_pairs(char *p, V even, V odd) {
  for (int i = 0; i < W; ++i) {
    const bf16 unit[2] = {narrow(even[i]), narrow(odd[i])};
    __builtin_memcpy(p + i * 4, unit, 4);
  }
}
// Interleave n (<= 16) bf16 of two rows into n units.
static inline void v_interleave(char *p, const bf16 *even, const bf16 *odd, int n) {
  for (int i = 0; i < n; ++i) {
    const bf16 unit[2] = {even[i], odd[i]};
    __builtin_memcpy(p + i * 4, unit, 4);
  }
}
#endif
