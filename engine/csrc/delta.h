// ASV_OP_CONV and ASV_OP_DELTA: the recurrent operators. Included inside a kernel unit's anonymous namespace.
//
// Both walk a sequence token by token in one fixed order, so results do not depend on how a prompt is cut into slices.
// State rows: int32 [S]. A sequence whose context is 0 starts from zeros, whatever its row holds. Cuts (may be null):
// int32 {count, then count x (sequence, offset, destination row)}: after `offset` tokens of the slice, copy the state.

struct Slices {
  const int32_t *rows, *start, *context, *cuts;
  template <class F>
  void for_cuts(int seq, int done, F &&copy) const {
    if (cuts == nullptr) return;
    for (int i = 0; i < cuts[0]; ++i)
      if (cuts[1 + 3 * i] == seq && cuts[2 + 3 * i] == done) copy(cuts[3 + 3 * i]);
  }
};

// Depthwise causal convolution, then silu with flag 8. State: the last K - 1 inputs of each channel.
// p: 0 x, 1 w [C, K], 2 bias or null, 3 state [rows, C, K - 1], 4 state rows, 5 seq_start, 6 context, 7 out, 8 cuts.
// n: 0 S, 1 C, 2 K (2 … 8), 3 x stride, 4 out stride.  flags: x, w, state, out (bias has w's type).
static void op_conv(const asv_op &op, const Counts &counts) {
  constexpr int kMaxK = 8, kBlock = 64;
  int S = resolve(op.n[0], counts), C = op.n[1], K = op.n[2];
  Slices slices = {(const int32_t *)op.p[4], (const int32_t *)op.p[5], (const int32_t *)op.p[6], (const int32_t *)op.p[8]};
  bool xb = is_bf16(op, 0), wb = is_bf16(op, 1), sb = is_bf16(op, 2), ob = is_bf16(op, 3), silu = has_flag(op, 8);
  int blocks = ceil_div(C, kBlock), rows = S > 0 ? slices.start[S] - slices.start[0] : 0;
  parallel(S * blocks, double(rows + 8) * C * 8 / 10e3, [&](int task, int) {
    int s = task / blocks, c0 = task % blocks * kBlock, n = min_int(kBlock, C - c0);
    float w[kMaxK][kBlock], history[kMaxK][kBlock], bias[kBlock] = {};  // history is a ring of the last K inputs
    auto state_at = [&](int row, int c) { return (ptrdiff_t(row) * C + c0 + c) * (K - 1); };
    for (int c = 0; c < n; ++c) {
      for (int j = 0; j < K; ++j) w[j][c] = load_one(op.p[1], wb, ptrdiff_t(c0 + c) * K + j);
      if (op.p[2] != nullptr) bias[c] = load_one(op.p[2], wb, c0 + c);
      for (int j = 0; j < K - 1; ++j)
        history[j][c] = slices.context[s] == 0 ? 0.0f : load_one(op.p[3], sb, state_at(slices.rows[s], c) + j);
    }
    int newest = K - 2;
    auto save = [&](int row) {
      for (int j = 0; j < K - 1; ++j) {
        const float *input = history[(newest + 2 + j) % K];
        for (int c = 0; c < n; ++c) {
          V one = v_set(input[c]);
          store_any((void *)op.p[3], sb, state_at(row, c) + j, one, 1);
        }
      }
    };
    for (int t = slices.start[s]; t < slices.start[s + 1]; ++t) {
      newest = (newest + 1) % K;
      for_vectors(n, [&](int c, int part) {
        V x = load_any(op.p[0], xb, t * ptrdiff_t(op.n[3]) + c0 + c, part);
        store_part(history[newest] + c, x, part);
        V sum = load_part(bias + c, part);
        for (int j = 0; j < K; ++j)
          sum = v_fma(load_part(w[j] + c, part), load_part(history[(newest + 1 + j) % K] + c, part), sum);
        store_any((void *)op.p[7], ob, t * ptrdiff_t(op.n[4]) + c0 + c, silu ? v_silu(sum) : sum, part);
      });
      slices.for_cuts(s, t + 1 - slices.start[s], save);
    }
    save(slices.rows[s]);
  });
}

// Gated delta rule. Per value head, with S [dk, dv] in f32:
//   S = exp(g) S;  S += k (beta (v - k^T S))^T;  out = q^T S
// with q, k divided by their norms, q times scale, g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).
//
// Columns of S evolve independently, so a task keeps two vectors of columns in L1 over all tokens of the slice, and one
// sweep over dk both applies a token and reads k^T S for the next one. That is 4 vector operations per element of S and
// token; the chunked form with 64 tokens needs more of them at dk = dv = 128 (it wins only where matrix units exist).
//
// p: 0 q, 1 k, 2 v, 3 a, 4 b, 5 A_log, 6 dt_bias, 7 state f32 [rows, HV, dk, dv], 8 state rows, 9 seq_start, 10 context,
// 11 out [T, HV, dv], 12 cuts.
// n: 0 S, 1 HK, 2 HV, 3 dk, 4 dv, 5 q, 6 k, 7 v, 8 a, 9 b, 10 out row stride.  f: 0 eps of the norms, 1 scale.
// flags: bf16 bits of q k v (0), a and b (1), out (2), A_log (3), dt_bias (4); 8: a is g and b is beta, computed before.
static void op_delta(const asv_op &op, const Counts &counts) {
  int S = resolve(op.n[0], counts), HK = op.n[1], HV = op.n[2], dk = op.n[3], dv = op.n[4];
  if (S == 0) return;
  Slices slices = {(const int32_t *)op.p[8], (const int32_t *)op.p[9], (const int32_t *)op.p[10], (const int32_t *)op.p[12]};
  bool xb = is_bf16(op, 0), gb = is_bf16(op, 1), ob = is_bf16(op, 2);
  int first = slices.start[0], rows = slices.start[S] - first;
  float *q = (float *)shared_scratch(0, size_t(rows) * (size_t(2) * HK * dk + 2 * HV) * 4);
  float *k = q + size_t(rows) * HK * dk, *decay = k + size_t(rows) * HK * dk, *beta = decay + size_t(rows) * HV;

  for_rows(rows, HK * dk * 16.0 + HV * 200.0, [&](int r) {
    ptrdiff_t row = first + r;
    for (int part = 0; part < 2; ++part)
      for (int h = 0; h < HK; ++h) {
        ptrdiff_t from = row * op.n[5 + part] + ptrdiff_t(h) * dk;
        float *to = (part == 0 ? q : k) + (size_t(r) * HK + h) * dk;
        V scale = v_set((part == 0 ? op.f[1] : 1.0f) / sqrtf(sum_of_squares(op.p[part], xb, from, dk) + op.f[0]));
        for_vectors(dk, [&](int i, int n) { store_part(to + i, v_mul(load_any(op.p[part], xb, from + i, n), scale), n); });
      }
    for (int h = 0; h < HV; ++h) {
      if (has_flag(op, 8)) {
        decay[size_t(r) * HV + h] = expf(load_one(op.p[3], gb, row * op.n[8] + h));
        beta[size_t(r) * HV + h] = load_one(op.p[4], gb, row * op.n[9] + h);
        continue;
      }
      float a = load_one(op.p[3], gb, row * op.n[8] + h) + load_one(op.p[6], is_bf16(op, 4), h);
      float softplus = a > 20.0f ? a : log1pf(expf(a));
      decay[size_t(r) * HV + h] = expf(-expf(load_one(op.p[5], is_bf16(op, 3), h)) * softplus);
      beta[size_t(r) * HV + h] = 1.0f / (1.0f + expf(-load_one(op.p[4], gb, row * op.n[9] + h)));
    }
  });

  constexpr int kColumns = 2 * W;
  int blocks = ceil_div(dv, kColumns), shared_by = HV / HK;
  double flops = double(rows) * HV * dk * dv * 8;
  parallel(S * HV * blocks, estimate_us(flops, 4.0 * S * HV * dk * dv), [&](int task, int worker) {
    int s = task / (HV * blocks), h = task / blocks % HV, c0 = task % blocks * kColumns, n = min_int(kColumns, dv - c0);
    int n0 = min_int(n, W), n1 = n - n0;
    float *state = (float *)worker_scratch(worker, 0, size_t(dk) * kColumns * 4);
    auto pool_row = [&](int row) { return (float *)op.p[7] + ((ptrdiff_t(row) * HV + h) * dk) * dv + c0; };
    bool fresh = slices.context[s] == 0;
    const float *from = pool_row(slices.rows[s]);
    for (int i = 0; i < dk; ++i) {
      v_store(state + i * kColumns, fresh ? v_zero() : load_part(from + ptrdiff_t(i) * dv, n0));
      v_store(state + i * kColumns + W, fresh || n1 == 0 ? v_zero() : load_part(from + ptrdiff_t(i) * dv + W, n1));
    }
    auto save = [&](int row) {
      float *to = pool_row(row);
      for (int i = 0; i < dk; ++i) {
        store_part(to + ptrdiff_t(i) * dv, v_load(state + i * kColumns), n0);
        if (n1 > 0) store_part(to + ptrdiff_t(i) * dv + W, v_load(state + i * kColumns + W), n1);
      }
    };
    int begin = slices.start[s], end = slices.start[s + 1];
    V read0 = v_zero(), read1 = v_zero();  // k^T S of the coming token
    if (begin < end) {
      const float *key = k + (size_t(begin - first) * HK + h / shared_by) * dk;
      for (int i = 0; i < dk; ++i) {
        V ki = v_set(key[i]);
        read0 = v_fma(ki, v_load(state + i * kColumns), read0);
        read1 = v_fma(ki, v_load(state + i * kColumns + W), read1);
      }
    }
    for (int t = begin; t < end; ++t) {
      size_t r = size_t(t - first);
      const float *key = k + (r * HK + h / shared_by) * dk, *query = q + (r * HK + h / shared_by) * dk;
      const float *next = t + 1 < end ? key + size_t(HK) * dk : key;
      V g = v_set(decay[r * HV + h]), b = v_set(beta[r * HV + h]);
      ptrdiff_t value = t * ptrdiff_t(op.n[7]) + ptrdiff_t(h) * dv + c0;
      V delta0 = v_mul(v_sub(load_any(op.p[2], xb, value, n0), v_mul(g, read0)), b);
      V delta1 = n1 == 0 ? v_zero() : v_mul(v_sub(load_any(op.p[2], xb, value + W, n1), v_mul(g, read1)), b);
      V out0 = v_zero(), out1 = v_zero();
      read0 = read1 = v_zero();
      for (int i = 0; i < dk; ++i) {
        float *at = state + i * kColumns;
        V ki = v_set(key[i]), qi = v_set(query[i]), ni = v_set(next[i]);
        V s0 = v_fma(ki, delta0, v_mul(g, v_load(at))), s1 = v_fma(ki, delta1, v_mul(g, v_load(at + W)));
        v_store(at, s0);
        v_store(at + W, s1);
        out0 = v_fma(qi, s0, out0);
        out1 = v_fma(qi, s1, out1);
        read0 = v_fma(ni, s0, read0);
        read1 = v_fma(ni, s1, read1);
      }
      ptrdiff_t to = t * ptrdiff_t(op.n[10]) + ptrdiff_t(h) * dv + c0;
      store_any((void *)op.p[11], ob, to, out0, n0);
      if (n1 > 0) store_any((void *)op.p[11], ob, to + W, out1, n1);
      slices.for_cuts(s, t + 1 - begin, save);
    }
    save(slices.rows[s]);
  });
}
