#include "check.h"
#include "policies.h"
#include "slot-pool.h"

#include <set>

using namespace moe;

static void for_each_policy(const std::function<void(policy_kind)> & fn) {
    const std::string name = check_context;
    for (policy_kind kind : all_policies()) {
        set_check_context(name + ", policy " + policy_name(kind));
        fn(kind);
    }
}

static std::vector<placement> acquire(slot_pool & pool, const std::vector<int32_t> & experts) {
    std::vector<placement> out(3, { -7, -7, true, true }); // stale content must not survive
    pool.acquire(experts.data(), (int32_t) experts.size(), out);
    pool.self_check();
    CHECK_EQ(out.size(), experts.size());
    for (size_t i = 0; i < experts.size(); ++i) {
        CHECK_EQ(out[i].expert, experts[i]);
        CHECK(out[i].slot >= 0 && out[i].slot < pool.n_slot());
        CHECK_EQ(pool.expert(out[i].slot), experts[i]);
        CHECK(pool.pinned(out[i].slot));
        CHECK(pool.state(out[i].slot) == (out[i].miss ? slot_state::filling : slot_state::ready));
        CHECK(out[i].miss || !out[i].evicted);
    }
    return out;
}

static std::vector<placement> acquire_and_commit(slot_pool & pool, const std::vector<int32_t> & experts) {
    const std::vector<placement> out = acquire(pool, experts);
    for (const placement & p : out) {
        if (p.miss) {
            pool.commit(p.slot);
        }
    }
    pool.self_check();
    return out;
}

TEST(starts_empty) {
    for_each_policy([](policy_kind kind) {
        slot_pool pool(3, 5, kind);
        pool.self_check();
        CHECK_EQ(pool.n_slot(), 3);
        CHECK_EQ(pool.n_expert(), 5);
        for (int32_t e = 0; e < 5; ++e) {
            CHECK_EQ(pool.peek(e), -1);
        }
        for (int32_t s = 0; s < 3; ++s) {
            CHECK(pool.state(s) == slot_state::empty);
            CHECK_EQ(pool.expert(s), -1);
            CHECK(!pool.pinned(s));
        }
    });
}

TEST(a_miss_is_absent_until_committed) {
    for_each_policy([](policy_kind kind) {
        slot_pool pool(2, 5, kind);
        const auto out = acquire(pool, { 3 });
        CHECK(out[0].miss);
        CHECK(!out[0].evicted);
        CHECK_EQ(pool.peek(3), -1);
        pool.commit(out[0].slot);
        CHECK_EQ(pool.peek(3), out[0].slot);
        const auto again = acquire(pool, { 3 });
        CHECK(!again[0].miss);
        CHECK_EQ(again[0].slot, out[0].slot);
    });
}

TEST(a_failed_fill_leaves_nothing) {
    for_each_policy([](policy_kind kind) {
        slot_pool pool(2, 5, kind);
        acquire_and_commit(pool, { 0, 1 });
        const auto out = acquire(pool, { 2 });
        CHECK(out[0].miss && out[0].evicted);
        pool.fail(out[0].slot);
        pool.self_check();
        CHECK_EQ(pool.peek(2), -1);
        CHECK(pool.state(out[0].slot) == slot_state::empty);
        // the empty slot is taken before the one that holds something
        const auto retry = acquire(pool, { 2 });
        CHECK(retry[0].miss && !retry[0].evicted);
        CHECK_EQ(retry[0].slot, out[0].slot);
    });
}

TEST(a_dropped_slot_is_empty) {
    for_each_policy([](policy_kind kind) {
        slot_pool pool(2, 5, kind);
        acquire_and_commit(pool, { 0, 1 });
        const int32_t slot = pool.peek(0);
        pool.drop(slot);
        pool.self_check();
        CHECK_EQ(pool.peek(0), -1);
        CHECK(pool.state(slot) == slot_state::empty);
        const auto retry = acquire_and_commit(pool, { 1, 0 });
        CHECK(!retry[0].miss);
        CHECK(retry[1].miss && !retry[1].evicted);
        CHECK_EQ(retry[1].slot, slot);
    });
}

TEST(a_miss_never_takes_a_slot_of_the_same_call) {
    for_each_policy([](policy_kind kind) {
        slot_pool pool(3, 10, kind);
        acquire_and_commit(pool, { 0, 1, 2 });
        // the oldest (and, by lfu, least used) one is asked for last in the list: only hits first saves it
        acquire_and_commit(pool, { 1, 2 });
        const auto out = acquire_and_commit(pool, { 7, 8, 0 });
        CHECK(out[0].miss && out[1].miss && !out[2].miss);
        CHECK(out[0].slot != out[2].slot && out[1].slot != out[2].slot && out[0].slot != out[1].slot);
        CHECK_EQ(pool.peek(1), -1);
        CHECK_EQ(pool.peek(2), -1);
    });
}

TEST(pins_last_until_the_next_call) {
    for_each_policy([](policy_kind kind) {
        slot_pool pool(4, 10, kind);
        const auto first = acquire_and_commit(pool, { 0, 1 });
        const auto second = acquire_and_commit(pool, { 1, 2 });
        CHECK(!pool.pinned(first[0].slot));
        CHECK(pool.pinned(first[1].slot));
        CHECK(pool.pinned(second[1].slot));
        acquire(pool, {});
        for (int32_t s = 0; s < 4; ++s) {
            CHECK(!pool.pinned(s));
        }
        acquire_and_commit(pool, { 3 });
        pool.unpin_all();
        pool.unpin_all();
        pool.self_check();
        for (int32_t s = 0; s < 4; ++s) {
            CHECK(!pool.pinned(s));
        }
        CHECK(pool.peek(3) >= 0); // still there
    });
}

TEST(a_whole_pool_in_one_call) {
    for_each_policy([](policy_kind kind) {
        slot_pool pool(4, 12, kind);
        for (int32_t base : { 0, 4, 8, 2, 0 }) {
            std::set<int32_t> slots;
            for (const placement & p : acquire_and_commit(pool, { base, base + 1, base + 2, base + 3 })) {
                CHECK(slots.insert(p.slot).second);
            }
        }
    });
}

TEST(more_slots_than_experts) {
    for_each_policy([](policy_kind kind) {
        slot_pool pool(8, 3, kind);
        acquire_and_commit(pool, { 0, 1, 2 });
        for (const placement & p : acquire_and_commit(pool, { 2, 0, 1 })) {
            CHECK(!p.miss);
        }
    });
}

TEST(lru_evicts_in_order) {
    slot_pool pool(3, 10, policy_kind::lru);
    acquire_and_commit(pool, { 0 });
    acquire_and_commit(pool, { 1 });
    acquire_and_commit(pool, { 2 });
    acquire_and_commit(pool, { 0 });
    const int32_t slot_of_1 = pool.peek(1);
    const auto out = acquire_and_commit(pool, { 5 });
    CHECK(out[0].evicted);
    CHECK_EQ(out[0].slot, slot_of_1);
    CHECK_EQ(pool.peek(1), -1);
    CHECK(pool.peek(2) >= 0 && pool.peek(0) >= 0);
}

TEST(lfu_keeps_the_favourite) {
    slot_pool pool(2, 10, policy_kind::lfu);
    acquire_and_commit(pool, { 0 });
    acquire_and_commit(pool, { 0 });
    acquire_and_commit(pool, { 0 });
    for (int32_t e = 1; e < 10; ++e) {
        acquire_and_commit(pool, { e });
        CHECK(pool.peek(0) >= 0);
    }
}

TEST(a_kept_expert_stays) {
    for_each_policy([](policy_kind kind) {
        slot_pool pool(4, 40, kind);
        pool.keep(7);
        pool.keep(9);
        acquire_and_commit(pool, { 7 });
        CHECK_EQ(pool.n_kept(), 1);
        const int32_t slot = pool.peek(7);
        CHECK(pool.kept(slot));
        for (int32_t e = 10; e < 30; ++e) { // whoever comes, and however often
            acquire_and_commit(pool, { e, e + 1, e + 2 });
            acquire_and_commit(pool, { e, e + 1, e + 2 });
            CHECK_EQ(pool.peek(7), slot);
        }
        acquire_and_commit(pool, { 9, 30 });
        for (int32_t e = 10; e < 30; ++e) {
            acquire_and_commit(pool, { e, e + 1 });
            CHECK_EQ(pool.peek(7), slot);
            CHECK(pool.peek(9) >= 0);
            CHECK_EQ(pool.n_kept(), 2);
        }
        CHECK_ABORTS("no victim", acquire(pool, { 1, 2, 3 }));
        // with it, all slots can be asked for
        for (const placement & p : acquire_and_commit(pool, { 7, 9, 1, 2 })) {
            CHECK_EQ(p.miss, p.expert < 7);
        }
    });
}

TEST(a_kept_expert_whose_fill_failed_is_in_no_slot) {
    for_each_policy([](policy_kind kind) {
        slot_pool pool(2, 9, kind);
        pool.keep(3);
        const auto out = acquire(pool, { 3 });
        CHECK_EQ(pool.n_kept(), 1);
        pool.fail(out[0].slot);
        CHECK_EQ(pool.n_kept(), 0);
        acquire_and_commit(pool, { 4, 5 }); // its slot is as good as any
        const int32_t slot = acquire_and_commit(pool, { 3 })[0].slot;
        CHECK(pool.kept(slot));
        pool.drop(slot);
        pool.self_check();
        CHECK_EQ(pool.n_kept(), 0);
        CHECK(!pool.kept(slot));
        acquire_and_commit(pool, { 6, 7 });
    });
}

TEST(reserve_takes_empty_slots_only) {
    for_each_policy([](policy_kind kind) {
        slot_pool pool(3, 9, kind);
        acquire_and_commit(pool, { 4 });
        CHECK_EQ(pool.reserve(4), -1); // it is there
        const int32_t slot = pool.reserve(5);
        CHECK(slot >= 0 && slot != pool.peek(4));
        CHECK(pool.state(slot) == slot_state::filling);
        CHECK(!pool.pinned(slot));
        CHECK_EQ(pool.peek(5), -1);
        CHECK_EQ(pool.reserve(5), -1); // it is on its way
        const int32_t other = pool.reserve(6);
        CHECK(other >= 0 && other != slot);
        pool.fail(other);
        pool.self_check();
        CHECK_EQ(pool.reserve(7), other);
        pool.commit(slot);
        pool.commit(other);
        pool.self_check();
        CHECK_EQ(pool.reserve(8), -1); // none is empty
        CHECK_EQ(pool.peek(5), slot);
        CHECK(!acquire(pool, { 5 })[0].miss);
    });
}

TEST(what_was_filled_first_stays_longest) {
    for_each_policy([](policy_kind kind) {
        slot_pool pool(5, 20, kind);
        acquire_and_commit(pool, { 0 });
        for (const int32_t e : { 7, 3, 9, 5 }) { // the order of a map
            pool.commit(pool.reserve(e));
            pool.self_check();
        }
        for (const int32_t leaves : { 5, 9, 3, 7 }) {
            const int32_t slot = pool.peek(leaves);
            const auto out = acquire_and_commit(pool, { 10 + leaves, 0 }); // 0 is in use all the time
            CHECK_EQ(out[0].slot, slot);
            acquire_and_commit(pool, { 10 + leaves }); // and what came is used too
        }
    });
}

TEST(misuse_aborts) {
    for_each_policy([](policy_kind kind) {
        slot_pool pool(2, 5, kind);
        acquire_and_commit(pool, { 0, 1 });
        CHECK_ABORTS("3 experts for 2 slots",      acquire(pool, { 0, 1, 2 }));
        CHECK_ABORTS("expert 0 asked for twice",   acquire(pool, { 0, 0 }));
        CHECK_ABORTS("expert 3 asked for twice",   acquire(pool, { 3, 3 }));
        CHECK_ABORTS("expert 5 of 5",              acquire(pool, { 5 }));
        CHECK_ABORTS("expert -1 of 5",             acquire(pool, { -1 }));
        CHECK_ABORTS("commit of slot 0",           pool.commit(0));
        CHECK_ABORTS("fail of slot 0",             pool.fail(0));
        const auto out = acquire(pool, { 4 });
        CHECK_ABORTS("is still being filled",      acquire(pool, { 4 }));
        CHECK_ABORTS("is being filled",            acquire(pool, { 2, 3 }));
        CHECK_ABORTS("drop of slot",               pool.drop(out[0].slot));
        pool.commit(out[0].slot);
        CHECK_ABORTS("commit of slot",             pool.commit(out[0].slot));
        CHECK_ABORTS("fail of slot",               pool.fail(out[0].slot));
        CHECK_ABORTS("expert 5 of 5",              pool.reserve(5));
        CHECK_ABORTS("expert -1 of 5",             pool.keep(-1));
        CHECK_ABORTS("expert 4 is in slot",        pool.keep(4));
    });
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
