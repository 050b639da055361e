// ASV_OP_KV_STORE and ASV_OP_ATTENTION: the paged KV pool. Included inside a kernel unit's anonymous namespace.
//
// Pools: [pages, page_size, kv_heads, D]. Page tables: int32 [S, max_pages]. seq_start: int32 [S + 1], rows of the flat
// batch. context: int32 [S], tokens that were in the state before this slice; its rows have positions context, ….
//
// Attention puts queries in lanes (a query is a row and a head of the group that shares a KV head), so softmax needs
// no horizontal operations: scores are a lane tile over key rows, the output one over value columns. Keys are read in
// place; a tile of values is interleaved (bf16 pairs) or widened (f32) once per task. Softmax in f32, online over key tiles.

struct PagedPool {
  const int32_t *table;
  int page_size, max_pages, kv_heads, D;
  // Element offset of a position's row of one head.
  size_t row(int seq, int position, int head) const {
    size_t page = size_t(table[size_t(seq) * max_pages + position / page_size]);
    return ((page * page_size + position % page_size) * kv_heads + head) * D;
  }
};

// p: 0 k, 1 v, 2 k pool, 3 v pool, 4 page table, 5 seq_start, 6 context.
// n: 0 S, 1 kv heads, 2 D, 3 page size, 4 max pages, 5 k row stride, 6 v row stride.  flags: bf16 of k and v (0), pools (1).
static void op_kv_store(const asv_op &op, const Counts &counts) {
  int S = resolve(op.n[0], counts), width = op.n[1] * op.n[2];
  PagedPool pool = {(const int32_t *)op.p[4], op.n[3], op.n[4], op.n[1], op.n[2]};
  const int32_t *start = (const int32_t *)op.p[5], *context = (const int32_t *)op.p[6];
  bool in_bf = is_bf16(op, 0), pool_bf = is_bf16(op, 1);
  for (int s = 0; s < S; ++s)
    for (int t = start[s]; t < start[s + 1]; ++t) {
      size_t at = pool.row(s, context[s] + t - start[s], 0);
      for (int kv = 0; kv < 2; ++kv) {
        ptrdiff_t from = t * ptrdiff_t(op.n[5 + kv]);
        for_vectors(width, [&](int i, int n) {
          store_any((void *)op.p[2 + kv], pool_bf, at + i, load_any(op.p[kv], in_bf, from + i, n), n);
        });
      }
    }
}

constexpr int kKeyTile = 128;
constexpr float kMasked = -1e30f;

struct AttentionArgs {
  const void *q, *k, *v;
  void *out;
  PagedPool pool;
  const int32_t *start, *context;
  int heads, group, D;
  ptrdiff_t q_row, q_head, out_row;
  float scale;
  bool out_bf;
};

struct AttentionTask {
  int seq, kv_head, first, count;  // queries first … of the sequence's rows x group
};

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
  const AttentionArgs &a;

  // Memory of one task, in order: q panels, value tile, scores, P panels, output sums.
  static size_t q_panel(int D) { return panel_bytes<M>(D); }
  static size_t p_panel() { return panel_bytes<M>(kKeyTile); }
  static size_t scratch_bytes(int D) {
    return kMaxVec * (q_panel(D) + p_panel()) + size_t(kKeyTile) * D * 4 + size_t(kKeyTile) * kLdBuf * 4 +
           size_t(D) * kLdBuf * 4 + RowSource<M>::scratch_bytes(8, D) + 256;
  }

  void run(const AttentionTask &task, char *memory) const {
    int D = a.D, nv = ceil_div(task.count, W), k_units = units<M>(D);
    char *q = memory, *values = q + kMaxVec * q_panel(D);
    float *scores = (float *)(values + size_t(kKeyTile) * D * 4);
    char *p = (char *)(scores + size_t(kKeyTile) * kLdBuf);
    float *sums = (float *)(p + kMaxVec * p_panel());
    char *rows_scratch = (char *)(sums + size_t(D) * kLdBuf);
    float limit[kLdBuf];  // keys a lane may see; spare lanes see what the first one sees
    int first_limit, last_limit;
    pack_queries(task, nv, q, limit, &first_limit, &last_limit);
    for (int i = 0; i < D * kLdBuf; i += W) v_store(sums + i, v_zero());
    V top[kMaxVec], total[kMaxVec];
    for (int v = 0; v < nv; ++v) top[v] = v_set(kMasked), total[v] = v_zero();

    const KT *k_pool = (const KT *)a.k + size_t(task.kv_head) * D, *v_pool = (const KT *)a.v + size_t(task.kv_head) * D;
    ptrdiff_t key_stride = ptrdiff_t(a.pool.kv_heads) * D;
    for (int k0 = 0; k0 < last_limit; k0 += kKeyTile) {
      int keys = min_int(kKeyTile, last_limit - k0);
      for (int j = 0; j < keys;) {
        int in_page = a.pool.page_size - (k0 + j) % a.pool.page_size;
        int rows = min_int(min_int(8, keys - j), in_page);
        Rows key = RowSource<M>::prepare(k_pool + a.pool.row(task.seq, k0 + j, 0), key_stride, rows, D, rows_scratch);
        lane_tile<M>({key.data, key.data, key.stride, 4, nullptr, 0, 0}, rows, Panels{q, q_panel(D), nv, k_units}, scores + j * kLdBuf,
                     kLdBuf, false);
        j += rows;
      }
      V shrink[kMaxVec];
      for (int v = 0; v < nv; ++v) {
        if (k0 + keys > first_limit) mask(scores + v * W, keys, k0, limit + v * W);
        shrink[v] = softmax_tile(scores + v * W, keys, p + v * p_panel(), &top[v], &total[v]);
      }
      value_tile<KT>(M(), keys, D, values, [&](int j) { return v_pool + a.pool.row(task.seq, k0 + j, 0); });
      accumulate(values, Panels{p, p_panel(), nv, units<M>(keys)}, shrink, sums);
    }
    for (int v = 0; v < nv; ++v) total[v] = v_div(v_set(1.0f), total[v]);
    write(task, nv, sums, total);
  }

 private:
  void pack_queries(const AttentionTask &task, int nv, char *q, float *limit, int *first_limit, int *last_limit) const {
    int context = a.context[task.seq], start = a.start[task.seq];
    for (int v = 0; v < nv; ++v) {
      const QT *rows[W];
      int n = min_int(W, task.count - v * W);
      for (int i = 0; i < W; ++i) {
        int query = task.first + (i < n ? v * W + i : 0), t = query / a.group, h = query % a.group;
        rows[i] = (const QT *)a.q + (start + t) * a.q_row + (task.kv_head * a.group + h) * a.q_head;
        limit[v * W + i] = float(context + t + 1);
      }
      pack_panel(M(), rows, n, a.D, q + v * q_panel(a.D));
    }
    *first_limit = context + task.first / a.group + 1;
    *last_limit = context + (task.first + task.count - 1) / a.group + 1;
  }

  static void mask(float *s, int keys, int k0, const float *limit) {
    V allowed = v_load(limit), hidden = v_set(kMasked);
    for (int j = 0; j < keys; ++j)
      v_store(s + j * kLdBuf, v_where_less(v_set(float(k0 + j)), allowed, v_load(s + j * kLdBuf), hidden));
  }

  // Scores of one vector of queries to probabilities relative to the new maximum, as P units; powers of two all through.
  // Returns the factor for older sums.
  V softmax_tile(const float *s, int keys, char *panel, V *top, V *total) const {
    V factor = v_set(a.scale * 1.44269504f), high = v_load(s), high2 = high;
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

  void write(const AttentionTask &task, int nv, float *sums, const V *inverse) const {
    float turned[W * 8];
    for (int v = 0; v < nv; ++v) {
      int n = min_int(W, task.count - v * W);
      for (int d = 0; d < a.D; d += 8) {
        int rows = min_int(8, a.D - d);
        alignas(64) float scaled[8 * W];
        for (int r = 0; r < 8; ++r)
          v_store(scaled + r * W, r < rows ? v_mul(v_load(sums + (d + r) * kLdBuf + v * W), inverse[v]) : v_zero());
        v_transpose_8xW(scaled, W, turned, 8);
        for (int i = 0; i < n; ++i) {
          int query = task.first + v * W + i, t = query / a.group, h = task.kv_head * a.group + query % a.group;
          ptrdiff_t at = (a.start[task.seq] + t) * a.out_row + ptrdiff_t(h) * a.D + d;
          store_row(a.out, a.out_bf, at, turned + i * 8, rows, nullptr, false, 0);
        }
      }
    }
  }
};

template <class M, class QT, class KT>
static void attention_typed(const AttentionArgs &a, int S) {
  constexpr int kQueries = kMaxVec * W;
  int n = 0;
  double pairs = 0;  // of lanes and keys, idle lanes too: one token of a small group costs as much as W queries
  for (int s = 0; s < S; ++s) {
    int queries = (a.start[s + 1] - a.start[s]) * a.group;
    n += ceil_div(queries, kQueries);
    pairs += double(round_up(queries, W)) * (a.context[s] + (a.start[s + 1] - a.start[s]) * 0.5);
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
  Attention<M, QT, KT> attention = {a};
  parallel(made, estimate_us(pairs * a.pool.kv_heads * a.D * 4, 0), [&](int task, int worker) {
    attention.run(tasks[task], (char *)worker_scratch(worker, 0, Attention<M, QT, KT>::scratch_bytes(a.D)));
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
