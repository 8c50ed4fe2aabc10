#include "trial.h"

#include <algorithm>
#include <numeric>

namespace moe {

trial::trial() {
    for (auto & t : times) {
        t.reserve(n_trial);
    }
}

void trial::begin() {
    i_window = 0;
    n_noted  = 0;
    for (auto & t : times) {
        t.clear();
    }
}

// the slowest tenth left out
static double mean_of(std::vector<uint64_t> & us) {
    std::sort(us.begin(), us.end());
    const size_t n = us.size() - us.size() / 10;
    return (double) std::accumulate(us.begin(), us.begin() + n, (uint64_t) 0) / (double) n;
}

void trial::note(uint64_t us, int64_t n) {
    if (resting > 0) {
        resting -= 1;
        return;
    }
    if (n != n_tokens) {
        n_tokens = n;
        begin();
    }
    const bool on = is_on();
    if (n_noted++ > 0) {
        times[on].push_back(us);
    }
    if (n_noted < (on ? n_on : n_off)) {
        return;
    }
    n_noted = 0;
    if (++i_window < 5) {
        return;
    }
    choice   = mean_of(times[1]) < (1 - margin) * mean_of(times[0]);
    resting  = n_rest;
    n_trials += 1;
    begin();
}

} // namespace moe
