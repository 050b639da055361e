// Tile registers as memory, with the sums of TDPBF16PS in its order (denormals are kept). For tests on machines without them.
// Included inside a kernel unit's anonymous namespace.
class Tiles {
 public:
  template <int T>
  void zero() {
    __builtin_memset(tile_[T], 0, sizeof tile_[T]);
  }
  template <int T>
  void load(const void *from, ptrdiff_t stride) {
    for (int r = 0; r < 16; ++r) __builtin_memcpy(tile_[T] + r * 64, (const char *)from + r * stride, 64);
  }
  template <int T>
  void store(void *to, ptrdiff_t stride) {
    for (int r = 0; r < 16; ++r) __builtin_memcpy((char *)to + r * stride, tile_[T] + r * 64, 64);
  }
  // C[m][n] += A[m] . B[n] over 16 pairs: even and odd elements each by themselves, then together.
  template <int C, int A, int B>
  void multiply() {
    for (int m = 0; m < 16; ++m) {
      V even = v_zero(), odd = v_zero();
      for (int j = 0; j < 16; ++j) {
        MulBF16::B a = MulBF16::broadcast(tile_[A] + m * 64 + j * 4), b = MulBF16::load(tile_[B] + j * 64);
        even = even + MulBF16::even(a) * MulBF16::even(b);
        odd = odd + MulBF16::odd(a) * MulBF16::odd(b);
      }
      float *sums = (float *)(tile_[C] + m * 64);
      v_store(sums, v_load(sums) + (even + odd));
    }
  }

 private:
  alignas(64) char tile_[8][16 * 64];
};
