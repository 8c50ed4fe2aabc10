// Slots that devices look after: the RAM tier below them, the tables that kernels read, and what host and device tell each other.

#include "model.h"

#include <cstddef>
#include <cstdlib>

namespace moe::hooks {

// the mailbox, and behind it what slabs hold
static constexpr size_t mailbox_bytes = (sizeof(moe::device_mailbox) + 4095) / 4096 * 4096;

std::vector<moe::device_tier::layer> tier_layers(const moe_stream & moe) {
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

uint64_t device_ram_budget(const moe_stream & moe) {
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

bool lock_slabs(moe_stream & moe) {
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

uint8_t * make_bounce(moe_stream & moe, const moe::file_source & source, int32_t n_in_flight) {
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

void make_tables(moe_stream & moe) {
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
        p.at_tables = memory_of(buffer);
        p.control   = (moe::device_control *) tensors.back()->data;
    }
}

moe::device_tier::options tier_options(const moe_stream & moe, bool poison) {
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

// between graphs: the device knows of no expert in a slot
static void empty_slots(const expert_place & place, const moe::device_layer & l) {
    static const std::vector<int32_t> none(moe::device_max_rows, -1);
    place.at_tables->write(l.slot_of, none.data(), l.n_expert * sizeof(int32_t));
    place.at_tables->write(l.expert_of, none.data(), l.n_slot * sizeof(int32_t));
}

void fill_tables(moe_stream & moe, const std::vector<moe::layer_desc> & descs, bool checks) {
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

} // namespace moe::hooks

using namespace moe::hooks;

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
