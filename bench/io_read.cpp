// The engine's reader alone: random slabs of a file, with a given number of reads under way; what it reaches, as one line of JSON.
//
//   io_read FILE SLAB_BYTES SECONDS direct|buffered threads|uring N_WORKERS DEPTH [seed]
//
// Built by bench/io_read.py from engine/reader.cpp and engine/uring.cpp. Slabs begin at multiples of 32 bytes, as tensors do in GGUF
// files, and go to slots at multiples of 64. Requests keep coming: a batch of slabs is submitted when the one before the last is there.

#include "reader.h"
#include "uring.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

using clock_type = std::chrono::steady_clock;

static double seconds_since(clock_type::time_point t) {
    return std::chrono::duration<double>(clock_type::now() - t).count();
}

static double cpu_seconds() {
    rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double) (u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double) (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

[[noreturn]] static void die(const std::string & why) {
    fprintf(stderr, "io_read: %s\n", why.c_str());
    exit(1);
}

int main(int argc, char ** argv) {
    if (argc < 8) {
        die("usage: io_read FILE SLAB_BYTES SECONDS direct|buffered threads|uring N_WORKERS DEPTH [seed]");
    }
    const uint64_t slab_bytes = strtoull(argv[2], nullptr, 10);
    const double   limit_s    = atof(argv[3]);
    moe::io_mode    mode;
    moe::io_backend backend;
    if (!moe::io_mode_from_name(argv[4], mode) || !moe::io_backend_from_name(argv[5], backend)) {
        die(std::string("not a way to read: ") + argv[4] + " " + argv[5]);
    }
    const int32_t n_workers = atoi(argv[6]);
    const int32_t depth     = atoi(argv[7]);
    std::mt19937_64 rnd(argc > 8 ? strtoull(argv[8], nullptr, 10) : 1);

    const int fd = open(argv[1], O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) {
        die(std::string("cannot open ") + argv[1]);
    }
    if (slab_bytes == 0 || (uint64_t) st.st_size / slab_bytes < 2 || n_workers < 1 || depth < 1) {
        die(std::string(argv[1]) + " must hold at least 2 slabs, and workers and depth be positive numbers");
    }
    const uint64_t n_slab = (uint64_t) st.st_size / slab_bytes - 1;
    std::string error;
    auto source = moe::make_file_source({ { fd, argv[1] } }, mode, error, backend);
    if (!source) {
        die(error);
    }
    moe::reader r(std::move(source), n_workers, moe::reader::default_chunk_size, false, depth);

    const int32_t n_batch = 2 * n_workers * depth; // slabs
    std::vector<std::unique_ptr<uint8_t[]>> slots;
    for (int32_t i = 0; i < 2 * n_batch; ++i) {
        slots.push_back(std::make_unique<uint8_t[]>(slab_bytes + 64));
        memset(slots.back().get(), 1, slab_bytes + 64); // page faults belong to no read
    }
    moe::transfer_group groups[2];
    const auto submit = [&](int32_t half) {
        std::vector<moe::transfer> transfers;
        for (int32_t i = 0; i < n_batch; ++i) {
            uint8_t * p = slots[half * n_batch + i].get();
            p += 64 - (uintptr_t) p % 64;
            const uint64_t offset = rnd() % n_slab * slab_bytes + rnd() % 128 * 32 % slab_bytes;
            transfers.push_back({ i, 0, offset, slab_bytes, p, nullptr });
        }
        r.submit(groups[half], transfers, moe::urgency::demand);
    };

    const auto begin = clock_type::now();
    const double cpu = cpu_seconds();
    uint64_t n_done = 0;
    submit(0);
    submit(1);
    for (int32_t half = 0; seconds_since(begin) < limit_s; half ^= 1) {
        if (!groups[half].wait()) {
            die(groups[half].error());
        }
        n_done += (uint64_t) n_batch;
        submit(half);
    }
    const double s = seconds_since(begin); // what is under way is not counted
    const double cpu_s = cpu_seconds() - cpu;
    groups[0].wait();
    groups[1].wait();
    printf("{\"bytes_per_s\":%.0f,\"cpu_s_per_gb\":%.4f}\n", (double) (n_done * slab_bytes) / s, cpu_s / ((double) (n_done * slab_bytes) / 1e9));
    return 0;
}
