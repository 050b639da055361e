// The two inner products that all matrix work reduces to. Included inside a kernel unit's anonymous namespace.
//
// Both read the weight rows as they lie in memory ([rows][K]) and accumulate in f32.
//   dot tile    few tokens: accumulators hold partial sums over K of (row, token) pairs. Reads each weight once from
//               DRAM, needs no packing; one horizontal sum at the end.
//   lane tile   many tokens: a vector holds one K unit of W tokens ("panel", packed once per operation), a weight unit is
//               broadcast. No horizontal sums; results appear as [row][token].
//               With tile registers (tiles.h), 16 rows by 16 tokens are one instruction's work.
// A unit is 4 bytes: one f32, or two bf16 where the machine multiplies bf16 pairs. The multiplier M says which.

// Whether products of many tokens with this multiplier are made in tiles.
#if defined(ASV_HAVE_TILES)
template <class M>
constexpr bool kTiled = M::kPerUnit == 2;
#else
template <class M>
constexpr bool kTiled = false;
#endif

template <class M>
static inline int units(int k) {
  return ceil_div(k, M::kPerUnit);
}
// Units of a panel: of whole tiles where the multiplier's products are made in tiles, zeros behind those of K.
template <class M>
static inline int panel_units(int k) {
  return kTiled<M> ? round_up(units<M>(k), 16) : units<M>(k);
}
// Bytes of one panel (W tokens); one spare line keeps neighbouring panels off the same cache sets.
template <class M>
static inline size_t panel_bytes(int k) {
  return size_t(panel_units<M>(k)) * W * 4 + 64;
}
template <class M>
static inline void pad_panel(char *panel, int k) {
  __builtin_memset(panel + size_t(units<M>(k)) * W * 4, 0, size_t(panel_units<M>(k) - units<M>(k)) * W * 4);
}

// Before a loop over an array of accumulators: without it GCC 12 unrolls too late to keep the array in registers, and stores
// all of it in every round of the inner loop.
#define ASV_UNROLL _Pragma("GCC unroll 16")

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
  pad_panel<MulBF16>(panel, k);
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

// Rows 0…R/2-1 start at a, the others at b (one block split in two), `stride` bytes apart; a row's units are `step` bytes
// apart. next: memory that is wanted after this tile, one line of each of R rows `next_stride` bytes apart for every 16 units,
// `next_step` bytes further each time; null if there is none.
struct RowTile {
  const char *a, *b;
  ptrdiff_t stride, step;
  const char *next;
  ptrdiff_t next_stride, next_step;
};

// buf: [R][ldbuf] floats, written, or with `add` added to.
template <class M, int R, int NV>
static void lane_kernel(const RowTile &rows, const char *panels, size_t panel_stride, int k, float *buf, int ldbuf, bool add) {
  constexpr int kHalf = R > 1 ? R / 2 : 1, kLine = 16;
  V acc[R][NV];
  ASV_UNROLL for (int r = 0; r < R; ++r)
    ASV_UNROLL for (int v = 0; v < NV; ++v) acc[r][v] = v_zero();
  // Two moving bases and multiples of the stride: with a pointer per row the compiler runs out of registers and spills
  // an accumulator's operand in the inner loop.
  const char *a = rows.a, *b = rows.b, *next = rows.next;
  const ptrdiff_t stride = rows.stride, step = rows.step;
  auto one = [&] {
    typename M::B x[NV];
    ASV_UNROLL for (int v = 0; v < NV; ++v) x[v] = M::load(panels + v * panel_stride);
    ASV_UNROLL for (int r = 0; r < R; ++r) {
      typename M::B w = M::broadcast(r < kHalf ? a + r * stride : b + (r - kHalf) * stride);
      ASV_UNROLL for (int v = 0; v < NV; ++v) acc[r][v] = M::mac(acc[r][v], w, x[v]);
    }
    panels += W * 4;
    a += step;
    b += step;
    ASV_OPAQUE(a);
    ASV_OPAQUE(b);
  };
  int left = k;
  for (; left >= kLine; left -= kLine) {
    if (next != nullptr) {
      const char *line = next;
      ASV_UNROLL for (int r = 0; r < R; ++r, line += rows.next_stride) __builtin_prefetch(line, 0, 2);
      next += rows.next_step;
    }
    for (int j = 0; j < kLine; ++j) one();
  }
  for (; left > 0; --left) one();
  ASV_UNROLL for (int r = 0; r < R; ++r)
    ASV_UNROLL for (int v = 0; v < NV; ++v) {
      float *sum = buf + r * ldbuf + v * W;
      v_store(sum, add ? v_add(v_load(sum), acc[r][v]) : acc[r][v]);
    }
}

// The panels of one lane tile.
struct Panels {
  const char *data;
  size_t stride;
  int count;  // 1 … kMaxVec
  int k;      // units
};

template <class M, int R>
static inline void lane_rows(const RowTile &rows, const Panels &x, float *buf, int ldbuf, bool add) {
  switch (x.count) {
    case 1: return lane_kernel<M, R, 1>(rows, x.data, x.stride, x.k, buf, ldbuf, add);
    case 2: return lane_kernel<M, R, 2>(rows, x.data, x.stride, x.k, buf, ldbuf, add);
    default: return lane_kernel<M, R, kMaxVec>(rows, x.data, x.stride, x.k, buf, ldbuf, add);
  }
}

constexpr int kLdBuf = kMaxVec * W;  // row stride of one lane tile's result

template <class M, int R>
static inline void lane_steps(RowTile &tile, int &rows, const Panels &x, float *&buf, int ldbuf, bool add) {
  for (; rows >= R; rows -= R, buf += R * ptrdiff_t(ldbuf)) {
    tile.b = tile.a + R / 2 * tile.stride;
    lane_rows<M, R>(tile, x, buf, ldbuf, add);
    tile.a += R * tile.stride;
    if (tile.next != nullptr) tile.next += R * tile.next_stride;
  }
}

// Any number of rows, kTileRows at a time, what is left in fours and one by one. buf: [rows][ldbuf].
template <class M>
static inline void lane_tile(RowTile tile, int rows, const Panels &x, float *buf, int ldbuf, bool add) {
  lane_steps<M, kTileRows>(tile, rows, x, buf, ldbuf, add);
  if constexpr (kTileRows > 4) lane_steps<M, 4>(tile, rows, x, buf, ldbuf, add);
  tile.next = nullptr;
  lane_steps<M, 1>(tile, rows, x, buf, ldbuf, add);
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

constexpr int kBlock = 64;  // most rows of a lane block
constexpr int kStrip = 16;  // rows of a tile
// K units of a lane block's step: a tile's panels and rows for so many stay in L1 while all tiles of the block use them.
constexpr int kLaneUnits = W >= 16 ? 128 : 256;

// Rows of weights that follow each other in memory.
template <class WT>
struct Run {
  const WT *at;
  int rows;
};

#if defined(ASV_HAVE_TILES)
#include "tiles.h"
#endif

template <class M>
static inline size_t lane_scratch(int rows) {
  return RowSource<M>::scratch_bytes(rows, kLaneUnits * M::kPerUnit);
}

// sums[r][c] = row r . token c, for the rows of all runs (<= kBlock together) and the tokens of n_panels panels. Step by step
// along K: then tokens come from L1 for all rows but the first few, weights (of which few are read at a time) from L2, and what
// the next step needs of them is fetched meanwhile.
template <class M, class WT>
static void lane_block(const Run<WT> *runs, int n_runs, ptrdiff_t ld, int k, const char *panels, size_t panel_stride, int n_panels,
                       float *sums, int ldsums, char *scratch) {
#if defined(ASV_HAVE_TILES)
  if constexpr (kTiled<M>) return tile_block(runs, n_runs, ld, k, panels, panel_stride, n_panels, sums, ldsums);
#endif
  constexpr int kStep = kLaneUnits * M::kPerUnit;
  const ptrdiff_t row_bytes = ld * ptrdiff_t(sizeof(WT));
  for (int i = 0; i < n_runs; ++i)
    for (int r = 0; r < runs[i].rows; ++r)
      for (int byte = 0; byte < min_int(k, kStep) * int(sizeof(WT)); byte += 64)
        __builtin_prefetch((const char *)(runs[i].at + r * ld) + byte, 0, 2);
  for (int k0 = 0; k0 < k; k0 += kStep) {
    int part = min_int(kStep, k - k0);
    bool more = k0 + kStep < k;
    Rows rows[2];
    char *place = scratch;
    for (int i = 0; i < n_runs; ++i) {
      rows[i] = RowSource<M>::prepare(runs[i].at + k0, ld, runs[i].rows, part, place);
      place += RowSource<M>::scratch_bytes(runs[i].rows, part);
    }
    for_panels(n_panels, [&](int p, int nv) {
      Panels x = {panels + p * panel_stride + size_t(k0 / M::kPerUnit) * W * 4, panel_stride, nv, units<M>(part)};
      float *out = sums + p * W;
      for (int i = 0; i < n_runs; ++i, out += runs[i - 1].rows * ptrdiff_t(ldsums)) {
        const char *at = rows[i].data, *next = more && p == 0 ? (const char *)(runs[i].at + k0 + kStep) : nullptr;
        lane_tile<M>({at, at, rows[i].stride, 4, next, row_bytes, ptrdiff_t(16 * M::kPerUnit * sizeof(WT))}, runs[i].rows, x, out,
                     ldsums, k0 > 0);
      }
    });
  }
}

// The same sums by token: y[t][r] of one lane tile's nv panels from panel p on. y: [nv * W][kBlock].
static inline void sums_by_token(const float *sums, int ldsums, int rows, int p, int nv, float *y) {
  for (int at = 0; at < rows; at += 8)
    for (int v = p; v < p + nv; ++v) v_transpose_8xW(sums + at * ptrdiff_t(ldsums) + v * W, ldsums, y + (v - p) * W * kBlock + at, kBlock);
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
  using B = MulBF16::B;
  static inline B w(const bf16 *p) { return MulBF16::load((const char *)p); }
  static inline B wn(const bf16 *p, int n) { return MulBF16::loadn(p, n); }
  static inline B x(const bf16 *p) { return MulBF16::load((const char *)p); }
  static inline B xn(const bf16 *p, int n) { return MulBF16::loadn(p, n); }
};
#endif

// out[t * ldout + r] = w[r] . x[t] over K elements. `next`: weights that are wanted soon, in the order of memory, as much of
// them as `lines` (<= R) of these rows are.
template <class M, class WT, int R, int T>
static void dot_kernel(const WT *w, ptrdiff_t ldw, const char *next, int lines, const typename M::Elem *const *x, int k,
                       float *out, int ldout) {
  using L = DotLoad<M, WT>;
  constexpr int kStep = W * M::kPerUnit;
  if constexpr (T == 1) lines = R;
  V acc[R][T];
  ASV_UNROLL for (int r = 0; r < R; ++r)
    ASV_UNROLL for (int t = 0; t < T; ++t) acc[r][t] = v_zero();
  int i = 0;
  for (; i + kStep <= k; i += kStep) {
    typename M::B rows[R];
    ASV_UNROLL for (int r = 0; r < R; ++r) {
      rows[r] = L::w(w + r * ldw + i);
      if (r < lines) {
        __builtin_prefetch(next, 0, 3);
        next += kStep * sizeof(WT);
      }
    }
    ASV_UNROLL for (int t = 0; t < T; ++t) {
      typename M::B v = L::x(x[t] + i);
      ASV_UNROLL for (int r = 0; r < R; ++r) acc[r][t] = M::mac(acc[r][t], rows[r], v);
    }
  }
  if (i < k) {
    typename M::B rows[R];
    ASV_UNROLL for (int r = 0; r < R; ++r) rows[r] = L::wn(w + r * ldw + i, k - i);
    ASV_UNROLL for (int t = 0; t < T; ++t) {
      typename M::B v = L::xn(x[t] + i, k - i);
      ASV_UNROLL for (int r = 0; r < R; ++r) acc[r][t] = M::mac(acc[r][t], rows[r], v);
    }
  }
  ASV_UNROLL for (int t = 0; t < T; ++t) {
    if constexpr (R == 4)
      v_sum4(acc[0][t], acc[1][t], acc[2][t], acc[3][t], out + t * ldout);
    else
      ASV_UNROLL for (int r = 0; r < R; ++r) out[t * ldout + r] = v_sum(acc[r][t]);
  }
}

// Passes over the same R rows, which the first one brings into L1. What comes after the rows is fetched by all passes alike, so
// that memory does not rest while there is arithmetic.
template <class M, class WT, int R>
static inline void dot_tokens(const WT *w, ptrdiff_t ldw, const char *next, const typename M::Elem *const *x, int tokens,
                              int k, float *out, int ldout) {
  int passes = ceil_div(tokens, kDotChunk), rows_left = R;
  for (; passes > 0; --passes) {
    int n = ceil_div(tokens, passes), lines = ceil_div(rows_left, passes);
    switch (n) {
      case 1: dot_kernel<M, WT, R, 1>(w, ldw, next, lines, x, k, out, ldout); break;
      case 2: dot_kernel<M, WT, R, kDotChunk < 2 ? 1 : 2>(w, ldw, next, lines, x, k, out, ldout); break;
      case 3: dot_kernel<M, WT, R, kDotChunk < 3 ? 1 : 3>(w, ldw, next, lines, x, k, out, ldout); break;
      case 4: dot_kernel<M, WT, R, kDotChunk < 4 ? 1 : 4>(w, ldw, next, lines, x, k, out, ldout); break;
      case 5: dot_kernel<M, WT, R, kDotChunk < 5 ? 1 : 5>(w, ldw, next, lines, x, k, out, ldout); break;
      default: dot_kernel<M, WT, R, kDotChunk < 6 ? 1 : 6>(w, ldw, next, lines, x, k, out, ldout); break;
    }
    next += lines * ptrdiff_t(k) * ptrdiff_t(sizeof(WT));
    rows_left -= lines;
    tokens -= n;
    x += n;
    out += n * ldout;
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
