// The host's side of slots that a device looks after: a thread plays the device, by the rules of device-pool.h.

#include "check.h"
#include "device-tier.h"
#include "fake-experts.h"
#include "stream.h"

#include <memory>

using namespace moe;

namespace {

constexpr int32_t n_layer  = 3;
constexpr int32_t n_expert = 12;

struct played_device {
    fake_experts         experts;
    place_source       * source = nullptr;
    std::unique_ptr<reader> io;
    stream_stats         stats;
    device_mailbox       box;
    std::vector<int64_t> slab_of = std::vector<int64_t>(n_layer * n_expert);
    std::vector<uint8_t> slabs;
    std::unique_ptr<device_tier> tier;
    test_random          rnd { 3 };

    // n_slab: that the tier has room for; delay_us, mute: as options
    explicit played_device(int32_t n_slab, uint32_t delay_us = 0, bool mute = false, bool warm = false) : experts(shapes(), 9) {
        std::vector<device_tier::layer> layers;
        for (const layer_desc & d : experts.layers) {
            layers.push_back({ d.layer, d.n_expert, {}, {} });
            for (const expert_part & p : d.parts) {
                layers.back().parts.push_back({ p.file, p.offset, p.expert_bytes });
            }
            for (int32_t e = 0; warm && e < d.n_expert; ++e) {
                layers.back().warm.push_back(d.n_expert - 1 - e);
            }
            auto s = std::make_unique<layer_stats>();
            stats.layers.push_back(std::move(s));
        }
        auto owned = std::make_unique<place_source>(experts.contents, 1, 4);
        source = owned.get();
        source->delay_percent = 20;
        io = std::make_unique<reader>(std::move(owned), 3, 4096);
        const uint64_t one = device_tier::plan(layers, UINT64_MAX / 4).bytes() / (n_layer * n_expert);
        slabs.resize(n_slab * one);
        device_tier::options opt;
        opt.slabs    = slabs.data();
        opt.budget   = slabs.size();
        opt.box      = &box;
        opt.slab_of  = slab_of.data();
        opt.poison   = true;
        opt.delay_us = delay_us;
        opt.mute     = mute;
        tier = std::make_unique<device_tier>(opt, layers, *io, stats);
        CHECK(tier->bytes() <= slabs.size());
    }

    ~played_device() { tier.reset(); }

    static std::vector<fake_layer_shape> shapes() {
        return std::vector<fake_layer_shape>(n_layer, { n_expert, 4, { 300, 5000 } });
    }

    int64_t slab(int32_t i_layer, int32_t e) const { return __atomic_load_n(&slab_of[i_layer * n_expert + e], __ATOMIC_ACQUIRE); }

    // the kernel's part: what it does when one of these has no slot. False: no answer in time.
    bool fetch(int32_t i_layer, const std::vector<int32_t> & wanted, std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
        if (std::all_of(wanted.begin(), wanted.end(), [&](int32_t e) { return slab(i_layer, e) >= 0; })) {
            return true;
        }
        std::copy(wanted.begin(), wanted.end(), box.experts);
        box.i_layer  = i_layer;
        box.n_expert = (int32_t) wanted.size();
        const uint32_t number = box.asked + 1;
        __atomic_store_n(&box.asked, number, __ATOMIC_RELEASE);
        const auto until = std::chrono::steady_clock::now() + timeout;
        while (__atomic_load_n(&box.answered, __ATOMIC_ACQUIRE) != number) {
            if (std::chrono::steady_clock::now() > until) {
                box.error_layer  = i_layer;
                box.error_expert = wanted[0];
                __atomic_store_n(&box.error, (int32_t) device_error_silent, __ATOMIC_RELEASE);
                return false;
            }
            std::this_thread::yield();
        }
        return true;
    }

    // as it copies: from where slab_of says
    bool holds(int32_t i_layer, int32_t e) const {
        const int64_t at = slab(i_layer, e);
        if (at < 0) {
            return false;
        }
        const layer_desc & d = experts.layers[i_layer];
        for (size_t i = 0; i < d.parts.size(); ++i) {
            const uint8_t * bytes = slabs.data() + at + tier->offset_in_slab(i_layer, i);
            if (memcmp(bytes, experts.in_file(d.parts[i], e), d.parts[i].expert_bytes) != 0) {
                return false;
            }
        }
        return true;
    }

    std::vector<int32_t> some(size_t n) {
        std::vector<int32_t> found;
        while (found.size() < n) {
            const auto e = (int32_t) rnd.below(n_expert);
            if (std::find(found.begin(), found.end(), e) == found.end()) {
                found.push_back(e);
            }
        }
        return found;
    }
};

} // namespace

TEST(what_the_device_asks_for_is_there_when_it_is_answered) {
    for (const int32_t n_slab : { 4, 9, n_layer * n_expert }) { // just what a request needs, some, all
        played_device d(n_slab, 200);
        for (int32_t graph = 0; graph < 60; ++graph) {
            d.tier->compute_begin();
            for (int32_t i = 0; i < n_layer; ++i) {
                const std::vector<int32_t> wanted = d.some(4);
                CHECK(d.fetch(i, wanted));
                for (const int32_t e : wanted) {
                    CHECK(d.holds(i, e));
                }
            }
            CHECK_EQ(d.tier->compute_end(), "");
        }
        uint64_t n_read = 0;
        for (const auto & s : d.stats.layers) {
            n_read += s->bytes_read;
        }
        const uint64_t all = (uint64_t) n_layer * n_expert * 5300;
        CHECK(n_slab < n_layer * n_expert ? n_read > all : n_read == all); // each once, when all have room
    }
}

TEST(nothing_is_asked_for_that_a_complete_tier_has) {
    played_device d(n_layer * n_expert, 0, false, true);
    d.tier->start_warm();
    CHECK(d.tier->wait_warm(std::chrono::steady_clock::now() + std::chrono::seconds(30)));
    d.tier->compute_begin();
    for (int32_t i = 0; i < n_layer; ++i) {
        for (int32_t e = 0; e < n_expert; ++e) {
            CHECK(d.holds(i, e));
        }
        CHECK_EQ(d.stats.layers[i]->warm_filled.load(), (uint64_t) n_expert);
    }
    CHECK_EQ(d.box.asked, 0u);
    CHECK_EQ(d.tier->compute_end(), "");
}

TEST(warm_fills_take_no_slab_from_anybody_and_wait_for_graphs) {
    played_device d(10, 0, false, true);
    d.tier->compute_begin();
    CHECK(d.fetch(0, { 3, 5, 0, 1 }));
    d.tier->start_warm();
    CHECK(!d.tier->wait_warm(std::chrono::steady_clock::now() + std::chrono::milliseconds(30)));
    CHECK_EQ(d.tier->compute_end(), "");
    CHECK(d.tier->wait_warm(std::chrono::steady_clock::now() + std::chrono::seconds(30)));
    for (const int32_t e : { 3, 5, 0, 1 }) {
        CHECK(d.holds(0, e));
    }
    uint64_t n_filled = 0;
    for (const auto & s : d.stats.layers) {
        n_filled += s->warm_filled;
    }
    CHECK_EQ(n_filled, 6u);
}

TEST(a_failed_read_has_no_slab_and_is_the_graphs_error) {
    played_device d(9);
    const expert_part & p = d.experts.layers[1].parts[1];
    d.source->set_bad({ { p.file, p.offset + 7 * p.expert_bytes + 100, -EIO } });
    d.tier->compute_begin();
    CHECK(d.fetch(1, { 2, 7, 4 }));
    CHECK(d.slab(1, 7) < 0);
    CHECK(d.holds(1, 2));
    CHECK(d.holds(1, 4));
    CHECK_CONTAINS(d.tier->compute_end(), "file-");
    CHECK_EQ(d.stats.read_errors.load(), 1u);
    d.source->set_bad({});
    d.tier->compute_begin();
    CHECK(d.fetch(1, { 2, 7, 4 }));
    CHECK(d.holds(1, 7));
    CHECK_EQ(d.tier->compute_end(), "");
}

TEST(what_staging_holds_gives_way_to_nobody) {
    played_device d(5);
    d.tier->compute_begin();
    CHECK(d.fetch(2, { 8, 9 }));
    const std::vector<int32_t> held = { d.tier->hold(2, 8) };
    CHECK(held[0] >= 0);
    CHECK_EQ(d.tier->hold(2, 1), -1);
    for (int32_t round = 0; round < 20; ++round) {
        CHECK(d.fetch(round % 2, d.some(4)));
        CHECK(d.holds(2, 8));
        for (size_t i = 0; i < 2; ++i) {
            const expert_part & p = d.experts.layers[2].parts[i];
            CHECK(memcmp(d.tier->bytes_of(held[0], 2, i), d.experts.in_file(p, 8), p.expert_bytes) == 0);
        }
    }
    d.tier->release(held);
    for (int32_t round = 0; round < 4; ++round) {
        CHECK(d.fetch(0, d.some(4)));
    }
    CHECK(d.slab(2, 8) < 0);
    CHECK_EQ(d.tier->compute_end(), "");
}

TEST(a_request_for_more_than_there_is_room_for_is_an_error_and_is_answered) {
    played_device d(3);
    d.tier->compute_begin();
    CHECK(d.fetch(0, { 1, 2, 3, 4 }));
    CHECK_CONTAINS(d.tier->compute_end(), "hint: a larger --moe-ram");
    CHECK(d.slab(0, 4) < 0);
}

TEST(nonsense_is_answered_and_is_an_error) {
    played_device d(9);
    d.tier->compute_begin();
    CHECK(d.fetch(0, { 1, 2 }));
    d.box.i_layer  = 77;
    d.box.n_expert = -3;
    const uint32_t number = d.box.asked + 1;
    __atomic_store_n(&d.box.asked, number, __ATOMIC_RELEASE);
    while (__atomic_load_n(&d.box.answered, __ATOMIC_ACQUIRE) != number) {
        std::this_thread::yield();
    }
    CHECK_CONTAINS(d.tier->compute_end(), "nonsense");
}

TEST(a_host_that_does_not_answer_is_an_error_and_the_tier_ends_all_the_same) {
    played_device d(9, 0, true);
    d.tier->compute_begin();
    CHECK(!d.fetch(1, { 1, 2 }, std::chrono::milliseconds(20)));
    CHECK_CONTAINS(d.tier->compute_end(), "layer 4: the host did not bring expert 1 in time; hint: --moe-gpu-path copy");
    d.tier->compute_begin();
    CHECK_EQ(d.tier->compute_end(), ""); // said once
}

TEST(what_a_kernel_found_wrong_is_said_in_words) {
    struct { int32_t error; const char * what; } const cases[] = {
        { device_error_range, "layer 5: the router chose expert 99 of 12 for token 3 of the batch; are the weights damaged?" },
        { device_error_twice, "layer 5: the router chose expert 99 of 12 twice for token 3 of the batch; are the weights damaged?" },
        { device_error_bytes, "layer 5: the slot of expert 99 does not hold what its slab holds" },
    };
    played_device d(9);
    for (const auto & c : cases) {
        d.tier->compute_begin();
        d.box.error_layer  = 2;
        d.box.error_expert = 99;
        d.box.error_token  = 3;
        __atomic_store_n(&d.box.error, c.error, __ATOMIC_RELEASE);
        CHECK_EQ(d.tier->compute_end(), c.what);
        CHECK_EQ(d.box.error, (int32_t) device_error_none);
    }
}

int main(int argc, char ** argv) {
    return run_tests(argc, argv);
}
