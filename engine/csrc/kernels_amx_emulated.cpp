// All kernels for one instruction set. Everything but the table is in an anonymous namespace: a shared inline function
// compiled here could otherwise be the one the linker keeps for machines that lack these instructions.
#include "ops.h"

namespace asv {
namespace {
template <class T>
struct remove_ref {
  using type = T;
};
template <class T>
struct remove_ref<T &> {
  using type = T;
};
#define ASV_EMULATE_PAIRS 1
#include "simd_scalar.h"
#define ASV_HAVE_TILES 1
#include "tiles_emulated.h"
#include "vector_math.h"
#include "matmul.h"
#include "linear.h"
#include "experts.h"
#include "attention.h"
#include "rows.h"
#include "delta.h"
}  // namespace
#define ASV_TABLE kAmxEmulatedTable
#include "kernel_table.h"
}  // namespace asv
