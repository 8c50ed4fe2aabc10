// Replays a list of llama calls without and with streaming, and compares whatever they put out, bit for bit.
//
// The list is drawn from the seed, which is printed; every kind of call is in it at least once. Four sequences join, leave, are
// cancelled in the middle of a prompt, shifted, copied, saved, restored; batches are of all sizes, and larger than a ubatch; graphs
// are aborted and their batch is given again (not with layers on a device). Two players, contexts of one model with lists and settings of their own, play one after
// the other, in turns, and from two threads at once: what each puts out must not depend on it.
//
// The reference (streaming off) is first shown equal to itself. Where slots are scarce, experts must have been evicted, and
// batches must have gone through slots and through staging; else the comparison proves nothing and the run fails.
//
//   moe-replay -m model.gguf [--slots used,used+1,all] [--steps 40] [--seed 1] [--threads 1] [--gpu-layers 0] [--lora a.gguf,b.gguf]
//              [moe flags: --moe-io direct …]
//
// One line per comparison; exit code 0 only if all are equal.

#include "replay.h"

#include <map>
#include <thread>

using namespace replay;

namespace {

constexpr int n_seq   = 4;
constexpr int n_most  = 80; // tokens of a sequence
constexpr int n_batch = 64;

// a model with its adapters
struct loaded {
    model_ptr model;
    std::vector<llama_adapter_lora *> loras; // they live as long as the model

    // without the adapter of this number, which shows that it matters
    loaded(const options & o, const std::string & slots, int i_silent = -1) : model(load(o, slots)) {
        for (const std::string & path : o.loras) {
            loras.push_back(llama_adapter_lora_init(model.get(), path.c_str()));
            if (!loras.back()) {
                throw std::runtime_error("cannot load adapter '" + path + "'");
            }
        }
        if (i_silent >= 0) {
            loras[i_silent] = nullptr;
        }
    }
};

enum class rows { all, last, none };

class player {
public:
    outputs out;
    std::map<std::string, int> n_calls;

    // two players differ in everything that is drawn, and in the size of a ubatch
    player(const options & o, const loaded & m, int number)
        : model(m.model.get()), loras(m.loras), rng(o.seed * 2 + number), recurrent(is_recurrent(model)) {
        n_vocab  = llama_vocab_n_tokens(llama_model_get_vocab(model));
        n_ubatch = number == 0 ? 8 : 5;
        params = llama_context_default_params();
        params.n_ctx           = 512;
        params.n_batch         = n_batch;
        params.n_ubatch        = n_ubatch;
        params.n_seq_max       = n_seq;
        params.n_threads       = o.n_threads;
        params.n_threads_batch = o.n_threads;
        params.kv_unified      = number == 0;
        params.swa_full        = number == 0;
        open_context();

        calls = {
            { "one",    &player::one    }, { "step",   &player::step   }, { "join",   &player::join  }, { "prompt", &player::prompt },
            { "leave",  &player::leave  }, { "cancel", &player::cancel }, { "last",   &player::last  }, { "copy",   &player::copy   },
            { "save",   &player::save   }, { "whole",  &player::whole  }, { "fresh",  &player::fresh }, { "embd",   &player::embd   },
        };
        if (o.n_gpu_layers == 0) { // only the processor's backend asks the callback: where a graph ends then depends on how it is split
            calls.push_back({ "abort", &player::abort });
            calls.push_back({ "abort-second-ubatch", &player::abort_second_ubatch });
        }
        if (!recurrent) { // whose state knows no way back
            calls.push_back({ "trim", &player::trim });
            calls.push_back({ "both-ways", &player::both_ways });
            if (llama_memory_can_shift(memory())) {
                calls.push_back({ "shift", &player::shift });
            }
        }
        if (!loras.empty()) {
            calls.push_back({ "lora", &player::lora });
        }
        for (size_t i = 0; i < std::max<size_t>(o.n_steps, calls.size()); ++i) {
            script.push_back(i < calls.size() ? i : draw((int) calls.size()));
        }
        for (size_t i = script.size() - 1; i > 0; --i) { // std::shuffle differs between libraries
            std::swap(script[i], script[draw((int) i + 1)]);
        }
    }

    // the next call of the list; false at its end
    bool play_one() {
        if (i_script == script.size()) {
            return false;
        }
        const call & c = calls[script[i_script++]];
        now = c.name;
        ++n_calls[c.name];
        (this->*c.play)();
        return true;
    }

private:
    struct call {
        const char * name;
        void (player::* play)();
    };

    llama_model * const model;
    const std::vector<llama_adapter_lora *> loras;
    std::mt19937  rng;
    const bool    recurrent;
    int           n_vocab;
    int           n_ubatch;
    llama_context_params params;
    interrupt            stop; // outlives the context
    context_ptr          ctx;
    int  n_past[n_seq] = {};
    bool with_embd = false;

    std::vector<call>   calls;
    std::vector<size_t> script;
    size_t              i_script = 0;
    std::string         now;

    int draw(int n) { return (int) (rng() % n); } // 0 .. n - 1
    llama_memory_t memory() const { return llama_get_memory(ctx.get()); }

    void open_context() {
        ctx = make_context(model, params);
        llama_set_abort_callback(ctx.get(), interrupt::callback, &stop);
    }

    void remove(int s) {
        out.add(now + ": remove", llama_memory_seq_rm(memory(), s, -1, -1));
        n_past[s] = 0;
    }

    // so that n tokens more are not too many
    void make_room(int s, int n) {
        if (n_past[s] + n > n_most) {
            remove(s);
        }
    }

    // n new tokens of a sequence, behind those it has
    void add_tokens(token_list & tokens, int s, int n, rows which) {
        for (int i = 0; i < n; ++i) {
            tokens.push_back({ draw(n_vocab), n_past[s] + i, s, which == rows::all || (which == rows::last && i == n - 1) });
        }
    }

    token_list tokens_of(int s, int n, rows which = rows::all) {
        make_room(s, n);
        token_list tokens;
        add_tokens(tokens, s, n, which);
        return tokens;
    }

    void record(llama_context * c, const token_list & tokens) {
        add_logits(out, c, tokens, now);
        for (size_t i = 0; i < tokens.size() && with_embd; ++i) {
            out.add(now + ": embeddings", llama_get_embeddings_ith(c, (int32_t) i), llama_model_n_embd_out(model) * sizeof(float));
        }
    }

    // a batch that must go well
    void feed(const token_list & tokens) {
        const int status = decode(ctx.get(), tokens);
        if (status != 0) {
            throw std::runtime_error(now + ": decode failed with status " + std::to_string(status));
        }
        for (const batch_token & t : tokens) {
            n_past[t.seq] = std::max(n_past[t.seq], t.pos + 1);
        }
        record(ctx.get(), tokens);
    }

    // a sequence that has at least n tokens
    int some_sequence(int n) {
        const int s = draw(n_seq);
        if (n_past[s] < n || n_past[s] + 8 > n_most) {
            remove(s);
            feed(tokens_of(s, n + draw(4), rows::none));
        }
        return s;
    }

    // the calls

    void one() { feed(tokens_of(some_sequence(1), 1)); }

    void step() { // a token for each sequence that is there
        some_sequence(1);
        token_list tokens;
        for (int s = 0; s < n_seq; ++s) {
            if (n_past[s] > 0) {
                make_room(s, 1);
                add_tokens(tokens, s, 1, rows::all);
            }
        }
        feed(tokens);
    }

    void join() { // a prompt beside the tokens of those that are there
        const int joining = draw(n_seq);
        remove(joining);
        token_list tokens;
        for (int s = 0; s < n_seq; ++s) {
            make_room(s, 1);
            if (s == joining) {
                add_tokens(tokens, s, 2 + draw(24), rows::last);
            } else if (n_past[s] > 0) {
                add_tokens(tokens, s, 1, rows::all);
            }
        }
        feed(tokens);
    }

    void prompt() { feed(tokens_of(draw(n_seq), n_ubatch + 1 + draw(3 * n_ubatch))); }
    void last()   { feed(tokens_of(draw(n_seq), 1 + draw(2 * n_ubatch), rows::last)); }

    void leave() {
        remove(some_sequence(1));
        one();
    }

    void cancel() { // after a part of the prompt, of which nobody wanted logits
        const int s = draw(n_seq);
        remove(s);
        feed(tokens_of(s, 1 + draw(2 * n_ubatch), rows::none));
        remove(s);
        step();
    }

    void trim() {
        const int s = some_sequence(6);
        out.add(now, llama_memory_seq_rm(memory(), s, n_past[s] - 3, -1));
        n_past[s] -= 3;
        feed(tokens_of(s, 2));
    }

    void shift() {
        const int s = some_sequence(12);
        out.add(now, llama_memory_seq_rm(memory(), s, 2, 6));
        llama_memory_seq_add(memory(), s, 6, -1, -4);
        n_past[s] -= 4;
        feed(tokens_of(s, 1));
        feed(tokens_of(s, 3));
    }

    void copy() {
        const int from = some_sequence(4);
        const int to   = (from + 1 + draw(n_seq - 1)) % n_seq;
        remove(to);
        llama_memory_seq_cp(memory(), from, to, -1, -1);
        n_past[to] = n_past[from];
        feed(tokens_of(to, 2));
        feed(tokens_of(from, 1));
    }

    void save() { // one sequence; it comes back under another number
        const int from = some_sequence(4);
        const int n    = n_past[from];
        const std::vector<uint8_t> state = seq_state(ctx.get(), from);
        out.add(now + ": state", state);
        feed(tokens_of(from, 3));
        const int to = draw(n_seq);
        remove(to);
        out.add(now + ": restored", llama_state_seq_set_data(ctx.get(), state.data(), state.size(), to));
        n_past[to] = n;
        feed(tokens_of(to, 1));
        feed(tokens_of(to, 4));
    }

    std::vector<uint8_t> whole_state() {
        std::vector<uint8_t> bytes(llama_state_get_size(ctx.get()));
        bytes.resize(llama_state_get_data(ctx.get(), bytes.data(), bytes.size()));
        out.add(now + ": state", bytes);
        return bytes;
    }

    void restore(llama_context * c, const std::vector<uint8_t> & state) {
        out.add(now + ": restored", llama_state_set_data(c, state.data(), state.size()));
    }

    void whole() {
        some_sequence(4);
        const std::vector<uint8_t> state = whole_state();
        int before[n_seq];
        std::copy(n_past, n_past + n_seq, before);
        step();
        prompt();
        restore(ctx.get(), state);
        std::copy(before, before + n_seq, n_past);
        step();
    }

    void fresh() { // the state goes on in a new context, beside which the old one computes once more
        const int s = some_sequence(4);
        const std::vector<uint8_t> state = whole_state();
        context_ptr old = std::move(ctx);
        open_context();
        restore(ctx.get(), state);
        set_loras();
        const token_list tokens = tokens_of(s, 3);
        out.add(now + ": old", decode(old.get(), tokens));
        record(old.get(), tokens);
        feed(tokens);
    }

    void embd() {
        llama_set_embeddings(ctx.get(), true);
        with_embd = true;
        feed(tokens_of(draw(n_seq), 1));
        feed(tokens_of(draw(n_seq), n_ubatch + 3));
        with_embd = false;
        llama_set_embeddings(ctx.get(), false);
        one();
    }

    void both_ways() { // attention over the whole batch, which then must be one ubatch
        llama_set_causal_attn(ctx.get(), false);
        feed(tokens_of(draw(n_seq), n_ubatch));
        llama_set_causal_attn(ctx.get(), true);
        one();
    }

    int64_t count_nodes(const token_list & tokens) {
        stop.disarm();
        feed(tokens);
        return stop.n_nodes;
    }

    // The batch is cut off somewhere between two shares (in 1000) of its nodes; one of the same shape says how many these are.
    void abort_between(int s, int n, int from, int to) {
        remove(s);
        feed(tokens_of(s, 2));
        const int64_t n_nodes = count_nodes(tokens_of(s, n));
        const std::vector<uint8_t> state = seq_state(ctx.get(), s);
        const int before = n_past[s];

        const token_list tokens = tokens_of(s, n);
        stop.arm(std::max<int64_t>(1, n_nodes * (from + draw(to - from)) / 1000), [] { return true; });
        const int status = decode(ctx.get(), tokens);
        stop.disarm();
        if (status != 2) {
            throw std::runtime_error(now + ": the aborted decode returned " + std::to_string(status));
        }
        out.add(now + ": first position", llama_memory_seq_pos_min(memory(), s));
        out.add(now + ": last position",  llama_memory_seq_pos_max(memory(), s));
        if (recurrent) {
            remove(s);
            out.add(now + ": restored", llama_state_seq_set_data(ctx.get(), state.data(), state.size(), s));
        } else {
            out.add(now + ": removed", llama_memory_seq_rm(memory(), s, before, -1));
        }
        n_past[s] = before;
        feed(tokens);
        one();
    }

    void abort() {
        abort_between(draw(n_seq), 1, 0, 950);              // through slots
        abort_between(draw(n_seq), n_ubatch, 0, 950);       // through staging
    }

    void abort_second_ubatch() { abort_between(draw(n_seq), 2 * n_ubatch, 600, 950); }

    int i_loras = 0; // which of the scales below are set
    void set_loras() {
        static const float scales[][2] = { { 0, 0 }, { 1, 0 }, { 0, 0.5f }, { 1, -0.75f }, { 0.25f, 2 } };
        std::vector<llama_adapter_lora *> chosen;
        std::vector<float>                with;
        for (size_t i = 0; i < std::min<size_t>(loras.size(), 2); ++i) {
            if (loras[i] && scales[i_loras][i] != 0) {
                chosen.push_back(loras[i]);
                with.push_back(scales[i_loras][i]);
            }
        }
        if (llama_set_adapters_lora(ctx.get(), chosen.data(), chosen.size(), with.data()) != 0) {
            throw std::runtime_error("cannot set adapters");
        }
    }

    void lora() { // others from here on
        for (int i = 0; i < 3; ++i) {
            i_loras = (i_loras + 1 + draw(4)) % 5;
            set_loras();
            one();
            prompt();
        }
    }
};

enum class order { one_by_one, in_turns, two_threads };
const std::pair<order, const char *> orders[] = {
    { order::one_by_one, "one-by-one" }, { order::in_turns, "in-turns" }, { order::two_threads, "two-threads" },
};

std::vector<outputs> play(const options & o, const loaded & m, order how, std::map<std::string, int> * n_calls = nullptr) {
    std::vector<outputs> out(2);
    const auto play_alone = [&](int i) {
        player p(o, m, i);
        while (p.play_one()) {
        }
        out[i] = std::move(p.out);
        return p.n_calls;
    };
    if (how == order::one_by_one) {
        for (int i = 0; i < 2; ++i) {
            for (const auto & [name, n] : play_alone(i)) {
                if (n_calls) {
                    (*n_calls)[name] += n;
                }
            }
        }
    } else if (how == order::in_turns) {
        player a(o, m, 0);
        player b(o, m, 1);
        bool more = true;
        while (more) {
            more = a.play_one();
            more = b.play_one() || more;
        }
        out[0] = std::move(a.out);
        out[1] = std::move(b.out);
    } else {
        std::exception_ptr errors[2];
        const auto guarded = [&](int i) {
            try {
                play_alone(i);
            } catch (...) {
                errors[i] = std::current_exception();
            }
        };
        std::thread other(guarded, 1);
        guarded(0);
        other.join();
        for (const std::exception_ptr & e : errors) {
            if (e) {
                std::rethrow_exception(e);
            }
        }
    }
    return out;
}

int test(const options & o) {
    std::vector<outputs> expected;
    {
        const loaded reference(o, "");
        std::map<std::string, int> n_calls;
        expected = play(o, reference, order::one_by_one, &n_calls);
        const std::vector<outputs> again = play(o, reference, order::one_by_one);
        printf("calls");
        for (const auto & [name, n] : n_calls) {
            printf(" %s=%d", name.c_str(), n);
        }
        printf("\n");
        for (int i = 0; i < 2; ++i) {
            if (!is_informative(expected[i])) {
                printf("FAIL player %d: the reference's logits are constant or not numbers\n", i);
                return 1;
            }
            const std::string d = difference(expected[i], again[i]);
            if (!d.empty()) {
                printf("FAIL player %d: the reference does not equal itself: %s\n", i, d.c_str());
                return 1;
            }
        }
        for (size_t i = 0; i < o.loras.size(); ++i) {
            const loaded silent(o, "", (int) i);
            if (difference(expected[0], play(o, silent, order::one_by_one)[0]).empty()) {
                printf("FAIL adapter '%s' changes nothing\n", o.loras[i].c_str());
                return 1;
            }
        }
    }

    int n_failed = 0;
    for (const std::string & slots : o.slots) {
        const loaded m(o, resolve_slots(o, slots));
        uint64_t n_evictions_before = 0;
        for (const auto & [how, name] : orders) {
            const std::vector<outputs> actual = play(o, m, how);
            const std::string stats = moe_model_stats_json(m.model.get());
            const uint64_t n_slot      = field(stats, "slots", "n_expert_used");
            const uint64_t n_expert    = field(stats, "n_expert", "n_layer_moe");
            const uint64_t n_evictions = field(stats, "evictions", "totals");
            const uint64_t n_decode    = field(stats, "tokens_decode", "totals");
            const uint64_t n_prefill   = field(stats, "tokens_prefill", "totals");

            std::string verdict = "ok";
            for (int i = 0; i < 2 && verdict == "ok"; ++i) {
                const std::string d = difference(expected[i], actual[i]);
                if (!d.empty()) {
                    verdict = "FAIL: player " + std::to_string(i) + ": " + d;
                }
            }
            if (verdict == "ok" && field(stats, "misses", "totals") == 0) {
                verdict = "FAIL: nothing was streamed";
            } else if (verdict == "ok" && n_slot < n_expert && n_evictions == n_evictions_before) {
                verdict = "FAIL: nothing was evicted";
            } else if (verdict == "ok" && n_slot < n_expert && (n_decode == 0 || n_prefill == 0)) {
                verdict = "FAIL: only one of slots and staging was used";
            }
            n_failed += verdict != "ok";
            printf("%s %s slots=%llu/%llu outputs=%zu bytes=%zu evictions=%llu via_slots=%llu via_staging=%llu\n", verdict.c_str(), name,
                    (unsigned long long) n_slot, (unsigned long long) n_expert, actual[0].all.size() + actual[1].all.size(),
                    actual[0].n_bytes() + actual[1].n_bytes(), (unsigned long long) (n_evictions - n_evictions_before),
                    (unsigned long long) n_decode, (unsigned long long) n_prefill);
            fflush(stdout);
            n_evictions_before = n_evictions;
        }
    }
    return n_failed == 0 ? 0 : 1;
}

} // namespace

int main(int argc, char ** argv) {
    return run_main(argc, argv, test);
}
