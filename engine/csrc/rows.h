// Operations on rows: gather, norms, rope, routing, gates. Included inside a kernel unit's anonymous namespace.

constexpr int kRowBlock = 16;

// Run body(row) for all rows, in blocks; `bytes` per row decides whether threads are worth it.
template <class F>
static inline void for_rows(int rows, double bytes, F &&body) {
  parallel(ceil_div(rows, kRowBlock), rows * bytes / 10e3, [&](int task, int) {
    for (int r = task * kRowBlock, end = min_int(rows, r + kRowBlock); r < end; ++r) body(r);
  });
}

// out[i] = table[ids[i]]; an id outside the table gives zeros.
// p: 0 table, 1 ids int64, 2 out.  n: 0 count, 1 width, 2 table rows, 3 table stride, 4 out stride.  flags: table, out.
static void op_gather(const asv_op &op, const Counts &counts) {
  int rows = op.n[2];
  const int64_t *ids = (const int64_t *)op.p[1];
  for_rows(resolve(op.n[0], counts), op.n[1] * 6.0, [&](int r) {
    bool inside = ids[r] >= 0 && ids[r] < rows;
    ptrdiff_t from = inside ? ids[r] * ptrdiff_t(op.n[3]) : 0, to = r * ptrdiff_t(op.n[4]);
    for_vectors(op.n[1], [&](int i, int n) {
      V x = inside ? load_any(op.p[0], is_bf16(op, 0), from + i, n) : v_zero();
      store_any((void *)op.p[2], is_bf16(op, 1), to + i, x, n);
    });
  });
}

// In one fixed order for every row: a row's norm does not depend on its neighbours.
static inline float sum_of_squares(const void *x, bool bf, ptrdiff_t from, int n) {
  V sums[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
  int i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; ++j) {
      V part = load_any(x, bf, from + i + j * W, W);
      sums[j] = v_fma(part, part, sums[j]);
    }
  for (; i < n; i += W) {
    V part = load_any(x, bf, from + i, min_int(W, n - i));
    sums[0] = v_fma(part, part, sums[0]);
  }
  return v_sum(v_add(v_add(sums[0], sums[1]), v_add(sums[2], sums[3])));
}

// out = x / rms(x) * w, or * (1 + w) with flag 8; times silu(gate) where a gate is given. One norm per row and head.
// p: 0 x, 1 w, 2 out, 3 gate or null.  n: 0 rows, 1 heads, 2 D, 3 x row, 4 x head, 5 out row, 6 out head, 7 gate row,
// 8 gate head stride.  f: 0 eps.  flags: bf16 bits of x, w, out, gate.
static void op_rmsnorm(const asv_op &op, const Counts &counts) {
  int heads = op.n[1], D = op.n[2];
  bool xb = is_bf16(op, 0), wb = is_bf16(op, 1), ob = is_bf16(op, 2), gb = is_bf16(op, 3);
  V one = v_set(has_flag(op, 8) ? 1.0f : 0.0f);
  for_rows(resolve(op.n[0], counts), heads * D * 12.0, [&](int r) {
    for (int h = 0; h < heads; ++h) {
      ptrdiff_t from = r * ptrdiff_t(op.n[3]) + h * ptrdiff_t(op.n[4]);
      ptrdiff_t to = r * ptrdiff_t(op.n[5]) + h * ptrdiff_t(op.n[6]);
      ptrdiff_t gate = r * ptrdiff_t(op.n[7]) + h * ptrdiff_t(op.n[8]);
      V scale = v_set(1.0f / sqrtf(sum_of_squares(op.p[0], xb, from, D) / float(D) + op.f[0]));
      for_vectors(D, [&](int i, int n) {
        V w = v_add(load_any(op.p[1], wb, i, n), one);
        V y = v_mul(v_mul(load_any(op.p[0], xb, from + i, n), scale), w);
        if (op.p[3] != nullptr) y = v_mul(y, v_silu(load_any(op.p[3], gb, gate + i, n)));
        store_any((void *)op.p[2], ob, to + i, y, n);
      });
    }
  });
}

// Rotate the first R of each head's dimensions in place, half against half.
// p: 0 x, 1 positions int64 or null (row i reads table row i), 2 cos, 3 sin f32 [max position, R / 2].
// n: 0 rows, 1 heads, 2 R, 3 row stride, 4 head stride, 5 max position.  flags: x.
static void op_rope(const asv_op &op, const Counts &counts) {
  int half = op.n[2] / 2;
  const int64_t *positions = (const int64_t *)op.p[1];
  bool xb = is_bf16(op, 0);
  for_rows(resolve(op.n[0], counts), op.n[1] * op.n[2] * 6.0, [&](int r) {
    int64_t position = positions == nullptr ? r : positions[r];
    position = position < 0 ? 0 : position >= op.n[5] ? op.n[5] - 1 : position;
    const float *cosines = (const float *)op.p[2] + position * half, *sines = (const float *)op.p[3] + position * half;
    for (int h = 0; h < op.n[1]; ++h) {
      ptrdiff_t at = r * ptrdiff_t(op.n[3]) + h * ptrdiff_t(op.n[4]);
      for_vectors(half, [&](int i, int n) {
        V c = load_part(cosines + i, n), s = load_part(sines + i, n);
        V a = load_any(op.p[0], xb, at + i, n), b = load_any(op.p[0], xb, at + half + i, n);
        store_any((void *)op.p[0], xb, at + i, v_sub(v_mul(a, c), v_mul(b, s)), n);
        store_any((void *)op.p[0], xb, at + half + i, v_fma(b, c, v_mul(a, s)), n);
      });
    }
  });
}

// Softmax over E logits in f32, then the k largest; equal ones by lower id. Flag 8: weights sum to one.
// p: 0 logits, 1 ids int32 [rows, k], 2 weights f32 [rows, k].  n: 0 rows, 1 E, 2 k, 3 logits stride.  flags: logits.
static void op_route(const asv_op &op, const Counts &counts) {
  int E = op.n[1], k = op.n[2];
  for_rows(resolve(op.n[0], counts), E * 20.0, [&](int r) {
    int32_t *ids = (int32_t *)op.p[1] + ptrdiff_t(r) * k;
    float *weights = (float *)op.p[2] + ptrdiff_t(r) * k;
    ptrdiff_t from = r * ptrdiff_t(op.n[3]);
    int held = 0;
    for (int e = 0; e < E; ++e) {
      float x = load_one(op.p[0], is_bf16(op, 0), from + e);
      if (held == k && !(x > weights[k - 1])) continue;
      int at = held < k ? held++ : k - 1;
      for (; at > 0 && x > weights[at - 1]; --at) {
        weights[at] = weights[at - 1];
        ids[at] = ids[at - 1];
      }
      weights[at] = x;
      ids[at] = e;
    }
    float high = weights[0], chosen = 0;
    for (int j = 0; j < k; ++j) chosen += weights[j] = expf(weights[j] - high);
    float total = chosen;
    if (!has_flag(op, 8)) {
      V sum = v_zero();
      V low = v_set(high);
      int e = 0;
      for (; e + W <= E; e += W) sum = v_add(sum, v_exp(v_sub(load_any(op.p[0], is_bf16(op, 0), from + e, W), low)));
      total = v_sum(sum);
      for (; e < E; ++e) total += expf(load_one(op.p[0], is_bf16(op, 0), from + e) - high);
    }
    for (int j = 0; j < k; ++j) weights[j] /= total;
  });
}

// p: 0 gate, 1 up, 2 out.  n: 0 rows, 1 width, 2 gate, 3 up, 4 out stride.  flags: gate, up, out.
static void op_silu_mul(const asv_op &op, const Counts &counts) {
  for_rows(resolve(op.n[0], counts), op.n[1] * 20.0, [&](int r) {
    for_vectors(op.n[1], [&](int i, int n) {
      V gate = load_any(op.p[0], is_bf16(op, 0), r * ptrdiff_t(op.n[2]) + i, n);
      V up = load_any(op.p[1], is_bf16(op, 1), r * ptrdiff_t(op.n[3]) + i, n);
      store_any((void *)op.p[2], is_bf16(op, 2), r * ptrdiff_t(op.n[4]) + i, v_mul(v_silu(gate), up), n);
    });
  });
}

// out = x * sigmoid(gate), per row and head.  p: 0 x, 1 gate, 2 out.
// n: 0 rows, 1 heads, 2 D, 3 x row, 4 x head, 5 gate row, 6 gate head, 7 out row, 8 out head stride.  flags: x, gate, out.
static void op_sigmoid_mul(const asv_op &op, const Counts &counts) {
  for_rows(resolve(op.n[0], counts), op.n[1] * op.n[2] * 20.0, [&](int r) {
    for (int h = 0; h < op.n[1]; ++h)
      for_vectors(op.n[2], [&](int i, int n) {
        V x = load_any(op.p[0], is_bf16(op, 0), r * ptrdiff_t(op.n[3]) + h * ptrdiff_t(op.n[4]) + i, n);
        V gate = load_any(op.p[1], is_bf16(op, 1), r * ptrdiff_t(op.n[5]) + h * ptrdiff_t(op.n[6]) + i, n);
        store_any((void *)op.p[2], is_bf16(op, 2), r * ptrdiff_t(op.n[7]) + h * ptrdiff_t(op.n[8]) + i,
                  v_mul(x, v_sigmoid(gate)), n);
      });
  });
}

// out = a + sigmoid(g) * b with one g per row; a may be null (0), g may be null (factor 1).
// p: 0 a, 1 g, 2 b, 3 out.  n: 0 rows, 1 width, 2 a, 3 g, 4 b, 5 out stride.  flags: a, g, b, out.
static void op_gated_add(const asv_op &op, const Counts &counts) {
  for_rows(resolve(op.n[0], counts), op.n[1] * 8.0, [&](int r) {
    V factor = v_set(1.0f);
    if (op.p[1] != nullptr) factor = v_sigmoid(v_set(load_one(op.p[1], is_bf16(op, 1), r * ptrdiff_t(op.n[3]))));
    for_vectors(op.n[1], [&](int i, int n) {
      V a = op.p[0] == nullptr ? v_zero() : load_any(op.p[0], is_bf16(op, 0), r * ptrdiff_t(op.n[2]) + i, n);
      V b = load_any(op.p[2], is_bf16(op, 2), r * ptrdiff_t(op.n[4]) + i, n);
      store_any((void *)op.p[3], is_bf16(op, 3), r * ptrdiff_t(op.n[5]) + i, v_fma(factor, b, a), n);
    });
  });
}
