// All kernels for one instruction set. Everything but the table is in an anonymous namespace: a shared inline function
// compiled here could otherwise be the one the linker keeps for machines that lack these instructions.
#include "ops.h"

namespace asv {
namespace {
#define ASV_EMULATE_PAIRS 1
#include "simd_scalar.h"
#define ASV_HAVE_TILES 1
#include "tiles_emulated.h"
#include "kernels.h"
}  // namespace
#define ASV_TABLE kAmxEmulatedTable
#include "kernel_table.h"
}  // namespace asv
