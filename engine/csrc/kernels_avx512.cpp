// All kernels for one instruction set. Everything but the table is in an anonymous namespace: a shared inline function
// compiled here could otherwise be the one the linker keeps for machines that lack these instructions.
#include "ops.h"

namespace asv {
namespace {
#include "simd_avx512.h"
#include "kernels.h"
}  // namespace
#define ASV_TABLE kAvx512Table
#include "kernel_table.h"
}  // namespace asv
