// How many slots a layer gets, and how large everything else is: sizes alone, nothing is allocated.

#include "model.h"

#include "budget.h"

#include <tuple>

namespace moe::hooks {

void lay_out_staging(moe_stream & moe) {
    for (auto & [il, tensors] : moe.layers) {
        uint64_t pos = 0;
        for (file_tensor & t : tensors) {
            t.staging_offset = pos;
            pos += align_up(t.expert_bytes * t.n_expert + std::max<uint64_t>(tensor_pad, t.pad_bytes), 4096);
        }
        moe.half_bytes = std::max(moe.half_bytes, pos);
    }
}

void lay_out_ring(moe_stream & moe) {
    moe.ring_bytes = 64; // tensors without elements are refused later, by name
    for (const auto & [il, tensors] : moe.layers) {
        for (const file_tensor & t : tensors) {
            moe.ring_bytes = std::max(moe.ring_bytes, align_up(t.expert_bytes, 64));
        }
    }
    moe.n_ring = (int32_t) std::clamp<uint64_t>((64ull << 20) / moe.ring_bytes, 8, 64);
}

void lay_out_guesses(moe_stream & moe) {
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

// of all layers that have experts
struct expert_sizes {
    int64_t  n_expert_max = 0;
    int64_t  n_used_max   = 0;
    uint64_t slot_bytes   = 0; // one slot in each layer
    bool     is_repacked  = false;

    expert_sizes(const moe_stream & moe, const llama_hparams & hparams) {
        for (const auto & [il, tensors] : moe.layers) {
            n_used_max = std::max<int64_t>(n_used_max, hparams.n_expert_used(il));
            for (const file_tensor & t : tensors) {
                is_repacked  = is_repacked || t.repack;
                n_expert_max = std::max(n_expert_max, t.n_expert);
                slot_bytes  += t.expert_bytes;
            }
        }
    }

    // upstream's repacked kernels take no tensor of one expert
    int64_t n_slot_min() const { return is_repacked ? 2 : 1; }
};

static void refuse_number(const moe_stream & moe, const expert_sizes & sizes) {
    const int64_t wanted = moe.slots_wanted;
    if (wanted == MOE_SLOTS_AUTO && moe.memory.available_bytes == 0) {
        throw std::runtime_error("--moe-slots auto: this system does not say how much memory is available; hint: --moe-slots N");
    }
    if (wanted > 0 && wanted < sizes.n_used_max) {
        throw std::runtime_error(format("--moe-slots %lld is too few: a token of this model uses %lld experts a layer; hint: --moe-slots %lld or more",
                (long long) wanted, (long long) sizes.n_used_max, (long long) sizes.n_used_max));
    }
    if (wanted <= 0 && wanted != MOE_SLOTS_AUTO && wanted != MOE_SLOTS_MAP) {
        throw std::runtime_error(format("setting 'moestream.slots' is %lld: expected a number of slots, %d (auto), %d (all) or %d (map)",
                (long long) wanted, MOE_SLOTS_AUTO, MOE_SLOTS_ALL, MOE_SLOTS_MAP));
    }
}

// n_slot_of, and the largest in n_slot; returns the bytes of all slots
static uint64_t take_slots_of_map(moe_stream & moe, const llama_hparams & hparams, const expert_sizes & sizes) {
    for (const moe::map_layer & l : moe.map->layers) {
        const int64_t n_used = hparams.n_expert_used(l.layer);
        if (l.n_slot < n_used) {
            throw std::runtime_error(format("--moe-slots map: %s gives layer %d %d slots, which is too few: a token of this model uses %lld experts a layer; "
                    "hint: make the map again with a larger --budget", moe.files.map, l.layer, l.n_slot, (long long) n_used));
        }
        int32_t & n_slot = moe.n_slot_of[l.layer];
        n_slot = (int32_t) std::min<int64_t>(std::max<int64_t>(l.n_slot, sizes.n_slot_min()), (int64_t) l.counts.size());
        moe.n_slot = std::max(moe.n_slot, n_slot);
    }
    uint64_t n = 0;
    for (const auto & [il, n_slot] : moe.n_slot_of) {
        for (const file_tensor & t : moe.layers.at(il)) {
            n += n_slot * t.expert_bytes;
        }
    }
    return n;
}

// what everything must fit into: the processor's memory, or that of the device where it all goes
struct room {
    moe::memory_now memory;
    uint64_t        reserve; // for the program itself, and whatever else runs

    explicit room(const moe_stream & moe) : memory(moe.memory) {
        reserve = memory.available_bytes / 20 + std::min<uint64_t>(512ull << 20, memory.available_bytes / 10);
        if (moe.only_device && moe.slots_wanted == MOE_SLOTS_AUTO) {
            size_t free  = 0;
            size_t total = 0;
            ggml_backend_dev_memory(moe.only_device, &free, &total);
            memory  = { free, std::string("free on ") + ggml_backend_dev_name(moe.only_device) };
            reserve = free / 20 + std::min<uint64_t>(1280ull << 20, free / 4); // upstream's fit wants 1 GiB to be left
        }
    }
};

struct decision {
    int32_t  n_slot;
    bool     ring;
    uint64_t ram_bytes;
};

// wanted: slots, or MOE_SLOTS_AUTO. map_bytes: of slots that a map gives; 0: none does.
static decision decide(const moe_stream & moe, const llama_hparams & hparams, const expert_sizes & sizes, const context_plan & plan, int64_t wanted, uint64_t map_bytes) {
    const room     place(moe);
    const uint64_t kv_bytes = kv_bytes_estimate(hparams, plan);
    const uint64_t entries  = moe.n_guess * moe.guess_bytes;
    moe::slot_budget b;
    b.available_bytes = place.memory.available_bytes - place.reserve;
    b.resident_bytes  = moe.dense_bytes + kv_bytes + compute_bytes_estimate(hparams, plan, sizes.n_used_max)
        + (moe.io.n_in_flight > 0 ? moe.io.n_in_flight : moe::max_in_flight) * moe::reader::default_chunk_size;
    b.slot_bytes      = sizes.slot_bytes;
    b.staging_bytes   = 2 * moe.half_bytes;
    b.n_expert        = (int32_t) sizes.n_expert_max;

    decision d;
    d.n_slot = (int32_t) std::min(std::max(wanted, sizes.n_slot_min()), sizes.n_expert_max);
    d.ring   = moe.staging_wanted == staging_kind::ring;
    const auto slots_bytes = [&] { return map_bytes > 0 ? map_bytes : d.n_slot * sizes.slot_bytes; };
    if (moe.only_device) { // where it is always needed
        b.resident_bytes += b.staging_bytes;
        b.staging_bytes = 0;
    } else if (moe.staging_wanted == staging_kind::automatic && moe.overlap && place.memory.available_bytes > 0) {
        d.ring = moe::staging_is_too_large(b, wanted == MOE_SLOTS_AUTO ? 0 : slots_bytes());
    }
    if (d.ring) {
        b.staging_bytes = moe.staging_bytes();
    }
    if (wanted == MOE_SLOTS_AUTO) {
        d.n_slot = moe::slots_that_fit(b);
        if (d.n_slot < sizes.n_expert_max) { // then there is something to keep below the slots, and to guess
            b.resident_bytes += moe.only_device ? 0 : entries + std::max<int64_t>(moe.ram_wanted, 0);
            d.n_slot = moe::slots_that_fit(b);
        }
    }
    d.ram_bytes = std::max<int64_t>(moe.ram_wanted, 0);
    if (moe.ram_wanted == MOE_RAM_AUTO) {
        const uint64_t taken = b.resident_bytes + b.staging_bytes + slots_bytes() + (wanted == MOE_SLOTS_AUTO ? 0 : entries);
        d.ram_bytes = b.available_bytes - std::min(b.available_bytes, taken);
    }
    if (d.n_slot < sizes.n_used_max) {
        const auto mib = [](uint64_t n) { return n / 1048576.0; };
        throw std::runtime_error(format("--moe-slots auto: %lld slots a layer, the fewest there can be, take %.1f MiB (%.1f of them KV cache for a context of %lld), "
                "and with a margin %.1f of the %.1f MiB available (%s) may be used; hint: %sa smaller context (-c), free memory, or --moe-slots %lld to try all the same",
                (long long) sizes.n_used_max, mib(b.resident_bytes + b.staging_bytes + sizes.n_used_max * sizes.slot_bytes), mib(kv_bytes),
                (long long) plan.n_ctx, mib(b.available_bytes), mib(place.memory.available_bytes), place.memory.limited_by.c_str(),
                moe.ram_wanted > 0 ? "a smaller --moe-ram, or none; " : "", (long long) sizes.n_used_max));
    }
    return d;
}

void decide_slots(moe_stream & moe, const llama_model_loader & ml, const llama_hparams & hparams) {
    const expert_sizes sizes(moe, hparams);
    if (moe.slots_wanted == MOE_SLOTS_ALL) {
        moe.n_slot = (int32_t) sizes.n_expert_max;
        return;
    }
    refuse_number(moe, sizes);
    const uint64_t map_bytes = moe.slots_wanted == MOE_SLOTS_MAP ? take_slots_of_map(moe, hparams, sizes) : 0;
    const int64_t  wanted    = moe.slots_wanted == MOE_SLOTS_MAP ? moe.n_slot : moe.slots_wanted;
    const context_plan plan(ml, hparams);

    // The memory-fit pass and the real load must decide alike, whatever became of free memory in between; another load must not: all else that
    // decide() looks at is in the key.
    using key = std::tuple<std::string, uint64_t, uint64_t, int64_t, int64_t, uint64_t, staging_kind, bool, int64_t, int32_t, int32_t, int64_t, bool, ggml_backend_dev_t>;
    static std::mutex mutex;
    static std::map<key, decision> decided;
    const key this_one = { ml.arch_name, ml.n_bytes, kv_bytes_estimate(hparams, plan), plan.n_ubatch, wanted, map_bytes, moe.staging_wanted, moe.overlap,
        moe.ram_wanted, moe.n_guess, moe.io.n_in_flight, sizes.n_used_max, sizes.is_repacked, moe.only_device };
    std::lock_guard<std::mutex> lock(mutex);
    auto it = decided.find(this_one);
    if (it == decided.end()) {
        it = decided.emplace(this_one, decide(moe, hparams, sizes, plan, wanted, map_bytes)).first;
    }
    moe.n_slot     = it->second.n_slot;
    moe.ram_budget = it->second.ram_bytes;
    if (!it->second.ring) {
        moe.n_ring = 0;
    }
}

} // namespace moe::hooks
