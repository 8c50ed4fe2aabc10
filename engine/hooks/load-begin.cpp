// Before tensors are made: what was asked for, which tensors hold experts, and where their slots will be.

#include "model.h"

#include "header-check.h"

#include "llama-arch.h"
#include "llama-model.h"

#include <cstring>
#include <regex>

#include <fcntl.h>

namespace moe::hooks {

// The one opinion of what an expert tensor is: these kinds, with the suffix "weight". Everything else stays resident.
// In the order in which graphs multiply with them.
static const llm_tensor expert_kinds[] = {
    LLM_TENSOR_FFN_GATE_EXPS, LLM_TENSOR_FFN_UP_EXPS, LLM_TENSOR_FFN_GATE_UP_EXPS, LLM_TENSOR_FFN_DOWN_EXPS,
};

const llama_model_kv_override * setting(const llama_model_loader & ml, const char * key, llama_model_kv_override_type type) {
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

// null: absent. Flags are checked by their parser, too; keys may come from elsewhere.
static const llama_model_kv_override * number_setting(const llama_model_loader & ml, const char * key, const char * flag, int64_t min, int64_t max, const char * expected) {
    const auto * o = setting(ml, key, LLAMA_KV_OVERRIDE_TYPE_INT);
    if (o && (o->val_i64 < min || o->val_i64 > max)) {
        throw std::runtime_error(format("%s %lld: expected %s", flag, (long long) o->val_i64, expected));
    }
    return o;
}

// out stays as it is when the key is absent
template <typename T, typename F>
static void read_name(const llama_model_loader & ml, const char * key, const char * flag, const char * expected, F && from_name, T & out) {
    const auto * o = setting(ml, key, LLAMA_KV_OVERRIDE_TYPE_STR);
    if (o && !from_name(o->val_str, out)) {
        throw std::runtime_error(format("%s '%s': expected %s", flag, o->val_str, expected));
    }
}

template <typename T>
static void read_name(const llama_model_loader & ml, const char * key, const char * flag, const char * expected,
        const std::vector<std::pair<std::string, T>> & names, T & out) {
    read_name(ml, key, flag, expected, [&](const std::string & name, T & found) {
        const auto it = std::find_if(names.begin(), names.end(), [&](const auto & n) { return n.first == name; });
        found = it == names.end() ? found : it->second;
        return it != names.end();
    }, out);
}

static void read_bool(const llama_model_loader & ml, const char * key, bool & out) {
    if (const auto * o = setting(ml, key, LLAMA_KV_OVERRIDE_TYPE_BOOL)) {
        out = o->val_bool;
    }
}

static void read_settings(moe_stream & moe, const llama_model_loader & ml) {
    if (const auto * o = number_setting(ml, "moestream.io_threads", "--moe-io-threads", 1, 256, "1 to 256")) {
        moe.io.n_in_flight = (int32_t) o->val_i64;
    }
    read_name(ml, "moestream.io",         "--moe-io",         "auto, direct or buffered", moe::io_mode_from_name,    moe.io.mode);
    read_name(ml, "moestream.io_backend", "--moe-io-backend", "auto, threads or uring",   moe::io_backend_from_name, moe.io.backend);
    read_name(ml, "moestream.policy",     "--moe-policy",     "lru, lfu or heat",         moe::policy_from_name,     moe.policy);
    read_name<staging_kind>(ml, "moestream.staging", "--moe-staging", "auto, full or ring",
            { { "auto", staging_kind::automatic }, { "full", staging_kind::full }, { "ring", staging_kind::ring } }, moe.staging_wanted);
    read_name<moe::prefetch_kind>(ml, "moestream.prefetch", "--moe-prefetch", "auto, on or off",
            { { "auto", moe::prefetch_kind::automatic }, { "on", moe::prefetch_kind::on }, { "off", moe::prefetch_kind::off } }, moe.prefetch);
    read_name<gpu_path_kind>(ml, "moestream.gpu_path", "--moe-gpu-path", "auto, copy or mailbox",
            { { "auto", gpu_path_kind::automatic }, { "copy", gpu_path_kind::copy }, { "mailbox", gpu_path_kind::mailbox } }, moe.gpu_path);
    read_name<pool_kind>(ml, "moestream.pool", "--moe-pool", "auto, device or host",
            { { "auto", pool_kind::automatic }, { "device", pool_kind::device }, { "host", pool_kind::host } }, moe.pool_wanted);
    read_bool(ml, "moestream.overlap",     moe.overlap);
    read_bool(ml, "moestream.require_gpu", moe.require_gpu);
    if (const auto * o = number_setting(ml, "moestream.ram", "--moe-ram", MOE_RAM_AUTO, INT64_MAX, "a number of bytes, auto or none")) {
        moe.ram_wanted = o->val_i64;
        moe.ram_given  = true;
    }
    if (const auto * o = number_setting(ml, "moestream.map_pin", "--moe-map-pin", 0, 1000000, "a number of experts")) {
        moe.map_pin = (int32_t) o->val_i64;
    }
    if (const auto * o = setting(ml, "moestream.warm", LLAMA_KV_OVERRIDE_TYPE_INT)) {
        moe.warm_s = std::min<int64_t>(o->val_i64, 86400);
    }
    moe.files = read_files(ml);
    if (const auto * o = number_setting(ml, "moestream.trace_limit", "--moe-trace-limit", 1, 1 << 30, "a number of MiB from 1")) {
        moe.trace_limit = (uint64_t) o->val_i64 << 20;
    }
}

// settings of which one makes no sense with, or without, another
static void refuse_settings(const moe_stream & moe, const llama_model_loader & ml) {
    if (moe.prefetch == moe::prefetch_kind::on && !moe.overlap) {
        throw std::runtime_error("--moe-prefetch on cannot be combined with --moe-overlap off: matmuls wait for what was guessed; hint: leave out one of them");
    }
    if (moe.staging_wanted == staging_kind::ring && !moe.overlap) {
        throw std::runtime_error("--moe-staging ring cannot be combined with --moe-overlap off: matmuls wait for what passes through the ring; hint: leave out one of them");
    }
    if (ml.kv_overrides.count("moestream.trace_limit") && !moe.files.trace) {
        throw std::runtime_error("--moe-trace-limit does nothing without --moe-trace; hint: add --moe-trace FILE, or leave it out");
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

// the first that says where experts go, and which; null: none
static std::pair<const llama_model_tensor_buft_override *, const file_tensor *> override_of_experts(const moe_stream & moe, const llama_model_loader & ml) {
    for (const auto * o = ml.tensor_buft_overrides; o && o->pattern; ++o) {
        const std::regex pattern(o->pattern);
        for (const auto & [il, tensors] : moe.layers) {
            for (const file_tensor & t : tensors) {
                if (std::regex_search(t.name, pattern)) {
                    return { o, &t };
                }
            }
        }
    }
    return {};
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
    if (const auto [o, t] = override_of_experts(moe, ml); o && !moe.takes_pools) { // else it says where the slots are
        throw std::runtime_error(format("--moe-slots cannot be combined with --cpu-moe, --n-cpu-moe or an --override-tensor that "
                "matches experts: '%s' matches '%s'; hint: leave out one of them", o->pattern, t->name.c_str()));
    }
}

// where upstream will put all layers, known before it does
static ggml_backend_dev_t only_device_of(const moe_stream & moe, const llama_model_loader & ml, const llama_hparams & hparams,
        const llama_model_params & params, const std::vector<llama_device> & devices) {
    const bool all_layers = params.n_gpu_layers < 0 || params.n_gpu_layers > (int32_t) hparams.n_layer_all; // the output counts as one
    return all_layers && devices.size() == 1 && functions_of(devices[0].dev) && !override_of_experts(moe, ml).first ? devices[0].dev : nullptr;
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

// upstream's loader reserves as much behind a tensor whose rows are no multiple of this, and its kernels read it
static constexpr int64_t device_row_elements = 512;

} // namespace moe::hooks

using namespace moe::hooks;

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
    refuse_settings(*moe, ml);

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
