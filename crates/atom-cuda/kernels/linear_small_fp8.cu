// linear_small_fp8: out = x W^T (+ bias) for 1 to 16 rows of e4m3 codes and weights of e4m3 codes, where time is the reading
// of W. Codes become f16, which has all their values, on their way into the tensor cores; sums are f32.
//
// Definitions make the kernel `linear_small_fp8`:
//   ROWS_MAX  1, 2, 4, 8 or 16: rows of x at capacity, rounded up
//   RUN       tiles of 8 outputs that a block sums together
//   WARPS     of a block
//   RING_KB   dynamic shared memory of a block
//   GROUPS    0: W has a scale for each output and x one for each row, which come in at the end. 1: W has scales for blocks
//             of 128 x 128 and x for 128 columns of a row, which come in after each warp's step of 64 columns
//   OUT       0: bf16. 1: f32 (logits). 2: adds to the f32 residual `out`. 3: W is gate rows, then up rows, RUN is even, and
//             out[j] = silu(gate_j) * up_j, bf16, [rows, outputs / 2]
//
// How. As linear_small.cu: weights stream through a ring in shared memory whose places belong to a thread each, x goes the
// same way, and weights are asked for before the wait for the kernel in front. A thread's 16 bytes are 16 columns of a row,
// the fragments of four products. Scales of groups travel in the ring too, a word for each lane of a warp: 16 rows of x,
// then the tiles of W.
//
// Launch contract. inputs is a multiple of 16; x, W start on 16 bytes; block.x = 32 * WARPS; dynamic shared memory RING_KB
// KiB. Two blocks leave memory and registers for one of quantise.cu. Any grid is right: outputs are given out in units of 8 (OUT
// 3: 8 pairs; outputs / 2 is a multiple of 8), see `each` and `extra`. `extent` is that of x.
#include "rows.cuh"
#include "e4m3.cuh"


constexpr u32 THREADS = 32 * WARPS, T = RUN;
constexpr u32 HALVES = ROWS_MAX > 8 ? 2 : 1;
/// Rows of a half that may be real: lanes of others hold zeros.
constexpr u32 HALF_ROWS = ROWS_MAX > 8 ? 8 : ROWS_MAX;
/// Columns that a warp, and that the warps of a block take in one step.
constexpr u32 OWN = 64, STEP = OWN * WARPS;
/// Units of output that a run has, and tiles of a unit.
constexpr u32 PER = OUT == 3 ? 2 : 1, UNITS = T / PER;
static_assert(T % PER == 0, "gate and up tiles come in pairs");
static_assert(T <= 16, "scales of tiles are for the upper half of a warp");

/// A step in the ring: 16-byte places of weights, of x, of scales.
constexpr u32 W_PLACES = T * THREADS, X_PLACES = WARPS * HALVES * HALF_ROWS * 4;
constexpr u32 PLACES = W_PLACES + X_PLACES + (GROUPS ? WARPS * 8 : 0);
constexpr u32 DEPTH = RING_KB * 64 / PLACES > 12 ? 12 : RING_KB * 64 / PLACES;
static_assert(DEPTH >= 2, "a ring of one step would wait for each");

struct Linear {
    const u8* weight;           // [outputs, inputs]
    const float* weight_scales; // [outputs], or [blocks of outputs, weight_stride]
    const float* x_scales;      // [rows], or [groups, x_stride]
    const float* bias;          // [outputs], or null
    u32 inputs;
    u32 outputs;
    u32 weight_stride;
    u32 x_stride;
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

/// The same of one word.
__device__ __forceinline__ void copy_4(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// 16 codes as halves, two to a word.
struct Halves {
    u32 v[8];
};

__device__ __forceinline__ Halves unpack(const uint4& codes) {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    Halves halves;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        uint2 two = to_halves(words[i]);
        halves.v[2 * i] = two.x, halves.v[2 * i + 1] = two.y;
    }
    return halves;
}

/// Asks for the weights of one step after the other, of all runs of a block, with the scales of their blocks.
struct Weights {
    const u8* from;
    const float* scales;
    u64 pair_bytes;
    u32 tile_bytes, columns, stride, to, scale_to, end, step, steps, unit, last, last_of_lane, tail_bytes;

    __device__ __forceinline__ void ask() {
        if (unit >= last) return;
        u32 bytes = step + 1 < steps ? 16 : tail_bytes;
#pragma unroll
        for (u32 j = 0; j < T; j++)
            if (unit + j / PER < last_of_lane)
                copy_16(to + j * THREADS * 16, from + j / PER * tile_bytes + (j % PER ? pair_bytes : 0), bytes);
        u32 j = threadIdx.x % 32 - 16;
        if (GROUPS && j < T) {
            u32 row = (unit + j / PER) * 8 + (j % PER ? columns : 0), group = (step * STEP + threadIdx.x / 32 * OWN) / 128;
            bool is_there = unit + j / PER < last && group < stride;
            copy_4(scale_to, scales + row / 128 * stride + group, is_there ? 4 : 0);
        }
        to += PLACES * 16, scale_to += PLACES * 16;
        if (to == end) to -= DEPTH * PLACES * 16, scale_to -= DEPTH * PLACES * 16;
        from += STEP;
        if (++step == steps) {
            step = 0, unit += UNITS;
            from += (u64)(UNITS * tile_bytes) - steps * STEP;
        }
    }
};

/// Asks for the pieces of x alike, with the scales of their groups.
struct Inputs {
    const u8* from;
    const float* scales;
    u64 half_bytes;
    u32 stride, groups, to, scale_to, end, step, steps, left, real, tail_bytes;

    __device__ __forceinline__ void ask() {
        if (left == 0) return;
        u32 lane = threadIdx.x % 32, g = lane / 4, bytes = step + 1 < steps ? 16 : tail_bytes;
        if (g < HALF_ROWS) {
#pragma unroll
            for (u32 h = 0; h < HALVES; h++)
                copy_16(to + h * HALF_ROWS * 4 * 16, from + h * half_bytes, real >> (g + 8 * h) & 1 ? bytes : 0);
        }
        if (GROUPS && lane < 16) {
            u32 group = (step * STEP + threadIdx.x / 32 * OWN) / 128;
            bool is_there = (real >> lane & 1) && group < groups;
            copy_4(scale_to, scales + (u64)group * stride + lane, is_there ? 4 : 0);
        }
        to += PLACES * 16, scale_to += PLACES * 16;
        if (to >= end) to -= DEPTH * PLACES * 16, scale_to -= DEPTH * PLACES * 16;
        from += STEP;
        if (++step == steps) step = 0, from -= steps * STEP;
        left--;
    }
};

extern "C" __global__ void __maxnreg__(104) linear_small_fp8(Linear l, const u8* x, Y* out, Extent extent) {
    extern __shared__ uint4 ring[];
    __shared__ float partial[WARPS][T][HALVES * HALF_ROWS * 8];
    let_next_start();
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, mine = warp * OWN + lane % 4 * 16;
    u32 columns = l.outputs / PER;
    u32 first = blockIdx.x * l.each + min(blockIdx.x, l.extra), last = first + l.each + (blockIdx.x < l.extra);
    u32 steps = (l.inputs + STEP - 1) / STEP;
    // What this thread reads in the last step of a row: it may have no columns there.
    u32 tail_bytes = (steps - 1) * STEP + mine < l.inputs ? 16 : 0;
    u32 start = (u32)__cvta_generic_to_shared(ring), end = start + DEPTH * PLACES * 16, own = threadIdx.x * 16;
    u32 scale_place = (W_PLACES + X_PLACES + warp * 8) * 16;
    const u8* from = l.weight + (first * 8 + g) * (u64)l.inputs + mine;
    Weights weights = {from, l.weight_scales, columns * (u64)l.inputs, 8 * l.inputs, columns, l.weight_stride, start + own,
                       start + scale_place + lane * 4, end + own, 0, steps, first, last, min(last, (columns + 7 - g) / 8),
                       tail_bytes};
#pragma unroll
    for (u32 i = 0; i < DEPTH; i++) weights.ask(), commit();

    // Bit r: row r is real.
    u32 rows = extent.capacity();
    u32 real = __ballot_sync(0xffffffffu, lane < rows && extent.has(lane));
    // This thread's places of x in a step.
    u32 x_place = W_PLACES + warp * HALVES * HALF_ROWS * 4 + (g < HALF_ROWS ? lane : 0);
    Inputs inputs = {x + (u64)g * l.inputs + mine, l.x_scales, 8 * (u64)l.inputs, l.x_stride, (l.inputs + 127) / 128,
                     start + x_place * 16, start + scale_place + lane * 4, end, 0, steps,
                     (last - first + UNITS - 1) / UNITS * steps, real, tail_bytes};
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
        float bias[PER], scale[PER], before;
        auto fetch = [&](bool has_output) {
#pragma unroll
            for (u32 k = 0; k < PER; k++) {
                bias[k] = has_output && l.bias ? l.bias[column + k * columns] : 0.0f;
                scale[k] = !GROUPS && has_output ? l.weight_scales[column + k * columns] * l.x_scales[row] : 1.0f;
            }
            before = OUT == 2 && has_output ? to_float(out[(u64)row * columns + column]) : 0.0f;
        };
        bool has_output = place_of(threadIdx.x, row, column);
        fetch(has_output);

        float sums[T][4] = {};
        for (u32 step = 0; step < steps; step++) {
            // All but the latest DEPTH - 1 groups are there: first of weights, then of x, then of both.
            asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
            // Scales were read by one lane for all.
            if (GROUPS) __syncwarp();
            const uint4* places = ring + at * PLACES;
            const float* scales = reinterpret_cast<const float*>(places + W_PLACES + X_PLACES + warp * 8);
            Halves a[2] = {};
            float of_x[2] = {};
#pragma unroll
            for (u32 h = 0; h < HALVES; h++) {
                if (g < HALF_ROWS) a[h] = unpack(places[x_place + h * HALF_ROWS * 4]);
                if (GROUPS) of_x[h] = scales[g + 8 * h];
            }
#pragma unroll
            for (u32 j = 0; j < T; j++) {
                Halves b = unpack(places[j * THREADS + threadIdx.x]);
                float part[4] = {};
                float (&sum)[4] = GROUPS ? part : sums[j];
#pragma unroll
                for (u32 i = 0; i < 8; i += 2)
                    multiply(sum, a[0].v[i], a[1].v[i], a[0].v[i + 1], a[1].v[i + 1], b.v[i], b.v[i + 1]);
                if (GROUPS) {
                    float of_w = scales[16 + j];
#pragma unroll
                    for (u32 i = 0; i < 2 * HALVES; i++) sums[j][i] = fmaf(part[i], of_x[i / 2] * of_w, sums[j][i]);
                }
            }
            at = at + 1 == DEPTH ? 0 : at + 1;
            if (GROUPS) __syncwarp();
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
        __syncthreads();
        for (u32 i = threadIdx.x; i < rows * UNITS * 8; i += THREADS) {
            if (i != threadIdx.x) {
                has_output = place_of(i, row, column);
                fetch(has_output);
            }
            if (!has_output) continue;
            float y[PER];
#pragma unroll
            for (u32 k = 0; k < PER; k++) {
                float sum = 0.0f;
#pragma unroll
                for (u32 w = 0; w < WARPS; w++) sum += partial[w][(column / 8 - unit) * PER + k][row * 8 + column % 8];
                y[k] = sum * scale[k] + bias[k];
            }
            Y* place = out + (u64)row * columns + column;
            if constexpr (OUT == 3) *place = From<Y>::of(__fdividef(y[0], 1.0f + __expf(-y[0])) * y[1]);
            else *place = From<Y>::of(before + y[0]);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}
