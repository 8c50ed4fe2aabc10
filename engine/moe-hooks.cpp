// The only file that includes ggml and llama.cpp headers: connects the engine (stream.h) to loader, graph and compute.

#include "moe-hooks.h"

#include "budget.h"
#include "device-pool.h"
#include "header-check.h"
#include "io-probe.h"
#include "moe-device.h"
#include "moe-gate.h"
#include "ram-tier.h"
#include "router-guess.h"
#include "router-map.h"
#include "stream.h"
#include "uring.h"

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "llama-arch.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-model-loader.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <regex>
#include <set>
#include <stdexcept>
#include <thread>
#include <unordered_set>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

// The one opinion of what an expert tensor is: these kinds, with the suffix "weight". Everything else stays resident.
// In the order in which graphs multiply with them.
static const llm_tensor expert_kinds[] = {
    LLM_TENSOR_FFN_GATE_EXPS, LLM_TENSOR_FFN_UP_EXPS, LLM_TENSOR_FFN_GATE_UP_EXPS, LLM_TENSOR_FFN_DOWN_EXPS,
};

static constexpr size_t tensor_pad = 256; // kernels may read past the last row

//
// pool buffer type: plain host memory, zeroed, its own type so that the loader neither maps the file into it nor fills it
//

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

static ggml_backend_buffer_type_t pool_buft() {
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

//
// pools in a device's memory: the loader sees a type of ours, which it neither maps nor fills; once buffers exist they, and with them the
// tensors, are of the device's own type, which its kernels and the scheduler must see
//

namespace {

struct device_pool {
    ggml_backend_buffer_type   buft;
    ggml_backend_buffer_type_t own; // the device's
    bool                       in_host; // page-locked memory of the processor's that the device reads in place
    std::string                name;
};

} // namespace

static ggml_backend_buffer_type_t own_buft(ggml_backend_buffer_type_t pool) {
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

static bool is_in_host(ggml_backend_buffer_type_t pool) {
    return ((const device_pool *) pool->context)->in_host;
}

// Page-locked memory that the device reads too. Null: there is none, or no more; upstream gives other memory then, which will not do.
static ggml_backend_buffer_t alloc_locked(ggml_backend_dev_t dev, size_t size) {
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

static bool is_device_pool(ggml_backend_buffer_type_t buft) {
    return buft->iface.get_name == device_pool_name;
}

// the same for the same device, as long as the process lives: the loader keeps it as a key
static ggml_backend_buffer_type_t device_pool_buft(ggml_backend_buffer_type_t own, bool in_host) {
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

bool moe_is_pool(ggml_backend_buffer_type_t buft) {
    return buft == pool_buft() || is_device_pool(buft);
}

// what a device has for experts; null: it takes no pools
static const moe_device_functions * functions_of(ggml_backend_dev_t dev) {
    const ggml_backend_reg_t reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    return reg ? (const moe_device_functions *) ggml_backend_reg_get_proc_address(reg, "moe_device") : nullptr;
}

static bool takes_pool(ggml_backend_buffer_type_t buft) {
    const ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    return functions_of(dev) && buft == ggml_backend_dev_buffer_type(dev);
}

namespace {

// By the buffer's own functions, which return when the device is done and use a stream of the calling thread: they neither wait for
// kernels nor make kernels wait. What keeps them apart is in moe_compute::finish().
class device_storage final : public moe::storage {
public:
    explicit device_storage(ggml_backend_buffer_t buffer)
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

//
// repacked experts: upstream's faster CPU kernels want rows in another order, which upstream makes while it loads a whole tensor.
// Here a worker makes it of what it has read; the tensors of pool and staging say that they lie in a buffer of that type.
//

static bool is_repack(ggml_backend_buffer_type_t buft) {
    return strcmp(ggml_backend_buft_name(buft), "CPU_REPACK") == 0;
}

// What upstream's loader would choose on the CPU for experts like w: the first of the extra buffer types whose kernels take them.
// Null: plain rows.
static ggml_backend_buffer_type_t extra_buft_for(const ggml_tensor * w, int64_t n_used) {
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

// the memory of pool, as a buffer whose tensors the repacked kernels take
static ggml_backend_buffer_t make_repack_view(ggml_backend_buffer_t pool, ggml_backend_buffer_type_t buft) {
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
class repacking final : public moe::conversion {
public:
    // t: a tensor of such experts, in a repacking buffer
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

//
// moe_stream
//

namespace {

struct file_tensor {
    std::string name;
    uint32_t    file;
    uint64_t    offset;       // bytes
    uint64_t    expert_bytes;
    int64_t     n_expert;
    ggml_backend_buffer_type_t repack = nullptr; // the experts are repacked; null: plain rows
    std::unique_ptr<repacking> convert;          // when they are
    bool        is_unlike_stock = false;         // stock's choice on the processor would be kernels that streamed experts cannot take
    ggml_backend_buffer_type_t place = nullptr;  // a pool's type: where slots and staging are
    uint64_t    pad_bytes = 0;                   // see moe::expert_part
    ggml_tensor * pool    = nullptr; // null: the model does not use it
    ggml_tensor * staging = nullptr; // null: every expert has a slot
    uint64_t    staging_offset = 0;  // in a half
};

// what the kernels ask about one expert tensor
struct part_gate : moe_gate {
    moe_stream * moe;
    int32_t      i_layer;
    int32_t      part;
    bool         staged;
};

// how batches are served that the slots cannot hold: through halves as wide as a layer, or through a ring
enum class staging_kind { automatic, full, ring };

// who looks after slots in a device's memory: the host, between the parts of a graph, or the device itself
enum class gpu_path_kind { automatic, copy, mailbox };

// where the slots of layers are that a device computes
enum class pool_kind { automatic, device, host };

// where the fingerprint of a block that has experts comes from
struct block_identity {
    int32_t  layer;
    int32_t  n_expert;
    uint32_t router_file   = 0;
    uint64_t router_offset = 0; // bytes
    uint64_t router_bytes  = 0; // 0: no router of the usual name
};

// what decides how a batch is served, known before there is a stream
struct layer_shape {
    int32_t n_expert;
    int32_t n_free_slot;
    int64_t n_slot_tokens; // of a batch that goes through slots, at most
    bool    on_device;
    bool    is_resident = false; // all experts are in their places, and have their own ids
};

// where slots and staging of some layers are
struct expert_place {
    ggml_tensor *                   staging = nullptr; // null: no layer needs it
    std::unique_ptr<device_storage> at;                // null: the processor's memory
    uint64_t                        device_bytes = 0;  // of its buffer, as upstream counts it for a device
    std::unique_ptr<device_storage> at_tables;         // where the device keeps what it knows of its slots; null: it does not look after them
    moe::device_control           * control = nullptr; // there
    bool                            is_dry  = false;   // what control says
    bool                            is_guessing = false; // likewise
    bool                            is_told = false;   // control is as it should be between graphs
};

// where a device's tables of a layer are
struct device_tables {
    ggml_tensor * slot_of = nullptr; // null: no device looks after the layer's slots
    ggml_tensor * rest    = nullptr; // expert_of, last_use, stays, is_guess, scores, state
    ggml_tensor * router  = nullptr; // what guesses are made with; null: nothing is guessed

    static uint64_t at_scores(int64_t n_slot, int64_t n_expert) { return (9 * n_slot + n_expert + 63) / 64 * 64; }
    static uint64_t at_state (int64_t n_slot, int64_t n_expert) { return at_scores(n_slot, n_expert) + (moe::device_guess_tokens * 4 * n_expert + 63) / 64 * 64; }
};

} // namespace

struct moe_stream : std::enable_shared_from_this<moe_stream> {
    // settings
    int64_t          slots_wanted = 0;
    moe::io_wish     io;
    moe::policy_kind policy       = moe::policy_kind::lru;
    bool             overlap      = true;
    staging_kind     staging_wanted = staging_kind::automatic;
    gpu_path_kind    gpu_path       = gpu_path_kind::automatic;
    pool_kind        pool_wanted    = pool_kind::automatic;
    bool             require_gpu    = false;
    bool             by_device      = false; // devices look after their slots
    std::set<int32_t> resident;              // blocks whose experts are all in a device's memory from the start
    int64_t          ram_wanted   = 0; // bytes, or MOE_RAM_AUTO
    bool             ram_given    = false; // somebody has said so
    moe::prefetch_kind prefetch   = moe::prefetch_kind::automatic;
    bool             extra_bufts  = true; // upstream's --repack
    moe_files        files        = { sizeof(moe_files), nullptr, nullptr };
    uint64_t         trace_limit  = 1024ull << 20; // bytes
    int32_t          map_pin      = 0;
    int64_t          warm_s       = -1; // seconds that loading waits for warm fills; negative: there are none
    std::unique_ptr<moe::router_map> map;

    // layout
    std::map<int32_t, std::vector<file_tensor>> layers; // by block number
    std::vector<block_identity> identity;               // of the file, also of blocks that the model does not use
    int32_t      n_slot       = 0; // of the layer with the most
    std::map<int32_t, int32_t> n_slot_of; // by block number, with slots "map"
    std::map<int32_t, int32_t> n_used_of; // experts that a token uses, by block number
    int32_t      n_used_max   = 0; // in the layer with the most
    uint64_t     expert_bytes = 0; // of all experts in the files
    uint64_t     dense_bytes  = 0; // of everything else
    uint64_t     half_bytes   = 0; // of one half of the staging buffer
    uint64_t     ring_bytes   = 0; // of an entry of the ring
    int32_t      n_ring       = 0; // entries of the ring, in place of halves; 0: halves
    uint64_t     ram_budget   = 0; // of the RAM tier
    uint64_t     guess_bytes  = 0; // of an entry for guesses
    int32_t      n_guess      = 0; // entries
    moe::memory_now memory;
    bool         maps_dense = false;
    ggml_backend_buffer_ptr repack_view; // of the pool's memory

    ggml_tensor *    ram     = nullptr; // the RAM tier's slabs
    ggml_tensor *    guesses = nullptr; // entries for experts that are guessed
    bool         with_devices = false; // the model may use some
    bool         takes_pools  = false; // one of them can hold slots
    ggml_backend_dev_t only_device = nullptr; // that which all layers and slots will be on, if there is such a one
    std::map<ggml_backend_buffer_type_t, expert_place> places; // by pool type
    ggml_backend_buffer_ptr bounce; // page-locked, for what goes to devices
    // of slots that devices look after
    ggml_context_ptr        ctx_tables;
    std::vector<ggml_backend_buffer_ptr> tables_buffers;
    ggml_backend_buffer_ptr slabs;   // page-locked
    ggml_backend_buffer_ptr shared;  // page-locked: the mailbox, and behind it what slabs hold
    std::vector<ggml_backend_buffer_type_t> layers_in_order; // the place of each, by layer index
    std::vector<device_tables>     tables;        // by layer index
    std::vector<moe::device_layer> device_layers; // likewise
    ggml_context_ptr ctx_staging; // the twins' tensor structs

    std::unordered_map<std::string, const ggml_tensor *>   routers; // and what goes with them, by name
    std::vector<layer_shape>                               shapes; // by layer index, as the stream counts them
    std::unordered_map<const ggml_tensor *, int32_t>       i_layer_of;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> staging_of;
    std::unordered_map<const ggml_tensor *, part_gate>     gates; // by pool tensor or twin
    std::vector<std::vector<part_gate *>>                  layer_gates; // by 2 * layer index + staged

    std::once_flag                     set_up_once;
    std::unique_ptr<moe::router_guess> next_router; // null: nothing is guessed
    std::unique_ptr<moe::trace_writer> trace; // null: nothing is recorded
    std::unique_ptr<moe::stream> stream; // null in the memory-fit pass
    std::atomic<int>             n_dry { 0 }; // moe_dry_run objects alive
    std::vector<std::string>     paths; // of the files, as errors name them
    std::mutex                   report_mutex; // guards the following
    moe::stream_report           report;
    std::string                  error; // of the last graph

    // what is refused, or left out, without slots to fill
    bool guesses_possible() const { return prefetch != moe::prefetch_kind::off && overlap; }

    // of a place that has some
    uint64_t staging_bytes() const {
        return n_ring > 0 ? n_ring * ring_bytes + tensor_pad : 2 * half_bytes;
    }

    ggml_tensor * host_staging() const {
        const auto it = places.find(pool_buft());
        return it == places.end() ? nullptr : it->second.staging;
    }

    bool on_device() const {
        return std::any_of(places.begin(), places.end(), [](const auto & p) { return is_device_pool(p.first); });
    }

    int32_t n_slot_in(int32_t il, int64_t n_expert) const {
        const auto it = n_slot_of.find(il);
        return (int32_t) std::min<int64_t>(it == n_slot_of.end() ? n_slot : it->second, n_expert);
    }

    // of layers whose slots a device looks after
    void fetch_device_counters();

    // what devices are told of the graph that is about to begin
    void tell_devices();
    void start_devices_afresh();

    std::string stats_json() {
        std::lock_guard<std::mutex> lock(report_mutex);
        fetch_device_counters();
        return stream ? moe::stats_json(report, stream->stats()) : moe::stats_json_off();
    }

    // says in the log, once, that recording has ended by itself
    void look_at_trace() noexcept;

    // the model ends; whoever asks for statistics at this moment may hold this a little longer
    void close();
};

// the models that stream, the newest last
static std::mutex                             live_mutex;
static std::vector<std::weak_ptr<moe_stream>> live;

void moe_stream::look_at_trace() noexcept {
    try {
        const std::string notice = trace ? trace->take_notice() : "";
        if (!notice.empty()) {
            LLAMA_LOG_WARN("moestream: %s\n", notice.c_str());
        }
    } catch (const std::bad_alloc &) {
        // the graph is more important than the line
    }
}

void moe_stream::fetch_device_counters() {
    for (size_t i = 0; stream && i < device_layers.size(); ++i) {
        if (!device_layers[i].state) {
            continue;
        }
        moe::device_layer_state counts = {};
        const auto & place = places.at(layers_in_order[i]);
        place.at_tables->read(&counts, device_layers[i].state, offsetof(moe::device_layer_state, clock));
        stream->note_device_counters((int32_t) i, counts);
    }
}

void moe_stream::tell_devices() {
    for (auto & [buft, place] : places) {
        const bool guessing = stream->wants_guesses();
        if (place.control && (!place.is_told || place.is_dry != (n_dry > 0) || place.is_guessing != guessing)) {
            place.is_dry      = n_dry > 0;
            place.is_guessing = guessing;
            place.is_told     = true;
            moe::device_control control = {};
            control.dry      = place.is_dry;
            control.guessing = guessing;
            place.at_tables->write(place.control, &control, sizeof(control));
        }
    }
}

// between graphs: the device knows of no expert in a slot
static void empty_slots(const expert_place & place, const moe::device_layer & l) {
    static const std::vector<int32_t> none(moe::device_max_rows, -1);
    place.at_tables->write(l.slot_of, none.data(), l.n_expert * sizeof(int32_t));
    place.at_tables->write(l.expert_of, none.data(), l.n_slot * sizeof(int32_t));
}

// After an error: a device may have given up asking, and a host that was late may have changed slabs while the device copied from them.
void moe_stream::start_devices_afresh() {
    for (auto & [buft, place] : places) {
        place.is_told = false;
    }
    for (size_t i = 0; i < device_layers.size(); ++i) {
        if (device_layers[i].state) {
            empty_slots(places.at(layers_in_order[i]), device_layers[i]);
        }
    }
}

void moe_stream::close() {
    if (!stream) {
        return;
    }
    if (trace) {
        trace->flush();
        look_at_trace();
    }
    if (const char * path = getenv("MOESTREAM_STATS_FILE")) {
        std::ofstream out(path);
        out << stats_json() << "\n";
        if (!out) {
            LLAMA_LOG_ERROR("moestream: cannot write MOESTREAM_STATS_FILE '%s'\n", path);
        }
    }
    std::lock_guard<std::mutex> lock(report_mutex);
    stream.reset(); // its workers write to the slots, which the model is about to free
    for (size_t i = 0; i < device_layers.size(); ++i) {
        if (device_layers[i].state) {
            functions_of(ggml_backend_buft_get_device(layers_in_order[i]))->release(&device_layers[i]);
        }
    }
    trace.reset();
}

// what a model holds: letting go of it ends the workers
static std::shared_ptr<moe_stream> held_by_model(const std::shared_ptr<moe_stream> & moe) {
    return { moe.get(), [moe](moe_stream * m) { m->close(); } };
}

static std::shared_ptr<moe_stream> newest() {
    std::lock_guard<std::mutex> lock(live_mutex);
    for (auto it = live.rbegin(); it != live.rend(); ++it) {
        if (auto moe = it->lock()) {
            return moe;
        }
    }
    return nullptr;
}

std::string moe_stats_json() {
    const auto moe = newest();
    return moe ? moe->stats_json() : moe::stats_json_off();
}

std::string moe_stats_prometheus() {
    const auto moe = newest();
    if (!moe) {
        return "";
    }
    std::lock_guard<std::mutex> lock(moe->report_mutex);
    moe->fetch_device_counters();
    return moe->stream ? moe::stats_prometheus(moe->report, moe->stream->stats()) : "";
}

std::string moe_model_stats_json(const llama_model * model) {
    moe_stream * moe = model ? model->hparams.moe : nullptr;
    return moe && moe->stream ? moe->stats_json() : moe::stats_json_off();
}

size_t moe_stats_copy(const llama_model * model, char * out, size_t size) {
    try {
        const std::string json = moe_model_stats_json(model);
        if (out && size > 0) {
            const size_t n = std::min(json.size(), size - 1);
            memcpy(out, json.data(), n);
            out[n] = 0;
        }
        return json.size();
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

void moe_log_without_debug(enum ggml_log_level level, const char * text, void * user_data) {
    static thread_local bool continues_debug = false;
    if (level != GGML_LOG_LEVEL_CONT) {
        continues_debug = level == GGML_LOG_LEVEL_DEBUG;
    }
    if (!continues_debug && user_data) {
        ((ggml_log_callback) user_data)(level, text, nullptr);
    }
}

void moe_refuse(const moe_stream * moe, const char * what) {
    if (moe) {
        throw std::runtime_error(format("%s is not possible while experts are streamed (--moe-slots)", what));
    }
}

//
// files that are damaged, or made to harm
//

// Upstream checks much of a header by assertions, which abort. While a guard lives in a thread, one that fails there is an error of the
// file: a message, and exit code 1. Not an exception: those cannot cross ggml's C code.
static thread_local int        guards = 0; // of this thread
static std::mutex              guard_mutex;
static int                     guards_all = 0;
static ggml_abort_callback_t   callback_before = nullptr;

static void on_abort(const char * message) {
    if (guards > 0) {
        const bool is_memory = strstr(message, "mem_buffer") || strstr(message, "alloc");
        fprintf(stderr, "moestream: cannot load the model: llama.cpp ends with '%s'; hint: %s\n", message, is_memory ?
                "memory has run out; fewer slots, a smaller context (-c), or a larger limit" :
                "is a setting impossible for this model (--override-kv)? else the file is damaged, or made for another version");
        fflush(stderr);
        std::_Exit(1);
    }
    if (callback_before) {
        callback_before(message);
    } else {
        fprintf(stderr, "%s\n", message);
    }
}

static bool asks_for_slots(const llama_model_kv_override * overrides) {
    for (const auto * o = overrides; o && o->key[0]; ++o) {
        if (strcmp(o->key, "moestream.slots") == 0 && o->tag == LLAMA_KV_OVERRIDE_TYPE_INT) {
            return o->val_i64 != 0;
        }
    }
    return false;
}

static bool guard_begin(bool on) {
    if (on) {
        std::lock_guard<std::mutex> lock(guard_mutex);
        if (guards_all++ == 0) {
            callback_before = ggml_set_abort_callback(on_abort);
        }
        ++guards;
    }
    return on;
}

moe_load_guard::moe_load_guard(const moe_stream * moe) : on(guard_begin(moe != nullptr)) {}

[[noreturn]] static void refuse_file(const std::string & what) {
    throw std::runtime_error(what + "; " + moe::hint_damaged);
}

moe_load_guard::moe_load_guard(const llama_model_kv_override * overrides, const std::string & path) : on([&] {
    if (!asks_for_slots(overrides)) {
        return false;
    }
    const std::string what = moe::check_headers(path);
    if (!what.empty()) {
        throw std::runtime_error(what);
    }
    return guard_begin(true);
}()) {}

static void guard_end(bool on) {
    if (on) {
        std::lock_guard<std::mutex> lock(guard_mutex);
        --guards;
        if (--guards_all == 0) {
            ggml_set_abort_callback(callback_before);
        }
    }
}

moe_load_guard::~moe_load_guard() {
    guard_end(on);
}

// The counts that upstream asserts, in its order. A key that is missing or of a wrong type has a message of upstream's.
void moe_load_guard::check(llama_model_loader & ml) const {
    const llm_arch arch = ml.get_arch();
    if (!on || arch == LLM_ARCH_UNKNOWN || arch == LLM_ARCH_HUNYUAN_VL || arch == LLM_ARCH_HUNYUAN_DENSE) { // dense, whatever they say
        return;
    }
    const auto number = [&](llm_kv kid) {
        uint32_t n = 0;
        ml.get_key(kid, n, false);
        return n;
    };
    const auto expect = [&](bool ok, llm_kv kid, uint32_t n, const std::string & expected) {
        if (!ok) {
            refuse_file(format("%s is %u: expected %s", ml.llm_kv(kid).c_str(), n, expected.c_str()));
        }
    };

    const uint32_t n_layer = number(LLM_KV_BLOCK_COUNT);
    const uint32_t n_mtp   = number(LLM_KV_NEXTN_PREDICT_LAYERS);
    if (gguf_find_key(ml.metadata, ml.llm_kv(LLM_KV_BLOCK_COUNT).c_str()) >= 0) {
        expect(n_layer >= 1 && n_layer <= LLAMA_MAX_LAYERS, LLM_KV_BLOCK_COUNT, n_layer, format("1 to %d", LLAMA_MAX_LAYERS));
        expect(n_mtp <= n_layer, LLM_KV_NEXTN_PREDICT_LAYERS, n_mtp, format("no more than the %u of block_count", n_layer));
    }

    const uint32_t n_expert = number(LLM_KV_EXPERT_COUNT);
    expect(n_expert <= LLAMA_MAX_EXPERTS, LLM_KV_EXPERT_COUNT, n_expert, format("at most %d", LLAMA_MAX_EXPERTS));

    std::vector<uint32_t> used; // of each layer, where the file says so
    const int kid_used = gguf_find_key(ml.metadata, ml.llm_kv(LLM_KV_EXPERT_USED_COUNT).c_str());
    if (kid_used < 0 || gguf_get_kv_type(ml.metadata, kid_used) != GGUF_TYPE_ARRAY) {
        used.push_back(number(LLM_KV_EXPERT_USED_COUNT));
    } else {
        ml.get_arr(LLM_KV_EXPERT_USED_COUNT, used);
    }
    const uint32_t n_used = used.empty() ? 0 : *std::max_element(used.begin(), used.end());
    expect(n_used <= n_expert, LLM_KV_EXPERT_USED_COUNT, n_used, format("no more than the %u of expert_count", n_expert));
    expect(n_used > 0 || n_expert == 0, LLM_KV_EXPERT_USED_COUNT, n_used, format("1 to %u", n_expert));

    const uint32_t n_group      = number(LLM_KV_EXPERT_GROUP_COUNT);
    const uint32_t n_group_used = number(LLM_KV_EXPERT_GROUP_USED_COUNT);
    expect(n_group == 0 || n_group < n_expert, LLM_KV_EXPERT_GROUP_COUNT, n_group, format("less than the %u of expert_count", n_expert));
    if (n_group > 1) {
        expect(n_expert % n_group == 0, LLM_KV_EXPERT_GROUP_COUNT, n_group, format("a divisor of the %u of expert_count", n_expert));
        expect(n_group_used > 0 && n_group_used < n_group, LLM_KV_EXPERT_GROUP_USED_COUNT, n_group_used,
                format("1 to %u, with %u groups", n_group - 1, n_group));
    }
}

// what upstream finds out only when it computes, by crashing or never ending
static void check_model(const moe_stream & moe, const llama_hparams & hparams) {
    if (hparams.n_ctx_train == 0) { // llama-server would end by an assertion at the first request
        refuse_file("context_length is 0: expected 1 or more");
    }
    for (const float eps : { hparams.f_norm_eps, hparams.f_norm_rms_eps, hparams.f_norm_group_eps }) {
        if (!(eps >= 0.0f)) {
            refuse_file(format("the epsilon of a norm is %g: expected a number that is not negative", eps));
        }
    }
    for (const uint32_t n_rot : { hparams.n_rot_full, hparams.n_rot_swa }) {
        const bool sections = hparams.rope_type == LLAMA_ROPE_TYPE_MROPE || hparams.rope_type == LLAMA_ROPE_TYPE_IMROPE;
        if (hparams.rope_type != LLAMA_ROPE_TYPE_NONE && (n_rot % 2 != 0 || (n_rot == 0 && sections))) {
            refuse_file(format("rope.dimension_count is %u: expected an even number%s", n_rot, sections ? " from 2" : ""));
        }
    }
    for (const auto & [il, tensors] : moe.layers) {
        if (hparams.n_expert_used(il) == 0) {
            refuse_file(format("layer %d has experts ('%s') and uses none: its expert_used_count is 0", il, tensors[0].name.c_str()));
        }
    }
}

static void check_type(const LLM_TN_IMPL & tn, const ggml_tensor * t) {
    const bool is_bias = tn.suffix && strcmp(tn.suffix, "bias") == 0;
    const bool is_dense_float = t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16 || t->type == GGML_TYPE_BF16;
    bool ok = true;
    switch (is_bias ? GGML_OP_ADD : tn.tensor == LLM_TENSOR_TOKEN_EMBD ? GGML_OP_MUL_MAT : llm_tensor_info_for(tn.tensor).op) {
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:
            ok = is_dense_float || (ggml_is_quantized(t->type) && ggml_get_type_traits(t->type)->to_float);
            break;
        case GGML_OP_ADD:
        case GGML_OP_MUL:
        case GGML_OP_DIV:
            ok = is_dense_float;
            break;
        default:
            break;
    }
    if (!ok) {
        refuse_file(format("tensor '%s' has type %s, which is no type of weights", tn.str().c_str(), ggml_type_name(t->type)));
    }
}

//
// loading
//

static const llama_model_kv_override * setting(const llama_model_loader & ml, const char * key, llama_model_kv_override_type type) {
    const auto it = ml.kv_overrides.find(key);
    if (it == ml.kv_overrides.end()) {
        return nullptr;
    }
    if (it->second.tag != type) {
        throw std::runtime_error(format("setting '%s' has the wrong type", key));
    }
    return &it->second;
}

static moe_files read_files(const llama_model_loader & ml) {
    moe_files files = { sizeof(files), nullptr, nullptr };
    if (const auto * o = setting(ml, "moestream.files", LLAMA_KV_OVERRIDE_TYPE_INT)) {
        if (!moe_get_files(o->val_i64, &files)) {
            throw std::runtime_error(format("setting 'moestream.files' is %lld: expected a number from moe_add_files()", (long long) o->val_i64));
        }
    }
    return files;
}

static void read_settings(moe_stream & moe, const llama_model_loader & ml) {
    if (const auto * o = setting(ml, "moestream.io_threads", LLAMA_KV_OVERRIDE_TYPE_INT)) {
        if (o->val_i64 < 1 || o->val_i64 > 256) {
            throw std::runtime_error(format("--moe-io-threads %lld: expected 1 to 256", (long long) o->val_i64));
        }
        moe.io.n_in_flight = (int32_t) o->val_i64;
    }
    if (const auto * o = setting(ml, "moestream.io", LLAMA_KV_OVERRIDE_TYPE_STR)) {
        if (!moe::io_mode_from_name(o->val_str, moe.io.mode)) {
            throw std::runtime_error(format("--moe-io '%s': expected auto, direct or buffered", o->val_str));
        }
    }
    if (const auto * o = setting(ml, "moestream.io_backend", LLAMA_KV_OVERRIDE_TYPE_STR)) {
        if (!moe::io_backend_from_name(o->val_str, moe.io.backend)) {
            throw std::runtime_error(format("--moe-io-backend '%s': expected auto, threads or uring", o->val_str));
        }
    }
    if (const auto * o = setting(ml, "moestream.policy", LLAMA_KV_OVERRIDE_TYPE_STR)) {
        if (!moe::policy_from_name(o->val_str, moe.policy)) {
            throw std::runtime_error(format("--moe-policy '%s': expected lru, lfu or heat", o->val_str));
        }
    }
    if (const auto * o = setting(ml, "moestream.overlap", LLAMA_KV_OVERRIDE_TYPE_BOOL)) {
        moe.overlap = o->val_bool;
    }
    if (const auto * o = setting(ml, "moestream.staging", LLAMA_KV_OVERRIDE_TYPE_STR)) {
        const std::string value = o->val_str;
        if (value != "auto" && value != "full" && value != "ring") {
            throw std::runtime_error(format("--moe-staging '%s': expected auto, full or ring", o->val_str));
        }
        moe.staging_wanted = value == "full" ? staging_kind::full : value == "ring" ? staging_kind::ring : staging_kind::automatic;
    }
    if (const auto * o = setting(ml, "moestream.ram", LLAMA_KV_OVERRIDE_TYPE_INT)) {
        if (o->val_i64 < MOE_RAM_AUTO) {
            throw std::runtime_error(format("--moe-ram %lld: expected a number of bytes, auto or none", (long long) o->val_i64));
        }
        moe.ram_wanted = o->val_i64;
        moe.ram_given  = true;
    }
    if (const auto * o = setting(ml, "moestream.prefetch", LLAMA_KV_OVERRIDE_TYPE_STR)) {
        const std::string value = o->val_str;
        if (value != "auto" && value != "on" && value != "off") {
            throw std::runtime_error(format("--moe-prefetch '%s': expected auto, on or off", o->val_str));
        }
        moe.prefetch = value == "auto" ? moe::prefetch_kind::automatic : value == "on" ? moe::prefetch_kind::on : moe::prefetch_kind::off;
    }
    if (const auto * o = setting(ml, "moestream.gpu_path", LLAMA_KV_OVERRIDE_TYPE_STR)) {
        const std::string value = o->val_str;
        if (value != "auto" && value != "copy" && value != "mailbox") {
            throw std::runtime_error(format("--moe-gpu-path '%s': expected auto, copy or mailbox", o->val_str));
        }
        moe.gpu_path = value == "copy" ? gpu_path_kind::copy : value == "mailbox" ? gpu_path_kind::mailbox : gpu_path_kind::automatic;
    }
    if (const auto * o = setting(ml, "moestream.pool", LLAMA_KV_OVERRIDE_TYPE_STR)) {
        const std::string value = o->val_str;
        if (value != "auto" && value != "device" && value != "host") {
            throw std::runtime_error(format("--moe-pool '%s': expected auto, device or host", o->val_str));
        }
        moe.pool_wanted = value == "device" ? pool_kind::device : value == "host" ? pool_kind::host : pool_kind::automatic;
    }
    if (const auto * o = setting(ml, "moestream.require_gpu", LLAMA_KV_OVERRIDE_TYPE_BOOL)) {
        moe.require_gpu = o->val_bool;
    }
    if (moe.prefetch == moe::prefetch_kind::on && !moe.overlap) {
        throw std::runtime_error("--moe-prefetch on cannot be combined with --moe-overlap off: matmuls wait for what was guessed; hint: leave out one of them");
    }
    if (moe.staging_wanted == staging_kind::ring && !moe.overlap) {
        throw std::runtime_error("--moe-staging ring cannot be combined with --moe-overlap off: matmuls wait for what passes through the ring; hint: leave out one of them");
    }
    moe.files = read_files(ml);
    if (const auto * o = setting(ml, "moestream.trace_limit", LLAMA_KV_OVERRIDE_TYPE_INT)) {
        if (o->val_i64 < 1 || o->val_i64 > 1 << 30) {
            throw std::runtime_error(format("--moe-trace-limit %lld: expected a number of MiB from 1", (long long) o->val_i64));
        }
        if (!moe.files.trace) {
            throw std::runtime_error("--moe-trace-limit does nothing without --moe-trace; hint: add --moe-trace FILE, or leave it out");
        }
        moe.trace_limit = (uint64_t) o->val_i64 << 20;
    }
    if (const auto * o = setting(ml, "moestream.map_pin", LLAMA_KV_OVERRIDE_TYPE_INT)) {
        if (o->val_i64 < 0 || o->val_i64 > 1000000) {
            throw std::runtime_error(format("--moe-map-pin %lld: expected a number of experts", (long long) o->val_i64));
        }
        moe.map_pin = (int32_t) o->val_i64;
    }
    if (const auto * o = setting(ml, "moestream.warm", LLAMA_KV_OVERRIDE_TYPE_INT)) {
        moe.warm_s = std::min<int64_t>(o->val_i64, 86400);
    }
    if (!moe.files.map) {
        for (const char * needs_map : { moe.map_pin > 0 ? "--moe-map-pin" : nullptr, moe.slots_wanted == MOE_SLOTS_MAP ? "--moe-slots map" : nullptr }) {
            if (needs_map) {
                throw std::runtime_error(format("%s does nothing without --moe-map; hint: add --moe-map FILE, or leave out %s", needs_map, needs_map));
            }
        }
    } else if (moe.map_pin == 0 && moe.warm_s < 0 && moe.slots_wanted != MOE_SLOTS_MAP) {
        throw std::runtime_error("--moe-map does nothing alone; hint: add --moe-map-pin N, --moe-warm SECONDS or --moe-slots map, or leave it out");
    }
}

static void refuse_combinations(const moe_stream & moe, const llama_model_loader & ml, const llama_model_params & params,
        const std::vector<llama_device> & devices) {
    if (params.split_mode == LLAMA_SPLIT_MODE_ROW || params.split_mode == LLAMA_SPLIT_MODE_TENSOR) {
        throw std::runtime_error(format("--moe-slots cannot be combined with --split-mode %s; hint: use --split-mode layer or none",
                params.split_mode == LLAMA_SPLIT_MODE_ROW ? "row" : "tensor"));
    }
    if (params.load_mode == LLAMA_LOAD_MODE_MLOCK || params.load_mode == LLAMA_LOAD_MODE_MMAP_MLOCK) {
        throw std::runtime_error(format("--moe-slots cannot be combined with --load-mode %s; hint: use --load-mode none, mmap or dio",
                llama_load_mode_name(params.load_mode)));
    }
    if (params.check_tensors) {
        throw std::runtime_error("--moe-slots cannot be combined with --check-tensors, which would read all experts; hint: leave out one of them");
    }
    for (const llama_device & d : devices) {
        const ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(d.dev);
        if (reg && strcmp(ggml_backend_reg_name(reg), "RPC") == 0) {
            throw std::runtime_error("--moe-slots cannot be combined with --rpc; hint: leave out one of them");
        }
    }
    for (const auto * o = ml.tensor_buft_overrides; o && o->pattern && !moe.takes_pools; ++o) { // else it says where the slots are
        const std::regex pattern(o->pattern);
        for (const auto & [il, tensors] : moe.layers) {
            for (const file_tensor & t : tensors) {
                if (std::regex_search(t.name, pattern)) {
                    throw std::runtime_error(format("--moe-slots cannot be combined with --cpu-moe, --n-cpu-moe or an --override-tensor that "
                            "matches experts: '%s' matches '%s'; hint: leave out one of them", o->pattern, t.name.c_str()));
                }
            }
        }
    }
}

static bool is_overridden(const moe_stream & moe, const llama_model_loader & ml) {
    for (const auto * o = ml.tensor_buft_overrides; o && o->pattern; ++o) {
        const std::regex pattern(o->pattern);
        for (const auto & [il, tensors] : moe.layers) {
            for (const file_tensor & t : tensors) {
                if (std::regex_search(t.name, pattern)) {
                    return true;
                }
            }
        }
    }
    return false;
}

// where upstream will put all layers, known before it does
static ggml_backend_dev_t only_device_of(const moe_stream & moe, const llama_model_loader & ml, const llama_hparams & hparams,
        const llama_model_params & params, const std::vector<llama_device> & devices) {
    const bool all_layers = params.n_gpu_layers < 0 || params.n_gpu_layers > (int32_t) hparams.n_layer_all; // the output counts as one
    return all_layers && devices.size() == 1 && functions_of(devices[0].dev) && !is_overridden(moe, ml) ? devices[0].dev : nullptr;
}

static void find_experts(moe_stream & moe, const llama_model_loader & ml, const llama_hparams & hparams) {
    const LLM_TN tn(ml.get_arch());
    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        for (const llm_tensor kind : expert_kinds) {
            const std::string name = tn(kind, "weight", il).str();
            const auto * w = ml.get_weight(name.c_str());
            if (!w) {
                continue;
            }
            file_tensor t;
            t.name         = name;
            t.file         = w->idx;
            t.offset       = w->offs;
            t.expert_bytes = w->tensor->nb[2];
            t.n_expert     = w->tensor->ne[2];
            if (moe.extra_bufts) {
                ggml_backend_buffer_type_t extra = extra_buft_for(w->tensor, std::max<int64_t>(1, hparams.n_expert_used(il)));
                // a piece of work must fit into a reader's buffer
                const bool can = extra && is_repack(extra) && 16 * w->tensor->nb[1] <= moe::reader::default_chunk_size;
                t.repack          = can ? extra : nullptr;
                t.is_unlike_stock = extra && !can;
            }
            moe.expert_bytes += ggml_nbytes(w->tensor);
            moe.layers[(int32_t) il].push_back(std::move(t));
        }
        const auto it = moe.layers.find((int32_t) il);
        if (it != moe.layers.end()) {
            block_identity b = { (int32_t) il, (int32_t) it->second[0].n_expert };
            if (const auto * w = ml.get_weight(format("blk.%u.ffn_gate_inp.weight", il).c_str())) {
                b.router_file   = w->idx;
                b.router_offset = w->offs;
                b.router_bytes  = ggml_nbytes(w->tensor);
            }
            moe.identity.push_back(b);
            moe.n_used_of[il] = (int32_t) hparams.n_expert_used(il);
            moe.n_used_max    = std::max(moe.n_used_max, moe.n_used_of[il]);
        }
    }
    moe.dense_bytes = ml.n_bytes - moe.expert_bytes;
}

static std::string fingerprint_of(const moe_stream & moe, const std::string & arch, const std::vector<moe::open_file> & files);
static std::vector<moe::open_file> descriptors_of(const llama_model_loader & ml);

// the map must be the model's
static void read_map(moe_stream & moe, const llama_model_loader & ml) {
    if (!moe.files.map) {
        return;
    }
    const char * const hint = "hint: make a map of this model (moestream map make)";
    try {
        moe.map = std::make_unique<moe::router_map>(moe::read_router_map(moe.files.map));
    } catch (const std::exception & e) {
        throw std::runtime_error(format("--moe-map %s", e.what()));
    }
    const std::string ours = fingerprint_of(moe, ml.arch_name, descriptors_of(ml));
    moe.report.fingerprint = ours;
    if (moe.map->fingerprint != ours) {
        throw std::runtime_error(format("--moe-map %s: this is a map of another model, '%s' (%s), not of the one to load (%s); %s", moe.files.map,
                moe::printable(moe.map->model_name).c_str(), moe::printable(moe.map->fingerprint).c_str(), ours.c_str(), hint));
    }
    for (const moe::map_layer & l : moe.map->layers) {
        const auto it = moe.layers.find(l.layer);
        if (it == moe.layers.end()) {
            throw std::runtime_error(format("--moe-map %s: the model has no experts in layer %d; %s", moe.files.map, l.layer, hint));
        }
        if ((int64_t) l.counts.size() != it->second[0].n_expert) {
            throw std::runtime_error(format("--moe-map %s: layer %d has %lld experts, the map counts %zu; %s", moe.files.map, l.layer,
                    (long long) it->second[0].n_expert, l.counts.size(), hint));
        }
    }
    if (moe.slots_wanted == MOE_SLOTS_MAP && !moe.map->has_slots) {
        throw std::runtime_error(format("--moe-slots map: %s does not say how many slots a layer gets; hint: moestream map make --budget, or --moe-slots N",
                moe.files.map));
    }
}

// a token must find slots beside those of pinned experts
static void check_pins(const moe_stream & moe, const llama_hparams & hparams) {
    for (const auto & [il, tensors] : moe.layers) {
        const int32_t n_slot = moe.n_slot_in(il, tensors[0].n_expert);
        const int32_t most   = n_slot - (int32_t) hparams.n_expert_used(il);
        if (moe.map_pin > most && (!moe.map || moe.map->find(il))) {
            throw std::runtime_error(format("--moe-map-pin %d is too many: layer %d has %d slots, and a token of this model uses %u experts; hint: %smore slots", moe.map_pin,
                    il, n_slot, hparams.n_expert_used(il), most > 0 ? format("--moe-map-pin %d or less, or ", most).c_str() : ""));
        }
    }
}

// what the map says of a layer that the model uses: the pinned experts, and the order of warm fills
static void apply_map(const moe_stream & moe, moe::layer_desc & d) {
    std::vector<int32_t> by_use;
    if (moe.map) {
        const moe::map_layer * l = moe.map->find(d.layer);
        if (!l) {
            throw std::runtime_error(format("--moe-map %s: layer %d is missing; hint: make a map of this model (moestream map make)", moe.files.map, d.layer));
        }
        by_use = l->by_use();
        for (int32_t i = 0; i < moe.map_pin && l->counts[by_use[i]] > 0; ++i) {
            d.kept.push_back(by_use[i]);
        }
    }
    for (int32_t i = 0; i < d.n_slot && moe.warm_s >= 0; ++i) {
        d.warm.push_back(moe.map ? by_use[i] : i);
    }
}

static uint64_t align_up(uint64_t n, uint64_t to) {
    return (n + to - 1) / to * to;
}

// the largest layer, and where in a half each tensor starts
static void lay_out_staging(moe_stream & moe) {
    for (auto & [il, tensors] : moe.layers) {
        uint64_t pos = 0;
        for (file_tensor & t : tensors) {
            t.staging_offset = pos;
            pos += align_up(t.expert_bytes * t.n_expert + std::max<uint64_t>(tensor_pad, t.pad_bytes), 4096);
        }
        moe.half_bytes = std::max(moe.half_bytes, pos);
    }
}

// enough that several reads are in flight while a matrix is computed with
static void lay_out_ring(moe_stream & moe) {
    moe.ring_bytes = 64; // tensors without elements are refused later, by name
    for (const auto & [il, tensors] : moe.layers) {
        for (const file_tensor & t : tensors) {
            moe.ring_bytes = std::max(moe.ring_bytes, align_up(t.expert_bytes, 64));
        }
    }
    moe.n_ring = (int32_t) std::clamp<uint64_t>((64ull << 20) / moe.ring_bytes, 8, 64);
}

// of an expert in a slab, or in an entry for guesses
static uint64_t slab_bytes(const std::vector<file_tensor> & tensors) {
    uint64_t n = 0;
    for (const file_tensor & t : tensors) {
        n += moe::ram_tier::aligned(t.expert_bytes);
    }
    return n;
}

// those of a layer that are wanted, those of the layer before that are still copied to slots, and some that were wrong
static void lay_out_guesses(moe_stream & moe) {
    moe.guess_bytes = 0;
    for (const auto & [il, tensors] : moe.layers) {
        moe.guess_bytes = std::max(moe.guess_bytes, slab_bytes(tensors));
    }
    moe.n_guess = moe.guesses_possible() ? 3 * moe.n_used_max : 0;
}

// what slots "auto" is told of the context to come
struct context_plan {
    int64_t   n_ctx;
    int64_t   n_ubatch;
    ggml_type type_k;
    ggml_type type_v;

    context_plan(const llama_model_loader & ml, const llama_hparams & hparams) {
        const auto get = [&](const char * key, int64_t absent) {
            const auto * o = setting(ml, key, LLAMA_KV_OVERRIDE_TYPE_INT);
            return o && o->val_i64 > 0 ? o->val_i64 : absent;
        };
        const auto get_type = [&](const char * key) {
            const auto * o = setting(ml, key, LLAMA_KV_OVERRIDE_TYPE_INT);
            return o && o->val_i64 >= 0 && o->val_i64 < GGML_TYPE_COUNT ? (ggml_type) o->val_i64 : GGML_TYPE_F16;
        };
        n_ctx    = get("moestream.n_ctx", hparams.n_ctx_train);
        n_ubatch = std::min(get("moestream.n_ubatch", 512), n_ctx);
        type_k   = get_type("moestream.type_k");
        type_v   = get_type("moestream.type_v");
    }
};

static uint64_t kv_bytes_estimate(const llama_hparams & hparams, const context_plan & plan) {
    uint64_t n = 0;
    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        n += hparams.n_embd_k_gqa(il) * ggml_type_size(plan.type_k) / ggml_blck_size(plan.type_k);
        n += hparams.n_embd_v_gqa(il) * ggml_type_size(plan.type_v) / ggml_blck_size(plan.type_v);
    }
    return n * plan.n_ctx;
}

// The mask of attention is there all the time, a graph's largest moment is in the experts. Once a context exists the true size is known,
// and looked at.
static uint64_t compute_bytes_estimate(const llama_hparams & hparams, const context_plan & plan, int64_t n_used) {
    const uint32_t * n_ff = std::max_element(hparams.n_ff_exp_arr.begin(), hparams.n_ff_exp_arr.begin() + hparams.n_layer_all);
    const uint64_t per_token = 6ull * hparams.n_embd + n_used * (2ull * (*n_ff > 0 ? *n_ff : hparams.n_ff()) + hparams.n_embd) + plan.n_ctx;
    return plan.n_ubatch * per_token * sizeof(float);
}

static void decide_slots(moe_stream & moe, const llama_model_loader & ml, const llama_hparams & hparams) {
    int64_t  n_expert_max = 0;
    int64_t  n_used_max   = 0;
    uint64_t slot_bytes   = 0;
    bool     is_repacked  = false;
    for (const auto & [il, tensors] : moe.layers) {
        n_used_max = std::max<int64_t>(n_used_max, hparams.n_expert_used(il));
        for (const file_tensor & t : tensors) {
            is_repacked  = is_repacked || t.repack;
            n_expert_max = std::max(n_expert_max, t.n_expert);
            slot_bytes  += t.expert_bytes;
        }
    }

    if (moe.slots_wanted == MOE_SLOTS_ALL) {
        moe.n_slot = (int32_t) n_expert_max;
        return;
    }
    if (moe.slots_wanted > 0 && moe.slots_wanted < n_used_max) {
        throw std::runtime_error(format("--moe-slots %lld is too few: a token of this model uses %lld experts a layer; hint: --moe-slots %lld or more",
                (long long) moe.slots_wanted, (long long) n_used_max, (long long) n_used_max));
    }
    if (moe.slots_wanted == MOE_SLOTS_MAP) {
        for (const moe::map_layer & l : moe.map->layers) {
            const int64_t n_used = hparams.n_expert_used(l.layer);
            if (l.n_slot < n_used) {
                throw std::runtime_error(format("--moe-slots map: %s gives layer %d %d slots, which is too few: a token of this model uses %lld experts a layer; "
                        "hint: make the map again with a larger --budget", moe.files.map, l.layer, l.n_slot, (long long) n_used));
            }
            int32_t & n_slot = moe.n_slot_of[l.layer];
            n_slot = (int32_t) std::min<int64_t>(std::max(l.n_slot, is_repacked ? 2 : 1), (int64_t) l.counts.size());
            moe.n_slot = std::max(moe.n_slot, n_slot);
        }
    }
    uint64_t map_bytes = 0; // of all slots
    for (const auto & [il, tensors] : moe.layers) {
        for (const file_tensor & t : tensors) {
            map_bytes += moe.n_slot_of.count(il) ? moe.n_slot_of[il] * t.expert_bytes : 0;
        }
    }
    const int64_t wanted = moe.slots_wanted == MOE_SLOTS_MAP ? moe.n_slot : moe.slots_wanted;
    if (moe.slots_wanted == MOE_SLOTS_AUTO && moe.memory.available_bytes == 0) {
        throw std::runtime_error("--moe-slots auto: this system does not say how much memory is available; hint: --moe-slots N");
    }
    if (wanted <= 0 && wanted != MOE_SLOTS_AUTO) {
        throw std::runtime_error(format("setting 'moestream.slots' is %lld: expected a number of slots, %d (auto), %d (all) or %d (map)",
                (long long) moe.slots_wanted, MOE_SLOTS_AUTO, MOE_SLOTS_ALL, MOE_SLOTS_MAP));
    }

    // what everything must fit into: the processor's memory, or that of the device where it all goes
    moe::memory_now memory = moe.memory;
    uint64_t reserve = memory.available_bytes / 20 + std::min<uint64_t>(512ull << 20, memory.available_bytes / 10); // for the program itself, and whatever else runs
    if (moe.only_device && moe.slots_wanted == MOE_SLOTS_AUTO) {
        size_t free = 0;
        size_t total = 0;
        ggml_backend_dev_memory(moe.only_device, &free, &total);
        memory  = { free, std::string("free on ") + ggml_backend_dev_name(moe.only_device) };
        reserve = free / 20 + std::min<uint64_t>(1280ull << 20, free / 4); // upstream's fit wants 1 GiB to be left
    }

    const context_plan plan(ml, hparams);
    const uint64_t kv_bytes = kv_bytes_estimate(hparams, plan);

    // The memory-fit pass and the real load must decide alike, whatever became of free memory in between.
    struct decision {
        int32_t  n_slot;
        bool     ring;
        uint64_t ram_bytes;
    };
    using key = std::tuple<std::string, uint64_t, uint64_t, int64_t, int64_t, uint64_t, staging_kind, int64_t, int32_t, ggml_backend_dev_t>;
    static std::mutex mutex;
    static std::map<key, decision> decided;
    std::lock_guard<std::mutex> lock(mutex);
    const key this_one = { ml.arch_name, ml.n_bytes, kv_bytes, plan.n_ubatch, wanted, map_bytes, moe.staging_wanted, moe.ram_wanted, moe.n_guess,
        moe.only_device };
    auto it = decided.find(this_one);
    if (it == decided.end()) {
        moe::slot_budget b;
        b.available_bytes = memory.available_bytes - reserve;
        b.resident_bytes  = moe.dense_bytes + kv_bytes + compute_bytes_estimate(hparams, plan, n_used_max)
            + (moe.io.n_in_flight > 0 ? moe.io.n_in_flight : moe::max_in_flight) * moe::reader::default_chunk_size;
        b.slot_bytes      = slot_bytes;
        b.n_expert        = (int32_t) n_expert_max;

        decision d;
        // upstream's repacked kernels take no tensor of one expert
        d.n_slot = (int32_t) std::min(std::max<int64_t>(wanted, is_repacked ? 2 : 1), n_expert_max);
        d.ring   = moe.staging_wanted == staging_kind::ring;
        b.staging_bytes = 2 * moe.half_bytes;
        if (moe.only_device) { // where it is always needed
            b.resident_bytes += b.staging_bytes;
            b.staging_bytes = 0;
        } else if (moe.staging_wanted == staging_kind::automatic && moe.overlap && memory.available_bytes > 0) {
            d.ring = moe::staging_is_too_large(b, map_bytes > 0 ? map_bytes : wanted > 0 ? d.n_slot * slot_bytes : 0);
        }
        if (d.ring) {
            b.staging_bytes = moe.staging_bytes();
        }
        const uint64_t entries = moe.n_guess * moe.guess_bytes;
        if (moe.slots_wanted == MOE_SLOTS_AUTO) {
            d.n_slot = moe::slots_that_fit(b);
            if (d.n_slot < n_expert_max) { // then there is something to keep below the slots, and to guess
                b.resident_bytes += moe.only_device ? 0 : entries + std::max<int64_t>(moe.ram_wanted, 0);
                d.n_slot = moe::slots_that_fit(b);
            }
        }
        d.ram_bytes = std::max<int64_t>(moe.ram_wanted, 0);
        if (moe.ram_wanted == MOE_RAM_AUTO) {
            const uint64_t taken = b.resident_bytes + b.staging_bytes + (map_bytes > 0 ? map_bytes : d.n_slot * slot_bytes)
                + (moe.slots_wanted == MOE_SLOTS_AUTO ? 0 : entries);
            d.ram_bytes = b.available_bytes - std::min(b.available_bytes, taken);
        }
        if (d.n_slot < n_used_max) {
            const auto mib = [](uint64_t n) { return n / 1048576.0; };
            throw std::runtime_error(format("--moe-slots auto: %lld slots a layer, the fewest there can be, take %.1f MiB (%.1f of them KV cache for a context of %lld), "
                    "and with a margin %.1f of the %.1f MiB available (%s) may be used; hint: %sa smaller context (-c), free memory, or --moe-slots %lld to try all the same",
                    (long long) n_used_max, mib(b.resident_bytes + b.staging_bytes + n_used_max * slot_bytes), mib(kv_bytes),
                    (long long) plan.n_ctx, mib(b.available_bytes), mib(memory.available_bytes), memory.limited_by.c_str(),
                    moe.ram_wanted > 0 ? "a smaller --moe-ram, or none; " : "", (long long) n_used_max));
        }
        it = decided.emplace(this_one, d).first;
    }
    moe.n_slot     = it->second.n_slot;
    moe.ram_budget = it->second.ram_bytes;
    if (!it->second.ring) {
        moe.n_ring = 0;
    }
}

std::shared_ptr<moe_stream> moe_load_begin(
        llama_model_loader & ml, const llama_hparams & hparams, const llama_model_params & params,
        const std::vector<llama_device> & devices) {
    const auto * slots = setting(ml, "moestream.slots", LLAMA_KV_OVERRIDE_TYPE_INT);
    if (!slots || slots->val_i64 == 0) {
        static const std::pair<const char *, const char *> needs_slots[] = {
            { "moestream.io_threads", "--moe-io-threads" }, { "moestream.io", "--moe-io" },
            { "moestream.io_backend", "--moe-io-backend" }, { "moestream.policy", "--moe-policy" }, { "moestream.overlap", "--moe-overlap" },
            { "moestream.staging", "--moe-staging" }, { "moestream.ram", "--moe-ram" }, { "moestream.prefetch", "--moe-prefetch" }, { "moestream.trace_limit", "--moe-trace-limit" },
            { "moestream.map_pin", "--moe-map-pin" }, { "moestream.warm", "--moe-warm" }, { "moestream.gpu_path", "--moe-gpu-path" },
            { "moestream.pool", "--moe-pool" }, { "moestream.require_gpu", "--moe-require-gpu" },
        };
        for (const auto & [key, flag] : needs_slots) {
            if (ml.kv_overrides.count(key)) {
                throw std::runtime_error(format("%s does nothing without --moe-slots; hint: add --moe-slots N, or leave out %s", flag, flag));
            }
        }
        if (read_files(ml).trace) {
            throw std::runtime_error("--moe-trace does nothing without --moe-slots; hint: add --moe-slots N, or leave out --moe-trace");
        }
        if (read_files(ml).map) {
            throw std::runtime_error("--moe-map does nothing without --moe-slots; hint: add --moe-slots N, or leave out --moe-map");
        }
        return nullptr;
    }

    auto moe = std::make_shared<moe_stream>();
    moe->slots_wanted = slots->val_i64;
    moe->extra_bufts  = params.use_extra_bufts;
    read_settings(*moe, ml);

    if (ml.files.empty()) {
        throw std::runtime_error("--moe-slots needs a model file to read experts from");
    }
    find_experts(*moe, ml, hparams);
    if (moe->layers.empty()) {
        throw std::runtime_error(format("--moe-slots: this is not a mixture-of-experts model (architecture '%s' has no expert tensors here); "
                "hint: leave out --moe-slots", ml.arch_name.c_str()));
    }
    check_model(*moe, hparams);
    for (const llama_device & d : devices) {
        moe->with_devices = true;
        moe->takes_pools  = moe->takes_pools || functions_of(d.dev);
    }
    moe->only_device = only_device_of(*moe, ml, hparams, params, devices);
    refuse_combinations(*moe, ml, params, devices);
    read_map(*moe, ml);
    lay_out_staging(*moe);
    lay_out_ring(*moe);
    lay_out_guesses(*moe);
    moe->memory = moe::available_memory();
    decide_slots(*moe, ml, hparams);
    check_pins(*moe, hparams);

    // unless asked for, no mapping: dense weights are read once and stay resident
    if (params.load_mode == LLAMA_LOAD_MODE_AUTO) {
        ml.use_mmap = false;
    }
    moe->maps_dense = ml.use_mmap;
#ifdef POSIX_FADV_RANDOM
    for (const auto & file : ml.files) { // reading dense weights must not read ahead into the experts behind them
        posix_fadvise(file->file_id(), 0, 0, POSIX_FADV_RANDOM);
    }
#endif
    return held_by_model(moe);
}

// upstream's loader reserves as much behind a tensor whose rows are no multiple of this, and its kernels read it
static constexpr int64_t device_row_elements = 512;

ggml_backend_buffer_type_t moe_load_tensor(
        moe_stream * moe, llama_model_loader & ml, const LLM_TN_IMPL & tn, int flags, ggml_tensor * t_meta,
        const std::function<ggml_backend_buffer_type_t(ggml_tensor *)> & upstream) {
    if (!moe || (flags & llama_model_loader::TENSOR_SKIP)) {
        return upstream(t_meta);
    }
    check_type(tn, t_meta);
    const auto it = moe->layers.find(tn.bid);
    if (it == moe->layers.end()) {
        return upstream(t_meta);
    }
    const std::string name = tn.str();
    for (file_tensor & t : it->second) {
        if (t.name != name) {
            continue;
        }
        t.place = pool_buft();
        if (moe->takes_pools) {
            const ggml_backend_buffer_type_t chosen = upstream(t_meta);
            if (!chosen) {
                return nullptr; // the model does not use it
            }
            if (takes_pool(chosen)) {
                t.place  = device_pool_buft(chosen, moe->pool_wanted == pool_kind::host);
                t.repack = nullptr; // that is for the processor's kernels
                t.is_unlike_stock = false;
                if (ggml_is_quantized(t_meta->type) && t_meta->ne[0] % device_row_elements != 0) {
                    t.pad_bytes = std::min<uint64_t>(ggml_row_size(t_meta->type, device_row_elements), t.expert_bytes);
                }
            }
        }
        ml.size_data -= ggml_nbytes(t_meta);
        t_meta->ne[2] = moe->n_slot_in(tn.bid, t_meta->ne[2]);
        t_meta->nb[3] = t_meta->nb[2] * t_meta->ne[2];
        return t.place;
    }
    return upstream(t_meta);
}

// the mailbox, and behind it what slabs hold
static constexpr size_t mailbox_bytes = (sizeof(moe::device_mailbox) + 4095) / 4096 * 4096;

// why the device cannot look after its slots itself; empty: it can
static std::string why_no_mailbox(const moe_stream & moe) {
    for (const auto & [place, p] : moe.places) {
        if (is_device_pool(place) && is_in_host(place)) {
            return "--moe-pool host";
        }
    }
    for (const auto & [il, tensors] : moe.layers) {
        if (tensors[0].n_expert > moe::device_max_rows) {
            return format("layer %d has more than %d experts", il, moe::device_max_rows);
        }
    }
    if (moe.policy != moe::policy_kind::lru) {
        return format("--moe-policy %s", moe::policy_name(moe.policy));
    }
    return moe.files.trace ? "--moe-trace" : "";
}

static uint64_t device_ram_budget(const moe_stream & moe);
static std::vector<moe::device_tier::layer> tier_layers(const moe_stream & moe);

// Slabs, and what else host and devices both see, in page-locked memory; as much as asked for, or less where nobody has asked and less can be
// locked. False: not even enough to hand a batch's experts over.
static bool lock_slabs(moe_stream & moe) {
    ggml_backend_dev_t dev = nullptr;
    size_t n_expert = 0;
    for (const auto & [il, tensors] : moe.layers) {
        n_expert += tensors[0].n_expert;
        dev = is_device_pool(tensors[0].place) ? ggml_backend_buft_get_device(tensors[0].place) : dev;
    }
    moe.shared.reset(alloc_locked(dev, mailbox_bytes + n_expert * sizeof(int64_t)));
    const uint64_t wanted = device_ram_budget(moe);
    for (moe.ram_budget = wanted; moe.shared; moe.ram_budget /= 2) {
        const moe::ram_tier slabs = moe::device_tier::plan(tier_layers(moe), moe.ram_budget);
        for (const auto & [il, tensors] : moe.layers) {
            const auto i = (int32_t) std::distance(moe.layers.begin(), moe.layers.find(il));
            if (is_device_pool(tensors[0].place) && !moe.resident.count(il) && slabs.n_slab_for(i) < moe.n_used_of.at(il)) {
                return false;
            }
        }
        moe.slabs.reset(alloc_locked(dev, slabs.bytes()));
        if (moe.slabs || (moe.ram_given && moe.ram_wanted > 0)) {
            break;
        }
    }
    if (moe.slabs && moe.ram_budget < wanted) {
        LLAMA_LOG_WARN("moestream: only %.1f MiB of memory could be locked for the RAM tier, of %.1f wanted\n", moe.ram_budget / 1048576.0, wanted / 1048576.0);
    }
    return moe.slabs != nullptr;
}

static void decide_gpu_path(moe_stream & moe, bool no_alloc) {
    const std::string why = why_no_mailbox(moe);
    if (moe.gpu_path == gpu_path_kind::mailbox && !why.empty()) {
        throw std::runtime_error(format("--moe-gpu-path mailbox is not possible: %s; hint: leave out one of them, or --moe-gpu-path copy", why.c_str()));
    }
    moe.by_device = moe.gpu_path != gpu_path_kind::copy && why.empty();
    moe.report.gpu_path = moe.by_device ? "mailbox" : "copy";
    moe.report.gpu_path_reason = moe.gpu_path != gpu_path_kind::automatic ? "as asked" : why;
    // a layer whose experts all have slots needs nobody to look after them
    if (moe.by_device) {
        size_t n_streamed = 0;
        for (const auto & [il, tensors] : moe.layers) {
            if (is_device_pool(tensors[0].place)) {
                const bool all = tensors[0].pool->ne[2] >= tensors[0].n_expert;
                n_streamed += !all;
                if (all) {
                    moe.resident.insert(il);
                }
            }
        }
        if (n_streamed == 0) {
            moe.by_device = false;
            moe.report.gpu_path = "resident";
        } else if (!no_alloc && !lock_slabs(moe)) {
            const std::string what = "the memory for it cannot be locked";
            if (moe.gpu_path == gpu_path_kind::mailbox || moe.ram_wanted != 0) {
                throw std::runtime_error(format("%s: %s; hint: a smaller --moe-ram, raise the limit of locked memory (ulimit -l), or --moe-gpu-path copy, which needs "
                        "little of it", moe.ram_wanted != 0 ? "--moe-ram" : "--moe-gpu-path mailbox", what.c_str()));
            }
            LLAMA_LOG_WARN("moestream: %s: the host looks after the slots (--moe-gpu-path copy)\n", what.c_str());
            moe.slabs.reset();
            moe.shared.reset();
            moe.resident.clear(); // their layers go on to need staging
            moe.by_device = false;
            moe.report.gpu_path = "copy";
            moe.report.gpu_path_reason = what;
        }
    }
}

// what is not built yet for slots in a device's memory
static void refuse_on_device(const moe_stream & moe) {
    std::string where;
    for (const auto & [place, p] : moe.places) {
        where = is_device_pool(place) ? ggml_backend_buft_name(own_buft(place)) : where;
    }
    if (moe.slots_wanted == MOE_SLOTS_AUTO && !moe.only_device) {
        throw std::runtime_error(format("--moe-slots auto cannot share memory out between %s and other places; hint: --moe-slots N, all layers on one device (-ngl 99), or "
                "--cpu-moe to have the slots in the memory of the processor", where.c_str()));
    }
    if (moe.staging_wanted == staging_kind::ring) {
        throw std::runtime_error(format("--moe-staging ring is for experts on the cpu, these are on %s; hint: --moe-staging full, or --cpu-moe", where.c_str()));
    }
    const bool by_host = moe.report.gpu_path == "copy";
    if (moe.prefetch == moe::prefetch_kind::on && by_host) {
        throw std::runtime_error(format("--moe-prefetch on is for experts on the cpu, these are on %s; hint: leave out --moe-prefetch on, or --cpu-moe", where.c_str()));
    }
    if (moe.ram_wanted != 0 && by_host) {
        throw std::runtime_error(format("--moe-ram: the slots on %s are looked after by the host (%s), which has no RAM tier below them; hint: leave out --moe-ram, or what "
                "stands in the way", where.c_str(), moe.report.gpu_path_reason.c_str()));
    }
}

// asked for with --moe-require-gpu
static void check_on_gpu(const moe_stream & moe) {
    size_t n_on_cpu = 0;
    for (const auto & [il, tensors] : moe.layers) {
        n_on_cpu += !is_device_pool(tensors[0].place);
    }
    if (moe.require_gpu && n_on_cpu > 0) {
        throw std::runtime_error(format("--moe-require-gpu: the experts of %zu of %zu layers would be computed on the cpu%s; hint: -ngl 99 without --cpu-moe, a build for the card "
                "(moestream build --backend cuda), or leave out --moe-require-gpu", n_on_cpu, moe.layers.size(), moe.takes_pools ? "" : ", because no device here takes slots"));
    }
}

// what of the experts that devices compute a device tier knows
static std::vector<moe::device_tier::layer> tier_layers(const moe_stream & moe) {
    std::vector<moe::device_tier::layer> found;
    for (const auto & [il, tensors] : moe.layers) {
        found.push_back({ il, (int32_t) tensors[0].n_expert, {}, {} });
        for (const file_tensor & t : tensors) {
            if (is_device_pool(t.place) && !moe.resident.count(il)) {
                found.back().parts.push_back({ (int32_t) t.file, t.offset, t.expert_bytes });
            }
        }
    }
    return found;
}

// Of page-locked slabs: as asked; else half of what is available, because locked memory is lost to everybody else; and always enough to
// hand a batch's experts over.
static uint64_t device_ram_budget(const moe_stream & moe) {
    uint64_t experts = 0;
    uint64_t largest = 0;
    std::set<uint64_t> sizes;
    for (const auto & [il, tensors] : moe.layers) {
        if (is_device_pool(tensors[0].place) && !moe.resident.count(il)) {
            const uint64_t bytes = slab_bytes(tensors);
            experts += bytes * tensors[0].n_expert;
            largest  = std::max(largest, bytes);
            sizes.insert(bytes);
        }
    }
    const uint64_t least = std::min<uint64_t>(experts, 2 * 8 * moe.n_used_max * largest * sizes.size());
    if (moe.ram_wanted > 0) {
        return std::max<uint64_t>(moe.ram_wanted, least);
    }
    if (moe.ram_given && moe.ram_wanted == 0) {
        return least;
    }
    const uint64_t available = moe.memory.available_bytes;
    const uint64_t reserve   = available / 20 + std::min<uint64_t>(512ull << 20, available / 10);
    uint64_t others = 0; // slots in the processor's memory
    for (const auto & [il, tensors] : moe.layers) {
        for (const file_tensor & t : tensors) {
            others += is_device_pool(t.place) ? 0 : ggml_nbytes(t.pool);
        }
    }
    const uint64_t most = available - std::min(available, reserve + others);
    return std::clamp<uint64_t>(moe.ram_wanted == MOE_RAM_AUTO ? most : std::min(most, available / 2), least, experts);
}

// of a layer: what guesses are made with
static const char * const router_tensors[] = {
    "ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias",
};

void moe_load_layout(moe_stream * moe, llama_model_loader & ml) {
    if (!moe) {
        return;
    }
    // keep what the model really uses (layers of a skipped MTP head stay unread)
    std::map<ggml_backend_buffer_type_t, bool> needs_staging; // by place
    for (auto it = moe->layers.begin(); it != moe->layers.end(); ) {
        for (file_tensor & t : it->second) {
            const auto it_ctx = ml.ctx_map.find({ t.place ? t.place : pool_buft(), false });
            t.pool = it_ctx == ml.ctx_map.end() ? nullptr : ggml_get_tensor(it_ctx->second.get(), t.name.c_str());
            if (!t.pool) {
                continue;
            }
            moe->places[t.place];
            if (t.place != it->second[0].place) {
                throw std::runtime_error(format("--moe-slots: the experts of layer %d are in two places, '%s' on %s and '%s' on %s; hint: an --override-tensor that "
                        "matches all expert tensors of a layer, or none", it->first, it->second[0].name.c_str(), ggml_backend_buft_name(it->second[0].place),
                        t.name.c_str(), ggml_backend_buft_name(t.place)));
            }
        }
        const bool used = it->second[0].pool != nullptr;
        it = used ? std::next(it) : moe->layers.erase(it);
    }
    if (moe->places.empty()) {
        throw std::runtime_error("--moe-slots: the model uses none of its expert tensors");
    }
    check_on_gpu(*moe);
    if (moe->on_device()) {
        decide_gpu_path(*moe, ml.no_alloc);
        refuse_on_device(*moe);
        moe->n_ring = 0;
    } else if (moe->gpu_path != gpu_path_kind::automatic || moe->pool_wanted != pool_kind::automatic) {
        const char * flag = moe->gpu_path != gpu_path_kind::automatic ? "--moe-gpu-path" : "--moe-pool";
        throw std::runtime_error(format("%s does nothing: the experts of all layers are computed on the cpu; hint: leave out %s, or -ngl 99 without --cpu-moe and a build for "
                "the card (moestream build --backend cuda)", flag, flag));
    }
    for (const auto & [il, tensors] : moe->layers) {
        for (const file_tensor & t : tensors) {
            // a device takes batches of more than a few tokens through staging only
            if (t.pool && !moe->resident.count(il) && (is_device_pool(t.place) || t.pool->ne[2] < t.n_expert)) {
                needs_staging[t.place] = true;
            }
        }
    }
    moe->half_bytes = 0;
    lay_out_staging(*moe);
    bool any = false;
    for (const auto & [place, needed] : needs_staging) {
        if (needed) {
            any = true;
            ggml_tensor * staging = ggml_new_tensor_1d(ml.ctx_map.at({ place, false }).get(), GGML_TYPE_I8, moe->staging_bytes());
            ggml_set_name(staging, "moe_staging");
            moe->places[place].staging = staging;
        }
    }
    if (!any) {
        moe->half_bytes = 0;
        moe->n_ring     = 0;
    }
    if (moe->on_device() || !any) { // copies to and from a device's slots are not made for them
        moe->ram_budget = moe->by_device ? moe->ram_budget : 0;
        moe->n_guess    = 0;
    }
    if (moe->ram_budget > 0 && !moe->by_device) {
        ggml_context * host_ctx = ml.ctx_map.at({ pool_buft(), false }).get();
        std::vector<moe::ram_tier::layer_size> sizes;
        for (const auto & [il, tensors] : moe->layers) {
            sizes.push_back({ slab_bytes(tensors), (int32_t) tensors[0].n_expert, (int32_t) tensors[0].pool->ne[2] });
        }
        const uint64_t bytes = moe::ram_tier(sizes, moe->ram_budget).bytes();
        if (bytes > 0) {
            moe->ram = ggml_new_tensor_1d(host_ctx, GGML_TYPE_I8, bytes + tensor_pad);
            ggml_set_name(moe->ram, "moe_ram");
        } else if (moe->ram_wanted != MOE_RAM_AUTO) {
            throw std::runtime_error(format("--moe-ram %lld has no room for an expert of this model, which takes %llu bytes; hint: --moe-ram 1GiB, say, or leave it out",
                    (long long) moe->ram_wanted, (unsigned long long) slab_bytes(moe->layers.begin()->second)));
        }
    }
    for (const auto & [il, tensors] : moe->layers) { // while the contexts are the loader's
        for (const char * name : router_tensors) {
            for (const auto & [key, ctx_weights] : ml.ctx_map) {
                const std::string full = format("blk.%d.%s", il, name);
                if (ggml_tensor * t = ggml_get_tensor(ctx_weights.get(), full.c_str())) {
                    moe->routers[full] = t;
                }
            }
        }
    }
    if (moe->n_guess > 0) {
        moe->guesses = ggml_new_tensor_1d(ml.ctx_map.at({ pool_buft(), false }).get(), GGML_TYPE_I8, moe->n_guess * moe->guess_bytes + tensor_pad);
        ggml_set_name(moe->guesses, "moe_guesses");
    }
}

// The pages of these bytes are no longer the file's, and nobody's: their addresses stay taken. Unmapped ones would be given to the next
// allocation, the read buffers say, and upstream unmaps the whole of what lies behind the last mapped weight when loading ends.
static void take_off_map(const llama_mmap & mapping, uint64_t first, uint64_t end) {
#ifndef _WIN32
    const uint64_t page = sysconf(_SC_PAGESIZE);
    first = (first + page - 1) / page * page;
    end   = end / page * page;
    if (first < end && mmap((char *) mapping.addr() + first, end - first, PROT_NONE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
        throw std::runtime_error(format("cannot take experts off the mapped file: %s; hint: --load-mode none", strerror(errno)));
    }
#endif
}

void moe_load_mapped(moe_stream * moe, llama_model_loader & ml) {
    if (!moe || ml.mappings.empty()) {
        return;
    }
    std::vector<std::map<uint64_t, uint64_t>> experts(ml.mappings.size()); // of each file: first byte -> byte behind the last
    for (const auto & [il, tensors] : moe->layers) {
        for (const file_tensor & t : tensors) {
            const uint64_t end = t.offset + t.expert_bytes * t.n_expert;
            take_off_map(*ml.mappings.at(t.file), t.offset, end);
            experts[t.file][t.offset] = end;
        }
    }
#ifdef __linux__
    // What is between them is asked for now and exactly: page faults would read ahead, up to megabytes of experts each.
    const uint64_t page = sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < ml.mappings.size(); ++i) {
        uint64_t begin = 0;
        madvise(ml.mappings[i]->addr(), ml.mappings[i]->size(), MADV_RANDOM);
        experts[i][ml.mappings[i]->size()] = ml.mappings[i]->size();
        for (const auto & [first, end] : experts[i]) {
            if (first > begin) {
                const uint64_t from = begin / page * page;
                madvise((char *) ml.mappings[i]->addr() + from, first - from, MADV_WILLNEED);
            }
            begin = end;
        }
    }
#endif
}

// A tensor struct like the pool's, but full width, inside staging; parity picks the half. With a ring its rows are nowhere: kernels get
// each matrix from the gate, and the first n_slot rows are the pool's, for ids of rows with any bytes.
static ggml_tensor * make_twin(moe_stream & moe, const ggml_tensor & staging, const file_tensor & t, int32_t parity) {
    ggml_tensor * twin = ggml_new_tensor_3d(moe.ctx_staging.get(), t.pool->type, t.pool->ne[0], t.pool->ne[1], t.n_expert);
    ggml_format_name(twin, "%s.staging", t.name.c_str());
    const uint64_t offset = parity * moe.half_bytes + t.staging_offset;
    if (moe.n_ring > 0) {
        twin->buffer = t.pool->buffer;
        twin->data   = t.pool->data;
        if (t.repack && twin->data) {
            ggml_backend_buffer_init_tensor(twin->buffer, twin);
        }
    } else if (staging.data) {
        ggml_backend_tensor_alloc(t.repack ? moe.repack_view.get() : staging.buffer, twin, (char *) staging.data + offset);
    } else {
        twin->buffer = staging.buffer; // the memory-fit pass
    }
    return twin;
}

static const void * gate_take(const moe_gate * gate, int32_t step, int ith, int n_thread) {
    const part_gate * g = (const part_gate *) gate;
    return g->moe->stream->take(g->i_layer, g->staged, g->part, step, ith, n_thread);
}

// layers and their parts in order
static void add_gate(moe_stream & moe, const ggml_tensor * w, int32_t i_layer, int32_t part, bool staged) {
    part_gate & g = moe.gates[w];
    g.order   = nullptr;
    g.n_order = 0;
    g.take    = gate_take;
    g.moe     = &moe;
    g.i_layer = i_layer;
    g.part    = part;
    g.staged  = staged;
    moe.layer_gates[2 * i_layer + staged].push_back(&g);
}

// Decides how to read, opens the files for it, and writes into the report what is in force and why.
static void open_files(moe_stream & moe, const std::vector<moe::open_file> & files, std::unique_ptr<moe::file_source> & source) {
    moe::stream_report & r = moe.report;
    moe::io_wish wish = moe.io;
    std::string no_uring;
    if (wish.backend != moe::io_backend::threads && !moe::uring_works(no_uring)) {
        if (wish.backend == moe::io_backend::automatic) {
            no_uring.clear(); // nobody asked for it
        }
        wish.backend = moe::io_backend::threads;
    }
    // through the page cache only if it can hold the experts beside everything else
    uint64_t need = moe.expert_bytes + moe.dense_bytes + (moe.host_staging() ? moe.staging_bytes() : 0);
    for (const ggml_tensor * t : { moe.ram, moe.guesses }) {
        need += t ? ggml_nbytes(t) : 0;
    }
    for (const auto & [il, tensors] : moe.layers) {
        for (const file_tensor & t : tensors) {
            need += t.place == pool_buft() ? ggml_nbytes(t.pool) : 0;
        }
    }
    const bool     fits = moe.memory.available_bytes == 0 || need <= moe.memory.available_bytes;

    moe::probe_result probe;
    if (wish.mode != moe::io_mode::automatic) {
        probe.note = "--moe-io says how to read";
    } else if (fits && wish.n_in_flight > 0) {
        probe.note = "nothing is left to choose";
    } else if (moe.expert_bytes < moe::probe_bytes_min) {
        probe.note = "the experts are few";
    } else {
        moe::probe_plan plan;
        plan.buffered = !fits;
        plan.threads  = wish.backend != moe::io_backend::uring;
        plan.uring    = wish.backend != moe::io_backend::threads;
        plan.seed     = std::random_device()();
        if (wish.n_in_flight > 0) {
            plan.in_flight = { wish.n_in_flight };
        }
        std::vector<moe::probe_place> places;
        for (const auto & [il, tensors] : moe.layers) {
            for (const file_tensor & t : tensors) {
                places.push_back({ (int32_t) t.file, t.offset, t.expert_bytes, (int32_t) t.n_expert });
            }
        }
        probe = moe::probe_io(files, places, plan);
    }

    moe::io_choice choice = moe::choose_io(wish, fits, probe);
    std::string error;
    source = moe::make_file_source(files, choice.mode, error, choice.backend);
    if (!source && wish.mode == moe::io_mode::automatic && choice.mode == moe::io_mode::direct) {
        probe.direct_refusal = error; // it was not measured
        choice = moe::choose_io(wish, fits, probe);
        source = moe::make_file_source(files, choice.mode, error, choice.backend);
    }
    if (!source) {
        throw std::runtime_error(wish.mode == moe::io_mode::automatic ? error : format("--moe-io %s: %s; hint: --moe-io %s",
                moe::io_mode_name(wish.mode), error.c_str(), wish.mode == moe::io_mode::direct ? "buffered" : "direct"));
    }

    if (wish.mode != moe::io_mode::automatic) {
        r.io_reason = "as asked";
    } else if (fits) {
        r.io_reason = "the page cache can hold the experts";
    } else if (!probe.direct_refusal.empty()) {
        r.io_reason = probe.direct_refusal;
    } else {
        r.io_reason = format("%.1f GiB of experts exceed the %.1f GiB available (%s)%s", moe.expert_bytes / 1073741824.0,
                moe.memory.available_bytes / 1073741824.0, moe.memory.limited_by.c_str(),
                choice.buffered_is_faster ? ", but buffered reads are much faster" : "");
    }
    if (!no_uring.empty()) {
        r.io_reason += "; no io_uring: " + no_uring;
    }
    if (!choice.measured.empty()) {
        r.io_reason += "; measured: " + choice.measured;
    }
    r.io_requested  = moe::io_mode_name(moe.io.mode);
    r.io_mode       = moe::io_mode_name(choice.mode);
    r.io_backend    = moe::io_backend_name(choice.backend);
    r.io_in_flight  = choice.n_in_flight;
    r.io_threads    = moe::n_workers(choice.backend, choice.n_in_flight, (int32_t) std::thread::hardware_concurrency());
    r.io_probe_note = probe.note;
    for (const moe::probe_rate & p : probe.rates) {
        r.io_probe.push_back({ moe::io_mode_name(p.mode), moe::io_backend_name(p.backend), p.n_in_flight, p.bytes_per_s });
    }
}

// of the tests' switches: 0 is off
static bool is_set(const char * name) {
    const char * value = getenv(name);
    return value && *value && strcmp(value, "0") != 0;
}

// the loader does not keep the paths
static std::string path_of(const llama_file & file) {
#ifdef __linux__
    char path[4096];
    const std::string link = "/proc/self/fd/" + std::to_string(file.file_id());
    const ssize_t n = readlink(link.c_str(), path, sizeof(path));
    if (n > 0) {
        return std::string(path, n);
    }
#endif
    return "descriptor " + std::to_string(file.file_id());
}

static std::string base_name(const std::string & path) {
    return path.substr(path.find_last_of('/') + 1);
}

static std::vector<moe::open_file> descriptors_of(const llama_model_loader & ml) {
    std::vector<moe::open_file> files;
    for (const auto & file : ml.files) {
        files.push_back({ file->file_id(), path_of(*file) });
    }
    return files;
}

static uint64_t fnv1a(uint64_t h, const void * data, size_t size) {
    for (size_t i = 0; i < size; ++i) {
        h = (h ^ ((const uint8_t *) data)[i]) * 0x100000001b3u;
    }
    return h;
}

// What traces and maps of this model are known by (docs/traces.md), the same for every type that its experts may have. Python's twin is
// moestream/routing/fingerprint.py.
static std::string fingerprint_of(const moe_stream & moe, const std::string & arch, const std::vector<moe::open_file> & files) {
    std::string error;
    const auto source = moe::make_file_source(files, moe::io_mode::buffered, error);
    if (!source) {
        throw std::runtime_error(error);
    }
    uint64_t h = fnv1a(0xcbf29ce484222325u, arch.c_str(), arch.size() + 1);
    for (const block_identity & b : moe.identity) {
        uint8_t numbers[8];
        for (int i = 0; i < 4; ++i) {
            numbers[i]     = (uint8_t) ((uint32_t) b.layer    >> (8 * i));
            numbers[i + 4] = (uint8_t) ((uint32_t) b.n_expert >> (8 * i));
        }
        h = fnv1a(h, numbers, sizeof(numbers));
        uint8_t router[4096];
        const uint64_t size = std::min<uint64_t>(b.router_bytes, sizeof(router));
        for (uint64_t n = 0; n < size; ) {
            const int64_t got = source->read_at((int32_t) b.router_file, router + n, size - n, b.router_offset + n);
            if (got == -EINTR) {
                continue;
            }
            if (got <= 0) {
                throw std::runtime_error(format("reading the router of layer %d from '%s' failed: %s", b.layer,
                        files[b.router_file].name.c_str(), got < 0 ? strerror((int) -got) : "the file ends there"));
            }
            n += (uint64_t) got;
        }
        h = fnv1a(h, router, size);
    }
    return format("%016llx", (unsigned long long) h);
}

// A model that is loaded again, as llama-server does after it has slept, goes on with its trace.
static void open_trace(moe_stream & moe, const llama_model_loader & ml, const std::vector<moe::layer_desc> & descs) {
    moe::trace_header header = { moe.report.fingerprint, ml.arch_name, moe.report.model, moe.n_used_max, {} };
    for (const moe::layer_desc & d : descs) {
        header.layers.push_back({ d.layer, d.n_expert });
    }
    static std::mutex mutex;
    static std::set<std::string> begun; // by this process
    std::lock_guard<std::mutex> lock(mutex);
    std::string error;
    moe.trace = moe::trace_writer::open(moe.files.trace, header, moe.trace_limit, begun.count(moe.files.trace) > 0, error);
    if (!moe.trace) {
        throw std::runtime_error("--moe-trace: " + error);
    }
    begun.insert(moe.files.trace);
}

// a weight that may be read where it is
static const ggml_tensor * find_plain(const moe_stream & moe, const std::string & name) {
    const auto it = moe.routers.find(name);
    const ggml_tensor * t = it == moe.routers.end() ? nullptr : it->second;
    return t && t->data && t->buffer && ggml_backend_buffer_is_host(t->buffer) && !is_repack(ggml_backend_buffer_get_type(t->buffer)) ? t : nullptr;
}

// [n] floats that are there, else null
static const float * find_floats(const moe_stream & moe, const std::string & name, int64_t n) {
    const ggml_tensor * t = find_plain(moe, name);
    return t && t->type == GGML_TYPE_F32 && ggml_nelements(t) == n ? (const float *) t->data : nullptr;
}

// the router of a layer that streams, for guesses in the layer before it
static moe::router_weights find_router(const moe_stream & moe, int32_t il) {
    moe::router_weights r;
    const ggml_tensor * t = find_plain(moe, format("blk.%d.ffn_gate_inp.weight", il));
    const auto n_expert = moe.layers.at(il)[0].n_expert;
    if (!t || t->ne[1] != n_expert || ggml_n_dims(t) > 2 || (t->type != GGML_TYPE_F32 && !ggml_get_type_traits(t->type)->to_float)) {
        return r;
    }
    r.rows        = (const uint8_t *) t->data;
    r.row_bytes   = t->nb[1];
    r.n_embd      = t->ne[0];
    r.n_expert    = (int32_t) n_expert;
    r.n_used      = moe.n_used_of.at(il);
    r.to_float    = t->type == GGML_TYPE_F32 ? nullptr : ggml_get_type_traits(t->type)->to_float;
    r.block_size  = ggml_blck_size(t->type);
    r.block_bytes = ggml_type_size(t->type);
    r.bias        = find_floats(moe, format("blk.%d.ffn_gate_inp.bias", il), n_expert);
    r.choice_bias = find_floats(moe, format("blk.%d.exp_probs_b.bias", il), n_expert);
    return r;
}

// a weight of the layer's router in the memory of the device that looks after its slots; null: there is none such
static ggml_tensor * router_on_device(const moe_stream & moe, int32_t il, const char * name) {
    const auto it = moe.routers.find(format("blk.%d.%s", il, name));
    ggml_tensor * t = it == moe.routers.end() ? nullptr : const_cast<ggml_tensor *>(it->second);
    return t && t->data && t->buffer && ggml_backend_buffer_get_type(t->buffer) == own_buft(moe.layers.at(il)[0].place) ? t : nullptr;
}

// of the layers whose slots devices look after; why there is nothing to guess with, empty: there is
static std::string set_up_device_guesses(moe_stream & moe) {
    int32_t n_known = 0;
    for (size_t i = 1; i < moe.device_layers.size(); ++i) { // nobody guesses the first
        moe::device_layer & l = moe.device_layers[i];
        if (!l.state || !moe.device_layers[i - 1].state || l.n_slot >= l.n_expert || moe.layers_in_order[i] != moe.layers_in_order[i - 1]) {
            continue;
        }
        const int32_t il = std::next(moe.layers.begin(), i)->first;
        ggml_tensor * t = router_on_device(moe, il, "ffn_gate_inp.weight");
        if (!t || ggml_n_dims(t) > 2 || t->ne[1] != l.n_expert || t->nb[0] != ggml_type_size(t->type) || t->ne[0] % 4 != 0 ||
                (t->type != GGML_TYPE_F32 && t->type != GGML_TYPE_F16 && t->type != GGML_TYPE_BF16)) {
            continue;
        }
        const auto floats = [&](const char * name) {
            const ggml_tensor * b = router_on_device(moe, il, name);
            return b && b->type == GGML_TYPE_F32 && ggml_nelements(b) == l.n_expert ? (const float *) b->data : nullptr;
        };
        l.router_bias = floats("ffn_gate_inp.bias");
        l.choice_bias = floats("exp_probs_b.bias");
        moe.tables[i].router = t;
        ++n_known;
    }
    return n_known > 0 ? "" : "no router of the usual name and type, every expert has a slot, or only one layer of experts";
}

// when the first graph is built: only then are the weights loaded
static void set_up_guesses(moe_stream & moe) {
    std::lock_guard<std::mutex> lock(moe.report_mutex);
    std::string & why = moe.report.prefetch_reason;
    why = moe.prefetch == moe::prefetch_kind::off ? "as asked" : !moe.overlap ? "--moe-overlap off" : moe.on_device() && !moe.by_device ? "slots on a device that the host looks after" :
        moe.n_guess == 0 && !moe.by_device ? "every expert has a slot" : "";
    if (!why.empty()) {
        return;
    }
    if (moe.by_device) {
        why = set_up_device_guesses(moe);
        return;
    }
    std::vector<moe::router_weights> routers(1); // nobody guesses the first layer
    int32_t n_known = 0;
    for (auto it = moe.layers.begin(); std::next(it) != moe.layers.end(); ++it) {
        routers.push_back(find_router(moe, std::next(it)->first));
        n_known += routers.back().rows != nullptr;
    }
    if (n_known == 0) {
        why = "the model has no routers of the usual name, or only one layer of experts";
        return;
    }
    const char * noise = getenv("MOESTREAM_GUESS_NOISE");
    moe.next_router = std::make_unique<moe::router_guess>(std::move(routers), noise ? (uint32_t) std::clamp(atoi(noise), 0, 100) : 0);
}

// Memory for the reader's buffers from which a device copies at full speed (from other memory a few times slower); null where no expert goes to one.
static uint8_t * make_bounce(moe_stream & moe, const moe::file_source & source, int32_t n_in_flight) {
    for (const auto & [place, p] : moe.places) {
        ggml_backend_buffer_type_t locked = is_device_pool(place) ? ggml_backend_dev_host_buffer_type(ggml_backend_buft_get_device(place)) : nullptr;
        if (!locked) {
            continue;
        }
        moe.bounce.reset(ggml_backend_buft_alloc_buffer(locked, moe::reader::bounce_bytes_for(source, n_in_flight) + 4096));
        if (moe.bounce) {
            return (uint8_t *) align_up((uintptr_t) ggml_backend_buffer_get_base(moe.bounce.get()), 4096);
        }
    }
    return nullptr;
}

// in which the pools of a place are
static ggml_backend_buffer_t buffer_of(const moe_stream & moe, ggml_backend_buffer_type_t place) {
    for (const auto & [il, tensors] : moe.layers) {
        if (tensors[0].place == place) {
            return tensors[0].pool->buffer;
        }
    }
    GGML_ABORT("no pool in a place");
}

// all experts of the layer, as a warm fill brings them
static std::vector<int32_t> warm_order(const moe_stream & moe, const moe::layer_desc & d) {
    if (const moe::map_layer * l = moe.map ? moe.map->find(d.layer) : nullptr) {
        return l->by_use();
    }
    std::vector<int32_t> order(d.n_expert);
    for (int32_t e = 0; e < d.n_expert; ++e) {
        order[e] = e;
    }
    return order;
}

// What a device knows of its slots, as tensors: the node that maps experts to slots is put where they are. Also in the memory-fit pass.
static void make_tables(moe_stream & moe) {
    moe.ctx_tables.reset(ggml_init({ 2 * (moe.layers.size() + moe.places.size()) * ggml_tensor_overhead(), nullptr, true }));
    std::map<ggml_backend_buffer_type_t, std::vector<ggml_tensor *>> by_place;
    for (const auto & [il, tensors] : moe.layers) {
        moe.tables.emplace_back();
        const ggml_backend_buffer_type_t place = tensors[0].place;
        if (!is_device_pool(place) || moe.resident.count(il)) {
            continue;
        }
        const int64_t n_slot   = tensors[0].pool->ne[2];
        const int64_t n_expert = tensors[0].n_expert;
        device_tables & t = moe.tables.back();
        t.slot_of = ggml_new_tensor_1d(moe.ctx_tables.get(), GGML_TYPE_I32, n_expert);
        t.rest    = ggml_new_tensor_1d(moe.ctx_tables.get(), GGML_TYPE_I8, device_tables::at_state(n_slot, n_expert) + sizeof(moe::device_layer_state));
        ggml_format_name(t.slot_of, "moe_slot_of-%d", il);
        by_place[place].push_back(t.slot_of);
        by_place[place].push_back(t.rest);
    }
    for (auto & [place, tensors] : by_place) {
        tensors.push_back(ggml_new_tensor_1d(moe.ctx_tables.get(), GGML_TYPE_I8, sizeof(moe::device_control)));
        expert_place & p = moe.places.at(place);
        if (!p.staging->data) { // the memory-fit pass
            for (ggml_tensor * t : tensors) {
                t->buffer = p.staging->buffer;
            }
            continue;
        }
        const size_t align = ggml_backend_buft_get_alignment(own_buft(place));
        size_t size = 0;
        for (const ggml_tensor * t : tensors) {
            size += align_up(ggml_backend_buft_get_alloc_size(own_buft(place), t), align);
        }
        ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(own_buft(place), size);
        if (!buffer) {
            throw std::runtime_error(format("cannot allocate %.2f MiB on %s for the tables of its slots; hint: fewer slots", size / 1048576.0, ggml_backend_buft_name(own_buft(place))));
        }
        moe.tables_buffers.emplace_back(buffer);
        ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS); // the scheduler computes where weights are
        ggml_backend_buffer_clear(buffer, 0);
        char * base = (char *) ggml_backend_buffer_get_base(buffer);
        for (ggml_tensor * t : tensors) {
            ggml_backend_tensor_alloc(buffer, t, base);
            base += align_up(ggml_backend_buft_get_alloc_size(own_buft(place), t), align);
        }
        p.at_tables = std::make_unique<device_storage>(buffer);
        p.control   = (moe::device_control *) tensors.back()->data;
    }
}

static moe::device_tier::options tier_options(const moe_stream & moe, bool poison) {
    const auto number = [](const char * name) {
        const char * value = getenv(name);
        return value ? (uint32_t) std::clamp(atoi(value), 0, 1000000) : 0;
    };
    moe::device_tier::options opt;
    opt.slabs    = (uint8_t *) ggml_backend_buffer_get_base(moe.slabs.get());
    opt.budget   = moe.ram_budget;
    opt.box      = (moe::device_mailbox *) ggml_backend_buffer_get_base(moe.shared.get());
    opt.slab_of  = (int64_t *) ((char *) opt.box + mailbox_bytes);
    opt.poison   = poison;
    opt.delay_us = number("MOESTREAM_ANSWER_DELAY_US");
    opt.mute     = is_set("MOESTREAM_MUTE");
    return opt;
}

// what copies of an expert can be cut into
static int32_t copy_unit(const moe::device_layer & l) {
    uint64_t all = (uint64_t) (uintptr_t) l.slabs;
    for (int32_t i = 0; i < l.n_part; ++i) {
        all |= (uint64_t) (uintptr_t) l.parts[i].slots | l.parts[i].bytes | l.parts[i].in_slab;
    }
    return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
}

static void fill_tables(moe_stream & moe, const std::vector<moe::layer_desc> & descs, bool checks) {
    const char * timeout_ms = getenv("MOESTREAM_ANSWER_TIMEOUT_MS");
    const auto * box = (const char *) ggml_backend_buffer_get_base(moe.shared.get());
    const auto * slab_of = (const int64_t *) (box + mailbox_bytes);
    for (size_t i = 0; i < descs.size(); ++i) {
        const moe::layer_desc & d = descs[i];
        moe.device_layers.emplace_back();
        moe.layers_in_order.push_back(std::next(moe.layers.begin(), i)->second[0].place);
        const int64_t * slab_of_layer = slab_of;
        slab_of += d.n_expert;
        if (!d.by_device || moe.shapes[i].is_resident) {
            continue;
        }
        const expert_place & place = moe.places.at(moe.layers_in_order.back());
        moe::device_layer & l = moe.device_layers.back();
        uint8_t * rest = (uint8_t *) moe.tables[i].rest->data;
        l.i_layer    = (int32_t) i;
        l.n_expert   = d.n_expert;
        l.n_slot     = d.n_slot;
        l.n_part     = (int32_t) d.parts.size();
        l.checks     = checks;
        l.timeout_ns = (uint64_t) std::max(1, timeout_ms ? atoi(timeout_ms) : 20000) * 1000000;
        l.slot_of    = (int32_t *) moe.tables[i].slot_of->data;
        l.expert_of  = (int32_t *) rest;
        l.last_use   = (uint32_t *) (rest + 4 * d.n_slot);
        l.stays      = rest + 8 * d.n_slot;
        l.is_guess   = rest + 8 * d.n_slot + d.n_expert;
        l.scores     = (float *) (rest + device_tables::at_scores(d.n_slot, d.n_expert));
        l.state      = (moe::device_layer_state *) (rest + device_tables::at_state(d.n_slot, d.n_expert));
        l.n_used     = moe.n_used_of.at(d.layer);
        l.control    = place.control;
        l.slab_of    = slab_of_layer;
        l.slabs      = (const uint8_t *) ggml_backend_buffer_get_base(moe.slabs.get());
        l.box        = (moe::device_mailbox *) box;
        for (size_t k = 0; k < d.parts.size(); ++k) {
            l.parts[k] = { d.parts[k].slots, d.parts[k].expert_bytes, moe.stream->offset_in_device_slab((int32_t) i, k) };
        }
        l.unit = copy_unit(l);

        std::vector<uint8_t> stays(d.n_expert, 0);
        for (const int32_t e : d.kept) {
            stays[e] = 1;
        }
        place.at_tables->write((void *) l.stays, stays.data(), d.n_expert);
        empty_slots(place, l);
    }
}

void moe_load_end(moe_stream * moe, llama_model_loader & ml, std::unordered_map<const ggml_tensor *, ggml_prec> & prec) {
    if (!moe) {
        return;
    }

    size_t n_tensors = 0;
    for (const auto & [il, tensors] : moe->layers) {
        n_tensors += tensors.size();
    }
    moe->ctx_staging.reset(ggml_init({ ggml_tensor_overhead() * (n_tensors + 1), nullptr, true }));

    for (auto & [buft, place] : moe->places) {
        if (!is_device_pool(buft)) {
            continue;
        }
        ggml_backend_buffer_t buffer = buffer_of(*moe, buft);
        buffer->buft = own_buft(buft); // also of the memory-fit pass, whose scheduler must know where these tensors are
        place.device_bytes = ggml_backend_buffer_get_size(buffer);
        if (!is_in_host(buft)) {
            place.at = std::make_unique<device_storage>(buffer);
        }
    }
    if (moe->by_device) {
        make_tables(*moe);
    }

    std::unique_ptr<moe::ram_tier> slabs;
    if (moe->by_device) {
        moe->ram_budget = ml.no_alloc ? device_ram_budget(*moe) : moe->ram_budget;
        slabs = std::make_unique<moe::ram_tier>(moe::device_tier::plan(tier_layers(*moe), moe->ram_budget));
    }
    std::vector<moe::layer_desc> descs;
    for (auto & [il, tensors] : moe->layers) {
        const int32_t i_layer = (int32_t) descs.size();
        const expert_place & place = moe->places.at(tensors[0].place);
        const bool on_device = is_device_pool(tensors[0].place);
        int64_t n_slot_tokens = INT64_MAX;
        moe->layer_gates.resize(2 * i_layer + 2);
        moe::layer_desc d;
        d.layer    = il;
        d.n_expert = (int32_t) tensors[0].n_expert;
        d.n_slot   = (int32_t) tensors[0].pool->ne[2];
        for (file_tensor & t : tensors) {
            if (t.repack && t.pool->data) {
                if (!moe->repack_view) {
                    moe->repack_view.reset(make_repack_view(t.pool->buffer, t.repack));
                }
                t.pool->buffer = moe->repack_view.get();
                ggml_backend_buffer_init_tensor(t.pool->buffer, t.pool);
                t.convert = std::make_unique<repacking>(*t.pool);
            }
            d.parts.push_back({ (int32_t) t.file, t.offset, t.expert_bytes, (uint8_t *) t.pool->data, t.staging_offset, t.convert.get(), t.pad_bytes });
            moe->i_layer_of[t.pool] = i_layer;
            const int32_t part = (int32_t) d.parts.size() - 1;
            if (on_device) { // only the processor's kernels know gates
                const ggml_backend_dev_t dev = ggml_backend_buft_get_device(own_buft(t.place));
                n_slot_tokens = std::min<int64_t>(n_slot_tokens, functions_of(dev)->slot_tokens(dev, t.pool->type));
            } else {
                add_gate(*moe, t.pool, i_layer, part, false);
            }
            if (place.staging) {
                t.staging = make_twin(*moe, *place.staging, t, i_layer % 2);
                moe->staging_of[t.pool] = t.staging;
                if (!on_device) {
                    add_gate(*moe, t.staging, i_layer, part, true);
                }
                const auto it = prec.find(t.pool);
                if (it != prec.end()) {
                    prec.emplace(t.staging, it->second);
                }
            }
        }
        apply_map(*moe, d);
        d.at      = place.at.get();
        const bool is_resident = moe->resident.count(il) > 0;
        d.staging = on_device && place.staging ? (uint8_t *) place.staging->data : nullptr;
        d.by_device = on_device && (moe->by_device || is_resident);
        if (is_resident) {
            d.warm.clear();
        } else if (d.by_device) { // one node maps so many ids, and all that may be missing must be in slabs at once
            n_slot_tokens = std::min<int64_t>(n_slot_tokens, std::min(moe::device_max_ids, slabs->n_slab_for(i_layer)) / std::max(1, moe->n_used_of[il]));
            if (d.warm.size() > 0) { // by use, or by number: all of them
                d.warm = warm_order(*moe, d);
            }
        }
        moe->shapes.push_back({ d.n_expert, d.n_free_slot(), n_slot_tokens, on_device, is_resident });
        descs.push_back(d);
    }

    if (ml.no_alloc) {
        return;
    }

    const std::vector<moe::open_file> files = descriptors_of(ml);
    for (const moe::open_file & file : files) {
        moe->paths.push_back(file.name);
    }

    moe::stream_report & r = moe->report;
    std::unique_ptr<moe::file_source> source;
    open_files(*moe, files, source);
    r.model           = base_name(files[0].name);
    if (r.fingerprint.empty()) { // else it was known for the router map
        r.fingerprint = fingerprint_of(*moe, ml.arch_name, files);
    }
    r.n_slot          = moe->n_slot;
    r.slots_requested = moe->slots_wanted == MOE_SLOTS_ALL ? "all" : moe->slots_wanted == MOE_SLOTS_AUTO ? "auto" :
        moe->slots_wanted == MOE_SLOTS_MAP ? "map" : std::to_string(moe->slots_wanted);
    r.policy          = moe::policy_name(moe->policy);
    r.map             = moe->map ? base_name(moe->files.map) : "";
    r.map_pin         = moe->map_pin;
    r.warm            = moe->warm_s < 0 ? "off" : moe->warm_s == 0 ? "background" : std::to_string(moe->warm_s) + " s";
    r.overlap         = moe->overlap;
    r.ram_requested   = moe->ram_wanted == MOE_RAM_AUTO ? "auto" : moe->ram_wanted > 0 ? std::to_string(moe->ram_wanted) :
        moe->by_device && !moe->ram_given ? "default" : "none";
    r.prefetch        = moe->prefetch == moe::prefetch_kind::automatic ? "auto" : moe->prefetch == moe::prefetch_kind::on ? "on" : "off";
    size_t n_repacked = 0;
    bool   unlike_stock = false;
    std::map<std::string, size_t> n_layers_on;
    for (const auto & [il, tensors] : moe->layers) {
        n_repacked += std::count_if(tensors.begin(), tensors.end(), [](const file_tensor & t) { return t.repack != nullptr; });
        for (const file_tensor & t : tensors) {
            unlike_stock = unlike_stock || t.is_unlike_stock;
        }
        const ggml_backend_buffer_type_t place = tensors[0].place;
        n_layers_on[is_device_pool(place) ? ggml_backend_buft_name(own_buft(place)) : "cpu"] += 1;
    }
    for (const auto & [where, n] : n_layers_on) {
        r.placement += (r.placement.empty() ? "" : ", ") + where + (n_layers_on.size() > 1 ? format(" (%zu layers)", n) : "");
    }
    r.kernels_expert  = n_repacked == 0 ? "plain" : n_repacked == n_tensors ? "repacked" : "repacked and plain";
    r.kernels_dense   = "plain";
    r.same_bits_as    = unlike_stock ? "no stock llama.cpp: it would use kernels that streamed experts cannot (--no-repack avoids them)" :
        moe->extra_bufts ? "stock llama.cpp" : "stock llama.cpp with --no-repack";
    if (moe->with_devices && !unlike_stock) { // devices are not lent to what is in the processor's memory
        r.same_bits_as += moe->extra_bufts ? " with --no-op-offload" : " --no-op-offload";
    }
    for (const auto & [key, ctx] : ml.ctx_map) {
        if (std::string(ggml_backend_buft_name(key.buft)).find("REPACK") != std::string::npos) {
            r.kernels_dense = "repacked";
        }
    }
    for (const moe::layer_desc & d : descs) {
        r.n_expert = std::max(r.n_expert, d.n_expert);
    }

    moe::stream::options opt;
    opt.policy     = moe->policy;
    opt.poison     = is_set("MOESTREAM_POISON");
    opt.check      = is_set("MOESTREAM_CHECK");
    opt.staging    = moe->host_staging() ? (uint8_t *) moe->host_staging()->data : nullptr;
    opt.half_bytes = moe->half_bytes;
    opt.n_ring     = moe->n_ring;
    opt.ring_bytes = moe->ring_bytes;
    opt.ram        = moe->ram ? (uint8_t *) moe->ram->data : nullptr;
    opt.ram_bytes  = moe->ram_budget;
    if (moe->guesses) {
        opt.guesses     = (uint8_t *) moe->guesses->data;
        opt.guess_bytes = moe->guess_bytes;
        opt.n_guess     = moe->n_guess;
        opt.prefetch    = moe->prefetch;
    }
    if (moe->files.trace) {
        open_trace(*moe, ml, descs);
        opt.trace = moe->trace.get();
    }
    if (moe->by_device) {
        opt.device = tier_options(*moe, opt.poison);
        opt.device_guesses = moe->guesses_possible();
        opt.prefetch       = moe->prefetch;
    }
    const auto make_reader = [&] {
        const int32_t depth = r.io_in_flight / r.io_threads;
        return std::make_unique<moe::reader>(std::move(source), r.io_threads, moe::reader::default_chunk_size, n_repacked > 0 || moe->on_device(), depth,
                make_bounce(*moe, *source, r.io_threads * depth));
    };
    std::unique_ptr<moe::reader> io;
    try {
        io = make_reader();
    } catch (const std::exception & e) {
        if (moe->io.backend != moe::io_backend::automatic || r.io_backend != moe::io_backend_name(moe::io_backend::uring)) {
            throw;
        }
        // one ring was possible when the drive was measured, several are not
        moe->io.backend = moe::io_backend::threads;
        open_files(*moe, files, source);
        r.io_reason += std::string("; no io_uring: ") + e.what();
        io = make_reader();
    }
    const std::vector<moe::layer_desc> kept = descs;
    moe->stream = std::make_unique<moe::stream>(opt, std::move(descs), std::move(io));
    if (moe->by_device) {
        fill_tables(*moe, kept, opt.check);
    }
    for (size_t i = 0; i < kept.size(); ++i) {
        if (moe->shapes[i].is_resident) {
            moe->stream->fill_all((int32_t) i);
        }
    }
}

// Now that the true sizes are known: slots that "auto" chose must fit, or the kernel would end the program in the middle of an answer.
// Slots that were asked for are the user's business.
static void check_memory(const moe_stream & moe) {
    const moe::memory_report & m = moe.report.memory;
    const uint64_t available = moe.memory.available_bytes;
    const uint64_t in_memory = m.total() - m.device_bytes;
    const uint64_t needed    = in_memory + (8ull << 20) + in_memory / 64; // and the program itself
    if (available == 0 || needed <= available) {
        return;
    }
    const auto mib = [](uint64_t n) { return n / 1048576.0; };
    const std::string what = format("%d slots a layer take %.1f MiB in all, %.1f MiB are available (%s)", moe.n_slot, mib(needed),
            mib(available), moe.memory.limited_by.c_str());
    if (moe.slots_wanted != MOE_SLOTS_AUTO) {
        LLAMA_LOG_WARN("moestream: %s: the system may swap, or end the program\n", what.c_str());
        return;
    }
    const uint64_t others = needed - m.pool_bytes;
    const int64_t  fit    = others < available ? (int64_t) ((available - others) / (m.pool_bytes / moe.n_slot)) : 0;
    throw std::runtime_error(format("--moe-slots auto: %s; hint: %s", what.c_str(), fit >= moe.report.n_expert_used ?
            format("--moe-slots %lld", (long long) fit).c_str() : "a smaller context (-c) or batch (-ub), or free memory"));
}

// dry runs may come while this goes on: they compute with whatever the slots hold
static void warm_slots(moe_stream & moe) {
    try {
        moe.stream->start_warm();
    } catch (const std::exception & e) {
        LLAMA_LOG_WARN("moestream: no thread to fill empty slots with (%s): they are filled as experts are asked for\n", e.what());
        return;
    }
    if (moe.warm_s > 0 && !moe.stream->wait_warm(std::chrono::seconds(moe.warm_s))) {
        LLAMA_LOG_WARN("moestream: not all slots are filled after %lld s (--moe-warm); the rest is filled in the background\n", (long long) moe.warm_s);
    }
}

void moe_context_created(const llama_model & model, llama_context * ctx) {
    moe_stream * moe = model.hparams.moe;
    if (!moe || !moe->stream) {
        return;
    }
    uint64_t dense = 0;
    uint64_t kv = 0;
    uint64_t compute = 0;
    uint64_t device_model = 0;
    uint64_t device_rest  = 0;
    for (const auto & [buft, mb] : llama_get_memory_breakdown(ctx)) {
        dense   += moe_is_pool(buft) ? 0 : mb.model;
        kv      += mb.context;
        compute += mb.compute;
        if (!ggml_backend_buft_is_host(buft) && ggml_backend_buft_get_device(buft)) {
            device_model += mb.model;
            device_rest  += mb.context + mb.compute;
        }
    }
    for (const auto & [place, p] : moe->places) {
        dense -= std::min(dense, p.device_bytes);
    }

    std::unique_lock<std::mutex> lock(moe->report_mutex);
    moe::stream_report & r = moe->report;
    const moe::memory_report before = r.memory;
    const bool first = r.memory.pool_bytes == 0;
    if (first && r.io_mode == moe::io_mode_name(moe::io_mode::direct)) {
        moe->stream->drop_cache(); // direct reads never look at what loading left there
    }
    if (first) {
        for (const auto & [il, tensors] : moe->layers) {
            r.n_expert_used = std::max(r.n_expert_used, (int32_t) model.hparams.n_expert_used(il));
            for (const file_tensor & t : tensors) {
                r.memory.pool_bytes += ggml_nbytes(t.pool);
            }
        }
        for (const auto & [place, p] : moe->places) {
            r.memory.staging_bytes += p.staging ? moe->staging_bytes() : 0;
        }
        r.memory.device_bytes = device_model;
        r.staging = r.memory.staging_bytes == 0 ? "none" : moe->n_ring > 0 ? format("ring of %d", moe->n_ring) : "full width";
        r.memory.ram_bytes     = moe->stream->ram_bytes();
        r.memory.guess_bytes   = moe->guesses ? ggml_nbytes(moe->guesses) : 0;
        r.memory.bounce_bytes  = moe->stream->bounce_bytes();
        // a mapped range spans the experts between dense weights, which are not mapped any more
        r.memory.dense_bytes   = moe->maps_dense ? moe->dense_bytes : dense;
    }
    r.memory.kv_bytes      += kv;
    r.memory.compute_bytes += compute;
    r.memory.device_bytes  += device_rest;

    // warnings, because the tools show what the library logs from there on only
    const auto mib = [](uint64_t n) { return n / 1048576.0; };
    if (first) {
        LLAMA_LOG_WARN("moestream: streaming %s: %zu MoE layers, %d of %d experts a layer in slots (--moe-slots %s), %d used per token\n",
                r.model.c_str(), moe->layers.size(), r.n_slot, r.n_expert, r.slots_requested.c_str(), r.n_expert_used);
        LLAMA_LOG_WARN("moestream: reads: %s, %d in flight by %d %s (%s); policy %s; overlap %s; experts on the %s\n", r.io_mode.c_str(),
                r.io_in_flight, r.io_threads, r.io_backend == moe::io_backend_name(moe::io_backend::uring) ? "threads with io_uring" : "threads",
                r.io_reason.c_str(), r.policy.c_str(), r.overlap ? "on" : "off", r.placement.c_str());
        if (moe->map || moe->warm_s >= 0) {
            LLAMA_LOG_WARN("moestream: router map: %s, %d experts a layer pinned; warm: %s\n", moe->map ? r.map.c_str() : "none", r.map_pin, r.warm.c_str());
        }
        if (r.ram_requested != "none" || r.prefetch != "auto" || r.prefetch_reason.empty()) {
            LLAMA_LOG_WARN("moestream: RAM tier: %s, %.1f MiB; prefetch: %s%s%s\n", r.ram_requested.c_str(), mib(r.memory.ram_bytes), r.prefetch.c_str(),
                    r.prefetch_reason.empty() ? "" : ", nothing is guessed: ", r.prefetch_reason.c_str());
        }
        LLAMA_LOG_WARN("moestream: kernels: experts %s, dense weights %s; same bits as %s\n", r.kernels_expert.c_str(), r.kernels_dense.c_str(),
                r.same_bits_as.c_str());
    }
    const moe::memory_report & m = r.memory;
    LLAMA_LOG_WARN("moestream: memory: %.1f MiB = dense weights %.1f + slots %.1f + staging %.1f (%s) + RAM tier %.1f + guesses %.1f + read buffers %.1f + KV %.1f + compute %.1f\n",
            mib(m.total()), mib(m.dense_bytes), mib(m.pool_bytes), mib(m.staging_bytes), r.staging.c_str(), mib(m.ram_bytes), mib(m.guess_bytes), mib(m.bounce_bytes), mib(m.kv_bytes), mib(m.compute_bytes));
    if (m.device_bytes > 0) {
        LLAMA_LOG_WARN("moestream: memory: %.1f MiB of it on devices\n", mib(m.device_bytes));
    }
    try {
        check_memory(*moe);
    } catch (const std::exception &) {
        r.memory = before; // a smaller context may do
        llama_free(ctx);
        throw;
    }

    if (first) {
        std::lock_guard<std::mutex> lock_live(live_mutex);
        live.erase(std::remove_if(live.begin(), live.end(), [](const auto & w) { return w.expired(); }), live.end());
        live.push_back(moe->weak_from_this());
    }
    lock.unlock();
    if (first && moe->warm_s >= 0) {
        warm_slots(*moe);
    }
}

//
// graph
//

// op_params of our nodes, behind the function, the thread count and the pointer that ggml_custom_4d puts there
enum { PARAM_LAYER = 12, PARAM_STAGED = 13, PARAM_READ_NEXT = 14, PARAM_LATE = 15 };
enum { PARAM_GUESS = PARAM_READ_NEXT }; // of a join: the next layer begins late, in slots

// order: empty when there is nothing to wait for
static void set_order(moe_stream & moe, int32_t i_layer, bool staged, const std::vector<int32_t> & order) {
    for (part_gate * g : moe.layer_gates[2 * i_layer + staged]) {
        g->order   = order.empty() ? nullptr : order.data();
        g->n_order = (int32_t) order.size();
    }
}

static moe::chosen_experts chosen_of(const ggml_tensor * ids) {
    return { (const uint8_t *) ids->data, ids->ne[0], ids->ne[1], ids->nb[0], ids->nb[1] };
}

// guarded like loading: llama-server's, when it starts, is where a damaged model first computes
moe_dry_run::moe_dry_run(const llama_model * model) : model(model) {
    if (model->hparams.moe) {
        guard_begin(true);
        ++model->hparams.moe->n_dry;
    }
}

moe_dry_run::~moe_dry_run() {
    if (model->hparams.moe) {
        --model->hparams.moe->n_dry;
        guard_end(true);
    }
}

// ids that are valid in slots and in staging, each once per token
static void write_dry_ids(const ggml_tensor * selected, int32_t * out) {
    for (int64_t t = 0; t < selected->ne[1]; ++t) {
        for (int64_t k = 0; k < selected->ne[0]; ++k) {
            *out++ = (int32_t) k;
        }
    }
}

static void op_begin(ggml_tensor * dst, int ith, int /*nth*/, void * userdata) {
    if (ith != 0) {
        return;
    }
    moe_stream & moe = *(moe_stream *) userdata;
    const int32_t i_layer = dst->op_params[PARAM_LAYER];
    const bool    staged  = dst->op_params[PARAM_STAGED] != 0;
    const bool    late    = dst->op_params[PARAM_LATE] != 0;
    if (moe.n_dry > 0) {
        write_dry_ids(dst->src[0], (int32_t *) dst->data);
        set_order(moe, i_layer, staged, {});
        return;
    }
    moe::stream & s = *moe.stream;
    if (staged) {
        s.begin_staging(i_layer, chosen_of(dst->src[0]), (int32_t *) dst->data, dst->op_params[PARAM_READ_NEXT] != 0, late);
    } else {
        s.begin_slots(i_layer, chosen_of(dst->src[0]), (int32_t *) dst->data, late);
    }
    if (late) {
        set_order(moe, i_layer, staged, s.order());
    }
}

// what the next layer will probably want is read ahead, by whichever thread has scored the last of its experts
static void guess_next(moe_stream & moe, const ggml_tensor * join, int ith, int nth) {
    const ggml_tensor * state = join->src[1];
    const int32_t i_next = join->op_params[PARAM_LAYER] + 1;
    if (ith == 0) {
        moe.stream->note_guess_place(state->ne[1]);
    }
    if (moe.stream->wants_guesses() && moe.next_router->score(i_next, (const float *) state->data, state->nb[1], state->ne[1], ith, nth)) {
        const std::vector<int32_t> & best = moe.next_router->best();
        moe.stream->guess(i_next, best.data(), (int32_t) best.size());
    }
}

static void op_join(ggml_tensor * dst, int ith, int nth, void * userdata) {
    moe_stream & moe = *(moe_stream *) userdata;
    if (moe.n_dry > 0 || dst->op_params[PARAM_LATE]) {
        if (ith == 0) {
            memcpy(dst->data, dst->src[0]->data, ggml_nbytes(dst));
        }
        if (moe.n_dry == 0 && dst->op_params[PARAM_GUESS]) {
            guess_next(moe, dst, ith, nth);
        }
        return;
    }
    moe::stream & s = *moe.stream;
    const int32_t i_layer = dst->op_params[PARAM_LAYER];
    const bool    staged  = dst->op_params[PARAM_STAGED] != 0;
    s.wait(i_layer, staged, ith == 0); // all threads sleep here, so that readers have the cores
    if (ith == 0) {
        s.settle(i_layer, staged);
        memcpy(dst->data, dst->src[0]->data, ggml_nbytes(dst));
    }
}

static bool is_node(const ggml_tensor * t, ggml_custom_op_t fun) {
    return t->op == GGML_OP_CUSTOM && memcmp(t->op_params, &fun, sizeof(fun)) == 0;
}

static bool is_staged(const moe_stream * moe, int32_t i_layer, const ggml_tensor * ids) {
    const layer_shape & s = moe->shapes[i_layer];
    return !s.is_resident && (ids->ne[1] > s.n_slot_tokens || !moe::fits_slots(s.n_expert, s.n_free_slot, ids->ne[0], ids->ne[1]));
}

// the state is one that the next layer's router can score
static bool can_guess(const moe_stream & moe, int32_t i_layer, const ggml_tensor * state) {
    return moe.next_router && moe.next_router->knows(i_layer + 1) && moe.next_router->n_embd(i_layer + 1) == state->ne[0] &&
        state->type == GGML_TYPE_F32 && ggml_n_dims(state) <= 2 && state->nb[0] == sizeof(float);
}

static bool can_guess_on_device(const moe_stream & moe, int32_t i_layer, const ggml_tensor * state) {
    const ggml_tensor * router = moe.tables[i_layer].router;
    const layer_shape & shape  = moe.shapes[i_layer];
    const int64_t n_tokens = state->ne[1];
    return router && state->type == GGML_TYPE_F32 && ggml_n_dims(state) <= 2 && state->nb[0] == sizeof(float) && state->nb[1] % 16 == 0 &&
        state->view_offs % 16 == 0 && state->ne[0] == router->ne[0] && n_tokens <= std::min<int64_t>(shape.n_slot_tokens, moe::device_guess_tokens) &&
        moe::fits_slots(shape.n_expert, shape.n_free_slot, moe.device_layers[i_layer].n_used, n_tokens);
}

// The device finds the slots itself, and fetches ahead what the next layer will probably want. In the memory-fit pass there are no arguments for
// its kernels yet, and nothing is computed.
static ggml_tensor * map_on_device(moe_stream & moe, ggml_context * ctx, ggml_cgraph * gf, int32_t i_layer, ggml_tensor * selected, ggml_tensor * state) {
    // what the layer before guessed from is kept until the guess has been made, which is by now
    thread_local struct {
        const ggml_cgraph * gf;
        int32_t             i_layer;
        ggml_tensor       * state;
    } guessed_from = {};

    const device_tables & tables = moe.tables[i_layer];
    const moe_device_functions * functions = functions_of(ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tables.slot_of->buffer)));
    const bool is_fit = moe.device_layers.empty();
    ggml_tensor * map_args[] = { selected, tables.slot_of, guessed_from.state };
    const bool was_guessed = guessed_from.gf == gf && guessed_from.i_layer == i_layer;
    guessed_from = {};

    // before the map: what the next layer wants is scored while this one's experts are still on their way
    const int32_t i_next = i_layer + 1;
    if (!is_fit && i_next < (int32_t) moe.tables.size() && can_guess_on_device(moe, i_next, state)) {
        const device_tables & next = moe.tables[i_next];
        ggml_tensor * guess_args[] = { state, next.router, next.slot_of };
        ggml_tensor * guess = ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, guess_args, 3, functions->guess, 1,
                &moe.device_layers[i_next]);
        ggml_format_name(guess, "moe_guess-%d", i_next);
        ggml_build_forward_expand(gf, guess);
        guessed_from = { gf, i_next, state };
    }

    ggml_tensor * map = ggml_custom_4d(ctx, GGML_TYPE_I32, selected->ne[0], selected->ne[1], 1, 1, map_args, was_guessed ? 3 : 2, functions->map, 1,
            is_fit ? nullptr : &moe.device_layers[i_layer]);
    ggml_format_name(map, "moe_map-%d", i_layer);
    ggml_build_forward_expand(gf, map);
    return map;
}

ggml_tensor * moe_graph_ids(moe_stream * moe, ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * selected, ggml_tensor * down_exps,
        ggml_tensor * state) {
    if (!moe) {
        return selected;
    }
    const auto it = moe->i_layer_of.find(down_exps);
    if (it == moe->i_layer_of.end() || moe->shapes[it->second].is_resident) {
        return selected;
    }
    std::call_once(moe->set_up_once, [moe] { set_up_guesses(*moe); });
    const int32_t i_layer = it->second;
    const int32_t staged = is_staged(moe, i_layer, selected);
    if (!staged && moe->by_device && moe->shapes[i_layer].on_device) {
        return map_on_device(*moe, ctx, gf, i_layer, selected, state);
    }

    ggml_tensor * begin = ggml_custom_4d(ctx, GGML_TYPE_I32, selected->ne[0], selected->ne[1], 1, 1, &selected, 1, op_begin, 1, moe);
    ggml_format_name(begin, "moe_begin-%d", i_layer);
    ggml_tensor * join_args[] = { begin, state };
    const int n_join_args = !staged && can_guess(*moe, i_layer, state) ? 2 : 1;
    ggml_tensor * join = ggml_custom_4d(ctx, GGML_TYPE_I32, selected->ne[0], selected->ne[1], 1, 1, join_args, n_join_args, op_join,
            moe->shapes[i_layer].on_device ? 1 : GGML_N_TASKS_MAX, moe); // where the processor computes next, all its threads wait
    ggml_format_name(join, "moe_join-%d", i_layer);
    for (ggml_tensor * t : { begin, join }) {
        t->op_params[PARAM_LAYER]  = i_layer;
        t->op_params[PARAM_STAGED] = staged;
    }

    ggml_build_forward_expand(gf, begin);
    return join;
}

uint32_t moe_graph_n_nodes(const moe_stream * moe) {
    return moe ? 2 * (uint32_t) moe->shapes.size() : 0; // begin and join
}

ggml_tensor * moe_graph_weights(moe_stream * moe, ggml_tensor * w, const ggml_tensor * ids) {
    if (!moe) {
        return w;
    }
    const auto it = moe->i_layer_of.find(w);
    if (it == moe->i_layer_of.end() || !is_staged(moe, it->second, ids)) {
        return w;
    }
    return moe->staging_of.at(w);
}

static bool is_matmul(const ggml_tensor * t) {
    return t->op == GGML_OP_MUL_MAT;
}

// memory other than their own result, or state that outlives the graph
static bool has_side_effect(const ggml_tensor * t) {
    return t->op == GGML_OP_CPY || t->op == GGML_OP_SET_ROWS || t->op == GGML_OP_SET || t->op == GGML_OP_CUSTOM;
}

// Nodes behind the join that do not need its result, up to the node that brings both together: the shared or dense FFN of the
// layer. They move in front of the join, in their order. Nothing moves unless that is what was found: what meets the experts
// before any matmul (a scale per expert) belongs to them, and the search ends where state is written or the next layer begins.
static void move_shared_ffn(ggml_tensor ** nodes, int i_join, int n_nodes) {
    std::unordered_set<const ggml_tensor *> dependent = { nodes[i_join] };
    std::unordered_set<const ggml_tensor *> independent;
    bool has_matmul = false;
    int  i_end = -1;
    for (int i = i_join + 1; i < n_nodes && i_end < 0; ++i) {
        const ggml_tensor * t = nodes[i];
        if (has_side_effect(t)) {
            return;
        }
        bool needs_join = dependent.count(t->view_src) > 0;
        bool needs_independent = independent.count(t->view_src) > 0;
        for (const ggml_tensor * src : t->src) {
            needs_join        = needs_join        || dependent.count(src) > 0;
            needs_independent = needs_independent || independent.count(src) > 0;
        }
        if (needs_join && needs_independent && has_matmul) {
            i_end = i;
        } else if (needs_join) {
            dependent.insert(t);
        } else {
            independent.insert(t);
            has_matmul = has_matmul || is_matmul(t);
        }
    }
    if (i_end < 0) {
        return;
    }
    std::stable_partition(nodes + i_join, nodes + i_end, [&](const ggml_tensor * t) { return independent.count(t) > 0; });
}

// what computes a value from its sources and does nothing else
static bool is_pure(const ggml_tensor * t) {
    switch (t->op) {
        case GGML_OP_ADD: case GGML_OP_ADD_ID: case GGML_OP_MUL: case GGML_OP_DIV: case GGML_OP_SUM_ROWS: case GGML_OP_SCALE: case GGML_OP_CLAMP:
        case GGML_OP_UNARY: case GGML_OP_SOFT_MAX: case GGML_OP_NORM: case GGML_OP_RMS_NORM: case GGML_OP_CONCAT: case GGML_OP_CONT:
        case GGML_OP_MUL_MAT: case GGML_OP_ARGSORT: case GGML_OP_TOP_K: case GGML_OP_GET_ROWS: case GGML_OP_REPEAT:
        case GGML_OP_VIEW: case GGML_OP_RESHAPE: case GGML_OP_PERMUTE: case GGML_OP_TRANSPOSE:
            return true;
        default:
            return false;
    }
}

// Some routers see what is known before the attention of their layer: the layer's input, or the tokens. Their begin, and what it needs,
// move to the front, behind the experts of the layer before, so that the reads overlap with the attention. Nothing moves that reads
// memory which other nodes may write: a view of anything but a node is taken for a cache.
static void move_begin(ggml_tensor ** nodes, int i_first, int i_begin) {
    std::unordered_map<const ggml_tensor *, int> place;
    for (int i = i_first; i <= i_begin; ++i) {
        place[nodes[i]] = i;
    }
    std::unordered_set<const ggml_tensor *> needed = { nodes[i_begin] };
    for (int i = i_begin; i >= i_first; --i) { // sources stand in front
        const ggml_tensor * t = nodes[i];
        if (!needed.count(t)) {
            continue;
        }
        if (i != i_begin && (!is_pure(t) || (t->view_src && t->view_src->op == GGML_OP_NONE))) {
            return;
        }
        for (const ggml_tensor * src : t->src) {
            if (place.count(src)) {
                needed.insert(src);
            }
        }
        if (place.count(t->view_src)) {
            needed.insert(t->view_src);
        }
    }
    std::stable_partition(nodes + i_first, nodes + i_begin + 1, [&](const ggml_tensor * t) { return needed.count(t) > 0; });
}

// Where every expert matmul of a layer can wait for its own bytes, nobody waits for all of them in the join.
static void let_matmuls_wait(moe_stream & moe, ggml_tensor ** nodes, int n_nodes) {
    std::unordered_map<const ggml_tensor *, std::vector<ggml_tensor *>> matmuls; // by join
    for (int i = 0; i < n_nodes; ++i) {
        ggml_tensor * t = nodes[i];
        const auto it = t->op == GGML_OP_MUL_MAT_ID ? moe.gates.find(t->src[0]) : moe.gates.end();
        if (it != moe.gates.end() && is_node(t->src[2], op_join) && t->src[2]->op_params[PARAM_LAYER] == it->second.i_layer) {
            matmuls[t->src[2]].push_back(t);
        }
    }
    for (const auto & [join, users] : matmuls) {
        const int32_t i_layer = join->op_params[PARAM_LAYER];
        const auto & gates = moe.layer_gates[2 * i_layer + (join->op_params[PARAM_STAGED] != 0)];
        bool in_order = users.size() == gates.size(); // as parts are read
        for (size_t i = 0; in_order && i < users.size(); ++i) {
            in_order = gates[i] == &moe.gates.at(users[i]->src[0]);
        }
        if (!in_order) {
            continue;
        }
        for (ggml_tensor * t : users) {
            moe_gate_set(t, &moe.gates.at(t->src[0]));
        }
        for (ggml_tensor * t : { join->src[0], (ggml_tensor *) join }) {
            t->op_params[PARAM_LATE] = 1;
        }
    }
}

void moe_graph_finish(moe_stream * moe, ggml_cgraph * gf) {
    if (!moe) {
        return;
    }
    ggml_tensor ** nodes = ggml_graph_nodes(gf);
    const int n_nodes = ggml_graph_n_nodes(gf);
    if (moe->overlap) {
        let_matmuls_wait(*moe, nodes, n_nodes);
    }

    ggml_tensor * last_begin = nullptr;
    ggml_tensor * last_join  = nullptr;
    int i_behind = 0; // the experts of the layer before
    for (int i = 0; i < n_nodes; ++i) {
        ggml_tensor * t = nodes[i];
        if (t->op == GGML_OP_MUL_MAT_ID) {
            i_behind = i + 1;
        }
        if (is_node(t, op_begin)) {
            if (moe->overlap) {
                move_begin(nodes, i_behind, i); // nodes[i] may be another from here on
            }
            if (last_begin) {
                const int32_t i_layer = t->op_params[PARAM_LAYER];
                last_begin->op_params[PARAM_READ_NEXT] =
                    last_begin->op_params[PARAM_STAGED] && t->op_params[PARAM_STAGED] &&
                    last_begin->op_params[PARAM_LAYER] + 1 == i_layer &&
                    moe::touches_nearly_all(moe->shapes[i_layer].n_expert, t->ne[0], t->ne[1]);
            }
            if (last_join && last_join->src[1] && last_join->op_params[PARAM_LAYER] + 1 == t->op_params[PARAM_LAYER]) {
                last_join->op_params[PARAM_GUESS] = last_join->op_params[PARAM_LATE] && t->op_params[PARAM_LATE] && !t->op_params[PARAM_STAGED];
            }
            last_begin = t;
        } else if (is_node(t, op_join)) {
            last_join = t;
            if (moe->overlap) {
                move_shared_ffn(nodes, i, n_nodes);
            }
        }
    }
}

//
// compute
//

moe_compute::moe_compute(moe_stream * moe, ggml_backend_sched_t sched, uint32_t n_tokens) : moe(moe && moe->stream ? moe : nullptr), sched(sched) {
    if (this->moe) {
        this->moe->stream->compute_begin();
        if (this->moe->by_device && n_tokens <= (uint32_t) moe::device_guess_tokens && this->moe->n_dry == 0) {
            this->moe->stream->note_guess_place(n_tokens);
        }
        this->moe->tell_devices();
        open = true;
    }
}

ggml_status moe_compute::finish(ggml_status status) {
    if (!open) {
        return status;
    }
    open = false;
    // Nothing writes to a slot, or a half, in a device's memory while kernels may still read what was there before:
    //   - within a graph, by what begin() depends on. It reads the ids that a layer's router made of the results of all layers before it, and
    //     the scheduler synchronises the device to copy these ids to the processor: kernels that used the half before are done. A layer's
    //     slots are used once in a graph.
    //   - between graphs, by this: also one of another context, which has streams of its own, begins after it.
    // So copies need no order to kernels, and have their own streams.
    if (moe->on_device()) {
        ggml_backend_sched_synchronize(sched);
    }
    moe->look_at_trace(); // while nobody else computes
    std::string error = moe->stream->compute_end(status == GGML_STATUS_SUCCESS, [this] { moe->start_devices_afresh(); });
    const bool failed = !error.empty();
    if (failed) {
        LLAMA_LOG_ERROR("moestream: %s\n", error.c_str());
    }
    {
        std::lock_guard<std::mutex> lock(moe->report_mutex);
        moe->error = std::move(error);
    }
    return failed ? GGML_STATUS_FAILED : status;
}

moe_compute::~moe_compute() {
    if (open) {
        finish(GGML_STATUS_ABORTED);
    }
}

std::string moe_take_error(const llama_model * model) {
    moe_stream * moe = model ? model->hparams.moe : nullptr;
    if (!moe) {
        return "";
    }
    std::string error;
    {
        std::lock_guard<std::mutex> lock(moe->report_mutex);
        std::swap(error, moe->error);
    }
    if (error.empty()) {
        return "";
    }
    for (const std::string & path : moe->paths) {
        const size_t pos = error.find(path);
        if (pos != std::string::npos) {
            error.replace(pos, path.size(), base_name(path));
        }
    }
    return "moestream: " + error;
}
