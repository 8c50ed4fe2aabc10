#pragma once

// What the CPU kernels of ggml_mul_mat_id ask before they compute with an expert, so that they begin with experts that are in memory while
// others are still being read. Plain C, and nothing of llama.cpp but ggml.h: both sides of ggml's C interface include it.
//
// A node without a gate, or whose gate has no order, is computed as upstream does it. Which expert is computed first cannot change bits:
// every row of the result comes from one expert.

#include "ggml.h"

#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

struct moe_gate {
    // The matrices of src0 that the node computes with, each once, in the order to take them in; null: all, as they lie.
    // Written before the node is computed, and the same for all of its threads.
    const int32_t * order;
    int32_t         n_order;

    // returns when the bytes of this matrix are there; every thread calls it for every matrix in order
    void (*wait)(const struct moe_gate * gate, int32_t matrix, int ith);
};

enum { MOE_GATE_PARAM = 12 }; // of a node's op_params, of which ggml_mul_mat_id uses the first

static inline void moe_gate_set(struct ggml_tensor * node, const struct moe_gate * gate) {
    memcpy(&node->op_params[MOE_GATE_PARAM], &gate, sizeof(gate));
}

// null: none, or none that has an order now
static inline const struct moe_gate * moe_gate_of(const struct ggml_tensor * node) {
    const struct moe_gate * gate;
    memcpy(&gate, &node->op_params[MOE_GATE_PARAM], sizeof(gate));
    return gate && gate->order ? gate : NULL;
}

static inline int moe_gate_count(const struct moe_gate * gate, int n_matrix) {
    return gate ? gate->n_order : n_matrix;
}

// the matrix to take at step i
static inline int moe_gate_next(const struct moe_gate * gate, int i) {
    return gate ? gate->order[i] : i;
}

static inline void moe_gate_wait(const struct moe_gate * gate, int matrix, int ith) {
    if (gate) {
        gate->wait(gate, matrix, ith);
    }
}

#ifdef __cplusplus
}
#endif
