#pragma once

// What the files of this folder share: the state of one model that streams, and who makes which part of it.

#include "buffers.h"

#include "budget.h"
#include "device-pool.h"
#include "io-probe.h"
#include "moe-gate.h"
#include "moe-hooks.h"
#include "policy.h"
#include "ram-tier.h"
#include "router-guess.h"
#include "router-map.h"
#include "stream.h"
#include "trace.h"

#include "ggml-cpp.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-model-loader.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

namespace moe::hooks {

struct file_tensor {
    std::string name;
    uint32_t    file;
    uint64_t    offset;       // bytes
    uint64_t    expert_bytes;
    int64_t     n_expert;
    ggml_backend_buffer_type_t repack = nullptr; // the experts are repacked; null: plain rows
    std::unique_ptr<moe::conversion> convert;    // when they are
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
    std::unique_ptr<moe::storage>   at;                // null: the processor's memory
    uint64_t                        device_bytes = 0;  // of its buffer, as upstream counts it for a device
    std::unique_ptr<moe::storage>   at_tables;         // where the device keeps what it knows of its slots; null: it does not look after them
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

} // namespace moe::hooks

struct moe_stream : std::enable_shared_from_this<moe_stream> {
    // settings
    int64_t          slots_wanted = 0;
    moe::io_wish     io;
    moe::policy_kind policy       = moe::policy_kind::lru;
    bool             overlap      = true;
    moe::hooks::staging_kind  staging_wanted = moe::hooks::staging_kind::automatic;
    moe::hooks::gpu_path_kind gpu_path       = moe::hooks::gpu_path_kind::automatic;
    moe::hooks::pool_kind     pool_wanted    = moe::hooks::pool_kind::automatic;
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
    std::map<int32_t, std::vector<moe::hooks::file_tensor>> layers; // by block number
    std::vector<moe::hooks::block_identity> identity;               // of the file, also of blocks that the model does not use
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
    std::map<ggml_backend_buffer_type_t, moe::hooks::expert_place> places; // by pool type
    ggml_backend_buffer_ptr bounce; // page-locked, for what goes to devices
    // of slots that devices look after
    ggml_context_ptr        ctx_tables;
    std::vector<ggml_backend_buffer_ptr> tables_buffers;
    ggml_backend_buffer_ptr slabs;   // page-locked
    ggml_backend_buffer_ptr shared;  // page-locked: the mailbox, and behind it what slabs hold
    std::vector<ggml_backend_buffer_type_t> layers_in_order; // the place of each, by layer index
    std::vector<moe::hooks::device_tables>     tables;        // by layer index
    std::vector<moe::device_layer> device_layers; // likewise
    ggml_context_ptr ctx_staging; // the twins' tensor structs

    std::unordered_map<std::string, const ggml_tensor *>   routers; // and what goes with them, by name
    std::vector<moe::hooks::layer_shape>                               shapes; // by layer index, as the stream counts them
    std::unordered_map<const ggml_tensor *, int32_t>       i_layer_of;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> staging_of;
    std::unordered_map<const ggml_tensor *, moe::hooks::part_gate>     gates; // by pool tensor or twin
    std::vector<std::vector<moe::hooks::part_gate *>>                  layer_gates; // by 2 * layer index + staged

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
        return n_ring > 0 ? n_ring * ring_bytes + moe::hooks::tensor_pad : 2 * half_bytes;
    }

    ggml_tensor * host_staging() const {
        const auto it = places.find(moe::hooks::pool_buft());
        return it == places.end() ? nullptr : it->second.staging;
    }

    bool on_device() const {
        return std::any_of(places.begin(), places.end(), [](const auto & p) { return moe::hooks::is_device_pool(p.first); });
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

namespace moe::hooks {

inline uint64_t align_up(uint64_t n, uint64_t to) {
    return (n + to - 1) / to * to;
}

// of an expert in a slab, or in an entry for guesses
inline uint64_t slab_bytes(const std::vector<file_tensor> & tensors) {
    uint64_t n = 0;
    for (const file_tensor & t : tensors) {
        n += moe::ram_tier::aligned(t.expert_bytes);
    }
    return n;
}

//
// model.cpp
//

// of the tests' switches: 0 is off
bool is_set(const char * name);

// from now on its statistics are those of the process
void add_live(moe_stream & moe);

// what a model holds: letting go of it ends the workers
std::shared_ptr<moe_stream> held_by_model(const std::shared_ptr<moe_stream> & moe);

//
// load-guard.cpp
//

// what moe_load_guard does, also around dry runs; returns on
bool guard_begin(bool on);
void guard_end(bool on);

// what upstream finds out only when it computes, by crashing or never ending
void check_model(const moe_stream & moe, const llama_hparams & hparams);

// a type that no weight of this kind can have
void check_type(const LLM_TN_IMPL & tn, const ggml_tensor * t);

//
// load-begin.cpp
//

// null: absent. Throws where it is of another type.
const llama_model_kv_override * setting(const llama_model_loader & ml, const char * key, llama_model_kv_override_type type);

//
// load-slots.cpp
//

// the largest layer, and where in a half each tensor starts
void lay_out_staging(moe_stream & moe);

// enough that several reads are in flight while a matrix is computed with
void lay_out_ring(moe_stream & moe);

// those of a layer that are wanted, those of the layer before that are still copied to slots, and some that were wrong
void lay_out_guesses(moe_stream & moe);

// n_slot, n_slot_of, n_ring and ram_budget; throws where there is no room
void decide_slots(moe_stream & moe, const llama_model_loader & ml, const llama_hparams & hparams);

//
// model-files.cpp
//

// Decides how to read, opens the files for it, and writes into the report what is in force and why.
void open_files(moe_stream & moe, const std::vector<moe::open_file> & files, std::unique_ptr<moe::file_source> & source);

// without its folders
std::string base_name(const std::string & path);

// the loader's, with their paths
std::vector<moe::open_file> descriptors_of(const llama_model_loader & ml);

// What traces and maps of this model are known by (docs/traces.md), the same for every type that its experts may have. Python's twin is
// moestream/routing/fingerprint.py.
std::string fingerprint_of(const moe_stream & moe, const std::string & arch, const std::vector<moe::open_file> & files);

// A model that is loaded again, as llama-server does after it has slept, goes on with its trace.
void open_trace(moe_stream & moe, const llama_model_loader & ml, const std::vector<moe::layer_desc> & descs);

//
// devices.cpp
//

// what of the experts that devices compute a device tier knows
std::vector<moe::device_tier::layer> tier_layers(const moe_stream & moe);

// Of page-locked slabs: as asked; else half of what is available, because locked memory is lost to everybody else; and always enough to
// hand a batch's experts over.
uint64_t device_ram_budget(const moe_stream & moe);

// Slabs, and what else host and devices both see, in page-locked memory; as much as asked for, or less where nobody has asked and less can be
// locked. False: not even enough to hand a batch's experts over.
bool lock_slabs(moe_stream & moe);

// Memory for the reader's buffers from which a device copies at full speed (from other memory a few times slower); null where no expert goes to one.
uint8_t * make_bounce(moe_stream & moe, const moe::file_source & source, int32_t n_in_flight);

// What a device knows of its slots, as tensors: the node that maps experts to slots is put where they are. Also in the memory-fit pass.
void make_tables(moe_stream & moe);

// poison: what is evicted is filled with 0xff
moe::device_tier::options tier_options(const moe_stream & moe, bool poison);

// the stream exists: what kernels look up. checks: they compare what they use with what was read.
void fill_tables(moe_stream & moe, const std::vector<moe::layer_desc> & descs, bool checks);

//
// guesses.cpp
//

// when the first graph is built: only then are the weights loaded
void set_up_guesses(moe_stream & moe);

} // namespace moe::hooks
