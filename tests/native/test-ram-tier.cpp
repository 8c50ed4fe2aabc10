// Which expert is in which slab. What the bytes do, fuzz-stream.cpp sees.

#include "check.h"
#include "ram-tier.h"

#include <map>
#include <set>

using namespace moe;

static const std::vector<ram_tier::layer_size> two_sizes = { { 100, 8, 2 }, { 100, 8, 3 }, { 1000, 4, 1 } };

TEST(the_budget_is_not_exceeded_and_no_slab_is_useless) {
    test_random rnd(1);
    for (int i = 0; i < 2000; ++i) {
        std::vector<ram_tier::layer_size> layers;
        uint64_t most = 0;
        for (int64_t n = rnd.between(1, 5); n > 0; --n) {
            const int32_t n_expert = (int32_t) rnd.between(1, 30);
            layers.push_back({ (uint64_t) rnd.between(1, 3) * 500, n_expert, (int32_t) rnd.between(1, n_expert) });
            most += (layers.back().expert_bytes + 63) / 64 * 64 * (n_expert - layers.back().n_slot);
        }
        const uint64_t budget = rnd.below(2 * most + 2);
        const ram_tier tier(layers, budget);
        CHECK(tier.bytes() <= budget && tier.bytes() <= most);
        CHECK(budget < most || tier.bytes() == most);
        uint64_t smallest = UINT64_MAX;
        for (const auto & l : layers) {
            smallest = l.n_slot < l.n_expert ? std::min(smallest, (l.expert_bytes + 63) / 64 * 64) : smallest;
        }
        CHECK(tier.bytes() + 1536 > std::min(budget, most)); // what is left is less than a slab of the largest size
        CHECK((tier.n_slab() > 0) == (budget >= smallest && most > 0));
        std::set<std::pair<uint64_t, uint64_t>> ends;
        for (int32_t slab = 0; slab < tier.n_slab(); ++slab) {
            CHECK_EQ(tier.offset(slab) % ram_tier::alignment, 0u);
        }
        tier.self_check();
    }
}

TEST(who_came_first_gives_way_first) {
    ram_tier tier({ { 64, 8, 2 } }, 3 * 64);
    CHECK_EQ(tier.n_slab(), 3);
    int32_t slab[4];
    for (int32_t e = 0; e < 4; ++e) {
        slab[e] = tier.claim(0, e);
        tier.release(slab[e]);
    }
    CHECK_EQ(slab[3], slab[0]);
    CHECK_EQ(tier.find(0, 0), -1);
    CHECK_EQ(tier.find(0, 1), slab[1]);
    tier.exchange(slab[1], 5); // as new as can be
    CHECK_EQ(tier.find(0, 1), -1);
    CHECK_EQ(tier.claim(0, 6), slab[2]);
    tier.self_check();
}

TEST(a_held_slab_is_not_given_away) {
    ram_tier tier({ { 64, 8, 2 } }, 2 * 64);
    const int32_t a = tier.claim(0, 0);
    const int32_t b = tier.claim(0, 1);
    CHECK(a >= 0 && b >= 0 && a != b);
    CHECK_EQ(tier.claim(0, 2), -1);
    tier.hold(a);
    tier.release(a);
    CHECK_EQ(tier.claim(0, 2), -1); // held twice
    tier.forget(b);
    CHECK_EQ(tier.find(0, 1), -1);
    CHECK_EQ(tier.claim(0, 2), -1); // somebody still reads it
    tier.release(b);
    CHECK_EQ(tier.claim(0, 2), b);
    tier.release(a);
    CHECK_EQ(tier.claim(0, 3, true), -1); // nobody gives way
    CHECK_EQ(tier.claim(0, 3), a);
    tier.self_check();
}

TEST(layers_of_one_size_share_and_others_do_not) {
    ram_tier tier(two_sizes, 1 << 20);
    CHECK_EQ(tier.n_slab(), 6 + 5 + 3);
    std::set<int32_t> large;
    for (int32_t e = 0; e < 3; ++e) {
        large.insert(tier.claim(2, e));
    }
    CHECK_EQ(large.size(), 3u);
    CHECK_EQ(tier.claim(2, 3), -1);
    for (int32_t e = 0; e < 8; ++e) { // more than its own
        const int32_t slab = tier.claim(0, e);
        CHECK(slab >= 0 && large.count(slab) == 0);
    }
    tier.self_check();
}

TEST(random_calls_keep_the_books) {
    test_random rnd(7);
    for (int round = 0; round < 50; ++round) {
        ram_tier tier(two_sizes, rnd.below(6000));
        std::map<int32_t, int> held; // by slab
        for (int i = 0; i < 500; ++i) {
            const int32_t layer  = (int32_t) rnd.below(two_sizes.size());
            const int32_t expert = (int32_t) rnd.below(two_sizes[layer].n_expert);
            const int32_t slab   = tier.find(layer, expert);
            const uint64_t what  = rnd.below(5);
            if (slab < 0 && what < 3) {
                const int32_t got = tier.claim(layer, expert, rnd.percent(30));
                CHECK_EQ(tier.find(layer, expert), got);
                CHECK(got < 0 || held[got]++ == 0);
            } else if (slab >= 0 && what == 0) {
                tier.forget(slab);
            } else if (slab >= 0 && what == 1) {
                tier.hold(slab);
                held[slab]++;
            } else if (slab >= 0 && what == 2) {
                const int32_t other = (int32_t) rnd.below(two_sizes[layer].n_expert);
                if (tier.find(layer, other) < 0) {
                    tier.exchange(slab, other);
                    CHECK_EQ(tier.find(layer, other), slab);
                }
            } else {
                for (auto & [s, n] : held) {
                    if (n > 0 && rnd.percent(30)) {
                        tier.release(s);
                        n--;
                    }
                }
            }
            tier.self_check();
        }
    }
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
