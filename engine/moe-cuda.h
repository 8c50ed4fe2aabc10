#pragma once

// What patches/0012 calls in upstream's CUDA backend.

#include "moe-device.h"

#include <cuda_runtime.h>

// the moe_device_functions that hooks/ asks for; slot_tokens is the backend's own
void * moe_cuda_functions(int (*slot_tokens)(ggml_backend_dev_t dev, enum ggml_type type));

// before a graph of the stream is complete: nothing that it has begun runs on elsewhere
void moe_cuda_join(cudaStream_t stream);

// whether it is such a node
bool moe_cuda_supports(const struct ggml_tensor * op);

// starts its kernels; false: it is no such node
bool moe_cuda_compute(const struct ggml_tensor * dst, cudaStream_t stream);
