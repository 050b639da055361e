// Chooses the instruction set once, runs records. The only file that knows every kernel table.
#include <sys/mman.h>

#include <atomic>
#include <mutex>
#include <new>

#include "ops.h"

#if defined(ASV_X86)
#include <cpuid.h>
#endif
#if defined(ASV_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace asv {
namespace {

struct Isa {
  const char *name;
  const KernelTable *table;
};

#if defined(ASV_X86)
constexpr Isa kIsas[ASV_ISA_COUNT] = {{"scalar", &kScalarTable},
                                      {"avx2", &kAvx2Table},
                                      {"avx512", &kAvx512Table},
                                      {"avx512_bf16", &kAvx512Bf16Table},
                                      {"amx", &kAmxTable},
                                      {"amx_emulated", &kAmxEmulatedTable}};

bool os_saves(uint32_t state_bits) {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !((c >> 27) & 1)) return false;  // no OSXSAVE
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & state_bits) == state_bits;
}

// Tile registers are 8 KiB of state, which Linux keeps only for processes that ask for it; it refuses where a signal stack of the
// process is too small for them. Asked once: what was granted stays.
bool tiles_granted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

bool supported(int isa) {
  if (isa == ASV_SCALAR || isa == ASV_AMX_EMULATED) return true;
  uint32_t a, b, c, d, c1 = 0;
  if (!__get_cpuid(1, &a, &b, &c1, &d)) return false;
  bool fma = (c1 >> 12) & 1;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  bool tiles = ((d >> 22) & 1) && ((d >> 24) & 1);  // AMX-BF16, AMX-TILE
  bool avx2 = ((b >> 5) & 1) && fma && os_saves(0x6);
  if (isa == ASV_AVX2) return avx2;
  bool avx512 = avx2 && ((b >> 16) & 1) && ((b >> 17) & 1) && ((b >> 30) & 1) && ((b >> 31) & 1) && os_saves(0xe6);
  if (isa == ASV_AVX512) return avx512;
  uint32_t a1 = 0;
  if (!__get_cpuid_count(7, 1, &a1, &b, &c, &d)) return false;
  bool pairs = avx512 && ((a1 >> 5) & 1);
  if (isa == ASV_AVX512BF16) return pairs;
  return isa == ASV_AMX && pairs && tiles && os_saves(0x600e6) && tiles_granted();
}
#else
constexpr Isa kIsas[ASV_ISA_COUNT] = {{"scalar", &kScalarTable}, {"avx2", nullptr}, {"avx512", nullptr},
                                      {"avx512_bf16", nullptr},  {"amx", nullptr},  {"amx_emulated", &kAmxEmulatedTable}};
bool supported(int isa) { return isa == ASV_SCALAR || isa == ASV_AMX_EMULATED; }
#endif

int best() {
  int isa = ASV_AMX;
  while (!supported(isa)) --isa;
  return isa;
}

std::mutex g_running;
std::atomic<int> g_isa{-1};

int current() {
  int isa = g_isa.load(std::memory_order_relaxed);
  if (isa < 0) g_isa.store(isa = best());
  return isa;
}

}  // namespace
}  // namespace asv

extern "C" {

int asv_abi_version(void) { return ASV_ABI_VERSION; }
int asv_op_bytes(void) { return int(sizeof(asv_op)); }
int asv_isa_best(void) { return asv::best(); }
int asv_isa_supported(int isa) { return isa >= 0 && isa < ASV_ISA_COUNT && asv::supported(isa); }
const char *asv_isa_name(int isa) { return isa >= 0 && isa < ASV_ISA_COUNT ? asv::kIsas[isa].name : "unknown"; }

int asv_set_isa(int isa) {
  if (isa == -1) isa = asv::best();
  if (!asv_isa_supported(isa)) return -1;
  std::lock_guard<std::mutex> lock(asv::g_running);
  asv::g_isa.store(isa);
  return 0;
}
int asv_get_isa(void) { return asv::current(); }

int asv_set_threads(int threads, int pin) {
  std::lock_guard<std::mutex> lock(asv::g_running);
  return asv::pool_resize(threads, pin != 0);
}
int asv_get_threads(void) { return asv::pool_threads(); }
void asv_pool_stats(uint64_t out[3]) { asv::pool_stats(out); }

int asv_advise_huge(void *memory, uint64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uint64_t kHuge = uint64_t(2) << 20;
  uint64_t begin = (reinterpret_cast<uint64_t>(memory) + kHuge - 1) & ~(kHuge - 1);
  uint64_t end = (reinterpret_cast<uint64_t>(memory) + bytes) & ~(kHuge - 1);
  if (end <= begin) return 0;
  return madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE) == 0 ? 0 : -1;
#else
  (void)memory;
  (void)bytes;
  return -1;
#endif
}

int asv_run(const asv_op *ops, int n_ops, int rows, int seqs, int outputs) {
  std::lock_guard<std::mutex> lock(asv::g_running);
  const asv::KernelTable &table = *asv::kIsas[asv::current()].table;
  asv::Counts counts = {rows, seqs, outputs};
  for (int i = 0; i < n_ops; ++i) {
    if (ops[i].code < 0 || ops[i].code >= ASV_OP_COUNT) return i + 1;
    try {
      table.ops[ops[i].code](ops[i], counts);
    } catch (const std::bad_alloc &) {
      return -1;  // scratch memory; an exception must not cross into C
    }
  }
  return 0;
}
}
