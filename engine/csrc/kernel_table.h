// The last include of a kernel unit: its table. Needs ASV_TABLE.
const KernelTable ASV_TABLE = {{op_gather, op_rmsnorm, op_linear, op_rope, op_kv_store, op_attention, op_conv, op_delta,
                                op_route, op_experts, op_silu_mul, op_sigmoid_mul, op_gated_add}};
