// A slot pool filled by a reader from a faulty source, as the engine uses them: acquire, submit, wait, then commit or fail by
// the failed tags. Reads come back short, late, interrupted or not at all; a ready slot must hold its expert's bytes.
//
// The seed fixes the calls and the faults of each place in the file, not how the threads interleave.
//
// usage: fuzz-reader [seed [seconds]]

#include "check.h"
#include "faulty-source.h"
#include "policies.h"
#include "reader.h"
#include "slot-pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <thread>

using namespace moe;

static void run_round(uint64_t seed) {
    test_random rnd(seed);
    const std::vector<policy_kind> kinds = all_policies();

    const policy_kind kind     = kinds[rnd.below(kinds.size())];
    const uint32_t    aligns[] = { 1, 512, 4096 };
    const uint32_t    align    = aligns[rnd.below(3)];
    const uint64_t    chunk    = align == 1 ? rnd.between(500, 9000) : align * rnd.between(1, 4);
    const int32_t     n_thread = (int32_t) rnd.between(1, 4);
    const int32_t     depth    = rnd.percent(50) ? 1 : (int32_t) rnd.between(2, 6); // several under way end in any order
    const int32_t     n_expert = (int32_t) rnd.between(2, 20);
    const int32_t     n_slot   = (int32_t) rnd.between(1, n_expert);
    const uint32_t    p_error  = rnd.percent(50) ? 0 : (uint32_t) rnd.below(20);

    // three tensors of different sizes, each of n_expert rows, in two files, at odd offsets
    const int32_t n_tensor = 3;
    const uint64_t  unit = rnd.between(1, std::min<uint64_t>(chunk, 3000));
    const backwards convert(unit);
    const conversion * const convert_of[n_tensor] = { nullptr, nullptr, &convert };
    uint64_t row_size[n_tensor];
    uint64_t start[n_tensor];
    const int32_t file_of[n_tensor] = { 0, 1, 0 };
    uint64_t file_size[2] = { 0, 0 };
    for (int32_t t = 0; t < n_tensor; ++t) {
        row_size[t] = rnd.between(1, 12000);
        if (t == n_tensor - 1) { // this one is converted
            row_size[t] = unit * rnd.between(1, 12);
        }
        start[t]    = file_size[file_of[t]] + rnd.below(5000);
        file_size[file_of[t]] = start[t] + row_size[t] * n_expert;
    }
    const std::vector<std::string> contents = { random_bytes(file_size[0], seed + 1), random_bytes(file_size[1], seed + 2) };

    // [n_expert][n_tensor] what slots hold
    std::vector<std::vector<std::string>> wanted(n_expert);
    for (int32_t e = 0; e < n_expert; ++e) {
        for (int32_t t = 0; t < n_tensor; ++t) {
            const std::string bytes = contents[file_of[t]].substr(start[t] + e * row_size[t], row_size[t]);
            wanted[e].push_back(convert_of[t] ? convert.of(bytes) : bytes);
        }
    }

    std::atomic<uint64_t> n_read { 0 };
    std::atomic<bool>     any_error { false };
    auto source = std::make_unique<faulty_source>(contents, align, [&](int32_t file, uint64_t size, uint64_t offset) -> int64_t {
        // per read, so that a repeated one fares differently
        test_random fault(seed ^ (offset * 2654435761u) ^ ((uint64_t) file << 60) ^ (n_read.fetch_add(1) << 40));
        if (fault.percent(10)) {
            std::this_thread::sleep_for(std::chrono::microseconds(fault.below(100)));
        }
        if (fault.percent(10)) {
            return -EINTR;
        }
        if (fault.percent(p_error)) {
            any_error = true;
            const int64_t results[] = { -EIO, -EAGAIN, -ENOMEM, 0 }; // 0: the file ends
            return results[fault.below(4)];
        }
        return fault.percent(40) ? fault.between(1, (int64_t) size) : (int64_t) size;
    });
    std::vector<std::vector<std::unique_ptr<guarded_buffer>>> slots(n_slot);
    for (auto & slot : slots) {
        for (int32_t t = 0; t < n_tensor; ++t) {
            slot.push_back(std::make_unique<guarded_buffer>(row_size[t], (uint32_t) rnd.below(8)));
        }
    }
    guarded_buffer guess(row_size[1]);

    // after the buffers, so that they go first: a guess may still be under way at the end
    reader         r(std::move(source), n_thread, chunk, /*converts =*/ true, depth);
    slot_pool      pool(n_slot, n_expert, kind);
    transfer_group group;
    transfer_group guesses; // background reads into a place of their own, meanwhile

    const auto check_bytes = [&] {
        pool.self_check();
        for (int32_t e = 0; e < n_expert; ++e) {
            const int32_t slot = pool.peek(e);
            for (int32_t t = 0; slot >= 0 && t < n_tensor; ++t) {
                CHECK(slots[slot][t]->holds(wanted[e][t].data()));
            }
        }
        for (const auto & slot : slots) {
            for (const auto & b : slot) {
                CHECK(b->guards_intact());
            }
        }
    };

    std::vector<placement> placed;
    for (int32_t step = 0; step < 25; ++step) {
        std::set<int32_t> experts;
        const int32_t n = (int32_t) rnd.between(1, n_slot);
        while ((int32_t) experts.size() < n) {
            experts.insert((int32_t) rnd.below(n_expert));
        }
        const std::vector<int32_t> list(experts.begin(), experts.end());

        if (guesses.idle()) {
            const int32_t e = (int32_t) rnd.below(n_expert);
            guesses.clear();
            r.submit(guesses, { { e, file_of[1], start[1] + e * row_size[1], row_size[1], guess.data(), nullptr } }, urgency::background);
        }

        pool.acquire(list.data(), n, placed);
        std::vector<transfer> transfers;
        for (const placement & p : placed) {
            for (int32_t t = 0; p.miss && t < n_tensor; ++t) {
                guarded_buffer & to = *slots[p.slot][t];
                memset(to.data(), 0xdd, to.size);
                const uint64_t offset = start[t] + p.expert * row_size[t];
                // some experts come from memory, where they are converted already
                const void * src = p.expert % 5 == 4 ? wanted[p.expert][t].data() : nullptr;
                transfers.push_back({ p.slot, file_of[t], offset, to.size, to.data(), src, convert_of[t] });
            }
        }
        if (rnd.percent(10)) { // nothing, anywhere
            transfers.push_back({ -1, 0, rnd.next(), 0, nullptr, nullptr });
        }
        r.submit(group, transfers, rnd.percent(70) ? urgency::demand : urgency::background);
        if (rnd.percent(30)) {
            r.promote(rnd.percent(50) ? group : guesses);
        }
        const bool ok = group.wait();
        CHECK_EQ(ok, group.failed_tags().empty());
        CHECK_EQ(ok, group.ok());
        CHECK_EQ(ok, group.error().empty());
        CHECK(ok || any_error || align > 1); // see reads_that_never_get_there_fail: a direct read may give up
        std::set<int32_t> failed(group.failed_tags().begin(), group.failed_tags().end());
        for (int32_t slot : group.failed_tags()) {
            pool.fail(slot); // aborts on a tag that is told twice, or is none of ours
        }
        for (const placement & p : placed) {
            if (p.miss && failed.count(p.slot) == 0) {
                pool.commit(p.slot);
            }
        }
        group.clear();
        check_bytes();
    }
}

int main(int argc, char ** argv) {
    return run_fuzzer(argc, argv, run_round, [] { return std::string(); });
}
