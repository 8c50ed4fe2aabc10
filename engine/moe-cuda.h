#pragma once

// What patches/0012 calls in upstream's CUDA backend.

#include "ggml.h"

#include <cuda_runtime.h>

// The function of the GGML_OP_CUSTOM node that maps experts to slots on the device: never called, a name only. src[0]: the ids chosen, I32
// [n_used, n_tokens]; src[1]: device_layer::slot_of, which puts the node on the layer's device; userdata: a moe::device_layer.
extern "C" void moe_cuda_map(struct ggml_tensor * dst, int ith, int nth, void * userdata);

// The same for the node that fetches experts ahead for the layer of its userdata. src[0]: a state, F32 [n_embd, n_tokens]; src[1]: the weights
// of the layer's router; src[2]: device_layer::slot_of.
extern "C" void moe_cuda_guess(struct ggml_tensor * dst, int ith, int nth, void * userdata);

// what was made for a layer (a moe::device_layer) is freed
extern "C" void moe_cuda_release(void * layer);

// before a graph of the stream is complete: nothing that it has begun runs on elsewhere
void moe_cuda_join(cudaStream_t stream);

// whether it is such a node
bool moe_cuda_supports(const struct ggml_tensor * op);

// starts its kernels; false: it is no such node
bool moe_cuda_compute(const struct ggml_tensor * dst, cudaStream_t stream);
