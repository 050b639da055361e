// ASV_OP_ATTENTION over the paged KV pool (paged.h). Included inside a kernel unit's anonymous namespace.
//
// Queries are in lanes (a query is a row and a head of the group that shares a KV head), so softmax needs no horizontal
// operations: scores are a lane tile over key rows, the output one over value columns. Keys are read in place; a tile of
// values is interleaved (bf16 pairs) or widened (f32). Softmax in f32, online over key tiles. Several vectors of queries go
// through each tile of keys: reading it is what a long context costs. A few queries are attention_few.h's.

// Value rows to [units(keys)][D] units, so that a lane tile can broadcast (key pair, column).
template <class VT, class F>
static inline void value_tile(MulF32, int keys, int D, char *out, F &&row) {
  for (int j = 0; j < keys; ++j) {
    const VT *v = row(j);
    float *to = (float *)out + size_t(j) * D;
    for_vectors(D, [&](int d, int n) { store_part(to + d, load_part(v + d, n), n); });
  }
}
#if defined(ASV_HAVE_BF16)
template <class VT, class F>
static inline void value_tile(MulBF16, int keys, int D, char *out, F &&row) {
  static const bf16 zeros[W] = {};
  for (int j = 0; j < keys; j += 2) {
    const bf16 *even = row(j), *odd = j + 1 < keys ? row(j + 1) : nullptr;
    for_vectors(D, [&](int d, int n) {
      v_interleave(out + (size_t(j / 2) * D + d) * 4, even + d, odd != nullptr ? odd + d : zeros, n);
    });
  }
}
#endif

// Scores times `factor` minus `high`, powers of two, to P units of one panel. Returns their sum.
static inline V store_probabilities(MulF32, char *panel, const float *s, int keys, V factor, V high) {
  V sum = v_zero(), shift = v_sub(v_zero(), high);
  for (int j = 0; j < keys; ++j) {
    V e = v_exp2<6>(v_fma(v_load(s + j * kLdBuf), factor, shift));
    v_store((float *)panel + j * W, e);
    sum = v_add(sum, e);
  }
  return sum;
}
#if defined(ASV_HAVE_BF16)
static inline V store_probabilities(MulBF16, char *panel, const float *s, int keys, V factor, V high) {
  V even = v_zero(), odd = v_zero(), shift = v_sub(v_zero(), high);
  for (int j = 0; j < keys; j += 2) {
    V e = v_exp2<5>(v_fma(v_load(s + j * kLdBuf), factor, shift)), o = v_zero();
    if (j + 1 < keys) o = v_exp2<5>(v_fma(v_load(s + (j + 1) * kLdBuf), factor, shift));
    v_store_pairs(panel + j / 2 * W * 4, e, o);
    even = v_add(even, e);
    odd = v_add(odd, o);
  }
  return v_add(even, odd);
}
#endif

template <class M, class QT, class KT>
struct Attention {
  static constexpr int kKeyTile = 64 * M::kPerUnit;  // so that a tile of values, 64 columns wide, is half of a small L1 cache
  static constexpr int kGroups = W < 16 ? 4 : 2;
  static constexpr int kQueries = kGroups * kMaxVec * W;

  const AttentionArgs &a;

  // Queries of one lane tile, and what becomes of them.
  struct Group {
    int first, count, nv;
    int first_limit, last_limit;  // keys that its first and its last query see
    float limit[kLdBuf];          // that each lane may see; spare lanes see what the first one sees
    V top[kMaxVec], total[kMaxVec];
    char *q, *p;
    float *scores, *sums;
  };

  static size_t q_panel(int D) { return panel_bytes<M>(D); }
  static size_t p_panel() { return panel_bytes<M>(kKeyTile); }
  static size_t group_bytes(int D) {
    return kMaxVec * (q_panel(D) + p_panel()) + size_t(kKeyTile + D) * kLdBuf * 4;
  }
  static size_t scratch_bytes(int D) {
    return kGroups * group_bytes(D) + size_t(kKeyTile) * D * 4 + RowSource<M>::scratch_bytes(8, D) + 256;
  }

  void run(const AttentionTask &task, char *memory) const {
    int D = a.D, made = 0;
    Group groups[kGroups];
    for (int first = task.first, end = task.first + task.count; first < end; first += kLdBuf)
      begin(groups[made++], task, first, min_int(kLdBuf, end - first), memory), memory += group_bytes(D);
    char *values = memory, *rows_scratch = memory + size_t(kKeyTile) * D * 4;
    int last_limit = groups[made - 1].last_limit;
    const KT *k_pool = (const KT *)a.k + size_t(task.kv_head) * D, *v_pool = (const KT *)a.v + size_t(task.kv_head) * D;
    ptrdiff_t key_stride = ptrdiff_t(a.pool.kv_heads) * D;
    for (int k0 = 0; k0 < last_limit; k0 += kKeyTile) {
      int keys = min_int(kKeyTile, last_limit - k0);
      for (int j = 0; j < keys;) {
        int in_page = a.pool.page_size - (k0 + j) % a.pool.page_size;
        int rows = min_int(min_int(8, keys - j), in_page);
        size_t at = a.pool.row(task.seq, k0 + j, 0);
        fetch(v_pool + at, key_stride, rows);
        Rows key = RowSource<M>::prepare(k_pool + at, key_stride, rows, D, rows_scratch);
        for (int g = 0; g < made; ++g)
          lane_tile<M>({key.data, key.data, key.stride, 4, nullptr, 0, 0}, rows,
                       Panels{groups[g].q, q_panel(D), groups[g].nv, units<M>(D)}, groups[g].scores + j * kLdBuf, kLdBuf, false);
        j += rows;
      }
      value_tile<KT>(M(), keys, D, values, [&](int j) { return v_pool + a.pool.row(task.seq, k0 + j, 0); });
      for (int g = 0; g < made; ++g) take_in(groups[g], k0, keys, values);
    }
    for (int g = 0; g < made; ++g) write(task, groups[g]);
  }

 private:
  void fetch(const KT *rows, ptrdiff_t stride, int n) const {
    for (int r = 0; r < n; ++r)
      for (int d = 0; d < a.D; d += int(64 / sizeof(KT))) __builtin_prefetch(rows + r * stride + d);
  }

  void begin(Group &group, const AttentionTask &task, int first, int count, char *memory) const {
    int D = a.D, context = a.context[task.seq], start = a.start[task.seq];
    group.first = first, group.count = count, group.nv = ceil_div(count, W);
    group.q = memory;
    group.p = group.q + kMaxVec * q_panel(D);
    group.scores = (float *)(group.p + kMaxVec * p_panel());
    group.sums = group.scores + size_t(kKeyTile) * kLdBuf;
    for (int v = 0; v < group.nv; ++v) {
      const QT *rows[W];
      int n = min_int(W, count - v * W);
      for (int i = 0; i < W; ++i) {
        int query = first + (i < n ? v * W + i : 0), t = query / a.group, h = query % a.group;
        rows[i] = (const QT *)a.q + (start + t) * a.q_row + (task.kv_head * a.group + h) * a.q_head;
        group.limit[v * W + i] = float(context + t + 1);
      }
      pack_panel(M(), rows, n, D, group.q + v * q_panel(D));
      group.top[v] = v_set(kMasked), group.total[v] = v_zero();
    }
    for (int i = 0; i < D * kLdBuf; i += W) v_store(group.sums + i, v_zero());
    group.first_limit = context + first / a.group + 1;
    group.last_limit = context + (first + count - 1) / a.group + 1;
  }

  // A tile of keys, whose scores and values are there, into a group's sums.
  void take_in(Group &group, int k0, int keys, const char *values) const {
    if (k0 >= group.last_limit) return;
    V shrink[kMaxVec];
    for (int v = 0; v < group.nv; ++v) {
      float *scores = group.scores + v * W;
      if (k0 + keys > group.first_limit) mask(scores, keys, k0, group.limit + v * W);
      shrink[v] = softmax_tile(scores, keys, group.p + v * p_panel(), &group.top[v], &group.total[v]);
    }
    accumulate(values, Panels{group.p, p_panel(), group.nv, units<M>(keys)}, shrink, group.sums);
  }

  static void mask(float *s, int keys, int k0, const float *limit) {
    V allowed = v_load(limit), hidden = v_set(kMasked);
    for (int j = 0; j < keys; ++j)
      v_store(s + j * kLdBuf, v_where_less(v_set(float(k0 + j)), allowed, v_load(s + j * kLdBuf), hidden));
  }

  // Scores of one vector of queries to probabilities relative to the new maximum, as P units; powers of two all through.
  // Returns the factor for older sums.
  V softmax_tile(const float *s, int keys, char *panel, V *top, V *total) const {
    V factor = v_set(a.scale * kLog2e), high = v_load(s), high2 = high;
    int j = 1;
    for (; j + 2 <= keys; j += 2) {
      high = v_max(high, v_load(s + j * kLdBuf));
      high2 = v_max(high2, v_load(s + (j + 1) * kLdBuf));
    }
    if (j < keys) high = v_max(high, v_load(s + j * kLdBuf));
    high = v_max(*top, v_mul(v_max(high, high2), factor));
    V shrink = v_exp2<6>(v_sub(*top, high));
    *total = v_fma(*total, shrink, store_probabilities(M(), panel, s, keys, factor, high));
    *top = high;
    return shrink;
  }

  void accumulate(const char *values, const Panels &p, const V *shrink, float *sums) const {
    alignas(64) float buf[8 * kLdBuf];
    for (int d = 0; d < a.D; d += 8) {
      int rows = min_int(8, a.D - d);
      lane_tile<M>({values + d * 4, values + d * 4, 4, ptrdiff_t(a.D) * 4, nullptr, 0, 0}, rows, p, buf, kLdBuf, false);
      for (int r = 0; r < rows; ++r)
        for (int v = 0; v < p.count; ++v) {
          float *sum = sums + (d + r) * kLdBuf + v * W;
          v_store(sum, v_fma(v_load(sum), shrink[v], v_load(buf + r * kLdBuf + v * W)));
        }
    }
  }

  void write(const AttentionTask &task, const Group &group) const {
    float turned[W * 8];
    for (int v = 0; v < group.nv; ++v) {
      int n = min_int(W, group.count - v * W);
      V inverse = v_div(v_set(1.0f), group.total[v]);
      for (int d = 0; d < a.D; d += 8) {
        int rows = min_int(8, a.D - d);
        alignas(64) float scaled[8 * W];
        for (int r = 0; r < 8; ++r)
          v_store(scaled + r * W, r < rows ? v_mul(v_load(group.sums + (d + r) * kLdBuf + v * W), inverse) : v_zero());
        v_transpose_8xW(scaled, W, turned, 8);
        for (int i = 0; i < n; ++i) {
          int query = group.first + v * W + i, t = query / a.group, h = task.kv_head * a.group + query % a.group;
          ptrdiff_t at = (a.start[task.seq] + t) * a.out_row + ptrdiff_t(h) * a.D + d;
          store_row(a.out, a.out_bf, at, turned + i * 8, rows, nullptr, false, 0);
        }
      }
    }
  }
};

template <class M, class QT, class KT>
static void attention_typed(const AttentionArgs &a, int S) {
  using Many = Attention<M, QT, KT>;
  using Few = FewQueries<QT, KT>;
  constexpr int kQueries = Many::kQueries;
  int n = 0;
  double pairs = 0;  // of lanes and keys, idle lanes too
  for (int s = 0; s < S; ++s) {
    int queries = (a.start[s + 1] - a.start[s]) * a.group;
    n += ceil_div(queries, kQueries);
    int lanes = queries > kFewQueries ? round_up(queries, W) : queries;
    pairs += double(lanes) * (a.context[s] + (a.start[s + 1] - a.start[s]) * 0.5);
  }
  AttentionTask *tasks = (AttentionTask *)shared_scratch(0, size_t(n) * a.pool.kv_heads * sizeof(AttentionTask));
  int made = 0;
  // Last rows first: they see the most keys, and long tasks belong at the start.
  for (int s = 0; s < S; ++s) {
    int queries = (a.start[s + 1] - a.start[s]) * a.group;
    for (int tile = ceil_div(queries, kQueries) - 1; tile >= 0; --tile)
      for (int h = 0; h < a.pool.kv_heads; ++h)
        tasks[made++] = {s, h, tile * kQueries, min_int(kQueries, queries - tile * kQueries)};
  }
  Many many = {a};
  Few few = {a};
  size_t many_bytes = Many::scratch_bytes(a.D), few_bytes = Few::scratch_bytes(a.D);
  parallel(made, estimate_us(pairs * a.pool.kv_heads * a.D * 4, 0), [&](int task, int worker) {
    char *memory = (char *)worker_scratch(worker, 0, many_bytes > few_bytes ? many_bytes : few_bytes);
    if (tasks[task].count > kFewQueries)
      many.run(tasks[task], memory);
    else
      few.run(tasks[task], memory);
  });
}

// p: 0 q, 1 k pool, 2 v pool, 3 page table, 4 seq_start, 5 context, 6 out [rows, heads * D].
// n: 0 S, 1 heads, 2 kv heads, 3 D, 4 page size, 5 max pages, 6 q row stride, 7 q head stride, 8 out row stride.
// f: 0 scale.  flags: bf16 bits of q, pools, out.
static void op_attention(const asv_op &op, const Counts &counts) {
  AttentionArgs a = {op.p[0], op.p[1], op.p[2], (void *)op.p[6],
                     PagedPool{(const int32_t *)op.p[3], op.n[4], op.n[5], op.n[2], op.n[3]},
                     (const int32_t *)op.p[4], (const int32_t *)op.p[5], op.n[1], op.n[1] / op.n[2], op.n[3],
                     op.n[6], op.n[7], op.n[8], op.f[0], is_bf16(op, 2)};
  int S = resolve(op.n[0], counts);
  bool qb = is_bf16(op, 0), kb = is_bf16(op, 1);
#if defined(ASV_HAVE_BF16)
  if (qb && kb) return attention_typed<MulBF16, bf16, bf16>(a, S);
#else
  if (qb && kb) return attention_typed<MulF32, bf16, bf16>(a, S);
#endif
  if (qb) return attention_typed<MulF32, bf16, float>(a, S);
  if (kb) return attention_typed<MulF32, float, bf16>(a, S);
  attention_typed<MulF32, float, float>(a, S);
}
