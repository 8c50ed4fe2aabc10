#pragma once

// Whether something that costs is worth it, found out by having it and not having it in turn. Pure: time is what it is told.
//
// Windows of graphs, with it and, shorter, without, in turn, so that a machine that gets slower or faster meanwhile affects both; then the
// better way for many graphs, and again. With it must be faster by more than the margin: it wears the drive. What a window begins
// with is not counted, and neither is the slowest tenth.

#include <cstdint>
#include <vector>

namespace moe {

class trial {
public:
    static constexpr int32_t n_on     = 17;   // graphs of a window; the first is not counted
    static constexpr int32_t n_off    = 9;
    static constexpr int32_t n_trial  = 3 * n_on + 2 * n_off; // graphs until there is a choice
    static constexpr int32_t n_rest   = 1024; // graphs, until it is tried again
    static constexpr double  margin   = 0.01;

    trial();

    // for the graph that begins
    bool is_on() const { return resting > 0 ? choice : i_window % 2 == 0; }

    // how long that graph took; of n_tokens: a batch of another size begins the trial anew
    void note(uint64_t us, int64_t n_tokens);

    // known yet
    bool has_chosen() const { return n_trials > 0; }

private:
    void begin();

    std::vector<uint64_t> times[2]; // without, with it
    int32_t i_window  = 0;
    int32_t n_noted   = 0;          // in the window
    int32_t resting   = 0;          // graphs left
    int64_t n_tokens  = 0;
    int64_t n_trials  = 0;
    bool    choice    = true;
};

} // namespace moe
