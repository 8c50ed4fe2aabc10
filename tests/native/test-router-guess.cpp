#include "check.h"
#include "router-guess.h"

#include <algorithm>
#include <cmath>
#include <thread>

using namespace moe;

namespace {

struct router {
    std::vector<float> rows;
    router_weights     w;

    router(int32_t n_expert, int64_t n_embd, int32_t n_used, uint64_t seed) : rows(n_expert * n_embd) {
        test_random rnd(seed);
        for (float & v : rows) {
            v = (float) rnd.between(-1000, 1000) / 1000;
        }
        w.rows      = (const uint8_t *) rows.data();
        w.row_bytes = n_embd * sizeof(float);
        w.n_embd    = n_embd;
        w.n_expert  = n_expert;
        w.n_used    = n_used;
    }

    // by the definition, in doubles
    std::vector<int32_t> best(const std::vector<float> & state) const {
        std::vector<std::pair<double, int32_t>> s;
        for (int32_t e = 0; e < w.n_expert; ++e) {
            double sum = w.bias ? w.bias[e] : 0;
            for (int64_t i = 0; i < w.n_embd; ++i) {
                sum += (double) rows[e * w.n_embd + i] * state[i];
            }
            s.push_back({ -(w.choice_bias ? 1 / (1 + std::exp(-sum)) + w.choice_bias[e] : sum), e });
        }
        std::sort(s.begin(), s.end());
        std::vector<int32_t> out;
        for (int32_t k = 0; k < w.n_used; ++k) {
            out.push_back(s[k].second);
        }
        return out;
    }
};

std::vector<float> random_state(int64_t n, uint64_t seed) {
    test_random rnd(seed);
    std::vector<float> out(n);
    for (float & v : out) {
        v = (float) rnd.between(-1000, 1000) / 500;
    }
    return out;
}

std::vector<int32_t> guess(const router_weights & w, const std::vector<float> & states, int64_t n_tokens, int32_t n_thread) {
    router_guess g({ w });
    std::vector<std::thread> threads;
    std::atomic<int> n_last { 0 };
    for (int32_t ith = 0; ith < n_thread; ++ith) {
        threads.emplace_back([&, ith] { n_last += g.score(0, states.data(), w.n_embd * sizeof(float), n_tokens, ith, n_thread); });
    }
    for (std::thread & t : threads) {
        t.join();
    }
    CHECK_EQ(n_last.load(), 1);
    return g.best();
}

} // namespace

TEST(the_likeliest_come_first_by_any_number_of_threads) {
    for (const int64_t n_embd : { 1, 7, 64, 333 }) {
        router r(37, n_embd, 6, n_embd);
        const auto state = random_state(n_embd, 5);
        for (const int32_t n_thread : { 1, 2, 5, 40 }) {
            CHECK(guess(r.w, state, 1, n_thread) == r.best(state));
        }
    }
}

TEST(biases_count) {
    router r(32, 128, 4, 9);
    const auto state = random_state(128, 6);
    const auto plain = r.best(state);
    const auto bias  = random_state(32, 7);
    std::vector<float> strong;
    for (const float b : bias) {
        strong.push_back(20 * b);
    }
    r.w.bias = strong.data();
    CHECK(guess(r.w, state, 1, 2) == r.best(state) && r.best(state) != plain);
    r.w.bias        = nullptr;
    r.w.choice_bias = bias.data();
    CHECK(guess(r.w, state, 1, 2) == r.best(state) && r.best(state) != plain);
}

TEST(tokens_take_turns_and_share) {
    router r(20, 16, 3, 10);
    std::vector<float> states;
    std::vector<std::vector<int32_t>> each;
    for (uint64_t t = 0; t < 4; ++t) {
        const auto s = random_state(16, 20 + t);
        states.insert(states.end(), s.begin(), s.end());
        each.push_back(r.best(s));
    }
    std::vector<int32_t> expected;
    for (int32_t k = 0; k < 3; ++k) {
        for (const auto & b : each) {
            if (std::find(expected.begin(), expected.end(), b[k]) == expected.end()) {
                expected.push_back(b[k]);
            }
        }
    }
    CHECK(guess(r.w, states, 4, 3) == expected);
}

TEST(of_a_wide_batch_the_last_tokens_count) {
    router r(20, 16, 1, 11);
    std::vector<float> states;
    std::vector<int32_t> last;
    for (uint64_t t = 0; t < 3 * router_guess::n_tokens_max; ++t) {
        const auto s = random_state(16, 40 + t);
        states.insert(states.end(), s.begin(), s.end());
        last.push_back(r.best(s)[0]);
    }
    std::vector<int32_t> got = guess(r.w, states, 3 * router_guess::n_tokens_max, 2);
    for (const int32_t e : got) {
        CHECK(std::count(last.end() - router_guess::n_tokens_max, last.end(), e) > 0);
    }
}

TEST(other_types_are_read_in_blocks) {
    static constexpr int64_t n_embd = 300;
    router r(8, n_embd, 3, 12);
    std::vector<int16_t> rows; // thousandths
    for (const float v : r.rows) {
        rows.push_back((int16_t) (v * 1000 + (v < 0 ? -0.5f : 0.5f)));
    }
    router_weights w = r.w;
    w.rows        = (const uint8_t *) rows.data();
    w.row_bytes   = n_embd * 2;
    w.block_size  = 4;
    w.block_bytes = 8;
    w.to_float    = [](const void * src, float * dst, int64_t n) {
        CHECK_EQ(n % 4, 0);
        for (int64_t i = 0; i < n; ++i) {
            dst[i] = (float) ((const int16_t *) src)[i] / 1000;
        }
    };
    const auto state = random_state(n_embd, 13);
    CHECK(guess(w, state, 1, 3) == r.best(state));
    w.block_size = 7; // no divisor
    CHECK(!router_guess({ w }).knows(0));
}

TEST(noise_makes_guesses_wrong) {
    router r(100, 16, 10, 15);
    router_guess g({ r.w }, 40);
    int n = 0, n_right = 0;
    for (uint64_t seed = 1; seed <= 200; ++seed) {
        const auto state = random_state(16, 100 + seed);
        CHECK(g.score(0, state.data(), 0, 1, 0, 1));
        const auto best = r.best(state);
        for (const int32_t e : g.best()) {
            CHECK(e >= 0 && e < 100);
            n       += 1;
            n_right += std::count(best.begin(), best.end(), e) > 0;
        }
    }
    CHECK(n_right > 0.55 * n && n_right < 0.72 * n);
}

TEST(no_number_is_no_crash) {
    router r(16, 8, 4, 14);
    std::vector<float> state(8, NAN);
    std::vector<int32_t> got = guess(r.w, state, 1, 2);
    std::sort(got.begin(), got.end());
    CHECK_EQ(got.size(), 4u);
    CHECK(std::unique(got.begin(), got.end()) == got.end() && got[0] >= 0 && got[3] < 16);
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
