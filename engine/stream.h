#pragma once

// The streaming engine of one loaded model: slots, staging and the transfers that fill them. No ggml in here; hooks/
// connects it to the graph.
//
// A graph visits the MoE layers in order. For each it calls begin() once the router has chosen, and join() where the experts
// are needed; between the two, the reads run while other nodes compute. A layer is served in one of two ways:
//
//   slots    the experts a batch may touch all fit into the layer's pool. begin() finds or evicts, starts the missing reads
//            and hands out slot ids.
//   staging  they may not. The layer's experts are gathered, under their real ids, in one of two full-width halves that all
//            layers share in turn: from slots where they are there, else from the file. When join() is done, the experts of
//            the last tokens are copied to the slots in the background, so that the next decode starts warm.
//            When a batch is wide enough to touch nearly all experts, begin() of one layer also starts reading the whole next
//            layer into the other half.
//
// A layer can also be begun `late`: then nobody joins, and whoever computes with a part of an expert (gate, say) takes just these
// bytes by take(), experts that are there first (order()). The parts are read in the order in which they are computed with.
//
// Where memory is short there are no halves but a ring (expert-ring.h), and staging is always late: what has a slot is computed with
// there, the experts of the last tokens are read into slots, all others pass through the ring, each part of each read once.
//
// While no graph computes, a thread of the stream fills empty slots with experts that nobody asked for yet (start_warm()), and then empty
// slabs. What it has submitted when a graph begins may still be read then; begin() of a layer takes such a fill in before it looks at the
// slots.
//
// Below the slots there may be a RAM tier (ram-tier.h). Who fills a slot moves what it held to a slab; a missing expert that has a
// slab is copied from there, and leaves it. Slabs are held until the transfers that touch them are settled.
//
// Between begin() of a layer and that of the next, guess() may name experts that the next will probably want. They are read in the
// background into a few entries that no slot and no slab gives way for. If the layer, begun late, wants one, it is computed with in the
// entry, and copied to its slot when the layer is settled; else the entry is free again when its layer has begun.
//
// Ownership of bytes (what makes it safe without copies):
//   - slots of a layer change only between its begin() and join() (the last take(), when late), or by the copies that either
//     started, or by the warm fill that its next begin() waits for;
//   - begin() of a layer first waits for those copies, and so does whoever refills the half they come from;
//   - a graph is computed by one thread team at a time (compute_begin() locks), so a slot is never evicted under a reader.
//
// Slots and staging of a layer may lie in a device's memory (storage). Then nobody takes single experts of it: it is not begun late.
// The device may also look after the slots by itself (device-pool.h): then nobody begins the layer in slots, staging takes from the
// RAM tier or the file only, and the tier is the device's (device-tier.h).
//
// A failed read is not an exception: the bytes are zeroed (so that what computes on goes through defined values), the error is
// kept, and compute_end() reports it; the expert is not in the pool afterwards. An expert that was only read ahead, and that no
// token then chose, is no error: it counts in read_errors, and is read again when one does.
//
// Nor is a router that chose nonsense (an expert that there is not, one expert twice for a token: damaged weights, NaN): the batch
// of that layer reads nothing and gets ids of rows with defined bytes, and compute_end() says what was chosen. Memory that runs out
// between compute_begin() and compute_end() is an error of the same kind; nothing in between throws.

#include "device-tier.h"
#include "expert-ring.h"
#include "policy.h"
#include "ram-tier.h"
#include "reader.h"
#include "slot-pool.h"
#include "stats.h"
#include "trace.h"
#include "trial.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace moe {

// one expert tensor (gate, up, down or gate_up) of a layer; a layer lists them in the order in which they are computed with
struct expert_part {
    int32_t   file;           // index into the reader's files
    uint64_t  offset;         // bytes, of expert 0 in the file
    uint64_t  expert_bytes;   // of one expert; also the stride in file, slots and staging
    uint8_t * slots;          // n_slot * expert_bytes
    uint64_t  staging_offset; // bytes, of expert 0 in a staging half
    const conversion * convert = nullptr; // what slots and staging hold is this of the file's bytes
    uint64_t  pad_bytes = 0;              // behind an expert in staging, that kernels read without using them: they must be numbers
};

struct layer_desc {
    int32_t layer;    // the block number in the model
    int32_t n_expert;
    int32_t n_slot;   // <= n_expert
    std::vector<expert_part> parts;
    std::vector<int32_t> kept = {}; // experts that never leave their slot
    std::vector<int32_t> warm = {}; // experts to fill empty slots with, in this order
    const storage * at = nullptr;   // where slots and staging are
    uint8_t * staging  = nullptr;   // as options::staging, for layers whose halves are elsewhere; null: those
    bool by_device     = false;     // the device looks after the slots

    // slots that a batch may have all to itself
    int32_t n_free_slot() const { return n_slot >= n_expert ? n_slot : n_slot - (int32_t) kept.size(); }

    uint64_t expert_bytes() const {
        uint64_t n = 0;
        for (const expert_part & p : parts) {
            n += p.expert_bytes;
        }
        return n;
    }
};

// the experts chosen for a batch: n_used ids for each of n_tokens, strides in bytes
struct chosen_experts {
    const uint8_t * data;
    int64_t  n_used;
    int64_t  n_tokens;
    uint64_t stride_used;
    uint64_t stride_token;

    int32_t at(int64_t token, int64_t k) const {
        return *(const int32_t *) (data + token * stride_token + k * stride_used);
    }
};

// whether the experts that a batch of this shape may touch all fit into the slots; the same for every graph of the shape
inline bool fits_slots(int32_t n_expert, int32_t n_free_slot, int64_t n_used, int64_t n_tokens) {
    return n_free_slot >= n_expert || n_used * n_tokens <= n_free_slot;
}

// whether it touches so many (with uniform routing 98%) that reading all of them ahead wastes little
inline bool touches_nearly_all(int32_t n_expert, int64_t n_used, int64_t n_tokens) {
    return n_used * n_tokens >= 4 * (int64_t) n_expert;
}

// whether guesses are read ahead: automatic measures, again and again, whether graphs are faster with them
enum class prefetch_kind : int32_t { off, on, automatic };

class stream {
public:
    struct options {
        policy_kind policy  = policy_kind::lru;
        bool        poison  = false;   // MOESTREAM_POISON: fill evicted slots and reused halves with 0xff (tests)
        bool        check   = false;   // MOESTREAM_CHECK: a slot that is used must have the checksum it had when it was filled (tests)
        uint8_t   * staging = nullptr; // two halves, one behind the other, or the ring; null when no layer needs them
        uint64_t    half_bytes = 0;
        int32_t     n_ring     = 0;    // entries of the ring; 0: halves
        uint64_t    ring_bytes = 0;    // of an entry: room for the largest part
        uint8_t   * ram        = nullptr; // the RAM tier's slabs; null: there is none
        uint64_t    ram_bytes  = 0;
        uint8_t   * guesses     = nullptr; // n_guess entries; null: nothing is guessed
        int32_t     n_guess     = 0;
        prefetch_kind prefetch  = prefetch_kind::on;
        uint64_t    guess_bytes = 0;       // of an entry: room for an expert of any layer, each part aligned as in a slab
        trace_writer * trace = nullptr; // of what valid batches chose; null: nothing is recorded
        device_tier::options device = {}; // for layers that a device looks after; without a mailbox there are none
        bool device_guesses = false;      // the device may fetch ahead
    };

    stream(const options & opt, std::vector<layer_desc> layers, std::unique_ptr<reader> io);
    ~stream();

    int32_t n_layers() const { return (int32_t) layers.size(); }

    // around the computation of a graph; end() waits for what is unfinished and returns the first error, or "", after it has called when_failed
    void        compute_begin();
    std::string compute_end(bool complete, const std::function<void()> & when_failed = {});

    // ids_out: n_used * n_tokens ids for the expert matmuls, packed. read_next: also read all of the next layer, which is staged, too.
    void begin_slots  (int32_t i_layer, const chosen_experts & chosen, int32_t * ids_out, bool late = false);
    void begin_staging(int32_t i_layer, const chosen_experts & chosen, int32_t * ids_out, bool read_next, bool late = false);

    // every compute thread calls wait(); the first of them then calls settle(), once, before the next begin
    void wait  (int32_t i_layer, bool staged, bool is_first_thread);
    void settle(int32_t i_layer, bool staged);

    // of the layer begun last, when late: the slots, or the experts in staging, in the order to take them; empty when all are there.
    // Valid until the next begin.
    const std::vector<int32_t> & order() const { return late.order; }

    // all n_thread compute threads, part after part, for all steps of order(): the bytes, when they are there; valid until the thread
    // takes the next
    const uint8_t * take(int32_t i_layer, bool staged, int32_t part, int32_t step, int32_t ith, int32_t n_thread);

    // Begins to fill empty slots, as layer_desc::warm says, the first of each layer first; at most once. Throws std::system_error when there
    // is no thread for it. A fill that fails is no error of any graph; it counts in read_errors.
    void start_warm();

    // Reads ahead what the layer, which is the next to begin, and late, will probably want: the likeliest first. Between begin() of the
    // layer before it and its settle(). What has a slot, or a slab, is not read; when no entry is free, neither is the rest.
    void guess(int32_t i_layer, const int32_t * experts, int32_t n);

    // Reads all experts of a layer that a device looks after into the slots of their own numbers, before any graph. Throws
    // std::runtime_error when one cannot be read.
    void fill_all(int32_t i_layer);

    // whether guess() is to be called in the graph that computes; the same for all of it
    bool wants_guesses() const { return guessing; }

    // a place in the graph where it could be, of n_tokens
    void note_guess_place(int64_t n_tokens) { guess_tokens = n_tokens; }

    // sleep until nothing is left to fill, or the time is over; false: something is
    bool wait_warm(std::chrono::seconds at_most);

    // takes the model's files out of the page cache, whoever read them: dense weights are resident by now, and their cached copy
    // would count against a memory limit beside them
    void drop_cache() { io->drop_cache(); }

    const stream_stats & stats() const { return stats_; }
    // bytes of the RAM tier's slabs, of the budget that it was given
    uint64_t ram_bytes() const { return ram ? ram->bytes() : tier ? tier->bytes() : 0; }

    // of layers that a device looks after, into the statistics: what its counters are now
    void note_device_counters(int32_t i_layer, const device_layer_state & now);

    // where a part begins in a slab of such a layer
    uint64_t offset_in_device_slab(int32_t i_layer, size_t i_part) const { return tier->offset_in_slab(i_layer, i_part); }

    uint64_t bounce_bytes() const { return io ? io->bounce_bytes() : 0; }

private:
    struct half {
        int32_t              i_layer = -1;      // whose experts it holds
        std::vector<uint8_t> filled;            // [n_expert] 1: there, or on its way in fill; 2: likewise, and a batch needs it
        transfer_group       fill;
        std::vector<landing> landings;            // [max n_part][max n_expert]
        bool                 copying_out = false; // the layer's slot group reads from it
        std::vector<int32_t> held;                // slabs that fill reads from
    };

    // a miss whose bytes are on the way to its slot
    struct slot_fill {
        placement at;
        int32_t   i_guess   = -1;    // comes from this entry: first computed with there, then copied
        bool      copying   = false; // from an entry, or a half, after the layer has computed: nobody waits for it
        bool      failed    = false; // the entry's read did
        int32_t   saved     = -1;    // the slab that what the slot held goes to
        int32_t   source    = -1;    // the slab that has the bytes
        uint64_t  checksum  = 0;     // with options::check: of what is in source
    };

    // room for an expert that was guessed
    struct guess_entry {
        int32_t              i_layer = -1; // that will want it; -1: nobody does any more
        int32_t              expert  = -1;
        bool                 used    = false; // by the layer, and not on its way to the slot yet
        uint64_t             n_cancelled = 0; // bytes
        transfer_group       read;
        std::vector<landing> landings; // [max n_part]
        landing              copied;   // to its slot
    };

    // what was begun late and is not settled yet
    struct late_layer {
        int32_t              i_layer = -1;
        bool                 staged  = false;
        std::vector<int32_t> order;
        std::vector<int32_t> slots;      // ring: by step, for the steps before those of the ring
        std::vector<int32_t> guesses;    // slots: by step, the entry, or -1
    };

    struct layer_state {
        const int32_t          index;
        layer_desc             desc;
        slot_pool              pool;
        transfer_group         group;     // fills of slots
        std::vector<slot_fill> pending;   // what group fills
        std::vector<int32_t>   held;      // slabs that group reads or writes
        std::vector<landing>   landings;  // [n_part][n_slot]
        transfer_group         warm;
        int32_t                warm_slot = -1;       // filled by warm; -1: none is
        int32_t                warm_slab = -1;       // likewise
        std::vector<int32_t>   last_experts;         // of the last tokens, newest first, at most n_free_slot()
        std::vector<uint64_t>  checksums;            // [n_slot] with options::check, of what a ready slot was filled with
        layer_stats          * stats = nullptr;

        layer_state(const layer_desc & d, policy_kind kind, int32_t index)
            : index(index), desc(d), pool(d.n_slot, d.n_expert, kind), landings(d.parts.size() * d.n_slot) {
            for (const int32_t e : d.kept) {
                pool.keep(e);
            }
        }

        bool is_warming() const { return warm_slot >= 0 || warm_slab >= 0; }
    };

    bool list_chosen(const layer_desc & d, const chosen_experts & chosen);
    void record(int32_t i_layer, const chosen_experts & chosen);
    void list_last(layer_state & l, const chosen_experts & chosen);
    void check_slot(layer_state & l, int32_t expert);
    void note_changed(const char * what, const layer_state & l, int32_t number, int32_t expert);
    bool has_bytes(const layer_state & l, int32_t expert) const;
    void wait_for(transfer_group & group, layer_stats & waiting);
    void begin_late(int32_t i_layer, bool staged);
    void settle_late();
    void settle_ring(layer_state & l);
    void begin_ring(int32_t i_layer, const chosen_experts & chosen, int32_t * ids_out);
    void fill_slots(layer_state & l, const half * from);
    void add_transfer(layer_state & l, const slot_fill & f, const half * from, size_t i_part);
    void release(std::vector<int32_t> & held);
    void release(const layer_state & l, std::vector<int32_t> & held);
    int32_t find_slab(const layer_state & l, int32_t expert) const;
    int32_t hold_slab(const layer_state & l, int32_t expert, std::vector<int32_t> & held);
    uint8_t * in_slab(int32_t slab, const layer_desc & d, size_t i_part) const;
    uint8_t * in_entry(int32_t i_guess, const layer_desc & d, size_t i_part) const;
    int32_t use_guess(int32_t i_layer, int32_t expert);
    void forgive(guess_entry & g);
    void drop_guesses(int32_t i_layer);
    void copy_guessed(layer_state & l, layer_stats & waiting);
    landing & landing_of(half & h, size_t part, int32_t expert) { return h.landings[part * seen.size() + expert]; }
    void settle_slots(layer_state & l, layer_stats & waiting);
    void settle_fills(layer_state & l, layer_stats & waiting);
    void zero_slot(layer_state & l, int32_t slot);
    void settle_warm(layer_state & l);
    void take_warm(layer_state & l);
    void warm_up();
    int32_t begin_warm();
    void settle_half(half & h, layer_stats & waiting);
    void claim_half(half & h, int32_t i_layer, layer_stats & waiting);
    void fill_half(half & h, layer_state & l, const std::vector<int32_t> & experts, urgency how);
    void copy_to_slots(half & h, layer_state & l);
    uint64_t slot_checksum(const layer_desc & d, int32_t slot);
    void pad_half(half & h, const layer_desc & d, const std::vector<int32_t> & experts);
    void note_error(const char * what, size_t n_failed);
    uint8_t * in_half(const half & h, const layer_desc & d, const expert_part & part, int32_t expert) const;

    half & half_of(int32_t i_layer) { return halves[i_layer % 2]; }

    const options opt;
    std::vector<std::unique_ptr<layer_state>> layers;
    half          halves[2];
    late_layer    late;
    stream_stats  stats_;

    std::mutex  compute; // held from compute_begin() to compute_end()
    std::string error;   // of the running graph; guarded by compute

    // What warm fills touch of a pool belongs to the computing thread while is_computing, else to who holds warm_mutex.
    std::mutex              warm_mutex;
    std::condition_variable warm_changed;
    bool                    is_computing  = false; // guarded by warm_mutex
    bool                    warm_stopping = false; // guarded by warm_mutex
    bool                    warm_left     = false; // guarded by warm_mutex: there is something to fill
    size_t                  warm_rank     = 0;     // of the next fill: place in layer_desc::warm
    size_t                  warm_layer    = 0;     // and its layer
    std::vector<transfer>   warm_transfers;
    std::thread             warm_thread;

    // scratch of the computing thread, as large as it gets from the start
    std::vector<int32_t>   scratch_experts;
    std::vector<uint64_t>  slab_sums; // [n_slab] with options::check, of what a slab was filled with
    std::vector<uint64_t>  seen;      // [max n_expert] the last seen_mark under which it was met
    uint64_t               seen_mark = 0;
    std::vector<placement> scratch_placed;
    std::vector<int32_t>   slot_by_expert; // [max n_expert]; or slab
    std::vector<transfer>  scratch_transfers;
    std::vector<uint8_t>   scratch_bytes; // with options::check: a part of an expert whose slots are in a storage

    std::unique_ptr<ram_tier> ram; // null: there is none; or the device's
    std::vector<int32_t>      ring_held; // slabs that the ring reads from
    std::vector<std::unique_ptr<guess_entry>> guesses;
    trial    guess_trial;
    bool     guessing     = false; // in the running graph
    int64_t  guess_tokens = 0;     // of the running graph; 0: there was no place to guess
    uint64_t begin_us     = 0;     // of the running graph

    // last, so that its workers end before what they write to
    std::unique_ptr<reader> io;
    std::unique_ptr<expert_ring> ring; // null: halves
    std::unique_ptr<device_tier> tier; // null: no device looks after slots

    std::vector<device_layer_state> device_before; // [layer] counters when they were looked at last
};

} // namespace moe
