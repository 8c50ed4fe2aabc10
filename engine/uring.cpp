#include "uring.h"

#ifdef __linux__
#if __has_include(<linux/io_uring.h>)
#define MOE_HAS_URING 1
#endif
#endif

#ifdef MOE_HAS_URING

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace moe {

namespace {

int io_uring_setup(unsigned n_entries, io_uring_params * params) {
    return (int) syscall(SYS_io_uring_setup, n_entries, params);
}

int io_uring_enter(int fd, unsigned n_submit, unsigned n_wait, unsigned flags) {
    return (int) syscall(SYS_io_uring_enter, fd, n_submit, n_wait, flags, nullptr, 0);
}

int io_uring_register(int fd, unsigned opcode, const void * arg, unsigned n_arg) {
    return (int) syscall(SYS_io_uring_register, fd, opcode, arg, n_arg);
}

class mapped_ring {
public:
    ~mapped_ring() {
        if (base != MAP_FAILED) {
            munmap(base, size);
        }
    }

    bool map(int fd, uint64_t n_bytes, off_t what) {
        size = n_bytes;
        base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
        return base != MAP_FAILED;
    }

    template <typename T> T * at(uint64_t offset) const { return (T *) ((char *) base + offset); }

private:
    void *   base = MAP_FAILED;
    uint64_t size = 0;
};

// Beside the reads, a poll of an eventfd is under way: wake() ends it.
class uring final : public read_queue {
public:
    ~uring() override {
        for (int fd : { ring, event }) {
            if (fd >= 0) {
                close(fd);
            }
        }
    }

    bool open(const std::vector<int> & files, int32_t depth_in, std::string & error) {
        depth = depth_in;
        fds   = files;
        io_uring_params params = {};
        ring = io_uring_setup((unsigned) depth + 1, &params);
        if (ring < 0) {
            return refuse("io_uring_setup", error);
        }
        if (!(params.features & IORING_FEAT_SINGLE_MMAP)) { // Linux 5.4
            error = "this kernel's io_uring is too old";
            return false;
        }
        if (!can_read(error)) {
            return false;
        }
        const uint64_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
        const uint64_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        if (!rings.map(ring, std::max(sq_bytes, cq_bytes), IORING_OFF_SQ_RING) ||
            !entries.map(ring, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) {
            return refuse("mmap of the rings", error);
        }
        sq_tail = rings.at<unsigned>(params.sq_off.tail);
        sq_mask = *rings.at<unsigned>(params.sq_off.ring_mask);
        cq_head = rings.at<unsigned>(params.cq_off.head);
        cq_tail = rings.at<unsigned>(params.cq_off.tail);
        cq_mask = *rings.at<unsigned>(params.cq_off.ring_mask);
        cqes    = rings.at<io_uring_cqe>(params.cq_off.cqes);
        unsigned * const order = rings.at<unsigned>(params.sq_off.array);
        for (unsigned i = 0; i < params.sq_entries; ++i) {
            order[i] = i;
        }
        event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (event < 0) {
            return refuse("eventfd", error);
        }
        // saves the kernel a look-up at each read; where it is refused, reads go by descriptor
        registered = io_uring_register(ring, IORING_REGISTER_FILES, fds.data(), (unsigned) fds.size()) == 0;
        return true;
    }

    void start(int32_t id, int32_t file, void * buf, uint64_t size, uint64_t offset) noexcept override {
        io_uring_sqe & e = put(id, IORING_OP_READ, registered ? file : fds[file]);
        e.flags = registered ? IOSQE_FIXED_FILE : 0;
        e.off   = offset;
        e.addr  = (uint64_t) (uintptr_t) buf;
        e.len   = (uint32_t) size;
        enter(0);
    }

    int32_t next(int64_t & result) noexcept override {
        if (!listening) { // by the thread that is to be woken
            put(depth, IORING_OP_POLL_ADD, event).poll32_events = POLLIN;
            listening = true;
        }
        while (true) {
            const unsigned head = *cq_head;
            if (head == __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE)) {
                enter(1);
                continue;
            }
            const io_uring_cqe done = cqes[head & cq_mask];
            __atomic_store_n(cq_head, head + 1, __ATOMIC_RELEASE);
            if ((int32_t) done.user_data == depth) {
                eventfd_t n_woken;
                eventfd_read(event, &n_woken); // empty again; cannot fail for other reasons than that it is
                listening = false;
                return -1;
            }
            result = done.res;
            return (int32_t) done.user_data;
        }
    }

    void wake() noexcept override {
        eventfd_write(event, 1); // does not block; when the counter is full, next() returns anyway
    }

private:
    static bool refuse(const char * what, std::string & error) {
        error = std::string(what) + " failed: " + strerror(errno);
        return false;
    }

    // the operation is younger than io_uring itself: Linux 5.6
    bool can_read(std::string & error) const {
        alignas(io_uring_probe) char room[sizeof(io_uring_probe) + 256 * sizeof(io_uring_probe_op)] = {};
        if (io_uring_register(ring, IORING_REGISTER_PROBE, room, 256) < 0) {
            return refuse("io_uring_register", error);
        }
        const auto * probe = (const io_uring_probe *) room;
        if (probe->last_op < IORING_OP_READ || !(probe->ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED)) {
            error = "this kernel's io_uring cannot read";
            return false;
        }
        return true;
    }

    // There is room: no more are under way than the ring has entries. What is written into the entry counts from the next enter() on.
    io_uring_sqe & put(int32_t id, uint8_t opcode, int fd) noexcept {
        const unsigned tail = *sq_tail;
        io_uring_sqe & e = entries.at<io_uring_sqe>(0)[tail & sq_mask];
        memset(&e, 0, sizeof(e));
        e.opcode    = opcode;
        e.fd        = fd;
        e.user_data = (uint64_t) id;
        __atomic_store_n(sq_tail, tail + 1, __ATOMIC_RELEASE);
        n_unsent++;
        return e;
    }

    // An interrupted call, or one that finds no memory for now, leaves what it did not take for the next.
    void enter(unsigned n_wait) noexcept {
        const int n = io_uring_enter(ring, n_unsent, n_wait, n_wait ? IORING_ENTER_GETEVENTS : 0);
        if (n >= 0) {
            n_unsent -= (unsigned) n;
        } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY && errno != ENOMEM) {
            fprintf(stderr, "reader: io_uring_enter: %s: impossible\n", strerror(errno));
            abort();
        }
    }

    std::vector<int> fds;        // borrowed
    bool             registered = false;
    int32_t          depth = 0;
    int              ring  = -1;
    int              event = -1;
    bool             listening = false;
    unsigned         n_unsent = 0;
    mapped_ring      rings;
    mapped_ring      entries;
    unsigned       * sq_tail = nullptr;
    unsigned         sq_mask = 0;
    unsigned       * cq_head = nullptr;
    const unsigned * cq_tail = nullptr;
    unsigned         cq_mask = 0;
    const io_uring_cqe * cqes = nullptr;
};

} // namespace

std::unique_ptr<read_queue> make_uring(const std::vector<int> & fds, int32_t depth, std::string & error) {
    auto queue = std::make_unique<uring>();
    if (!queue->open(fds, depth, error)) {
        return nullptr;
    }
    return queue;
}

bool uring_works(std::string & error) {
    return make_uring({ STDIN_FILENO }, 1, error) != nullptr;
}

} // namespace moe

#else

namespace moe {

std::unique_ptr<read_queue> make_uring(const std::vector<int> &, int32_t, std::string & error) {
    error = "built without linux/io_uring.h";
    return nullptr;
}

bool uring_works(std::string & error) {
    return make_uring({}, 1, error) != nullptr;
}

} // namespace moe

#endif
