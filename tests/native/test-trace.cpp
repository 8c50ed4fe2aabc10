// The trace as a file, what ends its recording, and replays against a stream that recorded.

#include "check.h"
#include "fake-experts.h"
#include "trace-replay.h"
#include "stream.h"
#include "trace.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>

#include <sys/resource.h>

using namespace moe;
namespace fs = std::filesystem;

namespace {

constexpr uint64_t no_limit = 1 << 30;

class folder {
public:
    folder() {
        std::string name = (fs::temp_directory_path() / "moe-test-trace-XXXXXX").string();
        CHECK(mkdtemp(name.data()) != nullptr);
        path = name;
    }

    ~folder() { fs::remove_all(path); }

    std::string operator/(const std::string & name) const { return (path / name).string(); }

private:
    fs::path path;
};

const trace_header header = { "0123456789abcdef", "qwen3moe", "a \"b\".gguf", 2, { { 1, 4 }, { 3, 300 } } };

const std::string header_json = R"({"model":{"fingerprint":"0123456789abcdef","architecture":"qwen3moe","name":"a \"b\".gguf"},)"
    R"("n_expert_used":2,"layers":[{"layer":1,"n_expert":4},{"layer":3,"n_expert":300}]})";

std::string number(uint64_t n, int n_bytes) {
    std::string out;
    for (int i = 0; i < n_bytes; ++i) {
        out += (char) (n >> (8 * i));
    }
    return out;
}

const std::string beginning = "MOETRACE" + number(1, 4) + number(header_json.size(), 4) + header_json;

std::string read_all(const std::string & path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
}

std::unique_ptr<trace_writer> open_trace(const std::string & path, uint64_t limit = no_limit, bool append = false) {
    std::string error;
    auto out = trace_writer::open(path, header, limit, append, error);
    CHECK_EQ(error, "");
    CHECK(out);
    return out;
}

std::string refusal(const std::string & path, bool append = false, const trace_header & h = header) {
    std::string error;
    CHECK(!trace_writer::open(path, h, no_limit, append, error));
    CHECK_CONTAINS(error, "cannot record a trace in '" + path + "': ");
    CHECK_CONTAINS(error, "; hint: ");
    return error;
}

// tokens 0, 1 … of n_used experts each, from first on
void record(trace_writer & out, int32_t i_layer, int64_t n_used, int64_t n_tokens, int32_t first) {
    out.record(i_layer, n_used, n_tokens, [&](int64_t t, int64_t k) { return first + (int32_t) (t * n_used + k); });
}

trace_contents parse(const std::string & records, const std::vector<trace_layer> & layers) {
    return parse_records((const uint8_t *) records.data(), records.size(), layers);
}

std::string parse_error(const std::string & records) {
    try {
        parse(records, header.layers);
    } catch (const std::runtime_error & e) {
        return e.what();
    }
    return "";
}

} // namespace

TEST(bytes) {
    const folder dir;
    {
        auto out = open_trace(dir / "t");
        record(*out, 0, 2, 2, 0);
        record(*out, 1, 1, 1, 298);
        CHECK_EQ(out->take_notice(), "");
    }
    const std::string records = number(0, 2) + number(2, 2) + number(2, 4) + number(0x03020100, 4)
        + number(1, 2) + number(1, 2) + number(1, 4) + number(298, 2);
    CHECK(read_all(dir / "t") == beginning + records);

    const trace_contents read = parse(records, header.layers);
    CHECK_EQ(read.n_records, 2u);
    CHECK(!read.truncated);
    CHECK((read.layers[0].ids == std::vector<uint16_t> { 0, 1, 2, 3 }));
    CHECK((read.layers[1].ids == std::vector<uint16_t> { 298 }));
}

TEST(records_longer_than_the_buffer) {
    const folder dir;
    std::string expected = beginning;
    {
        auto out = open_trace(dir / "t");
        for (int i = 0; i < 3; ++i) {
            const int64_t n = 150000;
            out->record(1, 1, n, [&](int64_t t, int64_t) { return (int32_t) ((t + i) % 300); });
            expected += number(1, 2) + number(1, 2) + number(n, 4);
            for (int64_t t = 0; t < n; ++t) {
                expected += number((t + i) % 300, 2);
            }
        }
    }
    CHECK(read_all(dir / "t") == expected);
}

TEST(limit) {
    const folder dir;
    const uint64_t limit = beginning.size() + 3 * 10 + 9; // one byte less than four records
    {
        auto out = open_trace(dir / "t", limit);
        for (int i = 0; i < 3; ++i) {
            record(*out, 0, 2, 1, 0);
            CHECK_EQ(out->take_notice(), "");
        }
        record(*out, 0, 2, 1, 0);
        CHECK_EQ(out->take_notice(), "recording the trace '" + dir / "t" + "' has ended: it has reached its limit of "
            + std::to_string(limit) + " bytes (--moe-trace-limit)");
        record(*out, 0, 1, 1, 0); // would fit, but is not the next one any more
        CHECK_EQ(out->take_notice(), "");
        CHECK_EQ(fs::file_size(dir / "t"), beginning.size() + 30);
    }
    CHECK_EQ(fs::file_size(dir / "t"), beginning.size() + 30);
}

// A file that may not grow, as on a full disk. In a child: the limit would stay.
TEST(disk_full) {
    const folder dir;
    fflush(nullptr);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        signal(SIGXFSZ, SIG_IGN);
        auto out = open_trace(dir / "t");
        const rlimit small = { 400000, 400000 };
        CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
        for (int i = 0; i < 60000; ++i) {
            record(*out, 0, 2, 2, 0);
        }
        const std::string notice = out->take_notice();
        CHECK_CONTAINS(notice, "recording the trace '" + dir / "t" + "' has ended: writing failed: File too large");
        CHECK_EQ(out->take_notice(), "");
        record(*out, 0, 2, 2, 0);
        out.reset();
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK_EQ(status, 0);
    const std::string file = read_all(dir / "t");
    CHECK(file.size() > beginning.size() + 100000);
    const trace_contents read = parse(file.substr(beginning.size()), header.layers);
    CHECK(!read.truncated);
    CHECK_EQ(read.n_records * 12, file.size() - beginning.size());
}

TEST(refused_up_front) {
    const folder dir;
    CHECK_CONTAINS(refusal(dir / "no/such/folder"), "No such file or directory");
    CHECK_CONTAINS(refusal(dir / "."), "Is a directory");
    std::ofstream(dir / "model.gguf") << "GGUF and more";
    CHECK_CONTAINS(refusal(dir / "model.gguf"), "holds no trace");
    CHECK_EQ(read_all(dir / "model.gguf"), "GGUF and more");
    CHECK_CONTAINS(refusal("/dev/full"), "No space left on device");

    const auto first = open_trace(dir / "t");
    CHECK_CONTAINS(refusal(dir / "t"), "another model records in it");
}

TEST(begins_anew_or_goes_on) {
    const folder dir;
    record(*open_trace(dir / "t"), 0, 2, 1, 0);
    record(*open_trace(dir / "t", no_limit, true), 0, 2, 1, 2);
    CHECK(read_all(dir / "t") == beginning + number(0, 2) + number(2, 2) + number(1, 4) + number(0x0100, 2)
        + number(0, 2) + number(2, 2) + number(1, 4) + number(0x0302, 2));
    trace_header other = header;
    other.fingerprint[0] = 'f';
    CHECK_CONTAINS(refusal(dir / "t", true, other), "of another model");
    open_trace(dir / "t");
    CHECK(read_all(dir / "t") == beginning);
    open_trace(dir / "new", no_limit, true);
    CHECK(read_all(dir / "new") == beginning);
}

TEST(damaged_records) {
    const std::string good = number(0, 2) + number(2, 2) + number(1, 4) + number(0x0100, 2);
    for (size_t n = 1; n < good.size(); ++n) {
        const trace_contents read = parse(good + good.substr(0, n), header.layers);
        CHECK(read.truncated);
        CHECK_EQ(read.n_records, 1u);
        CHECK_EQ(read.layers[0].ids.size(), 2u);
    }
    CHECK_CONTAINS(parse_error(good + number(2, 2) + good.substr(2)), "record 1 is of layer 2 of 2");
    CHECK_CONTAINS(parse_error(number(0, 2) + number(2, 2) + number(1, 4) + number(0x0400, 2)), "record 0 (layer 1) has expert 4 of 4");
    CHECK_CONTAINS(parse_error(number(0, 2) + number(2, 2) + number(1, 4) + number(0x0101, 2)), "has expert 1 of 4 twice for a token");
    CHECK_CONTAINS(parse_error(number(0, 2) + number(5, 2) + number(1, 4) + number(0, 8)), "1 tokens that use 5 of 4 experts");
    CHECK_CONTAINS(parse_error(number(0, 2) + number(0, 2) + number(1, 4)), "hint: the trace is damaged");
}

// What a stream counts is what the replay of its recording counts, and the optimum needs no more reads than any policy.
TEST(replay_counts_what_the_stream_counts) {
    const folder dir;
    for (const policy_kind kind : all_policies()) {
        for (uint64_t seed = 0; seed < 60; ++seed) {
            set_check_context(std::string(policy_name(kind)) + ", seed " + std::to_string(seed));
            test_random rnd(seed * 7 + (uint64_t) kind);
            std::vector<fake_layer_shape> shapes;
            const int32_t n_used = (int32_t) rnd.between(1, 4);
            const size_t  n_layer = rnd.between(1, 4);
            for (size_t i = 0; i < n_layer; ++i) {
                const int32_t n_expert = (int32_t) rnd.between(n_used + 1, rnd.percent(10) ? 400 : 24);
                shapes.push_back({ n_expert, (int32_t) rnd.between(n_used, std::min(n_expert, 24)), { 16 } });
            }
            fake_experts experts(shapes, seed);
            trace_header h = { "", "", "", n_used, {} };
            for (const layer_desc & d : experts.layers) {
                h.layers.push_back({ d.layer, d.n_expert });
            }
            std::string error;
            auto trace = trace_writer::open(dir / "t", h, no_limit, false, error);
            CHECK(trace);

            stream::options opt;
            opt.policy     = kind;
            opt.staging    = experts.staging.get();
            opt.half_bytes = experts.half_bytes;
            opt.trace      = trace.get();
            stream s(opt, experts.layers, std::make_unique<reader>(std::make_unique<place_source>(experts.contents, 1, seed), 2,
                reader::default_chunk_size, true));
            for (int i = 0; i < 60; ++i) {
                const int64_t n_tokens = rnd.percent(70) ? 1 : rnd.between(1, 9);
                const bool    nonsense = rnd.percent(3);
                s.compute_begin();
                for (int32_t l = 0; l < s.n_layers(); ++l) {
                    const layer_desc & d = experts.layers[l];
                    std::vector<std::vector<int32_t>> batch;
                    for (int64_t t = 0; t < n_tokens; ++t) {
                        std::vector<int32_t> token;
                        while ((int32_t) token.size() < n_used) {
                            const int32_t e = (int32_t) std::min(rnd.below(d.n_expert), rnd.below(d.n_expert)); // some are liked more
                            if (std::find(token.begin(), token.end(), e) == token.end()) {
                                token.push_back(e);
                            }
                        }
                        batch.push_back(token);
                    }
                    if (nonsense) {
                        batch[0][0] = d.n_expert;
                    }
                    const id_layout ids(batch, rnd);
                    std::vector<int32_t> out(n_tokens * n_used);
                    const bool staged = !fits_slots(d.n_expert, d.n_slot, n_used, n_tokens);
                    const bool next_is_staged = l + 1 < s.n_layers() &&
                        !fits_slots(experts.layers[l + 1].n_expert, experts.layers[l + 1].n_slot, n_used, n_tokens);
                    if (staged) {
                        s.begin_staging(l, ids.chosen, out.data(), next_is_staged && rnd.percent(30));
                    } else {
                        s.begin_slots(l, ids.chosen, out.data());
                    }
                    s.wait(l, staged, true);
                    s.settle(l, staged);
                }
                CHECK_EQ(s.compute_end(true).empty(), !nonsense);
            }
            trace.reset();

            const std::string file = read_all(dir / "t");
            const trace_contents read = parse(file.substr(trace_prefix_bytes + h.json().size()), h.layers);
            for (size_t l = 0; l < n_layer; ++l) {
                const replay_counts c = replay(read.layers[l], kind, experts.layers[l].n_slot);
                const layer_stats & counted = *s.stats().layers[l];
                CHECK_EQ(c.hits, counted.hits.load());
                CHECK_EQ(c.misses, counted.misses.load());
                CHECK_EQ(c.evictions, counted.evictions.load());
                if (l == 0) {
                    CHECK_EQ(c.tokens_decode, s.stats().tokens_decode.load());
                    CHECK_EQ(c.tokens_prefill, s.stats().tokens_prefill.load());
                }
                const replay_counts best = replay_optimum(read.layers[l], experts.layers[l].n_slot);
                CHECK_EQ(best.hits + best.misses, c.hits + c.misses);
                CHECK(best.misses <= c.misses);
            }
        }
    }
}

// the fewest misses by trying every victim
static uint64_t fewest_misses(const layer_trace & trace, size_t i, std::vector<int32_t> held, size_t n_slot) {
    if (i == trace.batches.size()) {
        return 0;
    }
    const uint64_t first = trace.batches[i].first_distinct;
    std::vector<int32_t> wanted(trace.distinct.begin() + first, trace.distinct.begin() + first + trace.n_distinct(i));
    const auto is_wanted = [&](int32_t e) { return std::find(wanted.begin(), wanted.end(), e) != wanted.end(); };
    std::vector<int32_t> others;
    for (const int32_t e : held) {
        if (!is_wanted(e)) {
            others.push_back(e);
        }
    }
    const uint64_t n_miss = wanted.size() - (held.size() - others.size());
    const size_t   n_keep = std::min(others.size(), n_slot - wanted.size());
    uint64_t best = UINT64_MAX;
    for (uint32_t kept = 0; kept < 1u << others.size(); ++kept) {
        std::vector<int32_t> next = wanted;
        for (size_t k = 0; k < others.size(); ++k) {
            if (kept >> k & 1) {
                next.push_back(others[k]);
            }
        }
        if (next.size() == wanted.size() + n_keep) {
            best = std::min(best, fewest_misses(trace, i + 1, next, n_slot));
        }
    }
    return n_miss + best;
}

TEST(optimum_is_the_optimum) {
    for (uint64_t seed = 0; seed < 200; ++seed) {
        set_check_context("seed " + std::to_string(seed));
        test_random rnd(seed);
        layer_trace trace = { 0, 6, {}, {}, {} };
        const int32_t n_used = (int32_t) rnd.between(1, 2);
        for (int i = 0; i < 9; ++i) {
            std::vector<uint16_t> ids = { (uint16_t) rnd.below(6) };
            if (n_used == 2) {
                ids.push_back((uint16_t) ((ids[0] + rnd.between(1, 5)) % 6));
            }
            trace.add(n_used, 1, ids);
        }
        const int32_t n_slot = (int32_t) rnd.between(n_used, 4);
        CHECK_EQ(replay_optimum(trace, n_slot).misses, fewest_misses(trace, 0, {}, n_slot));
    }
}

int main(int argc, char ** argv) {
    return run_tests(argc, argv);
}
