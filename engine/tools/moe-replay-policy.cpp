// What the slots would have done with a recorded trace, for each policy and number of slots asked for; JSON on stdout.
// docs/traces.md describes the trace and the answer.

#include "json-writer.h"
#include "trace-replay.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>

static const char * usage =
    "usage: moe-replay-policy TRACE [--slots N,...] [--layer-slots LAYER=N,...] [--policy NAME,...]\n"
    "\n"
    "  --slots N,...            slots in every layer; as many as it has experts in one that has fewer\n"
    "  --layer-slots LAYER=N,...  one more choice: slots of each layer, by block number\n"
    "  --policy NAME,...        of the engine's policies, or opt, the fewest misses there can be (default: all)\n"
    "  --threads N              layers replayed at a time (default: one a processor)\n";

[[noreturn]] static void fail(const std::string & what) {
    throw std::runtime_error(what);
}

static std::vector<uint8_t> read_file(const std::string & path) {
    std::unique_ptr<FILE, int (*)(FILE *)> f(fopen(path.c_str(), "rb"), fclose);
    if (!f) {
        fail("cannot open '" + path + "': " + strerror(errno) + "; hint: check the path");
    }
    std::vector<uint8_t> data;
    for (;;) {
        const size_t n = data.size();
        data.resize(n + (1 << 20));
        const size_t got = fread(data.data() + n, 1, data.size() - n, f.get());
        data.resize(n + got);
        if (got == 0) {
            break;
        }
    }
    if (ferror(f.get())) {
        fail("cannot read '" + path + "': " + strerror(errno) + "; hint: is it a file?");
    }
    return data;
}

static uint32_t u32(const uint8_t * p) {
    return p[0] | (uint32_t) p[1] << 8 | (uint32_t) p[2] << 16 | (uint32_t) p[3] << 24;
}

// the header, and where the records begin
static moe::trace_header parse_header(const std::vector<uint8_t> & data, uint64_t & pos) {
    if (data.size() < moe::trace_prefix_bytes || memcmp(data.data(), moe::trace_magic, 8) != 0) {
        fail("no trace: it does not begin with MOETRACE; hint: record one: moestream trace record");
    }
    if (u32(data.data() + 8) != moe::trace_version) {
        fail("version " + std::to_string(u32(data.data() + 8)) + " of the format: expected " + std::to_string(moe::trace_version)
            + "; hint: record it again");
    }
    const uint64_t size = u32(data.data() + 12);
    if (size > data.size() - moe::trace_prefix_bytes) {
        fail("the header has " + std::to_string(size) + " bytes, the file " + std::to_string(data.size() - moe::trace_prefix_bytes)
            + " behind its length; hint: record it again");
    }
    pos = moe::trace_prefix_bytes + size;
    moe::trace_header h;
    try {
        const auto json  = nlohmann::json::parse(data.begin() + moe::trace_prefix_bytes, data.begin() + pos);
        const auto & model = json.at("model");
        h.fingerprint   = model.at("fingerprint").get<std::string>();
        h.architecture  = model.at("architecture").get<std::string>();
        h.name          = model.at("name").get<std::string>();
        h.n_expert_used = json.at("n_expert_used").get<int32_t>();
        for (const auto & l : json.at("layers")) {
            h.layers.push_back({ l.at("layer").get<int32_t>(), l.at("n_expert").get<int32_t>() });
        }
    } catch (const nlohmann::json::exception & e) {
        fail(std::string("the header is damaged: ") + e.what() + "; hint: record it again");
    }
    if (h.layers.empty()) {
        fail("the header names no layers; hint: record it again");
    }
    for (const moe::trace_layer & l : h.layers) {
        if (l.n_expert < 1 || l.n_expert > 65536) {
            fail("the header says that layer " + std::to_string(l.layer) + " has " + std::to_string(l.n_expert)
                + " experts: expected 1 to 65536; hint: record it again");
        }
    }
    return h;
}

static std::vector<std::string> split(const std::string & list) {
    std::vector<std::string> out;
    size_t begin = 0;
    for (;;) {
        const size_t end = list.find(',', begin);
        out.push_back(list.substr(begin, end - begin));
        if (end == std::string::npos) {
            return out;
        }
        begin = end + 1;
    }
}

static int32_t parse_count(const std::string & flag, const std::string & value) {
    size_t used = 0;
    long   n    = 0;
    try {
        n = std::stol(value, &used);
    } catch (const std::exception &) {
        used = 0;
    }
    if (used == 0 || used != value.size() || n < 1 || n > 1000000) {
        fail(flag + " '" + value + "': expected a number from 1");
    }
    return (int32_t) n;
}

// slots of each layer of the trace
struct choice {
    int32_t              slots = 0; // as asked for; 0: by layer
    std::vector<int32_t> n_slot;
};

static choice by_layer(const std::string & value, const std::vector<moe::trace_layer> & layers) {
    std::map<int32_t, int32_t> given;
    for (const std::string & one : split(value)) {
        const size_t eq = one.find('=');
        if (eq == std::string::npos) {
            fail("--layer-slots '" + one + "': expected LAYER=N");
        }
        const std::string layer = one.substr(0, eq);
        given[layer == "0" ? 0 : parse_count("--layer-slots", layer)] = parse_count("--layer-slots", one.substr(eq + 1));
    }
    choice c;
    for (const moe::trace_layer & l : layers) {
        const auto it = given.find(l.layer);
        if (it == given.end()) {
            fail("--layer-slots says nothing of layer " + std::to_string(l.layer) + "; hint: name every layer of the trace");
        }
        c.n_slot.push_back(std::min(it->second, l.n_expert));
        given.erase(it);
    }
    if (!given.empty()) {
        fail("--layer-slots names layer " + std::to_string(given.begin()->first) + ", which the trace does not have");
    }
    return c;
}

// the engine refuses fewer slots than a token uses
static void check_slots(const choice & c, const moe::trace_contents & trace) {
    for (size_t i = 0; i < trace.layers.size(); ++i) {
        int32_t n_used = 0;
        for (const auto & b : trace.layers[i].batches) {
            n_used = std::max(n_used, b.n_used);
        }
        if (c.n_slot[i] < n_used) {
            fail(std::to_string(c.n_slot[i]) + " slots are too few: a token of this trace uses " + std::to_string(n_used)
                + " experts in layer " + std::to_string(trace.layers[i].layer) + "; hint: " + std::to_string(n_used) + " or more");
        }
    }
}

struct replay_run {
    std::string                     policy;
    bool                            optimum;
    moe::policy_kind                kind;
    const choice *                  slots;
    std::vector<moe::replay_counts> layers;
};

static void replay_all(std::vector<replay_run> & runs, const moe::trace_contents & trace, size_t n_threads) {
    const size_t n_layers = trace.layers.size();
    std::atomic<size_t> next { 0 };
    const auto work = [&] {
        for (size_t i; (i = next++) < runs.size() * n_layers; ) {
            replay_run & r = runs[i / n_layers];
            const moe::layer_trace & l = trace.layers[i % n_layers];
            const int32_t n_slot = r.slots->n_slot[i % n_layers];
            r.layers[i % n_layers] = r.optimum ? moe::replay_optimum(l, n_slot) : moe::replay(l, r.kind, n_slot);
        }
    };
    std::vector<std::thread> threads;
    for (size_t i = 1; i < n_threads; ++i) {
        threads.emplace_back(work);
    }
    work();
    for (std::thread & t : threads) {
        t.join();
    }
}

static void write_counts(moe::json_object & o, const moe::replay_counts & c) {
    o.add("hits", c.hits).add("misses", c.misses).add("evictions", c.evictions).add("misses_decode", c.misses_decode);
}

static std::string show(const replay_run & r, const moe::trace_contents & trace) {
    std::string layers;
    moe::replay_counts total;
    for (size_t i = 0; i < r.layers.size(); ++i) {
        total.add(r.layers[i]);
        moe::json_object o;
        o.add("layer", trace.layers[i].layer).add("n_expert", trace.layers[i].n_expert).add("slots", r.slots->n_slot[i]);
        write_counts(o, r.layers[i]);
        layers += (layers.empty() ? "" : ",") + o.str();
    }
    moe::json_object totals;
    write_counts(totals, total);
    totals.add("tokens_decode", r.layers[0].tokens_decode).add("tokens_prefill", r.layers[0].tokens_prefill);
    moe::json_object o;
    o.add("policy", r.policy);
    if (r.slots->slots > 0) {
        o.add("slots", r.slots->slots);
    } else {
        o.raw("slots", "null");
    }
    return o.raw("totals", totals.str()).raw("layers", "[" + layers + "]").str();
}

static int run(int argc, char ** argv) {
    std::string path;
    std::vector<int32_t> slots;
    std::string layer_slots;
    std::vector<std::string> policies;
    size_t n_threads = std::max(1u, std::thread::hardware_concurrency());
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        const auto value = [&]() -> std::string {
            if (i + 1 >= argc) {
                fail(arg + " needs a value");
            }
            return argv[++i];
        };
        if (arg == "-h" || arg == "--help") {
            fputs(usage, stdout);
            return 0;
        } else if (arg == "--slots") {
            for (const std::string & n : split(value())) {
                slots.push_back(parse_count(arg, n));
            }
        } else if (arg == "--layer-slots") {
            layer_slots = value();
        } else if (arg == "--policy") {
            policies = split(value());
        } else if (arg == "--threads") {
            n_threads = (size_t) std::min(parse_count(arg, value()), 256);
        } else if (arg.size() > 1 && arg[0] == '-') {
            fail("unknown argument '" + arg + "'; hint: moe-replay-policy --help");
        } else if (path.empty()) {
            path = arg;
        } else {
            fail("unexpected argument '" + arg + "'; hint: moe-replay-policy --help");
        }
    }
    if (path.empty() || (slots.empty() && layer_slots.empty())) {
        fputs(usage, stderr);
        return 2;
    }
    std::string known;
    for (const moe::policy_kind kind : moe::all_policies()) {
        known += std::string(moe::policy_name(kind)) + ", ";
    }
    known += "opt";
    if (policies.empty()) {
        policies = split(known);
        for (std::string & name : policies) {
            name.erase(0, name.find_first_not_of(' '));
        }
    }

    const std::vector<uint8_t> data = read_file(path);
    moe::trace_header   header;
    moe::trace_contents trace;
    try {
        uint64_t pos = 0;
        header = parse_header(data, pos);
        trace  = moe::parse_records(data.data() + pos, data.size() - pos, header.layers);
    } catch (const std::runtime_error & e) {
        fail("'" + path + "': " + e.what());
    }

    std::vector<choice> choices;
    for (const int32_t n : slots) {
        choice c;
        c.slots = n;
        for (const moe::trace_layer & l : header.layers) {
            c.n_slot.push_back(std::min(n, l.n_expert));
        }
        choices.push_back(c);
    }
    if (!layer_slots.empty()) {
        choices.push_back(by_layer(layer_slots, header.layers));
    }
    std::vector<replay_run> runs;
    for (const choice & c : choices) {
        check_slots(c, trace);
        for (const std::string & name : policies) {
            replay_run r = { name, name == "opt", {}, &c, std::vector<moe::replay_counts>(header.layers.size()) };
            if (!r.optimum && !moe::policy_from_name(name, r.kind)) {
                fail("--policy '" + name + "': expected one of " + known);
            }
            runs.push_back(std::move(r));
        }
    }
    replay_all(runs, trace, n_threads);

    std::string shown;
    for (const replay_run & r : runs) {
        shown += (shown.empty() ? "" : ",") + show(r, trace);
    }
    uint64_t n_tokens = 0;
    for (const auto & b : trace.layers[0].batches) {
        n_tokens += b.n_tokens;
    }
    const std::string out = moe::json_object()
        .add("schema", "moestream/replay/1")
        .raw("model", moe::json_object().add("fingerprint", header.fingerprint).add("architecture", header.architecture)
            .add("name", header.name).str())
        .add("n_expert_used", header.n_expert_used)
        .add("records", trace.n_records)
        .add("tokens", n_tokens)
        .add("truncated", trace.truncated)
        .raw("runs", "[" + shown + "]")
        .str();
    if (puts(out.c_str()) < 0 || fflush(stdout) != 0) {
        fail(std::string("cannot write to stdout: ") + strerror(errno));
    }
    return 0;
}

int main(int argc, char ** argv) {
    try {
        return run(argc, argv);
    } catch (const std::exception & e) {
        fprintf(stderr, "moe-replay-policy: %s\n", e.what());
        return 1;
    }
}
