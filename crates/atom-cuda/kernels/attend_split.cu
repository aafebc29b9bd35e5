// Paged attention of spans of few rows (decode, verify): the cache is read once, by pieces. bf16, sm_80 and up.
//
// attend_split_bf16, compiled with WIDTH = 64, 128 or 256: the smallest that is >= head_dim; head_dim a multiple of 8.
// With E4M3 the cache is e4m3, head_dim a multiple of 16, and page_size too; what differs is in attend_split_e4m3.cuh, and
// that of bf16 in attend_split_bf16.cuh. With SMALL_SHARED it fits the 99 KiB of shared memory that a block has on some GPUs.
//   grid   any number of blocks, best as many as are resident: two a multiprocessor, or one for a WIDTH of 256 (with
//          SMALL_SHARED two if both fit); fixed when recorded
//   block  WARPS * 32            WARPS  4; 2 for a WIDTH of 256 with SMALL_SHARED
//   dynamic shared memory  WIDTH * (WARPS * STAGES * 64 + 32) + 640 bytes
//                                STAGES 6, 3, 3 for a WIDTH of 64, 128, 256; with SMALL_SHARED 4, 2, 2
//   header[ITEMS]  pieces in the list; none: every block returns at once
//   pieces  see Piece; best longest first
//   qkv, keys, values, out, sinks, tables, window, scale  as in attend_simple.cu; 16-byte aligned
//   partial_sums f32 [slots, units, 16, N], partial_stats f32 [slots, units, 16, 2], arrivals u32 [slots, units]:
//          units = kv_heads * ceil(group / 16); arrivals are 0 before the first launch, and again after each
//   counters  u32[2], 0 likewise
//
// A *split* is a range of absolute positions: 256 of them up to 16384, 1024 up to 65536, 4096 beyond. Its sums are
// made in an order that depends on positions only: KEYS (16, with E4M3 32) at a time go round the block's warps, and the
// warps' sums are added first to last. Splits are then added first to last. A piece is a run of splits of one item, an item
// one or a few rows of a span. If a row's splits are many and the step's rows few, they lie in several pieces, of
// which only the first may hold more than one split; the block that comes last adds them up. So the cut into pieces
// changes no bit.
//
// The 16 rows of a product are an item's rows times the query heads of one kv head (a group of more than 16 heads
// takes several units). Positions at or behind the item's end are not read.

#include "dependent.cuh"
#ifdef E4M3
#include "e4m3.cuh"
#endif

namespace {

#define HIDDEN __int_as_float(0xff800000)  // minus infinity: a score that a row may not see
constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 NONE = 0xffffffffu;
#ifdef SMALL_SHARED
constexpr int WARPS = WIDTH > 128 ? 2 : 4, STAGES = WIDTH > 64 ? 2 : 4;
#else
constexpr int WARPS = 4, STAGES = WIDTH > 64 ? 3 : 6;
#endif
constexpr int N = WIDTH;
#ifdef E4M3
constexpr int KEYS = 32;
using Cached = e4m3;
#else
constexpr int KEYS = 16;
using Cached = bf16;
#endif
/// Positions of a step of the block: KEYS a warp.
constexpr u32 STEP = WARPS * KEYS;

/// Whether a split ends at this position, a multiple of STEP.
__device__ __forceinline__ bool ends_split(u32 position) {
    const u32 width = position <= 16384 ? 256 : position <= 65536 ? 1024 : 4096;
    return position % width == 0;
}

/// 32 bytes of the work list.
struct Piece {
    u32 first_row, rows, start, slot;  // rows of one span at positions start ..; at most max(1, 16 / group) rows
    u32 from, to;  // positions, each where a split ends or (`to`) at or behind the item's end
    u32 partial;  // the item's first slot of partial sums; NONE if this piece is the whole item
    u32 place;    // number of this piece in its item, and the item's pieces * 65536
};

struct Params {
    const u32* header;
    const Piece* pieces;
    const u32* tables;
    u32 table_stride;
    const bf16* qkv;
    u32 q_stride;
    const Cached* keys;
    const Cached* values;
    bf16* out;
    const float* sinks;
    float* partial_sums;
    float2* partial_stats;
    u32* arrivals;
    u32* counters;
    u32 q_heads, kv_heads, head_dim, page_size, window;
    float scale;  // of scores, in powers of two
};

/// KEYS keys, and as many values; also holds the f32 sums of a warp when a split ends.
constexpr int HALF_STAGE = KEYS * N * (int)sizeof(Cached), STAGE = 2 * HALF_STAGE;
static_assert(STAGE == 16 * N * 4);
/// Bytes of shared memory: rings, queries, maxima and sums of weights of each warp, words for the block.
constexpr int Q = WARPS * STAGES * STAGE, STATS = Q + 16 * N * 2, WORDS = STATS + WARPS * 16 * 8;
/// Threads that keep the sums of one of the sixteen rows, and elements that each keeps.
constexpr int ROW_THREADS = WARPS * 2, KEPT = N / ROW_THREADS;

// ---- instructions

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

/// 16 bytes from global to shared memory; zeros if `bytes` is 0.
__device__ __forceinline__ void copy_16(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- one split

/// Weighted values of sixteen rows as one warp holds them: rows lane / 4 and + 8.
struct Sums {
    float out[N / 2];
    float max[2], sum[2];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) out[i] = 0.0f;
        max[0] = max[1] = HIDDEN;
        sum[0] = sum[1] = 0.0f;
    }
};

/// Where a 16-byte chunk of a row of N elements lies: rows that are read together lie in different banks.
__device__ __forceinline__ u32 chunk_at(u32 row, u32 chunk) {
    return row * (N * 2) + (chunk ^ (row & 7)) * 16;
}

#ifdef E4M3
#include "attend_split_e4m3.cuh"
#else
#include "attend_split_bf16.cuh"
#endif

/// Scores of positions that a row may not see become minus infinity.
__device__ __forceinline__ void hide(float (&s)[KEYS / 2], u32 key, const u32 (&position)[2], u32 window) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        const u32 at = key + i / 4 * 8 + i % 2, row = position[i / 2 % 2];
        if (at > row || (window && at + window <= row)) s[i] = HIDDEN;
    }
}

/// Adds KEYS positions from `key` on to a warp's sums.
__device__ __forceinline__ void add_step(const Params& p, Sums& sums, u32 q, const float (&scale)[2], u32 stage, u32 key,
                                         const u32 (&position)[2]) {
    const u32 lane = threadIdx.x % 32;
    float s[KEYS / 2] = {};
    multiply_keys(s, q, stage);
    // Most steps hide nothing: the warp's rows see all of their positions.
    const u32 least = min(position[0], position[1]), most = max(position[0], position[1]);
    if (!__all_sync(0xffffffffu, key + KEYS - 1 <= least && (!p.window || key + p.window > most)))
        hide(s, key + lane % 4 * 2, position, p.window);
    float keep[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float max = sums.max[half];
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) {
            float& x = s[i / 2 * 4 + half * 2 + i % 2];
            x *= scale[half];
            max = fmaxf(max, x);
        }
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
        // A row that has seen nothing yet keeps the maximum minus infinity, and 0 stands in for it.
        const float shift = max == HIDDEN ? 0.0f : max;
        keep[half] = exp2_fast(sums.max[half] - shift);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) {
            float& x = s[i / 2 * 4 + half * 2 + i % 2];
            x = exp2_fast(x - shift);
            sum += x;
        }
        sums.sum[half] = fmaf(sums.sum[half], keep[half], sum);
        sums.max[half] = max;
    }
    // A maximum that stays changes nothing, to the bit.
    if (!__all_sync(0xffffffffu, keep[0] == 1.0f && keep[1] == 1.0f)) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sums.out[i] *= keep[i / 2 % 2];
    }
    multiply_values(sums.out, s, stage + HALF_STAGE);
}

// ---- sums of splits

/// COUNT elements of a row's sums.
template <int COUNT>
struct Part {
    float out[COUNT];
    float max, sum;
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) out[i] = 0.0f;
        max = HIDDEN, sum = 0.0f;
    }
    /// Adds what comes behind. The arithmetic is spelled out: pieces and runs must give the same bits.
    __device__ __forceinline__ void add(const Part& next) {
        const float top = fmaxf(max, next.max), shift = top == HIDDEN ? 0.0f : top;
        const float a = exp2_fast(max - shift), b = exp2_fast(next.max - shift);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) out[i] = fmaf(out[i], a, __fmul_rn(next.out[i], b));
        sum = fmaf(sum, a, __fmul_rn(next.sum, b));
        max = top;
    }
};

/// What a thread keeps of an item's sums: of row thread / ROW_THREADS, columns from `kept_column`(0) on.
using Kept = Part<KEPT>;
__device__ __forceinline__ u32 kept_row() { return threadIdx.x / ROW_THREADS; }
/// Column of element i, a multiple of four.
__device__ __forceinline__ u32 kept_column(u32 i) { return threadIdx.x % ROW_THREADS * 4 + i * ROW_THREADS; }

/// Adds the warps' sums of a split; all threads call it. `stage` is one that all warps have read.
__device__ __forceinline__ void add_warps(Kept& total, Sums& sums, char* shared, u32 stage) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* mine = (float*)(shared + (warp * STAGES + stage) * STAGE);
    float2* stats = (float2*)(shared + STATS);
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 row = lane / 4 + half * 8;
        float sum = sums.sum[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (lane % 4 == 0) stats[warp * 16 + row] = make_float2(sums.max[half], sum);
        put_sums(mine, row, half, sums.out);
    }
    __syncthreads();
    const u32 row = kept_row();
    Kept split;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float* theirs = (const float*)(shared + (w * STAGES + stage) * STAGE);
        Kept next;
        next.max = stats[w * 16 + row].x, next.sum = stats[w * 16 + row].y;
#pragma unroll
        for (int i = 0; i < KEPT; i += 4)
            *(float4*)(next.out + i) = *(const float4*)(theirs + row * N + (kept_column(i) ^ turned(row)));
        // The first one stands for itself: adding it to nothing would give the same.
        if (w == 0) split = next;
        else split.add(next);
    }
    total.add(split);
    __syncthreads();
}

/// Rows and heads of a unit: row m of the products is row m / group of the item and head m % group of the kv head;
/// if a kv head has several units, head m of this one.
struct Unit {
    u32 group, chunks, number, head, first_head, real;
    __device__ __forceinline__ Unit(const Params& p, const Piece& piece, u32 number) : number(number) {
        group = p.q_heads / p.kv_heads, chunks = (group + 15) / 16;
        head = number / chunks, first_head = number % chunks * 16;
        real = chunks == 1 ? piece.rows * group : min(group - first_head, 16u);
    }
    __device__ __forceinline__ u32 token(u32 m) const { return chunks == 1 ? m / group : 0; }
    __device__ __forceinline__ u32 query_head(u32 m) const {
        return head * group + (chunks == 1 ? m % group : first_head + m);
    }
};

/// Writes four columns of row m.
__device__ __forceinline__ void store(const Params& p, const Piece& piece, const Unit& unit, u32 m, u32 column,
                                      const float* x, float max, float sum) {
    if (column >= p.head_dim) return;
    const u32 head = unit.query_head(m);
    float factor = 1.0f;
    if (p.sinks) {
        const float sink = p.sinks[head] * LOG2_E, top = fmaxf(sink, max);
        factor = exp2_fast(max - top);
        sum = fmaf(sum, factor, exp2_fast(sink - top));
    }
    factor = __fdividef(factor, sum);
    bf16* out = p.out + ((u64)(piece.first_row + unit.token(m)) * p.q_heads + head) * p.head_dim + column;
    *(uint2*)out = make_uint2(pack_bf16(x[0] * factor, x[1] * factor), pack_bf16(x[2] * factor, x[3] * factor));
}

/// Leaves the sums of a piece for the last block of its item, which adds them up and writes the result.
__device__ __forceinline__ void gather(const Params& p, const Piece& piece, const Unit& unit, const Kept& total,
                                       u32 units, u32* scratch) {
    const u32 place = piece.place & 0xffff, pieces = piece.place >> 16;
    auto row_of = [&](u32 i, u32 m) { return ((u64)(piece.partial + i) * units + unit.number) * 16 + m; };
    const u32 m = kept_row();
    if (m < unit.real) {
        float* to = p.partial_sums + row_of(place, m) * N;
#pragma unroll
        for (int i = 0; i < KEPT; i += 4) __stcg((float4*)(to + kept_column(i)), *(const float4*)(total.out + i));
        if (kept_column(0) == 0) __stcg(p.partial_stats + row_of(place, m), make_float2(total.max, total.sum));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        // One thread's fences stand for the block's: barriers lie between.
        __threadfence();
        u32* arrivals = p.arrivals + (u64)piece.partial * units + unit.number;
        const u32 before = atomicAdd(arrivals, 1);
        if (before == pieces - 1) *arrivals = 0;
        __threadfence();
        *scratch = before;
    }
    __syncthreads();
    if (*scratch != pieces - 1) return;
    constexpr u32 AHEAD = 8;
    for (u32 e = threadIdx.x; e < unit.real * (N / 4); e += WARPS * 32) {
        const u32 m = e / (N / 4), column = e % (N / 4) * 4;
        Part<4> sums;
        sums.clear();
        for (u32 i = 0; i < pieces; i += AHEAD) {
            Part<4> next[AHEAD];
#pragma unroll
            for (u32 j = 0; j < AHEAD; ++j) {
                if (i + j >= pieces) continue;
                *(float4*)next[j].out = __ldcg((const float4*)(p.partial_sums + row_of(i + j, m) * N + column));
                const float2 stats = __ldcg(p.partial_stats + row_of(i + j, m));
                next[j].max = stats.x, next[j].sum = stats.y;
            }
#pragma unroll
            for (u32 j = 0; j < AHEAD; ++j)
                if (i + j < pieces) sums.add(next[j]);
        }
        store(p, piece, unit, m, column, sums.out, sums.max, sums.sum);
    }
}

// ---- a unit: one piece and up to sixteen query heads of one kv head

/// Sixteens of positions in a step of a warp, and steps whose sixteens the lanes of a warp look up together.
constexpr u32 PARTS = KEYS / 16, LOOKED_UP = 32 / PARTS;

/// The cache rows of the sixteens of a warp's next LOOKED_UP steps, one a lane; NONE where nothing is to be read.
__device__ __forceinline__ u32 find_rows(const Params& p, const u32* table, u32 head, u32 key, u32 from, u32 end) {
    key += threadIdx.x % 32 / PARTS * STEP + threadIdx.x % PARTS * 16;
    if (key >= end || key + 16 <= from) return NONE;
    return (table[key / p.page_size] * p.kv_heads + head) * p.page_size + key % p.page_size;
}

__device__ void attend_unit(const Params& p, const Piece& piece, u32 number, u32 units, char* shared) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Unit unit(p, piece, number);
    const u32 end = min(piece.start + piece.rows, piece.to);
    const u32 from = p.window && piece.start >= p.window ? piece.start - p.window + 1 : 0;
    const u32* table = p.tables + (u64)piece.slot * p.table_stride;
    const u32 base = shared_address(shared), ring = base + warp * STAGES * STAGE, q = base + Q;
    const u32 steps = (end - piece.from + STEP - 1) / STEP, first = piece.from + warp * KEYS;

    u32 rows = find_rows(p, table, unit.head, first, from, end), rows_next = NONE;
    auto bring_step = [&](u32 step) {
        u32 row[PARTS];
        bool any = false;
#pragma unroll
        for (u32 i = 0; i < PARTS; ++i) {
            const u32 held = step % (2 * LOOKED_UP) < LOOKED_UP ? rows : rows_next;
            row[i] = __shfl_sync(0xffffffffu, held, step % LOOKED_UP * PARTS + i);
            any |= row[i] != NONE;
        }
        if (step < steps && any)
            bring(p, ring + step % STAGES * STAGE, row, min(end - first - step * STEP, (u32)KEYS));
        copy_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) bring_step(i);
    for (u32 i = threadIdx.x; i < 16 * N / 8; i += WARPS * 32) {
        const u32 m = i / (N / 8), chunk = i % (N / 8);
        uint4 x = make_uint4(0, 0, 0, 0);
        if (m < unit.real && chunk * 8 < p.head_dim)
            x = *(const uint4*)(p.qkv + (u64)(piece.first_row + unit.token(m)) * p.q_stride +
                                unit.query_head(m) * p.head_dim + chunk * 8);
        put_query(shared, m, chunk, x);
    }
    const u32 position[2] = {piece.start + unit.token(lane / 4), piece.start + unit.token(lane / 4 + 8)};
    __syncthreads();
    const float scale[2] = {row_scale(p, shared, lane / 4), row_scale(p, shared, lane / 4 + 8)};

    Sums sums;
    Kept total;
    total.clear();
    sums.clear();
    for (u32 step = 0; step < steps; ++step) {
        const u32 ahead = step + STAGES - 1, key = first + step * STEP;
        // Rows are looked up half a turn before the first of them is brought.
        if (ahead % LOOKED_UP == LOOKED_UP / 2)
            (ahead % (2 * LOOKED_UP) < LOOKED_UP ? rows_next : rows) =
                find_rows(p, table, unit.head, first + (ahead + LOOKED_UP / 2) * STEP, from, end);
        copy_wait<STAGES - 2>();
        __syncwarp();
        // This fills the stage that was read a step ago.
        bring_step(ahead);
        if (key < end && key + KEYS > from) add_step(p, sums, q, scale, ring + step % STAGES * STAGE, key, position);
        if (step + 1 == steps || ends_split(piece.from + (step + 1) * STEP)) {
            add_warps(total, sums, shared, step % STAGES);
            sums.clear();
        }
        __syncwarp();
    }
    copy_wait<0>();
    if (piece.partial != NONE) return gather(p, piece, unit, total, units, (u32*)(shared + WORDS));
    const u32 m = kept_row();
    if (m >= unit.real) return;
#pragma unroll
    for (int i = 0; i < KEPT; i += 4)
        store(p, piece, unit, m, kept_column(i), total.out + i, total.max, total.sum);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(WARPS * 32, WIDTH > 128 ? 1 : 2) attend_split_bf16(
    const u32* header, const Piece* pieces, const u32* tables, u32 table_stride, const bf16* qkv, u32 q_stride,
    const Cached* keys, const Cached* values, bf16* out, const float* sinks, float* partial_sums, float2* partial_stats,
    u32* arrivals, u32* counters, u32 q_heads, u32 kv_heads, u32 head_dim, u32 page_size, u32 window, float scale) {
    extern __shared__ __align__(128) char shared[];
    const Params p{header,       pieces,        tables,   table_stride, qkv,     q_stride, keys,     values,    out,    sinks,
                   partial_sums, partial_stats, arrivals, counters,     q_heads, kv_heads, head_dim, page_size, window, scale * LOG2_E};
    const u32 units = kv_heads * ((q_heads / kv_heads + 15) / 16), total = header[ITEMS] * units;
    u32 at = blockIdx.x;
    // What the kernels before did not write is read before they are waited for.
    Piece piece;
    if (at < total) piece = pieces[at / units];
    wait_for_kernels_before();
    let_next_kernel_start();
    if (total == 0) return;
    u32* next = (u32*)(shared + WORDS) + 1;
    while (at < total) {
        if (threadIdx.x == 0) *next = gridDim.x + atomicAdd(&counters[0], 1);
        attend_unit(p, piece, at % units, units, shared);
        __syncthreads();
        at = *next;
        if (at < total) piece = pieces[at / units];
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        // The last block to come here finds that all others have taken their numbers.
        __threadfence();
        if (atomicAdd(&counters[1], 1) == gridDim.x - 1) counters[0] = 0, counters[1] = 0;
    }
}
