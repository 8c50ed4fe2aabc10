// When all tensors are known and none has memory: who looks after slots on devices, what staging and the RAM tier take; and what becomes of mapped files.

#include "model.h"

#include "llama-mmap.h"

#include <cerrno>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

namespace moe::hooks {

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

// of a layer: what guesses are made with
static const char * const router_tensors[] = {
    "ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias",
};

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

// keep what the model really uses (layers of a skipped MTP head stay unread), and where
static void find_pools(moe_stream & moe, llama_model_loader & ml) {
    for (auto it = moe.layers.begin(); it != moe.layers.end(); ) {
        for (file_tensor & t : it->second) {
            const auto it_ctx = ml.ctx_map.find({ t.place ? t.place : pool_buft(), false });
            t.pool = it_ctx == ml.ctx_map.end() ? nullptr : ggml_get_tensor(it_ctx->second.get(), t.name.c_str());
            if (!t.pool) {
                continue;
            }
            moe.places[t.place];
            if (t.place != it->second[0].place) {
                throw std::runtime_error(format("--moe-slots: the experts of layer %d are in two places, '%s' on %s and '%s' on %s; hint: an --override-tensor that "
                        "matches all expert tensors of a layer, or none", it->first, it->second[0].name.c_str(), ggml_backend_buft_name(it->second[0].place),
                        t.name.c_str(), ggml_backend_buft_name(t.place)));
            }
        }
        const bool used = it->second[0].pool != nullptr;
        it = used ? std::next(it) : moe.layers.erase(it);
    }
    if (moe.places.empty()) {
        throw std::runtime_error("--moe-slots: the model uses none of its expert tensors");
    }
}

static void refuse_device_flags(const moe_stream & moe) {
    if (moe.gpu_path != gpu_path_kind::automatic || moe.pool_wanted != pool_kind::automatic) {
        const char * flag = moe.gpu_path != gpu_path_kind::automatic ? "--moe-gpu-path" : "--moe-pool";
        throw std::runtime_error(format("%s does nothing: the experts of all layers are computed on the cpu; hint: leave out %s, or -ngl 99 without --cpu-moe and a build for "
                "the card (moestream build --backend cuda)", flag, flag));
    }
}

// a tensor of bytes beside the pools of a place
static ggml_tensor * add_bytes(llama_model_loader & ml, ggml_backend_buffer_type_t place, const char * name, uint64_t size) {
    ggml_tensor * t = ggml_new_tensor_1d(ml.ctx_map.at({ place, false }).get(), GGML_TYPE_I8, size);
    ggml_set_name(t, name);
    return t;
}

// false: no layer needs it
static bool add_staging(moe_stream & moe, llama_model_loader & ml) {
    moe.half_bytes = 0;
    lay_out_staging(moe);
    std::set<ggml_backend_buffer_type_t> needed;
    for (const auto & [il, tensors] : moe.layers) {
        for (const file_tensor & t : tensors) {
            // a device takes batches of more than a few tokens through staging only
            if (t.pool && !moe.resident.count(il) && (is_device_pool(t.place) || t.pool->ne[2] < t.n_expert)) {
                needed.insert(t.place);
            }
        }
    }
    for (const ggml_backend_buffer_type_t place : needed) {
        moe.places[place].staging = add_bytes(ml, place, "moe_staging", moe.staging_bytes());
    }
    if (needed.empty()) {
        moe.half_bytes = 0;
        moe.n_ring     = 0;
    }
    return !needed.empty();
}

// below slots in the processor's memory
static void add_ram_tier(moe_stream & moe, llama_model_loader & ml) {
    std::vector<moe::ram_tier::layer_size> sizes;
    for (const auto & [il, tensors] : moe.layers) {
        sizes.push_back({ slab_bytes(tensors), (int32_t) tensors[0].n_expert, (int32_t) tensors[0].pool->ne[2] });
    }
    const uint64_t bytes = moe::ram_tier(sizes, moe.ram_budget).bytes();
    if (bytes > 0) {
        moe.ram = add_bytes(ml, pool_buft(), "moe_ram", bytes + tensor_pad);
    } else if (moe.ram_wanted != MOE_RAM_AUTO) {
        throw std::runtime_error(format("--moe-ram %lld has no room for an expert of this model, which takes %llu bytes; hint: --moe-ram 1GiB, say, or leave it out",
                (long long) moe.ram_wanted, (unsigned long long) slab_bytes(moe.layers.begin()->second)));
    }
}

// while the contexts are the loader's
static void note_routers(moe_stream & moe, const llama_model_loader & ml) {
    for (const auto & [il, tensors] : moe.layers) {
        for (const char * name : router_tensors) {
            const std::string full = format("blk.%d.%s", il, name);
            for (const auto & [key, ctx_weights] : ml.ctx_map) {
                if (ggml_tensor * t = ggml_get_tensor(ctx_weights.get(), full.c_str())) {
                    moe.routers[full] = t;
                }
            }
        }
    }
}

} // namespace moe::hooks

using namespace moe::hooks;

void moe_load_layout(moe_stream * moe, llama_model_loader & ml) {
    if (!moe) {
        return;
    }
    find_pools(*moe, ml);
    check_on_gpu(*moe);
    if (moe->on_device()) {
        decide_gpu_path(*moe, ml.no_alloc);
        refuse_on_device(*moe);
        moe->n_ring = 0;
    } else {
        refuse_device_flags(*moe);
    }
    const bool any_staging = add_staging(*moe, ml);
    if (moe->on_device() || !any_staging) { // copies to and from a device's slots are not made for them
        moe->ram_budget = moe->by_device ? moe->ram_budget : 0;
        moe->n_guess    = 0;
    }
    if (moe->ram_budget > 0 && !moe->by_device) {
        add_ram_tier(*moe, ml);
    }
    if (moe->n_guess > 0) {
        moe->guesses = add_bytes(ml, pool_buft(), "moe_guesses", moe->n_guess * moe->guess_bytes + tensor_pad);
    }
    note_routers(*moe, ml);
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
