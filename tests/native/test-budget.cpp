// available_memory() over made-up /proc and /sys trees, and slots_that_fit().

#include "budget.h"
#include "check.h"

#include <filesystem>
#include <fstream>

using namespace moe;
namespace fs = std::filesystem;

static constexpr uint64_t mib = 1024 * 1024;

namespace {

// a root folder that goes away with the object
class fake_root {
public:
    fake_root() {
        std::string name = (fs::temp_directory_path() / "moe-test-budget-XXXXXX").string();
        CHECK(mkdtemp(name.data()) != nullptr);
        path = name;
    }

    ~fake_root() { fs::remove_all(path); }

    fake_root & file(const std::string & name, const std::string & text) {
        const fs::path p = path + name;
        fs::create_directories(p.parent_path());
        std::ofstream(p) << text;
        return *this;
    }

    fake_root & mem_available(uint64_t bytes) {
        return file("/proc/meminfo", "MemTotal:       99999999 kB\nMemFree:          100000 kB\nMemAvailable:   " +
            std::to_string(bytes / 1024) + " kB\nBuffers:               0 kB\n");
    }

    fake_root & v1(const std::string & group, const std::string & limit, uint64_t usage, uint64_t active_file, uint64_t inactive_file) {
        const std::string dir = "/sys/fs/cgroup/memory" + group;
        file(dir + "/memory.limit_in_bytes", limit + "\n");
        file(dir + "/memory.usage_in_bytes", std::to_string(usage) + "\n");
        // the group's own, and with all below it
        return file(dir + "/memory.stat", "cache 1\nactive_file 7\ninactive_file 7\ntotal_cache 1\ntotal_inactive_file " +
            std::to_string(inactive_file) + "\ntotal_active_file " + std::to_string(active_file) + "\n");
    }

    fake_root & v2(const std::string & group, const std::string & limit, uint64_t usage, uint64_t active_file, uint64_t inactive_file) {
        const std::string dir = "/sys/fs/cgroup" + group;
        file(dir + "/memory.max", limit + "\n");
        file(dir + "/memory.current", std::to_string(usage) + "\n");
        return file(dir + "/memory.stat", "anon 5\nfile 6\ninactive_file " + std::to_string(inactive_file) + "\nactive_file " +
            std::to_string(active_file) + "\nworkingset_refault_file 9\n");
    }

    memory_now available() const { return available_memory(path); }

private:
    std::string path;
};

} // namespace

static const std::string v1_lines = "12:cpu,cpuacct:/elsewhere\n7:memory:/a/b\n1:name=systemd:/a\n0::/unused\n";

TEST(without_meminfo_nothing_is_known) {
    fake_root root;
    CHECK_EQ(root.available().available_bytes, 0u);
    CHECK_EQ(root.available().limited_by, "");
    root.file("/proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: x kB\n");
    CHECK_EQ(root.available().available_bytes, 0u);
}

TEST(mem_available_alone) {
    fake_root root;
    root.mem_available(300 * mib);
    CHECK_EQ(root.available().available_bytes, 300 * mib);
    CHECK_EQ(root.available().limited_by, "MemAvailable");
}

TEST(groups_without_files_limit_nothing) {
    fake_root root;
    root.mem_available(300 * mib).file("/proc/self/cgroup", v1_lines);
    CHECK_EQ(root.available().available_bytes, 300 * mib);
    CHECK_EQ(root.available().limited_by, "MemAvailable");
}

TEST(v1_file_cache_counts_as_free) {
    fake_root root;
    root.mem_available(900 * mib).file("/proc/self/cgroup", v1_lines);
    root.v1("/a/b", std::to_string(500 * mib), 400 * mib, 100 * mib, 50 * mib);
    CHECK_EQ(root.available().available_bytes, 250 * mib);
    CHECK_EQ(root.available().limited_by, "cgroup /a/b");
}

TEST(v1_unlimited_number_is_no_limit) {
    fake_root root;
    root.mem_available(900 * mib).file("/proc/self/cgroup", v1_lines);
    root.v1("/a/b", "9223372036854771712", 400 * mib, 0, 0);
    CHECK_EQ(root.available().available_bytes, 900 * mib);
}

TEST(v1_memory_may_share_its_line) {
    fake_root root;
    root.mem_available(900 * mib).file("/proc/self/cgroup", "3:cpu,memory,pids:/a\n");
    root.v1("/a", std::to_string(100 * mib), 0, 0, 0);
    CHECK_EQ(root.available().available_bytes, 100 * mib);
}

TEST(v1_parent_and_root_of_the_mount_limit_too) {
    fake_root root;
    root.mem_available(900 * mib).file("/proc/self/cgroup", v1_lines);
    root.v1("/a/b", std::to_string(500 * mib), 0, 0, 0).v1("/a", std::to_string(450 * mib), 50 * mib, 0, 0);
    CHECK_EQ(root.available().available_bytes, 400 * mib);
    CHECK_EQ(root.available().limited_by, "cgroup /a");
    // a container sees its own group as the root of the mount
    root.v1("", std::to_string(300 * mib), 0, 0, 0);
    CHECK_EQ(root.available().available_bytes, 300 * mib);
    CHECK_EQ(root.available().limited_by, "cgroup /");
}

TEST(v2_max_is_no_limit) {
    fake_root root;
    root.mem_available(900 * mib).file("/proc/self/cgroup", "0::/user/app\n");
    root.v2("/user/app", "max", 400 * mib, 0, 0);
    CHECK_EQ(root.available().available_bytes, 900 * mib);
    CHECK_EQ(root.available().limited_by, "MemAvailable");
}

TEST(v2_number_limits) {
    fake_root root;
    root.mem_available(900 * mib).file("/proc/self/cgroup", "0::/user/app\n");
    root.v2("/user/app", std::to_string(600 * mib), 500 * mib, 200 * mib, 100 * mib);
    CHECK_EQ(root.available().available_bytes, 400 * mib);
    CHECK_EQ(root.available().limited_by, "cgroup /user/app");
}

TEST(v2_smaller_parent_limits) {
    fake_root root;
    root.mem_available(900 * mib).file("/proc/self/cgroup", "0::/user/slice/app\n");
    root.v2("/user/slice/app", std::to_string(800 * mib), 10 * mib, 0, 0);
    root.v2("/user/slice", "max", 10 * mib, 0, 0);
    root.v2("/user", std::to_string(200 * mib), 60 * mib, 0, 0);
    CHECK_EQ(root.available().available_bytes, 140 * mib);
    CHECK_EQ(root.available().limited_by, "cgroup /user");
}

TEST(v2_limit_above_mem_available_is_not_the_limit) {
    fake_root root;
    root.mem_available(100 * mib).file("/proc/self/cgroup", "0::/\n");
    root.v2("", std::to_string(800 * mib), 10 * mib, 0, 0);
    CHECK_EQ(root.available().available_bytes, 100 * mib);
    CHECK_EQ(root.available().limited_by, "MemAvailable");
}

TEST(more_cache_than_usage_is_no_underflow) {
    fake_root root;
    root.mem_available(900 * mib).file("/proc/self/cgroup", "0::/\n");
    root.v2("", std::to_string(300 * mib), 100 * mib, 200 * mib, 0); // the two files are not read at one moment
    CHECK_EQ(root.available().available_bytes, 300 * mib);
}

// 0 stands for "unknown", and callers then take no care: a full group must not look like that
TEST(a_full_group_is_known_to_be_full) {
    fake_root root;
    root.mem_available(900 * mib).file("/proc/self/cgroup", "0::/a\n");
    root.v2("/a", std::to_string(300 * mib), 300 * mib, 0, 0);
    CHECK(root.available().available_bytes > 0);
    CHECK(root.available().available_bytes < mib);
    CHECK_EQ(root.available().limited_by, "cgroup /a");
    root.v2("/a", std::to_string(300 * mib), 301 * mib, 0, 0); // for a moment, or after the limit was lowered
    CHECK(root.available().available_bytes > 0);
    CHECK(root.available().available_bytes < mib);
}

TEST(odd_group_lines_are_survived) {
    fake_root root;
    root.mem_available(900 * mib);
    for (const char * lines : { "", "\n", "0\n", "0:\n", "0::\n", "0::relative\n", "0::/../..\n", "4:memory:\n", "4:memory:x\n", "0::/a/ b\n", "0::/" }) {
        root.file("/proc/self/cgroup", lines);
        CHECK_EQ(root.available().available_bytes, 900 * mib);
    }
}

TEST(all_experts_need_no_staging) {
    CHECK_EQ(slots_that_fit({ 100 + 8 * 10, 100, 50, 10, 8 }), 8);
    CHECK_EQ(slots_that_fit({ 100 + 8 * 10 - 1, 100, 50, 10, 8 }), 2); // one byte less: staging, and what is left
}

TEST(slots_stay_within_the_budget) {
    for (uint64_t available = 0; available < 300; ++available) {
        const slot_budget b = { available, 40, 30, 7, 20 };
        const int32_t n = slots_that_fit(b);
        CHECK(n >= 0 && n <= b.n_expert);
        const auto needs = [&](int32_t slots) { return b.resident_bytes + (slots < b.n_expert ? b.staging_bytes : 0) + slots * b.slot_bytes; };
        CHECK(n == 0 || needs(n) <= available);
        CHECK(n == b.n_expert || needs(n + 1) > available || n == 0);
        CHECK(n > 0 || needs(1) > available);
    }
}

TEST(never_all_but_short_of_staging) {
    // room for 10 slots beside staging by the numbers, but then all would have to fit without
    CHECK_EQ(slots_that_fit({ 1000, 900, 10, 10, 9 }), 9);
    CHECK_EQ(slots_that_fit({ 1000, 950, 10, 10, 9 }), 4);
}

TEST(nothing_fits) {
    CHECK_EQ(slots_that_fit({ 0, 100, 50, 10, 8 }), 0);
    CHECK_EQ(slots_that_fit({ 150, 100, 50, 10, 8 }), 0);
    CHECK_EQ(slots_that_fit({ 159, 100, 50, 10, 8 }), 0);
    CHECK_EQ(slots_that_fit({ 160, 100, 50, 10, 8 }), 1);
    CHECK_EQ(slots_that_fit({ 100, 200, 0, 10, 1 }), 0);
}

TEST(one_expert_has_one_slot_or_none) {
    CHECK_EQ(slots_that_fit({ 110, 100, 50, 10, 1 }), 1);
    CHECK_EQ(slots_that_fit({ 109, 100, 0, 10, 1 }), 0);
}

TEST(terabytes_do_not_overflow) {
    const uint64_t tib = 1ull << 40;
    CHECK_EQ(slots_that_fit({ 4 * tib, tib, tib, 8ull << 30, 1024 }), 256);
    CHECK_EQ(slots_that_fit({ 16 * tib, tib, tib, 8ull << 30, 1024 }), 1024);
}

TEST(staging_is_too_large_when_slots_that_were_asked_for_do_not_fit_beside_it) {
    CHECK(!staging_is_too_large({ 190, 100, 50, 10, 8 }, 40));
    CHECK(staging_is_too_large({ 189, 100, 50, 10, 8 }, 40));
    CHECK(staging_is_too_large({ 50, 100, 50, 10, 8 }, 10));
}

TEST(staging_is_too_large_when_it_takes_a_quarter_of_what_experts_get) {
    CHECK(!staging_is_too_large({ 300, 100, 50, 10, 8 }, 0));
    CHECK(staging_is_too_large({ 299, 100, 50, 10, 8 }, 0));
    CHECK(staging_is_too_large({ 50, 100, 50, 10, 8 }, 0));
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
