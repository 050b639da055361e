// Attention of a few queries, as decoding has them: one row of a small group. Included inside a kernel unit's anonymous
// namespace.
//
// In lanes most of a vector would be idle, and every key would be copied to be used once. Here the dimensions of a head are in
// the vector: a score is a dot product, an output a sum of value rows, and both pools are read in place, once.

constexpr int kFewQueries = W / 2;  // with as many as a vector has, lanes cost less
constexpr int kFewKeys = 128;
constexpr int kKeysAhead = 32;  // keys that are wanted soon: a row of one head is too short for the processor to guess the next

template <class QT, class KT>
struct FewQueries {
  const AttentionArgs &a;

  static int padded(int D) { return round_up(D, W); }
  static size_t scratch_bytes(int D) {
    return size_t(kFewQueries) * (2 * padded(D) + kFewKeys + W) * 4 + size_t(kFewKeys + kKeysAhead) * sizeof(size_t) + 64;
  }

  void run(const AttentionTask &task, char *memory) const {
    int D = a.D, width = padded(D), context = a.context[task.seq], start = a.start[task.seq];
    size_t *at = (size_t *)memory;
    float *queries = (float *)(at + kFewKeys + kKeysAhead), *sums = queries + kFewQueries * width;
    float *scores = sums + kFewQueries * width;
    int limit[kFewQueries], last = 0;  // keys a query may see
    float top[kFewQueries], total[kFewQueries];
    for (int i = 0; i < task.count; ++i) {
      int query = task.first + i, t = query / a.group, h = task.kv_head * a.group + query % a.group;
      const QT *q = (const QT *)a.q + (start + t) * a.q_row + h * a.q_head;
      for (int d = 0; d < width; d += W) v_store(queries + i * width + d, load_part(q + d, min_int(W, D - d)));
      for (int d = 0; d < width; d += W) v_store(sums + i * width + d, v_zero());
      limit[i] = context + t + 1;
      last = limit[i] > last ? limit[i] : last;
      top[i] = kMasked, total[i] = 0.0f;
    }
    const KT *k = (const KT *)a.k, *v = (const KT *)a.v;
    for (int k0 = 0; k0 < last; k0 += kFewKeys) {
      int keys = min_int(kFewKeys, last - k0);
      places(task, k0, min_int(kFewKeys + kKeysAhead, last - k0), at);
      int i = 0;
      for (; i + 2 <= task.count; i += 2) dots<2>(k, v, at, keys, last - k0, queries + i * width, scores + i * kRow);
      if (i < task.count) dots<1>(k, v, at, keys, last - k0, queries + i * width, scores + i * kRow);
      float shrink[kFewQueries];
      for (i = 0; i < task.count; ++i)
        shrink[i] = softmax(scores + i * kRow, keys, limit[i] - k0, &top[i], &total[i]);
      for (i = 0; i + 2 <= task.count; i += 2) weigh<2>(v, at, keys, scores + i * kRow, shrink + i, sums + i * width);
      if (i < task.count) weigh<1>(v, at, keys, scores + i * kRow, shrink + i, sums + i * width);
    }
    for (int i = 0; i < task.count; ++i) {
      int query = task.first + i, t = query / a.group, h = task.kv_head * a.group + query % a.group;
      V inverse = v_set(1.0f / total[i]);
      for (int d = 0; d < width; d += W) v_store(sums + i * width + d, v_mul(v_load(sums + i * width + d), inverse));
      store_row(a.out, a.out_bf, (start + t) * a.out_row + ptrdiff_t(h) * D, sums + i * width, D, nullptr, false, 0);
    }
  }

 private:
  static constexpr int kRow = kFewKeys + W;  // scores of one query

  // Element offsets of `count` keys from position k0 on; a page is looked up once.
  void places(const AttentionTask &task, int k0, int count, size_t *at) const {
    size_t stride = size_t(a.pool.kv_heads) * a.D;
    for (int j = 0; j < count;) {
      int rows = min_int(count - j, a.pool.page_size - (k0 + j) % a.pool.page_size);
      size_t from = a.pool.row(task.seq, k0 + j, task.kv_head);
      for (int r = 0; r < rows; ++r) at[j + r] = from + r * stride;
      j += rows;
    }
  }

  // Scores of Q queries, four keys at a time. seen: keys from the first one on that there are places of, some of the next tile.
  template <int Q>
  void dots(const KT *k, const KT *v, const size_t *at, int keys, int seen, const float *queries, float *scores) const {
    int D = a.D, width = padded(D);
    for (int j = 0; j < keys; j += 4) {
      const KT *row[4];
      ASV_UNROLL for (int r = 0; r < 4; ++r) {
        row[r] = k + at[min_int(j + r, keys - 1)];
        for (int line = 0; line < D; line += int(64 / sizeof(KT))) {
          __builtin_prefetch(k + at[min_int(j + r + kKeysAhead, seen - 1)] + line);
          __builtin_prefetch(v + at[min_int(j + r, keys - 1)] + line);
        }
      }
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
      ASV_UNROLL for (int q = 0; q < Q; ++q) v_sum4(acc[q][0], acc[q][1], acc[q][2], acc[q][3], scores + q * kRow + j);
    }
  }

  // Scores to probabilities relative to the new maximum. Returns the factor for older sums. allowed: keys that may be seen.
  float softmax(float *s, int keys, int allowed, float *top, float *total) const {
    int end = round_up(keys, W);
    for (int j = allowed < keys ? (allowed > 0 ? allowed : 0) : keys; j < end; ++j) s[j] = kMasked;
    V factor = v_set(a.scale * kLog2e), highest = v_set(kMasked);
    for (int j = 0; j < end; j += W) highest = v_max(highest, v_load(s + j));
    float lanes[W], high = *top;
    v_store(lanes, v_mul(highest, factor));
    for (int i = 0; i < W; ++i) high = lanes[i] > high ? lanes[i] : high;
    V shift = v_set(-high), sum = v_zero();
    for (int j = 0; j < end; j += W) {
      V e = v_exp2<6>(v_fma(v_load(s + j), factor, shift));
      v_store(s + j, e);
      sum = v_add(sum, e);
    }
    v_store(lanes, v_exp2<6>(v_set(*top - high)));
    *total = *total * lanes[0] + v_sum(sum);
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
    int width = padded(a.D);
    V acc[Q][N];
    ASV_UNROLL for (int q = 0; q < Q; ++q)
      ASV_UNROLL for (int i = 0; i < N; ++i) acc[q][i] = v_mul(v_load(sums + q * width + d + i * W), v_set(shrink[q]));
    for (int j = 0; j < keys; ++j) {
      const KT *row = v + at[j] + d;
      V value[N];
      ASV_UNROLL for (int i = 0; i < N; ++i) value[i] = load_part(row + i * W, n);
      ASV_UNROLL for (int q = 0; q < Q; ++q) {
        V weight = v_set(p[q * kRow + j]);
        ASV_UNROLL for (int i = 0; i < N; ++i) acc[q][i] = v_fma(weight, value[i], acc[q][i]);
      }
    }
    ASV_UNROLL for (int q = 0; q < Q; ++q)
      ASV_UNROLL for (int i = 0; i < N; ++i) v_store(sums + q * width + d + i * W, acc[q][i]);
  }
};
