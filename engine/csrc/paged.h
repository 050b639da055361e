// ASV_OP_KV_STORE, and what every form of attention is told. Included inside a kernel unit's anonymous namespace.
//
// Pools: [pages, page_size, kv_heads, D]. Page tables: int32 [S, max_pages]. seq_start: int32 [S + 1], rows of the flat
// batch. context: int32 [S], tokens that were in the state before this slice; its rows have positions context, ….

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

constexpr float kMasked = -1e30f;
constexpr float kLog2e = 1.44269504f;

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
