#pragma once

// What a backend that can have slots in a device's memory gives hooks/: the address of one moe_device_functions, by the name "moe_device".

#include "ggml-backend.h"

struct moe_device_functions {
    // How many tokens a batch may have for the device's kernels to compute with each expert alone, wherever it lies; more need staging.
    int (*slot_tokens)(ggml_backend_dev_t dev, enum ggml_type type);

    // The functions of nodes (GGML_OP_CUSTOM) that look after slots on the device; never called, names only. map: experts to slots. src[0]: the
    // ids chosen, I32 [n_used, n_tokens]; src[1]: device_layer::slot_of, which puts the node on the layer's device; userdata: a
    // moe::device_layer. guess: fetches experts ahead for the layer of its userdata. src[0]: a state, F32 [n_embd, n_tokens]; src[1]: the
    // weights of the layer's router; src[2]: device_layer::slot_of.
    ggml_custom_op_t map;
    ggml_custom_op_t guess;

    // what was made for a layer (a moe::device_layer) is freed
    void (*release)(void * layer);

    // Bytes of the processor's memory to the device, begun in a stream of the calling thread, and the wait for all that this thread has begun.
    // dst is on the device of this number, of_device() says on which an address is. They abort when the device fails, as the backend does.
    int  (*of_device)(const void * p);
    void (*write_begin)(int device, void * dst, const void * src, size_t size);
    void (*write_end)(int device);
};
