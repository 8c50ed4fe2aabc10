#include "check.h"
#include "faulty-source.h"
#include "io-probe.h"
#include "real-file.h"
#include "uring.h"

#include <algorithm>

using namespace moe;

static constexpr uint64_t KiB = 1024;
static constexpr uint64_t MB  = 1000 * 1000;

static probe_rate rate(io_mode mode, io_backend backend, int32_t n, uint64_t mb_per_s) {
    return { mode, backend, n, mb_per_s * MB };
}

static probe_result rates_of(io_mode mode, io_backend backend, const std::vector<uint64_t> & mb_per_s) {
    probe_result p;
    int32_t n = 1;
    for (uint64_t r : mb_per_s) {
        p.rates.push_back(rate(mode, backend, n, r));
        n *= 2;
    }
    return p;
}

static const probe_result nothing;

//
// what follows from the figures
//

TEST(without_figures_memory_decides) {
    const io_choice tight = choose_io({}, false, nothing);
    CHECK(tight.mode == io_mode::direct && tight.backend == io_backend::threads);
    CHECK_EQ(tight.n_in_flight, 4);
    CHECK_EQ(tight.measured, "");
    const io_choice roomy = choose_io({}, true, nothing);
    CHECK(roomy.mode == io_mode::buffered && roomy.backend == io_backend::threads);
    CHECK_EQ(roomy.n_in_flight, 4);
}

TEST(what_was_asked_for_stays) {
    probe_result p = rates_of(io_mode::direct, io_backend::threads, { 100, 200, 400, 800 });
    p.rates.push_back(rate(io_mode::buffered, io_backend::threads, 8, 5000));
    for (io_mode mode : { io_mode::direct, io_mode::buffered }) {
        for (io_backend backend : { io_backend::threads, io_backend::uring }) {
            const io_choice c = choose_io({ mode, backend, 3 }, mode == io_mode::direct, p);
            CHECK(c.mode == mode && c.backend == backend);
            CHECK_EQ(c.n_in_flight, 3);
        }
    }
}

TEST(a_refusal_of_direct_reads_means_buffered_ones) {
    probe_result p;
    p.direct_refusal = "no";
    CHECK(choose_io({}, false, p).mode == io_mode::buffered);
}

TEST(four_in_flight_unless_others_are_clearly_faster) {
    const auto n = [](const std::vector<uint64_t> & r) {
        return choose_io({}, false, rates_of(io_mode::direct, io_backend::threads, r)).n_in_flight;
    };
    CHECK_EQ(n({ 100, 100, 100, 100 }), 4);
    CHECK_EQ(n({ 100, 100, 100, 114 }), 4);
    CHECK_EQ(n({ 100, 100, 100, 116 }), 8);
    CHECK_EQ(n({ 100, 149, 100, 90 }), 4);
    CHECK_EQ(n({ 100, 151, 100, 90 }), 2);
    CHECK_EQ(n({ 100, 151, 100, 160 }), 8);
    CHECK_EQ(n({ 500, 100, 100, 100 }), 4); // one at a time would wait for every copy
    CHECK_EQ(n({ 100, 200 }), 4); // 4 was not reached: the drive is slow
}

TEST(where_everything_fits_direct_figures_choose_the_number) {
    const io_choice c = choose_io({}, true, rates_of(io_mode::direct, io_backend::threads, { 100, 200, 400, 800 }));
    CHECK(c.mode == io_mode::buffered);
    CHECK_EQ(c.n_in_flight, 8);
    CHECK_EQ(c.measured, "direct 0.80 GB/s");
}

TEST(short_of_memory_buffered_reads_must_be_much_faster) {
    for (const auto & [mb_per_s, mode] : { std::pair<uint64_t, io_mode> { 1490, io_mode::direct }, { 1510, io_mode::buffered } }) {
        probe_result p = rates_of(io_mode::direct, io_backend::threads, { 500, 800, 1000, 1000 });
        p.rates.push_back(rate(io_mode::buffered, io_backend::threads, 4, 700));
        p.rates.push_back(rate(io_mode::buffered, io_backend::threads, 8, mb_per_s));
        const io_choice c = choose_io({}, false, p);
        CHECK(c.mode == mode);
        CHECK_EQ(c.buffered_is_faster, mode == io_mode::buffered);
        CHECK_EQ(c.n_in_flight, mode == io_mode::buffered ? 8 : 4);
        CHECK_CONTAINS(c.measured, "direct 1.00 GB/s, buffered 1.");
    }
}

TEST(io_uring_must_be_clearly_faster_than_threads) {
    for (const auto & [mb_per_s, backend] : { std::pair<uint64_t, io_backend> { 114, io_backend::threads }, { 116, io_backend::uring } }) {
        probe_result p = rates_of(io_mode::direct, io_backend::threads, { 90, 100, 100, 100 });
        p.rates.push_back(rate(io_mode::direct, io_backend::uring, 2, mb_per_s));
        const io_choice c = choose_io({}, false, p);
        CHECK(c.backend == backend);
        CHECK_EQ(c.n_in_flight, 4);
        CHECK(choose_io({ io_mode::automatic, io_backend::threads, 0 }, false, p).backend == io_backend::threads);
    }
}

TEST(workers_share_the_reads_evenly) {
    CHECK_EQ(n_workers(io_backend::threads, 7, 2), 7);
    CHECK_EQ(n_workers(io_backend::uring, 8, 2), 2);
    CHECK_EQ(n_workers(io_backend::uring, 8, 64), 4);
    CHECK_EQ(n_workers(io_backend::uring, 8, 3), 2);
    CHECK_EQ(n_workers(io_backend::uring, 7, 4), 1);
    CHECK_EQ(n_workers(io_backend::uring, 1, 4), 1);
    CHECK_EQ(n_workers(io_backend::uring, 256, 0), 1); // the number of cores is not known
    for (int32_t n = 1; n <= 256; ++n) {
        CHECK_EQ(n % n_workers(io_backend::uring, n, 4), 0);
    }
}

//
// a real file
//

static constexpr int32_t n_expert = 64;

// two tensors of experts with something before, between and behind them
static const uint64_t row_bytes = 200 * KiB + 64;
static const std::vector<probe_place> places = { { 0, 1024, row_bytes, n_expert }, { 0, 4096 + n_expert * row_bytes + 32, row_bytes, n_expert } };

static std::string file_text() { return random_bytes(2 * n_expert * row_bytes + 100 * KiB, 20); }

static void skip_when_pages_stay(real_file & file) {
    file.drop_cache();
    const auto pages = file.cached_pages();
    if (std::find(pages.begin(), pages.end(), true) != pages.end()) {
        skip_test("this file system does not drop cached pages when asked to");
    }
}

TEST(every_way_is_measured_and_the_page_cache_is_as_before) {
    real_file file(file_text());
    skip_without_direct_reads(file);
    skip_when_pages_stay(file);
    // some pages are somebody's: they stay
    char c;
    for (uint64_t offset : { 5 * KiB, 900 * KiB, 7000 * KiB }) {
        CHECK_EQ(pread(file.fd, &c, 1, (off_t) offset), 1);
    }
    const auto before = file.cached_pages();
    CHECK(std::count(before.begin(), before.end(), true) >= 3);

    std::string error;
    probe_plan plan;
    plan.uring     = uring_works(error);
    plan.in_flight = { 1, 4 };
    plan.limit_s   = 0.02;
    const int32_t n_descriptors = n_open_descriptors();
    probe_result p;
    for (uint64_t seed = 0; seed < 5; ++seed) {
        plan.seed = seed;
        p = probe_io({ { file.fd, "f" } }, places, plan);
        CHECK(file.cached_pages() == before);
        for (const probe_rate & r : p.rates) {
            CHECK(r.bytes_per_s > 0);
        }
    }
    CHECK_EQ(n_open_descriptors(), n_descriptors);
    CHECK(!p.rates.empty());
    CHECK(p.rates[0].mode == io_mode::direct && p.rates[0].n_in_flight == 1);
    CHECK_EQ(p.direct_refusal, "");
}

TEST(what_is_cached_is_not_taken_for_the_drive) {
    const std::string text = file_text();
    real_file file(text);
    skip_without_direct_reads(file);
    std::string all(text.size(), 0);
    CHECK_EQ(pread(file.fd, &all[0], all.size(), 0), (ssize_t) all.size()); // now it is all in the page cache
    probe_plan plan;
    plan.limit_s   = 1;
    plan.in_flight = { 1 };
    const probe_result p = probe_io({ { file.fd, "f" } }, places, plan);
    const auto pages = file.cached_pages();
    if (std::find(pages.begin(), pages.end(), false) != pages.end()) {
        skip_test("something emptied the page cache meanwhile");
    }
    for (const probe_rate & r : p.rates) {
        CHECK(r.mode == io_mode::direct);
    }
    CHECK(p.note == "too few experts are outside the page cache" || p.note == "the drive is too slow to measure more");
}

TEST(a_file_without_direct_reads_is_measured_buffered) {
    int fds[2];
    CHECK(pipe(fds) == 0); // opens directly, and cannot be read at an offset
    probe_plan plan;
    plan.buffered = false;
    const probe_result p = probe_io({ { fds[0], "pipe" } }, places, plan);
    CHECK(p.rates.empty());
    CHECK_CONTAINS(p.direct_refusal, "'pipe'");
    CHECK(!p.note.empty()); // buffered reads of a pipe fail too
    close(fds[0]);
    close(fds[1]);
}

TEST(a_probe_of_what_is_not_there_says_so) {
    probe_plan plan;
    real_file file(random_bytes(64 * KiB, 21));
    CHECK_EQ(probe_io({ { file.fd, "f" } }, {}, plan).note, "there are no experts to read");
    skip_without_direct_reads(file);
    const probe_result p = probe_io({ { file.fd, "f" } }, { { 0, 1000 * KiB, 64 * KiB, 8 } }, plan); // behind the end
    CHECK(p.rates.empty());
    CHECK_EQ(p.note, "a read failed");
    probe_plan none = plan;
    none.limit_s = 0;
    CHECK(probe_io({ { file.fd, "f" } }, { { 0, 0, 8 * KiB, 8 } }, none).rates.empty());
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
