#include "ram-tier.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace moe {

#define TIER_CHECK(condition, ...)                                       \
    do {                                                                 \
        if (!(condition)) {                                              \
            fprintf(stderr, "ram_tier: %s: ", #condition);               \
            fprintf(stderr, __VA_ARGS__);                                \
            fprintf(stderr, "\n");                                       \
            abort();                                                     \
        }                                                                \
    } while (0)

ram_tier::ram_tier(const std::vector<layer_size> & layers, uint64_t budget) {
    size_t n_expert = 0;
    for (const layer_size & l : layers) {
        const uint64_t bytes = aligned(l.expert_bytes);
        auto it = std::find_if(classes.begin(), classes.end(), [&](const size_class & c) { return c.slab_bytes == bytes; });
        if (it == classes.end()) {
            it = classes.insert(classes.end(), size_class());
            it->slab_bytes = bytes;
        }
        it->wanted += l.n_expert - std::min(l.n_slot, l.n_expert);
        class_of.push_back((int32_t) (it - classes.begin()));
        first_expert.push_back(n_expert);
        n_expert += l.n_expert;
    }
    slab_of.assign(n_expert, -1);

    uint64_t wanted_bytes = 0;
    for (const size_class & c : classes) {
        wanted_bytes += c.wanted * c.slab_bytes;
    }
    // the same share of what each size could use, and what that leaves over to whom it suffices
    std::vector<uint64_t> counts;
    uint64_t left = budget;
    for (const size_class & c : classes) {
        const double share = budget < wanted_bytes ? (double) budget / (double) wanted_bytes : 1.0;
        uint64_t n = c.slab_bytes == 0 ? 0 : std::min(c.wanted, (uint64_t) (share * (double) c.wanted));
        n = c.slab_bytes == 0 ? 0 : std::min(n, left / c.slab_bytes);
        counts.push_back(n);
        left -= n * c.slab_bytes;
    }
    for (size_t i = 0; i < classes.size(); ++i) {
        const size_class & c = classes[i];
        if (c.slab_bytes > 0) {
            const uint64_t more = std::min(c.wanted - counts[i], left / c.slab_bytes);
            counts[i] += more;
            left      -= more * c.slab_bytes;
        }
    }
    for (size_t i = 0; i < classes.size(); ++i) {
        size_class & c = classes[i];
        c.empty.reserve(counts[i]);
        for (uint64_t k = 0; k < counts[i]; ++k) {
            slab_state s = {};
            s.offset  = total_bytes;
            s.i_class = (int32_t) i;
            s.i_layer = s.expert = s.older = s.newer = -1;
            slabs.push_back(s);
            total_bytes += c.slab_bytes;
        }
    }
    for (int32_t slab = n_slab() - 1; slab >= 0; --slab) { // the first is given away first
        classes[slabs[slab].i_class].empty.push_back(slab);
    }
}

void ram_tier::link(int32_t slab) {
    slab_state & s = slabs[slab];
    size_class & c = classes[s.i_class];
    s.older = c.newest;
    s.newer = -1;
    (c.newest >= 0 ? slabs[c.newest].newer : c.oldest) = slab;
    c.newest = slab;
}

void ram_tier::unlink(int32_t slab) {
    slab_state & s = slabs[slab];
    size_class & c = classes[s.i_class];
    (s.older >= 0 ? slabs[s.older].newer : c.oldest) = s.newer;
    (s.newer >= 0 ? slabs[s.newer].older : c.newest) = s.older;
    s.older = s.newer = -1;
}

void ram_tier::set(int32_t slab, int32_t i_layer, int32_t expert) {
    slab_state & s = slabs[slab];
    if (s.expert >= 0) {
        slab_of[first_expert[s.i_layer] + s.expert] = -1;
        unlink(slab);
    }
    s.i_layer = i_layer;
    s.expert  = expert;
    if (expert >= 0) {
        int32_t & of = slab_of[first_expert[i_layer] + expert];
        TIER_CHECK(of < 0, "layer %d, expert %d is in slab %d already", i_layer, expert, of);
        of = slab;
        link(slab);
    }
}

int32_t ram_tier::claim(int32_t i_layer, int32_t expert, bool only_empty) {
    size_class & c = classes[class_of[i_layer]];
    int32_t slab = -1;
    if (!c.empty.empty()) {
        slab = c.empty.back();
        c.empty.pop_back();
    } else if (!only_empty) {
        for (slab = c.oldest; slab >= 0 && n_held(slab) > 0; ) {
            slab = slabs[slab].newer;
        }
    }
    if (slab >= 0) {
        set(slab, i_layer, expert);
        hold(slab);
    }
    return slab;
}

void ram_tier::exchange(int32_t slab, int32_t expert) {
    TIER_CHECK(slabs[slab].expert >= 0, "slab %d is empty", slab);
    set(slab, slabs[slab].i_layer, expert);
}

void ram_tier::touch(int32_t slab) {
    if (slabs[slab].expert >= 0) {
        unlink(slab);
        link(slab);
    }
}

int32_t ram_tier::n_slab_for(int32_t i_layer) const {
    return (int32_t) std::count_if(slabs.begin(), slabs.end(), [&](const slab_state & s) { return s.i_class == class_of[i_layer]; });
}

void ram_tier::release(int32_t slab) {
    slab_state & s = slabs[slab];
    TIER_CHECK(s.n_held > 0, "slab %d", slab);
    if (--s.n_held == 0 && s.expert < 0) {
        classes[s.i_class].empty.push_back(slab);
    }
}

void ram_tier::forget(int32_t slab) {
    slab_state & s = slabs[slab];
    if (s.expert < 0) {
        return;
    }
    set(slab, -1, -1);
    if (s.n_held == 0) {
        classes[s.i_class].empty.push_back(slab);
    }
}

void ram_tier::self_check() const {
    size_t n_found = 0;
    for (size_t i = 0; i < slab_of.size(); ++i) {
        if (slab_of[i] >= 0) {
            ++n_found;
            const slab_state & s = slabs[slab_of[i]];
            TIER_CHECK(s.expert >= 0 && first_expert[s.i_layer] + s.expert == i, "slab %d", slab_of[i]);
        }
    }
    size_t n_linked = 0;
    size_t n_empty  = 0;
    size_t n_held   = 0;
    for (const size_class & c : classes) {
        n_empty += c.empty.size();
        int32_t older = -1;
        for (int32_t slab = c.oldest; slab >= 0; older = slab, slab = slabs[slab].newer) {
            ++n_linked;
            TIER_CHECK(slabs[slab].older == older && slabs[slab].expert >= 0, "slab %d", slab);
        }
        TIER_CHECK(c.newest == older, "the newest is %d", c.newest);
    }
    for (const slab_state & s : slabs) {
        n_held += s.n_held > 0 && s.expert < 0;
    }
    TIER_CHECK(n_linked == n_found, "%zu linked, %zu found", n_linked, n_found);
    TIER_CHECK(n_linked + n_empty + n_held == slabs.size(), "%zu + %zu + %zu of %zu", n_linked, n_empty, n_held, slabs.size());
}

} // namespace moe
