#pragma once

// Where slots and staging are: buffer types of our own, so that the loader neither maps the file into them nor fills them.
//   - In the processor's memory: plain zeroed memory.
//   - In a device's memory: once buffers exist they, and with them the tensors, are of the device's own type, which its kernels and the
//     scheduler must see.
//   - Repacked experts: upstream's faster CPU kernels want rows in another order, which upstream makes while it loads a whole tensor. Here a
//     worker makes it of what it has read; the tensors of pool and staging say that they lie in a buffer of that type.

#include "moe-device.h"
#include "reader.h"

#include "ggml-backend.h"

#include <memory>

namespace moe::hooks {

constexpr size_t tensor_pad = 256; // bytes; kernels may read past the last row

ggml_backend_buffer_type_t pool_buft();

// of a pool in a device's memory, or with in_host in page-locked memory of the processor's that the device reads in place. The same for the
// same device, as long as the process lives: the loader keeps it as a key.
ggml_backend_buffer_type_t device_pool_buft(ggml_backend_buffer_type_t own, bool in_host);
bool is_device_pool(ggml_backend_buffer_type_t buft);

// of such a one
ggml_backend_buffer_type_t own_buft(ggml_backend_buffer_type_t pool); // the device's
bool is_in_host(ggml_backend_buffer_type_t pool);

// what a device has for experts; null: it takes no pools
const moe_device_functions * functions_of(ggml_backend_dev_t dev);
bool takes_pool(ggml_backend_buffer_type_t buft);

// Page-locked memory that the device reads too. Null: there is none, or no more; upstream gives other memory then, which will not do.
ggml_backend_buffer_t alloc_locked(ggml_backend_dev_t dev, size_t size);

// the bytes of a buffer in a device's memory
std::unique_ptr<storage> memory_of(ggml_backend_buffer_t buffer);

bool is_repack(ggml_backend_buffer_type_t buft);

// What upstream's loader would choose on the CPU for experts like w: the first of the extra buffer types whose kernels take them.
// Null: plain rows.
ggml_backend_buffer_type_t extra_buft_for(const ggml_tensor * w, int64_t n_used);

// the memory of pool, as a buffer whose tensors the repacked kernels take
ggml_backend_buffer_t make_repack_view(ggml_backend_buffer_t pool, ggml_backend_buffer_type_t buft);

// t: a tensor of such experts, in a repacking buffer
std::unique_ptr<conversion> repacking_of(const ggml_tensor & t);

} // namespace moe::hooks
