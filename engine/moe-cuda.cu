// Kernels of pools that the device looks after itself (device-pool.h).

#include "moe-cuda.h"

#include "device-pool.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

using namespace moe;

static constexpr int n_threads = 256;
static constexpr int max_blocks = 32;       // enough to keep the link busy, few enough to start quickly
static constexpr int max_pauses = 2000;     // dozes of 100 ns that a fetch ahead waits before each piece: no two kernels may wait for each other for ever
static constexpr uint64_t piece_bytes = 32768;

static __device__ __forceinline__ uint64_t now_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

static __device__ __forceinline__ void doze() {
#if __CUDA_ARCH__ >= 700
    __nanosleep(100);
#endif
}

// the first error of a graph is kept
static __device__ void note_error(const device_layer & l, int32_t error, int32_t expert, int32_t token) {
    if (atomicExch(&l.control->failed, 1) == 0) {
        l.box->error_layer  = l.i_layer;
        l.box->error_expert = expert;
        l.box->error_token  = token;
        l.box->error        = error;
    }
}

// All threads of the first block: experts without a slab are asked for. What the host has not read has none afterwards.
static __device__ void ask(const device_layer & l, const int32_t * missing, int n_missing) {
    device_layer_state & s = *l.state;
    __shared__ uint32_t number;
    for (int i = threadIdx.x; i < n_missing; i += n_threads) {
        l.box->experts[i] = missing[i];
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        volatile device_mailbox & box = *l.box;
        box.i_layer  = l.i_layer;
        box.n_expert = n_missing;
        number = box.asked + 1;
        const uint64_t start = now_ns();
        bool in_time = true;
        const auto wait = [&](const volatile uint32_t & word, uint32_t value) {
            while (in_time && word != value) {
                doze();
                in_time = now_ns() - start <= l.timeout_ns;
            }
        };
        atomicExch(&l.control->asking, 1);
        __threadfence();
        wait(l.control->fetching, 0);
        __threadfence_system();
        if (in_time) {
            box.asked = number;
            __threadfence_system();
            wait(box.answered, number);
        }
        __threadfence_system();
        if (in_time) {
            atomicExch(&l.control->asking, 0);
        } else { // slabs may change now: nothing is fetched ahead until the host has cleared asking
            s.is_silent = 1;
            note_error(l, device_error_silent, missing[0], 0);
        }
    }
    __syncthreads();
}

// The slots of the n smallest keys, in order: an empty one first (0), then the one used longest ago. device_never: it does not give way.
static __device__ void find_victims(const device_layer & l, const uint32_t * keys, int n, int32_t * victims) {
    for (int c = threadIdx.x; c < l.n_slot; c += n_threads) {
        const uint32_t key = keys[c];
        int rank = 0;
        for (int i = 0; i < l.n_slot; ++i) {
            rank += keys[i] < key || (keys[i] == key && i < c);
        }
        if (key != device_never && rank < n) {
            victims[rank] = c;
        }
    }
}

// The first block, when something is missing: which slots give way, and what goes where.
static __device__ void choose_slots(const device_layer & l, uint32_t clock, const int32_t * missing, int n_missing, int32_t * slot_for) {
    device_layer_state & s = *l.state;
    __shared__ int32_t victims[device_max_ids];

    bool lacks = false;
    for (int i = threadIdx.x; i < n_missing; i += n_threads) {
        lacks = lacks || ((const volatile int64_t *) l.slab_of)[missing[i]] < 0;
    }
    const int n_lacking = __syncthreads_count(lacks);
    if (n_lacking > 0 && l.control->silent == 0) {
        if (threadIdx.x == 0) {
            s.asked += n_lacking;
        }
        ask(l, missing, n_missing);
    }

    __shared__ uint32_t keys[device_max_rows];
    for (int c = threadIdx.x; c < l.n_slot; c += n_threads) {
        const uint32_t key = l.expert_of[c] < 0 ? 0 : l.last_use[c];
        keys[c] = key == clock ? device_never : key;
    }
    __syncthreads();
    find_victims(l, keys, n_missing, victims);
    __syncthreads();
    for (int i = threadIdx.x; i < n_missing; i += n_threads) {
        const int32_t e    = missing[i];
        const int32_t slot = victims[i];
        s.slot[i]   = slot;
        s.expert[i] = e;
        s.slab[i]   = ((const volatile int64_t *) l.slab_of)[e];
        slot_for[i] = slot;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_missing; i += n_threads) { // when nobody compares any more
        l.last_use[victims[i]] = l.stays[missing[i]] ? device_never : clock;
    }
}

template <typename T, int n_loads>
static __device__ void copy_piece(uint8_t * dst, const uint8_t * src, uint64_t size) {
    const uint64_t n = size / sizeof(T);
    for (uint64_t first = threadIdx.x; first < n; first += n_loads * n_threads) {
        T values[n_loads];
#pragma unroll
        for (int k = 0; k < n_loads; ++k) {
            const uint64_t i = first + k * n_threads;
            if (i < n) {
                values[k] = __ldcv((const T *) src + i); // the host may have written it a moment ago
            }
        }
#pragma unroll
        for (int k = 0; k < n_loads; ++k) {
            const uint64_t i = first + k * n_threads;
            if (i < n) {
                ((T *) dst)[i] = values[k];
            }
        }
    }
}

// a fetch ahead lets others have the link that something waits for
static __device__ void give_way(const device_layer & l) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < max_pauses && *(const volatile uint32_t *) &l.control->copying != 0; ++i) {
            doze();
        }
    }
    __syncthreads();
}

// all blocks: the pieces of what is missing, in turn
template <int n_loads>
static __device__ void copy_missing(const device_layer & l, bool guessed) {
    const uint64_t n_block = gridDim.x;
    const device_layer_state & s = *l.state;
    const int n_copy = ((const volatile device_layer_state &) s).n_copy;
    uint64_t i_piece = 0;
    for (int p = 0; p < l.n_part; ++p) { // what is computed with first comes first
        const device_part & part = l.parts[p];
        const uint64_t n_piece = (part.bytes + piece_bytes - 1) / piece_bytes;
        for (int m = 0; m < n_copy; ++m) {
            const int64_t slab = ((const volatile int64_t *) s.slab)[m];
            const int32_t slot = ((const volatile int32_t *) s.slot)[m];
            uint64_t k = (blockIdx.x + n_block - i_piece % n_block) % n_block;
            i_piece += n_piece;
            for (; slab >= 0 && k < n_piece; k += n_block) {
                if (guessed) {
                    give_way(l);
                }
                const uint64_t pos  = k * piece_bytes;
                const uint64_t size = part.bytes - pos < piece_bytes ? part.bytes - pos : piece_bytes;
                uint8_t       * dst = part.slots + slot * part.bytes + pos;
                const uint8_t * src = l.slabs + slab + part.in_slab + pos;
                if (l.unit == 16) {
                    copy_piece<uint4, n_loads>(dst, src, size);
                } else if (l.unit == 4) {
                    copy_piece<uint32_t, n_loads>(dst, src, size);
                } else {
                    copy_piece<uint8_t, n_loads>(dst, src, size);
                }
            }
        }
    }
}

// the last block to finish: only now do the tables change, because until now a block that started late might have looked at them
static __device__ void update_tables(const device_layer & l, bool guessed) {
    device_layer_state & s = *l.state;
    __shared__ uint32_t n_evicted;
    if (threadIdx.x == 0) {
        n_evicted = 0;
    }
    __syncthreads();
    const int n_copy = ((volatile device_layer_state &) s).n_copy;
    for (int m = threadIdx.x; m < n_copy; m += n_threads) {
        const int32_t slot   = ((volatile int32_t *) s.slot)[m];
        const int32_t expert = ((volatile int32_t *) s.expert)[m];
        const bool    there  = ((volatile int64_t *) s.slab)[m] >= 0;
        const int32_t old    = l.expert_of[slot];
        if (old >= 0) {
            l.slot_of[old] = -1;
            atomicAdd(&n_evicted, 1);
        }
        l.expert_of[slot] = there ? expert : -1;
        if (there) {
            l.slot_of[expert] = slot;
        }
        l.is_guess[slot] = guessed;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        s.evictions += n_evicted;
        (guessed ? s.guesses : s.misses) += n_copy;
        if (s.is_silent) {
            l.control->silent = 1;
            s.is_silent = 0;
        }
        atomicSub(guessed ? &l.control->fetching : &l.control->copying, 1);
        s.n_done = 0;
        s.ready  = 0;
        s.guess_ready = 0;
    }
}

// all blocks: the copies, and, when all of them are done, the tables
template <int n_loads>
static __device__ void copy_and_update(const device_layer & l, bool guessed) {
    __shared__ bool is_last;
    copy_missing<n_loads>(l, guessed);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(&l.state->n_done, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (is_last) {
        update_tables(l, guessed);
    }
}

// All blocks see the same tables and come to the same conclusion whether something is missing; if nothing is, all but the first end at once.
__global__ void __launch_bounds__(n_threads) map_experts(const device_layer l, const char * ids, int64_t stride_used, int64_t stride_token,
        int n_used, int n_tokens, int32_t * out) {
    __shared__ int32_t chosen[device_max_ids];
    __shared__ int32_t missing[device_max_ids];  // experts, each once, as they were chosen
    __shared__ int32_t slot_for[device_max_ids]; // of those
    __shared__ uint8_t is_new[device_max_ids];
    __shared__ int32_t n_guessed;
    const int n = n_used * n_tokens;
    if (threadIdx.x == 0) {
        n_guessed = 0;
    }

    // one id a thread; all that is needed is asked of memory at once
    static_assert(n_threads >= device_max_ids, "one id a thread");
    device_layer_state & s = *l.state;
    const int      i     = threadIdx.x;
    const int32_t  dry   = l.control->dry;
    const int32_t  ahead = l.control->guessing;
    const uint32_t clock = s.clock + 1;
    const int32_t  e     = i < n ? *(const int32_t *) (ids + (i / n_used) * stride_token + (i % n_used) * stride_used) : 0;
    const bool exists = e >= 0 && e < l.n_expert;
    const int32_t slot  = exists ? l.slot_of[e] : 0;
    const uint8_t stays = exists && blockIdx.x == 0 ? l.stays[e] : 0;
    if (i < n) {
        chosen[i] = e;
    }
    __syncthreads();
    bool twice = false; // for its token
    bool first = true;  // of the batch
    if (i < n) {
        for (int k = 0; k < i; ++k) {
            const bool same = chosen[k] == e;
            first = first && !same;
            twice = twice || (same && k >= i / n_used * n_used);
        }
    }
    const bool is_bad  = i < n && (!exists || twice);
    const bool is_miss = i < n && exists && slot < 0;
    const bool any_missing = __syncthreads_or(is_bad || is_miss || dry != 0);
    if (any_missing && (dry != 0 || __syncthreads_or(is_bad))) {
        if (blockIdx.x == 0 && i < n) {
            out[i] = i % n_used;
            if (is_bad && dry == 0) {
                note_error(l, exists ? device_error_twice : device_error_range, e, i / n_used);
            }
        }
        return;
    }

    if (blockIdx.x == 0) {
        if (i < n) {
            is_new[i] = first && slot < 0;
            if (slot >= 0) {
                out[i] = slot;
                l.last_use[slot] = stays ? device_never : clock;
                if (ahead && first && l.is_guess[slot]) {
                    l.is_guess[slot] = 0;
                    atomicAdd(&n_guessed, 1);
                }
            }
        }
        const int n_hits = __syncthreads_count(i < n && first && slot >= 0);
        if (threadIdx.x == 0) {
            s.clock   = clock;
            s.hits   += n_hits;
            s.tokens += n_tokens;
            s.guess_hits += n_guessed;
        }
        if (any_missing) {
            int n_missing = 0;
            int rank = 0;
            for (int k = 0; k < n; ++k) {
                n_missing += is_new[k];
                rank      += k < i ? is_new[k] : 0;
            }
            if (i < n && is_new[i]) {
                missing[rank] = e;
            }
            __threadfence(); // last_use
            __syncthreads();
            choose_slots(l, clock, missing, n_missing, slot_for);
            __syncthreads();
            for (int m = 0; i < n && slot < 0 && m < n_missing; ++m) {
                if (missing[m] == e) {
                    out[i] = slot_for[m];
                }
            }
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                s.n_copy = n_missing;
                atomicAdd(&l.control->copying, 1);
                __threadfence();
                atomicExch(&s.ready, 1);
            }
        }
    }
    if (!any_missing) {
        return;
    }
    if (threadIdx.x == 0) {
        while (((volatile device_layer_state &) s).ready == 0) {
            doze();
        }
        __threadfence();
    }
    __syncthreads(); // in the first block, too: what is to be copied is written by one thread and read by all
    copy_and_update<8>(l, false);
}

static __device__ __forceinline__ float to_float(float x) { return x; }
static __device__ __forceinline__ float to_float(half x) { return __half2float(x); }
static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> struct alignas(4 * sizeof(T)) four {
    T x[4];
};

// a warp for each expert and token
template <typename T>
static __device__ void score_part(const device_layer & l, const char * state, int64_t stride, int n_tokens, const char * rows, int64_t row_bytes, int n_embd) {
    const int n_warps = gridDim.x * n_threads / 32;
    const int lane    = threadIdx.x % 32;
    for (int i = (blockIdx.x * n_threads + threadIdx.x) / 32; i < l.n_expert * n_tokens; i += n_warps) {
        const int e = i % l.n_expert;
        const int t = i / l.n_expert;
        const four<T>     * row = (const four<T> *) (rows + e * row_bytes);
        const four<float> * x   = (const four<float> *) (state + t * stride);
        float sum = 0.0f;
#pragma unroll 4
        for (int k = lane; k < n_embd / 4; k += 32) {
            const four<T>     a = row[k];
            const four<float> b = x[k];
            sum += to_float(a.x[0]) * b.x[0] + to_float(a.x[1]) * b.x[1] + to_float(a.x[2]) * b.x[2] + to_float(a.x[3]) * b.x[3];
        }
        for (int offset = 16; offset > 0; offset /= 2) {
            sum += __shfl_down_sync(0xffffffff, sum, offset);
        }
        if (lane == 0) {
            sum += l.router_bias ? l.router_bias[e] : 0.0f;
            sum  = l.choice_bias ? 1.0f / (1.0f + __expf(-sum)) + l.choice_bias[e] : sum;
            l.scores[t * l.n_expert + e] = sum == sum ? sum : -INFINITY; // NaN is less than everything
        }
    }
}

// The last block to have scored: what is wanted, has no slot and has a slab, and which slots give way to it. None does whose expert is wanted too.
static __device__ void choose_guesses(const device_layer & l, int n_tokens) {
    device_layer_state & s = *l.state;
    __shared__ float    scores[device_max_rows];
    __shared__ uint32_t keys[device_max_rows];
    __shared__ uint8_t  is_wanted[device_max_rows];
    __shared__ int32_t  found[device_max_ids];
    __shared__ int32_t  victims[device_max_ids];
    __shared__ int32_t  n_found;
    __shared__ bool     may_fetch;
    if (threadIdx.x == 0) {
        n_found = 0;
        atomicAdd(&l.control->fetching, 1); // whoever asks now waits for the end of this; whoever has asked is seen
        __threadfence();
        may_fetch = *(const volatile uint32_t *) &l.control->asking == 0;
    }
    for (int t = 0; t < n_tokens; ++t) {
        __syncthreads();
        for (int e = threadIdx.x; e < l.n_expert; e += n_threads) {
            scores[e] = __ldcg(l.scores + t * l.n_expert + e); // of other blocks
        }
        __syncthreads();
        for (int e = threadIdx.x; e < l.n_expert; e += n_threads) {
            const float mine = scores[e];
            int rank = 0;
            for (int i = 0; i < l.n_expert; ++i) {
                rank += scores[i] > mine || (scores[i] == mine && i < e);
            }
            is_wanted[e] = (t > 0 && is_wanted[e]) || rank < l.n_used;
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < l.n_expert; e += n_threads) {
        if (is_wanted[e] && l.slot_of[e] < 0 && ((const volatile int64_t *) l.slab_of)[e] >= 0) {
            const int i = atomicAdd(&n_found, 1);
            if (i < device_max_ids) {
                found[i] = e;
            }
        }
    }
    int n_mine = 0;
    for (int c = threadIdx.x; c < l.n_slot; c += n_threads) {
        const int32_t e = l.expert_of[c];
        keys[c] = e < 0 ? 0 : is_wanted[e] ? device_never : l.last_use[c];
        n_mine += keys[c] != device_never;
    }
    int n_free = 0; // device_max_rows / n_threads rounds
    for (int k = 1; k <= device_max_rows / n_threads; ++k) {
        n_free += __syncthreads_count(n_mine >= k);
    }
    const int n = may_fetch ? min(min(n_found, device_max_ids), n_free) : 0;
    find_victims(l, keys, n, victims);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += n_threads) { // last_use stays: they are the next to give way, until they are used
        s.slot[i]   = victims[i];
        s.expert[i] = found[i];
        s.slab[i]   = ((const volatile int64_t *) l.slab_of)[found[i]];
    }
    if (threadIdx.x == 0) {
        s.n_copy      = n;
        s.guess_ready = n > 0;
        if (n == 0) {
            atomicSub(&l.control->fetching, 1);
        }
    }
}

__global__ void __launch_bounds__(n_threads) guess_experts(const device_layer l, const char * state, int64_t stride, int n_tokens, const char * rows, int64_t row_bytes,
        int n_embd, int type) {
    if (l.control->dry != 0 || l.control->guessing == 0) {
        return;
    }
    if (type == device_f32) {
        score_part<float>(l, state, stride, n_tokens, rows, row_bytes, n_embd);
    } else if (type == device_f16) {
        score_part<half>(l, state, stride, n_tokens, rows, row_bytes, n_embd);
    } else {
        score_part<__nv_bfloat16>(l, state, stride, n_tokens, rows, row_bytes, n_embd);
    }
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(&l.state->n_scored, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (is_last) {
        choose_guesses(l, n_tokens);
        if (threadIdx.x == 0) {
            l.state->n_scored = 0;
        }
    }
}

__global__ void __launch_bounds__(n_threads) fetch_guesses(const device_layer l) {
    if (l.state->guess_ready != 0) { // does not change before all blocks have looked
        copy_and_update<4>(l, true); // fewer at a time: others compute meanwhile
    }
}

// tests: a block for each id
__global__ void check_slots(const device_layer l, const char * ids, int64_t stride_used, int64_t stride_token, int n_used, const int32_t * out) {
    const int i = blockIdx.x;
    const int32_t e = *(const int32_t *) (ids + (i / n_used) * stride_token + (i % n_used) * stride_used);
    if (l.control->dry != 0 || e < 0 || e >= l.n_expert) {
        return;
    }
    const int64_t slab = ((const volatile int64_t *) l.slab_of)[e];
    const int32_t slot = out[i];
    if (slab < 0 || l.slot_of[e] != slot) {
        return;
    }
    bool differs = false;
    for (int p = 0; p < l.n_part; ++p) {
        const device_part & part = l.parts[p];
        for (uint64_t k = threadIdx.x; k < part.bytes; k += blockDim.x) {
            differs = differs || part.slots[slot * part.bytes + k] != __ldcv(l.slabs + slab + part.in_slab + k);
        }
    }
    if (differs) {
        note_error(l, device_error_bytes, e, i / n_used);
    }
}

static void moe_cuda_map(ggml_tensor *, int, int, void *) {
    fprintf(stderr, "moe_cuda_map: computed on the processor\n");
    abort();
}

static void moe_cuda_guess(ggml_tensor *, int, int, void *) {
    fprintf(stderr, "moe_cuda_guess: computed on the processor\n");
    abort();
}

// fetches ahead that nobody has waited for yet
static std::mutex                                           forks_mutex;
static std::vector<std::pair<cudaStream_t, device_layer *>> forks;

// layer: null for all of the stream
static bool join(cudaStream_t stream, const device_layer * layer) {
    std::lock_guard<std::mutex> lock(forks_mutex);
    bool ok = true;
    forks.erase(std::remove_if(forks.begin(), forks.end(), [&](const auto & f) {
        const bool mine = f.first == stream && (!layer || f.second == layer);
        ok = ok && (!mine || cudaStreamWaitEvent(stream, (cudaEvent_t) f.second->joined, 0) == cudaSuccess);
        return mine;
    }), forks.end());
    return ok;
}

void moe_cuda_join(cudaStream_t stream) {
    join(stream, nullptr);
}

static void moe_cuda_release(void * layer) {
    device_layer & l = *(device_layer *) layer;
    {
        std::lock_guard<std::mutex> lock(forks_mutex);
        forks.erase(std::remove_if(forks.begin(), forks.end(), [&](const auto & f) { return f.second == &l; }), forks.end());
    }
    if (l.guess_stream) {
        cudaStreamDestroy((cudaStream_t) l.guess_stream);
        cudaEventDestroy((cudaEvent_t) l.forked);
        cudaEventDestroy((cudaEvent_t) l.joined);
        l.guess_stream = l.forked = l.joined = nullptr;
    }
}

static bool make_stream(device_layer & l) {
    if (l.guess_stream) {
        return true;
    }
    cudaStream_t stream;
    cudaEvent_t  forked;
    cudaEvent_t  joined;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess || cudaEventCreateWithFlags(&forked, cudaEventDisableTiming) != cudaSuccess ||
            cudaEventCreateWithFlags(&joined, cudaEventDisableTiming) != cudaSuccess) {
        return false;
    }
    l.guess_stream = stream;
    l.forked       = forked;
    l.joined       = joined;
    return true;
}

// Of a kernel here. On a small card no more than leave room for others: some of these kernels wait for what others do.
static int n_blocks() {
    static std::mutex mutex;
    static std::vector<int> known; // by device; 0: not asked yet
    int device = 0;
    cudaGetDevice(&device);
    std::lock_guard<std::mutex> lock(mutex);
    if (device >= (int) known.size()) {
        known.resize(device + 1, 0);
    }
    if (known[device] == 0) {
        int n_multiprocessor = 0;
        cudaDeviceGetAttribute(&n_multiprocessor, cudaDevAttrMultiProcessorCount, device);
        known[device] = std::clamp(n_multiprocessor, 1, max_blocks);
    }
    return known[device];
}

// in a stream beside the graph's, until the layer's experts are mapped
static bool start_guess(const ggml_tensor * dst, device_layer & l, cudaStream_t stream) {
    const ggml_tensor * state  = dst->src[0];
    const ggml_tensor * router = dst->src[1];
    if (!make_stream(l) || !join(stream, &l)) {
        return false;
    }
    const cudaStream_t side = (cudaStream_t) l.guess_stream;
    if (cudaEventRecord((cudaEvent_t) l.forked, stream) != cudaSuccess || cudaStreamWaitEvent(side, (cudaEvent_t) l.forked, 0) != cudaSuccess) {
        return false;
    }
    const int type = router->type == GGML_TYPE_F32 ? device_f32 : router->type == GGML_TYPE_F16 ? device_f16 : device_bf16;
    guess_experts<<<n_blocks(), n_threads, 0, side>>>(l, (const char *) state->data, state->nb[1], (int) state->ne[1], (const char *) router->data,
            router->nb[1], (int) router->ne[0], type);
    std::lock_guard<std::mutex> lock(forks_mutex);
    // what is wanted first comes first: behind the last, which is behind all before it
    const auto last = std::find_if(forks.rbegin(), forks.rend(), [&](const auto & f) { return f.first == stream; });
    if (last != forks.rend() && cudaStreamWaitEvent(side, (cudaEvent_t) last->second->joined, 0) != cudaSuccess) {
        return false;
    }
    fetch_guesses<<<n_blocks(), n_threads, 0, side>>>(l);
    if (cudaEventRecord((cudaEvent_t) l.joined, side) != cudaSuccess) {
        return false;
    }
    forks.push_back({ stream, &l });
    return cudaGetLastError() == cudaSuccess;
}

// of ggml_custom_4d(), as upstream's ggml-impl.h has it
struct custom_params {
    ggml_custom_op_t fun;
    int              n_tasks;
    void           * userdata;
};

static custom_params params_of(const ggml_tensor * op) {
    custom_params p;
    memcpy(&p, op->op_params, sizeof(p));
    return p;
}

bool moe_cuda_supports(const ggml_tensor * op) {
    return op->op == GGML_OP_CUSTOM && (params_of(op).fun == moe_cuda_map || params_of(op).fun == moe_cuda_guess);
}

bool moe_cuda_compute(const ggml_tensor * dst, cudaStream_t stream) {
    if (!moe_cuda_supports(dst)) {
        return false;
    }
    const ggml_tensor  * ids = dst->src[0];
    device_layer       & l   = *(device_layer *) params_of(dst).userdata;
    if (params_of(dst).fun == moe_cuda_guess) {
        return start_guess(dst, l, stream);
    }
    if (!join(stream, &l)) {
        return false;
    }
    const int n_used   = (int) ids->ne[0];
    const int n_tokens = (int) ids->ne[1];
    map_experts<<<n_blocks(), n_threads, 0, stream>>>(l, (const char *) ids->data, ids->nb[0], ids->nb[1], n_used, n_tokens, (int32_t *) dst->data);
    if (l.checks) {
        check_slots<<<n_used * n_tokens, n_threads, 0, stream>>>(l, (const char *) ids->data, ids->nb[0], ids->nb[1], n_used, (const int32_t *) dst->data);
    }
    return cudaGetLastError() == cudaSuccess;
}

static void require(cudaError_t status, const char * what) {
    if (status != cudaSuccess) {
        fprintf(stderr, "moestream: %s: %s\n", what, cudaGetErrorString(status));
        abort();
    }
}

static int of_device(const void * p) {
    cudaPointerAttributes attributes;
    require(cudaPointerGetAttributes(&attributes, p), "asking where memory is");
    return attributes.device;
}

static void write_begin(int device, void * dst, const void * src, size_t size) {
    require(cudaSetDevice(device), "choosing a device");
    require(cudaMemcpyAsync(dst, src, size, cudaMemcpyHostToDevice, cudaStreamPerThread), "copying experts to a device");
}

static void write_end(int device) {
    require(cudaSetDevice(device), "choosing a device");
    require(cudaStreamSynchronize(cudaStreamPerThread), "copying experts to a device");
}

void * moe_cuda_functions(int (*slot_tokens)(ggml_backend_dev_t, ggml_type)) {
    static moe_device_functions functions = { slot_tokens, moe_cuda_map, moe_cuda_guess, moe_cuda_release, of_device, write_begin, write_end };
    return &functions;
}
