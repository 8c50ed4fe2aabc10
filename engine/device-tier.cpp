#include "device-tier.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#ifdef __linux__
#include <sys/prctl.h>
#endif

namespace moe {

// both are shared with a device: neither may be cached, reordered or torn
static uint32_t load(const uint32_t & word) {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

template <typename T> static void store(T & word, T value) {
    __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

ram_tier device_tier::plan(const std::vector<layer> & layers, uint64_t budget) {
    std::vector<ram_tier::layer_size> sizes;
    for (const layer & l : layers) {
        uint64_t bytes = 0;
        for (const part & p : l.parts) {
            bytes += ram_tier::aligned(p.expert_bytes);
        }
        sizes.push_back({ bytes, l.parts.empty() ? 0 : l.n_expert, 0 });
    }
    return ram_tier(sizes, budget);
}

device_tier::device_tier(const options & opt, std::vector<layer> layers_in, reader & io, stream_stats & stats)
    : opt(opt), layers(std::move(layers_in)), io(io), stats(stats), slabs(plan(layers, opt.budget)) {
    size_t n_expert   = 0;
    size_t n_part_max = 0;
    for (const layer & l : layers) {
        first_expert.push_back(n_expert);
        n_expert  += l.n_expert;
        n_lacking += l.parts.empty() ? 0 : l.n_expert;
        uint64_t pos = 0;
        offsets.emplace_back();
        for (const part & p : l.parts) {
            offsets.back().push_back(pos);
            pos += ram_tier::aligned(p.expert_bytes);
        }
        n_part_max = std::max(n_part_max, l.parts.size());
    }
    std::fill(opt.slab_of, opt.slab_of + n_expert, -1);
    memset(opt.box, 0, sizeof(*opt.box));
    owners.resize(slabs.n_slab());
    transfers.reserve(device_max_ids * n_part_max);
    held.reserve(device_max_ids);
    thread = std::thread([this] { run(); });
}

device_tier::~device_tier() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    changed.notify_all();
    thread.join();
}

void device_tier::publish(int32_t i_layer, int32_t expert, int64_t offset) {
    store(opt.slab_of[first_expert[i_layer] + expert], offset);
}

// a held slab for an expert that has none; -1: there is none
int32_t device_tier::claim(int32_t i_layer, int32_t expert, bool only_empty) {
    const int32_t slab = slabs.claim(i_layer, expert, only_empty);
    if (slab < 0) {
        return -1;
    }
    slab_owner & owner = owners[slab];
    if (owner.expert >= 0) {
        publish(owner.i_layer, owner.expert, -1);
        ++n_lacking;
    }
    owner = { i_layer, expert };
    return slab;
}

void device_tier::read_into(int32_t slab, int32_t i_layer, int32_t expert, std::vector<transfer> & to) const {
    const layer & l = layers[i_layer];
    for (size_t i = 0; i < l.parts.size(); ++i) {
        const part & p = l.parts[i];
        uint8_t * dst = opt.slabs + slabs.offset(slab) + offsets[i_layer][i];
        if (opt.poison) {
            memset(dst, 0xff, p.expert_bytes);
        }
        to.push_back({ slab, p.file, p.offset + expert * p.expert_bytes, p.expert_bytes, dst, nullptr });
    }
}

void device_tier::note_error(const std::string & what, size_t n_failed) {
    stats.read_errors += n_failed;
    if (error.empty()) {
        error = what;
    }
}

void device_tier::compute_begin() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        computing = true;
        error.clear();
    }
    changed.notify_all();
}

std::string device_tier::compute_end() {
    std::string what;
    {
        std::lock_guard<std::mutex> lock(mutex);
        computing = false;
        what = std::move(error);
        error.clear();
        device_mailbox & box = *opt.box;
        const int32_t code = (int32_t) load((const uint32_t &) box.error);
        if (code != device_error_none) {
            const layer & l = layers[box.error_layer];
            const std::string where = "layer " + std::to_string(l.layer) + ": ";
            const std::string e = std::to_string(box.error_expert);
            if (code == device_error_range || code == device_error_twice) {
                what = where + "the router chose expert " + e + " of " + std::to_string(l.n_expert) + (code == device_error_twice ? " twice" : "") +
                    " for token " + std::to_string(box.error_token) + " of the batch; are the weights damaged?";
            } else if (code == device_error_bytes) {
                what = where + "the slot of expert " + e + " does not hold what its slab holds";
            } else if (what.empty()) {
                what = where + "the host did not bring expert " + e + " in time; hint: --moe-gpu-path copy";
            }
            store(box.error, (int32_t) device_error_none);
        }
    }
    changed.notify_all();
    return what;
}

int32_t device_tier::hold(int32_t i_layer, int32_t expert) {
    std::lock_guard<std::mutex> lock(mutex);
    const int32_t slab = slabs.find(i_layer, expert);
    if (slab < 0 || opt.slab_of[first_expert[i_layer] + expert] < 0) {
        return -1; // none, or its bytes are on their way
    }
    slabs.hold(slab);
    return slab;
}

void device_tier::release(const std::vector<int32_t> & of_caller) {
    std::lock_guard<std::mutex> lock(mutex);
    for (const int32_t slab : of_caller) {
        slabs.release(slab);
    }
}

// the request in the mailbox
void device_tier::answer() {
    const auto t_start = std::chrono::steady_clock::now();
    device_mailbox & box = *opt.box;
    const uint32_t number  = load(box.asked);
    const int32_t  i_layer = box.i_layer;
    const int32_t  n       = box.n_expert;
    if (i_layer < 0 || i_layer >= (int32_t) layers.size() || n < 0 || n > device_max_ids) {
        note_error("the device asked for nonsense", 0);
        store(box.answered, number);
        return;
    }
    if (opt.delay_us > 0) {
        random = random * 1664525u + 1013904223u;
        std::this_thread::sleep_for(std::chrono::microseconds((uint64_t) (random >> 8) % opt.delay_us));
    }
    const layer & l = layers[i_layer];
    const auto is_valid = [&](int32_t e) { return e >= 0 && e < l.n_expert; };
    held.clear();
    transfers.clear();
    for (int32_t i = 0; i < n; ++i) { // the ones that are here must not give way to the others
        const int32_t slab = is_valid(box.experts[i]) ? slabs.find(i_layer, box.experts[i]) : -1;
        if (slab >= 0) {
            slabs.hold(slab);
            held.push_back(slab);
            slabs.touch(slab);
        }
    }
    const size_t n_here = held.size();
    for (int32_t i = 0; i < n; ++i) {
        const int32_t e = box.experts[i];
        if (!is_valid(e) || slabs.find(i_layer, e) >= 0) {
            continue;
        }
        const int32_t slab = claim(i_layer, e, false);
        if (slab < 0) {
            note_error("layer " + std::to_string(l.layer) + ": no room in the RAM tier; hint: a larger --moe-ram", 0);
            break;
        }
        held.push_back(slab);
        read_into(slab, i_layer, e, transfers);
    }
    if (!transfers.empty()) {
        io.submit(group, transfers, urgency::demand);
        group.wait();
    }
    uint64_t n_read = 0;
    for (size_t i = n_here; i < held.size(); ++i) {
        const int32_t slab   = held[i];
        const int32_t expert = owners[slab].expert;
        if (group.has_failed(slab)) {
            owners[slab] = {};
            slabs.forget(slab);
            note_error(group.error(), 1);
            continue;
        }
        ++n_read;
        --n_lacking;
        publish(i_layer, expert, (int64_t) slabs.offset(slab));
    }
    group.clear();
    for (const int32_t slab : held) {
        slabs.release(slab);
    }
    store(box.answered, number);

    layer_stats & s = *stats.layers[i_layer];
    for (const part & p : l.parts) {
        s.bytes_read += n_read * p.expert_bytes;
    }
    s.stall_us += (uint64_t) std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - t_start).count();
}

// Reads a few of the experts that warm fills are to bring, into empty slabs. False: there is nothing left to do.
bool device_tier::warm_some() {
    size_t n_rank = 0;
    for (const layer & l : layers) {
        n_rank = std::max(n_rank, l.warm.size());
    }
    held.clear();
    transfers.clear();
    while (warm_rank < n_rank && (int32_t) held.size() < 2 * io.n_in_flight() && held.size() < (size_t) device_max_ids) {
        const int32_t i_layer = (int32_t) warm_layer;
        const layer & l = layers[i_layer];
        const int32_t expert = warm_rank < l.warm.size() ? l.warm[warm_rank] : -1;
        warm_layer = (warm_layer + 1) % layers.size();
        warm_rank += warm_layer == 0;
        const int32_t slab = expert < 0 || l.parts.empty() || slabs.find(i_layer, expert) >= 0 ? -1 : claim(i_layer, expert, true);
        if (slab >= 0) {
            held.push_back(slab);
            read_into(slab, i_layer, expert, transfers);
        }
    }
    if (transfers.empty()) {
        return false;
    }
    io.submit(group, transfers, urgency::background);
    group.wait();
    for (const int32_t slab : held) {
        const slab_owner owner = owners[slab];
        layer_stats & s = *stats.layers[owner.i_layer];
        for (const part & p : layers[owner.i_layer].parts) {
            s.warm_bytes += p.expert_bytes;
        }
        if (group.has_failed(slab)) {
            owners[slab] = {};
            slabs.forget(slab);
            stats.read_errors += 1;
        } else {
            s.warm_filled += 1;
            --n_lacking;
            publish(owner.i_layer, owner.expert, (int64_t) slabs.offset(slab));
        }
        slabs.release(slab);
    }
    group.clear();
    return true;
}

void device_tier::run() {
#ifdef __linux__
    prctl(PR_SET_TIMERSLACK, 1000); // ns: a short sleep is short
#endif
    std::unique_lock<std::mutex> lock(mutex);
    while (!stopping) {
        if (computing && n_lacking > 0 && !opt.mute) {
            if (load(opt.box->asked) != opt.box->answered) {
                answer();
                continue;
            }
            lock.unlock();
            std::this_thread::sleep_for(std::chrono::microseconds(5));
            lock.lock();
        } else if (!computing && warming) {
            warming = warm_some();
            changed.notify_all();
            if (warming) { // let a graph that begins come in between
                lock.unlock();
                std::this_thread::yield();
                lock.lock();
            }
        } else {
            changed.wait(lock);
        }
    }
}

void device_tier::start_warm() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        warming = true;
    }
    changed.notify_all();
}

bool device_tier::wait_warm(std::chrono::steady_clock::time_point until) {
    std::unique_lock<std::mutex> lock(mutex);
    return changed.wait_until(lock, until, [this] { return !warming; });
}

} // namespace moe
