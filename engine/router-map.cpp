#include "router-map.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <numeric>
#include <set>
#include <stdexcept>

#include <sys/stat.h>

namespace moe {

using json = nlohmann::json;

static constexpr int64_t  version    = 1;
static constexpr int64_t  layers_max = 1 << 16;
static constexpr uint64_t bytes_max  = 256ull << 20; // a map of 100 layers of 1000 experts has less than one hundredth of it

std::vector<int32_t> map_layer::by_use() const {
    std::vector<int32_t> experts(counts.size());
    std::iota(experts.begin(), experts.end(), 0);
    std::stable_sort(experts.begin(), experts.end(), [this](int32_t a, int32_t b) { return counts[a] > counts[b]; });
    return experts;
}

const map_layer * router_map::find(int32_t layer) const {
    const auto it = std::find_if(layers.begin(), layers.end(), [layer](const map_layer & l) { return l.layer == layer; });
    return it == layers.end() ? nullptr : &*it;
}

namespace {

// one map, with its path for messages
class map_parser {
public:
    explicit map_parser(const std::string & path) : path(path) {}

    router_map parse() const {
        const json root = load();
        if (!root.is_object() || !root.contains("format") || root["format"] != "moestream.map") {
            fail("this is no router map: its \"format\" is not \"moestream.map\"");
        }
        const int64_t its_version = integer(root, "version", "version", INT64_MIN, INT64_MAX);
        if (its_version != version) {
            throw std::runtime_error(path + ": version " + std::to_string(its_version) + " of the map format, expected " + std::to_string(version) +
                "; hint: make the map again with this version of moestream");
        }
        router_map map;
        const json & model = member(root, "model", "model");
        map.fingerprint = string(model, "fingerprint", "model.fingerprint");
        map.model_name  = string(model, "name", "model.name");
        const json & layers = member(root, "layers", "layers");
        if (!layers.is_array() || layers.empty()) {
            fail("\"layers\" is " + shown(layers) + ", expected a list of layers");
        }
        for (size_t i = 0; i < layers.size(); ++i) {
            map.layers.push_back(parse_layer(layers[i], "layers[" + std::to_string(i) + "]"));
        }
        std::sort(map.layers.begin(), map.layers.end(), [](const map_layer & a, const map_layer & b) { return a.layer < b.layer; });
        for (size_t i = 1; i < map.layers.size(); ++i) {
            if (map.layers[i].layer == map.layers[i - 1].layer) {
                fail("layer " + std::to_string(map.layers[i].layer) + " is there twice");
            }
        }
        if (root.contains("slots")) {
            map.has_slots = true;
            parse_slots(root["slots"], map);
        }
        return map;
    }

private:
    [[noreturn]] void fail(const std::string & what) const {
        throw std::runtime_error(path + ": " + what + "; hint: make the map again (moestream map make)");
    }

    [[noreturn]] void fail_reading(const std::string & what) const {
        throw std::runtime_error(path + ": " + what + "; hint: give the path of a router map");
    }

    json load() const {
        struct stat st;
        if (stat(path.c_str(), &st) != 0) {
            fail_reading(strerror(errno));
        }
        if (!S_ISREG(st.st_mode)) { // opening a pipe would wait for ever
            fail_reading("is no regular file");
        }
        if ((uint64_t) st.st_size > bytes_max) {
            fail_reading(std::to_string(st.st_size) + " bytes are too many for a router map");
        }
        std::ifstream in(path, std::ios::binary);
        if (!in) {
            fail_reading(strerror(errno));
        }
        try {
            return json::parse(in);
        } catch (const json::exception & e) {
            fail_reading(std::string("this is no JSON: ") + e.what());
        }
    }

    // as the file has it, but not all of a long one, nor of what may be nested without end
    static std::string shown(const json & value) {
        if (value.is_structured() && !value.empty()) {
            return value.is_array() ? "a list" : "an object";
        }
        const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
        return text.size() <= 60 ? text : text.substr(0, 60) + "...";
    }

    const json & member(const json & object, const char * key, const std::string & name) const {
        if (!object.is_object() || !object.contains(key)) {
            fail("\"" + name + "\" is missing");
        }
        return object[key];
    }

    std::string string(const json & object, const char * key, const std::string & name) const {
        const json & value = member(object, key, name);
        if (!value.is_string()) {
            fail("\"" + name + "\" is " + shown(value) + ", expected a text");
        }
        return value.get<std::string>();
    }

    int64_t integer(const json & value, const std::string & name, int64_t min, int64_t max) const {
        const bool fits = value.is_number_unsigned() ? value.get<uint64_t>() <= INT64_MAX : value.is_number_integer();
        if (!fits || value.get<int64_t>() < min || value.get<int64_t>() > max) {
            fail("\"" + name + "\" is " + shown(value) + ", expected " + (min == 0 ? "a number that is not negative" : min == 1 ? "a number from 1" : "a number"));
        }
        return value.get<int64_t>();
    }

    int64_t integer(const json & object, const char * key, const std::string & name, int64_t min, int64_t max) const {
        return integer(member(object, key, name), name, min, max);
    }

    map_layer parse_layer(const json & value, const std::string & name) const {
        map_layer l;
        l.layer = (int32_t) integer(value, "layer", name + ".layer", 0, layers_max);
        const int64_t n_expert = integer(value, "n_expert", name + ".n_expert", 1, INT32_MAX);
        const json &  counts   = member(value, "counts", name + ".counts");
        if (!counts.is_array() || (int64_t) counts.size() != n_expert) {
            fail("\"" + name + ".counts\" has " + (counts.is_array() ? std::to_string(counts.size()) : "no") + " entries, expected the " +
                std::to_string(n_expert) + " of n_expert");
        }
        for (size_t e = 0; e < counts.size(); ++e) {
            l.counts.push_back((uint64_t) integer(counts[e], name + ".counts[" + std::to_string(e) + "]", 0, INT64_MAX));
        }
        return l;
    }

    void parse_slots(const json & slots, router_map & map) const {
        if (!slots.is_object()) {
            fail("\"slots\" is " + shown(slots) + ", expected a number for each layer");
        }
        for (map_layer & l : map.layers) {
            const std::string key = std::to_string(l.layer);
            l.n_slot = (int32_t) integer(slots, key.c_str(), "slots." + key, 1, INT32_MAX);
        }
        if (slots.size() != map.layers.size()) {
            fail("\"slots\" has " + std::to_string(slots.size()) + " entries, expected the " + std::to_string(map.layers.size()) + " layers of the map");
        }
    }

    const std::string & path;
};

} // namespace

router_map read_router_map(const std::string & path) {
    return map_parser(path).parse();
}

} // namespace moe
