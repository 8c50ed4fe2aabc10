// Proves, for one model, that streamed logits are the bits of unstreamed ones.
//
// Every logit of every token is compared with memcmp, for each ubatch size T and number of slots asked for. The reference (the same
// program, threads and ubatch, streaming off) is first shown equal to itself. Where slots are scarce, the run must have evicted,
// and reads must have gone through the path that T asks for; else the comparison proves nothing and the run fails.
//
//   moe-identity -m model.gguf [--slots used,used+1,all] [--ubatch 1,2,9] [--tokens 48] [--sequences 1] [--threads 2] [--seed 1]
//                [--load-mode mmap|none|dio] [--embeddings] [--repack] [--gpu-layers 0] [moe flags: --moe-io direct …]
//
// --embeddings compares what models give that have no logits. With --repack both sides use the kernels that stock prefers, without it
// plain ones. With --gpu-layers both sides have as many layers on the devices, and some slots must be there. Tokens are dealt to the sequences in turn, so that a batch of T has tokens of up to T sequences.
//
// One line per comparison; exit code 0 only if all are equal.

#include "llama.h"
#include "moe-api.h"
#include "replay.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using replay::context_ptr;
using replay::field;
using replay::model_ptr;
using replay::split;

struct options {
    std::string model;
    std::vector<std::string> slots   = { "used", "used+1", "all" };
    std::vector<int>         ubatch  = { 1, 2, 9 };
    int         n_tokens  = 48;
    int         n_threads = 2;
    int         n_seq     = 1;
    int         n_gpu_layers = 0;
    uint32_t    seed      = 1;
    bool        embeddings = false;
    bool        repack     = false;
    llama_load_mode load_mode = LLAMA_LOAD_MODE_AUTO;
    std::vector<llama_model_kv_override> moe;
};

options parse(int argc, char ** argv) {
    options o;
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        if (moe_parse_flag(argc, argv, i, o.moe)) {
            continue;
        }
        if (arg == "--embeddings" || arg == "--repack") {
            (arg == "--repack" ? o.repack : o.embeddings) = true;
            continue;
        }
        if (i + 1 >= argc) {
            throw std::invalid_argument("argument '" + arg + "' is unknown or needs a value");
        }
        const std::string value = argv[++i];
        if      (arg == "-m")        { o.model = value; }
        else if (arg == "--slots")   { o.slots = split(value); }
        else if (arg == "--ubatch")  { o.ubatch.clear(); for (const auto & t : split(value)) { o.ubatch.push_back(std::stoi(t)); } }
        else if (arg == "--tokens")  { o.n_tokens = std::stoi(value); }
        else if (arg == "--sequences") { o.n_seq = std::stoi(value); }
        else if (arg == "--threads") { o.n_threads = std::stoi(value); }
        else if (arg == "--gpu-layers") { o.n_gpu_layers = std::stoi(value); }
        else if (arg == "--seed")    { o.seed = std::stoul(value); }
        else if (arg == "--load-mode") { o.load_mode = llama_load_mode_from_str(value.c_str()); }
        else { throw std::invalid_argument("unknown argument '" + arg + "'"); }
    }
    if (o.model.empty()) {
        throw std::invalid_argument("no model given (-m)");
    }
    return o;
}

model_ptr load(const options & o, const std::string & slots) {
    std::vector<llama_model_kv_override> overrides;
    if (!slots.empty()) { // the other flags are refused where nothing is streamed
        overrides = o.moe;
        moe_flags()[0].apply(overrides, slots);
    }
    llama_model_params params = llama_model_default_params();
    params.use_extra_bufts = o.repack;
    params.n_gpu_layers    = o.n_gpu_layers;
    params.load_mode       = o.load_mode;
    params.kv_overrides    = moe_overrides_data(overrides);
    model_ptr model(llama_model_load_from_file(o.model.c_str(), params));
    if (!model) {
        throw std::runtime_error("cannot load '" + o.model + "' with slots '" + slots + "'");
    }
    return model;
}

// values that a model gives for a token
size_t row_size(const options & o, const llama_model * model) {
    return o.embeddings ? llama_model_n_embd(model) : llama_vocab_n_tokens(llama_model_get_vocab(model));
}

// logits (or embeddings) of all tokens: [n_tokens][row_size]
std::vector<float> run(const options & o, llama_model * model, const std::vector<llama_token> & tokens, int n_ubatch) {
    // where attention goes both ways a batch is one ubatch; each is then a text of its own
    const size_t n_batch = llama_model_is_diffusion(model) || o.embeddings ? (size_t) n_ubatch : tokens.size();

    llama_context_params params = llama_context_default_params();
    params.n_ctx           = tokens.size() + 64;
    params.n_batch         = n_batch;
    params.n_ubatch        = n_ubatch;
    params.n_threads       = o.n_threads;
    params.n_threads_batch = o.n_threads;
    params.n_seq_max       = o.n_seq;
    params.kv_unified      = true;
    params.op_offload      = o.n_gpu_layers == 0; // what is on the processor stays there while experts are streamed
    params.embeddings      = o.embeddings;
    params.pooling_type    = o.embeddings ? LLAMA_POOLING_TYPE_NONE : LLAMA_POOLING_TYPE_UNSPECIFIED;
    context_ptr ctx(llama_init_from_model(model, params));
    if (!ctx) {
        throw std::runtime_error("cannot create a context");
    }
    const size_t n_row = row_size(o, model);
    std::vector<float> logits(tokens.size() * n_row);

    llama_batch batch = llama_batch_init(n_batch, 0, 1);
    int status = 0;
    for (size_t first = 0; first < tokens.size() && status == 0; first += n_batch) {
        batch.n_tokens = std::min(n_batch, tokens.size() - first);
        for (int32_t i = 0; i < batch.n_tokens; ++i) {
            batch.token[i]     = tokens[first + i];
            batch.pos[i]       = i / o.n_seq;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = i % o.n_seq;
            batch.logits[i]    = 1;
        }
        status = llama_decode(ctx.get(), batch);
        for (int32_t i = 0; i < batch.n_tokens && status == 0; ++i) {
            const float * row = o.embeddings ? llama_get_embeddings_ith(ctx.get(), i) : llama_get_logits_ith(ctx.get(), i);
            memcpy(logits.data() + (first + i) * n_row, row, n_row * sizeof(float));
        }
        if (auto * memory = llama_get_memory(ctx.get()); memory && n_batch < tokens.size()) {
            llama_memory_clear(memory, true);
        }
    }
    llama_batch_free(batch);
    if (status != 0) {
        throw std::runtime_error("decode failed with status " + std::to_string(status));
    }
    return logits;
}

// all slots of all layers; the engine reports it once there is a context
uint64_t pool_bytes(const llama_model * model) {
    return field(moe_model_stats_json(model), "pool_bytes");
}

bool same(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

size_t first_difference(const std::vector<float> & a, const std::vector<float> & b) {
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
        if (memcmp(&a[i], &b[i], sizeof(float)) != 0) {
            return i;
        }
    }
    return std::min(a.size(), b.size());
}

// the same value everywhere would be equal in any engine
bool is_informative(const std::vector<float> & logits) {
    return std::all_of(logits.begin(), logits.end(), [](float x) { return x == x; }) &&
        std::any_of(logits.begin(), logits.end(), [&](float x) { return x != logits[0]; });
}

int test(const options & o) {
    const model_ptr reference = load(o, "");
    const size_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(reference.get()));
    const size_t n_row   = row_size(o, reference.get());

    std::mt19937 rng(o.seed);
    std::vector<llama_token> tokens(o.n_tokens);
    for (auto & t : tokens) {
        t = rng() % n_vocab;
    }

    std::vector<std::vector<float>> expected;
    for (const int t : o.ubatch) {
        expected.push_back(run(o, reference.get(), tokens, t));
        if (!is_informative(expected.back())) {
            printf("FAIL T=%d: the reference's logits are constant or not numbers\n", t);
            return 1;
        }
        if (!same(expected.back(), run(o, reference.get(), tokens, t))) {
            printf("FAIL T=%d: the reference does not equal itself\n", t);
            return 1;
        }
    }

    int n_failed = 0;
    for (const std::string & slots : o.slots) {
        std::string asked = slots;
        if (slots.rfind("used", 0) == 0) {
            const model_ptr probe = load(o, "all");
            const context_ptr ctx(llama_init_from_model(probe.get(), llama_context_default_params()));
            const uint64_t n_used = field(moe_model_stats_json(probe.get()), "n_expert_used");
            asked = std::to_string(n_used + (slots == "used" ? 0 : std::stoi(slots.substr(5))));
        }
        for (size_t i = 0; i < o.ubatch.size(); ++i) {
            const int t = o.ubatch[i];
            const model_ptr model = load(o, asked); // afresh: slots start empty
            const auto actual = run(o, model.get(), tokens, t);
            const std::string stats = moe_model_stats_json(model.get());

            const uint64_t n_slot      = field(stats, "slots");
            const uint64_t n_expert    = field(stats, "n_expert");
            const uint64_t n_evictions = field(stats, "evictions", "totals");
            const uint64_t n_miss      = field(stats, "misses", "totals");
            const uint64_t n_decode    = field(stats, "tokens_decode", "totals");
            const uint64_t n_prefill   = field(stats, "tokens_prefill", "totals");

            std::string verdict = "ok";
            if (!same(expected[i], actual)) {
                const size_t d = first_difference(expected[i], actual);
                verdict = "FAIL: token " + std::to_string(d / n_row) + ", value " + std::to_string(d % n_row) + " differs";
            } else if (stats.find("\"in_force\":\"resident\"") != std::string::npos) {
                verdict = n_miss + n_decode + n_prefill == 0 ? "ok" : "FAIL: all experts were there, and some were streamed";
            } else if (n_miss == 0 || n_decode + n_prefill == 0) {
                verdict = "FAIL: nothing was streamed";
            } else if (n_slot < n_expert && n_evictions == 0 && (n_prefill == 0 || stats.find("\"in_force\":\"mailbox\"") == std::string::npos)) {
                // what goes through staging leaves slots alone that a device looks after
                verdict = "FAIL: nothing was evicted";
            } else if (o.n_gpu_layers > 0 && stats.find("\"placement\":\"cpu\"") != std::string::npos) {
                verdict = "FAIL: all slots are in the memory of the processor";
            }
            n_failed += verdict != "ok";
            printf("%s T=%d slots=%llu/%llu pool_bytes=%llu evictions=%llu misses=%llu hits=%llu via_slots=%llu via_staging=%llu ram_hits=%llu guess_hits=%llu\n",
                    verdict.c_str(), t,
                    (unsigned long long) n_slot, (unsigned long long) n_expert,
                    (unsigned long long) pool_bytes(model.get()), (unsigned long long) n_evictions,
                    (unsigned long long) n_miss, (unsigned long long) field(stats, "hits", "totals"),
                    (unsigned long long) n_decode, (unsigned long long) n_prefill, (unsigned long long) field(stats, "ram_hits", "totals"),
                    (unsigned long long) field(stats, "guess_hits", "totals"));
            fflush(stdout);
        }
    }
    return n_failed == 0 ? 0 : 1;
}

} // namespace

int main(int argc, char ** argv) {
    try {
        const options o = parse(argc, argv);
        llama_log_set([](ggml_log_level level, const char * text, void *) {
            if (level >= GGML_LOG_LEVEL_ERROR && level != GGML_LOG_LEVEL_CONT) {
                fputs(text, stderr);
            }
        }, nullptr);
        llama_backend_init();
        return test(o);
    } catch (const std::exception & e) {
        fprintf(stderr, "error: %s\n", e.what());
        return 2;
    }
}
