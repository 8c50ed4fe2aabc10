#pragma once

// What the CPU kernels of ggml_mul_mat_id ask before they compute with an expert, so that they begin with experts that are in memory while
// others are still being read. Plain C, and nothing of llama.cpp but ggml.h: both sides of ggml's C interface include it.
//
// A node without a gate, or whose gate has no order, is computed as upstream does it. Which expert is computed first, and where it lies,
// cannot change bits: every row of the result comes from one expert.

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

    // The matrix of a step in order, when its bytes are there; valid until the thread takes the next. All n_thread threads of the
    // node call it for every step, one after the other.
    const void * (*take)(const struct moe_gate * gate, int32_t step, int ith, int n_thread);
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

// usual: where the matrix lies in src0
static inline const char * moe_gate_take(const struct moe_gate * gate, int i, int ith, int n_thread, const void * usual) {
    return (const char *) (gate ? gate->take(gate, i, ith, n_thread) : usual);
}

// the node as a kernel has to see it that finds the matrix by itself; copy: room for the node and its src0
static inline struct ggml_tensor * moe_gate_point(const struct moe_gate * gate, struct ggml_tensor * node, int matrix, const char * bytes,
        struct ggml_tensor copy[2]) {
    if (!gate) {
        return node;
    }
    copy[0] = *node;
    copy[1] = *node->src[0];
    copy[0].src[0] = &copy[1];
    copy[1].data   = (void *) ((uintptr_t) bytes - matrix * copy[1].nb[2]);
    return &copy[0];
}

#ifdef __cplusplus
}
#endif
