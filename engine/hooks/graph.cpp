// Nodes of ours in graphs of upstream: the start of reads, the wait for them, the slot ids.

#include "model.h"

#include <cstring>
#include <unordered_set>

namespace moe::hooks {

// op_params of our nodes, behind the function, the thread count and the pointer that ggml_custom_4d puts there
enum { PARAM_LAYER = 12, PARAM_STAGED = 13, PARAM_READ_NEXT = 14, PARAM_LATE = 15 };
enum { PARAM_GUESS = PARAM_READ_NEXT }; // of a join: the next layer begins late, in slots

// order: empty when there is nothing to wait for
static void set_order(moe_stream & moe, int32_t i_layer, bool staged, const std::vector<int32_t> & order) {
    for (part_gate * g : moe.layer_gates[2 * i_layer + staged]) {
        g->order   = order.empty() ? nullptr : order.data();
        g->n_order = (int32_t) order.size();
    }
}

static moe::chosen_experts chosen_of(const ggml_tensor * ids) {
    return { (const uint8_t *) ids->data, ids->ne[0], ids->ne[1], ids->nb[0], ids->nb[1] };
}

// ids that are valid in slots and in staging, each once per token
static void write_dry_ids(const ggml_tensor * selected, int32_t * out) {
    for (int64_t t = 0; t < selected->ne[1]; ++t) {
        for (int64_t k = 0; k < selected->ne[0]; ++k) {
            *out++ = (int32_t) k;
        }
    }
}

static void op_begin(ggml_tensor * dst, int ith, int /*nth*/, void * userdata) {
    if (ith != 0) {
        return;
    }
    moe_stream & moe = *(moe_stream *) userdata;
    const int32_t i_layer = dst->op_params[PARAM_LAYER];
    const bool    staged  = dst->op_params[PARAM_STAGED] != 0;
    const bool    late    = dst->op_params[PARAM_LATE] != 0;
    if (moe.n_dry > 0) {
        write_dry_ids(dst->src[0], (int32_t *) dst->data);
        set_order(moe, i_layer, staged, {});
        return;
    }
    moe::stream & s = *moe.stream;
    if (staged) {
        s.begin_staging(i_layer, chosen_of(dst->src[0]), (int32_t *) dst->data, dst->op_params[PARAM_READ_NEXT] != 0, late);
    } else {
        s.begin_slots(i_layer, chosen_of(dst->src[0]), (int32_t *) dst->data, late);
    }
    if (late) {
        set_order(moe, i_layer, staged, s.order());
    }
}

// what the next layer will probably want is read ahead, by whichever thread has scored the last of its experts
static void guess_next(moe_stream & moe, const ggml_tensor * join, int ith, int nth) {
    const ggml_tensor * state = join->src[1];
    const int32_t i_next = join->op_params[PARAM_LAYER] + 1;
    if (ith == 0) {
        moe.stream->note_guess_place(state->ne[1]);
    }
    if (moe.stream->wants_guesses() && moe.next_router->score(i_next, (const float *) state->data, state->nb[1], state->ne[1], ith, nth)) {
        const std::vector<int32_t> & best = moe.next_router->best();
        moe.stream->guess(i_next, best.data(), (int32_t) best.size());
    }
}

static void op_join(ggml_tensor * dst, int ith, int nth, void * userdata) {
    moe_stream & moe = *(moe_stream *) userdata;
    if (moe.n_dry > 0 || dst->op_params[PARAM_LATE]) {
        if (ith == 0) {
            memcpy(dst->data, dst->src[0]->data, ggml_nbytes(dst));
        }
        if (moe.n_dry == 0 && dst->op_params[PARAM_GUESS]) {
            guess_next(moe, dst, ith, nth);
        }
        return;
    }
    moe::stream & s = *moe.stream;
    const int32_t i_layer = dst->op_params[PARAM_LAYER];
    const bool    staged  = dst->op_params[PARAM_STAGED] != 0;
    s.wait(i_layer, staged, ith == 0); // all threads sleep here, so that readers have the cores
    if (ith == 0) {
        s.settle(i_layer, staged);
        memcpy(dst->data, dst->src[0]->data, ggml_nbytes(dst));
    }
}

static bool is_node(const ggml_tensor * t, ggml_custom_op_t fun) {
    return t->op == GGML_OP_CUSTOM && memcmp(t->op_params, &fun, sizeof(fun)) == 0;
}

static bool is_staged(const moe_stream * moe, int32_t i_layer, const ggml_tensor * ids) {
    const layer_shape & s = moe->shapes[i_layer];
    return !s.is_resident && (ids->ne[1] > s.n_slot_tokens || !moe::fits_slots(s.n_expert, s.n_free_slot, ids->ne[0], ids->ne[1]));
}

// a vector of floats for each token, as routers score them
static bool is_plain_state(const ggml_tensor * state, int64_t n_embd) {
    return state->type == GGML_TYPE_F32 && ggml_n_dims(state) <= 2 && state->nb[0] == sizeof(float) && state->ne[0] == n_embd;
}

static bool can_guess(const moe_stream & moe, int32_t i_layer, const ggml_tensor * state) {
    const int32_t i_next = i_layer + 1;
    return moe.next_router && moe.next_router->knows(i_next) && is_plain_state(state, moe.next_router->n_embd(i_next));
}

static bool can_guess_on_device(const moe_stream & moe, int32_t i_layer, const ggml_tensor * state) {
    const ggml_tensor * router = moe.tables[i_layer].router;
    const layer_shape & shape  = moe.shapes[i_layer];
    const int64_t n_tokens = state->ne[1];
    return router && is_plain_state(state, router->ne[0]) && state->nb[1] % 16 == 0 && state->view_offs % 16 == 0 && n_tokens <= std::min<int64_t>(shape.n_slot_tokens, moe::device_guess_tokens) &&
        moe::fits_slots(shape.n_expert, shape.n_free_slot, moe.device_layers[i_layer].n_used, n_tokens);
}

// The device finds the slots itself, and fetches ahead what the next layer will probably want. In the memory-fit pass there are no arguments for
// its kernels yet, and nothing is computed.
static ggml_tensor * map_on_device(moe_stream & moe, ggml_context * ctx, ggml_cgraph * gf, int32_t i_layer, ggml_tensor * selected, ggml_tensor * state) {
    // what the layer before guessed from is kept until the guess has been made, which is by now
    thread_local struct {
        const ggml_cgraph * gf;
        int32_t             i_layer;
        ggml_tensor       * state;
    } guessed_from = {};

    const device_tables & tables = moe.tables[i_layer];
    const moe_device_functions * functions = functions_of(ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tables.slot_of->buffer)));
    const bool is_fit = moe.device_layers.empty();
    ggml_tensor * map_args[] = { selected, tables.slot_of, guessed_from.state };
    const bool was_guessed = guessed_from.gf == gf && guessed_from.i_layer == i_layer;
    guessed_from = {};

    // before the map: what the next layer wants is scored while this one's experts are still on their way
    const int32_t i_next = i_layer + 1;
    if (!is_fit && i_next < (int32_t) moe.tables.size() && can_guess_on_device(moe, i_next, state)) {
        const device_tables & next = moe.tables[i_next];
        ggml_tensor * guess_args[] = { state, next.router, next.slot_of };
        ggml_tensor * guess = ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, guess_args, 3, functions->guess, 1,
                &moe.device_layers[i_next]);
        ggml_format_name(guess, "moe_guess-%d", i_next);
        ggml_build_forward_expand(gf, guess);
        guessed_from = { gf, i_next, state };
    }

    ggml_tensor * map = ggml_custom_4d(ctx, GGML_TYPE_I32, selected->ne[0], selected->ne[1], 1, 1, map_args, was_guessed ? 3 : 2, functions->map, 1,
            is_fit ? nullptr : &moe.device_layers[i_layer]);
    ggml_format_name(map, "moe_map-%d", i_layer);
    ggml_build_forward_expand(gf, map);
    return map;
}

static bool is_matmul(const ggml_tensor * t) {
    return t->op == GGML_OP_MUL_MAT;
}

// memory other than their own result, or state that outlives the graph
static bool has_side_effect(const ggml_tensor * t) {
    return t->op == GGML_OP_CPY || t->op == GGML_OP_SET_ROWS || t->op == GGML_OP_SET || t->op == GGML_OP_CUSTOM;
}

// Nodes behind the join that do not need its result, up to the node that brings both together: the shared or dense FFN of the
// layer. They move in front of the join, in their order. Nothing moves unless that is what was found: what meets the experts
// before any matmul (a scale per expert) belongs to them, and the search ends where state is written or the next layer begins.
static void move_shared_ffn(ggml_tensor ** nodes, int i_join, int n_nodes) {
    std::unordered_set<const ggml_tensor *> dependent = { nodes[i_join] };
    std::unordered_set<const ggml_tensor *> independent;
    bool has_matmul = false;
    int  i_end = -1;
    for (int i = i_join + 1; i < n_nodes && i_end < 0; ++i) {
        const ggml_tensor * t = nodes[i];
        if (has_side_effect(t)) {
            return;
        }
        bool needs_join = dependent.count(t->view_src) > 0;
        bool needs_independent = independent.count(t->view_src) > 0;
        for (const ggml_tensor * src : t->src) {
            needs_join        = needs_join        || dependent.count(src) > 0;
            needs_independent = needs_independent || independent.count(src) > 0;
        }
        if (needs_join && needs_independent && has_matmul) {
            i_end = i;
        } else if (needs_join) {
            dependent.insert(t);
        } else {
            independent.insert(t);
            has_matmul = has_matmul || is_matmul(t);
        }
    }
    if (i_end < 0) {
        return;
    }
    std::stable_partition(nodes + i_join, nodes + i_end, [&](const ggml_tensor * t) { return independent.count(t) > 0; });
}

// what computes a value from its sources and does nothing else
static bool is_pure(const ggml_tensor * t) {
    switch (t->op) {
        case GGML_OP_ADD: case GGML_OP_ADD_ID: case GGML_OP_MUL: case GGML_OP_DIV: case GGML_OP_SUM_ROWS: case GGML_OP_SCALE: case GGML_OP_CLAMP:
        case GGML_OP_UNARY: case GGML_OP_SOFT_MAX: case GGML_OP_NORM: case GGML_OP_RMS_NORM: case GGML_OP_CONCAT: case GGML_OP_CONT:
        case GGML_OP_MUL_MAT: case GGML_OP_ARGSORT: case GGML_OP_TOP_K: case GGML_OP_GET_ROWS: case GGML_OP_REPEAT:
        case GGML_OP_VIEW: case GGML_OP_RESHAPE: case GGML_OP_PERMUTE: case GGML_OP_TRANSPOSE:
            return true;
        default:
            return false;
    }
}

// Some routers see what is known before the attention of their layer: the layer's input, or the tokens. Their begin, and what it needs,
// move to the front, behind the experts of the layer before, so that the reads overlap with the attention. Nothing moves that reads
// memory which other nodes may write: a view of anything but a node is taken for a cache.
static void move_begin(ggml_tensor ** nodes, int i_first, int i_begin) {
    std::unordered_map<const ggml_tensor *, int> place;
    for (int i = i_first; i <= i_begin; ++i) {
        place[nodes[i]] = i;
    }
    std::unordered_set<const ggml_tensor *> needed = { nodes[i_begin] };
    for (int i = i_begin; i >= i_first; --i) { // sources stand in front
        const ggml_tensor * t = nodes[i];
        if (!needed.count(t)) {
            continue;
        }
        if (i != i_begin && (!is_pure(t) || (t->view_src && t->view_src->op == GGML_OP_NONE))) {
            return;
        }
        for (const ggml_tensor * src : t->src) {
            if (place.count(src)) {
                needed.insert(src);
            }
        }
        if (place.count(t->view_src)) {
            needed.insert(t->view_src);
        }
    }
    std::stable_partition(nodes + i_first, nodes + i_begin + 1, [&](const ggml_tensor * t) { return needed.count(t) > 0; });
}

// Where every expert matmul of a layer can wait for its own bytes, nobody waits for all of them in the join.
static void let_matmuls_wait(moe_stream & moe, ggml_tensor ** nodes, int n_nodes) {
    std::unordered_map<const ggml_tensor *, std::vector<ggml_tensor *>> matmuls; // by join
    for (int i = 0; i < n_nodes; ++i) {
        ggml_tensor * t = nodes[i];
        const auto it = t->op == GGML_OP_MUL_MAT_ID ? moe.gates.find(t->src[0]) : moe.gates.end();
        if (it != moe.gates.end() && is_node(t->src[2], op_join) && t->src[2]->op_params[PARAM_LAYER] == it->second.i_layer) {
            matmuls[t->src[2]].push_back(t);
        }
    }
    for (const auto & [join, users] : matmuls) {
        const int32_t i_layer = join->op_params[PARAM_LAYER];
        const auto & gates = moe.layer_gates[2 * i_layer + (join->op_params[PARAM_STAGED] != 0)];
        bool in_order = users.size() == gates.size(); // as parts are read
        for (size_t i = 0; in_order && i < users.size(); ++i) {
            in_order = gates[i] == &moe.gates.at(users[i]->src[0]);
        }
        if (!in_order) {
            continue;
        }
        for (ggml_tensor * t : users) {
            moe_gate_set(t, &moe.gates.at(t->src[0]));
        }
        for (ggml_tensor * t : { join->src[0], (ggml_tensor *) join }) {
            t->op_params[PARAM_LATE] = 1;
        }
    }
}

} // namespace moe::hooks

using namespace moe::hooks;

ggml_tensor * moe_graph_ids(moe_stream * moe, ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * selected, ggml_tensor * down_exps,
        ggml_tensor * state) {
    if (!moe) {
        return selected;
    }
    const auto it = moe->i_layer_of.find(down_exps);
    if (it == moe->i_layer_of.end() || moe->shapes[it->second].is_resident) {
        return selected;
    }
    std::call_once(moe->set_up_once, [moe] { set_up_guesses(*moe); });
    const int32_t i_layer = it->second;
    const int32_t staged = is_staged(moe, i_layer, selected);
    if (!staged && moe->by_device && moe->shapes[i_layer].on_device) {
        return map_on_device(*moe, ctx, gf, i_layer, selected, state);
    }

    ggml_tensor * begin = ggml_custom_4d(ctx, GGML_TYPE_I32, selected->ne[0], selected->ne[1], 1, 1, &selected, 1, op_begin, 1, moe);
    ggml_format_name(begin, "moe_begin-%d", i_layer);
    ggml_tensor * join_args[] = { begin, state };
    const int n_join_args = !staged && can_guess(*moe, i_layer, state) ? 2 : 1;
    ggml_tensor * join = ggml_custom_4d(ctx, GGML_TYPE_I32, selected->ne[0], selected->ne[1], 1, 1, join_args, n_join_args, op_join,
            moe->shapes[i_layer].on_device ? 1 : GGML_N_TASKS_MAX, moe); // where the processor computes next, all its threads wait
    ggml_format_name(join, "moe_join-%d", i_layer);
    for (ggml_tensor * t : { begin, join }) {
        t->op_params[PARAM_LAYER]  = i_layer;
        t->op_params[PARAM_STAGED] = staged;
    }

    ggml_build_forward_expand(gf, begin);
    return join;
}

uint32_t moe_graph_n_nodes(const moe_stream * moe) {
    return moe ? 2 * (uint32_t) moe->shapes.size() : 0; // begin and join
}

ggml_tensor * moe_graph_weights(moe_stream * moe, ggml_tensor * w, const ggml_tensor * ids) {
    if (!moe) {
        return w;
    }
    const auto it = moe->i_layer_of.find(w);
    if (it == moe->i_layer_of.end() || !is_staged(moe, it->second, ids)) {
        return w;
    }
    return moe->staging_of.at(w);
}

void moe_graph_finish(moe_stream * moe, ggml_cgraph * gf) {
    if (!moe) {
        return;
    }
    ggml_tensor ** nodes = ggml_graph_nodes(gf);
    const int n_nodes = ggml_graph_n_nodes(gf);
    if (moe->overlap) {
        let_matmuls_wait(*moe, nodes, n_nodes);
    }

    ggml_tensor * last_begin = nullptr;
    ggml_tensor * last_join  = nullptr;
    int i_behind = 0; // the experts of the layer before
    for (int i = 0; i < n_nodes; ++i) {
        ggml_tensor * t = nodes[i];
        if (t->op == GGML_OP_MUL_MAT_ID) {
            i_behind = i + 1;
        }
        if (is_node(t, op_begin)) {
            if (moe->overlap) {
                move_begin(nodes, i_behind, i); // nodes[i] may be another from here on
            }
            if (last_begin) {
                const int32_t i_layer = t->op_params[PARAM_LAYER];
                last_begin->op_params[PARAM_READ_NEXT] =
                    last_begin->op_params[PARAM_STAGED] && t->op_params[PARAM_STAGED] &&
                    last_begin->op_params[PARAM_LAYER] + 1 == i_layer &&
                    moe::touches_nearly_all(moe->shapes[i_layer].n_expert, t->ne[0], t->ne[1]);
            }
            if (last_join && last_join->src[1] && last_join->op_params[PARAM_LAYER] + 1 == t->op_params[PARAM_LAYER]) {
                last_join->op_params[PARAM_GUESS] = last_join->op_params[PARAM_LATE] && t->op_params[PARAM_LATE] && !t->op_params[PARAM_STAGED];
            }
            last_begin = t;
        } else if (is_node(t, op_join)) {
            last_join = t;
            if (moe->overlap) {
                move_shared_ffn(nodes, i, n_nodes);
            }
        }
    }
}
