// ASV_OP_EXPERTS: out[t] = sum over the token's experts of weight * down(silu(gate(x)) * up(x)) (+ residual).
// Included inside a kernel unit's anonymous namespace.
//
// p: 0 x [T, H], 1 ids int32 [T, k] (-1: skip), 2 weights f32 [T, k], 3 gate_up [E, 2I, H], 4 down [E, H, I], 5 out
// [T, H], 6 residual or null.  n: 0 T, 1 H, 2 I, 3 k, 4 E, 5 x stride, 6 out stride, 7 residual stride, 8 and 9 strides
// between experts of gate_up and down (elements), 10 the inner width of the records: up begins that many rows behind gate, and
// rows of down are that long. I may be less: then gate_up and down point at the first of I inner rows that are computed.
// flags: bf16 bits of x, banks, out, residual.
//
// Tokens are grouped by expert, so a step reads each weight row once from memory. Of an expert's tokens, whole vectors go
// through lane tiles with their activations packed, the rest (or all, if few) through dot tiles, row block by row block.
// Every token's sum runs over its experts in rising id, whatever else is in the batch.

struct ExpertArgs {
  const void *x, *gate_up, *down, *res;
  void *out;
  const int32_t *ids;
  const float *weights;
  int T, H, I, top_k, E;
  ptrdiff_t xs, os, rs, gate_es, down_es;
  int inter;
  bool out_bf, res_bf;
};

struct Group {
  int expert, first, count;  // its pairs are pairs[first … first + count)
  int lanes;                 // that many of them, the first ones, in lane tiles
  char *x, *h, *h_rows;      // lanes: packed panels of x and h. The others: h as rows [count - lanes][I]
  int panels() const { return ceil_div(lanes, W); }
};

// From so many tokens on an expert's products are made in tiles: dot tiles take more time than reading its weights then.
constexpr int kTileTokens = 5;

// A last partial vector costs as much as a full one, about twice as much as dot tiles do for half of it. Tiles cost the same
// however full they are, and sum in another order: a batch of few tokens does without, so that they do not change each other.
template <class M>
static inline int lanes_of(int count, int tokens) {
  if (kTiled<M> && tokens > kMaxDotTokens && count >= kTileTokens) return count;
  if (count <= kMaxDotTokens) return 0;
  if (kTiled<M>) return count;
  return count % W <= W / 2 ? count - count % W : count;
}

struct Grouping {
  Group *groups;
  int32_t *pairs;  // token * top_k + j, by expert, tokens rising
  int n_groups;
};

template <class M>
static Grouping group_pairs(const ExpertArgs &a) {
  size_t n_pairs = size_t(a.T) * a.top_k;
  char *memory = (char *)shared_scratch(1, size_t(a.E) * (sizeof(Group) + 4) + n_pairs * 4 + 64);
  Group *groups = (Group *)memory;
  int32_t *next = (int32_t *)(memory + size_t(a.E) * sizeof(Group));
  int32_t *pairs = next + a.E;
  for (int e = 0; e < a.E; ++e) next[e] = 0;
  for (size_t i = 0; i < n_pairs; ++i)
    if (a.ids[i] >= 0 && a.ids[i] < a.E) ++next[a.ids[i]];
  int at = 0, n = 0;
  for (int e = 0; e < a.E; ++e) {
    int count = next[e];
    if (count > 0) groups[n++] = Group{e, at, count, lanes_of<M>(count, a.T), nullptr, nullptr, nullptr};
    next[e] = at;
    at += count;
  }
  for (size_t i = 0; i < n_pairs; ++i)
    if (a.ids[i] >= 0 && a.ids[i] < a.E) pairs[next[a.ids[i]]++] = int32_t(i);
  return {groups, pairs, n};
}

// h = silu(gate) * up of `rows` rows into one panel, units of rows i0 …. gate, up: [rows][ld], W tokens of each.
static inline V hidden(const float *gate, const float *up) { return v_mul(v_silu(v_load(gate)), v_load(up)); }
static inline void store_hidden(MulF32, const float *gate, const float *up, int ld, int rows, int i0, char *panel) {
  for (int r = 0; r < rows; ++r) v_store((float *)panel + size_t(i0 + r) * W, hidden(gate + r * ld, up + r * ld));
}
#if defined(ASV_HAVE_BF16)
static inline void store_hidden(MulBF16, const float *gate, const float *up, int ld, int rows, int i0, char *panel) {
  for (int r = 0; r < rows; r += 2) {
    V odd = r + 1 < rows ? hidden(gate + (r + 1) * ld, up + (r + 1) * ld) : v_zero();
    v_store_pairs(panel + size_t(i0 + r) / 2 * W * 4, hidden(gate + r * ld, up + r * ld), odd);
  }
}
#endif

constexpr int kTokenBlock = 16;

template <class M, class XT, class WT>
struct Experts {
  using E = typename M::Elem;
  const ExpertArgs &a;
  Grouping g;
  const E *x_rows;     // [T][H] in the multiplier's element type, for dot groups
  ptrdiff_t x_ld;
  float *sum;          // [T][H]
  size_t x_panel, h_panel;

  int token_of(int pair) const { return g.pairs[pair] / a.top_k; }
  const WT *gate_row(const Group &group, int i) const {
    return (const WT *)a.gate_up + group.expert * a.gate_es + size_t(i) * a.H;
  }
  const WT *down_row(const Group &group, int h) const {
    return (const WT *)a.down + group.expert * a.down_es + size_t(h) * a.inter;
  }

  void pack(const Group &group, int panel) {
    const XT *rows[W];
    int first = panel * W, n = min_int(W, group.lanes - first);
    for (int i = 0; i < n; ++i) rows[i] = (const XT *)a.x + token_of(group.first + first + i) * a.xs;
    pack_panel(M(), rows, n, a.H, group.x + panel * x_panel);
    pad_panel<M>(group.h + panel * h_panel, a.I);
  }

  void gate_up_dot(const Group &group, int i0, int i1) {
    float gate[kMaxDotTokens * kBlock], up[kMaxDotTokens * kBlock];
    const E *x[kMaxDotTokens] = {};
    int tokens = group.count - group.lanes, n = i1 - i0;
    for (int t = 0; t < tokens; ++t) x[t] = x_rows + token_of(group.first + group.lanes + t) * x_ld;
    // Gate and up rows in turns of 8, so that both streams advance together.
    for (int r = 0; r < n; r += 8) {
      int rows = min_int(8, n - r);
      dot_tile<M, WT>(gate_row(group, i0 + r), a.H, rows, x, tokens, a.H, gate + r, kBlock);
      dot_tile<M, WT>(gate_row(group, a.inter + i0 + r), a.H, rows, x, tokens, a.H, up + r, kBlock);
    }
    for (int t = 0; t < tokens; ++t)
      for_vectors(n, [&](int c, int part) {
        V h = v_mul(v_silu(load_part(gate + t * kBlock + c, part)), load_part(up + t * kBlock + c, part));
        store_part((E *)group.h_rows + size_t(t) * a.I + i0 + c, h, part);
      });
  }

  // At most kBlock / 2 rows of each matrix.
  void gate_up_lanes(const Group &group, int i0, int i1, int worker) {
    int n = i1 - i0, panels = group.panels(), ldsums = panels * W;
    float *gate = sums_of(worker, panels), *up = gate + n * ptrdiff_t(ldsums);
    const Run<WT> runs[2] = {{gate_row(group, i0), n}, {gate_row(group, a.inter + i0), n}};
    lane_block<M>(runs, 2, a.H, a.H, group.x, x_panel, panels, gate, ldsums, rows_of(worker));
    for (int p = 0; p < panels; ++p)
      store_hidden(M(), gate + p * W, up + p * W, ldsums, n, i0, group.h + p * h_panel);
  }

  void add(int pair, int h0, const float *y, int n) {
    float *row = sum + size_t(token_of(pair)) * a.H + h0;
    V weight = v_set(a.weights[g.pairs[pair]]);
    for_vectors(n, [&](int i, int part) {
      store_part(row + i, v_fma(weight, load_part(y + i, part), load_part(row + i, part)), part);
    });
  }

  void down_dot(const Group &group, int h0, int h1) {
    float y[kMaxDotTokens * kBlock];
    const E *h[kMaxDotTokens] = {};
    int tokens = group.count - group.lanes;
    for (int t = 0; t < tokens; ++t) h[t] = (const E *)group.h_rows + size_t(t) * a.I;
    dot_tile<M, WT>(down_row(group, h0), a.inter, h1 - h0, h, tokens, a.I, y, kBlock);
    for (int t = 0; t < tokens; ++t) add(group.first + group.lanes + t, h0, y + t * kBlock, h1 - h0);
  }

  // A token's sums are touched once per block of rows, not once per tile.
  void down_lanes(const Group &group, int h0, int h1, int worker) {
    alignas(64) float y[kMaxVec * W * kBlock];
    int rows = h1 - h0, panels = group.panels(), ldsums = panels * W;
    float *sums = sums_of(worker, panels);
    Run<WT> run = {down_row(group, h0), rows};
    lane_block<M>(&run, 1, a.inter, a.I, group.h, h_panel, panels, sums, ldsums, rows_of(worker));
    for_panels(panels, [&](int p, int nv) {
      sums_by_token(sums, ldsums, rows, p, nv, y);
      int first = p * W, n = min_int(nv * W, group.lanes - first);
      for (int t = 0; t < n; ++t) add(group.first + first + t, h0, y + t * kBlock, rows);
    });
  }

  // A worker's scratch for lane blocks: widened weights, and the sums of kBlock rows.
  static char *rows_of(int worker) { return (char *)worker_scratch(worker, 0, lane_scratch<M>(kBlock)); }
  static float *sums_of(int worker, int panels) {
    return (float *)worker_scratch(worker, 1, size_t(kBlock) * panels * W * sizeof(float));
  }

  // Bytes of scratch of one group beyond its weights; `at` may be null to count only.
  size_t place(Group &group, char *at) const {
    size_t x = group.panels() * x_panel, h = group.panels() * h_panel;
    group.x = at;
    group.h = at + x;
    group.h_rows = at + x + h;
    size_t rows = size_t(group.count - group.lanes) * a.I * sizeof(E);
    return x + h + ((rows + 63) & ~size_t(63));
  }

  // Groups first … first + n share the three passes.
  void run_batch(int first, int n) {
    Group *groups = g.groups + first;
    size_t bytes = 0;
    int max_panels = 0;
    double pairs = 0;
    for (int i = 0; i < n; ++i) {
      bytes += place(groups[i], nullptr);
      pairs += groups[i].count;
      max_panels = max_int(max_panels, groups[i].panels());
    }
    char *memory = (char *)shared_scratch(2, bytes + 64);
    for (int i = 0; i < n; ++i) memory += place(groups[i], memory);
    if (max_panels > 0)
      parallel(n * max_panels, n * max_panels * double(x_panel) / 5e3, [&](int task, int) {
        const Group &group = groups[task / max_panels];
        if (task % max_panels < group.panels()) pack(group, task % max_panels);
      });
    double flops = 2.0 * pairs * a.H * a.I, weights = double(n) * a.H * a.I * sizeof(WT);
    int i_block = min_int(kBlock / 2, block_rows(size_t(a.H) * 2 * sizeof(WT))), i_tasks;
    if (kTiled<M>) i_block = round_up(i_block, kStrip);
    i_tasks = ceil_div(a.I, i_block);
    parallel(n * i_tasks, estimate_us(flops * 2, weights * 2), [&](int task, int worker) {
      const Group &group = groups[task / i_tasks];
      int i0 = task % i_tasks * i_block, i1 = min_int(a.I, i0 + i_block);
      if (group.lanes > 0) gate_up_lanes(group, i0, i1, worker);
      if (group.lanes < group.count) gate_up_dot(group, i0, i1);
    });
    // Every expert's part of a task is one run through memory: short runs waste what was prefetched behind them.
    int h_block = max_panels > 0 ? kBlock : max_int(32, block_rows(size_t(n) * a.I * sizeof(WT)));
    // Tiles: whole rounds of blocks for all threads, then strips, so that 12 threads end together with 2,048 rows.
    bool strips = kTiled<M> && max_panels > 0;
    int blocks = strips ? a.H / (h_block * pool_threads()) * pool_threads() : ceil_div(a.H, h_block);
    int left = strips ? ceil_div(a.H - blocks * h_block, kStrip) : 0;
    parallel(blocks + left, estimate_us(flops, weights), [&](int task, int worker) {
      int h0 = task < blocks ? task * h_block : blocks * h_block + (task - blocks) * kStrip;
      int h1 = min_int(a.H, h0 + (task < blocks ? h_block : kStrip));
      for (int i = 0; i < n; ++i) {
        if (groups[i].lanes > 0) down_lanes(groups[i], h0, h1, worker);
        if (groups[i].lanes < groups[i].count) down_dot(groups[i], h0, h1);
      }
    });
  }

  // Rows per task: about 128 KiB of weights, a multiple of 8, at most kBlock.
  static int block_rows(size_t row_bytes) { return min_int(kBlock, max_int(8, int(131072 / row_bytes) & ~7)); }

  void run() {
    bool any_dot = false;
    for (int i = 0; i < g.n_groups; ++i) any_dot = any_dot || g.groups[i].lanes < g.groups[i].count;
    x_ld = a.xs;
    if constexpr (sizeof(XT) == sizeof(E)) {
      x_rows = (const E *)a.x;
    } else if (any_dot) {
      E *copy = (E *)shared_scratch(3, size_t(a.T) * a.H * sizeof(E));
      for (int t = 0; t < a.T; ++t) as_elements((const XT *)a.x + t * a.xs, copy + size_t(t) * a.H, a.H);
      x_rows = copy;
      x_ld = a.H;
    }
    for_tokens([&](int t, int n) { __builtin_memset(sum + size_t(t) * a.H, 0, size_t(n) * a.H * sizeof(float)); });
    // A batch's panels should stay in L2 until its down pass has read them.
    size_t budget = size_t(640 << 10) * pool_threads();
    for (int first = 0; first < g.n_groups;) {
      int n = 0;
      size_t bytes = 0;
      while (first + n < g.n_groups) {
        size_t more = g.groups[first + n].panels() * (x_panel + h_panel);
        if (n > 0 && bytes + more > budget) break;
        bytes += more;
        ++n;
      }
      run_batch(first, n);
      first += n;
    }
    for_tokens([&](int t, int n) {
      for (int end = t + n; t < end; ++t)
        store_row(a.out, a.out_bf, t * a.os, sum + size_t(t) * a.H, a.H, a.res, a.res_bf, t * a.rs);
    });
  }

  // body(first, n) over all tokens; alone, a thread would spend more on the sums of 1,024 than all do on ten experts' weights.
  template <class F>
  void for_tokens(F &&body) const {
    parallel(ceil_div(a.T, kTokenBlock), a.T * double(a.H) * sizeof(float) / 10e3, [&](int task, int) {
      body(task * kTokenBlock, min_int(kTokenBlock, a.T - task * kTokenBlock));
    });
  }
};

template <class M, class XT, class WT>
static void experts_typed(const ExpertArgs &a) {
  Experts<M, XT, WT> run = {a, group_pairs<M>(a), nullptr, 0, nullptr, panel_bytes<M>(a.H), panel_bytes<M>(a.I)};
  run.sum = (float *)shared_scratch(4, size_t(a.T) * a.H * sizeof(float));
  run.run();
}

static void op_experts(const asv_op &op, const Counts &counts) {
  ExpertArgs a = {op.p[0],  op.p[3], op.p[4], op.p[6], (void *)op.p[5], (const int32_t *)op.p[1], (const float *)op.p[2],
                  resolve(op.n[0], counts), op.n[1], op.n[2], op.n[3], op.n[4], op.n[5], op.n[6], op.n[7],
                  op.n[8], op.n[9], op.n[10], is_bf16(op, 2), is_bf16(op, 3)};
  if (a.T == 0) return;
  bool xb = is_bf16(op, 0), wb = is_bf16(op, 1);
#if defined(ASV_HAVE_BF16)
  if (xb && wb) return experts_typed<MulBF16, bf16, bf16>(a);
#else
  if (xb && wb) return experts_typed<MulF32, bf16, bf16>(a);
#endif
  if (xb) return experts_typed<MulF32, bf16, float>(a);
  if (wb) return experts_typed<MulF32, float, bf16>(a);
  experts_typed<MulF32, float, float>(a);
}
