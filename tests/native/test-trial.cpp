#include "check.h"
#include "trial.h"

using namespace moe;

// runs n graphs that take so long with it and without; noise: percent, up and down
static void run(trial & t, int n, uint64_t us_on, uint64_t us_off, test_random & rnd, int64_t noise = 0, int64_t n_tokens = 1) {
    for (int i = 0; i < n; ++i) {
        const uint64_t us = t.is_on() ? us_on : us_off;
        t.note(us * (uint64_t) (100 + rnd.between(-noise, noise)) / 100, n_tokens);
    }
}

TEST(what_helps_stays_on) {
    test_random rnd(1);
    trial t;
    run(t, trial::n_trial, 900, 1000, rnd, 10);
    CHECK(t.has_chosen() && t.is_on());
}

TEST(what_hurts_is_switched_off) {
    test_random rnd(2);
    trial t;
    CHECK(t.is_on() && !t.has_chosen());
    run(t, trial::n_trial, 1100, 1000, rnd, 10);
    CHECK(t.has_chosen() && !t.is_on());
}

TEST(what_changes_nothing_is_switched_off) {
    test_random rnd(3);
    trial t;
    run(t, trial::n_trial, 1000, 1000, rnd);
    CHECK(!t.is_on());
}

TEST(a_few_slow_graphs_decide_nothing) {
    test_random rnd(4);
    trial t;
    for (int i = 0; i < trial::n_trial; ++i) {
        const bool hiccup = t.is_on() && i % 17 == 5;
        t.note(hiccup ? 50000 : t.is_on() ? 900 : 1000, 1);
    }
    CHECK(t.is_on());
}

TEST(a_machine_that_gets_slower_favours_neither) {
    trial t;
    for (int i = 0; i < trial::n_trial; ++i) {
        t.note((t.is_on() ? 950 : 1000) + 5 * (uint64_t) i, 1);
    }
    CHECK(t.is_on());
}

TEST(it_is_tried_again_and_the_choice_may_change) {
    test_random rnd(5);
    trial t;
    run(t, trial::n_trial, 1100, 1000, rnd);
    for (int i = 0; i < trial::n_rest; ++i) {
        CHECK(!t.is_on());
        t.note(1000, 1);
    }
    run(t, trial::n_trial, 900, 1000, rnd);
    CHECK(t.is_on());
}

TEST(a_batch_of_another_size_begins_anew) {
    test_random rnd(6);
    trial t;
    run(t, trial::n_trial - 5, 5000, 1000, rnd);
    run(t, trial::n_trial, 900, 1000, rnd, 0, 4);
    CHECK(t.has_chosen() && t.is_on());
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
