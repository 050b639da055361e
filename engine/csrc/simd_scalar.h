// Vectors of 4 floats through compiler vector extensions: whatever the baseline of the target has (SSE2, NEON, or
// plain scalar code). Included by one translation unit, inside its anonymous namespace.
typedef float V __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
constexpr int W = 4;
constexpr int kTileRows = 4;
constexpr int kMaxVec = 2;
constexpr int kDotAcc = 4;

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
static inline V v_zero() { return V{0, 0, 0, 0}; }
static inline V v_set(float x) { return V{x, x, x, x}; }
static inline V v_load(const float *p) {
  V x;
  __builtin_memcpy(&x, p, 16);
  return x;
}
static inline V v_load(const bf16 *p) { return V{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
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
static inline void v_store(float *p, V x) { __builtin_memcpy(p, &x, 16); }
static inline void v_storen(float *p, V x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x[i];
}
static inline void v_storen(bf16 *p, V x, int n) {
  for (int i = 0; i < n; ++i) p[i] = narrow(x[i]);
}
static inline void v_store(bf16 *p, V x) { v_storen(p, x, 4); }
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
static inline float v_sum(V x) { return (x[0] + x[1]) + (x[2] + x[3]); }
static inline void v_sum4(V a, V b, V c, V d, float *out) { v_store(out, V{v_sum(a), v_sum(b), v_sum(c), v_sum(d)}); }
static inline V v_round(V x) { return V{rintf(x[0]), rintf(x[1]), rintf(x[2]), rintf(x[3])}; }
static inline V v_scale2(V x, V n) {
  n = v_max(n, v_set(-200.0f));
  return V{ldexpf(x[0], int(n[0])), ldexpf(x[1], int(n[1])), ldexpf(x[2], int(n[2])), ldexpf(x[3], int(n[3]))};
}

static inline void v_transpose(V r[4]) {
  for (int i = 0; i < 4; ++i)
    for (int j = i + 1; j < 4; ++j) {
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
