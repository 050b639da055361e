// What the translation units of all instruction sets share: element types, record decoding, the kernel tables.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(ASV_X86)
#include <immintrin.h>
#endif

#include "c_api.h"
#include "pool.h"

namespace asv {

struct bf16 {
  uint16_t bits;
};

struct Counts {
  int rows, seqs, outputs;
};

// The run-time value of a count field (see asv_count).
static inline int resolve(int n, const Counts &counts) {
  switch (n) {
    case ASV_ROWS: return counts.rows;
    case ASV_SEQS: return counts.seqs;
    case ASV_OUTPUTS: return counts.outputs;
    default: return n;
  }
}

// Flag bits 0-3: the element type of operand i is bf16 (else f32). Bits from 8 belong to the operation.
static inline bool is_bf16(const asv_op &op, int operand) { return (op.flags >> operand) & 1; }
static inline bool has_flag(const asv_op &op, int bit) { return (op.flags >> bit) & 1; }

static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline int round_up(int a, int b) { return ceil_div(a, b) * b; }
static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline int max_int(int a, int b) { return a > b ? a : b; }

using OpFn = void (*)(const asv_op &op, const Counts &counts);

struct KernelTable {
  OpFn ops[ASV_OP_COUNT];
};

extern const KernelTable kScalarTable;
extern const KernelTable kAmxEmulatedTable;
#if defined(ASV_X86)
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kAvx512Bf16Table;
extern const KernelTable kAmxTable;
#endif

}  // namespace asv
