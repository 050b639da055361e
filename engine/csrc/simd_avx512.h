// Vectors of 16 floats. Included by one translation unit per instruction set, inside its anonymous namespace.
using V = __m512;
constexpr int W = 16;
constexpr int kTileRows = 8;  // rows of one lane kernel: 8 x 3 vectors of accumulators, 3 of tokens, 1 of weights
constexpr int kMaxVec = 3;
constexpr int kDotAcc = 24;   // accumulators of a dot kernel: 4 rows x 6 tokens

static inline __mmask16 mask_n(int n) { return __mmask16((1u << n) - 1); }
static inline V v_zero() { return _mm512_setzero_ps(); }
static inline V v_set(float x) { return _mm512_set1_ps(x); }
static inline V v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline V v_loadn(const float *p, int n) { return _mm512_maskz_loadu_ps(mask_n(n), p); }
static inline V v_widen(__m256i u) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(u), 16)); }
static inline V v_load(const bf16 *p) { return v_widen(_mm256_loadu_si256((const __m256i *)p)); }
static inline V v_loadn(const bf16 *p, int n) { return v_widen(_mm256_maskz_loadu_epi16(mask_n(n), p)); }
static inline void v_store(float *p, V x) { _mm512_storeu_ps(p, x); }
static inline void v_storen(float *p, V x, int n) { _mm512_mask_storeu_ps(p, mask_n(n), x); }
static inline __m256i v_narrow(V x) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  __m512i u = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
static inline void v_store(bf16 *p, V x) { _mm256_storeu_si256((__m256i *)p, v_narrow(x)); }
static inline void v_storen(bf16 *p, V x, int n) { _mm256_mask_storeu_epi16(p, mask_n(n), v_narrow(x)); }
static inline V v_add(V a, V b) { return _mm512_add_ps(a, b); }
static inline V v_sub(V a, V b) { return _mm512_sub_ps(a, b); }
static inline V v_mul(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V v_div(V a, V b) { return _mm512_div_ps(a, b); }
// 1 / x, error below 2^-23: an estimate of 14 bits and a Newton step are several times faster than the divider.
static inline V v_reciprocal(V x) {
  V r = _mm512_rcp14_ps(x);
  return _mm512_mul_ps(r, _mm512_fnmadd_ps(x, r, _mm512_set1_ps(2.0f)));
}
static inline V v_fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
static inline V v_max(V a, V b) { return _mm512_max_ps(a, b); }
static inline V v_min(V a, V b) { return _mm512_min_ps(a, b); }
// x where a < b, else y.
static inline V v_where_less(V a, V b, V x, V y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
// Four sums at once. v_sum adds in the same order, so a row's result does not depend on what is computed beside it.
static inline void v_sum4(V a, V b, V c, V d, float *out) {
  V ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  V cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  V s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
static inline float v_sum(V x) {
  V s = _mm512_add_ps(x, _mm512_shuffle_ps(x, x, 0x4e));
  s = _mm512_add_ps(s, _mm512_shuffle_ps(s, s, 0xb1));
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
static inline V v_round(V x) { return _mm512_roundscale_ps(x, 0); }
// x * 2^n for integral n, 0 where that is too small.
static inline V v_scale2(V x, V n) { return _mm512_scalef_ps(x, n); }

// Transpose W rows of W 4-byte units held in registers, in place.
static inline void v_transpose(V r[16]) {
  V t[16];
  for (int i = 0; i < 16; i += 4) {
    V a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
    V c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm512_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    V a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
    V c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    r[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

// in: 8 rows of stride `ld` floats, W columns from `in`. out: W rows of 8 floats, of stride `ldout`.
static inline void v_transpose_8xW(const float *in, int ld, float *out, int ldout) {
  for (int half = 0; half < 2; ++half) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(in + i * ld + half * 8);
    for (int i = 0; i < 8; i += 4) {
      __m256 a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
      __m256 c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
      t[i] = _mm256_shuffle_ps(a, c, 0x44);
      t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
      t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
      t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_ps(out + (half * 8 + i) * ldout, _mm256_permute2f128_ps(t[i], t[i + 4], 0x20));
      _mm256_storeu_ps(out + (half * 8 + i + 4) * ldout, _mm256_permute2f128_ps(t[i], t[i + 4], 0x31));
    }
  }
}

// Products of f32 units: one element of each operand per 4-byte unit.
struct MulF32 {
  using Elem = float;
  using B = __m512;
  static constexpr int kPerUnit = 1;
  static inline B load(const char *p) { return _mm512_loadu_ps((const float *)p); }
  static inline B broadcast(const char *p) { return _mm512_set1_ps(*(const float *)p); }
  static inline V mac(V acc, B a, B b) { return _mm512_fmadd_ps(a, b, acc); }
};

#if defined(__AVX512BF16__)
#define ASV_HAVE_BF16 1
// Products of bf16 pairs: two elements of each operand per 4-byte unit, summed in f32 (VDPBF16PS).
struct MulBF16 {
  using Elem = bf16;
  using B = __m512bh;
  static constexpr int kPerUnit = 2;
  static inline B load(const char *p) { return (B)_mm512_loadu_si512(p); }
  static inline B broadcast(const char *p) {
    int32_t unit;
    __builtin_memcpy(&unit, p, 4);
    return (B)_mm512_set1_epi32(unit);
  }
  static inline B loadn(const bf16 *p, int n) {
    return (B)_mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << n) - 1), p);
  }
  static inline V mac(V acc, B a, B b) { return _mm512_dpbf16_ps(acc, a, b); }
};

// Two rows of 16 floats to 16 units of (even, odd) bf16.
static inline void v_store_pairs(char *p, V even, V odd) {
  __m512i lo = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
  __m512i hi = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd)), 16);
  _mm512_storeu_si512(p, _mm512_or_si512(lo, hi));
}
// Interleave n (<= 16) bf16 of two rows into n units.
static inline void v_interleave(char *p, const bf16 *even, const bf16 *odd, int n) {
  __m512i lo = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask_n(n), even));
  __m512i hi = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask_n(n), odd)), 16);
  _mm512_mask_storeu_epi32(p, mask_n(n), _mm512_or_si512(lo, hi));
}
#endif
