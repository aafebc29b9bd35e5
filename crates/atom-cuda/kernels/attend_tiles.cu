// Paged attention of rows in tiles, for spans of many rows: sm_90a only (TMA, wgmma), bf16.
//
// attend_tiles_bf16, compiled with WIDTH = 64, 96, 128 or 256: the smallest that is >= head_dim; head_dim a multiple of 8.
//   grid   any number of blocks up to the multiprocessors (one block each); fixed when recorded
//   block  384: warp 0 brings keys and values, warps 4..12 compute
//   dynamic shared memory  1280 + W * (256 + 4 * STAGES * KEYS) bytes, where W is WIDTH rounded up to 64, KEYS is
//          128 (64 for a WIDTH of 256), and STAGES 4, 3, 3, 2
//   q_map  3-D bf16 tensor over qkv: {head_dim, heads of q (and more), rows}, box {64, group, 128 / group},
//          swizzle 128 B; group = q_heads / kv_heads <= 128
//   k_map, v_map  2-D bf16 tensors over a layer's cache: {head_dim, pages * kv_heads * page_size}, box {64, granule},
//          swizzle 128 B; granule = gcd(page_size, KEYS)
//   With E4M3 the cache is e4m3, head_dim a multiple of 16, and what differs is in attend_tiles_e4m3.cuh: STAGES are 3, 2, 2, 2
//          and INCOMING, of codes, 2, 2, 2, 1; shared memory 1280 + W * (256 + 4 * STAGES * KEYS + 2 * INCOMING * KEYS) bytes;
//          k_map, v_map  2-D tensors of bytes, box {64, granule}, no swizzle
//   header[TILES]  tiles in the list; none: every block returns at once
//   tiles  {first_row, rows, start, slot}: rows first_row .. + rows of one span, at most 128 / group of them, at
//          positions start .. ; best longest first within a span, spans with most work first
//   counters  u32[2], 0 before the first launch; 0 again after each
//   out, sinks, window, scale: as in attend_simple.cu
//
// A tile is 128 rows of the matrix S = Q K^T: its tokens times the query heads of one kv head, token by token. Two
// warpgroups hold 64 of them each, go through blocks of KEYS absolute positions, last to first, and take turns on
// the tensor cores: while one multiplies, the other takes exponentials. A block that a row may not see leaves its
// sums as they are, to the bit; so a row's result depends on its own position and not on its tile.
// Pages behind the tile's end are never read. What its last page holds behind the end, and rows of qkv that fill up the
// last box, may be anything: they reach no sum that is stored.

#include "dependent.cuh"
#include "hopper_attend.cuh"
#ifdef E4M3
#include "e4m3.cuh"
#define FACTORS "f16.f16"
#else
#define FACTORS "bf16.bf16"
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// wgmma of 64 rows by N columns by 16, as Wgmma in hopper.cuh, with as many sums as there are: `keys` takes both operands
/// from shared memory and starts from zero if not `add`, `keys_of` takes A from registers, `values` does and B with contiguous
/// columns.
template <int N>
struct Mma;

#define MMA(N, R0, R1, R2, R3, R4, R5, REGS, ...)                                                                          \
    template <>                                                                                                        \
    struct Mma<N> {                                                                                                    \
        static __device__ __forceinline__ void keys(float (&d)[N / 2], u64 a, u64 b, int add) {                        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " R2 ", 0;\n"                                            \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." FACTORS " {" REGS "}, " R0 ", " R1         \
                         ", p, 1, 1, 0, 0;\n}"                                                                        \
                         : __VA_ARGS__                                                                                 \
                         : "l"(a), "l"(b), "r"(add));                                                                  \
        }                                                                                                              \
        static __device__ __forceinline__ void keys_of(float (&d)[N / 2], const u32* a, u64 b, int add) {              \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " R5 ", 0;\n"                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." FACTORS " {" REGS "}, {" R0 ", " R1 ", " R2 \
                         ", " R3 "}, " R4 ", p, 1, 1, 0;\n}"                                                         \
                         : __VA_ARGS__                                                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                              \
        }                                                                                                              \
        static __device__ __forceinline__ void values(float (&d)[N / 2], const u32* a, u64 b) {                        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." FACTORS " {" REGS "}, {" R0 ", " R1 ", " R2 \
                         ", " R3 "}, " R4 ", p, 1, 1, 1;\n}"                                                          \
                         : __VA_ARGS__                                                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
        }                                                                                                              \
    };
MMA(64, "%32", "%33", "%34", "%35", "%36", "%37", WGMMA_S4, WGMMA_O4)
MMA(96, "%48", "%49", "%50", "%51", "%52", "%53", WGMMA_S6, WGMMA_O6)
MMA(128, "%64", "%65", "%66", "%67", "%68", "%69", WGMMA_S8, WGMMA_O8)
MMA(256, "%128", "%129", "%130", "%131", "%132", "%133", WGMMA_S16, WGMMA_O16)

namespace {

#define HIDDEN __int_as_float(0xff800000)  // minus infinity: a score that a row may not see

/// Blocks of keys, and of values, in shared memory: as many as fit. With three instead of two, spans of 2048 rows were 10%
/// faster and those of 4096 at most 6% slower (heads of 128, H200).
#ifdef E4M3
constexpr int STAGES = WIDTH > 64 ? 2 : 3, INCOMING = WIDTH > 128 ? 1 : 2;
#else
constexpr int STAGES = WIDTH > 128 ? 2 : WIDTH > 64 ? 3 : 4;
#endif
constexpr u32 NONE = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;

struct Tile {
    u32 first_row, rows, start, slot;
};

struct Params {
    const TensorMap* q_map;
    const TensorMap* k_map;
    const TensorMap* v_map;
    const u32* header;
    const Tile* tiles;
    const u32* tables;
    u32 table_stride;
    bf16* out;
    const float* sinks;
    u32* counters;
    u32 q_heads, kv_heads, head_dim, page_size, window, granule;
    float scale;  // of scores, in powers of two
};

/// Sizes for heads of up to N elements.
template <int N>
struct Shape {
    static constexpr int KEYS = N > 128 ? 64 : 128;
    static constexpr int CHUNKS = (N + 63) / 64;
    static constexpr int Q_BYTES = CHUNKS * 128 * 128;
    static constexpr int KV_BYTES = CHUNKS * KEYS * 128;
    static constexpr int Q = 0, K = Q_BYTES, V = K + STAGES * KV_BYTES;
#ifdef E4M3
    static constexpr int CODE_BYTES = KV_BYTES / 2, K_IN = V + STAGES * KV_BYTES, V_IN = K_IN + INCOMING * CODE_BYTES;
    static constexpr int BARRIERS = V_IN + INCOMING * CODE_BYTES;
#else
    static constexpr int BARRIERS = V + STAGES * KV_BYTES;
#endif
};

/// What the producer tells the consumers about a tile.
struct Box {
    Tile tile;
    u32 head;  // NONE: there are no more
};

template <int N>
struct Ring {
    u64 full[N], empty[N];
    __device__ __forceinline__ void init(int fillers, int readers) {
        for (int s = 0; s < N; ++s) barrier_init(smem(&full[s]), fillers), barrier_init(smem(&empty[s]), readers);
    }
    /// Of stage number `count` since the start.
    __device__ __forceinline__ void wait_full(u32 count) { barrier_wait(smem(&full[count % N]), count / N & 1); }
    __device__ __forceinline__ void wait_empty(u32 count) { barrier_wait(smem(&empty[count % N]), (count / N & 1) ^ 1); }
};

struct Barriers {
    u64 q_full, q_empty;
    Ring<STAGES> k, v;
    Box box;
#ifdef E4M3
    Ring<INCOMING> k_in, v_in;
    /// Of tiles by turns, for the warps that convert.
    Box boxes[2];
#endif
};
static_assert(sizeof(Barriers) <= 256);

// ---- instructions

/// The two warpgroups' turns: barrier 1 is the first one's, 2 the second one's.
__device__ __forceinline__ void turn_wait(u32 group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void turn_pass(u32 group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
}

/// What computes `d` stands before what follows: without it the compiler waits for products first.
template <int R>
__device__ __forceinline__ void pin(float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Waits until at most PENDING groups are under way, of which none writes `d`.
template <int PENDING, int R>
__device__ __forceinline__ void wait_for(float (&d)[R]) {
    wgmma_wait<PENDING>();
    pin(d);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// Values of 64-column chunks that lie `lead` bytes apart, 128-byte swizzled, columns contiguous.
__device__ __forceinline__ u64 value_tile(u32 at, u32 lead) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)(lead >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// ---- the producer: one warp

/// The blocks of keys that a tile reads: `last` down to `first`.
template <int KEYS>
struct Range {
    int first, last;
    u32 end;
    __device__ __forceinline__ Range(const Tile& tile, u32 window) {
        end = tile.start + tile.rows;
        last = (end - 1) / KEYS;
        first = window && tile.start >= window ? (tile.start - window + 1) / KEYS : 0;
    }
};

/// What scores of a thread's two rows are multiplied by, in powers of two.
struct Scales {
    float of[2];
};

#ifdef E4M3
#include "attend_tiles_e4m3.cuh"
#else
/// What the producer fills: keys and values as they are multiplied.
template <int N>
struct Incoming {
    static constexpr int COUNT = STAGES, BYTES = Shape<N>::KV_BYTES, K = Shape<N>::K, V = Shape<N>::V;
    static __device__ __forceinline__ Ring<STAGES>& keys(Barriers* bars) { return bars->k; }
    static __device__ __forceinline__ Ring<STAGES>& values(Barriers* bars) { return bars->v; }
};

/// Keys or values of one block of positions; each lane brings one granule of its page.
template <int N>
__device__ __forceinline__ void bring_block(const Params& p, const TensorMap* map, u32 to, u32 full, u32 key,
                                            u32 end, u32 page, u32 head) {
    using S = Shape<N>;
    const u32 lane = threadIdx.x % 32;
    const u32 count = min((u32)S::KEYS / p.granule, (end - key + p.granule - 1) / p.granule);
    if (lane == 0) barrier_expect(full, count * p.granule * 128 * S::CHUNKS);
    __syncwarp();
    if (lane < count) {
        const u32 at = key + lane * p.granule;
        const u32 row = (page * p.kv_heads + head) * p.page_size + at % p.page_size;
#pragma unroll
        for (int c = 0; c < S::CHUNKS; ++c)
            tma_load_2d(to + (c * S::KEYS + lane * p.granule) * 128, *map, full, c * 64, row);
    }
}
#endif

template <int N>
__device__ void produce(const Params& p, char* shared, Barriers* bars, u32 units) {
    using S = Shape<N>;
    using In = Incoming<N>;
    const u32 lane = threadIdx.x % 32;
    const u32 group = p.q_heads / p.kv_heads;
    const u32 base = smem(shared);
    u32 k_count = 0, v_count = 0, tile_count = 0;
    u32 unit = blockIdx.x;
    while (unit < units) {
        u32 next = 0;
        if (lane == 0) next = gridDim.x + atomicAdd(&p.counters[0], 1);
        const u32 head = unit % p.kv_heads;
        const Tile tile = p.tiles[unit / p.kv_heads];
        const u32* table = p.tables + (u64)tile.slot * p.table_stride;
        const Range<S::KEYS> range(tile, p.window);
        auto page_of = [&](int n) {
            const u32 key = (u32)n * S::KEYS + lane * p.granule;
            return n >= range.first && key < range.end && lane * p.granule < S::KEYS ? table[key / p.page_size] : 0;
        };
        auto bring_keys = [&](int n, u32 page) {
            const u32 s = k_count % In::COUNT;
            In::keys(bars).wait_empty(k_count);
#ifdef E4M3
            if (n == range.last && lane == 0) bars->boxes[tile_count % 2] = {tile, head};
#endif
            bring_block<N>(p, p.k_map, base + In::K + s * In::BYTES, smem(&In::keys(bars).full[s]), n * S::KEYS, range.end,
                           page, head);
            ++k_count;
        };
        u32 page = page_of(range.last), page_next = page_of(range.last - 1);
        if (tile_count == 0) {
            wait_for_kernels_before();
            let_next_kernel_start();
        }
        bring_keys(range.last, page);
        barrier_wait(smem(&bars->q_empty), (tile_count & 1) ^ 1);
        if (lane == 0) {
            bars->box = {tile, head};
            const u32 tokens = 128 / group;
            barrier_expect(smem(&bars->q_full), tokens * group * 128 * S::CHUNKS);
#pragma unroll
            for (int c = 0; c < S::CHUNKS; ++c)
                tma_load_3d(base + S::Q + c * 128 * 128, *p.q_map, smem(&bars->q_full), c * 64, head * group, tile.first_row);
        }
        __syncwarp();
        ++tile_count;
        for (int n = range.last; n >= range.first; --n) {
            const u32 page_after = page_of(n - 2);
            if (n > range.first) bring_keys(n - 1, page_next);
            const u32 s = v_count % In::COUNT;
            In::values(bars).wait_empty(v_count);
            bring_block<N>(p, p.v_map, base + In::V + s * In::BYTES, smem(&In::values(bars).full[s]), n * S::KEYS, range.end,
                           page, head);
            ++v_count;
            page = page_next, page_next = page_after;
        }
        unit = __shfl_sync(0xffffffffu, next, 0);
    }
    if (tile_count == 0) wait_for_kernels_before();
#ifdef E4M3
    In::keys(bars).wait_empty(k_count);
    if (lane == 0) {
        bars->boxes[tile_count % 2].head = NONE;
        barrier_arrive(smem(&bars->k_in.full[k_count % In::COUNT]));
    }
#endif
    barrier_wait(smem(&bars->q_empty), (tile_count & 1) ^ 1);
    if (lane == 0) {
        bars->box.head = NONE;
        barrier_arrive(smem(&bars->q_full));
        // The last block to come here finds that all others have taken their numbers.
        __threadfence();
        if (atomicAdd(&p.counters[1], 1) == gridDim.x - 1) p.counters[0] = 0, p.counters[1] = 0;
    }
}

// ---- the consumers: two warpgroups

/// A thread's share of 64 rows: rows lane / 4 and + 8 of its warp's sixteen.
template <int N>
struct Sums {
    float out[N / 2];
    float max[2], sum[2];
};

#ifndef E4M3
/// A warpgroup's queries: as they came, in shared memory until the tile's end.
template <int N>
struct Queries {
    static constexpr bool HELD = false;
    u32 at;
    __device__ __forceinline__ Scales take(const Params& p) { return {p.scale, p.scale}; }
};

template <int N>
__device__ __forceinline__ void multiply_keys(float (&s)[Shape<N>::KEYS / 2], const Queries<N>& q, u32 k) {
    using S = Shape<N>;
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < N / 16; ++d) {
        const u32 chunk = d / 4, step = d % 4 * 32;
        Mma<S::KEYS>::keys(s, wgmma_tile(q.at + chunk * 128 * 128 + step), wgmma_tile(k + chunk * S::KEYS * 128 + step),
                           d != 0);
    }
    wgmma_commit();
}
#endif

template <int N>
__device__ __forceinline__ void multiply_values(float (&out)[N / 2], const u32 (&weights)[Shape<N>::KEYS / 4], u32 v) {
    using S = Shape<N>;
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < S::KEYS / 16; ++j)
        Mma<N>::values(out, &weights[j * 4], value_tile(v + j * 16 * 128, S::KEYS * 128));
    wgmma_commit();
}

/// Scores of positions that a row may not see become minus infinity.
template <int KEYS>
__device__ __forceinline__ void hide(float (&s)[KEYS / 2], u32 key, const u32 (&position)[2], u32 window) {
    key += threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // Position of the row seen from this thread's first column; columns are compile-time offsets.
        const int upto = (int)(position[half] - key);
        const int from = window ? upto - (int)window : -0x7fffffff;
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = i * 8 + j;
                if (column > upto || column <= from) s[i * 4 + half * 2 + j] = HIDDEN;
            }
    }
}

/// Scores become weights in place; returns what earlier sums are multiplied by.
template <int KEYS, bool MASKED, int N>
__device__ __forceinline__ void soften(float (&s)[KEYS / 2], Sums<N>& sums, float (&keep)[2], const Scales& scales) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float scale = scales.of[half];
        float max = sums.max[half];
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) max = fmaxf(max, fmaxf(s[i * 4 + half * 2], s[i * 4 + half * 2 + 1]));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
        // A row that has seen nothing yet keeps the maximum minus infinity, and 0 stands in for it.
        const float top = MASKED && max == HIDDEN ? 0.0f : max, shift = top * scale;
        // Exactly 1 if the maximum stays: a block that the row does not see must change no bit.
        keep[half] = exp2_fast((sums.max[half] - top) * scale);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float weight = exp2_fast(fmaf(s[i * 4 + half * 2 + j], scale, -shift));
                s[i * 4 + half * 2 + j] = weight;
                sum += weight;
            }
        sums.sum[half] = sums.sum[half] * keep[half] + sum;
        sums.max[half] = max;
    }
}

template <int N>
__device__ __forceinline__ void rescale(Sums<N>& sums, const float (&keep)[2]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums.out[i] *= keep[i / 2 % 2];
}

template <int KEYS>
__device__ __forceinline__ void round_weights(u32 (&weights)[KEYS / 4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i)
#ifdef E4M3
        weights[i] = pack_halves(s[i * 2], s[i * 2 + 1]);
#else
        weights[i] = pack_bf16(s[i * 2], s[i * 2 + 1]);
#endif
}

#ifndef E4M3
/// Values at or behind the tile's end were not brought and meet weights of 0: they must be numbers.
template <int N>
__device__ void clear_values(char* v, u32 from) {
    using S = Shape<N>;
    const u32 thread = threadIdx.x - 128;
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c)
        for (u32 i = from * 8 + thread; i < S::KEYS * 8; i += 256)
            *(uint4*)(v + c * S::KEYS * 128 + i * 16) = make_uint4(0, 0, 0, 0);
    proxy_fence();
    named_barrier<256>(3);
}
#endif

/// Word j of lane i of each four becomes word i of lane j.
__device__ __forceinline__ void transpose(u32 (&w)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 x = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
        (odd ? w[i] : w[i + 1]) = x;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 x = __shfl_xor_sync(0xffffffffu, high ? w[i] : w[i + 2], 2);
        (high ? w[i] : w[i + 2]) = x;
    }
}

template <int N>
__device__ __forceinline__ void store(const Params& p, const Box& box, Sums<N>& sums, const Scales& scales, u32 first,
                                      u32 group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = sums.sum[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const u32 m = first + half * 8, token = m / group, head = box.head * group + m % group;
        const bool real = token < box.tile.rows;
        float factor = 1.0f;
        if (p.sinks && real) {
            const float sink = p.sinks[head] * LOG2_E, max = sums.max[half] * scales.of[half], top = fmaxf(sink, max);
            factor = exp2_fast(max - top);
            sum = sum * factor + exp2_fast(sink - top);
        }
        factor /= sum;
        bf16* out = p.out + ((u64)(box.tile.first_row + token) * p.q_heads + head) * p.head_dim;
#pragma unroll
        for (int i = 0; i < N / 8; i += 4) {
            u32 w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* x = sums.out + (i + j) * 4 + half * 2;
                w[j] = pack_bf16(x[0] * factor, x[1] * factor);
            }
            // Sixteen bytes of a row a lane: a quarter of the stores, and whole sectors.
            transpose(w);
            const u32 column = (i + threadIdx.x % 4) * 8;
            if (real && column < p.head_dim) *(uint4*)(out + column) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

/// A consumer thread's registers, and where it is in the rings of keys and values.
template <int N>
struct Consumer {
    using S = Shape<N>;
    static constexpr int KEYS = S::KEYS;

    const Params& p;
    char* shared;
    Barriers* bars;
    u32 warpgroup;
    Queries<N> q;
    u32 k, v, k_count, v_count;
    u32 position[2];
    Scales scales;
    Sums<N> sums;
    float s[KEYS / 2];
    u32 weights[KEYS / 4];

    __device__ __forceinline__ void release(u64* empty) {
        if (threadIdx.x % 32 == 0) barrier_arrive(smem(empty));
    }

    /// The scores and weights of a tile's last block.
    __device__ __forceinline__ void begin(int last, u32 end) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sums.out[i] = 0.0f;
        sums.max[0] = sums.max[1] = HIDDEN;
        sums.sum[0] = sums.sum[1] = 0.0f;
        const u32 k_stage = k_count % STAGES;
        bars->k.wait_full(k_count);
        multiply_keys<N>(s, q, k + k_stage * S::KV_BYTES);
        wait_for<0>(s);
        release(&bars->k.empty[k_stage]);
        ++k_count;
        hide<KEYS>(s, last * KEYS, position, p.window);
        float keep[2];
        soften<KEYS, true>(s, sums, keep, scales);
        round_weights<KEYS>(weights, s);
#ifndef E4M3
        if (end < (u32)(last + 1) * KEYS) {
            const u32 v_stage = v_count % STAGES;
            bars->v.wait_full(v_count);
            clear_values<N>(shared + S::V + v_stage * S::KV_BYTES, end - last * KEYS);
        }
#endif
    }

    /// The scores of block `n` are multiplied beside the values of the block behind it.
    template <bool MASKED>
    __device__ __forceinline__ void step(int n) {
        const u32 k_stage = k_count % STAGES, v_stage = v_count % STAGES;
        bars->k.wait_full(k_count);
        turn_wait(warpgroup);
        multiply_keys<N>(s, q, k + k_stage * S::KV_BYTES);
        bars->v.wait_full(v_count);
        multiply_values<N>(sums.out, weights, v + v_stage * S::KV_BYTES);
        turn_pass(warpgroup);
        wait_for<1>(s);
        release(&bars->k.empty[k_stage]);
        if (MASKED) hide<KEYS>(s, n * KEYS, position, p.window);
        float keep[2];
        soften<KEYS, MASKED>(s, sums, keep, scales);
        pin(s);
        // Passes at once. Its loop keeps the assembler from waiting for the products of values before it has taken
        // the exponentials, which are to run beside them.
        bars->v.wait_full(v_count);
        wait_for<0>(sums.out);
        release(&bars->v.empty[v_stage]);
        round_weights<KEYS>(weights, s);
        // Small heads have few products to hide this behind.
        if (N > 64 || !__all_sync(0xffffffffu, keep[0] == 1.0f && keep[1] == 1.0f)) rescale<N>(sums, keep);
        ++k_count, ++v_count;
    }

    /// The values of a tile's first block.
    __device__ __forceinline__ void end() {
        if (!Queries<N>::HELD) release(&bars->q_empty);
        const u32 stage = v_count % STAGES;
        bars->v.wait_full(v_count);
        multiply_values<N>(sums.out, weights, v + stage * S::KV_BYTES);
        wait_for<0>(sums.out);
        release(&bars->v.empty[stage]);
        ++v_count;
    }
};

template <int N>
__device__ void consume(const Params& p, char* shared, Barriers* bars) {
    using S = Shape<N>;
    const u32 warpgroup = threadIdx.x / 128 - 1, base = smem(shared);
    const u32 group = p.q_heads / p.kv_heads;
    const u32 first = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    Consumer<N> c{p, shared, bars, warpgroup, {base + S::Q + warpgroup * 64 * 128}, base + S::K, base + S::V};
    c.k_count = c.v_count = 0;
    if (warpgroup == 1) turn_pass(1);
    for (u32 tile_count = 0;; ++tile_count) {
        barrier_wait(smem(&bars->q_full), tile_count & 1);
        const Box box = bars->box;
        if (box.head == NONE) break;
        const Range<S::KEYS> range(box.tile, p.window);
        c.position[0] = box.tile.start + first / group, c.position[1] = box.tile.start + (first + 8) / group;
        c.scales = c.q.take(p);
        if (Queries<N>::HELD) {
            __syncwarp();
            c.release(&bars->q_empty);
        }
        c.begin(range.last, range.end);
        int n = range.last - 1;
        for (; n >= range.first && (u32)(n + 1) * S::KEYS > box.tile.start + 1; --n) c.template step<true>(n);
        // Blocks below this one hold positions that the tile's last row no longer sees.
        int whole = range.first;
        if (p.window && range.end > p.window) whole = max(whole, (int)((range.end - p.window + S::KEYS - 1) / S::KEYS));
        for (; n >= whole; --n) c.template step<false>(n);
        for (; n >= range.first; --n) c.template step<true>(n);
        c.end();
        store<N>(p, box, c.sums, c.scales, first, group);
    }
    // The second group's last turn is taken, so that no barrier is left half full.
    if (warpgroup == 0) turn_wait(0);
}

template <int N>
__device__ __forceinline__ void attend_tiles(const Params& p) {
    using S = Shape<N>;
    extern __shared__ char raw[];
    const u32 units = p.header[TILES] * p.kv_heads;
    if (units == 0) return wait_for_kernels_before();
    char* shared = raw + (1024 - smem(raw) % 1024) % 1024;
    Barriers* bars = (Barriers*)(shared + S::BARRIERS);
    if (threadIdx.x == 0) {
        tma_prefetch_map(*p.q_map);
        tma_prefetch_map(*p.k_map);
        tma_prefetch_map(*p.v_map);
        barrier_init(smem(&bars->q_full), 1);
        barrier_init(smem(&bars->q_empty), 8);
#ifdef E4M3
        bars->k_in.init(1, CONVERTERS), bars->v_in.init(1, CONVERTERS);
        bars->k.init(CONVERTERS, 8), bars->v.init(CONVERTERS, 8);
#else
        bars->k.init(1, 8), bars->v.init(1, 8);
#endif
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
#ifdef E4M3
        registers_less<56>();
        if (threadIdx.x >= 32) return convert<N>(p, shared, bars);
        produce<N>(p, shared, bars, units);
    } else {
        registers_more<224>();
#else
        registers_less<24>();
        if (threadIdx.x < 32) produce<N>(p, shared, bars, units);
    } else {
        registers_more<240>();
#endif
        consume<N>(p, shared, bars);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(384, 1) attend_tiles_bf16(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const u32* header, const Tile* tiles, const u32* tables, u32 table_stride,
    bf16* out, const float* sinks, u32* counters, u32 q_heads, u32 kv_heads, u32 head_dim, u32 page_size, u32 window,
    u32 granule, float scale) {
    attend_tiles<WIDTH>({&q_map, &k_map, &v_map, header, tiles, tables, table_stride, out, sinks, counters, q_heads,
                         kv_heads, head_dim, page_size, window, granule, scale * LOG2_E});
}

#endif
