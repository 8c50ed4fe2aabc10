// io_uring itself; that it reads right is tested by test-reader-uring.

#include "check.h"
#include "faulty-source.h"
#include "reader.h"
#include "real-file.h"
#include "uring.h"

#include <chrono>
#include <thread>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

using namespace moe;

static constexpr uint64_t KiB = 1024;

static void skip_without_uring() {
    std::string error;
    if (!uring_works(error)) {
        skip_test(error);
    }
}

static std::unique_ptr<reader> make_reader(const std::vector<open_file> & files, int32_t n_threads, uint64_t chunk_size, int32_t depth) {
    std::string error;
    auto source = make_file_source(files, io_mode::buffered, error, io_backend::uring);
    CHECK_EQ(error, "");
    return std::make_unique<reader>(std::move(source), n_threads, chunk_size, false, depth);
}

TEST(a_worker_that_waits_for_one_read_begins_the_next) {
    skip_without_uring();
    const std::string text = random_bytes(64 * KiB, 18);
    real_file file(text);
    int fds[2];
    CHECK(pipe(fds) == 0);
    const auto r = make_reader({ { fds[0], "pipe" }, { file.fd, "f" } }, 1, 16 * KiB, 3);
    // nothing comes through the pipe: the only worker waits in the kernel
    char c = 0;
    transfer_group stuck;
    r->submit(stuck, { { 1, 0, 0, 1, &c, nullptr } }, urgency::demand);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    for (int32_t i = 0; i < 3; ++i) {
        guarded_buffer to(40 * KiB);
        char copied = 0;
        transfer_group group;
        r->submit(group, { { 2, 1, (uint64_t) (1001 + i), to.size, to.data(), nullptr }, { 3, 0, 0, 1, &copied, "x" } }, urgency::demand);
        CHECK(group.wait());
        CHECK(to.holds(text.data() + 1001 + i));
        CHECK_EQ(copied, 'x');
    }
    CHECK(!stuck.idle());
    CHECK_EQ(write(fds[1], "y", 1), 1);
    CHECK(stuck.wait());
    CHECK_EQ(c, 'y');
    close(fds[0]);
    close(fds[1]);
}

TEST(many_files_and_more_reads_than_fit_at_once) {
    skip_without_uring();
    std::vector<std::unique_ptr<real_file>> files;
    std::vector<open_file> names;
    std::vector<std::string> texts;
    for (int32_t i = 0; i < 40; ++i) {
        texts.push_back(random_bytes(20 * KiB, 100 + i));
        files.push_back(std::make_unique<real_file>(texts.back()));
        names.push_back({ files.back()->fd, "f" });
    }
    const auto r = make_reader(names, 2, 4 * KiB, 64);
    std::vector<std::unique_ptr<guarded_buffer>> to;
    std::vector<transfer> transfers;
    for (int32_t i = 0; i < 1000; ++i) {
        to.push_back(std::make_unique<guarded_buffer>(4999 + i));
        transfers.push_back({ i, i % 40, (uint64_t) (i * 11), to[i]->size, to[i]->data(), nullptr });
    }
    transfer_group group;
    r->submit(group, transfers, urgency::demand);
    CHECK(group.wait());
    for (int32_t i = 0; i < 1000; ++i) {
        CHECK(to[i]->holds(texts[i % 40].data() + i * 11));
    }
}

// as container runtimes do it
static void forbid_uring() {
    sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program = { (unsigned short) std::size(rules), rules };
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0);
}

TEST(a_kernel_that_refuses_io_uring_says_why) {
    forbid_uring(); // this process does nothing else
    std::string error;
    CHECK(!uring_works(error));
    CHECK_EQ(error, std::string("io_uring_setup failed: ") + strerror(EPERM));

    real_file file(random_bytes(8 * KiB, 19));
    std::string unused;
    auto source = make_file_source({ { file.fd, "f" } }, io_mode::buffered, unused, io_backend::uring);
    CHECK(source != nullptr);
    std::string message;
    try {
        reader r(std::move(source), 2, 4 * KiB, false, 2);
    } catch (const std::runtime_error & e) {
        message = e.what();
    }
    CHECK_CONTAINS(message, "cannot set up 2 threads to read experts: io_uring_setup failed");
    CHECK_CONTAINS(message, "hint: a smaller --moe-io-threads, or --moe-io-backend threads");
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
