// The mailbox between a GPU and the expert executor: byte offsets in memory that both see. The same numbers, with what the
// other side does, are in engine/moe/handoff.py; a test compares the two files.
//
// The device writes layer, tokens, taken and the payload, then the request's epoch. The executor computes, writes the partial result
// and the reply's fields, then the reply's epoch, the same number. Epochs rise by one, so a late reply of an earlier request
// can never be taken for the one that is waited for. Flags lie on cache lines of their own.
#pragma once
#include <stdint.h>

#include "c_api.h"

enum {
  ASV_BOX_REQUEST_EPOCH = 0,   // int32
  ASV_BOX_REQUEST_LAYER = 4,   // int32, among the MoE layers
  ASV_BOX_REQUEST_TOKENS = 8,  // int32
  ASV_BOX_REQUEST_TAKEN = 12,  // int32, last inner rows of each expert that the device computes itself
  ASV_BOX_REPLY_EPOCH = 64,    // int32
  ASV_BOX_REPLY_STATUS = 68,   // int32, 0 = the result is there
  ASV_BOX_REPLY_BUSY_NS = 72,  // int64, time that this reply took
  ASV_BOX_PAYLOAD = 128        // x, ids, weights, out; each on a boundary of 256 bytes
};

#ifdef __cplusplus
extern "C" {
#endif

// What a server works on. Everything behind the pointers must live until asv_serve_stop has returned 0.
typedef struct asv_serve_config {
  uint8_t *box;            // flags, see above
  const void *x;           // [max_tokens, hidden]
  const int32_t *ids;      // [max_tokens, top_k], experts of the layer, -1 = not here
  const float *weights;    // [max_tokens, top_k]
  float *out;              // [max_tokens, hidden]
  const uint8_t *bank;     // [layers * experts, record_bytes]: gate_up, then down
  uint64_t record_bytes;
  int32_t hidden, inter, top_k, experts, layers, max_tokens;
  int32_t bf16;            // 1: x and bank are bf16, 0: f32
  int32_t spin_us;         // how long to look for a request before parking
} asv_serve_config;

typedef struct asv_server asv_server;

// Start the thread that answers requests; it computes with the pool of asv_set_threads, whose helpers then wait longer for
// work before they park. NULL without a thread or memory.
ASV_API asv_server *asv_serve_start(const asv_serve_config *config);
// Requests are coming: leave parking. Cheap when not parked.
ASV_API void asv_serve_wake(asv_server *server);
// out: 1 while the thread lives, requests answered, nanoseconds spent on them, microseconds since it last showed a sign of
// life, parks, bytes of weights read.
ASV_API void asv_serve_state(asv_server *server, uint64_t out[6]);
// For tests. At the request with this epoch: 1 = the thread ends, 2 = it hangs, 3 = it replies with a failure.
ASV_API void asv_serve_fault(asv_server *server, int32_t kind, int32_t epoch);
// End it. 0, or -1 if the thread did not end within two seconds: it and its memory are then left behind.
ASV_API int asv_serve_stop(asv_server *server);
ASV_API int asv_serve_config_bytes(void);

#ifdef __cplusplus
}
#endif
