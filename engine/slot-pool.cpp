#include "slot-pool.h"

#include <cstdio>
#include <cstdlib>

namespace moe {

#define POOL_CHECK(cond, ...)                                   \
    do {                                                        \
        if (!(cond)) {                                          \
            fprintf(stderr, "slot-pool: broken: %s: ", #cond);  \
            fprintf(stderr, __VA_ARGS__);                       \
            fprintf(stderr, "\n");                              \
            abort();                                            \
        }                                                       \
    } while (0)

slot_pool::slot_pool(int32_t n_slot, int32_t n_expert, policy_kind kind)
    : slot_pool(n_slot, n_expert, make_policy(kind, n_slot, n_expert)) {}

slot_pool::slot_pool(int32_t n_slot, int32_t n_expert, std::unique_ptr<policy> order)
    : expert_in(n_slot, -1), slot_of(n_expert, -1), states(n_slot, slot_state::empty), pins(n_slot, 0), keeps(n_expert, 0),
      order(std::move(order)) {
    pin_list.reserve(n_slot);
}

void slot_pool::acquire(const int32_t * experts, int32_t n, std::vector<placement> & out) {
    POOL_CHECK(n <= n_slot(), "%d experts for %d slots", n, n_slot());

    unpin_all();
    out.resize(n);

    const auto pin = [&](int32_t slot) {
        POOL_CHECK(!pins[slot], "expert %d asked for twice in one call", expert_in[slot]);
        pins[slot] = 1;
        pin_list.push_back(slot);
    };

    for (int32_t i = 0; i < n; ++i) {
        const int32_t e = experts[i];
        POOL_CHECK(e >= 0 && e < n_expert(), "expert %d of %d", e, n_expert());
        const int32_t slot = slot_of[e];
        out[i] = { e, slot, slot < 0, false, -1 };
        if (slot >= 0) {
            POOL_CHECK(states[slot] == slot_state::ready, "slot %d is still being filled", slot);
            pin(slot);
            if (!keeps[e]) {
                order->on_use(slot, e);
            }
        }
    }

    const auto is_pinned = [this](int32_t slot) { return pins[slot] != 0; };

    for (placement & p : out) {
        if (!p.miss) {
            continue;
        }
        POOL_CHECK(slot_of[p.expert] < 0, "expert %d asked for twice in one call", p.expert);
        p.slot = order->victim(is_pinned);
        POOL_CHECK(p.slot >= 0, "no victim for expert %d", p.expert);
        POOL_CHECK(states[p.slot] != slot_state::filling, "victim %d is being filled", p.slot);

        const int32_t old = expert_in[p.slot];
        if (old >= 0) {
            p.evicted    = true;
            p.victim     = old;
            slot_of[old] = -1;
        }
        pin(p.slot);
        order->on_use(p.slot, p.expert);
        put(p.slot, p.expert);
    }
}

int32_t slot_pool::reserve(int32_t expert) {
    POOL_CHECK(expert >= 0 && expert < n_expert(), "expert %d of %d", expert, n_expert());
    if (slot_of[expert] >= 0) {
        return -1;
    }
    const int32_t slot = order->victim([this](int32_t s) { return pins[s] != 0; });
    if (slot < 0 || states[slot] != slot_state::empty) { // empty ones are offered first
        return -1;
    }
    order->on_fill(slot, expert);
    put(slot, expert);
    return slot;
}

void slot_pool::keep(int32_t expert) {
    POOL_CHECK(expert >= 0 && expert < n_expert(), "expert %d of %d", expert, n_expert());
    POOL_CHECK(slot_of[expert] < 0, "expert %d is in slot %d already", expert, slot_of[expert]);
    keeps[expert] = 1;
}

// the policy knows of the slot already
void slot_pool::put(int32_t slot, int32_t expert) {
    expert_in[slot] = expert;
    slot_of[expert] = slot;
    states[slot]    = slot_state::filling;
    if (keeps[expert]) {
        ++n_kept_;
        order->on_keep(slot);
    }
}

void slot_pool::commit(int32_t slot) {
    POOL_CHECK(states[slot] == slot_state::filling, "commit of slot %d", slot);
    states[slot] = slot_state::ready;
}

void slot_pool::fail(int32_t slot) {
    POOL_CHECK(states[slot] == slot_state::filling, "fail of slot %d", slot);
    make_empty(slot);
}

void slot_pool::drop(int32_t slot) {
    POOL_CHECK(states[slot] == slot_state::ready, "drop of slot %d", slot);
    make_empty(slot);
}

void slot_pool::make_empty(int32_t slot) {
    n_kept_ -= kept(slot);
    slot_of[expert_in[slot]] = -1;
    expert_in[slot]          = -1;
    states[slot]             = slot_state::empty;
    order->on_empty(slot);
}

void slot_pool::unpin_all() {
    for (const int32_t slot : pin_list) {
        pins[slot] = 0;
    }
    pin_list.clear();
}

int32_t slot_pool::peek(int32_t expert) const {
    const int32_t slot = slot_of[expert];
    return slot >= 0 && states[slot] == slot_state::ready ? slot : -1;
}

void slot_pool::self_check() const {
    int32_t n_pinned = 0;
    int32_t n_kept   = 0;
    for (int32_t slot = 0; slot < n_slot(); ++slot) {
        const int32_t e = expert_in[slot];
        POOL_CHECK((states[slot] == slot_state::empty) == (e < 0), "slot %d, expert %d", slot, e);
        POOL_CHECK(e < 0 || slot_of[e] == slot, "slot %d holds expert %d, which points to slot %d", slot, e, slot_of[e]);
        n_pinned += pins[slot];
        n_kept   += kept(slot);
    }
    for (int32_t e = 0; e < n_expert(); ++e) {
        POOL_CHECK(slot_of[e] < 0 || expert_in[slot_of[e]] == e, "expert %d points to slot %d", e, slot_of[e]);
    }
    POOL_CHECK(n_pinned == (int32_t) pin_list.size(), "%d pins, %zu listed", n_pinned, pin_list.size());
    POOL_CHECK(n_kept == n_kept_, "%d slots of kept experts, %d counted", n_kept, n_kept_);
}

} // namespace moe
