// What /moe/stats and /metrics say: well-formed whatever the names hold, and totals that are the sums of the layers.

#include "check.h"
#include "stats.h"

#include <map>
#include <regex>
#include <set>

using namespace moe;

namespace {

// a strict JSON reader: aborts on anything that RFC 8259 does not allow, also on bytes that are no UTF-8
struct json_value {
    std::string                       scalar; // decoded text of a string; the token of a number, true, false or null
    char                              kind = 0; // 's', 'n' (number), 'l' (literal), 'o', 'a'
    std::map<std::string, json_value> object;
    std::vector<std::string>          keys;   // in order
    std::vector<json_value>           array;

    const json_value & at(const std::string & key) const {
        CHECK(kind == 'o');
        if (!object.count(key)) {
            check_failed(__FILE__, __LINE__, "no key '" + key + "'");
        }
        return object.at(key);
    }

    uint64_t number() const {
        CHECK(kind == 'n');
        return std::stoull(scalar);
    }
};

class json_parser {
public:
    explicit json_parser(const std::string & text) : text(text) {}

    json_value parse() {
        const json_value v = value();
        CHECK_EQ(pos, text.size());
        return v;
    }

private:
    char peek() const { return pos < text.size() ? text[pos] : '\0'; }

    void expect(char c) {
        if (peek() != c) {
            check_failed(__FILE__, __LINE__, std::string("expected '") + c + "' at " + std::to_string(pos) + " of " + text);
        }
        ++pos;
    }

    json_value value() {
        json_value v;
        if (peek() == '{') {
            v.kind = 'o';
            ++pos;
            while (peek() != '}') {
                if (!v.keys.empty()) {
                    expect(',');
                }
                const std::string key = string();
                expect(':');
                CHECK(v.object.count(key) == 0);
                v.keys.push_back(key);
                v.object[key] = value();
            }
            ++pos;
        } else if (peek() == '[') {
            v.kind = 'a';
            ++pos;
            while (peek() != ']') {
                if (!v.array.empty()) {
                    expect(',');
                }
                v.array.push_back(value());
            }
            ++pos;
        } else if (peek() == '"') {
            v.kind   = 's';
            v.scalar = string();
        } else {
            std::smatch m;
            static const std::regex token("^(true|false|null|-?(0|[1-9][0-9]*))");
            const std::string rest = text.substr(pos, 32);
            CHECK(std::regex_search(rest, m, token));
            v.scalar = m[1];
            v.kind   = isalpha((unsigned char) v.scalar[0]) ? 'l' : 'n';
            pos += v.scalar.size();
        }
        return v;
    }

    std::string string() {
        expect('"');
        std::string out;
        while (peek() != '"') {
            CHECK(pos < text.size());
            const unsigned char c = (unsigned char) text[pos];
            CHECK(c >= 0x20);
            if (c == '\\') {
                ++pos;
                switch (text.at(pos)) {
                    case '"': case '\\': case '/': out += text[pos++]; break;
                    case 'u': {
                        const std::string hex = text.substr(pos + 1, 4);
                        CHECK(std::regex_match(hex, std::regex("[0-9a-f]{4}")));
                        const int code = std::stoi(hex, nullptr, 16);
                        CHECK(code < 0x80); // the writer escapes nothing else
                        out += (char) code;
                        pos += 5;
                        break;
                    }
                    default: check_failed(__FILE__, __LINE__, "bad escape in " + text);
                }
                continue;
            }
            const int n = c < 0x80 ? 1 : c >= 0xc2 && c < 0xe0 ? 2 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0;
            CHECK(n > 0);
            uint32_t code = n == 1 ? c : c & (0x7f >> n);
            for (int i = 1; i < n; ++i) {
                CHECK(((unsigned char) text.at(pos + i) & 0xc0) == 0x80);
                code = code << 6 | ((unsigned char) text[pos + i] & 0x3f);
            }
            CHECK(n < 3 || code >= (n == 3 ? 0x800u : 0x10000u)); // overlong
            CHECK(code < 0xd800 || code > 0xdfff);
            CHECK(code <= 0x10ffff);
            out += text.substr(pos, n);
            pos += n;
        }
        ++pos;
        return out;
    }

    const std::string & text;
    size_t pos = 0;
};

json_value parse(const std::string & text) { return json_parser(text).parse(); }

const std::vector<std::pair<std::string, std::atomic<uint64_t> layer_stats::*>> & counters() {
    static const std::vector<std::pair<std::string, std::atomic<uint64_t> layer_stats::*>> all = {
        { "hits",         &layer_stats::hits },
        { "misses",       &layer_stats::misses },
        { "evictions",    &layer_stats::evictions },
        { "bytes_needed", &layer_stats::bytes_needed },
        { "bytes_read",   &layer_stats::bytes_read },
        { "bytes_copied", &layer_stats::bytes_copied },
        { "stall_us",     &layer_stats::stall_us },
        { "warm_filled",  &layer_stats::warm_filled },
        { "warm_bytes",   &layer_stats::warm_bytes },
        { "ram_hits",       &layer_stats::ram_hits },
        { "bytes_from_ram", &layer_stats::bytes_from_ram },
        { "bytes_to_ram",   &layer_stats::bytes_to_ram },
        { "guesses",        &layer_stats::guesses },
        { "guess_hits",     &layer_stats::guess_hits },
        { "guess_wasted_bytes", &layer_stats::guess_wasted_bytes },
    };
    return all;
}

void fill_in(stream_stats & s, int32_t n_layer) {
    test_random rnd(7);
    for (int32_t i = 0; i < n_layer; ++i) {
        auto l = std::make_unique<layer_stats>();
        l->layer    = i + 3;
        l->n_expert = 64 + i;
        l->n_slot   = 8 + i;
        l->pins     = 2 + i;
        for (const auto & c : counters()) {
            (*l).*c.second = rnd.next() >> 8; // beyond what a double holds
        }
        s.layers.push_back(std::move(l));
    }
    s.tokens_decode  = 11;
    s.tokens_prefill = 22;
    s.read_errors    = 33;
}

} // namespace

TEST(off_is_well_formed) {
    const json_value v = parse(stats_json_off());
    CHECK_EQ(v.at("schema").scalar, "moestream/stats/1");
    CHECK_EQ(v.at("streaming").scalar, "false");
}

TEST(names_are_escaped) {
    std::string every;
    for (int c = 0; c < 0x80; ++c) {
        every += (char) c;
    }
    stream_stats s;
    for (const std::string & name : { every, std::string("a\"b\\c\n\t/x.gguf"), std::string("\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80.gguf"), std::string() }) {
        stream_report r;
        r.model     = name;
        r.io_reason = name;
        const json_value v = parse(stats_json(r, s));
        CHECK_EQ(v.at("model").scalar, name);
        CHECK_EQ(v.at("io").at("reason").scalar, name);
    }
}

TEST(what_was_measured_of_the_drive_is_told) {
    stream_stats s;
    stream_report r;
    r.io_backend    = "uring";
    r.io_in_flight  = 6;
    r.io_threads    = 2;
    r.io_probe_note = "slow";
    r.io_probe      = { { "direct", "threads", 1, 700000000 }, { "buffered", "uring", 8, 5000000000 } };
    const json_value v = parse(stats_json(r, s));
    const json_value & io = v.at("io");
    CHECK_EQ(io.at("backend").scalar, "uring");
    CHECK_EQ(io.at("in_flight").scalar, "6");
    CHECK_EQ(io.at("threads").scalar, "2");
    CHECK_EQ(io.at("probe").at("note").scalar, "slow");
    const auto & rates = io.at("probe").at("rates").array;
    CHECK_EQ(rates.size(), 2u);
    CHECK_EQ(rates[1].at("mode").scalar, "buffered");
    CHECK_EQ(rates[1].at("backend").scalar, "uring");
    CHECK_EQ(rates[1].at("in_flight").scalar, "8");
    CHECK_EQ(rates[1].at("bytes_per_s").scalar, "5000000000");
}

// a file name may hold any bytes; clients refuse a document that is no UTF-8
TEST(bytes_that_are_no_utf8_are_replaced) {
    const std::string mark = "\xef\xbf\xbd"; // U+FFFD
    const std::vector<std::pair<std::string, std::string>> cases = {
        { "a\xff.gguf",             "a" + mark + ".gguf" },
        { "\x80",                   mark },
        { "x\xc3",                  "x" + mark },             // cut off
        { "x\xe2\x82",              "x" + mark + mark },
        { "\xc3(",                  mark + "(" },
        { "\xc0\xaf",               mark + mark },            // overlong
        { "\xe0\x80\x80",           mark + mark + mark },
        { "\xf0\x80\x80\x80",       mark + mark + mark + mark },
        { "\xed\xa0\x80",           mark + mark + mark },     // half of a surrogate pair
        { "\xf4\x90\x80\x80",       mark + mark + mark + mark }, // beyond U+10FFFF
        { "\xf4\x8f\xbf\xbf\xed\x9f\xbf", "\xf4\x8f\xbf\xbf\xed\x9f\xbf" },
    };
    for (const auto & c : cases) {
        stream_report r;
        r.model = c.first;
        stream_stats s;
        CHECK_EQ(parse(stats_json(r, s)).at("model").scalar, c.second);
    }
}

TEST(totals_are_sums_of_the_layers) {
    stream_stats s;
    fill_in(s, 5);
    stream_report r;
    r.n_slot = 12;
    const json_value v = parse(stats_json(r, s));
    CHECK_EQ(v.at("n_layer_moe").number(), 5u);
    const std::vector<json_value> & layers = v.at("layers").array;
    CHECK_EQ(layers.size(), 5u);
    for (const auto & c : counters()) {
        uint64_t sum = 0;
        for (size_t i = 0; i < layers.size(); ++i) {
            CHECK_EQ(layers[i].at(c.first).number(), ((*s.layers[i]).*c.second).load());
            sum += layers[i].at(c.first).number();
        }
        CHECK_EQ(v.at("totals").at(c.first).number(), sum);
    }
    CHECK_EQ(layers[2].at("layer").number(), 5u);
    CHECK_EQ(layers[2].at("n_expert").number(), 66u);
    CHECK_EQ(layers[2].at("slots").number(), 10u);
    CHECK_EQ(layers[2].at("pins").number(), 4u);
    CHECK_EQ(v.at("totals").at("pins").number(), 2u + 3 + 4 + 5 + 6);
    CHECK_EQ(v.at("totals").at("tokens_decode").number(), 11u);
    CHECK_EQ(v.at("totals").at("tokens_prefill").number(), 22u);
    CHECK_EQ(v.at("totals").at("read_errors").number(), 33u);
}

TEST(memory_total_is_the_sum) {
    stream_report r;
    r.memory = { 1, 20, 300, 4000, 50000, 600000, 7000000, 80000000, 7 };
    const json_value m = parse(stats_json(r, {})).at("memory");
    uint64_t sum = 0;
    for (const std::string & key : m.keys) {
        sum += key == "total_bytes" || key == "device_bytes" ? 0 : m.at(key).number();
    }
    CHECK_EQ(m.keys.size(), 10u);
    CHECK_EQ(m.at("device_bytes").number(), 7u); // of the others
    CHECK_EQ(sum, 87654321u);
    CHECK_EQ(m.at("total_bytes").number(), sum);
}

TEST(a_map_is_named) {
    stream_report r;
    r.warm = "background";
    CHECK_EQ(parse(stats_json(r, {})).at("map").scalar, "null");
    CHECK_EQ(parse(stats_json(r, {})).at("warm").scalar, "background");
    r.map     = "chat.json";
    r.map_pin = 12;
    CHECK_EQ(parse(stats_json(r, {})).at("map").at("name").scalar, "chat.json");
    CHECK_EQ(parse(stats_json(r, {})).at("map").at("pin").number(), 12u);
}

TEST(no_layers_is_well_formed) {
    const json_value v = parse(stats_json({}, {}));
    CHECK_EQ(v.at("layers").array.size(), 0u);
    CHECK_EQ(v.at("totals").at("hits").number(), 0u);
}

// the text format: HELP and TYPE once, before the samples of their name; no sample twice; counters end in _total
TEST(prometheus_lines_parse) {
    stream_stats s;
    fill_in(s, 3);
    stream_report r;
    r.memory = { 1, 20, 300, 4000, 50000, 600000, 7000000, 80000000, 7 };
    const std::string text = stats_prometheus(r, s);
    CHECK(!text.empty() && text.back() == '\n');

    const std::regex help("# HELP (moestream_[a-z_]+) [^\\\\]+");
    const std::regex type("# TYPE (moestream_[a-z_]+) (counter|gauge)");
    const std::regex sample("(moestream_[a-z_]+)(\\{[a-z]+=\"[^\"\\\\]*\"\\})? ([0-9]+)");
    std::map<std::string, uint64_t> samples;
    std::set<std::string> helped;
    std::set<std::string> typed;
    std::string current;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line); ) {
        std::smatch m;
        if (std::regex_match(line, m, help)) {
            CHECK(helped.insert(m[1]).second);
            current = m[1];
        } else if (std::regex_match(line, m, type)) {
            CHECK_EQ(m[1].str(), current);
            CHECK(typed.insert(m[1]).second);
            CHECK_EQ(m[2] == "counter", std::regex_search(current, std::regex("_total$")));
        } else {
            CHECK(std::regex_match(line, m, sample));
            CHECK_EQ(m[1].str(), current);
            CHECK(typed.count(current));
            CHECK(samples.insert({ m[1].str() + m[2].str(), std::stoull(m[3]) }).second);
        }
    }
    CHECK_EQ(samples.size(), 15 * 3 + 2 * 3 + 3 + 8 + 1u);
    for (const auto & l : s.layers) {
        const std::string label = "{layer=\"" + std::to_string(l->layer) + "\"}";
        for (const auto & c : counters()) {
            const bool of_experts = c.first == "hits" || c.first == "misses" || c.first == "evictions";
            const std::string prefix = of_experts ? "expert_" : "";
            CHECK_EQ(samples.at("moestream_" + prefix + c.first + "_total" + label), ((*l).*c.second).load());
        }
        CHECK_EQ(samples.at("moestream_slots" + label), (uint64_t) l->n_slot);
        CHECK_EQ(samples.at("moestream_pins" + label), l->pins.load());
    }
    CHECK_EQ(samples.at("moestream_tokens_decode_total"), 11u);
    CHECK_EQ(samples.at("moestream_tokens_prefill_total"), 22u);
    CHECK_EQ(samples.at("moestream_read_errors_total"), 33u);
    CHECK_EQ(samples.at("moestream_memory_bytes{use=\"kv\"}"), 7000000u);
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
