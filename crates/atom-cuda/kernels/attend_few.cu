// A decoding layer's norms of heads, rotary embedding, cache and paged attention as one kernel, for steps of few rows.
// bf16, sm_90a.
//
// attend_few_bf16, compiled with WIDTH = 64, 128 or 256: the smallest that is >= head_dim; head_dim a multiple of 8, page_size
// too. Takes the place of rotate_and_cache and of the kernels behind it, and reads the products' q, k and v as they are.
//   grid     one block a multiprocessor, with about as much shared memory as a block of linear_small: so kernels in front and
//            behind find the same room on each, and spread evenly
//   block    WARPS * 32          WARPS 8; 4 for a WIDTH of 256
//   dynamic shared memory  see Places
//   keys, values  maps of [pages * kv_heads * page_size, head_dim], boxes of `granule` rows by 64, 128-byte swizzle
//   letters  [capacity * splits_max * units, min(group, 16), WIDTH / 2] of 16 bytes, units = kv_heads * ceil(group / 16); all
//            bits 1 before the first launch, and again after each
//   capacity (rows at most) 32 or less
//
// A row and up to sixteen query heads of one kv head are a unit. Its positions are cut in as many *splits* as its length and
// the bucket say, which go round the blocks, position by position 32 at a time; within a split they go round the pairs of
// warps. Sums of warps are added first to last, those of splits in a tree. So the order of sums depends on a row's position
// and on the bucket, and on nothing else.
//
// What the step itself writes (k and v of its rows) is not read from the cache but made anew from qkv by whoever needs it,
// rounded as in the cache: blocks need not wait for each other for it, and all that is read of the cache was there before the
// step. So keys and values are on their way into shared memory before the kernel in front ends.
//
// Blocks exchange sums by letters: two columns of a head with their maximum and sum of weights, 16 bytes that are written and
// read as one. Whoever reads a letter waits for it by reading, and leaves the place empty (all bits 1, which no sum is). All
// blocks share in the reading, so they also end together. They are resident together, being no more than multiprocessors
// and the kernels before waiting for none of them.
#include "hopper.cuh"
#include "rows.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace {

#define HIDDEN __int_as_float(0xff800000)  // minus infinity: a score that a row may not see
constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 NONE = 0xffffffffu;
constexpr u32 W = WIDTH, HALVES = W / 64, PAIRS = W / 64;
/// Positions that a stage of the ring holds, sixteen for each of a pair of warps.
constexpr u32 STRETCH = 32;
constexpr u32 WARPS = W > 128 ? 4 : 8, THREADS = WARPS * 32;
constexpr u32 HALF_BYTES = STRETCH * 128, KEYS_BYTES = HALVES * HALF_BYTES, STAGE = 2 * KEYS_BYTES;
constexpr u32 ROW_BYTES = W * 2;
/// A multiple of the pairs: a pair fills and reads its own stages.
constexpr u32 STAGES = W > 64 ? WARPS / 2 : WARPS;
/// Columns of partial sums of a block that lie in shared memory at a time.
constexpr u32 PASS = W < 128 ? W : 128;
/// A split has as many stretches as this at least (a round of letters takes longer than two), and no more where that can be.
constexpr u32 SHORT = 2, LONG = 32;

struct Few {
    const u32* header;
    const u32* positions;   // [rows], like the next two
    const u32* cache_rows;  // page * page_size + offset
    const u32* row_slots;
    const u32* tables;      // [slots, table_stride]
    const bf16* qkv;        // [rows, (q_heads + 2 kv_heads) * head_dim]
    bf16* keys;             // [pages, kv_heads, page_size, head_dim]
    bf16* values;
    bf16* out;              // [rows, q_heads * head_dim]
    const float* sinks;
    const float* frequencies;
    const float* q_norm;
    const float* k_norm;
    uint4* letters;
    u32 table_stride, q_heads, kv_heads, head_dim, dim, pairs, page_size, granule, window;
    float eps, magnitude, scale;
    u32 capacity;
    u32 splits, splits_max;  // of a row of usual length, and of a long one
    u32 lanes;               // threads that read the letters of a place: a power of two, at most 32
    u32 apart;               // whether sums of warps have shared memory beside the ring
};

/// Dynamic shared memory, from a multiple of 1024 on.
struct Places {
    u32 ring, q, fresh, sums, end;
    __device__ __forceinline__ Places(const Few& p, u32 base) {
        ring = base;
        q = ring + STAGES * STAGE;
        fresh = q + 16 * ROW_BYTES;
        sums = p.apart ? fresh + p.capacity * 2 * ROW_BYTES : ring;
    }
};

/// Which splits the rows of a step have.
struct Splits {
    u32 count[32], before[32], rows, all;  // `all` of all units
    /// By one warp, a lane a row.
    __device__ __forceinline__ void set(const Few& p, u32 rows) {
        const u32 lane = threadIdx.x % 32;
        u32 mine = 0;
        if (lane < rows) {
            const u32 position = p.positions[lane], from = first_seen(p, position);
            const u32 stretches = position / STRETCH - from / STRETCH + 1;
            mine = max(min((stretches + SHORT - 1) / SHORT, p.splits), min((stretches + LONG - 1) / LONG, p.splits_max));
        }
        u32 sum = mine;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 left = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum += left;
        }
        count[lane] = mine, before[lane] = sum - mine;
        if (lane == 31) this->rows = rows, all = sum * p.kv_heads * ((p.q_heads / p.kv_heads + 15) / 16);
    }
    __device__ __forceinline__ static u32 first_seen(const Few& p, u32 position) {
        return p.window && position >= p.window ? position - p.window + 1 : 0;
    }
};

/// A split of a unit.
struct Job {
    u32 row, head, first_head, real;  // of the heads of kv head `head`, `real` from first_head on
    bool is_first;                    // of the units of its kv head
    u32 position, from, split, splits;
    u32 slot, first_row, start, fresh, cache_row;  // the rows of its span up to it are all that the step adds to what it sees
    u32 first, count;                              // stretches: first, first + splits, ..
    __device__ __forceinline__ Job(const Few& p, const Splits& of, u32 number) {
        const u32 group = p.q_heads / p.kv_heads, chunks = (group + 15) / 16, units = p.kv_heads * chunks;
        const u32 entry = number / units, unit = number % units, chunk = unit % chunks, lane = threadIdx.x % 32;
        head = unit / chunks, first_head = head * group + chunk * 16, real = min(group - chunk * 16, 16u), is_first = chunk == 0;
        row = __popc(__ballot_sync(0xffffffffu, of.before[lane] + of.count[lane] <= entry));
        splits = of.count[row % 32], split = entry - of.before[row % 32];
        position = p.positions[row], from = Splits::first_seen(p, position);
        slot = p.row_slots[row], cache_row = p.cache_rows[row];
        const u32 mates = __ballot_sync(0xffffffffu, lane <= row && p.row_slots[min(lane, row)] == slot);
        first_row = __ffs(mates) - 1, fresh = row - first_row + 1, start = position + 1 - fresh;
        const u32 begin = from / STRETCH, last = position / STRETCH;
        first = begin + (split + splits - begin % splits) % splits, count = (last - first) / splits + 1;
    }
};

// ---- instructions

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void multiply(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ void store_shared(u32 at, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ __forceinline__ uint4 load_shared(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
    return x;
}
__device__ __forceinline__ void store_shared(u32 at, bf16 x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(x.bits) : "memory");
}
/// As one access, straight from and to the L2 cache.
__device__ __forceinline__ void post(uint4* to, uint4 x) {
    asm volatile(
        "{\n.reg .b64 low, high;\n.reg .b128 all;\nmov.b64 low, {%1, %2};\nmov.b64 high, {%3, %4};\n"
        "mov.b128 all, {low, high};\nst.relaxed.gpu.global.b128 [%0], all;\n}" ::"l"(to),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
        : "memory");
}
__device__ __forceinline__ uint4 look(const uint4* from) {
    uint4 x;
    asm volatile(
        "{\n.reg .b64 low, high;\n.reg .b128 all;\nld.relaxed.gpu.global.b128 all, [%4];\nmov.b128 {low, high}, all;\n"
        "mov.b64 {%0, %1}, low;\nmov.b64 {%2, %3}, high;\n}"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
    return x;
}
constexpr u32 EMPTY = 0xffffffffu;

/// threadIdx.x, made anew at each place: what is derived from it shall not be kept in registers from split to split.
__device__ __forceinline__ u32 thread() {
    u32 x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

/// Where a 16-byte chunk of a row of W elements lies: rows that are read together lie in different banks.
__device__ __forceinline__ u32 chunk_at(u32 row, u32 chunk) { return row * ROW_BYTES + (chunk ^ (row & 7)) * 16; }
/// The same of a row of keys or values in a stage, as the copy engine leaves it.
__device__ __forceinline__ u32 stage_at(u32 row, u32 chunk) {
    return chunk / 8 * HALF_BYTES + row * 128 + (chunk % 8 ^ (row & 7)) * 16;
}

// ---- keys and values on their way

/// What a lane of a warp copies of each stage: a part of its positions, half of their rows, keys or values.
struct Copies {
    const u32* table;
    u32 part, half, to;
    bool works;
    __device__ __forceinline__ Copies(const Few& p, const Job& job) {
        const u32 lane = threadIdx.x % 32, parts = STRETCH / p.granule;
        table = p.tables + (u64)job.slot * p.table_stride;
        part = lane / (2 * HALVES), half = lane / 2 % HALVES, works = part < parts;
        to = lane % 2 * KEYS_BYTES + half * HALF_BYTES + part * p.granule * 128;
    }
    /// The row of the maps that the lane's part of stretch `i` begins at; NONE if nothing of it is to be read.
    __device__ __forceinline__ u32 find(const Few& p, const Job& job, u32 i) const {
        const u32 at = (job.first + i * job.splits) * STRETCH + part * p.granule;
        if (!works || i >= job.count || at >= job.start || at + p.granule <= job.from) return NONE;
        return (__ldcg(table + at / p.page_size) * p.kv_heads + job.head) * p.page_size + at % p.page_size;
    }
    /// The whole warp brings a stage.
    __device__ __forceinline__ void bring(const Few& p, const TensorMap& keys, const TensorMap& values, u32 row, u32 stage,
                                          u32 full) const {
        const u32 copies = __popc(__ballot_sync(0xffffffffu, row != NONE));
        if (threadIdx.x % 32 == 0) barrier_expect(full, copies * p.granule * 128);
        __syncwarp();
        if (row != NONE) tma_load_2d(stage + to, threadIdx.x % 2 ? values : keys, full, half * 64, row);
    }
};

// ---- heads of q and k, and v: a warp each

__device__ __forceinline__ float2 cos_sin(u32 position, float frequency) {
    float p = (float)position;
    float angle = p * frequency, rest = fmaf(p, frequency, -angle);
    float quarters = rintf(angle * 0.636619772f);
    float r = fmaf(-quarters, 1.57079637f, angle);
    r = fmaf(-quarters, -4.37113883e-8f, r) + rest;
    float z = r * r;
    float sine = fmaf(fmaf(fmaf(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f) * z, r, r);
    float cosine = fmaf(fmaf(fmaf(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f), z * z,
                        fmaf(-0.5f, z, 1.0f));
    int quadrant = (int)quarters & 3;
    float c = quadrant & 1 ? sine : cosine, s = quadrant & 1 ? cosine : sine;
    return make_float2(quadrant == 1 || quadrant == 2 ? -c : c, quadrant >= 2 ? -s : s);
}

/// A lane's part of a head: PAIRS pairs of elements, which turn together or not at all.
struct Lane {
    u32 a[PAIRS], b[PAIRS];
    float q_a[PAIRS], q_b[PAIRS], k_a[PAIRS], k_b[PAIRS];
    float2 turn[PAIRS];
    u32 position;

    __device__ __forceinline__ static bool has(const Few& p, u32 k) { return thread() % 32 + 32 * k < p.head_dim / 2; }

    __device__ __forceinline__ Lane(const Few& p, u32 position) {
#pragma unroll
        for (u32 k = 0; k < PAIRS; ++k) {
            const u32 u = thread() % 32 + 32 * k, turning = p.dim / 2;
            a[k] = u < turning && !p.pairs ? u : 2 * u, b[k] = u < turning && !p.pairs ? u + turning : 2 * u + 1;
            q_a[k] = q_b[k] = k_a[k] = k_b[k] = 1.0f;
            if (!p.q_norm || !has(p, k)) continue;
            q_a[k] = p.q_norm[a[k]], q_b[k] = p.q_norm[b[k]], k_a[k] = p.k_norm[a[k]], k_b[k] = p.k_norm[b[k]];
        }
        turns_at(p, position);
    }
    __device__ __forceinline__ void turns_at(const Few& p, u32 at) {
        position = at;
#pragma unroll
        for (u32 k = 0; k < PAIRS; ++k) {
            const u32 u = thread() % 32 + 32 * k;
            turn[k] = make_float2(1.0f, 0.0f);
            if (u >= p.dim / 2) continue;
            turn[k] = cos_sin(at, p.frequencies[u]);
            turn[k].x *= p.magnitude, turn[k].y *= p.magnitude;
        }
    }
};

enum Kind { QUERY, KEY, VALUE };

/// One head of a row into row `m` at `to`, and to `cache` if that is not null.
__device__ __forceinline__ void make_head(const Few& p, Lane& lane, Kind kind, const bf16* from, u32 position, u32 to, u32 m,
                                          bf16* cache) {
    float x[PAIRS], y[PAIRS], squares = 0.0f;
#pragma unroll
    for (u32 k = 0; k < PAIRS; ++k) {
        x[k] = y[k] = 0.0f;
        if (Lane::has(p, k)) x[k] = to_float(bf16{__ldcg((const u16*)from + lane.a[k])}), y[k] = to_float(bf16{__ldcg((const u16*)from + lane.b[k])});
        squares = fmaf(x[k], x[k], fmaf(y[k], y[k], squares));
    }
    if (kind != VALUE) {
        float scale = 1.0f;
        if (p.q_norm) scale = inverse_root(warp_sum(squares), p.head_dim, p.eps);
        if (lane.position != position) lane.turns_at(p, position);
#pragma unroll
        for (u32 k = 0; k < PAIRS; ++k) {
            const float u = x[k] * scale * (kind == QUERY ? lane.q_a[k] : lane.k_a[k]);
            const float v = y[k] * scale * (kind == QUERY ? lane.q_b[k] : lane.k_b[k]);
            x[k] = fmaf(u, lane.turn[k].x, -(v * lane.turn[k].y)), y[k] = fmaf(v, lane.turn[k].x, u * lane.turn[k].y);
        }
    }
#pragma unroll
    for (u32 k = 0; k < PAIRS; ++k) {
        if (!Lane::has(p, k)) continue;
        const bf16 u = to_bf16(x[k]), v = to_bf16(y[k]);
        store_shared(to + chunk_at(m, lane.a[k] / 8) + lane.a[k] % 8 * 2, u);
        store_shared(to + chunk_at(m, lane.b[k] / 8) + lane.b[k] % 8 * 2, v);
        if (cache) cache[lane.a[k]] = u, cache[lane.b[k]] = v;
    }
    for (u32 i = p.head_dim + thread() % 32; i < W; i += 32)
        store_shared(to + chunk_at(m, i / 8) + i % 8 * 2, bf16{0});
}

/// The row's query heads, and keys and values of the step that lie in this split.
__device__ __forceinline__ void make_heads(const Few& p, const Job& job, const Places& at, Lane& lane) {
    const u32 heads = p.q_heads + 2 * p.kv_heads, tasks = job.real + 2 * job.fresh;
    for (u32 t = thread() / 32; t < tasks; t += WARPS) {
        const bool is_query = t < job.real;
        const u32 f = is_query ? 0 : (t - job.real) / 2, row = is_query ? job.row : job.first_row + f;
        const u32 position = is_query ? job.position : job.start + f;
        if (!is_query && position / STRETCH % job.splits != job.split) continue;
        const Kind kind = is_query ? QUERY : (t - job.real) % 2 ? VALUE : KEY;
        const u32 head = is_query ? job.first_head + t : p.q_heads + (kind == VALUE ? p.kv_heads : 0) + job.head;
        bf16* cache = nullptr;
        if (!is_query && row == job.row && job.is_first) {
            const u32 page = job.cache_row / p.page_size, offset = job.cache_row % p.page_size;
            cache = (kind == VALUE ? p.values : p.keys) +
                    (((u64)page * p.kv_heads + job.head) * p.page_size + offset) * p.head_dim;
        }
        make_head(p, lane, kind, p.qkv + ((u64)row * heads + head) * p.head_dim, position, is_query ? at.q : at.fresh,
                  is_query ? t : (kind == VALUE ? p.capacity : 0) + f, cache);
    }
}

// ---- a warp's sums

/// Weighted values of sixteen heads as one warp holds them: heads lane / 4 and + 8.
struct Sums {
    float out[W / 2];
    float max[2], sum[2];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 i = 0; i < W / 2; ++i) out[i] = 0.0f;
        max[0] = max[1] = HIDDEN;
        sum[0] = sum[1] = 0.0f;
    }
};

/// What sixteen positions from `key` on in rows `row` .. of a stage lack: those of the step itself, and zeros where the row sees
/// nothing, since even a weight of 0 makes a NaN of a NaN.
__device__ __forceinline__ void complete(const Few& p, const Job& job, const Places& at, u32 stage, u32 row, u32 key) {
    for (u32 i = thread() % 32; i < 16 * (W / 8); i += 32) {
        const u32 r = i / (W / 8), chunk = i % (W / 8), position = key + r, f = position - job.start;
        const u32 to = stage + stage_at(row + r, chunk);
        if (position < job.from || position > job.position) {
            store_shared(to + KEYS_BYTES, make_uint4(0, 0, 0, 0));
        } else if (position >= job.start) {
            store_shared(to, load_shared(at.fresh + chunk_at(f, chunk)));
            store_shared(to + KEYS_BYTES, load_shared(at.fresh + chunk_at(p.capacity + f, chunk)));
        }
    }
    // The copy engine may write here next.
    proxy_fence();
    __syncwarp();
}

/// Adds sixteen positions.
__device__ __forceinline__ void add_tile(const Few& p, const Job& job, Sums& sums, u32 q, u32 stage, u32 row, u32 key) {
    const u32 lane = thread() % 32, matrix = lane / 8, in = lane % 8;
    // Even and odd steps apart: shorter chains of products that wait for each other.
    float s[8] = {}, odd[8] = {};
#pragma unroll
    for (u32 d = 0; d < W / 16; ++d) {
        u32 a[4], b[4];
        load_matrices(a, q + chunk_at((matrix & 1) * 8 + in, d * 2 + matrix / 2));
        load_matrices(b, stage + stage_at(row + matrix / 2 * 8 + in, d * 2 + (matrix & 1)));
        float* to = d % 2 ? odd : s;
        multiply(to, a, b[0], b[1]);
        multiply(to + 4, a, b[2], b[3]);
    }
    float keep[2];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        float max = sums.max[half];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 at = key + i / 2 * 8 + lane % 4 * 2 + i % 2, e = i / 2 * 4 + half * 2 + i % 2;
            s[e] = at <= job.position && at >= job.from ? (s[e] + odd[e]) * (p.scale * LOG2_E) : HIDDEN;
            max = fmaxf(max, s[e]);
        }
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
        // Heads that have seen nothing yet keep the maximum minus infinity, and 0 stands in for it.
        const float shift = max == HIDDEN ? 0.0f : max;
        keep[half] = exp2_fast(sums.max[half] - shift);
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            float& x = s[i / 2 * 4 + half * 2 + i % 2];
            x = exp2_fast(x - shift);
            sum += x;
        }
        sums.sum[half] = fmaf(sums.sum[half], keep[half], sum);
        sums.max[half] = max;
    }
#pragma unroll
    for (u32 i = 0; i < W / 2; ++i) sums.out[i] *= keep[i / 2 % 2];
    const u32 a[4] = {pack_bf16(s[0], s[1]), pack_bf16(s[2], s[3]), pack_bf16(s[4], s[5]), pack_bf16(s[6], s[7])};
#pragma unroll
    for (u32 n = 0; n < W / 16; ++n) {
        u32 b[4];
        load_transposed(b, stage + KEYS_BYTES + stage_at(row + (matrix & 1) * 8 + in, n * 2 + matrix / 2));
        multiply(sums.out + n * 8, a, b[0], b[1]);
        multiply(sums.out + n * 8 + 4, a, b[2], b[3]);
    }
}

/// All stretches of the warp's pair. Its stages are filled anew by its first warp once both have read them. Bit s of `phases`
/// turns with each filling of stage s.
__device__ __forceinline__ void add_stretches(const Few& p, const TensorMap& keys, const TensorMap& values, const Job& job,
                                              const Places& at, Sums& sums, u32 full, u32& phases) {
    const u32 warp = threadIdx.x / 32, row = warp % 2 * 16;
    const Copies copies(p, job);
    u32 slot = warp / 2;
    for (u32 i = warp / 2; i < job.count; i += WARPS / 2) {
        const u32 key = (job.first + i * job.splits) * STRETCH + row, stage = at.ring + slot * STAGE;
        const bool again = i + STAGES < job.count;
        const u32 next = again && warp % 2 == 0 ? copies.find(p, job, i + STAGES) : NONE;
        barrier_wait(full + slot * 8, phases >> slot & 1);
        phases ^= 1u << slot;
        if (key <= job.position) {
            if (key < job.from || key + 16 > job.start) complete(p, job, at, stage, row, key);
            add_tile(p, job, sums, at.q, stage, row, key);
        }
        if (again) {
            named_barrier<64>(2 + warp / 2);
            if (warp % 2 == 0) copies.bring(p, keys, values, next, stage, full + slot * 8);
        }
        slot += WARPS / 2;
        if (slot >= STAGES) slot -= STAGES;
    }
}

// ---- sums of warps and of blocks

/// Adds the warps' sums and posts them as those of split `number`. `stats` has [WARPS][16].
__device__ __forceinline__ void post_sums(const Few& p, const Job& job, const Places& at, Sums& sums, float2* stats, u32 number) {
    extern __shared__ __align__(1024) char shared[];
    const u32 tid = thread(), warp = tid / 32, lane = tid % 32, heads = min(p.q_heads / p.kv_heads, 16u);
    float* all = (float*)(shared + (at.sums - smem(shared)));
    float* mine = all + warp * heads * PASS;
    uint4* letters = p.letters + (u64)number * heads * (W / 2);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        float sum = sums.sum[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (lane % 4 == 0) stats[warp * 16 + lane / 4 + half * 8] = make_float2(sums.max[half], sum);
    }
    if (!p.apart) __syncthreads();  // all stages were read
#pragma unroll
    for (u32 pass = 0; pass < W / PASS; ++pass) {
        if (pass) __syncthreads();
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 head = lane / 4 + half * 8;
            if (head < job.real) {
#pragma unroll
                for (u32 i = 0; i < PASS / 8; ++i) {
                    const u32 n = pass * (PASS / 8) + i;
                    *(float2*)(mine + head * PASS + ((i * 8 + lane % 4 * 2) ^ (head & 3) * 8)) =
                        make_float2(sums.out[n * 4 + half * 2], sums.out[n * 4 + half * 2 + 1]);
                }
            }
        }
        __syncthreads();
        for (u32 e = tid; e < job.real * (PASS / 2); e += THREADS) {
            const u32 head = e / (PASS / 2), column = e % (PASS / 2) * 2;
            float2 of[WARPS];
            float max = HIDDEN, sum = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) of[w] = stats[w * 16 + head], max = fmaxf(max, of[w].x);
            const float shift = max == HIDDEN ? 0.0f : max;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) {
                const float factor = exp2_fast(of[w].x - shift);
                const float2 v = *(const float2*)(all + (w * heads + head) * PASS + (column ^ (head & 3) * 8));
                x = fmaf(v.x, factor, x), y = fmaf(v.y, factor, y), sum = fmaf(of[w].y, factor, sum);
            }
            if (pass * PASS + column < p.head_dim)
                post(letters + head * (W / 2) + (pass * PASS + column) / 2,
                     make_uint4(__float_as_uint(x), __float_as_uint(y), __float_as_uint(max), __float_as_uint(sum)));
        }
    }
}

/// Reads this block's part of all letters, `lanes` threads a pair of columns, and writes the result.
__device__ __forceinline__ void read_letters(const Few& p, const Splits& of) {
    const u32 group = p.q_heads / p.kv_heads, chunks = (group + 15) / 16, units = p.kv_heads * chunks, heads = min(group, 16u);
    const u32 each = heads * (W / 2), total = of.rows * units * each, lane = threadIdx.x % p.lanes;
    const u32 begin = (u64)total * blockIdx.x / gridDim.x, end = (u64)total * (blockIdx.x + 1) / gridDim.x;
    for (u32 base = begin; base < end; base += THREADS / p.lanes) {
        const u32 place = min(base + threadIdx.x / p.lanes, total - 1), in = place % each, unit = place / each % units;
        const u32 row = place / each / units, in_chunk = in / (W / 2), column = in % (W / 2) * 2, chunk = unit % chunks;
        const u32 splits = of.count[row], first = of.before[row];
        const bool valid = base + threadIdx.x / p.lanes < end && chunk * 16 + in_chunk < group && column < p.head_dim;
        float max = HIDDEN, sum = 0.0f, x = 0.0f, y = 0.0f;
        for (u32 split = lane; valid && split < splits; split += p.lanes) {
            uint4* letter = p.letters + ((u64)(first + split) * units + unit) * each + in;
            uint4 found;
            do found = look(letter);
            while (found.w == EMPTY);
            post(letter, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
            const float top = fmaxf(max, __uint_as_float(found.z)), shift = top == HIDDEN ? 0.0f : top;
            const float a = exp2_fast(max - shift), b = exp2_fast(__uint_as_float(found.z) - shift);
            x = fmaf(x, a, __uint_as_float(found.x) * b), y = fmaf(y, a, __uint_as_float(found.y) * b);
            sum = fmaf(sum, a, __uint_as_float(found.w) * b), max = top;
        }
        __syncwarp();
        const u32 head = unit / chunks * group + chunk * 16 + in_chunk;
        const float sink = p.sinks && valid ? p.sinks[head] * LOG2_E : HIDDEN;
        float top = fmaxf(max, sink);
        for (u32 step = p.lanes / 2; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
        const float factor = exp2_fast(max - top);
        x *= factor, y *= factor, sum *= factor;
        for (u32 step = p.lanes / 2; step; step /= 2) {
            x += __shfl_xor_sync(0xffffffffu, x, step);
            y += __shfl_xor_sync(0xffffffffu, y, step);
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        }
        const float one = __fdividef(1.0f, sum + exp2_fast(sink - top));
        if (valid && lane == 0)
            *(u32*)(p.out + ((u64)row * p.q_heads + head) * p.head_dim + column) = pack_bf16(x * one, y * one);
    }
}

/// The first stages of a split.
__device__ __forceinline__ void begin(const Few& p, const TensorMap& keys, const TensorMap& values, const Job& job, const Places& at,
                                      u32 full) {
    const Copies copies(p, job);
    for (u32 i = threadIdx.x / 32; i < min(STAGES, job.count); i += WARPS)
        copies.bring(p, keys, values, copies.find(p, job, i), at.ring + i * STAGE, full + i * 8);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, WIDTH > 128 ? 1 : 2)
    attend_few_bf16(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, const Few p) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ u64 barriers[STAGES];
    __shared__ float2 stats[WARPS * 16];
    __shared__ Splits splits;
    let_next_start();
    const u32 full = smem(barriers);
    const Places at(p, smem(shared));
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; ++i) barrier_init(full + i * 8, 1);
        barrier_init_fence();
    }
    if (threadIdx.x / 32 == WARPS - 1) splits.set(p, min(p.header[ROWS], p.capacity));
    __syncthreads();
    u32 number = blockIdx.x, phases = 0;
    if (number < splits.all) {
        Job job(p, splits, number);
        begin(p, keys, values, job, at, full);
#pragma unroll 1
        for (;;) {
            Lane lane(p, job.position);
            wait_for_inputs();
            make_heads(p, job, at, lane);
            __syncthreads();
            Sums sums;
            sums.clear();
            add_stretches(p, keys, values, job, at, sums, full, phases);
            post_sums(p, job, at, sums, stats, number);
            number += gridDim.x;
            if (number >= splits.all) break;
            // The copy engine writes next where sums may have been.
            proxy_fence();
            __syncthreads();
            job = Job(p, splits, number);
            begin(p, keys, values, job, at, full);
        }
    } else {
        wait_for_inputs();
    }
    read_letters(p, splits);
}

#endif
