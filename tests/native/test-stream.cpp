// What fuzz-stream.cpp cannot see: time; and single rules by name.

#include "check.h"
#include "fake-experts.h"
#include "stream.h"

#include <condition_variable>
#include <numeric>

using namespace moe;

namespace {

struct streamed {
    fake_experts            experts;
    place_source          * source; // owned by s
    std::unique_ptr<stream> s;
    test_random             rnd { 5 };
    std::vector<int32_t>    out; // the ids of the last begin()

    // one thread takes the queue in its order
    explicit streamed(const std::vector<fake_layer_shape> & shapes, std::function<void(int32_t, uint64_t, uint64_t)> on_read = nullptr,
            int32_t n_thread = 1)
        : experts(shapes, 3) {
        auto src = std::make_unique<place_source>(experts.contents, 1, 4);
        source = src.get();
        source->on_read = std::move(on_read);
        stream::options opt;
        opt.poison     = true;
        opt.check      = true;
        opt.staging    = experts.staging.get();
        opt.half_bytes = experts.half_bytes;
        s = std::make_unique<stream>(opt, experts.layers, std::make_unique<reader>(std::move(src), n_thread, reader::default_chunk_size, true));
    }

    void begin(int32_t i, bool staged, const std::vector<std::vector<int32_t>> & by_token, bool read_next = false, bool late = false) {
        const id_layout ids(by_token, rnd);
        out.assign(by_token.size() * by_token[0].size(), -1);
        if (staged) {
            s->begin_staging(i, ids.chosen, out.data(), read_next, late);
        } else {
            s->begin_slots(i, ids.chosen, out.data(), late);
        }
    }

    void join(int32_t i, bool staged) {
        s->wait(i, staged, true);
        s->settle(i, staged);
    }

    void make_bad(int32_t i, int32_t expert) {
        const expert_part & p = experts.layers[i].parts[0];
        source->set_bad({ { p.file, p.offset + expert * p.expert_bytes + 1, -EIO } });
    }

    uint64_t stall_us(int32_t i) const { return s->stats().layers[i]->stall_us; }
};

// a door that reads wait at, opened a while after ring()
class door {
public:
    explicit door(int32_t delay_ms) : opener([this, delay_ms] {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return rung; });
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
        lock.lock();
        is_open = true;
        changed.notify_all();
    }) {}

    ~door() { opener.join(); }

    void ring() {
        std::lock_guard<std::mutex> lock(mutex);
        rung = true;
        changed.notify_all();
    }

    void pass() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return is_open; });
    }

private:
    std::mutex              mutex;
    std::condition_variable changed;
    bool                    rung    = false;
    bool                    is_open = false;
    std::thread             opener;
};

const fake_layer_shape                  small = { 4, 1, { 100 } };
const std::vector<std::vector<int32_t>> all_of_four = { { 0, 1 }, { 2, 3 } };

} // namespace

TEST(a_join_that_waits_counts_as_stall) {
    for (const bool staged : { false, true }) {
        door d(60);
        streamed m({ small }, [&](int32_t, uint64_t, uint64_t) { d.pass(); });
        m.s->compute_begin();
        m.begin(0, staged, staged ? all_of_four : std::vector<std::vector<int32_t>> { { 2 } });
        d.ring();
        m.join(0, staged);
        CHECK_EQ(m.s->compute_end(true), "");
        CHECK(m.stall_us(0) >= 5000);
    }
}

// Gate is there, down is not: who needs gate goes on. Hits come before misses.
TEST(a_part_that_is_there_waits_for_no_other) {
    for (const bool staged : { false, true }) {
        door     d(30);
        bool     has_door = false;
        moe::expert_part down;
        streamed m({ { 4, 2, { 100, 100 } } }, [&](int32_t file, uint64_t, uint64_t offset) {
            if (has_door && file == down.file && offset >= down.offset && offset < down.offset + 4 * down.expert_bytes) {
                d.pass();
            }
        });
        down = m.experts.layers[0].parts[1];
        m.s->compute_begin();
        m.begin(0, false, { { 2 } });
        m.join(0, false);
        has_door = true;
        m.begin(0, staged, staged ? all_of_four : std::vector<std::vector<int32_t>> { { 1, 2 } }, false, true);
        const std::vector<int32_t> order = m.s->order();
        CHECK_EQ(order.size(), staged ? 4u : 2u);
        if (!staged) {
            CHECK_EQ(order[0], m.out[1]);
            CHECK_EQ(order[1], m.out[0]);
        }
        for (size_t step = 0; step < order.size(); ++step) {
            m.s->take(0, staged, 0, (int32_t) step, 0, 1);
        }
        const uint64_t stall_us = m.stall_us(0);
        d.ring();
        for (size_t step = 0; step < order.size(); ++step) {
            m.s->take(0, staged, 1, (int32_t) step, 0, 1);
            CHECK(m.experts.holds(0, staged, order[step], staged ? order[step] : order[step] == m.out[0] ? 1 : 2));
        }
        CHECK(m.stall_us(0) - stall_us >= 5000);
        CHECK_EQ(m.s->compute_end(true), "");
        m.s->compute_begin(); // what came late counts as there
        m.begin(0, false, { { 2 } }, false, true);
        CHECK(m.s->order().empty());
        CHECK_EQ(m.s->compute_end(true), "");
    }
}

// The copies into the slots of layer 0 queue behind the read ahead for layer 1, and the half that they come from is wanted for
// layer 2: layer 1's begin then waits for its own reads.
TEST(a_begin_that_waits_counts_as_stall) {
    door d(60);
    uint64_t first_of_1 = 0;
    int32_t  file_of_1  = 0;
    streamed m({ small, small, small }, [&](int32_t file, uint64_t, uint64_t offset) {
        if (file == file_of_1 && offset == first_of_1) {
            d.pass();
        }
    });
    first_of_1 = m.experts.layers[1].parts[0].offset;
    file_of_1  = m.experts.layers[1].parts[0].file;
    m.s->compute_begin();
    m.begin(0, true, all_of_four, true);
    m.join(0, true);
    CHECK_EQ(m.stall_us(1), 0u);
    d.ring();
    m.begin(1, true, all_of_four, true);
    m.join(1, true);
    CHECK(m.stall_us(1) >= 5000);
    m.begin(2, true, all_of_four);
    m.join(2, true);
    CHECK_EQ(m.s->compute_end(true), "");
}

TEST(a_failed_read_ahead_that_nobody_needs_is_no_error) {
    streamed m({ small, small });
    m.make_bad(1, 3);
    m.s->compute_begin();
    m.begin(0, true, all_of_four, true);
    m.join(0, true);
    m.begin(1, true, { { 0, 1 }, { 2, 1 } });
    m.join(1, true);
    CHECK(m.experts.holds(1, true, 2, 2));
    CHECK_EQ(m.s->compute_end(true), "");
    CHECK_EQ(m.s->stats().read_errors.load(), 1u);

    // and the one who does need it reads it again
    m.s->compute_begin();
    m.begin(1, true, { { 0, 3 } });
    m.join(1, true);
    CHECK(m.experts.is_zero(1, true, 3));
    CHECK_CONTAINS(m.s->compute_end(true), "file-");
    m.source->set_bad({});
    m.s->compute_begin();
    m.begin(1, true, { { 0, 3 } });
    m.join(1, true);
    CHECK(m.experts.holds(1, true, 3, 3));
    CHECK_EQ(m.s->compute_end(true), "");
}

TEST(a_failed_read_ahead_of_a_graph_that_stops_is_no_error) {
    streamed m({ small, small });
    m.make_bad(1, 3);
    m.s->compute_begin();
    m.begin(0, true, all_of_four, true);
    m.join(0, true);
    CHECK_EQ(m.s->compute_end(false), "");
}

// No graph that hooks/ builds leaves one behind; the half must be safe all the same.
TEST(a_read_ahead_that_nobody_came_for_ends_before_its_half_is_reused) {
    door d(30);
    uint64_t first_of_1 = 0;
    int32_t  file_of_1  = 0;
    streamed m({ small, small, small, small }, [&](int32_t file, uint64_t, uint64_t offset) {
        if (file == file_of_1 && offset == first_of_1) {
            d.pass();
        }
    }, 2);
    first_of_1 = m.experts.layers[1].parts[0].offset;
    file_of_1  = m.experts.layers[1].parts[0].file;
    m.s->compute_begin();
    m.begin(0, true, all_of_four, true);
    m.join(0, true);
    CHECK_EQ(m.s->compute_end(true), "");
    d.ring();
    m.s->compute_begin();
    m.begin(3, true, all_of_four);
    m.join(3, true);
    std::this_thread::sleep_for(std::chrono::milliseconds(60)); // a late read would land now
    for (int32_t e = 0; e < 4; ++e) {
        CHECK(m.experts.holds(3, true, e, e));
    }
    CHECK_EQ(m.s->compute_end(true), "");
}

TEST(what_no_router_chooses_is_an_error_that_says_what) {
    const fake_layer_shape roomy = { 4, 4, { 100 } };
    const struct { int32_t a, b; const char * says; } nonsense[] = {
        { 0, 4, "chose expert 4 of 4 for token 1" }, { -1, 2, "chose expert -1 of 4 for token 1" }, { 3, 3, "chose expert 3 of 4 twice for token 1" },
        { INT32_MIN, 0, "chose expert -2147483648 of 4" }, { 2, INT32_MAX, "chose expert 2147483647 of 4" },
    };
    for (const bool staged : { false, true }) {
        streamed m({ staged ? small : roomy });
        for (const auto & [a, b, says] : nonsense) {
            m.s->compute_begin();
            m.begin(0, staged, { { 2, 1 }, { a, b } });
            m.join(0, staged);
            for (size_t t = 0; t < 2; ++t) {
                for (size_t k = 0; k < 2; ++k) {
                    CHECK_EQ(m.out[t * 2 + k], (int32_t) k);
                    CHECK(m.experts.is_zero(0, staged, (int32_t) k)); // nothing was ever read
                }
            }
            const std::string error = m.s->compute_end(true);
            CHECK_CONTAINS(error, "layer 3: the router ");
            CHECK_CONTAINS(error, says);
        }
        CHECK_EQ(m.s->stats().layers[0]->bytes_read.load(), 0u);
        CHECK_EQ(m.s->stats().read_errors.load(), 0u);
        m.s->compute_begin();
        m.begin(0, staged, { { 2, 1 }, { 0, 3 } });
        m.join(0, staged);
        CHECK(m.experts.holds(0, staged, m.out[3], 3));
        CHECK_EQ(m.s->compute_end(true), "");
    }
}

TEST(a_slot_that_changed_is_an_error_that_names_it) {
    for (const bool staged : { false, true }) {
        streamed m({ { 4, 2, { 100, 53 } } });
        m.s->compute_begin();
        m.begin(0, false, { { 1, 3 } });
        m.join(0, false);
        CHECK_EQ(m.s->compute_end(true), "");

        m.s->compute_begin();
        m.begin(0, false, { { 3, 1 } }); // as it was: no error
        m.join(0, false);
        CHECK_EQ(m.s->compute_end(true), "");
        const int32_t slot = m.out[0];

        m.experts.layers[0].parts[1].slots[slot * 53 + 52] ^= 0x10; // the last byte of the last part
        m.s->compute_begin();
        m.begin(0, staged, { { 3, 1 } });
        m.join(0, staged);
        CHECK(m.experts.holds(0, staged, m.out[0], 3));
        CHECK(m.experts.holds(0, staged, m.out[1], 1));
        CHECK_CONTAINS(m.s->compute_end(true), "layer 3: slot " + std::to_string(slot) + " changed while it held expert 3");

        m.s->compute_begin();
        m.begin(0, staged, { { 3, 1 } });
        m.join(0, staged);
        CHECK(m.experts.holds(0, staged, m.out[0], 3));
        CHECK_EQ(m.s->compute_end(true), "");
    }
}

// The copies into the slots of layer 0 come before what is only read ahead, but not before what layer 1 waits for.
TEST(a_read_ahead_that_is_needed_goes_first) {
    door d(0);
    bool copied_before_last = true;
    streamed * fixture = nullptr;
    uint64_t first_of_1 = 0;
    int32_t  file_of_1  = 0;
    streamed m({ small, small }, [&](int32_t file, uint64_t, uint64_t offset) {
        if (file == file_of_1 && offset == first_of_1) {
            d.pass();
        }
        if (file == file_of_1 && offset == first_of_1 + 300) {
            copied_before_last = !fixture->experts.is_poison(0, false, 0); // the thread that would copy is this one
        }
    });
    fixture    = &m;
    first_of_1 = m.experts.layers[1].parts[0].offset;
    file_of_1  = m.experts.layers[1].parts[0].file;
    m.s->compute_begin();
    m.begin(0, true, all_of_four, true);
    m.join(0, true);
    m.begin(1, true, all_of_four);
    d.ring();
    m.join(1, true);
    CHECK(!copied_before_last);
    for (int32_t e = 0; e < 4; ++e) {
        CHECK(m.experts.holds(1, true, e, e));
    }
    CHECK_EQ(m.s->compute_end(true), "");
}

// With another layer to read ahead after it, layer 1's begin has to wait for those copies: they must not be behind its own reads.
TEST(a_begin_waits_for_copies_and_not_for_reads) {
    std::atomic<bool> begun { false };
    bool was_begun = false;
    door d(5); // the copies are queued, and begin() waits, while the first of these reads is under way
    uint64_t first_of_1 = 0;
    int32_t  file_of_1  = 0;
    streamed m({ small, small, small }, [&](int32_t file, uint64_t, uint64_t offset) {
        if (file == file_of_1 && offset == first_of_1) {
            d.pass();
        }
        if (file == file_of_1 && offset == first_of_1 + 300) {
            for (int32_t ms = 0; ms < 10000 && !begun; ++ms) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            was_begun = begun;
        }
    });
    first_of_1 = m.experts.layers[1].parts[0].offset;
    file_of_1  = m.experts.layers[1].parts[0].file;
    m.s->compute_begin();
    m.begin(0, true, all_of_four, true);
    m.join(0, true);
    d.ring();
    m.begin(1, true, all_of_four, true);
    begun = true;
    m.join(1, true);
    CHECK(was_begun);
    m.begin(2, true, all_of_four);
    m.join(2, true);
    CHECK_EQ(m.s->compute_end(true), "");
}

//
// warm fills
//

static uint64_t n_filled(const streamed & m, int32_t i) { return m.s->stats().layers[i]->warm_filled; }

static void compute_one(streamed & m, int32_t i, const std::vector<int32_t> & experts) {
    m.s->compute_begin();
    m.begin(i, false, { experts });
    m.join(i, false);
    CHECK_EQ(m.s->compute_end(true), "");
}

TEST(empty_slots_are_filled_in_order) {
    std::vector<uint64_t> offsets; // by one thread
    streamed m({ { 9, 3, { 100 }, {}, { 7, 2, 5 } }, { 6, 2, { 80 }, {}, { 1 } } }, [&](int32_t, uint64_t, uint64_t offset) { offsets.push_back(offset); });
    CHECK(m.s->wait_warm(std::chrono::seconds(0))); // nothing was begun
    m.s->start_warm();
    m.s->start_warm(); // once
    CHECK(m.s->wait_warm(std::chrono::seconds(50)));
    CHECK_EQ(n_filled(m, 0), 3u);
    CHECK_EQ(n_filled(m, 1), 1u);
    CHECK_EQ(m.s->stats().layers[0]->warm_bytes.load(), 300u);
    CHECK_EQ(m.s->stats().layers[0]->bytes_read.load(), 0u);
    const auto at = [&](int32_t i, int32_t e) { return m.experts.layers[i].parts[0].offset + e * m.experts.layers[i].parts[0].expert_bytes; };
    CHECK_EQ(offsets.size(), 4u);
    CHECK(offsets == (std::vector<uint64_t> { at(0, 7), at(1, 1), at(0, 2), at(0, 5) })); // the first of each layer first
    compute_one(m, 0, { 5, 7, 2 });
    compute_one(m, 1, { 1, 4 });
    for (int32_t k = 0; k < 2; ++k) {
        CHECK_EQ(m.s->stats().layers[k]->misses.load(), (uint64_t) k);
    }
    CHECK_EQ(m.s->stats().layers[0]->hits.load(), 3u);
}

TEST(a_slot_that_is_taken_is_not_filled) {
    streamed m({ { 9, 3, { 100 }, {}, { 7, 2, 5 } } });
    compute_one(m, 0, { 2, 3 });
    m.s->start_warm();
    CHECK(m.s->wait_warm(std::chrono::seconds(50)));
    CHECK_EQ(n_filled(m, 0), 1u); // 7
    compute_one(m, 0, { 2, 3, 7 });
    CHECK_EQ(m.s->stats().layers[0]->misses.load(), 2u);
}

TEST(a_warm_fill_that_is_on_its_way_is_taken_in) {
    door d(40);
    streamed m({ { 9, 3, { 100 }, {}, { 7, 2, 5 } } }, [&](int32_t, uint64_t, uint64_t) { d.pass(); });
    m.s->start_warm();
    while (m.s->stats().layers[0]->warm_bytes == 0) {
        std::this_thread::yield();
    }
    CHECK(!m.s->wait_warm(std::chrono::seconds(0)));
    m.s->compute_begin();
    d.ring();
    m.begin(0, false, { { 7, 1 } }); // waits for 7; 2 and 5 are not begun
    m.join(0, false);
    CHECK(m.experts.holds(0, false, m.out[0], 7) && m.experts.holds(0, false, m.out[1], 1));
    CHECK_EQ(n_filled(m, 0), 1u);
    CHECK_EQ(m.s->stats().layers[0]->hits.load(), 1u);
    CHECK(m.stall_us(0) >= 5000);
    CHECK_EQ(m.s->compute_end(true), "");
    CHECK(m.s->wait_warm(std::chrono::seconds(50)));
    CHECK_EQ(n_filled(m, 0), 2u); // 2 took the slot that was left
    compute_one(m, 0, { 7, 1, 2 });
    CHECK_EQ(m.s->stats().layers[0]->misses.load(), 1u);
}

TEST(nothing_is_filled_while_a_graph_computes) {
    streamed m({ { 9, 3, { 100 }, {}, { 7, 2, 5 } } });
    m.s->compute_begin();
    m.s->start_warm();
    CHECK(!m.s->wait_warm(std::chrono::seconds(1)));
    CHECK_EQ(m.s->stats().layers[0]->warm_bytes.load(), 0u);
    CHECK_EQ(m.s->compute_end(true), "");
    CHECK(m.s->wait_warm(std::chrono::seconds(50)));
    CHECK_EQ(n_filled(m, 0), 3u);
}

TEST(a_failed_warm_fill_is_no_error) {
    streamed m({ { 9, 3, { 100 }, { 2 }, { 7, 2, 5 } } });
    m.make_bad(0, 2);
    m.s->start_warm();
    CHECK(m.s->wait_warm(std::chrono::seconds(50)));
    CHECK_EQ(n_filled(m, 0), 2u);
    CHECK_EQ(m.s->stats().read_errors.load(), 1u);
    CHECK_EQ(m.s->stats().layers[0]->warm_bytes.load(), 300u);
    CHECK_EQ(m.s->stats().layers[0]->pins.load(), 0u);
    compute_one(m, 0, { 7, 5 });
    CHECK_EQ(m.s->stats().layers[0]->hits.load(), 2u);
    // for who needs it, it is one
    m.s->compute_begin();
    m.begin(0, false, { { 2, 5 } });
    m.join(0, false);
    CHECK(m.experts.is_zero(0, false, m.out[0]));
    CHECK_CONTAINS(m.s->compute_end(true), "file-");
    m.source->set_bad({});
    compute_one(m, 0, { 2, 5 });
    CHECK(m.experts.holds(0, false, m.out[0], 2));
    CHECK_EQ(m.s->stats().layers[0]->pins.load(), 1u);
}

TEST(a_stream_that_ends_while_slots_are_filled) {
    for (int32_t round = 0; round < 20; ++round) {
        std::vector<int32_t> all(40);
        std::iota(all.begin(), all.end(), 0);
        streamed m({ { 40, 40, { 3000, 200 }, {}, all }, { 40, 30, { 3000 }, {}, all } }, nullptr, 3);
        m.source->delay_percent = 50;
        m.s->start_warm();
        std::this_thread::sleep_for(std::chrono::microseconds(50 * round));
        m.s.reset();
    }
}

//
// experts that stay
//

TEST(kept_experts_are_never_evicted) {
    streamed m({ { 20, 6, { 100 }, { 11, 3 }, {} } });
    compute_one(m, 0, { 11, 3, 0 });
    CHECK_EQ(m.s->stats().layers[0]->pins.load(), 2u);
    for (int32_t e = 4; e < 10; ++e) {
        compute_one(m, 0, { e, e + 10, e + 1 });
    }
    // nor by a batch that goes through staging
    m.s->compute_begin();
    m.begin(0, true, { { 0, 1 }, { 2, 4 }, { 5, 6 }, { 7, 8 } });
    m.join(0, true);
    CHECK_EQ(m.s->compute_end(true), "");
    const uint64_t n_miss = m.s->stats().layers[0]->misses;
    compute_one(m, 0, { 11, 3 });
    CHECK_EQ(m.s->stats().layers[0]->misses.load(), n_miss);
    CHECK(m.experts.holds(0, false, m.out[0], 11) && m.experts.holds(0, false, m.out[1], 3));
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
