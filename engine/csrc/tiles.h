// Lane blocks in tile registers: 16 rows of weights by 16 tokens of bf16 pairs, 32 columns at a time. Included inside a kernel
// unit's anonymous namespace, after its Tiles (tiles_amx.h or tiles_emulated.h).
//
// Weights are the left operand as they lie in memory, 16 rows of 64 bytes. The right one is a panel of tokens: W = 16 units in
// a row is just what the instruction wants. Two strips of rows by two panels make four tiles of sums, so that every tile that is
// loaded is multiplied twice: products then take longer than loads.
//
// Rows come from memory during the first two panels and from L2 for the others (a block is 128 to 256 KiB). Loads of a tile touch
// 16 rows, too many streams for the prefetcher, so what the next 512 bytes of every row need is fetched meanwhile, in runs.
static_assert(W == 16, "a panel's row is a tile's row");

constexpr int kTileColumns = 32;                     // bf16 of a tile's row
constexpr int kAhead = 512, kAheadTiles = kAhead / 64;  // bytes of a row that are fetched together, and tiles in them

// Up to 16 rows that follow each other in memory, and where their sums go.
struct Strip {
  const bf16 *at;
  int rows;
  float *sums;
};

struct TileJob {
  ptrdiff_t ld;
  int k;
  const char *panels;
  size_t panel_stride;
  int ldsums;
};

static inline void fetch_run(const Strip &strip, int row, const TileJob &job, int byte) {
  int end = min_int(byte + kAhead, job.k * int(sizeof(bf16)));
  if (row >= strip.rows) return;
  for (const char *line = (const char *)(strip.at + row * job.ld); byte < end; byte += 64) __builtin_prefetch(line + byte, 0, 2);
}

// A part of the fetching, beside the tile at column k0: of strips now[0 … n) their next run, behind their last one the first
// run of `then`.
static inline void fetch_beside(const Strip *now, const Strip *then, int n, int n_then, const TileJob &job, int k0) {
  constexpr int kRows = kStrip / kAheadTiles;
  int byte = k0 * int(sizeof(bf16)), first = byte % kAhead / 64 * kRows, next = byte / kAhead * kAhead + kAhead;
  bool more = next < job.k * int(sizeof(bf16));
  for (int s = 0; s < (more ? n : n_then); ++s)
    for (int row = first; row < first + kRows; ++row) fetch_run(more ? now[s] : then[s], row, job, more ? next : 0);
}

template <int S, int P>
static inline void multiply_tiles(Tiles &tiles, const char *panel, size_t panel_stride) {
  tiles.load<6>(panel, 64);
  if constexpr (P > 1) tiles.load<7>(panel + panel_stride, 64);
  tiles.multiply<0, 4, 6>();
  if constexpr (P > 1) tiles.multiply<1, 4, 7>();
  if constexpr (S > 1) tiles.multiply<2, 5, 6>();
  if constexpr (S > 1 && P > 1) tiles.multiply<3, 5, 7>();
}

template <int C>
static inline void store_tile(Tiles &tiles, const Strip &strip, float *out, int ldsums) {
  if (strip.rows == kStrip) return tiles.store<C>(out, ldsums * ptrdiff_t(sizeof(float)));
  alignas(64) float whole[kStrip * W];
  tiles.store<C>(whole, W * sizeof(float));
  for (int r = 0; r < strip.rows; ++r) v_store(out + r * ptrdiff_t(ldsums), v_load(whole + r * W));
}

// The tile of a strip at column k0 where rows or columns are missing: a copy with zeros for them.
static inline const bf16 *edge_tile(const Strip &strip, const TileJob &job, int k0, bf16 *copy) {
  __builtin_memset(copy, 0, kStrip * kTileColumns * sizeof(bf16));
  for (int r = 0; r < strip.rows; ++r)
    __builtin_memcpy(copy + r * kTileColumns, strip.at + r * job.ld + k0, min_int(kTileColumns, job.k - k0) * sizeof(bf16));
  return copy;
}

// S strips by P panels from panel p on. fetch: their rows are not all in the cache yet; `then` comes after them.
template <int S, int P>
static void tile_sums(Tiles &tiles, const Strip *strips, const Strip *then, int n_then, bool fetch, const TileJob &job, int p) {
  alignas(64) bf16 copy[S * kStrip * kTileColumns];
  const char *panel = job.panels + p * job.panel_stride;
  const ptrdiff_t stride = job.ld * ptrdiff_t(sizeof(bf16));
  tiles.zero<0>();
  if constexpr (P > 1) tiles.zero<1>();
  if constexpr (S > 1) tiles.zero<2>();
  if constexpr (S > 1 && P > 1) tiles.zero<3>();
  bool whole = strips[0].rows == kStrip && strips[S - 1].rows == kStrip;
  int k0 = 0;
  if (whole)
    for (; k0 + kTileColumns <= job.k; k0 += kTileColumns, panel += 16 * W * 4) {
      if (fetch) fetch_beside(strips, then, S, n_then, job, k0);
      tiles.load<4>(strips[0].at + k0, stride);
      if constexpr (S > 1) tiles.load<5>(strips[S - 1].at + k0, stride);
      multiply_tiles<S, P>(tiles, panel, job.panel_stride);
    }
  for (; k0 < job.k; k0 += kTileColumns, panel += 16 * W * 4) {
    tiles.load<4>(edge_tile(strips[0], job, k0, copy), 64);
    if constexpr (S > 1) tiles.load<5>(edge_tile(strips[S - 1], job, k0, copy + (S - 1) * kStrip * kTileColumns), 64);
    multiply_tiles<S, P>(tiles, panel, job.panel_stride);
  }
  store_tile<0>(tiles, strips[0], strips[0].sums + p * W, job.ldsums);
  if constexpr (P > 1) store_tile<1>(tiles, strips[0], strips[0].sums + (p + 1) * W, job.ldsums);
  if constexpr (S > 1) store_tile<2>(tiles, strips[1], strips[1].sums + p * W, job.ldsums);
  if constexpr (S > 1 && P > 1) store_tile<3>(tiles, strips[1], strips[1].sums + (p + 1) * W, job.ldsums);
}

// See lane_block.
static void tile_block(const Run<bf16> *runs, int n_runs, ptrdiff_t ld, int k, const char *panels, size_t panel_stride,
                       int n_panels, float *sums, int ldsums) {
  Strip strips[kBlock / kStrip + 2];
  int n = 0;
  for (int i = 0; i < n_runs; ++i)
    for (int r = 0; r < runs[i].rows; r += kStrip, ++n) {
      strips[n] = {runs[i].at + r * ld, min_int(kStrip, runs[i].rows - r), sums};
      sums += strips[n].rows * ptrdiff_t(ldsums);
    }
  const TileJob job = {ld, k, panels, panel_stride, ldsums};
  for (int s = 0; s < min_int(n, 2); ++s)
    for (int row = 0; row < kStrip; ++row) fetch_run(strips[s], row, job, 0);
  Tiles tiles;
  for (int s = 0; s < n; s += 2) {
    int wide = min_int(2, n - s), n_then = min_int(2, n - s - wide);
    const Strip *now = strips + s, *then = now + wide;
    for (int p = 0; p < n_panels; p += 2) {
      bool fetch = p == 0, two = p + 1 < n_panels;
      if (wide == 2 && two)
        tile_sums<2, 2>(tiles, now, then, n_then, fetch, job, p);
      else if (wide == 2)
        tile_sums<2, 1>(tiles, now, then, n_then, fetch, job, p);
      else if (two)
        tile_sums<1, 2>(tiles, now, then, n_then, fetch, job, p);
      else
        tile_sums<1, 1>(tiles, now, then, n_then, fetch, job, p);
    }
  }
}
