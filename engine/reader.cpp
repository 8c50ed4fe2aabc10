#include "reader.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace moe {

// covers 512-byte and 4 KiB logical blocks
static constexpr uint32_t direct_alignment = 4096;

// A direct read begins up to a block before the byte wanted, so a short one may end before it. That looks like the end of the
// file and is worth another try, but not for ever.
static constexpr int32_t n_fruitless_max = 16;

const char * io_mode_name(io_mode mode) {
    switch (mode) {
        case io_mode::automatic: return "auto";
        case io_mode::direct:    return "direct";
        case io_mode::buffered:  return "buffered";
    }
    std::abort();
}

bool io_mode_from_name(const std::string & name, io_mode & out) {
    for (io_mode mode : { io_mode::automatic, io_mode::direct, io_mode::buffered }) {
        if (name == io_mode_name(mode)) {
            out = mode;
            return true;
        }
    }
    return false;
}

namespace {

struct aligned_free {
    void operator()(uint8_t * p) const { free(p); }
};
using aligned_buffer = std::unique_ptr<uint8_t, aligned_free>;

aligned_buffer make_aligned_buffer(uint64_t size) {
    void * p = nullptr;
    if (posix_memalign(&p, direct_alignment, size) != 0) {
        return nullptr;
    }
    return aligned_buffer((uint8_t *) p);
}

class posix_files final : public file_source {
public:
    ~posix_files() override {
        for (const open_file & f : files) {
            close(f.fd);
        }
    }

    const std::string & name(int32_t file) const override { return files[file].name; }
    uint32_t alignment() const override { return direct ? direct_alignment : 1; }

    int64_t read_at(int32_t file, void * buf, uint64_t size, uint64_t offset) override {
        const ssize_t n = pread(files[file].fd, buf, size, (off_t) offset);
        return n < 0 ? -errno : n;
    }

    void drop_cache() override {
#ifdef POSIX_FADV_DONTNEED
        for (const open_file & f : files) {
            posix_fadvise(f.fd, 0, 0, POSIX_FADV_DONTNEED); // to the end; pages that are mapped stay
        }
#endif
    }

    bool open_all(const std::vector<open_file> & given, bool want_direct, std::string & error) {
        direct = want_direct;
        for (const open_file & f : given) {
            const int fd = reopen(f.fd);
            if (fd < 0) {
                error = "cannot open '" + f.name + "' for " + (direct ? "direct" : "buffered") + " reads: " + strerror(errno);
                return false;
            }
            files.push_back({ fd, f.name });
            if (direct && !direct_read_works(fd, error)) {
                error = "a direct read of " + std::to_string(direct_alignment) + " bytes at offset 0 of '" + f.name + "' failed: " + error;
                return false;
            }
#ifdef POSIX_FADV_RANDOM
            if (!direct) {
                posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
            }
#endif
        }
        return true;
    }

private:
    // a file description of our own: flags and read-ahead of the loader's stay as they are
    int reopen(int fd) const {
#ifdef __linux__
        const std::string path = "/proc/self/fd/" + std::to_string(fd);
        const int own = open(path.c_str(), O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
        if (own >= 0 || direct) {
            return own;
        }
#endif
        if (direct) {
            errno = EOPNOTSUPP;
            return -1;
        }
        return fcntl(fd, F_DUPFD_CLOEXEC, 0);
    }

    // some file systems accept the flag and refuse the read
    static bool direct_read_works(int fd, std::string & why) {
        const aligned_buffer buf = make_aligned_buffer(direct_alignment);
        if (!buf) {
            why = "no memory for the aligned buffer";
            return false;
        }
        ssize_t n;
        do {
            n = pread(fd, buf.get(), direct_alignment, 0);
        } while (n < 0 && errno == EINTR);
        if (n <= 0) {
            why = n < 0 ? strerror(errno) : "the file is empty";
        }
        return n > 0;
    }

    std::vector<open_file> files; // owned descriptors
    bool                   direct = false;
};

} // namespace

std::unique_ptr<file_source> make_file_source(const std::vector<open_file> & files, io_mode mode, std::string & error) {
    auto source = std::make_unique<posix_files>();
    if (!source->open_all(files, mode == io_mode::direct, error)) {
        return nullptr;
    }
    return source;
}

bool transfer_group::wait() {
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, [this] { return idle(); });
    return failed.empty();
}

void transfer_group::clear() {
    std::lock_guard<std::mutex> lock(mutex);
    failed.clear();
    first_error.clear();
}

// what was attempted, for messages; the part of the transfer that one worker took
static std::string describe(const transfer & t, const file_source & source) {
    const std::string size = std::to_string(t.size);
    if (t.src) {
        return "copying " + size + " bytes from memory";
    }
    return "reading " + size + " bytes at offset " + std::to_string(t.offset) + " of '" + source.name(t.file) + "'";
}

reader::reader(std::unique_ptr<file_source> source_in, int32_t n_threads, uint64_t chunk_size)
    : source(std::move(source_in)), chunk_size(chunk_size) {
    if (n_threads <= 0 || chunk_size == 0 || chunk_size % source->alignment() != 0) {
        fprintf(stderr, "reader: %d threads, chunk size %llu, alignment %u: impossible\n", n_threads,
            (unsigned long long) chunk_size, source->alignment());
        abort();
    }
    for (int32_t i = 0; i < n_threads; ++i) {
        workers.emplace_back([this] { work(); });
    }
}

reader::~reader() {
    std::deque<job> dropped;
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
        dropped.swap(queue_demand);
        dropped.insert(dropped.end(), queue_background.begin(), queue_background.end());
        queue_background.clear();
    }
    wake.notify_all();
    for (std::thread & w : workers) {
        w.join();
    }
    for (const job & j : dropped) {
        finish(j, describe(j.part, *source) + " failed: the reader was stopped");
    }
}

uint64_t reader::bounce_bytes() const {
    return source->alignment() > 1 ? workers.size() * (chunk_size + 2ull * source->alignment()) : 0;
}

void reader::submit(transfer_group & group, const std::vector<transfer> & transfers, urgency how) {
    std::vector<job> jobs;
    jobs.reserve(transfers.size());
    for (const transfer & t : transfers) {
        if (t.src) {
            jobs.push_back({ &group, t });
            continue;
        }
        for (uint64_t pos = 0; pos < t.size; ) {
            const uint64_t to_boundary = chunk_size - (t.offset + pos) % chunk_size;
            const uint64_t size        = std::min(t.size - pos, to_boundary);
            jobs.push_back({ &group, { t.tag, t.file, t.offset + pos, size, (uint8_t *) t.dst + pos, nullptr } });
            pos += size;
        }
    }
    if (jobs.empty()) {
        return;
    }
    group.n_pending.fetch_add((int64_t) jobs.size(), std::memory_order_relaxed);
    {
        std::lock_guard<std::mutex> lock(mutex);
        std::deque<job> & queue = how == urgency::demand ? queue_demand : queue_background;
        queue.insert(queue.end(), jobs.begin(), jobs.end());
    }
    if (jobs.size() == 1) {
        wake.notify_one();
    } else {
        wake.notify_all();
    }
}

void reader::work() {
    aligned_buffer bounce;
    if (source->alignment() > 1) {
        bounce = make_aligned_buffer(chunk_size + 2ull * source->alignment());
    }
    while (true) {
        job j;
        {
            std::unique_lock<std::mutex> lock(mutex);
            wake.wait(lock, [this] { return stopping || !queue_demand.empty() || !queue_background.empty(); });
            if (stopping) {
                return;
            }
            std::deque<job> & queue = queue_demand.empty() ? queue_background : queue_demand;
            j = queue.front();
            queue.pop_front();
        }
        run(j, bounce.get());
    }
}

void reader::run(const job & j, uint8_t * bounce) {
    std::string error;
    if (j.part.src) {
        memcpy(j.part.dst, j.part.src, j.part.size);
    } else {
        read_part(j.part, bounce, error);
    }
    finish(j, error);
}

bool reader::read_part(const transfer & t, uint8_t * bounce, std::string & error) {
    const uint64_t align = source->alignment();
    const uint64_t end   = t.offset + t.size;

    const auto fail = [&](uint64_t pos, const std::string & why) {
        error = describe(t, *source) + " failed at offset " + std::to_string(pos) + ": " + why;
        return false;
    };

    if (align > 1 && !bounce) {
        return fail(t.offset, "no memory for the aligned buffer");
    }

    int32_t  n_fruitless = 0;
    uint64_t pos = t.offset; // all before is in dst
    while (pos < end) {
        uint8_t * const dst   = (uint8_t *) t.dst + (pos - t.offset);
        const uint64_t  first = pos / align * align;
        const uint64_t  last  = (end + align - 1) / align * align;

        const int64_t n = source->read_at(t.file, align > 1 ? bounce : dst, last - first, first);
        if (n == -EINTR) {
            continue;
        }
        if (n < 0) {
            return fail(pos, strerror((int) -n));
        }
        n_bytes_read.fetch_add((uint64_t) n, std::memory_order_relaxed);

        const uint64_t reached = std::min(first + (uint64_t) n, end);
        if (reached <= pos) {
            if (n == 0 || ++n_fruitless == n_fruitless_max) {
                return fail(pos, "the data end at offset " + std::to_string(reached) + " (was the file truncated?)");
            }
            continue;
        }
        if (align > 1) {
            memcpy(dst, bounce + (pos - first), reached - pos);
        }
        pos = reached;
    }
    return true;
}

void reader::finish(const job & j, const std::string & error) {
    transfer_group & group = *j.group;
    // under the lock throughout: the waiter may destroy the group as soon as it can return
    std::lock_guard<std::mutex> lock(group.mutex);
    if (!error.empty()) {
        if (group.first_error.empty()) {
            group.first_error = error;
        }
        if (std::find(group.failed.begin(), group.failed.end(), j.part.tag) == group.failed.end()) {
            group.failed.push_back(j.part.tag);
        }
    }
    if (group.n_pending.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        group.done.notify_all();
    }
}

} // namespace moe
