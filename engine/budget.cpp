#include "budget.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

namespace moe {

static constexpr uint64_t unlimited = std::numeric_limits<uint64_t>::max();

// the number in a one-line file; "max" and a missing file are `unlimited`
static uint64_t read_number(const std::string & path) {
    std::ifstream in(path);
    uint64_t value = 0;
    return in >> value ? value : unlimited;
}

// the value behind `key` in a file of "key value" lines; 0 when absent
static uint64_t read_field(const std::string & path, const std::string & key) {
    std::ifstream in(path);
    std::string   line;
    while (std::getline(in, line)) {
        std::istringstream words(line);
        std::string name;
        uint64_t    value = 0;
        if (words >> name >> value && name == key) {
            return value;
        }
    }
    return 0;
}

namespace {

struct cgroup_files {
    const char * limit;
    const char * usage;
    const char * active_file;   // in memory.stat: file cache of the group and all below it
    const char * inactive_file;
};

} // namespace

// the smallest allowance on the way from the process's own group up to the root of the hierarchy
static void apply_cgroup(const std::string & mount, std::string group, const cgroup_files & files, memory_now & now) {
    while (true) {
        const std::string dir   = mount + (group == "/" ? "" : group);
        const uint64_t    limit = read_number(dir + "/" + files.limit);
        const uint64_t    usage = read_number(dir + "/" + files.usage);
        // v1 writes a huge page-aligned number for "no limit"
        if (limit < (1ull << 60) && usage != unlimited) {
            const std::string stat  = dir + "/memory.stat";
            const uint64_t    cache = read_field(stat, files.active_file) + read_field(stat, files.inactive_file);
            const uint64_t    used  = usage - std::min(cache, usage);
            const uint64_t left  = limit > used ? limit - used : 1; // 0 would mean unknown
            if (left < now.available_bytes) {
                now.available_bytes = left;
                now.limited_by      = "cgroup " + (group.empty() ? std::string("/") : group);
            }
        }
        const size_t parent = group.rfind('/');
        if (parent == std::string::npos || group == "/") {
            return;
        }
        group.resize(parent);
    }
}

memory_now available_memory(const std::string & root) {
    const uint64_t kib = read_field(root + "/proc/meminfo", "MemAvailable:");
    if (kib == 0) {
        return {};
    }
    memory_now now { kib * 1024, "MemAvailable" };

    // lines are "hierarchy:controllers:path"; v2 has no controllers
    std::ifstream in(root + "/proc/self/cgroup");
    std::string   line;
    while (std::getline(in, line)) {
        const size_t a = line.find(':');
        const size_t b = a == std::string::npos ? a : line.find(':', a + 1);
        if (b == std::string::npos) {
            continue;
        }
        const std::string controllers = "," + line.substr(a + 1, b - a - 1) + ",";
        const std::string group       = line.substr(b + 1);
        if (controllers == ",,") {
            apply_cgroup(root + "/sys/fs/cgroup", group, { "memory.max", "memory.current", "active_file", "inactive_file" }, now);
        } else if (controllers.find(",memory,") != std::string::npos) {
            // inside a container the mount shows the container's own group as its root
            const cgroup_files v1 = {
                "memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file",
            };
            apply_cgroup(root + "/sys/fs/cgroup/memory", group, v1, now);
        }
    }
    return now;
}

bool staging_is_too_large(const slot_budget & b, uint64_t slots_bytes) {
    const uint64_t for_experts = b.available_bytes - std::min(b.available_bytes, b.resident_bytes);
    return slots_bytes > 0 ? b.staging_bytes + slots_bytes > for_experts : b.staging_bytes > for_experts / 4;
}

int32_t slots_that_fit(const slot_budget & b) {
    const uint64_t all = b.resident_bytes + (uint64_t) b.n_expert * b.slot_bytes;
    if (all <= b.available_bytes) {
        return b.n_expert;
    }
    const uint64_t fixed = b.resident_bytes + b.staging_bytes;
    if (b.slot_bytes == 0 || fixed >= b.available_bytes) {
        return 0;
    }
    return (int32_t) std::min<uint64_t>((b.available_bytes - fixed) / b.slot_bytes, (uint64_t) b.n_expert - 1);
}

} // namespace moe
