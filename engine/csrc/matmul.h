// The two inner products that all matrix work reduces to. Included inside a kernel unit's anonymous namespace.
//
// Both read the weight rows as they lie in memory ([rows][K]) and accumulate in f32.
//   dot tile    few tokens: accumulators hold partial sums over K of (row, token) pairs. Reads each weight once from
//               DRAM, needs no packing; one horizontal sum at the end.
//   lane tile   many tokens: a vector holds one K unit of W tokens ("panel", packed once per operation), a weight unit is
//               broadcast. No horizontal sums; results appear as [row][token].
// A unit is 4 bytes: one f32, or two bf16 where the machine multiplies bf16 pairs. The multiplier M says which.

template <class M>
static inline int units(int k) {
  return ceil_div(k, M::kPerUnit);
}
// Bytes of one panel (W tokens); one spare line keeps neighbouring panels off the same cache sets.
template <class M>
static inline size_t panel_bytes(int k) {
  return size_t(units<M>(k)) * W * 4 + 64;
}

// ---- packing ----

// rows: n (<= W) pointers to K elements. panel: [units][W], absent tokens as zeros.
template <class XT>
static inline void pack_panel(MulF32, const XT *const *rows, int n, int k, char *panel) {
  float *out = (float *)panel;
  for (int at = 0; at < k; at += W) {
    int part = min_int(W, k - at);
    V r[W];
    for (int i = 0; i < W; ++i) r[i] = i < n ? load_part(rows[i] + at, part) : v_zero();
    v_transpose(r);
    for (int i = 0; i < part; ++i) v_store(out + size_t(at + i) * W, r[i]);
  }
}

#if defined(ASV_HAVE_BF16)
static inline void pack_panel(MulBF16, const bf16 *const *rows, int n, int k, char *panel) {
  float *out = (float *)panel;
  for (int at = 0; at < k; at += 2 * W) {
    int part = min_int(2 * W, k - at);
    V r[W];
    for (int i = 0; i < W; ++i)
      r[i] = i >= n ? v_zero() : part == 2 * W ? v_load((const float *)(rows[i] + at)) : (V)MulBF16::loadn(rows[i] + at, part);
    v_transpose(r);
    for (int i = 0; i < ceil_div(part, 2); ++i) v_store(out + size_t(at / 2 + i) * W, r[i]);
  }
}
#endif

// ---- weight rows in the form that lane tiles broadcast from ----

struct Rows {
  const char *data;
  ptrdiff_t stride;  // bytes
};

template <class M>
struct RowSource;

template <>
struct RowSource<MulF32> {
  static size_t scratch_bytes(int rows, int k) { return size_t(rows) * round_up(k, W) * 4; }
  static Rows prepare(const float *w, ptrdiff_t ld, int, int, char *) { return {(const char *)w, ld * 4}; }
  static Rows prepare(const bf16 *w, ptrdiff_t ld, int rows, int k, char *scratch) {
    int padded = round_up(k, W);
    for (int r = 0; r < rows; ++r) {
      float *out = (float *)scratch + size_t(r) * padded;
      const bf16 *in = w + r * ld;
      for_vectors(k, [&](int i, int part) { v_store(out + i, load_part(in + i, part)); });
    }
    return {scratch, ptrdiff_t(padded) * 4};
  }
};

#if defined(ASV_HAVE_BF16)
template <>
struct RowSource<MulBF16> {
  static size_t scratch_bytes(int rows, int k) { return size_t(rows) * (k + 1) * 2; }
  static Rows prepare(const bf16 *w, ptrdiff_t ld, int rows, int k, char *scratch) {
    if (k % 2 == 0) return {(const char *)w, ld * 2};
    for (int r = 0; r < rows; ++r) {
      bf16 *out = (bf16 *)scratch + size_t(r) * (k + 1);
      __builtin_memcpy(out, w + r * ld, size_t(k) * 2);
      out[k] = bf16{0};
    }
    return {scratch, ptrdiff_t(k + 1) * 2};
  }
};
#endif

// ---- lane tile ----

// Keeps the compiler from turning one pointer into several.
#define ASV_OPAQUE(pointer) __asm__("" : "+r"(pointer))

// Rows 0…R/2-1 start at a, the others at b (gate and up rows, or one block split in two), `stride` bytes apart; a row's
// units are `step` bytes apart. `ahead`: bytes from a block of rows to the block that is wanted next, 0 if that is not in
// the same stream of contiguous rows. buf: [R][ldbuf] floats.
struct RowTile {
  const char *a, *b;
  ptrdiff_t stride, step, ahead;
};

template <class M, int R, int NV>
static void lane_kernel(const RowTile &rows, const char *panels, size_t panel_stride, int k, float *buf, int ldbuf) {
  constexpr int kHalf = R > 1 ? R / 2 : 1, kLine = 16;  // units per cache line of a row
  V acc[R][NV];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = v_zero();
  // Two moving bases and multiples of the stride: with a pointer per row the compiler runs out of registers and spills
  // an accumulator's operand in the inner loop.
  const char *a = rows.a, *b = rows.b, *next_a = a + rows.ahead, *next_b = b + rows.ahead;
  const ptrdiff_t stride = rows.stride, step = rows.step;
  auto one = [&] {
    typename M::B x[NV];
    for (int v = 0; v < NV; ++v) x[v] = M::load(panels + v * panel_stride);
    for (int r = 0; r < R; ++r) {
      typename M::B w = M::broadcast(r < kHalf ? a + r * stride : b + (r - kHalf) * stride);
      for (int v = 0; v < NV; ++v) acc[r][v] = M::mac(acc[r][v], w, x[v]);
    }
    panels += W * 4;
    a += step;
    b += step;
    ASV_OPAQUE(a);
    ASV_OPAQUE(b);
  };
  int left = k;
  for (; left >= kLine; left -= kLine) {
    if (rows.ahead != 0) {
      for (int r = 0; r < kHalf; ++r, next_a += 64) __builtin_prefetch(next_a, 0, 2);
      for (int r = kHalf; r < R; ++r, next_b += 64) __builtin_prefetch(next_b, 0, 2);
    }
    for (int j = 0; j < kLine; ++j) one();
  }
  for (; left > 0; --left) one();
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) v_store(buf + r * ldbuf + v * W, acc[r][v]);
}

constexpr int kLdBuf = kMaxVec * W;  // row stride of a lane tile's result

// The panels of one lane tile.
struct Panels {
  const char *data;
  size_t stride;
  int count;  // 1 … kMaxVec
  int k;      // units
};

template <class M, int R>
static inline void lane_rows(const RowTile &rows, const Panels &x, float *buf) {
  switch (x.count) {
    case 1: return lane_kernel<M, R, 1>(rows, x.data, x.stride, x.k, buf, kLdBuf);
    case 2: return lane_kernel<M, R, 2>(rows, x.data, x.stride, x.k, buf, kLdBuf);
    default: return lane_kernel<M, R, kMaxVec>(rows, x.data, x.stride, x.k, buf, kLdBuf);
  }
}

// Eight rows, four from each base. buf: [8][kLdBuf].
template <class M>
static inline void lane_tile_pair(const RowTile &rows, const Panels &x, float *buf) {
  if constexpr (kTileRows == 8) {
    lane_rows<M, 8>(rows, x, buf);
  } else {
    ptrdiff_t half = 2 * rows.stride;
    lane_rows<M, 4>({rows.a, rows.a + half, rows.stride, rows.step, rows.ahead}, x, buf);
    lane_rows<M, 4>({rows.b, rows.b + half, rows.stride, rows.step, rows.ahead}, x, buf + 4 * kLdBuf);
  }
}

template <class M>
static inline void lane_tile(const char *a, ptrdiff_t stride, ptrdiff_t step, ptrdiff_t ahead, int rows, const Panels &x,
                             float *buf) {
  if (rows == 8) return lane_tile_pair<M>({a, a + 4 * stride, stride, step, ahead}, x, buf);
  for (int r = 0; r < rows; ++r) lane_rows<M, 1>({a + r * stride, a, stride, step, 0}, x, buf + r * kLdBuf);
}

// Split a count of panels into lane tiles of nearly equal width: body(first, nv).
template <class F>
static inline void for_panels(int panels, F &&body) {
  int at = 0;
  while (at < panels) {
    int left = panels - at;
    int nv = left == kMaxVec + 1 ? (left + 1) / 2 : min_int(left, kMaxVec);
    body(at, nv);
    at += nv;
  }
}

constexpr int kBlock = 64;  // rows whose results are gathered by token before they leave

// Rows of weights times one lane tile's panels, token by token. w: rows (<= kBlock) of a block. y: [nv * W][kBlock].
template <class M>
static inline void lane_block(const Rows &w, int rows, const Panels &x, float *y) {
  alignas(64) float buf[8 * kLdBuf];
  for (int at = 0; at < rows; at += 8) {
    lane_tile<M>(w.data + at * w.stride, w.stride, 4, 8 * w.stride, min_int(8, rows - at), x, buf);
    for (int v = 0; v < x.count; ++v) v_transpose_8xW(buf + v * W, kLdBuf, y + v * W * kBlock + at, kBlock);
  }
}

// ---- dot tile ----

constexpr int kMaxDotTokens = 16;
constexpr int kDotRows = 4;
constexpr int kDotChunk = kDotAcc / kDotRows;  // tokens that share one pass over four rows

template <class M, class WT>
struct DotLoad;
template <class WT>
struct DotLoad<MulF32, WT> {
  static inline V w(const WT *p) { return v_load(p); }
  static inline V wn(const WT *p, int n) { return v_loadn(p, n); }
  static inline V x(const float *p) { return v_load(p); }
  static inline V xn(const float *p, int n) { return v_loadn(p, n); }
};
#if defined(ASV_HAVE_BF16)
template <>
struct DotLoad<MulBF16, bf16> {
  static inline __m512bh w(const bf16 *p) { return MulBF16::load((const char *)p); }
  static inline __m512bh wn(const bf16 *p, int n) { return MulBF16::loadn(p, n); }
  static inline __m512bh x(const bf16 *p) { return MulBF16::load((const char *)p); }
  static inline __m512bh xn(const bf16 *p, int n) { return MulBF16::loadn(p, n); }
};
#endif

// out[t * ldout + r] = w[r] . x[t] over K elements. `next`: weights that are wanted soon, in the order of memory.
template <class M, class WT, int R, int T>
static void dot_kernel(const WT *w, ptrdiff_t ldw, const char *next, const typename M::Elem *const *x, int k, float *out,
                       int ldout) {
  using L = DotLoad<M, WT>;
  constexpr int kStep = W * M::kPerUnit;
  V acc[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) acc[r][t] = v_zero();
  int i = 0;
  for (; i + kStep <= k; i += kStep) {
    typename M::B rows[R];
    for (int r = 0; r < R; ++r) {
      rows[r] = L::w(w + r * ldw + i);
      __builtin_prefetch(next, 0, 3);
      next += kStep * sizeof(WT);
    }
    for (int t = 0; t < T; ++t) {
      typename M::B v = L::x(x[t] + i);
      for (int r = 0; r < R; ++r) acc[r][t] = M::mac(acc[r][t], rows[r], v);
    }
  }
  if (i < k) {
    typename M::B rows[R];
    for (int r = 0; r < R; ++r) rows[r] = L::wn(w + r * ldw + i, k - i);
    for (int t = 0; t < T; ++t) {
      typename M::B v = L::xn(x[t] + i, k - i);
      for (int r = 0; r < R; ++r) acc[r][t] = M::mac(acc[r][t], rows[r], v);
    }
  }
  for (int t = 0; t < T; ++t) {
    if constexpr (R == 4)
      v_sum4(acc[0][t], acc[1][t], acc[2][t], acc[3][t], out + t * ldout);
    else
      for (int r = 0; r < R; ++r) out[t * ldout + r] = v_sum(acc[r][t]);
  }
}

template <class M, class WT, int R>
static inline void dot_tokens(const WT *w, ptrdiff_t ldw, const char *next, const typename M::Elem *const *x, int tokens,
                              int k, float *out, int ldout) {
  for (int t = 0; t < tokens; t += kDotChunk, x += kDotChunk, out += kDotChunk * ldout) {
    switch (min_int(tokens - t, kDotChunk)) {
      case 1: dot_kernel<M, WT, R, 1>(w, ldw, next, x, k, out, ldout); break;
      case 2: dot_kernel<M, WT, R, kDotChunk < 2 ? 1 : 2>(w, ldw, next, x, k, out, ldout); break;
      case 3: dot_kernel<M, WT, R, kDotChunk < 3 ? 1 : 3>(w, ldw, next, x, k, out, ldout); break;
      default: dot_kernel<M, WT, R, kDotChunk < 4 ? 1 : 4>(w, ldw, next, x, k, out, ldout); break;
    }
  }
}

// Rows must follow each other in memory. DRAM is read as one stream, by prefetching 8 KiB ahead in address order: four rows
// that advance side by side stop the hardware prefetcher instead (Zen 5, one core: 21 to 27 GB/s, with this 30).
template <class M, class WT>
static void dot_tile(const WT *w, ptrdiff_t ldw, int rows, const typename M::Elem *const *x, int tokens, int k,
                     float *out, int ldout) {
  ptrdiff_t row_bytes = ldw * ptrdiff_t(sizeof(WT)), ahead = row_bytes * kDotRows;
  if (ahead < 8192) ahead = 8192;
  int r = 0;
  for (; r + kDotRows <= rows; r += kDotRows)
    dot_tokens<M, WT, kDotRows>(w + r * ldw, ldw, (const char *)w + r * row_bytes + ahead, x, tokens, k, out + r, ldout);
  for (; r < rows; ++r)
    dot_tokens<M, WT, 1>(w + r * ldw, ldw, (const char *)w + r * row_bytes + ahead, x, tokens, k, out + r, ldout);
}

// Activations as the multiplier M wants them: the rows themselves, or an f32 copy in `scratch` [n][k].
static inline const bf16 *as_elements(const bf16 *x, bf16 *, int) { return x; }
static inline const float *as_elements(const float *x, float *, int) { return x; }
static inline const float *as_elements(const bf16 *x, float *scratch, int k) {
  for_vectors(k, [&](int i, int part) { store_part(scratch + i, load_part(x + i, part), part); });
  return scratch;
}

// Rough cost for the pool's decision: weight bytes against DRAM, arithmetic against one core.
static inline double estimate_us(double flops, double bytes) { return flops / 150e3 + bytes / 30e3; }
