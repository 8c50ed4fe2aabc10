#pragma once

// The test harness: CHECK macros that end the process, and a main() that runs one named case, or all.
//
// TEST(name) must start its line: CMakeLists.txt finds the cases there and makes a ctest entry of each.

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

constexpr int exit_skipped = 77; // SKIP_RETURN_CODE in CMakeLists.txt

// What the running check is about (a policy, a seed): printed with every failure, also with the engine's own abort().
inline char check_context[256] = "";

inline void set_check_context(const std::string & s) {
    snprintf(check_context, sizeof(check_context), "%s", s.c_str());
}

inline void on_abort(int) {
    const char * parts[] = { "aborted: ", check_context, "\n" };
    for (const char * part : parts) {
        if (write(STDERR_FILENO, part, strlen(part)) < 0) {
            break;
        }
    }
    signal(SIGABRT, SIG_DFL);
}

template <typename T> std::string check_show(const T & v) {
    std::ostringstream s;
    s << v;
    return s.str();
}

[[noreturn]] inline void check_failed(const char * file, int line, const std::string & what) {
    fprintf(stderr, "%s:%d: CHECK failed: %s\n", file, line, what.c_str());
    abort();
}

#define CHECK(cond)                                       \
    do {                                                  \
        if (!(cond)) {                                    \
            check_failed(__FILE__, __LINE__, #cond);      \
        }                                                 \
    } while (0)

#define CHECK_EQ(a, b)                                                                                  \
    do {                                                                                                \
        const auto check_a = (a);                                                                       \
        const auto check_b = (b);                                                                       \
        if (!(check_a == check_b)) {                                                                    \
            check_failed(__FILE__, __LINE__, std::string(#a " == " #b) + ": " + check_show(check_a) +   \
                " against " + check_show(check_b));                                                     \
        }                                                                                               \
    } while (0)

#define CHECK_CONTAINS(text, part)                                                                      \
    do {                                                                                                \
        const std::string check_text = (text);                                                          \
        const std::string check_part = (part);                                                          \
        if (check_text.find(check_part) == std::string::npos) {                                         \
            check_failed(__FILE__, __LINE__, "'" + check_part + "' is not in '" + check_text + "'");    \
        }                                                                                               \
    } while (0)

// fn must end in abort() after printing a message that holds `message`; runs in a child, so call it while there are no threads
inline void check_aborts(const char * file, int line, const std::string & message, const std::function<void()> & fn) {
    int fds[2];
    CHECK(pipe(fds) == 0);
    fflush(nullptr);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        dup2(fds[1], STDERR_FILENO);
        close(fds[0]);
        close(fds[1]);
        signal(SIGABRT, SIG_DFL);
        fn();
        _exit(0);
    }
    close(fds[1]);
    std::string said;
    char buf[512];
    for (ssize_t n; (n = read(fds[0], buf, sizeof(buf))) > 0; ) {
        said.append(buf, n);
    }
    close(fds[0]);
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT || said.find(message) == std::string::npos) {
        check_failed(file, line, "expected abort() with '" + message + "', got status " + std::to_string(status) + ", '" + said + "'");
    }
}

#define CHECK_ABORTS(message, ...) check_aborts(__FILE__, __LINE__, message, [&] { __VA_ARGS__; })

struct test_case {
    const char * name;
    void (*run)();
};

inline std::vector<test_case> & test_cases() {
    static std::vector<test_case> cases;
    return cases;
}

struct test_registration {
    test_registration(const char * name, void (*run)()) { test_cases().push_back({ name, run }); }
};

#define TEST(name)                                                      \
    static void test_##name();                                          \
    static const test_registration register_##name(#name, test_##name); \
    static void test_##name()

// prints why and ends the process with the status that ctest shows as skipped
[[noreturn]] inline void skip_test(const std::string & why) {
    printf("SKIPPED: %s\n", why.c_str());
    fflush(nullptr);
    _exit(exit_skipped);
}

inline int run_tests(int argc, char ** argv) {
    signal(SIGABRT, on_abort);
    int n_run = 0;
    for (const test_case & t : test_cases()) {
        if (argc > 1 && strcmp(argv[1], t.name) != 0) {
            continue;
        }
        set_check_context(t.name);
        t.run();
        printf("ok %s\n", t.name);
        fflush(stdout);
        n_run++;
    }
    if (n_run == 0) {
        fprintf(stderr, "no such test\n");
        return 1;
    }
    return 0;
}

// splitmix64 (Steele et al. 2014): the same numbers from the same seed on every platform
struct test_random {
    uint64_t state;

    explicit test_random(uint64_t seed) : state(seed) {}

    uint64_t next() {
        uint64_t z = (state += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }

    uint64_t below(uint64_t n) { return next() % n; } // 0 <= result < n
    int64_t  between(int64_t lo, int64_t hi) { return lo + (int64_t) below(hi - lo + 1); } // both inclusive
    bool     percent(uint32_t p) { return below(100) < p; }
};

// The main() of a fuzzer: rounds until the time is over. argv: [seed [seconds]]; without a seed a random one, always printed; a round's
// own seed, which is printed when it fails, makes it the first round. summary: what was covered, for the last line.
//
// A round that hangs ends the process and names its seed, before ctest would end it without a word.
inline int run_fuzzer(int argc, char ** argv, const std::function<void(uint64_t seed)> & run_round, const std::function<std::string()> & summary) {
    uint64_t seed    = 0;
    double   limit_s = 2.0;
    if (argc > 3) {
        fprintf(stderr, "usage: %s [seed [seconds]]\n", argv[0]);
        return 2;
    }
    char * end = nullptr;
    if (argc > 1) {
        seed = strtoull(argv[1], &end, 10);
    } else {
        FILE * f = fopen("/dev/urandom", "rb");
        CHECK(f != nullptr);
        CHECK(fread(&seed, sizeof(seed), 1, f) == 1);
        fclose(f);
    }
    const bool bad_seed = argc > 1 && (end == argv[1] || *end);
    if (argc > 2) {
        limit_s = strtod(argv[2], &end);
    }
    if (bad_seed || (argc > 2 && (end == argv[2] || *end))) {
        fprintf(stderr, "not a number: '%s'\n", bad_seed ? argv[1] : argv[2]);
        return 2;
    }
    printf("seed %llu\n", (unsigned long long) seed);
    fflush(stdout);

    signal(SIGABRT, on_abort);
    signal(SIGALRM, [](int) { abort(); });
    const auto start = std::chrono::steady_clock::now();
    int64_t n_round = 0;
    do {
        set_check_context("round seed " + std::to_string(seed + (uint64_t) n_round));
        alarm(40); // a round takes milliseconds
        run_round(seed + (uint64_t) n_round);
        n_round++;
    } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < limit_s);
    alarm(0);
    printf("ok: %lld rounds%s\n", (long long) n_round, summary().c_str());
    return 0;
}
