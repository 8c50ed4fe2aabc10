#include "buffers.h"

#include "moe-hooks.h"

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "llama-impl.h"

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include <sys/mman.h>

namespace moe::hooks {

static const char * pool_buft_name(ggml_backend_buffer_type_t) { return "MoE_Pool"; }
static size_t pool_buft_alignment(ggml_backend_buffer_type_t) { return 64; }
static bool   pool_buft_is_host(ggml_backend_buffer_type_t) { return true; }

static size_t pool_buft_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * t) {
    return ggml_nbytes(t) + tensor_pad;
}

static void pool_buffer_free(ggml_backend_buffer_t buffer) {
    if (buffer->context) {
        munmap(buffer->context, buffer->size);
    }
}

static ggml_backend_buffer_t pool_buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    if (size == 0) { // the memory-fit pass
        ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), 0);
        buffer->buft = buft;
        return buffer;
    }
    void * mem = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mem == MAP_FAILED) {
        LLAMA_LOG_ERROR("moestream: cannot allocate %.2f GiB for expert slots and staging: %s\n",
                size / 1073741824.0, strerror(errno));
        return nullptr;
    }
#ifdef MADV_HUGEPAGE
    madvise(mem, size, MADV_HUGEPAGE);
#endif
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(mem, size);
    buffer->buft              = buft;
    buffer->iface.free_buffer = pool_buffer_free;
    return buffer;
}

ggml_backend_buffer_type_t pool_buft() {
    static ggml_backend_buffer_type buft = {
        /* .iface   = */ {
            /* .get_name       = */ pool_buft_name,
            /* .alloc_buffer   = */ pool_buft_alloc,
            /* .get_alignment  = */ pool_buft_alignment,
            /* .get_max_size   = */ nullptr,
            /* .get_alloc_size = */ pool_buft_alloc_size,
            /* .is_host        = */ pool_buft_is_host,
        },
        /* .device  = */ nullptr,
        /* .context = */ nullptr,
    };
    return &buft;
}

namespace {

struct device_pool {
    ggml_backend_buffer_type   buft;
    ggml_backend_buffer_type_t own; // the device's
    bool                       in_host; // page-locked memory of the processor's that the device reads in place
    std::string                name;
};

} // namespace

ggml_backend_buffer_type_t own_buft(ggml_backend_buffer_type_t pool) {
    return ((const device_pool *) pool->context)->own;
}

static const char * device_pool_name(ggml_backend_buffer_type_t buft) {
    return ((const device_pool *) buft->context)->name.c_str();
}

static size_t device_pool_alignment(ggml_backend_buffer_type_t buft) {
    return ggml_backend_buft_get_alignment(own_buft(buft));
}

static size_t device_pool_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * t) {
    return ggml_backend_buft_get_alloc_size(own_buft(buft), t);
}

bool is_in_host(ggml_backend_buffer_type_t pool) {
    return ((const device_pool *) pool->context)->in_host;
}

ggml_backend_buffer_t alloc_locked(ggml_backend_dev_t dev, size_t size) {
    const ggml_backend_buffer_type_t locked = dev ? ggml_backend_dev_host_buffer_type(dev) : nullptr;
    ggml_backend_buffer_ptr buffer(locked ? ggml_backend_buft_alloc_buffer(locked, size) : nullptr);
    return buffer && ggml_backend_buffer_get_type(buffer.get()) == locked ? buffer.release() : nullptr;
}

static void locked_pool_free(ggml_backend_buffer_t buffer) {
    ggml_backend_buffer_free((ggml_backend_buffer_t) buffer->context);
}

static void * locked_pool_base(ggml_backend_buffer_t buffer) {
    return ggml_backend_buffer_get_base((ggml_backend_buffer_t) buffer->context);
}

// a buffer of the processor's memory around one that is locked
static ggml_backend_buffer_t locked_pool_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t locked = alloc_locked(ggml_backend_buft_get_device(own_buft(buft)), size);
    if (!locked) {
        LLAMA_LOG_ERROR("moestream: cannot lock %.2f GiB of memory for expert slots and staging (--moe-pool host); hint: fewer slots, or raise the "
                "limit of locked memory (ulimit -l)\n", size / 1073741824.0);
        return nullptr;
    }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(ggml_backend_buffer_get_base(locked), size);
    buffer->buft              = buft;
    buffer->context           = locked;
    buffer->iface.free_buffer = locked_pool_free;
    buffer->iface.get_base    = locked_pool_base;
    memset(locked_pool_base(buffer), 0, size);
    return buffer;
}

static ggml_backend_buffer_t device_pool_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    if (is_in_host(buft) && size > 0) {
        return locked_pool_alloc(buft, size);
    }
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(own_buft(buft), size);
    if (!buffer) {
        LLAMA_LOG_ERROR("moestream: cannot allocate %.2f GiB on %s for expert slots and staging; hint: fewer slots, fewer layers on the "
                "device (-ngl), or --cpu-moe\n", size / 1073741824.0, ggml_backend_buft_name(own_buft(buft)));
        return nullptr;
    }
    ggml_backend_buffer_clear(buffer, 0);
    return buffer;
}

bool is_device_pool(ggml_backend_buffer_type_t buft) {
    return buft->iface.get_name == device_pool_name;
}

ggml_backend_buffer_type_t device_pool_buft(ggml_backend_buffer_type_t own, bool in_host) {
    static std::mutex mutex;
    static std::map<std::pair<ggml_backend_buffer_type_t, bool>, std::unique_ptr<device_pool>> pools;
    std::lock_guard<std::mutex> lock(mutex);
    auto & pool = pools[{ own, in_host }];
    if (!pool) {
        pool = std::make_unique<device_pool>();
        pool->own     = own;
        pool->in_host = in_host;
        pool->name    = std::string("MoE_Pool_") + (in_host ? "Host_" : "") + ggml_backend_buft_name(own);
        pool->buft = {
            /* .iface   = */ {
                /* .get_name       = */ device_pool_name,
                /* .alloc_buffer   = */ device_pool_alloc,
                /* .get_alignment  = */ device_pool_alignment,
                /* .get_max_size   = */ nullptr,
                /* .get_alloc_size = */ device_pool_alloc_size,
                /* .is_host        = */ nullptr,
            },
            /* .device  = */ ggml_backend_buft_get_device(own),
            /* .context = */ pool.get(),
        };
    }
    return &pool->buft;
}

const moe_device_functions * functions_of(ggml_backend_dev_t dev) {
    const ggml_backend_reg_t reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    return reg ? (const moe_device_functions *) ggml_backend_reg_get_proc_address(reg, "moe_device") : nullptr;
}

bool takes_pool(ggml_backend_buffer_type_t buft) {
    const ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    return functions_of(dev) && buft == ggml_backend_dev_buffer_type(dev);
}

namespace {

// By the buffer's own functions, which return when the device is done and use a stream of the calling thread: they neither wait for
// kernels nor make kernels wait. What keeps them apart is in moe_compute::finish().
class device_memory final : public storage {
public:
    explicit device_memory(ggml_backend_buffer_t buffer)
        : buffer(buffer), functions(functions_of(ggml_backend_buft_get_device(buffer->buft))), device(functions->of_device(ggml_backend_buffer_get_base(buffer))) {}

    void write(void * dst, const void * src, uint64_t size) const override {
        ggml_tensor t = bytes(dst, size);
        buffer->iface.set_tensor(buffer, &t, src, 0, size);
    }

    void write_begin(void * dst, const void * src, uint64_t size) const override { functions->write_begin(device, dst, src, size); }
    void write_end() const override { functions->write_end(device); }

    void read(void * dst, const void * src, uint64_t size) const override {
        const ggml_tensor t = bytes(src, size);
        buffer->iface.get_tensor(buffer, &t, dst, 0, size);
    }

    void copy(void * dst, const void * src, uint64_t size) const override {
        const ggml_tensor from = bytes(src, size);
        ggml_tensor       to   = bytes(dst, size);
        GGML_ASSERT(buffer->iface.cpy_tensor(buffer, &from, &to)); // on one device there is always a way
    }

    void fill(void * dst, uint8_t value, uint64_t size) const override {
        ggml_tensor t = bytes(dst, size);
        buffer->iface.memset_tensor(buffer, &t, value, 0, size);
    }

private:
    ggml_tensor bytes(const void * data, uint64_t size) const {
        ggml_tensor t = {};
        t.type   = GGML_TYPE_I8;
        t.buffer = buffer;
        t.data   = const_cast<void *>(data);
        t.ne[0]  = (int64_t) size;
        t.ne[1]  = t.ne[2] = t.ne[3] = 1;
        t.nb[0]  = 1;
        t.nb[1]  = t.nb[2] = t.nb[3] = size;
        return t;
    }

    const ggml_backend_buffer_t buffer;
    const moe_device_functions * const functions;
    const int device;
};

} // namespace

std::unique_ptr<storage> memory_of(ggml_backend_buffer_t buffer) {
    return std::make_unique<device_memory>(buffer);
}

bool is_repack(ggml_backend_buffer_type_t buft) {
    return strcmp(ggml_backend_buft_name(buft), "CPU_REPACK") == 0;
}

ggml_backend_buffer_type_t extra_buft_for(const ggml_tensor * w, int64_t n_used) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const auto extra_bufts = (ggml_backend_dev_get_extra_bufts_t)
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts");
    ggml_context_ptr ctx(ggml_init({ 4 * ggml_tensor_overhead(), nullptr, true }));
    ggml_tensor * a   = ggml_new_tensor_3d(ctx.get(), w->type, w->ne[0], w->ne[1], w->ne[2]);
    ggml_tensor * b   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, w->ne[0], n_used, 512);
    ggml_tensor * ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, n_used, 512);
    ggml_tensor * op  = ggml_mul_mat_id(ctx.get(), a, b, ids);
    for (auto * buft = extra_bufts ? extra_bufts(cpu) : nullptr; buft && *buft; ++buft) {
        ggml_backend_buffer_ptr none(ggml_backend_buft_alloc_buffer(*buft, 0));
        a->buffer = none.get();
        if (ggml_backend_dev_supports_op(cpu, op)) {
            return *buft;
        }
    }
    return nullptr;
}

ggml_backend_buffer_t make_repack_view(ggml_backend_buffer_t pool, ggml_backend_buffer_type_t buft) {
    ggml_backend_buffer_ptr sample(ggml_backend_buft_alloc_buffer(buft, 64));
    ggml_backend_buffer_t view = ggml_backend_cpu_buffer_from_ptr(ggml_backend_buffer_get_base(pool), ggml_backend_buffer_get_size(pool));
    view->buft              = buft;
    view->iface.init_tensor = sample->iface.init_tensor;
    view->iface.set_tensor  = sample->iface.set_tensor;
    view->iface.get_tensor  = nullptr;
    view->iface.cpy_tensor  = nullptr;
    ggml_backend_buffer_set_usage(view, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    return view;
}

namespace {

// rows of one expert, or some of them: groups of 4, 8 or 16 are repacked alone
class repacking final : public conversion {
public:
    explicit repacking(const ggml_tensor & t) : rows(t) {
        rows.ne[2]    = 1;
        rows.view_src = nullptr;
    }

    uint64_t unit() const override {
        return rows.nb[1] * (rows.ne[1] % 16 == 0 ? 16 : rows.ne[1] % 8 == 0 ? 8 : 4);
    }

    void convert(void * dst, const void * src, uint64_t size) const override {
        ggml_tensor part = rows;
        part.data  = dst;
        part.ne[1] = (int64_t) (size / rows.nb[1]);
        part.nb[2] = size;
        part.nb[3] = size;
        part.buffer->iface.set_tensor(part.buffer, &part, src, 0, size);
    }

private:
    ggml_tensor rows;
};

} // namespace

std::unique_ptr<conversion> repacking_of(const ggml_tensor & t) {
    return std::make_unique<repacking>(t);
}

} // namespace moe::hooks

using namespace moe::hooks;

bool moe_is_pool(ggml_backend_buffer_type_t buft) {
    return buft == pool_buft() || is_device_pool(buft);
}
