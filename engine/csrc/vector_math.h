// Functions on vectors that every instruction set shares, and row loops over them. Included inside the anonymous
// namespace of a kernel unit, after its simd_*.h.

template <class T>
struct remove_ref {
  using type = T;
};
template <class T>
struct remove_ref<T &> {
  using type = T;
};

// A loop over all tasks with a lambda (task, worker).
template <class F>
static inline void parallel(int tasks, double estimate_us, F &&body) {
  using Body = typename remove_ref<F>::type;
  parallel_for(
      tasks, estimate_us, [](void *context, int task, int worker) { (*static_cast<Body *>(context))(task, worker); },
      const_cast<void *>(static_cast<const void *>(&body)));
}

// e^x, relative error below 2e-7 on [-87, 88]; clamps outside (so e^-inf is 1e-38, not 0).
static inline V v_exp(V x) {
  x = v_min(v_max(x, v_set(-87.33654f)), v_set(88.0f));
  V n = v_round(v_mul(x, v_set(1.44269504f)));
  V r = v_fma(n, v_set(-0.693359375f), x);
  r = v_fma(n, v_set(2.12194440e-4f), r);
  V p = v_set(1.9875691500e-4f);
  p = v_fma(p, r, v_set(1.3981999507e-3f));
  p = v_fma(p, r, v_set(8.3334519073e-3f));
  p = v_fma(p, r, v_set(4.1665795894e-2f));
  p = v_fma(p, r, v_set(1.6666665459e-1f));
  p = v_fma(p, r, v_set(5.0000001201e-1f));
  p = v_fma(p, v_mul(r, r), v_add(r, v_set(1.0f)));
  return v_scale2(p, n);
}
// 2^x for x <= 0, relative error below 3e-7, or with Terms = 5 below 3e-6 (results that become bf16).
template <int Terms>
static inline V v_exp2(V x) {
  V n = v_round(x), r = v_sub(x, n);
  V p = Terms > 5 ? v_fma(v_set(1.5403530e-4f), r, v_set(1.3333558e-3f)) : v_set(1.3333558e-3f);
  p = v_fma(p, r, v_set(9.6181291e-3f));
  p = v_fma(p, r, v_set(5.5504109e-2f));
  p = v_fma(p, r, v_set(2.4022651e-1f));
  p = v_fma(p, r, v_set(6.9314718e-1f));
  return v_scale2(v_fma(p, r, v_set(1.0f)), n);
}
static inline V v_sigmoid(V x) { return v_reciprocal(v_add(v_set(1.0f), v_exp(v_sub(v_zero(), x)))); }
static inline V v_silu(V x) { return v_mul(x, v_sigmoid(x)); }

// Apply body(offset, n) over a row in whole vectors and one partial.
template <class F>
static inline void for_vectors(int count, F &&body) {
  int i = 0;
  for (; i + W <= count; i += W) body(i, W);
  if (i < count) body(i, count - i);
}
template <class T>
static inline V load_part(const T *p, int n) {
  return n == W ? v_load(p) : v_loadn(p, n);
}
template <class T>
static inline void store_part(T *p, V x, int n) {
  if (n == W)
    v_store(p, x);
  else
    v_storen(p, x, n);
}
static inline V load_any(const void *p, bool bf, ptrdiff_t at, int n) {
  return bf ? load_part((const bf16 *)p + at, n) : load_part((const float *)p + at, n);
}
static inline void store_any(void *p, bool bf, ptrdiff_t at, V x, int n) {
  if (bf)
    store_part((bf16 *)p + at, x, n);
  else
    store_part((float *)p + at, x, n);
}
static inline float load_one(const void *p, bool bf, ptrdiff_t at) {
  if (!bf) return ((const float *)p)[at];
  uint32_t bits = uint32_t(((const bf16 *)p)[at].bits) << 16;
  float out;
  __builtin_memcpy(&out, &bits, 4);
  return out;
}

// out[at + i] = src[i] (+ res[res_at + i]); res may be null.
static inline void store_row(void *out, bool out_bf, ptrdiff_t at, const float *src, int n, const void *res, bool res_bf,
                             ptrdiff_t res_at) {
  for_vectors(n, [&](int i, int part) {
    V x = load_part(src + i, part);
    if (res != nullptr) x = v_add(x, load_any(res, res_bf, res_at + i, part));
    store_any(out, out_bf, at + i, x, part);
  });
}
