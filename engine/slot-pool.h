#pragma once

// The slots of one MoE layer: which expert is in which slot.
//
// A slot is in one of three states:
//
//      empty --acquire--> filling --commit--> ready --acquire (as victim)--> filling
//            --reserve-->    |             |
//                            +--fail       +--drop
//                            v             v
//                          empty         empty
//
// Invariants, checked by self_check():
//   - an expert is in at most one slot, and slot_of/expert_in are each other's inverse;
//   - an empty slot holds no expert; a filling or ready slot holds exactly one;
//   - a pinned slot is never a victim; what acquire() returned stays pinned until the next acquire() or unpin_all();
//   - nor is the slot of an expert that is kept, from when it is given a slot, by whichever call, until that fails or is dropped.
//
// The pool moves no bytes and knows no files: acquire() says what must be read, commit() that it was. A filling slot counts as
// absent for peek() and may not be computed with. Memory is allocated in the constructor only. One thread at a time.

#include "policy.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace moe {

enum class slot_state : uint8_t { empty, filling, ready };

struct placement {
    int32_t expert;
    int32_t slot;
    bool    miss;    // the bytes have to be read into the slot, then commit() or fail()
    bool    evicted; // another expert lost this slot for it
    int32_t victim = -1; // that expert, whose bytes are still there; -1: the slot was empty, or nothing has to be read
};

class slot_pool {
public:
    slot_pool(int32_t n_slot, int32_t n_expert, policy_kind kind);
    slot_pool(int32_t n_slot, int32_t n_expert, std::unique_ptr<policy> order);

    // Give each of the n distinct experts a slot and pin it; what an earlier call pinned is unpinned first.
    // Hits are settled before any victim is chosen, so a miss never evicts an expert of the same call.
    // Requires a slot for each of them beside those of kept experts, and no slot in state filling. out is overwritten, in the order of
    // experts.
    void acquire(const int32_t * experts, int32_t n, std::vector<placement> & out);

    // an empty slot for an expert that nobody asked for, then filling; -1 when there is none, or the expert is in a slot
    int32_t reserve(int32_t expert);

    // never evict this expert; before it is in a slot
    void keep(int32_t expert);

    void commit(int32_t slot); // filling -> ready
    void fail(int32_t slot);   // filling -> empty
    void drop(int32_t slot);   // ready -> empty; what it holds is not to be trusted

    void unpin_all();

    // the slot of an expert that is ready, else -1; changes nothing
    int32_t peek(int32_t expert) const;

    // whether it has a slot, ready or filling
    bool has(int32_t expert) const { return slot_of[expert] >= 0; }

    int32_t    n_slot()   const { return (int32_t) expert_in.size(); }
    int32_t    n_expert() const { return (int32_t) slot_of.size(); }
    int32_t    expert(int32_t slot) const { return expert_in[slot]; }
    slot_state state(int32_t slot)  const { return states[slot]; }
    bool       pinned(int32_t slot) const { return pins[slot] != 0; }
    bool       kept(int32_t slot)   const { return expert_in[slot] >= 0 && keeps[expert_in[slot]] != 0; }
    int32_t    n_kept()             const { return n_kept_; } // slots that hold, or are about to hold, a kept expert

    // abort() with a message when an invariant is broken; O(n_slot + n_expert)
    void self_check() const;

private:
    void put(int32_t slot, int32_t expert);
    void make_empty(int32_t slot);

    std::vector<int32_t>    expert_in; // [n_slot], -1: empty
    std::vector<int32_t>    slot_of;   // [n_expert], -1: in no slot
    std::vector<slot_state> states;    // [n_slot]
    std::vector<uint8_t>    pins;      // [n_slot], 0 or 1
    std::vector<int32_t>    pin_list;  // the slots with pins == 1
    std::vector<uint8_t>    keeps;     // [n_expert], 0 or 1
    int32_t                 n_kept_ = 0;
    std::unique_ptr<policy> order;
};

} // namespace moe
