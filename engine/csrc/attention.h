// ASV_OP_ATTENTION over the paged KV pool (paged.h). Included inside a kernel unit's anonymous namespace.
//
// Queries are in lanes (a query is a row and a head of the group that shares a KV head), so softmax needs no horizontal
// operations: scores are a lane tile over key rows, the output one over value columns. A tile of keys and values is copied
// once, widened (f32) or with values interleaved (bf16 pairs), for all queries of a task: waiting for memory is what a long
// context costs beside arithmetic. Softmax in f32, online over key tiles. A few queries are attention_few.h's.

// A key to [units(D)] units.
template <class KT>
static inline void key_row(MulF32, const KT *key, int D, char *out) {
  for_vectors(D, [&](int d, int n) { store_part((float *)out + d, load_part(key + d, n), n); });
}
#if defined(ASV_HAVE_BF16)
static inline void key_row(MulBF16, const bf16 *key, int D, char *out) {
  __builtin_memcpy(out, key, size_t(D) * 2);
  if (D % 2 != 0) ((bf16 *)out)[D] = bf16{0};
}
#endif

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
  static constexpr int kMostGroups = 256 / kLdBuf;

  const AttentionArgs &a;

  // Queries of one lane tile, and what becomes of them.
  struct Group {
    int first, count, nv;
    int first_limit, last_limit;  // keys that its first and its last query see
    float limit[kLdBuf];          // that each lane may see; spare lanes see what the first one sees
    V top[kMaxVec], total[kMaxVec];
    char *q;
    float *sums;
  };
  // A tile of keys, and of scores of one group.
  struct Tile {
    char *keys, *values, *p;
    float *scores;
  };

  // Groups that share the reading of keys: all of them together fit in half of an L2 cache.
  static int most_groups(int D) { return max_int(1, D > 64 ? kMostGroups * 64 / D : kMostGroups); }
  static size_t q_panel(int D) { return panel_bytes<M>(D); }
  static size_t p_panel() { return panel_bytes<M>(kKeyTile); }
  static size_t key_bytes(int D) { return size_t(units<M>(D)) * 4; }
  static size_t group_bytes(int D) { return sizeof(Group) + kMaxVec * q_panel(D) + size_t(D) * kLdBuf * 4 + 128; }
  static size_t scratch_bytes(int D, int groups) {
    return groups * group_bytes(D) + kKeyTile * (key_bytes(D) + size_t(D) * 4 + kLdBuf * 4) + kMaxVec * p_panel() + 512;
  }

  void run(const AttentionTask &task, char *memory) const {
    int D = a.D, made = 0;
    auto take = [&](size_t bytes) {
      char *at = memory;
      memory += (bytes + 63) / 64 * 64;
      return at;
    };
    Tile tile = {take(kKeyTile * key_bytes(D)), take(size_t(kKeyTile) * D * 4), take(kMaxVec * p_panel()), nullptr};
    tile.scores = (float *)take(size_t(kKeyTile) * kLdBuf * 4);
    int n = ceil_div(task.count, kLdBuf);
    Group *groups = (Group *)take(n * sizeof(Group));
    for (int first = task.first, end = task.first + task.count; first < end; first += kLdBuf, ++made) {
      groups[made].q = take(kMaxVec * q_panel(D));
      groups[made].sums = (float *)take(size_t(D) * kLdBuf * 4);
      begin(groups[made], task, first, min_int(kLdBuf, end - first));
    }
    int last_limit = groups[made - 1].last_limit;
    for (int k0 = 0; k0 < last_limit; k0 += kKeyTile) {
      int keys = min_int(kKeyTile, last_limit - k0), next = min_int(kKeyTile, last_limit - k0 - keys);
      read(task, k0, keys, tile);
      for (int g = 0; g < made; ++g) {
        fetch(task, k0 + keys + next * g / made, k0 + keys + next * (g + 1) / made);
        take_in(groups[g], k0, keys, tile);
      }
    }
    for (int g = 0; g < made; ++g) write(task, groups[g]);
  }

 private:
  // body(j, element offset, n): n rows of this head that follow each other, of keys from position `first` on.
  template <class F>
  void for_pages(const AttentionTask &task, int first, int end, F &&body) const {
    for (int at = first; at < end;) {
      int n = min_int(end - at, a.pool.page_size - at % a.pool.page_size);
      body(at - first, a.pool.row(task.seq, at, task.kv_head), n);
      at += n;
    }
  }
  ptrdiff_t key_stride() const { return ptrdiff_t(a.pool.kv_heads) * a.D; }

  // Keys that are wanted soon, into L2.
  void fetch(const AttentionTask &task, int first, int end) const {
    for_pages(task, first, end, [&](int, size_t at, int n) {
      for (int r = 0; r < n; ++r, at += key_stride())
        for (int d = 0; d < a.D; d += int(64 / sizeof(KT))) {
          __builtin_prefetch((const KT *)a.k + at + d, 0, 2);
          __builtin_prefetch((const KT *)a.v + at + d, 0, 2);
        }
    });
  }

  void read(const AttentionTask &task, int k0, int keys, const Tile &tile) const {
    const KT *k = (const KT *)a.k, *rows[kKeyTile];
    for_pages(task, k0, k0 + keys, [&](int j, size_t at, int n) {
      for (int r = 0; r < n; ++r, at += key_stride()) {
        key_row(M(), k + at, a.D, tile.keys + (j + r) * key_bytes(a.D));
        rows[j + r] = (const KT *)a.v + at;
      }
    });
    value_tile<KT>(M(), keys, a.D, tile.values, [&](int j) { return rows[j]; });
  }

  void begin(Group &group, const AttentionTask &task, int first, int count) const {
    int D = a.D, context = a.context[task.seq], start = a.start[task.seq];
    group.first = first, group.count = count, group.nv = ceil_div(count, W);
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

  // A tile of keys into a group's sums.
  void take_in(Group &group, int k0, int keys, const Tile &tile) const {
    if (k0 >= group.last_limit) return;
    int D = a.D;
    ptrdiff_t row = ptrdiff_t(key_bytes(D));
    lane_tile<M>({tile.keys, tile.keys, row, 4, nullptr, 0, 0}, keys, Panels{group.q, q_panel(D), group.nv, units<M>(D)},
                 tile.scores, kLdBuf, false);
    for (int v = 0; v < group.nv; ++v) {
      float *scores = tile.scores + v * W;
      if (k0 + keys > group.first_limit) mask(scores, keys, k0, group.limit + v * W);
      V before = group.top[v], shrink = softmax_tile(scores, keys, tile.p + v * p_panel(), &group.top[v], &group.total[v]);
      if (__builtin_memcmp(&before, &group.top[v], sizeof(V)) != 0)  // behind a long context a new maximum is rare
        for (float *sum = group.sums + v * W, *end = sum + D * kLdBuf; sum < end; sum += kLdBuf)
          v_store(sum, v_mul(v_load(sum), shrink));
    }
    lane_tile<M>({tile.values, tile.values, 4, ptrdiff_t(D) * 4, nullptr, 0, 0}, D,
                 Panels{tile.p, p_panel(), group.nv, units<M>(keys)}, group.sums, kLdBuf, true);
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

// Sequences with many queries, in lanes.
template <class M, class QT, class KT>
static void attend_many(const AttentionArgs &a, const int *seqs, int n_seqs) {
  using Many = Attention<M, QT, KT>;
  int groups = 0, n = 0, made = 0;
  double pairs = 0;  // of lanes and keys, idle lanes too
  for (int i = 0; i < n_seqs; ++i) {
    int s = seqs[i], rows = a.start[s + 1] - a.start[s];
    groups += ceil_div(rows * a.group, kLdBuf);
    pairs += double(round_up(rows * a.group, W)) * (a.context[s] + rows * 0.5);
  }
  // Reading keys is shared by as many groups as leave a few tasks for every thread. A query's result is the same in any task.
  int threads = pool_threads(), enough = threads > 1 ? 3 * threads : 1;
  int at_once = min_int(Many::most_groups(a.D), max_int(1, groups * a.pool.kv_heads / enough)), most = at_once * kLdBuf;
  for (int i = 0; i < n_seqs; ++i) n += ceil_div((a.start[seqs[i] + 1] - a.start[seqs[i]]) * a.group, most);
  AttentionTask *tasks = (AttentionTask *)shared_scratch(0, size_t(n) * a.pool.kv_heads * sizeof(AttentionTask));
  // Last rows first: they see the most keys, and long tasks belong at the start.
  for (int i = 0; i < n_seqs; ++i) {
    int queries = (a.start[seqs[i] + 1] - a.start[seqs[i]]) * a.group;
    for (int first = (ceil_div(queries, most) - 1) * most; first >= 0; first -= most)
      for (int h = 0; h < a.pool.kv_heads; ++h) tasks[made++] = {seqs[i], h, first, min_int(most, queries - first)};
  }
  Many many = {a};
  size_t bytes = Many::scratch_bytes(a.D, at_once);
  parallel(made, estimate_us(pairs * a.pool.kv_heads * a.D * 4, 0),
           [&](int task, int worker) { many.run(tasks[task], (char *)worker_scratch(worker, 0, bytes)); });
}

// Sequences with a few queries: ranges of their keys, then the ranges' sums together.
template <class QT, class KT>
static void attend_few(const AttentionArgs &a, const int *seqs, int n_seqs) {
  FewQueries<QT, KT> few = {a};
  int n = 0, n_outputs = 0, made = 0, outputs = 0;
  size_t floats = 0;
  double pairs = 0;
  for (int i = 0; i < n_seqs; ++i) {
    int s = seqs[i], queries = few.queries(s) * a.pool.kv_heads;
    n += few.ranges(s), n_outputs += queries;
    floats += size_t(few.ranges(s)) * queries * few.partial_floats();
    pairs += double(queries) * a.context[s];
  }
  FewTask *tasks = (FewTask *)shared_scratch(0, size_t(n) * sizeof(FewTask));
  FewOutput *joins = (FewOutput *)shared_scratch(1, size_t(n_outputs) * sizeof(FewOutput));
  float *partial = (float *)shared_scratch(2, floats * 4);
  for (int i = 0; i < n_seqs; ++i) {
    int s = seqs[i], ranges = few.ranges(s), queries = few.queries(s), last = a.context[s] + a.start[s + 1] - a.start[s];
    for (int j = 0; j < queries * a.pool.kv_heads; ++j) joins[outputs++] = {s, j / queries, j % queries, ranges, partial};
    for (int r = 0; r < ranges; ++r, partial += size_t(queries) * a.pool.kv_heads * few.partial_floats())
      tasks[made++] = {s, r * kFewRange, min_int(last, (r + 1) * kFewRange), partial};
  }
  size_t bytes = few.scratch_bytes();
  parallel(made, estimate_us(pairs * a.D * 4, 0),
           [&](int task, int worker) { few.run(tasks[task], (char *)worker_scratch(worker, 0, bytes)); });
  parallel(outputs, estimate_us(0, double(floats) * 4), [&](int at, int) { few.join(joins[at]); });
}

template <class M, class QT, class KT>
static void attention_typed(const AttentionArgs &a, int S) {
  int *seqs = (int *)shared_scratch(3, size_t(S) * sizeof(int)), few = 0, many = S;
  for (int s = 0; s < S; ++s)
    if (int queries = (a.start[s + 1] - a.start[s]) * a.group; queries > kFewQueries)
      seqs[--many] = s;
    else if (queries > 0)
      seqs[few++] = s;
  if (many < S) attend_many<M, QT, KT>(a, seqs + many, S - many);
  if (few > 0) attend_few<QT, KT>(a, seqs, few);
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
