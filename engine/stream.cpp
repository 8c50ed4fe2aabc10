#include "stream.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace moe {

static uint64_t now_us() {
    using namespace std::chrono;
    return (uint64_t) duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

// of an expert in a slab, or in an entry for guesses: each part aligned
static uint64_t slab_bytes(const layer_desc & d) {
    uint64_t n = 0;
    for (const expert_part & part : d.parts) {
        n += ram_tier::aligned(part.expert_bytes);
    }
    return n;
}

// where in it a part begins
static uint64_t offset_in_slab(const layer_desc & d, size_t i_part) {
    uint64_t n = 0;
    for (size_t i = 0; i < i_part; ++i) {
        n += ram_tier::aligned(d.parts[i].expert_bytes);
    }
    return n;
}

stream::stream(const options & opt, std::vector<layer_desc> descs, std::unique_ptr<reader> io_in)
    : opt(opt), io(std::move(io_in)) {
    int32_t n_expert_max = 0;
    size_t  n_part_max   = 0;
    std::vector<ram_tier::layer_size> sizes;
    std::vector<device_tier::layer> of_device;
    for (layer_desc & d : descs) {
        of_device.push_back({ d.layer, d.n_expert, {}, {} });
        if (d.by_device && d.n_slot < d.n_expert) {
            for (const expert_part & p : d.parts) {
                of_device.back().parts.push_back({ p.file, p.offset, p.expert_bytes });
            }
            of_device.back().warm = std::move(d.warm);
            d.warm.clear();
        }
        auto l = std::make_unique<layer_state>(d, opt.policy, (int32_t) layers.size());
        auto s = std::make_unique<layer_stats>();
        s->layer    = d.layer;
        s->n_expert = d.n_expert;
        s->n_slot   = d.n_slot;
        l->stats    = s.get();
        l->pending.reserve(d.n_slot);
        l->held.reserve(2 * d.n_slot);
        sizes.push_back({ slab_bytes(d), d.n_expert, d.n_slot });
        l->last_experts.reserve(d.n_slot);
        l->checksums.resize(opt.check ? d.n_slot : 0);
        layers.push_back(std::move(l));
        stats_.layers.push_back(std::move(s));
        n_expert_max = std::max(n_expert_max, d.n_expert);
        n_part_max   = std::max(n_part_max, d.parts.size());
        if (d.at && (opt.ram || opt.guesses || opt.n_ring > 0)) {
            fprintf(stderr, "stream: layer %d has its slots in a storage, which takes nothing from memory of the processor's\n", d.layer);
            abort();
        }
        for (const expert_part & part : d.parts) {
            if (opt.check && d.at && part.expert_bytes > scratch_bytes.size()) {
                scratch_bytes.resize(part.expert_bytes);
            }
        }
    }
    seen.assign(n_expert_max, 0);
    slot_by_expert.assign(n_expert_max, -1);
    scratch_experts.reserve(n_expert_max);
    scratch_placed.reserve(n_expert_max);
    scratch_transfers.reserve(n_expert_max * n_part_max);
    if (opt.ram) {
        ram = std::make_unique<ram_tier>(sizes, opt.ram_bytes);
        slab_sums.resize(opt.check ? ram->n_slab() : 0);
        ring_held.reserve(n_expert_max);
    }
    for (int32_t i = 0; opt.guesses && i < opt.n_guess; ++i) {
        guesses.push_back(std::make_unique<guess_entry>());
        guesses.back()->landings = std::vector<landing>(n_part_max);
    }
    for (half & h : halves) {
        h.filled.reserve(n_expert_max);
        h.held.reserve(2 * n_expert_max);
        h.landings = std::vector<landing>(n_part_max * n_expert_max);
    }
    late.order.reserve(n_expert_max);
    late.slots.reserve(n_expert_max);
    late.guesses.reserve(n_expert_max);
    if (opt.n_ring > 0 && opt.staging) {
        ring = std::make_unique<expert_ring>(*io, opt.staging, opt.ring_bytes, opt.n_ring, n_expert_max * n_part_max, opt.poison);
    }
    device_before.resize(layers.size());
    if (opt.device.box) {
        tier = std::make_unique<device_tier>(opt.device, std::move(of_device), *io, stats_);
    }
}

stream::~stream() {
    {
        std::lock_guard<std::mutex> lock(warm_mutex);
        warm_stopping = true;
    }
    warm_changed.notify_all();
    if (warm_thread.joinable()) {
        warm_thread.join();
    }
    tier.reset(); // submits to
    io.reset(); // ends the workers; nothing is in flight from here on
}

void stream::compute_begin() {
    compute.lock();
    error.clear();
    guessing     = (!guesses.empty() || opt.device_guesses) && (opt.prefetch == prefetch_kind::on || (opt.prefetch == prefetch_kind::automatic && guess_trial.is_on()));
    guess_tokens = 0;
    begin_us     = now_us();
    stats_.prefetch_on = guessing;
    if (tier) {
        tier->compute_begin();
    }
    std::lock_guard<std::mutex> lock(warm_mutex);
    is_computing = true;
}

std::string stream::compute_end(bool complete, const std::function<void()> & when_failed) {
    if (tier) {
        const std::string what = tier->compute_end();
        if (!what.empty()) {
            note_error(what.c_str(), 0); // its reads are counted
        }
    }
    if (complete) {
        settle_late();
    }
    late.i_layer = -1;
    drop_guesses(-1);
    if (!complete || !error.empty()) {
        if (ring) {
            ring->end();
            ring->group().clear(); // the graph has failed anyway
            release(ring_held);
        }
        // an aborted graph leaves layers between begin and join
        for (auto & l : layers) {
            settle_slots(*l, *l->stats);
        }
        for (half & h : halves) {
            if (h.i_layer >= 0) {
                settle_half(h, *layers[h.i_layer]->stats);
            }
        }
    }
    if (complete && error.empty() && guess_tokens > 0 && opt.prefetch == prefetch_kind::automatic) {
        guess_trial.note(now_us() - begin_us, guess_tokens);
    }
    const std::string result = std::move(error);
    if (!result.empty() && when_failed) {
        when_failed();
    }
    {
        std::lock_guard<std::mutex> lock(warm_mutex);
        is_computing = false;
    }
    warm_changed.notify_all();
    compute.unlock();
    return result;
}

void stream::note_error(const char * what, size_t n_failed) {
    stats_.read_errors += n_failed;
    if (!error.empty()) {
        return;
    }
    try {
        error = what;
    } catch (const std::bad_alloc &) {
        error = "no memory"; // short enough for a string to hold it without any
    }
}

// The experts chosen, each once, in order of first appearance, into scratch_experts. False, and an error, when a token did not get
// different experts of the layer.
bool stream::list_chosen(const layer_desc & d, const chosen_experts & chosen) {
    const uint64_t first_mark = seen_mark + 1; // each token has a mark of its own
    scratch_experts.clear();
    for (int64_t t = 0; t < chosen.n_tokens; ++t) {
        ++seen_mark;
        for (int64_t k = 0; k < chosen.n_used; ++k) {
            const int32_t e = chosen.at(t, k);
            const bool exists = e >= 0 && e < d.n_expert;
            if (!exists || seen[e] == seen_mark) {
                char what[200];
                snprintf(what, sizeof(what), "layer %d: the router chose expert %d of %d%s for token %lld of the batch; are the weights damaged?",
                    d.layer, e, d.n_expert, exists ? " twice" : "", (long long) t);
                note_error(what, 0);
                return false;
            }
            if (seen[e] < first_mark) {
                scratch_experts.push_back(e);
            }
            seen[e] = seen_mark;
        }
    }
    return true;
}

void stream::record(int32_t i_layer, const chosen_experts & chosen) {
    if (opt.trace) {
        opt.trace->record(i_layer, chosen.n_used, chosen.n_tokens, [&](int64_t t, int64_t k) { return chosen.at(t, k); });
    }
}

// those of the last tokens, newest first, as many as there are slots; list_chosen() has looked at the ids
void stream::list_last(layer_state & l, const chosen_experts & chosen) {
    ++seen_mark;
    l.last_experts.clear();
    for (int64_t t = chosen.n_tokens - 1; t >= 0; --t) {
        for (int64_t k = 0; k < chosen.n_used; ++k) {
            const int32_t e = chosen.at(t, k);
            if (seen[e] == seen_mark) {
                continue;
            }
            if ((int32_t) l.last_experts.size() == l.desc.n_free_slot()) {
                return;
            }
            seen[e] = seen_mark;
            l.last_experts.push_back(e);
        }
    }
}

// the experts' own
static void write_own_ids(const chosen_experts & chosen, int32_t * ids_out) {
    for (int64_t t = 0; t < chosen.n_tokens; ++t) {
        for (int64_t k = 0; k < chosen.n_used; ++k) {
            *ids_out++ = chosen.at(t, k);
        }
    }
}

// ids of different rows, whatever is in them
static void write_any_ids(const chosen_experts & chosen, int32_t n_row, int32_t * ids_out) {
    for (int64_t t = 0; t < chosen.n_tokens; ++t) {
        for (int64_t k = 0; k < chosen.n_used; ++k) {
            *ids_out++ = (int32_t) (k % n_row);
        }
    }
}

// FNV-1a (Fowler, Noll, Vo) over words of 8 bytes: to find accidents, not attacks
template <typename F> static uint64_t checksum(const layer_desc & d, F && bytes_of) {
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t k = 0; k < d.parts.size(); ++k) {
        const uint8_t * bytes = bytes_of(k);
        for (uint64_t i = 0; i < d.parts[k].expert_bytes; i += 8) {
            uint64_t word = 0;
            memcpy(&word, bytes + i, std::min<uint64_t>(8, d.parts[k].expert_bytes - i));
            h = (h ^ word) * 0x100000001b3u;
        }
    }
    return h;
}

uint64_t stream::slot_checksum(const layer_desc & d, int32_t slot) {
    return checksum(d, [&](size_t i) -> const uint8_t * {
        const uint8_t * bytes = d.parts[i].slots + slot * d.parts[i].expert_bytes;
        if (d.at) {
            d.at->read(scratch_bytes.data(), bytes, d.parts[i].expert_bytes);
            bytes = scratch_bytes.data();
        }
        return bytes;
    });
}

void stream::note_changed(const char * what, const layer_state & l, int32_t number, int32_t expert) {
    char text[200];
    snprintf(text, sizeof(text), "layer %d: %s %d changed while it held expert %d", l.desc.layer, what, number, expert);
    note_error(text, 0);
}

// A slot that changed while it held an expert is an error, and is given up, so that the expert is read again.
void stream::check_slot(layer_state & l, int32_t expert) {
    const int32_t slot = l.pool.peek(expert);
    if (slot < 0 || slot_checksum(l.desc, slot) == l.checksums[slot]) {
        return;
    }
    note_changed("slot", l, slot, expert);
    l.pool.drop(slot);
    l.stats->pins = l.pool.n_kept();
}

uint8_t * stream::in_half(const half & h, const layer_desc & d, const expert_part & part, int32_t expert) const {
    return (d.staging ? d.staging : opt.staging) + (&h - halves) * opt.half_bytes + part.staging_offset + expert * part.expert_bytes;
}

// sleep until the group is idle; the computing thread's time counts for the layer that waits, whosever bytes these are
void stream::wait_for(transfer_group & group, layer_stats & waiting) {
    if (group.idle()) {
        return;
    }
    const uint64_t t_start = now_us();
    group.wait();
    waiting.stall_us += now_us() - t_start;
}

void stream::zero_slot(layer_state & l, int32_t slot) {
    for (const expert_part & part : l.desc.parts) {
        fill_in(l.desc.at, part.slots + slot * part.expert_bytes, 0, part.expert_bytes);
    }
}

// wait for the fills of the layer's slots and take them into the pool; a failed one leaves zeros and an empty slot
void stream::settle_slots(layer_state & l, layer_stats & waiting) {
    copy_guessed(l, waiting);
    settle_fills(l, waiting);
}

// but for what is in an entry and not on its way to its slot
void stream::settle_fills(layer_state & l, layer_stats & waiting) {
    wait_for(l.group, waiting);
    size_t n_failed = 0;
    size_t n_left   = 0;
    for (const slot_fill & f : l.pending) {
        const int32_t slot = f.at.slot;
        if (f.i_guess >= 0 && !f.copying && !f.failed) {
            l.pending[n_left++] = f;
            continue;
        }
        if (f.failed || l.group.has_failed(slot)) {
            n_failed += !f.copying && !f.failed; // a copy that nobody waits for is no loss; an entry's read was counted
            zero_slot(l, slot);
            l.pool.fail(slot);
            if (f.saved >= 0) {
                ram->forget(f.saved); // who knows how far it came
            }
            continue;
        }
        l.pool.commit(slot);
        if (opt.check) {
            l.checksums[slot] = slot_checksum(l.desc, slot);
            if (f.source >= 0 && l.checksums[slot] != f.checksum) {
                note_changed("slab", l, f.source, f.at.expert);
                l.pool.drop(slot);
            }
        }
    }
    l.pending.resize(n_left);
    if (n_left == 0) {
        release(l.held);
    }
    l.stats->pins = l.pool.n_kept();
    if (!l.group.ok()) {
        if (n_failed > 0) {
            note_error(l.group.error().c_str(), n_failed);
        }
        l.group.clear();
    }
}

void stream::settle_half(half & h, layer_stats & waiting) {
    wait_for(h.fill, waiting);
    if (h.i_layer >= 0) {
        release(*layers[h.i_layer], h.held);
    }
    if (h.fill.ok()) {
        return;
    }
    const layer_desc & d = layers[h.i_layer]->desc;
    size_t n_failed = 0;
    bool   needed   = false;
    for (int32_t e = 0; e < d.n_expert; ++e) {
        if (!h.filled[e] || !h.fill.has_failed(e)) {
            continue;
        }
        ++n_failed;
        needed = needed || h.filled[e] == 2;
        h.filled[e] = 0;
        for (const expert_part & part : d.parts) {
            fill_in(d.at, in_half(h, d, part, e), 0, part.expert_bytes);
        }
    }
    if (needed) {
        note_error(h.fill.error().c_str(), n_failed);
    } else {
        stats_.read_errors += n_failed;
    }
    h.fill.clear();
}

// Called by whoever waited for the last bytes, else by the next begin or the end: a layer may also be left out of a computation.
void stream::settle_late() {
    if (late.i_layer >= 0) {
        const int32_t i_layer = late.i_layer;
        late.i_layer = -1;
        if (late.staged && ring) {
            settle_ring(*layers[i_layer]);
        } else {
            settle(i_layer, late.staged);
        }
    }
}

void stream::begin_late(int32_t i_layer, bool staged) {
    late.i_layer = i_layer;
    late.staged  = staged;
}

uint8_t * stream::in_slab(int32_t slab, const layer_desc & d, size_t i_part) const {
    return opt.ram + ram->offset(slab) + offset_in_slab(d, i_part);
}

uint8_t * stream::in_entry(int32_t i_guess, const layer_desc & d, size_t i_part) const {
    return opt.guesses + i_guess * opt.guess_bytes + offset_in_slab(d, i_part);
}

// the slab that has the expert's bytes; -1: none
int32_t stream::find_slab(const layer_state & l, int32_t expert) const {
    const int32_t slab = ram ? ram->find(l.index, expert) : -1;
    return slab == l.warm_slab ? -1 : slab; // they may not be there yet
}

// likewise, held from now on
int32_t stream::hold_slab(const layer_state & l, int32_t expert, std::vector<int32_t> & held) {
    const int32_t slab = find_slab(l, expert);
    if (slab >= 0) {
        ram->hold(slab);
        held.push_back(slab);
    }
    return slab;
}

void stream::release(const layer_state & l, std::vector<int32_t> & held) {
    if (l.desc.by_device) {
        tier->release(held);
        held.clear();
    } else {
        release(held);
    }
}

void stream::release(std::vector<int32_t> & held) {
    for (const int32_t slab : held) {
        ram->release(slab);
    }
    held.clear();
}

void stream::add_transfer(layer_state & l, const slot_fill & f, const half * from, size_t i_part) {
    const expert_part & part = l.desc.parts[i_part];
    const int32_t slot = f.at.slot;
    transfer t = { slot, part.file, part.offset + f.at.expert * part.expert_bytes, part.expert_bytes, part.slots + slot * part.expert_bytes, nullptr,
        part.convert, &l.landings[i_part * l.desc.n_slot + slot], nullptr, l.desc.at };
    if (f.i_guess >= 0) {
        t.src   = in_entry(f.i_guess, l.desc, i_part);
        t.lands = &guesses[f.i_guess]->copied;
    } else if (f.source >= 0) {
        t.src = in_slab(f.source, l.desc, i_part);
    } else if (from) {
        t.src   = in_half(*from, l.desc, part, f.at.expert);
        t.lands = nullptr; // the layer computes with what is in the half
    }
    t.save = f.saved >= 0 ? in_slab(f.saved, l.desc, i_part) : nullptr;
    if (opt.poison && (!t.save || t.save != t.src)) {
        if (t.save) {
            memcpy(t.save, t.dst, t.size);
            t.save = nullptr;
        }
        fill_in(t.at, t.dst, 0xff, t.size);
    }
    scratch_transfers.push_back(t);
}

// What is pending, into its slots: all of one part, then all of the next, from memory first. What comes from an entry is there already,
// and copied later. from: the half that has the others; null: the file.
void stream::fill_slots(layer_state & l, const half * from) {
    uint64_t n_from_ram = 0;
    uint64_t n_to_ram   = 0;
    for (slot_fill & f : l.pending) { // before any slab changes
        f.source = f.i_guess >= 0 ? -1 : hold_slab(l, f.at.expert, l.held);
        f.checksum = opt.check && f.source >= 0 ? slab_sums[f.source] : 0;
        n_from_ram += f.source >= 0;
    }
    for (slot_fill & f : l.pending) {
        const bool exchanges = f.source >= 0 && f.at.victim >= 0 && ram->n_held(f.source) == 1;
        if (exchanges) {
            f.saved = f.source;
            ram->exchange(f.saved, f.at.victim);
        } else if (f.source >= 0) {
            ram->forget(f.source);
        }
        if (!exchanges && ram && f.at.victim >= 0) {
            f.saved = ram->claim(l.index, f.at.victim);
            if (f.saved >= 0) {
                l.held.push_back(f.saved);
            }
        }
        if (opt.check && f.saved >= 0) {
            slab_sums[f.saved] = l.checksums[f.at.slot];
        }
        n_to_ram += f.saved >= 0;
    }
    scratch_transfers.clear();
    for (size_t i = 0; i < l.desc.parts.size(); ++i) {
        for (const bool in_memory : { true, false }) {
            for (const slot_fill & f : l.pending) {
                if (f.i_guess < 0 && (f.source >= 0) == in_memory) {
                    add_transfer(l, f, from, i);
                }
            }
        }
    }
    if (!scratch_transfers.empty()) {
        io->submit(l.group, scratch_transfers, urgency::demand);
    }
    l.stats->bytes_from_ram += n_from_ram * l.desc.expert_bytes();
    l.stats->bytes_to_ram   += n_to_ram   * l.desc.expert_bytes();
}

void stream::begin_slots(int32_t i_layer, const chosen_experts & chosen, int32_t * ids_out, bool is_late) {
    settle_late();
    late.order.clear();
    layer_state & l = *layers[i_layer];
    settle_slots(l, *l.stats);
    settle_warm(l);

    if (!list_chosen(l.desc, chosen)) {
        write_any_ids(chosen, l.desc.n_slot, ids_out); // a slot that holds no expert holds zeros
        return;
    }
    record(i_layer, chosen);
    if (opt.check) {
        for (const int32_t e : scratch_experts) {
            check_slot(l, e);
        }
    }
    l.pool.acquire(scratch_experts.data(), (int32_t) scratch_experts.size(), scratch_placed);
    l.stats->pins = l.pool.n_kept();

    late.guesses.clear();
    uint64_t n_evicted = 0;
    uint64_t n_guessed = 0;
    for (const placement & p : scratch_placed) {
        slot_by_expert[p.expert] = p.slot;
        if (p.miss) {
            slot_fill f = { p };
            f.i_guess = is_late ? use_guess(i_layer, p.expert) : -1;
            n_evicted += p.evicted;
            n_guessed += f.i_guess >= 0;
            l.pending.push_back(f);
        } else {
            late.order.push_back(p.slot);
            late.guesses.push_back(-1);
        }
    }
    drop_guesses(i_layer);
    fill_slots(l, nullptr);
    const uint64_t n_miss = l.pending.size();
    uint64_t n_from_ram = 0;
    for (const bool in_memory : { true, false }) {
        for (const slot_fill & f : l.pending) {
            if ((f.i_guess >= 0 || f.source >= 0) == in_memory) {
                late.order.push_back(f.at.slot);
                late.guesses.push_back(f.i_guess);
                n_from_ram += f.source >= 0;
            }
        }
    }
    if (n_miss > 0 && is_late) {
        begin_late(i_layer, false);
    } else {
        late.order.clear();
    }

    for (int64_t t = 0; t < chosen.n_tokens; ++t) {
        for (int64_t k = 0; k < chosen.n_used; ++k) {
            *ids_out++ = slot_by_expert[chosen.at(t, k)];
        }
    }

    const uint64_t n = scratch_placed.size();
    const uint64_t expert_bytes = l.desc.expert_bytes();
    l.stats->hits         += n - n_miss;
    l.stats->misses       += n_miss;
    l.stats->ram_hits     += n_from_ram;
    l.stats->guess_hits   += n_guessed;
    l.stats->evictions    += n_evicted;
    l.stats->bytes_needed += n * expert_bytes;
    l.stats->bytes_read   += (n_miss - n_from_ram) * expert_bytes;
    if (i_layer == 0) {
        stats_.tokens_decode += chosen.n_tokens;
    }
}

// make the half ready to take experts of this layer; what it already holds of it stays
void stream::claim_half(half & h, int32_t i_layer, layer_stats & waiting) {
    if (h.i_layer == i_layer) {
        return;
    }
    settle_half(h, waiting); // reads ahead that nobody came for
    if (h.copying_out) {
        settle_slots(*layers[h.i_layer], waiting);
        h.copying_out = false;
    }
    h.i_layer = i_layer;
    h.filled.assign(layers[i_layer]->desc.n_expert, 0);
    if (opt.poison) {
        const layer_desc & d = layers[i_layer]->desc;
        fill_in(d.at, (d.staging ? d.staging : opt.staging) + (&h - halves) * opt.half_bytes, 0xff, opt.half_bytes);
    }
}

// Behind an expert, what is not there yet, or is no expert: a device's kernels multiply some of it with zeros, and 0 * NaN is NaN.
// Upstream's loader and scheduler do the same (ggml-backend.cpp, copy_experts).
void stream::pad_half(half & h, const layer_desc & d, const std::vector<int32_t> & experts) {
    for (const expert_part & part : d.parts) {
        for (const int32_t e : experts) {
            if (part.pad_bytes > 0 && (e + 1 == d.n_expert || !h.filled[e + 1])) {
                fill_in(d.at, in_half(h, d, part, e + 1), 0, part.pad_bytes);
            }
        }
    }
}

void stream::fill_half(half & h, layer_state & l, const std::vector<int32_t> & experts, urgency how) {
    const uint64_t expert_bytes = l.desc.expert_bytes();
    uint64_t n_read     = 0;
    uint64_t n_copied   = 0;
    uint64_t n_from_ram = 0;
    scratch_transfers.clear();
    for (const int32_t e : experts) {
        if (h.filled[e]) {
            continue;
        }
        if (opt.check) {
            check_slot(l, e);
        }
        if (l.desc.by_device) {
            slot_by_expert[e] = tier->hold(l.index, e);
            if (slot_by_expert[e] >= 0) {
                h.held.push_back(slot_by_expert[e]);
            }
        } else if (l.pool.peek(e) < 0) {
            slot_by_expert[e] = hold_slab(l, e, h.held);
        }
        (l.pool.peek(e) >= 0 ? n_copied : slot_by_expert[e] >= 0 ? n_from_ram : n_read) += 1;
    }
    for (size_t i = 0; i < l.desc.parts.size(); ++i) {
        const expert_part & part = l.desc.parts[i];
        for (const int32_t e : experts) {
            if (h.filled[e]) {
                continue;
            }
            const int32_t slot = l.pool.peek(e);
            const int32_t slab = slot < 0 ? slot_by_expert[e] : -1;
            const uint8_t * src = slot >= 0 ? part.slots + slot * part.expert_bytes : slab < 0 ? nullptr :
                l.desc.by_device ? tier->bytes_of(slab, l.index, i) : in_slab(slab, l.desc, i);
            scratch_transfers.push_back({ e, part.file, part.offset + e * part.expert_bytes, part.expert_bytes, in_half(h, l.desc, part, e), src,
                part.convert, &landing_of(h, i, e), nullptr, l.desc.at, slab >= 0 });
        }
    }
    for (const int32_t e : experts) {
        h.filled[e] = std::max<uint8_t>(h.filled[e], 1);
    }
    pad_half(h, l.desc, experts);
    io->submit(h.fill, scratch_transfers, how);
    l.stats->bytes_read     += n_read * expert_bytes;
    l.stats->bytes_copied   += n_copied * expert_bytes;
    l.stats->bytes_from_ram += n_from_ram * expert_bytes;
}

void stream::begin_ring(int32_t i_layer, const chosen_experts & chosen, int32_t * ids_out) {
    layer_state & l = *layers[i_layer];
    settle_slots(l, *l.stats);
    settle_warm(l);

    if (!list_chosen(l.desc, chosen)) {
        write_any_ids(chosen, l.desc.n_slot, ids_out); // without an order, ids are rows of the pool
        return;
    }
    record(i_layer, chosen);
    if (opt.check) {
        for (const int32_t e : scratch_experts) {
            check_slot(l, e);
        }
    }
    uint64_t n_hit = 0; // some of which lose their slot to an expert of the last tokens, and are read all the same
    uint64_t n_ram = 0;
    for (const int32_t e : scratch_experts) {
        n_hit += l.pool.peek(e) >= 0;
        n_ram += l.pool.peek(e) < 0 && find_slab(l, e) >= 0;
    }
    list_last(l, chosen);
    std::reverse(l.last_experts.begin(), l.last_experts.end());
    l.pool.acquire(l.last_experts.data(), (int32_t) l.last_experts.size(), scratch_placed);
    l.stats->pins = l.pool.n_kept();

    // what is in slots, what is read into slots, and all others
    for (const placement & p : scratch_placed) {
        if (p.miss) {
            l.stats->evictions += p.evicted;
            l.pending.push_back({ p });
        }
    }
    uint64_t n_past = 0; // from the RAM tier through the ring; what has just lost its slot is not in its slab yet
    for (const int32_t e : scratch_experts) {
        slot_by_expert[e] = l.pool.has(e) ? -1 : hold_slab(l, e, ring_held);
        n_past += slot_by_expert[e] >= 0;
    }
    fill_slots(l, nullptr);

    late.slots.clear();
    const auto take_from_slots = [&](int32_t e, int32_t slot) {
        late.order.push_back(e);
        late.slots.push_back(slot);
    };
    for (const int32_t e : scratch_experts) {
        const int32_t slot = l.pool.peek(e);
        if (slot >= 0) {
            take_from_slots(e, slot);
        }
    }
    const uint64_t n_in_place = late.order.size();
    uint64_t n_from_ram = 0;
    for (const slot_fill & f : l.pending) {
        take_from_slots(f.at.expert, f.at.slot);
        n_from_ram += f.source >= 0;
    }
    for (const int32_t e : scratch_experts) {
        if (l.pool.peek(e) < 0 && seen[e] != seen_mark) { // that mark is of the last tokens' experts
            late.order.push_back(e);
        }
    }
    scratch_transfers.clear();
    for (size_t k = 0; k < l.desc.parts.size(); ++k) {
        const expert_part & part = l.desc.parts[k];
        for (size_t i = late.slots.size(); i < late.order.size(); ++i) {
            const int32_t e    = late.order[i];
            const int32_t slab = slot_by_expert[e];
            scratch_transfers.push_back({ e, part.file, part.offset + e * part.expert_bytes, part.expert_bytes, nullptr,
                slab >= 0 ? in_slab(slab, l.desc, k) : nullptr, part.convert });
        }
    }
    ring->begin(scratch_transfers);
    begin_late(i_layer, true);

    const uint64_t n = scratch_experts.size();
    const uint64_t expert_bytes = l.desc.expert_bytes();
    l.stats->hits         += n_hit;
    l.stats->misses       += n - n_hit;
    l.stats->ram_hits     += n_ram;
    l.stats->bytes_needed += n * expert_bytes;
    l.stats->bytes_read   += (n - n_in_place - n_from_ram - n_past) * expert_bytes;
    l.stats->bytes_from_ram += n_past * expert_bytes;
    if (i_layer == 0) {
        stats_.tokens_prefill += chosen.n_tokens;
    }
    write_own_ids(chosen, ids_out);
}

void stream::settle_ring(layer_state & l) {
    ring->end();
    release(ring_held);
    settle_slots(l, *l.stats);
    transfer_group & group = ring->group();
    if (!group.ok()) {
        note_error(group.error().c_str(), group.failed_tags().size());
        group.clear();
    }
}

void stream::begin_staging(int32_t i_layer, const chosen_experts & chosen, int32_t * ids_out, bool read_next, bool is_late) {
    settle_late();
    late.order.clear();
    if (ring && is_late) {
        begin_ring(i_layer, chosen, ids_out);
        return;
    }
    if (ring) {
        note_error("this graph has expert matmuls that cannot take experts from a ring; hint: --moe-staging full", 0);
        write_any_ids(chosen, layers[i_layer]->desc.n_slot, ids_out);
        return;
    }
    layer_state & l = *layers[i_layer];
    half & h = half_of(i_layer);
    settle_slots(l, *l.stats);
    settle_warm(l);

    const bool valid = list_chosen(l.desc, chosen);
    claim_half(h, i_layer, *l.stats);
    if (!valid) {
        for (int32_t e = 0; e < std::min<int64_t>(chosen.n_used, l.desc.n_expert); ++e) {
            for (const expert_part & part : l.desc.parts) {
                if (!h.filled[e]) {
                    fill_in(l.desc.at, in_half(h, l.desc, part, e), 0, part.expert_bytes);
                }
            }
        }
        write_any_ids(chosen, l.desc.n_expert, ids_out);
        if (is_late) {
            settle_half(h, *l.stats); // what was read ahead is among these rows, and nobody waits for it
        }
        return;
    }
    record(i_layer, chosen);
    list_last(l, chosen);

    const bool was_read_ahead = !h.fill.idle();
    fill_half(h, l, scratch_experts, urgency::demand);
    uint64_t n_hit = 0;
    uint64_t n_ram = 0;
    for (const int32_t e : scratch_experts) {
        n_hit += l.pool.peek(e) >= 0;
        n_ram += l.pool.peek(e) < 0 && find_slab(l, e) >= 0;
        h.filled[e] = 2;
    }
    if (is_late) {
        // in the order in which they come: what is there, then what was read ahead by number, or what is read now as it was chosen
        late.order = scratch_experts;
        if (was_read_ahead) {
            std::sort(late.order.begin(), late.order.end());
        }
        const auto is_here = [&](int32_t e) { return landing_of(h, l.desc.parts.size() - 1, e).is_here(); };
        std::stable_partition(late.order.begin(), late.order.end(), is_here);
    }

    const uint64_t n = scratch_experts.size();
    l.stats->hits         += n_hit;
    l.stats->misses       += n - n_hit;
    l.stats->ram_hits     += n_ram;
    l.stats->bytes_needed += n * l.desc.expert_bytes();
    if (i_layer == 0) {
        stats_.tokens_prefill += chosen.n_tokens;
    }

    if (read_next && i_layer + 1 < n_layers()) {
        layer_state & next = *layers[i_layer + 1];
        half & other = half_of(i_layer + 1);
        settle_slots(next, *l.stats);
        claim_half(other, i_layer + 1, *l.stats);
        scratch_experts.resize(next.desc.n_expert);
        for (int32_t e = 0; e < next.desc.n_expert; ++e) {
            scratch_experts[e] = e;
        }
        fill_half(other, next, scratch_experts, urgency::background);
    }
    if (was_read_ahead) {
        io->promote(h.fill); // not before the copies that claim_half() waits for
    }

    if (is_late) {
        begin_late(i_layer, true);
    }

    write_own_ids(chosen, ids_out);
}

const uint8_t * stream::take(int32_t i_layer, bool staged, int32_t i_part, int32_t step, int32_t ith, int32_t n_thread) {
    layer_state & l = *layers[i_layer];
    half & h = half_of(i_layer);
    const expert_part & part = l.desc.parts[i_part];
    const uint8_t * bytes = nullptr;
    const auto wait = [&](auto && fn) {
        const uint64_t t_start = now_us();
        fn();
        if (ith == 0) {
            l.stats->stall_us += now_us() - t_start;
        }
    };

    const int32_t n_in_slots = (int32_t) late.slots.size();
    if (staged && ring && step >= n_in_slots) {
        const int64_t n_in_ring = (int64_t) late.order.size() - n_in_slots;
        wait([&] { bytes = ring->take(i_part * n_in_ring + step - n_in_slots, ith, n_thread); });
    } else if (staged && !ring) {
        const landing & there = landing_of(h, i_part, late.order[step]);
        if (!there.is_here()) {
            wait([&] { h.fill.wait(there); });
        }
        bytes = in_half(h, l.desc, part, late.order[step]);
    } else if (!staged && late.guesses[step] >= 0) {
        guess_entry & g = *guesses[late.guesses[step]];
        if (!g.landings[i_part].is_here()) {
            wait([&] { g.read.wait(g.landings[i_part]); });
        }
        bytes = in_entry(late.guesses[step], l.desc, i_part);
    } else {
        const int32_t   slot  = staged ? late.slots[step] : late.order[step];
        const landing & there = l.landings[i_part * l.desc.n_slot + slot];
        if (!there.is_here()) {
            wait([&] { l.group.wait(there); });
        }
        bytes = part.slots + slot * part.expert_bytes;
    }

    if (staged && !ring && ith == 0 && i_part + 1 == (int32_t) l.desc.parts.size() && step + 1 == (int32_t) late.order.size()) {
        wait_for(h.fill, *l.stats);
        if (h.fill.ok()) { // else zeros have to wait until nobody computes with what is here
            settle_late(); // the slots are filled while the rest of the layer, and what follows, computes
        }
    }
    return bytes;
}

void stream::wait(int32_t i_layer, bool staged, bool is_first_thread) {
    layer_state & l = *layers[i_layer];
    transfer_group & group = staged ? half_of(i_layer).fill : l.group;
    if (is_first_thread) {
        wait_for(group, *l.stats);
    } else if (!group.idle()) {
        group.wait();
    }
}

void stream::settle(int32_t i_layer, bool staged) {
    layer_state & l = *layers[i_layer];
    if (!staged) {
        settle_fills(l, *l.stats);
        copy_guessed(l, *l.stats); // while what follows computes
        return;
    }
    half & h = half_of(i_layer);
    settle_half(h, *l.stats);
    if (error.empty()) {
        copy_to_slots(h, l);
    }
}

// the experts of the last tokens into the slots, the newest used last, while the layer computes
void stream::copy_to_slots(half & h, layer_state & l) {
    if (l.desc.by_device) {
        return;
    }
    std::reverse(l.last_experts.begin(), l.last_experts.end());
    l.pool.acquire(l.last_experts.data(), (int32_t) l.last_experts.size(), scratch_placed);
    l.stats->pins = l.pool.n_kept();
    for (const placement & p : scratch_placed) {
        if (p.miss) {
            l.stats->evictions += p.evicted;
            slot_fill f = { p };
            f.copying = true;
            l.pending.push_back(f);
        }
    }
    fill_slots(l, &h); // before what is read ahead: the half is wanted for the layer after
    h.copying_out = !l.pending.empty();
    const auto n_from_ram = std::count_if(l.pending.begin(), l.pending.end(), [](const slot_fill & f) { return f.source >= 0; });
    l.stats->bytes_copied += (l.pending.size() - n_from_ram) * l.desc.expert_bytes();
}

// in a slot or in a slab, or on the way there
bool stream::has_bytes(const layer_state & l, int32_t expert) const {
    return l.pool.has(expert) || (ram && ram->find(l.index, expert) >= 0);
}

//
// guesses
//

void stream::guess(int32_t i_layer, const int32_t * experts, int32_t n) {
    layer_state & l = *layers[i_layer];
    for (int32_t i = 0; i < n; ++i) {
        const int32_t e = experts[i];
        if (has_bytes(l, e)) {
            continue;
        }
        int32_t i_free = -1;
        bool    known  = false;
        for (int32_t k = 0; k < (int32_t) guesses.size(); ++k) {
            const guess_entry & g = *guesses[k];
            known = known || (g.i_layer == i_layer && g.expert == e && !g.used);
            if (i_free < 0 && g.i_layer < 0 && g.read.idle() && g.copied.is_here()) {
                i_free = k;
            }
        }
        if (known) {
            continue;
        }
        if (i_free < 0) {
            return;
        }
        guess_entry & g = *guesses[i_free];
        forgive(g);
        g.i_layer = i_layer;
        g.expert  = e;
        scratch_transfers.clear();
        for (size_t k = 0; k < l.desc.parts.size(); ++k) {
            const expert_part & part = l.desc.parts[k];
            uint8_t * dst = in_entry(i_free, l.desc, k);
            if (opt.poison) {
                memset(dst, 0xff, part.expert_bytes);
            }
            scratch_transfers.push_back({ i_free, part.file, part.offset + e * part.expert_bytes, part.expert_bytes, dst, nullptr, part.convert, &g.landings[k] });
        }
        io->submit(g.read, scratch_transfers, urgency::background);
        l.stats->guesses += 1;
    }
}

// a guess that could not be read, and that nobody uses, is no error
void stream::forgive(guess_entry & g) {
    if (!g.read.ok()) {
        stats_.read_errors += 1;
        g.read.clear();
    }
}

// the entry that has, or will have, the expert that the layer wants; -1: none
int32_t stream::use_guess(int32_t i_layer, int32_t expert) {
    for (int32_t k = 0; k < (int32_t) guesses.size(); ++k) {
        guess_entry & g = *guesses[k];
        if (g.i_layer != i_layer || g.expert != expert || g.used) {
            continue;
        }
        if (g.read.idle() && !g.read.ok()) {
            return -1; // the layer's own read may succeed
        }
        io->promote(g.read);
        g.used = true;
        return k;
    }
    return -1;
}

// what was guessed for the layer (-1: for any), and is not used
void stream::drop_guesses(int32_t i_layer) {
    for (const auto & g : guesses) {
        if (g->i_layer >= 0 && !g->used && (i_layer < 0 || g->i_layer == i_layer)) {
            layer_state & l = *layers[g->i_layer];
            l.stats->guess_wasted_bytes += l.desc.expert_bytes() - io->cancel(g->read);
            g->i_layer = -1;
            if (g->read.idle()) {
                forgive(*g);
            }
        }
    }
}

// what the layer has computed with in the entries, to its slots
void stream::copy_guessed(layer_state & l, layer_stats & waiting) {
    scratch_transfers.clear();
    for (slot_fill & f : l.pending) {
        if (f.i_guess < 0 || f.copying || f.failed) {
            continue;
        }
        guess_entry & g = *guesses[f.i_guess];
        wait_for(g.read, waiting);
        g.i_layer = -1;
        g.used    = false;
        if (!g.read.ok()) {
            f.failed = true;
            note_error(g.read.error().c_str(), 1);
            g.read.clear();
            continue;
        }
        f.copying = true;
        for (size_t i = 0; i < l.desc.parts.size(); ++i) {
            add_transfer(l, f, nullptr, i);
        }
    }
    if (!scratch_transfers.empty()) {
        io->submit(l.group, scratch_transfers, urgency::demand);
    }
}

//
// warm fills
//

void stream::start_warm() {
    if (tier) {
        tier->start_warm();
    }
    bool any = false;
    for (const auto & l : layers) {
        any = any || !l->desc.warm.empty();
    }
    if (!any || warm_thread.joinable()) {
        return;
    }
    for (const auto & l : layers) {
        warm_transfers.reserve(std::max(warm_transfers.capacity(), l->desc.parts.size()));
    }
    warm_left = true; // nobody else looks before there is a thread
    try {
        warm_thread = std::thread([this] { warm_up(); });
    } catch (...) {
        warm_left = false;
        throw;
    }
}

bool stream::wait_warm(std::chrono::seconds at_most) {
    const auto until = std::chrono::steady_clock::now() + at_most;
    {
        std::unique_lock<std::mutex> lock(warm_mutex);
        if (!warm_changed.wait_until(lock, until, [this] { return !warm_left; })) {
            return false;
        }
    }
    return !tier || tier->wait_warm(until);
}

void stream::fill_all(int32_t i_layer) {
    layer_state & l = *layers[i_layer];
    for (int32_t e = 0; e < l.desc.n_expert; ++e) {
        scratch_transfers.clear();
        for (const expert_part & part : l.desc.parts) {
            scratch_transfers.push_back({ e, part.file, part.offset + e * part.expert_bytes, part.expert_bytes, part.slots + e * part.expert_bytes, nullptr,
                nullptr, nullptr, nullptr, l.desc.at });
        }
        io->submit(l.group, scratch_transfers, urgency::demand);
    }
    l.group.wait();
    if (!l.group.ok()) {
        throw std::runtime_error(l.group.error());
    }
    l.stats->warm_filled += l.desc.n_expert;
    l.stats->warm_bytes  += l.desc.n_expert * l.desc.expert_bytes();
}

void stream::note_device_counters(int32_t i_layer, const device_layer_state & now) {
    const layer_desc & d = layers[i_layer]->desc;
    layer_stats & s = *layers[i_layer]->stats;
    device_layer_state & before = device_before[i_layer];
    const uint64_t bytes   = d.expert_bytes();
    const uint64_t misses  = now.misses  - before.misses;
    const uint64_t guesses = now.guesses - before.guesses;
    const uint64_t guessed = now.guess_hits - before.guess_hits; // found in a slot, but only because they were guessed
    const uint64_t found   = now.hits - before.hits - guessed;
    s.hits           += found;
    s.misses         += misses + guessed;
    s.evictions      += now.evictions - before.evictions;
    s.ram_hits       += misses + guessed - (now.asked - before.asked);
    s.bytes_needed   += (found + misses + guessed) * bytes;
    s.bytes_from_ram += (misses + guesses) * bytes;
    s.guesses        += guesses;
    s.guess_hits     += guessed;
    s.guess_wasted_bytes = (now.guesses - now.guess_hits) * bytes; // or not used yet
    if (i_layer == 0) {
        stats_.tokens_decode += now.tokens - before.tokens;
    }
    before = now;
}

void stream::warm_up() {
    std::unique_lock<std::mutex> lock(warm_mutex);
    while (!warm_stopping) {
        if (is_computing) {
            warm_changed.wait(lock);
            continue;
        }
        int32_t n_reading = 0;
        layer_state * waits_for = nullptr;
        for (size_t i = 0; i < layers.size(); ++i) {
            layer_state & l = *layers[(warm_layer + i) % layers.size()]; // the one begun first comes first
            if (l.is_warming() && l.warm.idle()) {
                take_warm(l);
            } else if (l.is_warming()) {
                ++n_reading;
                waits_for = waits_for ? waits_for : &l;
            }
        }
        // as many as keep all workers at it, and no more: a graph that begins may have to wait for them
        while (n_reading < io->n_in_flight()) {
            const int32_t i_layer = begin_warm();
            if (i_layer < 0) {
                break;
            }
            ++n_reading;
            waits_for = waits_for ? waits_for : layers[i_layer].get();
        }
        if (!waits_for) {
            break;
        }
        lock.unlock();
        waits_for->warm.wait();
        lock.lock();
    }
    warm_left = false;
    warm_changed.notify_all();
}

// Starts the next fill and returns its layer; -1 when there is none, or its layer's last one is still read.
int32_t stream::begin_warm() {
    size_t n_rank = 0;
    for (const auto & l : layers) {
        n_rank = std::max(n_rank, l->desc.warm.size());
    }
    while (warm_rank < n_rank) {
        const size_t  i_layer = warm_layer;
        layer_state & l       = *layers[i_layer];
        if (l.is_warming()) {
            return -1;
        }
        const int32_t expert = warm_rank < l.desc.warm.size() ? l.desc.warm[warm_rank] : -1;
        warm_layer = (warm_layer + 1) % layers.size();
        warm_rank += warm_layer == 0;
        if (expert < 0 || has_bytes(l, expert)) {
            continue;
        }
        l.warm_slot = l.pool.reserve(expert);
        l.warm_slab = l.warm_slot < 0 && ram ? ram->claim(l.index, expert, true) : -1;
        if (!l.is_warming()) {
            continue;
        }
        warm_transfers.clear();
        for (size_t i = 0; i < l.desc.parts.size(); ++i) {
            const expert_part & part = l.desc.parts[i];
            uint8_t * dst = l.warm_slot >= 0 ? part.slots + l.warm_slot * part.expert_bytes : in_slab(l.warm_slab, l.desc, i);
            warm_transfers.push_back({ 0, part.file, part.offset + expert * part.expert_bytes, part.expert_bytes, dst, nullptr, part.convert, nullptr, nullptr,
                l.warm_slot >= 0 ? l.desc.at : nullptr });
        }
        l.stats->warm_bytes += l.desc.expert_bytes();
        io->submit(l.warm, warm_transfers, urgency::background);
        return (int32_t) i_layer;
    }
    return -1;
}

// the fill of a slot, or a slab, is over: the expert is there, or it is empty again
void stream::take_warm(layer_state & l) {
    const int32_t slot = l.warm_slot;
    const int32_t slab = l.warm_slab;
    l.warm_slot = l.warm_slab = -1;
    const bool ok = l.warm.ok();
    if (slot >= 0 && ok) {
        l.pool.commit(slot);
        if (opt.check) {
            l.checksums[slot] = slot_checksum(l.desc, slot);
        }
    } else if (slot >= 0) {
        zero_slot(l, slot);
        l.pool.fail(slot);
    } else {
        if (!ok) {
            ram->forget(slab);
        } else if (opt.check) {
            slab_sums[slab] = checksum(l.desc, [&](size_t i) { return in_slab(slab, l.desc, i); });
        }
        ram->release(slab);
    }
    if (ok) {
        l.stats->warm_filled += 1;
    } else {
        l.warm.clear();
        stats_.read_errors += 1;
    }
    l.stats->pins = l.pool.n_kept();
}

// a graph has come to the layer
void stream::settle_warm(layer_state & l) {
    if (l.is_warming()) {
        io->promote(l.warm);
        wait_for(l.warm, *l.stats);
        take_warm(l);
    }
}

} // namespace moe
