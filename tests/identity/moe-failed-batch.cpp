// Shows that after a batch that failed because experts could not be read, the caller gets the right logits again.
//
// The model file is cut off in front of its first expert while a graph computes, so that reads fail really; afterwards its bytes are
// back in place. The file given must be a copy that nobody else uses. llama_decode must return an error, and then each way that a
// program has to go on must give the logits of a model that is not streamed and met no error. (It computed what failed, and forgot it, so
// that its KV cache has everything in the same cells: a card's attention adds up in their order.)
//
//   again    the same batch once more: llama_decode has removed the positions of the failed ubatch. Not where the model has a
//            recurrent state, which upstream cannot set back: it stays as the failed graph left it, as it does when a graph is aborted
//   clear    the sequence removed, its prompt and the batch given again (what llama-server does)
//   restore  the sequence removed, its state set from a copy made before, the batch given again
//
// Sequences that were not in the batch go on without any of this.
//
// First: likewise the first batch of a model just loaded, given again. Models with up to two layers of experts do that alone: halves of
// staging that nobody replaces keep every expert they ever held, so that later there is nothing to read.
//
// Abort-cut: the file is cut off, and the graph is aborted, after each third of its nodes in turn. The next batch must find no error of it.
//
// Abort: a graph is aborted after each of its nodes in turn. The states that it leaves behind must be those of a model that is not
// streamed, one after the other, so that streaming adds nothing to what a caller has to know about llama_set_abort_callback().
//
//   moe-failed-batch -m copy.gguf [--slots used,used+1] [--seed 1] [--threads 1] [--gpu-layers 0] [moe flags: --moe-io direct …]
//
// With layers on a device the file is cut off before the batch only, and nothing is aborted: only the processor's backend asks the callback.
//
// One line per comparison; exit code 0 only if all are equal.

#include "replay.h"

#include "gguf.h"

#include <cerrno>
#include <map>
#include <system_error>
#include <tuple>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

using namespace replay;

namespace {

constexpr int n_ubatch = 8; // a first batch is one
const char * const ways[] = { "again", "clear", "restore" }; // to go on
constexpr int n_prompt = 12;

// the first byte of expert data, from the header of the file
uint64_t first_expert(const std::string & path) {
    gguf_init_params params = { /*.no_alloc =*/ true, /*.ctx =*/ nullptr };
    gguf_context * gguf = gguf_init_from_file(path.c_str(), params);
    if (!gguf) {
        throw std::runtime_error("cannot read '" + path + "'");
    }
    uint64_t first = UINT64_MAX;
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
        if (std::string(gguf_get_tensor_name(gguf, i)).find("_exps.weight") != std::string::npos) {
            first = std::min<uint64_t>(first, gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i));
        }
    }
    gguf_free(gguf);
    return first;
}

// the model's file, which can be cut off and made whole in place
class file {
public:
    explicit file(const std::string & path) : fd(open(path.c_str(), O_RDWR)), cut_at(first_expert(path)) {
        struct stat info;
        if (fd < 0 || fstat(fd, &info) != 0 || (uint64_t) info.st_size <= cut_at) {
            throw std::runtime_error("cannot use '" + path + "'");
        }
        tail.resize(info.st_size - cut_at);
        transfer("reading", [&](size_t done) { return pread(fd, tail.data() + done, tail.size() - done, cut_at + done); });
    }
    ~file() {
        if (is_cut) {
            mend();
        }
        close(fd);
    }
    void cut() {
        if (ftruncate(fd, cut_at) != 0) {
            throw std::system_error(errno, std::generic_category(), "truncating the model");
        }
        is_cut = true;
    }
    void mend() {
        transfer("writing", [&](size_t done) { return pwrite(fd, tail.data() + done, tail.size() - done, cut_at + done); });
        is_cut = false;
    }

private:
    void transfer(const char * what, const std::function<ssize_t(size_t)> & some) {
        for (size_t done = 0; done < tail.size(); ) {
            const ssize_t n = some(done);
            if (n <= 0) {
                throw std::system_error(errno, std::generic_category(), std::string(what) + " the model");
            }
            done += n;
        }
    }

    const int      fd;
    const uint64_t cut_at;
    bool           is_cut = false;
    std::vector<uint8_t> tail;
};

// two sequences with a prompt each, and a batch of the first
struct scene {
    const char * name;
    token_list prompt;
    token_list batch;
    token_list like;  // of the batch's shape, with other tokens
    token_list after; // tokens of the first, one at a time
    token_list other; // tokens of the second, one at a time
};

std::vector<scene> make_scenes(const options & o, const llama_model * model) {
    std::mt19937 rng(o.seed);
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const auto tokens = [&](int n, int pos, int seq) {
        token_list list;
        for (int i = 0; i < n; ++i) {
            list.push_back({ (llama_token) (rng() % n_vocab), pos + i, seq, true });
        }
        return list;
    };
    std::vector<scene> scenes;
    for (const auto & [name, n] : { std::pair("token", 1), std::pair("ubatch", n_ubatch), std::pair("two-ubatches", 2 * n_ubatch) }) {
        scene s;
        s.name   = name;
        s.prompt = tokens(n_prompt, 0, 0);
        const token_list second = tokens(n_prompt, 0, 1);
        s.prompt.insert(s.prompt.end(), second.begin(), second.end());
        s.batch = tokens(n, n_prompt, 0);
        s.like  = tokens(n, n_prompt, 0);
        s.after = tokens(3, n_prompt + n, 0);
        s.other = tokens(3, n_prompt, 1);
        scenes.push_back(s);
    }
    return scenes;
}

class caller {
public:
    outputs out;
    interrupt nodes;

    caller(const options & o, llama_model * model) : recurrent(is_recurrent(model)) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx           = 256;
        params.n_batch         = 64;
        params.n_ubatch        = n_ubatch;
        params.n_seq_max       = 2;
        params.n_threads       = o.n_threads;
        params.n_threads_batch = o.n_threads;
        params.kv_unified      = true;
        ctx = make_context(model, params);
        llama_set_abort_callback(ctx.get(), interrupt::callback, &nodes);
    }

    void feed(const std::string & what, const token_list & tokens) {
        const int status = decode(ctx.get(), tokens);
        if (status != 0) {
            throw std::runtime_error(what + ": decode failed with status " + std::to_string(status));
        }
        add_logits(out, ctx.get(), tokens, what);
    }

    void one_by_one(const std::string & what, const token_list & tokens) {
        for (const batch_token & t : tokens) {
            feed(what, { t });
        }
    }

    // From nothing to behind the prompts; the number of nodes that the batch will have. Its experts are not in memory then, or not all.
    int64_t start(const scene & s) {
        llama_memory_clear(memory(), true);
        for (int seq = 0; seq < 2; ++seq) {
            token_list one;
            std::copy_if(s.prompt.begin(), s.prompt.end(), std::back_inserter(one), [&](const batch_token & t) { return t.seq == seq; });
            feed("prompt", one);
        }
        state = seq_state(ctx.get(), 0);
        nodes.disarm();
        if (decode(ctx.get(), s.like) != 0) {
            throw std::runtime_error("the batch fails by itself");
        }
        const int64_t n = nodes.n_nodes;
        restore();
        return n;
    }

    int interrupted(const token_list & tokens, int64_t at, std::function<bool()> what) {
        nodes.arm(at, std::move(what));
        const int status = decode(ctx.get(), tokens);
        nodes.disarm();
        return status;
    }

    void restore() {
        remove();
        if (llama_state_seq_set_data(ctx.get(), state.data(), state.size(), 0) == 0) {
            throw std::runtime_error("cannot restore the state");
        }
    }

    void remove() {
        if (!llama_memory_seq_rm(memory(), 0, -1, -1)) {
            throw std::runtime_error("cannot remove the sequence");
        }
    }

    llama_pos last_position() { return llama_memory_seq_pos_max(memory(), 0); }
    std::vector<uint8_t> state_now() { return seq_state(ctx.get(), 0); }
    llama_memory_t memory() { return llama_get_memory(ctx.get()); }
    const bool recurrent;

private:
    context_ptr ctx;
    std::vector<uint8_t> state; // of the first sequence, behind its prompt
};

// the logits after the error: what the second sequence goes on with, then the batch and what follows it
void go_on(caller & c, const scene & s, const std::string & way) {
    c.out = {};
    c.one_by_one("other", s.other);
    if (way == "clear") {
        c.remove();
        token_list prompt = s.prompt;
        prompt.resize(n_prompt);
        c.feed("prompt again", prompt);
        c.out.all.resize(s.other.size()); // compared where it was given first
    } else if (way == "restore") {
        c.restore();
    } else {
        const size_t n_done = c.last_position() + 1 - n_prompt; // of the first ubatch, which went well
        if (n_done > 0) {
            llama_memory_seq_rm(c.memory(), 0, n_prompt, -1);
        }
    }
    c.feed("batch", s.batch);
    c.one_by_one("after", s.after);
}

// what a batch leaves behind that failed after n_done tokens, without the failure
void forget(caller & c, const scene & s, size_t n_done) {
    if (c.recurrent) {
        return; // whose state knows no way back; what it then is nobody compares
    }
    const size_t n = std::min(n_done + n_ubatch, s.batch.size());
    c.feed("forgotten", { s.batch.begin(), s.batch.begin() + n });
    if (!llama_memory_seq_rm(c.memory(), 0, n_prompt + (llama_pos) n_done, -1)) {
        throw std::runtime_error("cannot remove what is to be forgotten");
    }
}

// each state that an abort of the batch leaves behind, once, in order of the node; and the last positions beside them
outputs states_of_aborts(caller & c, const scene & s) {
    outputs states;
    const int64_t n_nodes = c.start(s);
    for (int64_t at = 1; at < n_nodes; ++at) {
        const int status = c.interrupted(s.batch, at, [] { return true; });
        if (status != 2) {
            throw std::runtime_error("the aborted decode returned " + std::to_string(status));
        }
        const std::vector<uint8_t> now = c.state_now();
        if (states.all.empty() || states.all.back().bytes != now) {
            states.add("position", c.last_position());
            states.add("state", now);
        }
        c.restore();
    }
    return states;
}

// the first batch: a part of the first prompt
token_list first_of(const scene & s) {
    return { s.prompt.begin(), s.prompt.begin() + n_ubatch };
}

// what is wrong, or "". The file is cut off after that many nodes.
std::string fail_first(const options & o, const std::string & slots, file & f, const scene & s, const outputs & expected, int64_t at) {
    const model_ptr model = load(o, slots);
    caller c(o, model.get());
    if (at == 0) {
        f.cut();
    }
    const int status = c.interrupted(first_of(s), at, [&] {
        f.cut();
        return false;
    });
    f.mend();
    if (status != -3) {
        return "decode returned " + std::to_string(status);
    }
    if (c.recurrent) {
        c.remove();
    }
    c.feed("first", first_of(s));
    return difference(expected, c.out);
}

// what is wrong, or "". Reads fail while the graph is aborted; the same batch is then as ever.
std::string abort_cut(caller & c, file & f, const scene & s, const outputs & expected, int & n_failed_reads) {
    const int64_t n_nodes = c.start(s);
    for (int64_t at = 1; at < n_nodes; at += 3) {
        f.cut();
        const int status = c.interrupted(s.batch, at, [] { return true; });
        f.mend();
        if (status != 2 && status != -3) { // -3: a read failed before
            return "the aborted decode returned " + std::to_string(status);
        }
        n_failed_reads += status == -3;
        c.restore();
        c.out = {};
        c.feed("batch", s.batch);
        for (size_t i = 0; i < s.batch.size(); ++i) {
            if (c.out.all[i].bytes != expected.all[s.other.size() + i].bytes) {
                return "logits differ after an abort behind node " + std::to_string(at);
            }
        }
        c.restore();
        c.feed("like", s.like); // so that other experts are in memory
        c.restore();
    }
    return "";
}

int test(const options & o) {
    file model_file(o.model);
    std::vector<scene>   scenes;
    std::vector<outputs> expected; // when nothing failed
    std::map<std::tuple<size_t, std::string, size_t>, outputs> expected_after; // by scene, way to go on, and tokens that went well
    std::vector<outputs> expected_states;
    outputs              expected_first;
    int64_t              n_nodes_first;
    const bool           on_device = o.n_gpu_layers > 0;
    {
        const model_ptr reference = load(o, "");
        scenes = make_scenes(o, reference.get());
        for (const scene & s : scenes) {
            caller c(o, reference.get());
            c.start(s);
            go_on(c, s, "restore");
            if (!is_informative(c.out)) {
                printf("FAIL %s: the reference's logits are constant or not numbers\n", s.name);
                return 1;
            }
            for (const char * way : ways) {
                for (size_t n_done = 0; n_done < s.batch.size(); n_done += n_ubatch) {
                    caller forgetful(o, reference.get());
                    forgetful.start(s);
                    forget(forgetful, s, n_done);
                    go_on(forgetful, s, way);
                    expected_after[{ expected.size(), way, n_done }] = forgetful.out;
                }
            }
            expected.push_back(c.out);
            if (s.batch.size() <= n_ubatch && !on_device) {
                expected_states.push_back(states_of_aborts(c, s));
            }
        }
        caller c(o, reference.get());
        c.nodes.disarm();
        c.feed("first", first_of(scenes[0]));
        expected_first = c.out;
        n_nodes_first  = c.nodes.n_nodes;
    }

    int n_failed = 0;
    const auto report = [&](const std::string & problem, const std::string & what) {
        n_failed += !problem.empty();
        printf("%s %s\n", problem.empty() ? "ok" : ("FAIL: " + problem).c_str(), what.c_str());
        fflush(stdout);
    };
    for (const std::string & asked : o.slots) {
        const std::string slots = resolve_slots(o, asked);
        for (const int percent : on_device ? std::vector<int>{ 0 } : std::vector<int>{ 0, 30 }) {
            report(fail_first(o, slots, model_file, scenes[0], expected_first, n_nodes_first * percent / 100),
                    "first slots=" + asked + " cut_at=" + std::to_string(percent) + "%");
        }

        const model_ptr model = load(o, slots);
        caller c(o, model.get());
        if (field(moe_model_stats_json(model.get()), "n_layer_moe", "streaming") <= 2) {
            continue;
        }
        for (size_t i = 0; i < scenes.size(); ++i) {
            const scene & s = scenes[i];
            for (const char * way : ways) {
                if (c.recurrent && std::string(way) == "again") {
                    continue;
                }
                for (const int percent : on_device ? std::vector<int>{ 0 } : std::vector<int>{ 0, 20, 60 }) { // of the graph's nodes, when the file is cut off
                    const int64_t n_nodes = c.start(s);
                    const auto counted = [&](const char * name) { return field(moe_model_stats_json(model.get()), name, "totals"); };
                    const uint64_t n_errors = counted("read_errors");
                    uint64_t n_misses = counted("misses"); // when the file is cut off
                    if (percent == 0) {
                        model_file.cut();
                    }
                    const int status = c.interrupted(s.batch, n_nodes * percent / 100, [&] {
                        model_file.cut();
                        n_misses = counted("misses");
                        return false;
                    });
                    const llama_pos position = c.last_position();
                    model_file.mend();

                    std::string problem;
                    if (status != -3) {
                        problem = counted("misses") == n_misses ? "every expert was in memory, nothing could fail (another --seed?)" :
                            "decode returned " + std::to_string(status);
                    } else if (counted("read_errors") == n_errors) {
                        problem = "no read failed";
                    } else {
                        const size_t n_done = c.recurrent ? 0 : position + 1 - n_prompt;
                        go_on(c, s, way);
                        problem = difference(expected_after.at({ i, way, n_done }), c.out);
                    }
                    report(problem, std::string(s.name) + " " + way + " slots=" + asked + " cut_at=" + std::to_string(percent) +
                            "% last_position=" + std::to_string(position));
                }
            }
            if (i < expected_states.size()) {
                const outputs states = states_of_aborts(c, s);
                report(difference(expected_states[i], states),
                        std::string(s.name) + " abort slots=" + asked + " states=" + std::to_string(states.all.size() / 2));
                int n_failed_reads = 0;
                const std::string problem = abort_cut(c, model_file, s, expected[i], n_failed_reads);
                report(problem, std::string(s.name) + " abort-cut slots=" + asked + " failed_reads=" + std::to_string(n_failed_reads));
            }
        }
    }
    return n_failed == 0 ? 0 : 1;
}

} // namespace

int main(int argc, char ** argv) {
    return run_main(argc, argv, test);
}
