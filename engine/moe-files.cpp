#include "moe-api.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>

namespace {

struct paths {
    bool        has_trace = false;
    bool        has_map   = false;
    std::string trace;
    std::string map;

    bool operator==(const paths & o) const {
        return has_trace == o.has_trace && has_map == o.has_map && trace == o.trace && map == o.map;
    }
};

} // namespace

static std::mutex        known_mutex;
static std::deque<paths> known; // by number; what it holds does not move

int64_t moe_add_files(const moe_files * files) {
    moe_files f = {};
    memcpy(&f, files, std::min(files->size, sizeof(f)));
    const paths p = { f.trace != nullptr, f.map != nullptr, f.trace ? f.trace : "", f.map ? f.map : "" };

    std::lock_guard<std::mutex> lock(known_mutex);
    const auto it = std::find(known.begin(), known.end(), p);
    const int64_t number = it - known.begin();
    if (it == known.end()) {
        known.push_back(p);
    }
    return number;
}

bool moe_get_files(int64_t number, moe_files * files) {
    std::lock_guard<std::mutex> lock(known_mutex);
    if (number < 0 || number >= (int64_t) known.size()) {
        return false;
    }
    const paths & p = known[number];
    moe_files f = { files->size, p.has_trace ? p.trace.c_str() : nullptr, p.has_map ? p.map.c_str() : nullptr };
    memcpy(files, &f, std::min(files->size, sizeof(f)));
    return true;
}
