// Vectors of 8 floats, with FMA. Included by one translation unit, inside its anonymous namespace.
using V = __m256;
constexpr int W = 8;
constexpr int kTileRows = 6;  // x 2 vectors: with 8 accumulators every stall is felt, two units of latency 4 need just as many
constexpr int kMaxVec = 2;  // 3 would need all 16 registers, and compilers spill: 62 instead of 97 GFLOPS on a Zen 5
constexpr int kDotAcc = 8;

static inline __m256i mask_n(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline V v_zero() { return _mm256_setzero_ps(); }
static inline V v_set(float x) { return _mm256_set1_ps(x); }
static inline V v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline V v_loadn(const float *p, int n) { return _mm256_maskload_ps(p, mask_n(n)); }
static inline V v_widen(__m128i u) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(u), 16)); }
static inline V v_load(const bf16 *p) { return v_widen(_mm_loadu_si128((const __m128i *)p)); }
static inline V v_loadn(const bf16 *p, int n) {
  alignas(16) uint16_t buffer[8] = {0};
  __builtin_memcpy(buffer, p, size_t(n) * 2);
  return v_widen(_mm_load_si128((const __m128i *)buffer));
}
static inline void v_store(float *p, V x) { _mm256_storeu_ps(p, x); }
static inline void v_storen(float *p, V x, int n) { _mm256_maskstore_ps(p, mask_n(n), x); }
static inline __m128i v_narrow(V x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
  rounded = _mm256_srli_epi32(rounded, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
static inline void v_store(bf16 *p, V x) { _mm_storeu_si128((__m128i *)p, v_narrow(x)); }
static inline void v_storen(bf16 *p, V x, int n) {
  alignas(16) uint16_t buffer[8];
  _mm_store_si128((__m128i *)buffer, v_narrow(x));
  __builtin_memcpy(p, buffer, size_t(n) * 2);
}
static inline V v_add(V a, V b) { return _mm256_add_ps(a, b); }
static inline V v_sub(V a, V b) { return _mm256_sub_ps(a, b); }
static inline V v_mul(V a, V b) { return _mm256_mul_ps(a, b); }
static inline V v_div(V a, V b) { return _mm256_div_ps(a, b); }
static inline V v_reciprocal(V x) { return _mm256_div_ps(_mm256_set1_ps(1.0f), x); }
static inline V v_fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
static inline V v_max(V a, V b) { return _mm256_max_ps(a, b); }
static inline V v_min(V a, V b) { return _mm256_min_ps(a, b); }
static inline V v_where_less(V a, V b, V x, V y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
// Four sums at once. v_sum adds in the same order, so a row's result does not depend on what is computed beside it.
static inline void v_sum4(V a, V b, V c, V d, float *out) {
  V ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  V cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  V s = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
static inline float v_sum(V x) {
  V s = _mm256_add_ps(x, _mm256_shuffle_ps(x, x, 0x4e));
  s = _mm256_add_ps(s, _mm256_shuffle_ps(s, s, 0xb1));
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
static inline V v_round(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline V v_scale2(V x, V n) {
  n = _mm256_max_ps(n, _mm256_set1_ps(-126.0f));
  __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}

static inline void v_transpose(V r[8]) {
  V t[8];
  for (int i = 0; i < 8; i += 4) {
    V a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
    V c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
}

static inline void v_transpose_8xW(const float *in, int ld, float *out, int ldout) {
  V r[8];
  for (int i = 0; i < 8; ++i) r[i] = v_load(in + i * ld);
  v_transpose(r);
  for (int i = 0; i < 8; ++i) v_store(out + i * ldout, r[i]);
}

struct MulF32 {
  using Elem = float;
  using B = __m256;
  static constexpr int kPerUnit = 1;
  static inline B load(const char *p) { return _mm256_loadu_ps((const float *)p); }
  static inline B broadcast(const char *p) { return _mm256_broadcast_ss((const float *)p); }
  static inline V mac(V acc, B a, B b) { return _mm256_fmadd_ps(a, b, acc); }
};
