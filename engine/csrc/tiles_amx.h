// Tile registers of the machine (AMX, bf16). Included inside a kernel unit's anonymous namespace.
//
// The instructions are written out because GCC's intrinsics take register numbers as literals only. The process must have
// asked for the registers' state before (dispatch.cpp).

// All eight tiles as 16 rows of 64 bytes, from here to the end of its life: between blocks the registers are given back, so
// that switching threads does not save 8 KiB.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) Config {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    static_assert(sizeof(Config) == 64, "the format of LDTILECFG");
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = 64;
      config.rows[i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  ~Tiles() { __asm__ volatile("tilerelease" : : : "memory"); }
  Tiles(const Tiles &) = delete;
  Tiles &operator=(const Tiles &) = delete;

  template <int T>
  void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  template <int T>
  void load(const void *from, ptrdiff_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  void store(void *to, ptrdiff_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
  }
  // C[m][n] += A[m] . B[n] over 16 pairs.
  template <int C, int A, int B>
  void multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};
