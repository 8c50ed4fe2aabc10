// Shows that a context of a model's MTP head (which predicts the token after next) gives the same bits streamed and not, beside the
// context of the model proper, and so does that one.
//
// Both take turns as in speculative decoding: the model computes tokens and hands the head its hidden states; the head drafts some
// tokens; the model computes these at once, and keeps a part of them. The layers of the head have experts, slots and statistics of
// their own. Where slots are scarce, experts of the head must have been evicted.
//
//   moe-mtp -m model.gguf [--slots used,used+1,all] [--steps 40] [--seed 1] [--threads 1] [moe flags: --moe-io direct …]
//
// One line per comparison; exit code 0 only if all are equal.

#include "replay.h"

#include "llama-ext.h"

using namespace replay;

namespace {

constexpr int n_seq    = 2;
constexpr int n_ubatch = 8;
constexpr int n_draft  = 3;
constexpr int n_most   = 100; // tokens of a sequence

struct batch_free { void operator()(llama_batch_ext * b) const { llama_batch_ext_free(b); } };

size_t best(const float * logits, size_t n) {
    return std::max_element(logits, logits + n) - logits;
}

class pair_of_contexts {
public:
    outputs out;

    pair_of_contexts(const options & o, llama_model * model) : rng(o.seed) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx           = 512;
        params.n_batch         = 64;
        params.n_ubatch        = n_ubatch;
        params.n_seq_max       = n_seq;
        params.n_threads       = o.n_threads;
        params.n_threads_batch = o.n_threads;
        params.kv_unified      = true;
        params.n_rs_seq        = n_draft; // so that a recurrent state can go back by what was drafted
        proper = make_context(model, params);
        params.ctx_type  = LLAMA_CONTEXT_TYPE_MTP;
        params.n_rs_seq  = 0;
        params.ctx_other = proper.get();
        head = make_context(model, params);
        llama_set_embeddings_nextn(proper.get(), true, /*masked =*/ false);
        llama_set_embeddings_nextn(head.get(),   true, /*masked =*/ true);
        head_batch.reset(llama_batch_ext_init(head.get()));
        n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        n_embd  = llama_model_n_embd_out(model);
        for (auto & h : pending) {
            h.assign(n_embd, 0.0f);
        }
    }

    void step() {
        const int s = draw(n_seq);
        if (n_past[s] + 3 * n_ubatch + n_draft + 1 > n_most) {
            forget(s);
        }
        static const int sizes[] = { 1, 1, n_ubatch - 3, n_ubatch + 5, 2 * n_ubatch };
        std::vector<llama_token> tokens(sizes[draw(5)]);
        for (llama_token & t : tokens) {
            t = draw(n_vocab);
        }
        take(s, tokens, tokens.size());

        // what the head would have next, and a part of it kept
        std::vector<llama_token> drafted = { (llama_token) best(llama_get_logits_ith(proper.get(), (int32_t) tokens.size() - 1), n_vocab) };
        std::vector<float> h = pending[s];
        for (int i = 0; i < n_draft; ++i) {
            feed_head(s, n_past[s] + i, { drafted.back() }, h.data(), true);
            const float * logits = llama_get_logits_ith(head.get(), 0);
            const float * state  = llama_get_embeddings_nextn_ith(head.get(), 0);
            out.add("draft: logits", logits, n_vocab * sizeof(float));
            out.add("draft: hidden state", state, n_embd * sizeof(float));
            drafted.push_back((llama_token) best(logits, n_vocab));
            h.assign(state, state + n_embd);
        }
        remove(head.get(), s, n_past[s]);
        take(s, drafted, 1 + draw(n_draft + 1));
    }

private:
    context_ptr proper;
    context_ptr head; // computes with the memory of the model proper beside it
    std::unique_ptr<llama_batch_ext, batch_free> head_batch;
    std::mt19937 rng;
    int n_vocab;
    int n_embd;
    int n_past[n_seq] = {};
    std::vector<float> pending[n_seq]; // the hidden state behind the last token

    int draw(int n) { return (int) (rng() % n); }

    void remove(llama_context * ctx, int s, int from) {
        if (!llama_memory_seq_rm(llama_get_memory(ctx), s, from, -1)) {
            throw std::runtime_error("cannot remove tokens");
        }
    }

    void forget(int s) {
        remove(proper.get(), s, -1);
        remove(head.get(), s, -1);
        n_past[s] = 0;
        pending[s].assign(n_embd, 0.0f);
    }

    // each token with the hidden state behind the one before it: states[i * n_embd]
    void feed_head(int s, int pos, const std::vector<llama_token> & tokens, const float * states, bool wanted) {
        llama_batch_ext * b = head_batch.get();
        llama_batch_ext_clear(b);
        for (size_t i = 0; i < tokens.size(); ++i) {
            const llama_pos at = pos + (llama_pos) i;
            const int32_t   k  = llama_batch_ext_add_token(b, s, tokens[i]);
            if (k < 0 || !llama_batch_ext_set_pos(b, k, &at) || !llama_batch_ext_set_embd_token(b, k, { states + i * n_embd, 1, (size_t) n_embd })) {
                throw std::runtime_error("cannot make the head's batch");
            }
            llama_batch_ext_set_output_logits(b, k, wanted);
        }
        const int status = llama_process(head.get(), LLAMA_PROCESS_TYPE_DECODE, b);
        if (status != 0) {
            throw std::runtime_error("the head's decode failed with status " + std::to_string(status));
        }
    }

    // tokens through both; n_kept of them stay
    void take(int s, const std::vector<llama_token> & tokens, size_t n_kept) {
        token_list list;
        for (size_t i = 0; i < tokens.size(); ++i) {
            list.push_back({ tokens[i], n_past[s] + (llama_pos) i, s, true });
        }
        const int status = decode(proper.get(), list);
        if (status != 0) {
            throw std::runtime_error("decode failed with status " + std::to_string(status));
        }
        add_logits(out, proper.get(), list, "model");
        std::vector<float> states = pending[s];
        for (size_t i = 0; i < tokens.size(); ++i) {
            const float * h = llama_get_embeddings_nextn_ith(proper.get(), (int32_t) i);
            out.add("model: hidden state", h, n_embd * sizeof(float));
            states.insert(states.end(), h, h + n_embd);
        }
        feed_head(s, n_past[s], tokens, states.data(), false);
        pending[s].assign(states.begin() + n_kept * n_embd, states.begin() + (n_kept + 1) * n_embd);
        n_past[s] += (int) n_kept;
        if (n_kept < tokens.size()) {
            remove(proper.get(), s, n_past[s]);
            remove(head.get(),   s, n_past[s]);
        }
    }
};

outputs play(const options & o, llama_model * model) {
    pair_of_contexts p(o, model);
    for (int i = 0; i < o.n_steps; ++i) {
        p.step();
    }
    return p.out;
}

int test(const options & o) {
    outputs expected;
    {
        const model_ptr reference = load(o, "");
        expected = play(o, reference.get());
        const std::string d = difference(expected, play(o, reference.get()));
        if (!d.empty() || !is_informative(expected)) {
            printf("FAIL the reference %s\n", d.empty() ? "has constant logits or such as are not numbers" : ("does not equal itself: " + d).c_str());
            return 1;
        }
    }
    int n_failed = 0;
    for (const std::string & slots : o.slots) {
        const model_ptr model = load(o, resolve_slots(o, slots));
        const outputs actual = play(o, model.get());
        const std::string stats = moe_model_stats_json(model.get());
        const uint64_t n_slot   = field(stats, "slots", "n_expert_used");
        const uint64_t n_expert = field(stats, "n_expert", "n_layer_moe");

        // the head's layer is the last one
        const std::string last = stats.substr(stats.rfind("{\"layer\":"));
        const uint64_t i_layer     = field(last, "layer", "layer");
        const uint64_t n_misses    = field(last, "misses", "layer");
        const uint64_t n_evictions = field(last, "evictions", "layer");
        const bool was_read_at_load = stats.find("\"in_force\":\"resident\"") != std::string::npos; // slots for all, on a card

        std::string verdict = "ok";
        if (const std::string d = difference(expected, actual); !d.empty()) {
            verdict = "FAIL: " + d;
        } else if (n_misses == 0 && !was_read_at_load) {
            verdict = "FAIL: nothing of the head was streamed";
        } else if (n_slot < n_expert && n_evictions == 0) {
            verdict = "FAIL: nothing of the head was evicted";
        }
        n_failed += verdict != "ok";
        printf("%s slots=%llu/%llu outputs=%zu bytes=%zu last_layer=%llu misses=%llu evictions=%llu\n", verdict.c_str(),
                (unsigned long long) n_slot, (unsigned long long) n_expert, actual.all.size(), actual.n_bytes(),
                (unsigned long long) i_layer, (unsigned long long) n_misses, (unsigned long long) n_evictions);
        fflush(stdout);
    }
    return n_failed == 0 ? 0 : 1;
}

} // namespace

int main(int argc, char ** argv) {
    return run_main(argc, argv, test, /*load_mtp =*/ true);
}
