// The C interface of the CPU kernels: a flat list of operation records and one call that runs it.
//
// A record holds raw pointers, dimensions and scalars; nothing is owned or copied. Running one record is an operator
// call; running many is a whole model step without Python in between, the CPU's counterpart of a captured graph.
// Pointers stay fixed between runs; what changes are three counts (rows, seqs, outputs) and the bytes behind the
// pointers. engine/kernels/cpu.py is the only caller and knows which field means what; so does ops.h here.
#pragma once
#include <stdint.h>

#if defined(__GNUC__)
#define ASV_API __attribute__((visibility("default")))
#else
#define ASV_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { ASV_ABI_VERSION = 3 };

// Best ones last; ASV_AMX_EMULATED, the code of ASV_AMX on plain vectors, is for tests and never chosen by itself.
enum asv_isa {
  ASV_SCALAR = 0,
  ASV_AVX2 = 1,
  ASV_AVX512 = 2,
  ASV_AVX512BF16 = 3,
  ASV_AMX = 4,
  ASV_AMX_EMULATED = 5,
  ASV_ISA_COUNT = 6
};

enum asv_dtype { ASV_F32 = 0, ASV_BF16 = 1 };

// n[0] of a record is a count, or one of these: take the count given at run time.
enum asv_count { ASV_ROWS = -1, ASV_SEQS = -2, ASV_OUTPUTS = -3 };

enum asv_opcode {
  ASV_OP_GATHER = 0,
  ASV_OP_RMSNORM,
  ASV_OP_LINEAR,
  ASV_OP_ROPE,
  ASV_OP_KV_STORE,
  ASV_OP_ATTENTION,
  ASV_OP_CONV,
  ASV_OP_DELTA,
  ASV_OP_ROUTE,
  ASV_OP_EXPERTS,
  ASV_OP_SILU_MUL,
  ASV_OP_SIGMOID_MUL,
  ASV_OP_GATED_ADD,
  ASV_OP_COUNT
};

typedef struct asv_op {
  int32_t code;
  int32_t flags;
  const void *p[14];
  int32_t n[14];
  float f[4];
} asv_op;

ASV_API int asv_abi_version(void);
ASV_API int asv_op_bytes(void);

// Best instruction set of this machine, and whether a given one can run here.
ASV_API int asv_isa_best(void);
ASV_API int asv_isa_supported(int isa);
ASV_API const char *asv_isa_name(int isa);

// Choose the instruction set (-1: best) and the threads (the caller counts as one). 0, or -1 if not possible.
ASV_API int asv_set_isa(int isa);
ASV_API int asv_get_isa(void);
ASV_API int asv_set_threads(int threads, int pin);
ASV_API int asv_get_threads(void);

// Run n_ops records in order. Returns 0, i + 1 where record i has an unknown code, -1 without memory for scratch.
// Calls are serialized; memory behind the pointers must stay valid until return.
ASV_API int asv_run(const asv_op *ops, int n_ops, int rows, int seqs, int outputs);

// Pool counters since start: loops run in parallel, loops run alone because helpers did not pay (or to see whether they
// do), microseconds the caller waited for helpers.
ASV_API void asv_pool_stats(uint64_t out[3]);

// Ask for 2 MiB pages behind memory that has not been touched yet. 0, or -1 where the system has none.
ASV_API int asv_advise_huge(void *memory, uint64_t bytes);

#ifdef __cplusplus
}
#endif
