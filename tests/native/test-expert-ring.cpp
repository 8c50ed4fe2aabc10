// The ring alone: what fuzz-stream.cpp sees of it only by chance.

#include "check.h"
#include "expert-ring.h"
#include "faulty-source.h"

#include <numeric>
#include <thread>

using namespace moe;

namespace {

// a file of numbered items of `size` bytes each, behind a reader, and a ring of n_entry
struct ringed {
    static constexpr uint64_t size = 100;

    std::vector<uint8_t>         memory;
    std::unique_ptr<reader>      io;
    std::unique_ptr<expert_ring> ring;
    std::vector<transfer>        items;

    ringed(int32_t n_entry, int64_t n_item, int32_t n_reader = 2) : memory(n_entry * size) {
        std::string content(n_item * size, 0);
        for (int64_t i = 0; i < n_item; ++i) {
            memset(&content[i * size], (int) (i % 251 + 1), size);
        }
        io   = std::make_unique<reader>(std::make_unique<faulty_source>(std::vector<std::string> { content }, 1), n_reader, 64);
        ring = std::make_unique<expert_ring>(*io, memory.data(), size, n_entry, n_item, true);
        for (int64_t i = 0; i < n_item; ++i) {
            items.push_back({ (int32_t) i, 0, i * size, size, nullptr, nullptr });
        }
    }

    static bool is_item(const uint8_t * bytes, int64_t i) {
        return std::all_of(bytes, bytes + size, [i](uint8_t b) { return b == i % 251 + 1; });
    }
};

} // namespace

TEST(every_thread_finds_every_item) {
    for (const int32_t n_entry : { 2, 3, 16 }) {
        ringed r(n_entry, 300);
        for (int round = 0; round < 3; ++round) {
            std::vector<transfer> items = r.items;
            r.ring->begin(items);
            std::vector<std::thread> threads;
            for (int32_t ith = 0; ith < 3; ++ith) {
                threads.emplace_back([&, ith] {
                    test_random rnd(ith);
                    for (int64_t i = 0; i < 300; ++i) {
                        const uint8_t * bytes = r.ring->take(i, ith, 3);
                        if (rnd.percent(5)) {
                            std::this_thread::sleep_for(std::chrono::microseconds(rnd.below(300)));
                        }
                        CHECK(ringed::is_item(bytes, i));
                    }
                });
            }
            for (std::thread & t : threads) {
                t.join();
            }
            r.ring->end();
            CHECK(r.ring->group().ok());
        }
    }
}

TEST(an_entry_is_not_read_into_while_a_thread_may_use_it) {
    ringed r(2, 10);
    std::vector<transfer> items = r.items;
    r.ring->begin(items);
    const uint8_t * first = r.ring->take(0, 1, 2); // the second thread stays here
    CHECK(ringed::is_item(first, 0));
    std::thread fast([&] {
        for (int64_t i = 0; i < 10; ++i) {
            CHECK(ringed::is_item(r.ring->take(i, 0, 2), i));
        }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(ringed::is_item(first, 0));
    for (int64_t i = 1; i < 10; ++i) {
        CHECK(ringed::is_item(r.ring->take(i, 1, 2), i));
    }
    fast.join();
    r.ring->end();
}

TEST(a_run_that_ends_early_reads_no_more_than_the_ring_holds) {
    ringed r(3, 10);
    std::vector<transfer> items = r.items;
    r.ring->begin(items);
    r.ring->end();
    CHECK_EQ(r.io->bytes_read(), 3 * ringed::size);
    items = { r.items.begin() + 5, r.items.end() };
    r.ring->begin(items);
    for (int64_t i = 0; i < 5; ++i) {
        CHECK(ringed::is_item(r.ring->take(i, 0, 1), i + 5));
    }
    r.ring->end();
}

TEST(an_item_that_fails_is_zeros_and_known) {
    ringed r(2, 6);
    std::vector<transfer> items = r.items;
    items[3].offset = 1 << 20; // behind the end
    r.ring->begin(items);
    for (int64_t i = 0; i < 6; ++i) {
        const uint8_t * bytes = r.ring->take(i, 0, 1);
        CHECK(i == 3 ? std::all_of(bytes, bytes + ringed::size, [](uint8_t b) { return b == 0; }) : ringed::is_item(bytes, i));
    }
    r.ring->end();
    CHECK_EQ(r.ring->group().failed_tags().size(), 1u);
    CHECK(r.ring->group().has_failed(3));
    r.ring->group().clear();
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
