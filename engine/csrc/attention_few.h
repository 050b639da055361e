// Attention of a few queries, as decoding has them: one row of a small group. Included inside a kernel unit's anonymous
// namespace.
//
// In lanes most of a vector would be idle, and every key would be copied to be used once. Here the dimensions of a head are in
// the vector: a score is a dot product, an output a sum of value rows, and both pools are read in place, once.
//
// A task is a range of a sequence's keys with all heads: a key's rows of all heads follow each other in memory, and read head by
// head, half of what the processor fetches by itself is thrown away. Ranges have fixed edges, so that their sum is the same
// whoever computes them.

constexpr int kFewQueries = W / 2;  // of a group; with as many as a vector has, lanes cost less
constexpr int kFewKeys = W;         // keys of a tile: longer ones leave the streams that the processor follows by itself
constexpr int kKeysAhead = 2 * W;   // keys that are wanted soon
constexpr int kFewRange = 2048;     // keys of a task

struct FewTask {
  int seq, first, end;  // keys
  float *partial;
};
// A query whose ranges' results are put together, the first of them at `partial`.
struct FewOutput {
  int seq, kv_head, query, ranges;
  float *partial;
};

template <class QT, class KT>
struct FewQueries {
  const AttentionArgs &a;

  int padded() const { return round_up(a.D, W); }
  int queries(int seq) const { return (a.start[seq + 1] - a.start[seq]) * a.group; }
  int ranges(int seq) const { return ceil_div(a.context[seq] + a.start[seq + 1] - a.start[seq], kFewRange); }
  // Floats that a task leaves for one query: sums over its keys, their maximum and total.
  int partial_floats() const { return padded() + 2; }
  size_t scratch_bytes() const {
    return size_t(a.pool.kv_heads) * kFewQueries * padded() * 4 + (kFewKeys + kKeysAhead) * sizeof(size_t) + 64;
  }

  void run(const FewTask &task, char *memory) const {
    int D = a.D, width = padded(), kv_heads = a.pool.kv_heads, n = queries(task.seq), part = partial_floats();
    int context = a.context[task.seq], start = a.start[task.seq], last = context + n / a.group;
    size_t *at = (size_t *)memory;
    float *queries = (float *)(at + kFewKeys + kKeysAhead);
    for (int i = 0; i < kv_heads * n; ++i) {
      const QT *q = (const QT *)a.q + (start + i % n / a.group) * a.q_row + (i / n * a.group + i % a.group) * a.q_head;
      float *sums = task.partial + i * part;
      for (int d = 0; d < width; d += W) v_store(queries + i * width + d, load_part(q + d, min_int(W, D - d)));
      for (int d = 0; d < width; d += W) v_store(sums + d, v_zero());
      sums[width] = kMasked, sums[width + 1] = 0.0f;
    }
    for (int k0 = task.first; k0 < task.end; k0 += kFewKeys) {
      int keys = min_int(kFewKeys, task.end - k0), known = min_int(keys + kKeysAhead, last - k0);
      places(task.seq, k0, known, at);
      for (int h = 0; h < kv_heads; ++h) {
        const KT *k = (const KT *)a.k + h * D, *v = (const KT *)a.v + h * D;
        const float *q = queries + h * n * width;
        float *sums = task.partial + h * n * part, scores[kFewQueries * kFewKeys], shrink[kFewQueries];
        for (int j = kKeysAhead; j < known; ++j) fetch(k + at[j]);
        int i = 0;
        for (; i + 2 <= n; i += 2) dots<2>(k, at, keys, q + i * width, scores + i * kFewKeys);
        if (i < n) dots<1>(k, at, keys, q + i * width, scores + i * kFewKeys);
        for (i = 0; i < n; ++i) {
          float *top = sums + i * part + width;
          shrink[i] = softmax(scores + i * kFewKeys, min_int(keys, context + i / a.group + 1 - k0), top, top + 1);
        }
        for (int j = kKeysAhead; j < known; ++j) fetch(v + at[j]);
        for (i = 0; i + 2 <= n; i += 2) weigh<2>(v, at, keys, scores + i * kFewKeys, shrink + i, sums + i * part);
        if (i < n) weigh<1>(v, at, keys, scores + i * kFewKeys, shrink + i, sums + i * part);
      }
    }
  }

  // What the tasks of a sequence left for one query, in order, to the output. The first one's place is used up.
  void join(const FewOutput &of) const {
    int width = padded(), n = queries(of.seq);
    size_t part = size_t(a.pool.kv_heads) * n * partial_floats();
    float *sums = of.partial + (of.kv_head * n + of.query) * partial_floats(), high = sums[width], total = 0.0f;
    for (int r = 1; r < of.ranges; ++r) high = sums[r * part + width] > high ? sums[r * part + width] : high;
    for (int r = 0; r < of.ranges; ++r) {
      const float *other = sums + r * part;
      float lanes[W];
      V share = v_exp2<6>(v_set(other[width] - high));
      v_store(lanes, share);
      total += other[width + 1] * lanes[0];
      for (int d = 0; d < width; d += W)
        v_store(sums + d, r == 0 ? v_mul(v_load(sums + d), share) : v_fma(v_load(other + d), share, v_load(sums + d)));
    }
    V inverse = v_set(1.0f / total);
    for (int d = 0; d < width; d += W) v_store(sums + d, v_mul(v_load(sums + d), inverse));
    ptrdiff_t row = a.start[of.seq] + of.query / a.group, head = of.kv_head * a.group + of.query % a.group;
    store_row(a.out, a.out_bf, row * a.out_row + head * a.D, sums, a.D, nullptr, false, 0);
  }

 private:
  // Element offsets of `count` keys' rows from position k0 on; a page is looked up once.
  void places(int seq, int k0, int count, size_t *at) const {
    size_t stride = size_t(a.pool.kv_heads) * a.D;
    for (int j = 0; j < count;) {
      int rows = min_int(count - j, a.pool.page_size - (k0 + j) % a.pool.page_size);
      size_t from = a.pool.row(seq, k0 + j, 0);
      for (int r = 0; r < rows; ++r) at[j + r] = from + r * stride;
      j += rows;
    }
  }

  void fetch(const KT *row) const {
    for (int d = 0; d < a.D; d += int(64 / sizeof(KT))) __builtin_prefetch(row + d);
  }

  // Scores of Q queries, four keys at a time.
  template <int Q>
  void dots(const KT *k, const size_t *at, int keys, const float *queries, float *scores) const {
    int D = a.D, width = padded();
    for (int j = 0; j < keys; j += 4) {
      const KT *row[4];
      ASV_UNROLL for (int r = 0; r < 4; ++r) row[r] = k + at[min_int(j + r, keys - 1)];
      V acc[Q][4];
      ASV_UNROLL for (int q = 0; q < Q; ++q)
        ASV_UNROLL for (int r = 0; r < 4; ++r) acc[q][r] = v_zero();
      for_vectors(D, [&](int d, int n) {
        V x[Q];
        ASV_UNROLL for (int q = 0; q < Q; ++q) x[q] = v_load(queries + q * width + d);
        ASV_UNROLL for (int r = 0; r < 4; ++r) {
          V key = load_part(row[r] + d, n);
          ASV_UNROLL for (int q = 0; q < Q; ++q) acc[q][r] = v_fma(key, x[q], acc[q][r]);
        }
      });
      ASV_UNROLL for (int q = 0; q < Q; ++q) v_sum4(acc[q][0], acc[q][1], acc[q][2], acc[q][3], scores + q * kFewKeys + j);
    }
  }

  // Scores to probabilities relative to the new maximum. Returns the factor for older sums. allowed: keys that may be seen.
  float softmax(float *s, int allowed, float *top, float *total) const {
    for (int j = allowed > 0 ? allowed : 0; j < kFewKeys; ++j) s[j] = kMasked;
    V scaled = v_mul(v_load(s), v_set(a.scale * kLog2e));
    float lanes[W], high = *top;
    v_store(lanes, scaled);
    for (int i = 0; i < W; ++i) high = lanes[i] > high ? lanes[i] : high;
    V e = v_exp2<6>(v_sub(scaled, v_set(high)));
    v_store(s, e);
    v_store(lanes, v_exp2<6>(v_set(*top - high)));
    *total = *total * lanes[0] + v_sum(e);
    *top = high;
    return lanes[0];
  }

  // sums = sums * shrink + probabilities x value rows, for Q queries.
  template <int Q>
  void weigh(const KT *v, const size_t *at, int keys, const float *p, const float *shrink, float *sums) const {
    constexpr int kWide = 4;
    int d = 0;
    for (; d + kWide * W <= a.D; d += kWide * W) columns<Q, kWide>(v, at, keys, p, shrink, sums, d, W);
    for (; d < a.D; d += W) columns<Q, 1>(v, at, keys, p, shrink, sums, d, min_int(W, a.D - d));
  }

  template <int Q, int N>
  void columns(const KT *v, const size_t *at, int keys, const float *p, const float *shrink, float *sums, int d, int n) const {
    int width = partial_floats();
    V acc[Q][N];
    ASV_UNROLL for (int q = 0; q < Q; ++q)
      ASV_UNROLL for (int i = 0; i < N; ++i) acc[q][i] = v_mul(v_load(sums + q * width + d + i * W), v_set(shrink[q]));
    for (int j = 0; j < keys; ++j) {
      const KT *row = v + at[j] + d;
      V value[N];
      ASV_UNROLL for (int i = 0; i < N; ++i) value[i] = load_part(row + i * W, n);
      ASV_UNROLL for (int q = 0; q < Q; ++q) {
        V weight = v_set(p[q * kFewKeys + j]);
        ASV_UNROLL for (int i = 0; i < N; ++i) acc[q][i] = v_fma(weight, value[i], acc[q][i]);
      }
    }
    ASV_UNROLL for (int q = 0; q < Q; ++q)
      ASV_UNROLL for (int i = 0; i < N; ++i) v_store(sums + q * width + d + i * W, acc[q][i]);
  }
};
