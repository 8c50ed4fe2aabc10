#include "check.h"
#include "policies.h"
#include "policy.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

using namespace moe;

static bool nothing_pinned(int32_t) { return false; }

static void for_each_policy(const std::function<void(policy_kind)> & fn) {
    const std::string name = check_context;
    for (policy_kind kind : all_policies()) {
        set_check_context(name + ", policy " + policy_name(kind));
        fn(kind);
    }
}

//
// all policies
//

TEST(names_round_trip) {
    std::set<std::string> names;
    for_each_policy([&](policy_kind kind) {
        policy_kind back = kind == policy_kind::lru ? policy_kind::lfu : policy_kind::lru;
        CHECK(policy_from_name(policy_name(kind), back));
        CHECK(back == kind);
        CHECK(names.insert(policy_name(kind)).second);
    });
    for (const char * name : { "", "LRU", "lru ", "random" }) {
        policy_kind kind = policy_kind::lfu;
        CHECK(!policy_from_name(name, kind));
        CHECK(kind == policy_kind::lfu); // left alone
    }
}

TEST(starts_empty_and_fills_every_slot_once) {
    for_each_policy([](policy_kind kind) {
        for (int32_t n_slot : { 1, 2, 7, 64 }) {
            const auto p = make_policy(kind, n_slot, 3 * n_slot);
            std::set<int32_t> seen;
            for (int32_t i = 0; i < n_slot; ++i) {
                const int32_t slot = p->victim(nothing_pinned);
                CHECK(slot >= 0 && slot < n_slot);
                CHECK(seen.insert(slot).second);
                p->on_use(slot, i);
            }
        }
    });
}

TEST(victim_changes_nothing) {
    for_each_policy([](policy_kind kind) {
        const auto p = make_policy(kind, 4, 8);
        for (int32_t i = 0; i < 4; ++i) {
            p->on_use(i, i);
            CHECK_EQ(p->victim(nothing_pinned), p->victim(nothing_pinned));
        }
    });
}

TEST(a_victim_is_never_pinned) {
    for_each_policy([](policy_kind kind) {
        test_random rnd(1);
        for (int32_t round = 0; round < 200; ++round) {
            const int32_t n_slot   = rnd.between(1, 12);
            const int32_t n_expert = rnd.between(1, 30);
            const auto    p        = make_policy(kind, n_slot, n_expert);
            for (int32_t step = 0; step < 200; ++step) {
                std::vector<bool> pins(n_slot);
                for (int32_t i = 0; i < n_slot; ++i) {
                    pins[i] = rnd.percent(60);
                }
                const int32_t slot = p->victim([&](int32_t s) { return (bool) pins[s]; });
                if (std::find(pins.begin(), pins.end(), false) == pins.end()) {
                    CHECK_EQ(slot, -1);
                    continue;
                }
                CHECK(slot >= 0 && slot < n_slot);
                CHECK(!pins[slot]);
                if (rnd.percent(20)) {
                    p->on_empty(slot);
                } else {
                    p->on_use(slot, rnd.below(n_expert));
                }
            }
        }
    });
}

TEST(all_pinned_gives_none) {
    for_each_policy([](policy_kind kind) {
        for (int32_t n_slot : { 1, 5 }) {
            const auto p = make_policy(kind, n_slot, 8);
            const auto all_pinned = [](int32_t) { return true; };
            CHECK_EQ(p->victim(all_pinned), -1); // all empty
            for (int32_t i = 0; i < n_slot; ++i) {
                p->on_use(i, i);
            }
            CHECK_EQ(p->victim(all_pinned), -1);
            p->on_empty(0);
            CHECK_EQ(p->victim(all_pinned), -1);
        }
    });
}

TEST(one_free_slot_is_found_wherever_it_is) {
    for_each_policy([](policy_kind kind) {
        for (int32_t free = 0; free < 6; ++free) {
            const auto p = make_policy(kind, 6, 8);
            for (int32_t i = 0; i < 6; ++i) {
                p->on_use(i, i);
            }
            CHECK_EQ(p->victim([&](int32_t s) { return s != free; }), free);
        }
    });
}

TEST(empty_slots_go_first) {
    for_each_policy([](policy_kind kind) {
        test_random rnd(2);
        const int32_t n_slot = 9;
        const auto p = make_policy(kind, n_slot, 20);
        std::set<int32_t> empty;
        for (int32_t i = 0; i < n_slot; ++i) {
            empty.insert(i);
        }
        for (int32_t step = 0; step < 5000; ++step) {
            // sometimes with pins: then an unpinned empty one
            std::set<int32_t> pins;
            for (int32_t i = 0; i < n_slot; ++i) {
                if (rnd.percent(30)) {
                    pins.insert(i);
                }
            }
            const int32_t slot = p->victim([&](int32_t s) { return pins.count(s) != 0; });
            const bool has_empty = std::any_of(empty.begin(), empty.end(), [&](int32_t s) { return pins.count(s) == 0; });
            if (has_empty) {
                CHECK(empty.count(slot) == 1);
            }
            const int32_t which = rnd.below(n_slot);
            if (rnd.percent(55)) {
                p->on_use(which, rnd.below(20));
                empty.erase(which);
            } else {
                p->on_empty(which);
                empty.insert(which);
            }
        }
    });
}

TEST(a_kept_slot_is_not_offered) {
    for_each_policy([](policy_kind kind) {
        test_random rnd(7);
        const int32_t n_slot = 9;
        const auto p = make_policy(kind, n_slot, 20);
        std::set<int32_t> kept;
        std::set<int32_t> empty;
        for (int32_t i = 0; i < n_slot; ++i) {
            empty.insert(i);
        }
        for (int32_t step = 0; step < 5000; ++step) {
            // each of the others is, once
            std::set<int32_t> named;
            for (int32_t i = (int32_t) kept.size(); i < n_slot; ++i) {
                const int32_t slot = p->victim([&](int32_t s) { return named.count(s) != 0; });
                CHECK(slot >= 0 && kept.count(slot) == 0);
                CHECK(named.insert(slot).second);
            }
            CHECK_EQ(p->victim([&](int32_t s) { return named.count(s) != 0; }), -1);

            const int32_t slot = (int32_t) rnd.below(n_slot);
            if (rnd.percent(25)) {
                p->on_empty(slot);
                empty.insert(slot);
                kept.erase(slot);
            } else if (kept.count(slot) == 0) {
                p->on_use(slot, (int32_t) rnd.below(20));
                empty.erase(slot);
                if (rnd.percent(20)) {
                    p->on_keep(slot);
                    kept.insert(slot);
                }
            }
        }
    });
}

//
// lru
//

TEST(lru_follows_a_simple_list) {
    test_random rnd(3);
    for (int32_t round = 0; round < 100; ++round) {
        const int32_t n_slot = rnd.between(1, 16);
        const auto p = make_policy(policy_kind::lru, n_slot, 64);
        std::vector<int32_t> order; // oldest first
        for (int32_t i = 0; i < n_slot; ++i) {
            order.push_back(i);
            p->on_use(i, i);
        }
        for (int32_t step = 0; step < 300; ++step) {
            const int32_t slot = rnd.below(n_slot);
            order.erase(std::find(order.begin(), order.end(), slot));
            if (rnd.percent(80)) {
                p->on_use(slot, rnd.below(64));
                order.push_back(slot);
            } else {
                p->on_empty(slot);
                order.insert(order.begin(), slot);
            }
            // the whole order: pin what has been named, ask again
            std::set<int32_t> named;
            for (int32_t expected : order) {
                const int32_t got = p->victim([&](int32_t s) { return named.count(s) != 0; });
                CHECK_EQ(got, expected);
                named.insert(got);
            }
        }
    }
}

TEST(lru_asks_about_few_slots) {
    // cost: the pinned slots are the newest, so the first question should already succeed
    const auto p = make_policy(policy_kind::lru, 1000, 1000);
    for (int32_t i = 0; i < 1000; ++i) {
        p->on_use(i, i);
    }
    int32_t n_asked = 0;
    CHECK_EQ(p->victim([&](int32_t s) { n_asked++; return s >= 992; }), 0);
    CHECK_EQ(n_asked, 1);
}

//
// lfu
//

TEST(lfu_takes_the_least_used) {
    const auto p = make_policy(policy_kind::lfu, 3, 10);
    p->on_use(0, 5); p->on_use(0, 5); p->on_use(0, 5);
    p->on_use(1, 6);
    p->on_use(2, 7); p->on_use(2, 7);
    CHECK_EQ(p->victim(nothing_pinned), 1);
    CHECK_EQ(p->victim([](int32_t s) { return s == 1; }), 2);
    CHECK_EQ(p->victim([](int32_t s) { return s != 0; }), 0);
}

TEST(lfu_ties_go_to_the_least_recent) {
    const auto p = make_policy(policy_kind::lfu, 3, 10);
    for (int32_t slot : { 2, 0, 1, 0, 1, 2 }) {
        p->on_use(slot, slot);
    }
    CHECK_EQ(p->victim(nothing_pinned), 0);
    CHECK_EQ(p->victim([](int32_t s) { return s == 0; }), 1);
    CHECK_EQ(p->victim([](int32_t s) { return s != 2; }), 2);
}

TEST(lfu_counts_outlive_an_eviction) {
    const auto p = make_policy(policy_kind::lfu, 2, 10);
    for (int32_t i = 0; i < 5; ++i) {
        p->on_use(0, 4);
    }
    p->on_use(1, 3); p->on_use(1, 3);
    p->on_use(0, 8);                        // 4 is evicted by 8
    CHECK_EQ(p->victim(nothing_pinned), 0); // 8 was used once, 3 twice
    p->on_use(0, 4);                        // 4 returns with its 5 uses
    CHECK_EQ(p->victim(nothing_pinned), 1);
    p->on_empty(0);
    CHECK_EQ(p->victim(nothing_pinned), 0); // an empty slot has no count
    p->on_use(0, 4);
    CHECK_EQ(p->victim(nothing_pinned), 1);
}

TEST(lfu_halves_its_counts) {
    // 1 expert in slot 0 with many uses, then idle: halvings must let a newcomer pass it. The period is 64 uses an expert.
    const int32_t n_expert = 4;
    const int32_t period   = 64 * n_expert;
    const auto p = make_policy(policy_kind::lfu, 2, n_expert);
    for (int32_t i = 0; i < period - 1; ++i) {
        p->on_use(0, 0);
    }
    p->on_use(1, 1); // the period is full: 255 -> 127, 1 -> 0
    for (int32_t i = 0; i < 127; ++i) {
        CHECK_EQ(p->victim(nothing_pinned), 1);
        p->on_use(1, 1);
    }
    // 127 against 127: slot 0 is the less recent. Without the halving it would be 255 against 128.
    CHECK_EQ(p->victim(nothing_pinned), 0);
    // not before the next period is over
    p->on_use(0, 0); // 128 against 127
    CHECK_EQ(p->victim(nothing_pinned), 1);
    for (int32_t i = 0; i < period - 128 - 1; ++i) {
        p->on_use(0, 0);
        CHECK_EQ(p->victim(nothing_pinned), 1);
    }
    p->on_use(0, 0); // 256 -> 128, 127 -> 63
    for (int32_t i = 0; i < 128 - 63 - 1; ++i) {
        p->on_use(1, 1);
        CHECK_EQ(p->victim(nothing_pinned), 1);
    }
    p->on_use(1, 1); // 128 against 128
    CHECK_EQ(p->victim(nothing_pinned), 0);
}

TEST(lfu_follows_a_simple_model) {
    test_random rnd(4);
    for (int32_t round = 0; round < 60; ++round) {
        const int32_t n_slot   = rnd.between(1, 10);
        const int32_t n_expert = rnd.between(1, 12);
        const auto p = make_policy(policy_kind::lfu, n_slot, n_expert);

        std::vector<int64_t> uses(n_expert, 0);
        std::vector<int32_t> expert(n_slot, -1);
        std::vector<int64_t> used_at(n_slot, 0);
        int64_t now = 0;

        for (int32_t step = 0; step < 3000; ++step) {
            std::vector<bool> pins(n_slot);
            for (int32_t i = 0; i < n_slot; ++i) {
                pins[i] = rnd.percent(25);
            }
            const int32_t got = p->victim([&](int32_t s) { return (bool) pins[s]; });
            int32_t best = -1;
            bool    some_empty = false;
            for (int32_t i = 0; i < n_slot; ++i) {
                if (pins[i]) {
                    continue;
                }
                if (expert[i] < 0) {
                    some_empty = true;
                } else if (best < 0 || std::make_pair(uses[expert[i]], used_at[i]) < std::make_pair(uses[expert[best]], used_at[best])) {
                    best = i;
                }
            }
            if (some_empty) {
                CHECK(got >= 0 && !pins[got] && expert[got] < 0);
            } else {
                CHECK_EQ(got, best);
            }

            int32_t slot = rnd.below(n_slot);
            if (rnd.percent(5)) {
                p->on_empty(slot);
                expert[slot] = -1;
                continue;
            }
            const int32_t e = std::min(rnd.below(n_expert), rnd.below(n_expert)); // skewed
            const auto there = std::find(expert.begin(), expert.end(), e);
            slot = there != expert.end() ? (int32_t) (there - expert.begin()) : slot;
            p->on_use(slot, e);
            expert[slot]  = e;
            used_at[slot] = ++now;
            uses[e]++;
            if (now % (64 * n_expert) == 0) {
                for (int64_t & n : uses) {
                    n /= 2;
                }
            }
        }
    }
}

//
// heat
//

TEST(heat_takes_the_coldest) {
    const auto p = make_policy(policy_kind::heat, 3, 10);
    for (int32_t slot : { 0, 0, 0, 1, 1, 2, 2, 2 }) {
        p->on_use(slot, slot);
    }
    CHECK_EQ(p->victim(nothing_pinned), 1);
    CHECK_EQ(p->victim([](int32_t s) { return s == 1; }), 0); // as often as 2, but longer ago
    CHECK_EQ(p->victim([](int32_t s) { return s != 2; }), 2);
}

TEST(heat_fades) {
    // ten uses long ago against three now: by counts alone the first would stay for ever
    const int32_t n_expert = 8;
    const auto p = make_policy(policy_kind::heat, 3, n_expert);
    for (int32_t i = 0; i < 10; ++i) {
        p->on_use(0, 0);
    }
    p->on_use(1, 1); p->on_use(1, 1); p->on_use(1, 1);
    CHECK_EQ(p->victim([](int32_t s) { return s == 2; }), 1);
    for (int64_t i = 0; i < 3 * heat_half_life(n_expert); ++i) {
        p->on_use(2, 2);
    }
    p->on_use(1, 1); p->on_use(1, 1); p->on_use(1, 1);
    CHECK_EQ(p->victim([](int32_t s) { return s == 2; }), 0);
}

TEST(heat_halves_in_its_half_life) {
    const int32_t n_expert = 8;
    const int64_t half     = heat_half_life(n_expert);
    for (const int64_t n_between : { half - 2, half - 1 }) {
        // two uses of 0 against one of 1, which is no newcomer, a little less or a little more than a half life later
        const auto p = make_policy(policy_kind::heat, 3, n_expert);
        p->on_use(1, 1);
        for (int64_t i = 0; i < 40 * half; ++i) { // nothing is left of that
            p->on_use(2, 2);
        }
        p->on_use(0, 0); p->on_use(0, 0);
        for (int64_t i = 0; i < n_between; ++i) {
            p->on_use(2, 2);
        }
        p->on_use(1, 1);
        CHECK_EQ(p->victim([](int32_t s) { return s == 2; }), n_between == half - 2 ? 1 : 0);
    }
}

TEST(heat_of_a_newcomer_displaces_nothing_warm) {
    const int32_t n_expert = 100;
    const auto p = make_policy(policy_kind::heat, 3, n_expert);
    p->on_use(0, 0); p->on_use(0, 0);
    p->on_use(1, 1); p->on_use(1, 1);
    for (int32_t e = 2; e < 40; ++e) { // one after the other comes, and is the first to leave
        p->on_use(2, e);
        CHECK_EQ(p->victim(nothing_pinned), 2);
    }
}

TEST(heat_tells_a_newcomer_from_one_used_again) {
    const int32_t n_expert = 1000; // hardly anything fades
    const auto p = make_policy(policy_kind::heat, 2, n_expert);
    p->on_use(0, 0);
    p->on_empty(0);
    p->on_use(1, 1); p->on_use(1, 1);
    p->on_use(0, 0);                        // its second use, but the first since it came back
    CHECK_EQ(p->victim(nothing_pinned), 0);
    p->on_use(0, 0);
    CHECK_EQ(p->victim(nothing_pinned), 1);
}

TEST(heat_keeps_its_order_when_it_is_rescaled) {
    // what a use is worth doubles every half life, and all is rescaled after some hundreds of those: a model that sums the ages knows
    // nothing of it
    const int32_t n_expert = 2;
    const int32_t n_slot   = 2;
    const int64_t half     = heat_half_life(n_expert);
    test_random rnd(6);
    const auto p = make_policy(policy_kind::heat, n_slot, n_expert);
    std::vector<std::vector<int64_t>> used(n_expert);
    int64_t n_told = 0;
    for (int64_t now = 1; now < 1000 * half; ++now) {
        const int32_t slot = (int32_t) rnd.below(n_slot);
        p->on_use(slot, slot);
        used[slot].push_back(now);
        double heats[n_slot] = { 0, 0 };
        for (int32_t s = 0; s < n_slot; ++s) {
            for (size_t i = used[s].size(); i > 0 && now - used[s][i - 1] < 60 * half; --i) {
                heats[s] += std::exp2((double) (used[s][i - 1] - now) / half);
            }
            heats[s] *= used[s].size() == 1 ? heat_newcomer : 1.0;
        }
        if (used[0].size() > 0 && used[1].size() > 0 && std::fabs(heats[0] - heats[1]) > 1e-6) {
            CHECK_EQ(p->victim(nothing_pinned), heats[0] < heats[1] ? 0 : 1);
            ++n_told;
        }
    }
    CHECK(n_told > 900 * half);
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
