// linear_small: out = x W^T (+ bias) for 1 to 16 rows, where time is the reading of W. bf16 inputs and weights, f32 sums.
//
// Definitions make the kernel `linear_small`:
//   ROWS_MAX  1, 2, 4, 8 or 16: rows of x at capacity, rounded up
//   RUN       tiles of 8 outputs that a block sums together
//   WARPS     of a block: 8 are best (16 take fewer steps each, but larger ones: 2 to 5% slower), 4 where 8 don't fit
//   RING_KB   dynamic shared memory of a block
//   NORM      1: x is the f32 residual, and its RMS norm goes in: the norm's weight is applied on the way in, and 1 / rms on
//             the way out, so that no kernel stands in front. 0: x is bf16
//   OUT       0: bf16. 1: f32 (logits). 2: adds to the f32 residual `out`. 3: W is gate rows, then up rows, RUN is even, and
//             out[j] = silu(gate_j) * up_j, bf16, [rows, outputs / 2]
//
// How. A block takes a run of tiles. Each weight is read once, 16 bytes at a time, by the thread that uses it, into that
// thread's own places of a ring in shared memory: no barriers. The pieces of x go the same way, since a load that
// overtook the queue of weights would wait behind it all the same (with plain loads of x: 55% of the copy bandwidth at
// 8 rows, so: 90%). A thread's 16 bytes of a weight row and the same 16 bytes of an x row are the fragments of two products
// of the tensor cores, if both count k in the same permuted order. The warps of a block take turns at 32 columns each;
// their sums are added in order of warps once a run is done, so the order of additions depends on `inputs` and WARPS only.
// The ring is filled with weights before the wait for the kernel in front: they stream while that one still works, since
// two such blocks fit on a multiprocessor.
//
// Launch contract. inputs is a multiple of 8; x, W start on 16 bytes; block.x = 32 * WARPS; dynamic shared memory RING_KB
// KiB. All kernels of a chain best ask for about the same: a multiprocessor that has to divide its memory anew between
// two kernels can't hold both at once (rings cut to what a block's weights fill: up to 50% slower). Any grid is right:
// outputs are given out in units of 8 (OUT 3: 8 pairs; outputs / 2 is a multiple of 8), see `each` and `extra`. `extent`
// is that of x.
#include "rows.cuh"

constexpr u32 THREADS = 32 * WARPS, T = RUN;
constexpr u32 HALVES = ROWS_MAX > 8 ? 2 : 1;
/// Rows of a half that may be real: lanes of others hold zeros.
constexpr u32 HALF_ROWS = ROWS_MAX > 8 ? 8 : ROWS_MAX;
/// Columns that the warps of a block take in one step.
constexpr u32 STEP = 32 * WARPS;
/// Units of output that a run has, and tiles of a unit.
constexpr u32 PER = OUT == 3 ? 2 : 1, UNITS = T / PER;
static_assert(T % PER == 0, "gate and up tiles come in pairs");

/// A step in the ring: 16-byte places of weights, of x, of the norm's weights.
constexpr u32 X_PIECES = NORM ? 2 : 1;
constexpr u32 W_PLACES = T * THREADS, X_PLACES = WARPS * HALVES * HALF_ROWS * 4 * X_PIECES;
constexpr u32 PLACES = W_PLACES + X_PLACES + (NORM ? WARPS * 8 : 0);
constexpr u32 DEPTH = RING_KB * 64 / PLACES > 12 ? 12 : RING_KB * 64 / PLACES;
static_assert(DEPTH >= 2, "a ring of one step would wait for each");

struct Linear {
    const bf16* weight;       // [outputs, inputs]
    const float* bias;        // [outputs], or null
    const float* norm_weight; // [inputs], if NORM
    u32 inputs;
    u32 outputs;
    float eps;
    // Units of 8 outputs (OUT 3: of 8 pairs) that every block has, and how many blocks have one more.
    u32 each;
    u32 extra;
};

#if OUT == 0 || OUT == 3
typedef bf16 Y;
#else
typedef float Y;
#endif

/// 16 bytes to shared memory; zeros if `bytes` is 0, and then `from` is not read, wherever it points.
__device__ __forceinline__ void copy_16(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Asks for the weights of one step after the other, of all runs of a block. Short, since the ring is filled by it before
/// anything else can start.
struct Weights {
    const char* from;
    const float* norm;
    u64 pair_bytes;
    u32 tile_bytes, to, end, step, steps, unit, last, last_of_lane, mine, tail_bytes;

    __device__ __forceinline__ void ask() {
        if (unit >= last) return;
        u32 bytes = step + 1 < steps ? 16 : tail_bytes;
#pragma unroll
        for (u32 j = 0; j < T; j++)
            if (unit + j / PER < last_of_lane)
                copy_16(to + j * THREADS * 16, from + j / PER * tile_bytes + (j % PER ? pair_bytes : 0), bytes);
        if (NORM && threadIdx.x % 32 < 4) {
            u32 place = to + (W_PLACES + X_PLACES) * 16 - threadIdx.x * 16 + threadIdx.x / 32 * 128 + threadIdx.x % 4 * 32;
            const float* weights = norm + step * STEP + mine;
            copy_16(place, weights, bytes);
            copy_16(place + 16, weights + 4, bytes);
        }
        to += PLACES * 16;
        if (to == end) to -= DEPTH * PLACES * 16;
        from += STEP * 2;
        if (++step == steps) {
            step = 0, unit += UNITS;
            from += (u64)(UNITS * tile_bytes) - steps * STEP * 2;
        }
    }
};

/// Asks for the pieces of x alike.
struct Inputs {
    const char* from;
    u64 half_bytes;
    u32 to, end, step, steps, left, real, tail_bytes;

    __device__ __forceinline__ void ask() {
        if (left == 0) return;
        u32 g = threadIdx.x % 32 / 4, bytes = step + 1 < steps ? 16 : tail_bytes;
        if (g < HALF_ROWS) {
#pragma unroll
            for (u32 h = 0; h < HALVES; h++) {
#pragma unroll
                for (u32 i = 0; i < X_PIECES; i++)
                    copy_16(to + (h * HALF_ROWS * 4 * X_PIECES + i) * 16, from + h * half_bytes + 16 * i,
                            real >> (g + 8 * h) & 1 ? bytes : 0);
            }
        }
        to += PLACES * 16;
        if (to >= end) to -= DEPTH * PLACES * 16;
        from += STEP * (NORM ? 4 : 2);
        if (++step == steps) step = 0, from -= steps * STEP * (NORM ? 4 : 2);
        left--;
    }
};

/// The fragment of x: as it is, or residual times the norm's weights, with the sum of squares.
__device__ __forceinline__ uint4 fragment(const uint4* x, const uint4* weight, float& squares) {
    if constexpr (!NORM) return *x;
    const float4 a = reinterpret_cast<const float4*>(x)[0], b = reinterpret_cast<const float4*>(x)[1];
    const float4 v = reinterpret_cast<const float4*>(weight)[0], w = reinterpret_cast<const float4*>(weight)[1];
    squares = fmaf(a.x, a.x, fmaf(a.y, a.y, fmaf(a.z, a.z, fmaf(a.w, a.w, squares))));
    squares = fmaf(b.x, b.x, fmaf(b.y, b.y, fmaf(b.z, b.z, fmaf(b.w, b.w, squares))));
    return make_uint4(pack_bf16(a.x * v.x, a.y * v.y), pack_bf16(a.z * v.z, a.w * v.w), pack_bf16(b.x * w.x, b.y * w.y),
                      pack_bf16(b.z * w.z, b.w * w.w));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_small(Linear l, const void* x, Y* out, Extent extent) {
    extern __shared__ uint4 ring[];
    __shared__ float partial[WARPS][T][HALVES * HALF_ROWS * 8];
    __shared__ float squares_of[WARPS][HALVES * 8];
    let_next_start();
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, mine = warp * 32 + lane % 4 * 8;
    u32 columns = l.outputs / PER;
    u32 first = blockIdx.x * l.each + min(blockIdx.x, l.extra), last = first + l.each + (blockIdx.x < l.extra);
    u32 steps = (l.inputs + STEP - 1) / STEP;
    // What this thread reads in the last step of a row: it may have no columns there.
    u32 tail_bytes = (steps - 1) * STEP + mine < l.inputs ? 16 : 0;
    u64 row_bytes = (u64)l.inputs * 2;
    u32 start = (u32)__cvta_generic_to_shared(ring), end = start + DEPTH * PLACES * 16, own = threadIdx.x * 16;
    const char* from = reinterpret_cast<const char*>(l.weight) + (first * 8 + g) * row_bytes + mine * 2;
    Weights weights = {from, l.norm_weight, columns * row_bytes, 16 * l.inputs, start + own, end + own, 0, steps, first,
                       last, min(last, (columns + 7 - g) / 8), mine, tail_bytes};
#pragma unroll
    for (u32 i = 0; i < DEPTH; i++) weights.ask(), commit();

    // Bit r: row r is real.
    u32 rows = extent.capacity();
    u32 real = __ballot_sync(0xffffffffu, lane < rows && extent.has(lane));
    // This thread's places of x in a step, and of the norm's weights.
    u32 x_place = W_PLACES + (warp * HALVES * HALF_ROWS * 4 + (g < HALF_ROWS ? lane : 0)) * X_PIECES;
    u32 norm_place = W_PLACES + X_PLACES + warp * 8 + lane % 4 * 2;
    u64 x_bytes = NORM ? 4 : 2;
    Inputs inputs = {static_cast<const char*>(x) + (g * l.inputs + mine) * x_bytes, 8 * l.inputs * x_bytes,
                     start + x_place * 16, end, 0, steps, (last - first + UNITS - 1) / UNITS * steps, real, tail_bytes};
    wait_for_inputs();
#pragma unroll
    for (u32 i = 0; i < DEPTH; i++) inputs.ask(), commit();

    u32 at = 0;
    for (u32 unit = first; unit < last; unit += UNITS) {
        // The first of this thread's outputs of the run, and what waits for it.
        auto place_of = [&](u32 i, u32& row, u32& column) {
            row = i / (UNITS * 8), column = unit * 8 + i % (UNITS * 8);
            return i < rows * UNITS * 8 && column < min(last * 8, columns) && real >> row & 1;
        };
        u32 row, column;
        bool has_output = place_of(threadIdx.x, row, column);
        float bias[PER] = {}, before = 0.0f;
        if (has_output && l.bias)
            for (u32 k = 0; k < PER; k++) bias[k] = l.bias[column + k * columns];
        if (OUT == 2 && has_output) before = to_float(out[(u64)row * columns + column]);

        float sums[T][4] = {}, squares[HALVES] = {};
        for (u32 step = 0; step < steps; step++) {
            // All but the latest DEPTH - 1 groups are there: first of weights, then of x, then of both.
            asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
            // The norm's weights were read by four lanes for all.
            if (NORM) __syncwarp();
            const uint4* places = ring + at * PLACES;
            uint4 a[2] = {};
#pragma unroll
            for (u32 h = 0; h < HALVES; h++)
                if (g < HALF_ROWS)
                    a[h] = fragment(places + x_place + h * HALF_ROWS * 4 * X_PIECES, places + norm_place, squares[h]);
#pragma unroll
            for (u32 j = 0; j < T; j++) {
                uint4 b = places[j * THREADS + threadIdx.x];
                multiply(sums[j], a[0].x, a[1].x, a[0].y, a[1].y, b.x, b.y);
                multiply(sums[j], a[0].z, a[1].z, a[0].w, a[1].w, b.z, b.w);
            }
            at = at + 1 == DEPTH ? 0 : at + 1;
            if (NORM) __syncwarp();
            weights.ask();
            inputs.ask();
            commit();
        }
        if (unit != first) __syncthreads();
#pragma unroll
        for (u32 j = 0; j < T; j++)
#pragma unroll
            for (u32 h = 0; h < HALVES; h++)
                if (g < HALF_ROWS)
                    *reinterpret_cast<float2*>(&partial[warp][j][h * 64 + g * 8 + lane % 4 * 2]) =
                        make_float2(sums[j][2 * h], sums[j][2 * h + 1]);
        if (NORM) {
#pragma unroll
            for (u32 h = 0; h < HALVES; h++) {
                float s = squares[h];
                s += __shfl_xor_sync(0xffffffffu, s, 1);
                s += __shfl_xor_sync(0xffffffffu, s, 2);
                if (lane % 4 == 0) squares_of[warp][h * 8 + g] = s;
            }
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < rows * UNITS * 8; i += THREADS) {
            if (i != threadIdx.x) {
                has_output = place_of(i, row, column);
                for (u32 k = 0; k < PER; k++) bias[k] = has_output && l.bias ? l.bias[column + k * columns] : 0.0f;
                if (OUT == 2 && has_output) before = to_float(out[(u64)row * columns + column]);
            }
            if (!has_output) continue;
            float scale = 1.0f;
            if (NORM) {
                float sum = 0.0f;
#pragma unroll
                for (u32 w = 0; w < WARPS; w++) sum += squares_of[w][row];
                scale = inverse_root(sum, l.inputs, l.eps);
            }
            float y[PER];
#pragma unroll
            for (u32 k = 0; k < PER; k++) {
                float sum = 0.0f;
#pragma unroll
                for (u32 w = 0; w < WARPS; w++) sum += partial[w][(column / 8 - unit) * PER + k][row * 8 + column % 8];
                y[k] = sum * scale + bias[k];
            }
            Y* place = out + (u64)row * columns + column;
            if constexpr (OUT == 3) *place = From<Y>::of(__fdividef(y[0], 1.0f + __expf(-y[0])) * y[1]);
            else *place = From<Y>::of(before + y[0]);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}
