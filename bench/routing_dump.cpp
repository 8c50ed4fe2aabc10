// Writes which experts a model really chooses, one line per token and MoE layer, while one sequence is decoded.
//
// usage: routing-dump MODEL OUT.csv N_TOKENS SEED THREADS [N_PARALLEL]
//
// Tokens are drawn evenly from the vocabulary, as llama-bench and llama-batched-bench do, so that the figures belong to the
// same workload. The ids come from the graph's own "ffn_moe_topk" tensors by way of the evaluation callback; the engine under
// test has no part in it. Lines: step,sequence,layer,id,id,...

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

struct dump_state {
    FILE * out  = nullptr;
    int    step = 0;
    std::vector<uint8_t> buf;
};

static bool on_tensor(struct ggml_tensor * t, bool ask, void * user_data) {
    static const char prefix[] = "ffn_moe_topk-";
    if (strncmp(t->name, prefix, sizeof(prefix) - 1) != 0) {
        return !ask; // not asked for; do not stop either
    }
    if (ask) {
        return true;
    }
    auto * st = (dump_state *) user_data;
    const int layer = atoi(t->name + sizeof(prefix) - 1);
    for (int64_t i = 0; i < t->ne[1]; i++) {
        st->buf.resize(t->ne[0]*sizeof(int32_t));
        // the tensor is a view of the whole argsort: its rows are not adjacent
        ggml_backend_tensor_get(t, st->buf.data(), i*t->nb[1], st->buf.size());
        fprintf(st->out, "%d,%d,%d", st->step, (int) i, layer);
        for (int64_t k = 0; k < t->ne[0]; k++) {
            fprintf(st->out, ",%d", ((const int32_t *) st->buf.data())[k]);
        }
        fputc('\n', st->out);
    }
    return true;
}

int main(int argc, char ** argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: %s MODEL OUT.csv N_TOKENS SEED THREADS [N_PARALLEL]\n", argv[0]);
        return 2;
    }
    const int n_tokens   = atoi(argv[3]);
    const int seed       = atoi(argv[4]);
    const int n_threads  = atoi(argv[5]);
    const int n_parallel = argc > 6 ? atoi(argv[6]) : 1;

    llama_log_set([](enum ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();
    ggml_backend_load_all();

    llama_model_params mparams = llama_model_default_params();
    mparams.n_gpu_layers    = 0;
    mparams.use_extra_bufts = false; // weights stay in the mapping: the model may be larger than memory
    llama_model * model = llama_model_load_from_file(argv[1], mparams);
    if (model == nullptr) {
        fprintf(stderr, "cannot load %s\n", argv[1]);
        return 1;
    }

    dump_state st;
    st.out = fopen(argv[2], "w");
    if (st.out == nullptr) {
        perror(argv[2]);
        return 1;
    }

    llama_context_params cparams = llama_context_default_params();
    cparams.n_ctx           = (uint32_t) (n_tokens*n_parallel);
    cparams.n_batch         = (uint32_t) n_parallel;
    cparams.n_ubatch        = (uint32_t) n_parallel;
    cparams.n_seq_max       = (uint32_t) n_parallel;
    cparams.n_threads       = n_threads;
    cparams.n_threads_batch = n_threads;
    cparams.cb_eval           = on_tensor;
    cparams.cb_eval_user_data = &st;
    llama_context * ctx = llama_init_from_model(model, cparams);
    if (ctx == nullptr) {
        fprintf(stderr, "cannot make a context of %d tokens\n", n_tokens*n_parallel);
        return 1;
    }

    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::mt19937 rng((uint32_t) seed);
    llama_batch batch = llama_batch_init(n_parallel, 0, 1);
    for (st.step = 0; st.step < n_tokens; st.step++) {
        batch.n_tokens = n_parallel;
        for (int i = 0; i < n_parallel; i++) {
            batch.token   [i]    = (llama_token) (rng() % (uint32_t) n_vocab);
            batch.pos     [i]    = st.step;
            batch.n_seq_id[i]    = 1;
            batch.seq_id  [i][0] = i;
            batch.logits  [i]    = true; // the last layer skips tokens without an output
        }
        if (llama_decode(ctx, batch) != 0) {
            fprintf(stderr, "decoding failed at token %d\n", st.step);
            return 1;
        }
    }
    const bool written = fclose(st.out) == 0;
    if (!written) {
        perror(argv[2]);
    }
    llama_batch_free(batch);
    llama_free(ctx);
    llama_model_free(model);
    return written ? 0 : 1;
}
