// ASV_OP_LINEAR: out[T, N] = x[T, K] . w[N, K]^T (+ bias) (+ residual). Included inside a kernel unit's anonymous namespace.
//
// p: 0 x, 1 w, 2 out, 3 residual or null, 4 bias [N] or null.
// n: 0 T, 1 N, 2 K, 3 x stride, 4 out stride, 5 residual stride (elements).  flags: bf16 bits of x, w, out, residual, bias.

struct LinearArgs {
  const void *x, *w, *res, *bias;
  void *out;
  int T, N, K;
  ptrdiff_t xs, os, rs;
  bool out_bf, res_bf, bias_bf;

  // y: n sums of row t from column n0.
  void store(int t, int n0, float *y, int n) const {
    if (bias != nullptr)
      for_vectors(n, [&](int i, int part) {
        store_part(y + i, v_add(load_part(y + i, part), load_any(bias, bias_bf, n0 + i, part)), part);
      });
    store_row(out, out_bf, t * os + n0, y, n, res, res_bf, t * rs + n0);
  }
};

template <class M, class XT, class WT>
static void linear_dot(const LinearArgs &a) {
  using E = typename M::Elem;
  E *copy = (E *)shared_scratch(0, size_t(a.T) * a.K * sizeof(E));
  const E *x[kMaxDotTokens] = {};
  for (int t = 0; t < a.T; ++t)
    x[t] = as_elements((const XT *)a.x + t * a.xs, copy + size_t(t) * a.K, a.K);
  int block = max_int(8, int(131072 / (size_t(a.K) * sizeof(WT))) & ~7);
  block = min_int(block, 256);
  int tasks = ceil_div(a.N, block);
  parallel(tasks, estimate_us(0, double(a.N) * a.K * sizeof(WT)), [&](int task, int) {
    float y[kMaxDotTokens * 256];
    int n0 = task * block, rows = min_int(block, a.N - n0);
    dot_tile<M, WT>((const WT *)a.w + ptrdiff_t(n0) * a.K, a.K, rows, x, a.T, a.K, y, block);
    for (int t = 0; t < a.T; ++t)
      a.store(t, n0, y + t * block, rows);
  });
}

template <class M, class XT, class WT>
static void linear_lanes(const LinearArgs &a, int t_begin, int t_end) {
  int panels = ceil_div(t_end - t_begin, W);
  size_t stride = panel_bytes<M>(a.K);
  char *packed = (char *)shared_scratch(0, stride * panels);
  parallel(panels, panels * double(stride) / 5e3, [&](int p, int) {
    const XT *rows[W];
    int t0 = t_begin + p * W, n = min_int(W, t_end - t0);
    for (int i = 0; i < n; ++i) rows[i] = (const XT *)a.x + (t0 + i) * a.xs;
    pack_panel(M(), rows, n, a.K, packed + p * stride);
  });
  double flops = 2.0 * panels * W * a.N * a.K;
  parallel(ceil_div(a.N, kBlock), estimate_us(flops, 0), [&](int task, int worker) {
    alignas(64) float y[kMaxVec * W * kBlock];
    int n0 = task * kBlock, rows = min_int(kBlock, a.N - n0), ldsums = panels * W;
    float *sums = (float *)worker_scratch(worker, 1, size_t(kBlock) * ldsums * sizeof(float));
    Run<WT> run = {(const WT *)a.w + ptrdiff_t(n0) * a.K, rows};
    lane_block<M>(&run, 1, a.K, a.K, packed, stride, panels, sums, ldsums, (char *)worker_scratch(worker, 0, lane_scratch<M>(kBlock)));
    for_panels(panels, [&](int p, int nv) {
      sums_by_token(sums, ldsums, rows, p, nv, y);
      int t0 = t_begin + p * W, n = min_int(nv * W, t_end - t0);
      for (int t = 0; t < n; ++t) a.store(t0 + t, n0, y + t * kBlock, rows);
    });
  });
}

template <class M, class XT, class WT>
static void linear_typed(const LinearArgs &a) {
  if (a.T <= kMaxDotTokens) return linear_dot<M, XT, WT>(a);
  // Panels of one pass should stay in L2 beside the weight rows.
  int pass = max_int(kMaxVec, int((640 << 10) / panel_bytes<M>(a.K)) / kMaxVec * kMaxVec) * W;
  for (int t = 0; t < a.T; t += pass) linear_lanes<M, XT, WT>(a, t, min_int(a.T, t + pass));
}

static void op_linear(const asv_op &op, const Counts &counts) {
  LinearArgs a = {op.p[0], op.p[1], op.p[3], op.p[4], (void *)op.p[2], resolve(op.n[0], counts), op.n[1], op.n[2], op.n[3],
                  op.n[4], op.n[5], is_bf16(op, 2), is_bf16(op, 3), is_bf16(op, 4)};
  bool xb = is_bf16(op, 0), wb = is_bf16(op, 1);
#if defined(ASV_HAVE_BF16)
  if (xb && wb) return linear_typed<MulBF16, bf16, bf16>(a);
#else
  if (xb && wb) return linear_typed<MulF32, bf16, bf16>(a);
#endif
  if (xb) return linear_typed<MulF32, bf16, float>(a);
  if (wb) return linear_typed<MulF32, float, bf16>(a);
  linear_typed<MulF32, float, float>(a);
}
