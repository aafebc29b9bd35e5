// linear_small: out = x W^T (+ bias) for 1 to 16 rows, where time is the reading of W. bf16 inputs and weights, f32 sums.
// Compiled with ROWS_MAX = 8 or 16 (rows of x at the most) and RUN = T (tiles of 8 outputs that are summed together).
//
//   linear_small             out = x W^T + bias, bf16
//   linear_small_f32         the same, out is f32 (logits)
//   linear_small_add32       residual += x W^T + bias, residual f32, [rows, outputs]
//   linear_small_silu        W = gate rows, then up rows; out[j] = silu(gate_j) * up_j, bf16, outputs / 2 wide
//   linear_small_norm, _norm_f32, _norm_silu    x is the f32 residual; its RMS norm goes in: the weight is applied on
//                            the way in and 1 / rms on the way out, so that no kernel stands in front
//
// How. A block takes a run of tiles. Each weight is read once, 16 bytes at a time, by the thread that uses it, into that
// thread's own places of a ring in shared memory: no barriers. The pieces of x go the same way, since a load that
// overtook the queue of weights would wait behind it all the same. A thread's 16 bytes of a weight row and the same 16
// bytes of an x row are the fragments of two products of the tensor cores, if both count k in the same permuted order.
// The warps of a block take turns at 32 columns each; their sums are added in order of warps once a run of T tiles is
// done, so the order of additions depends on `inputs` only. The ring is filled with weights before the wait for the kernel
// in front: they stream while that one still works, since two such blocks fit on a multiprocessor.
//
// Launch contract. inputs is a multiple of 8; x, W start on 16 bytes; block.x = 32 * WARPS; dynamic shared memory: see
// ring_bytes. Any grid is right: outputs are given out in units of 8 (silu: 8 pairs; outputs / 2 is a multiple of 8).
// `extent` is that of x, with at most ROWS_MAX rows at capacity.
#include "rows.cuh"

#ifndef WARPS
#define WARPS 8
#endif
#ifndef RING_KB
#define RING_KB 96
#endif
constexpr u32 THREADS = 32 * WARPS;
constexpr u32 HALVES = ROWS_MAX / 8;
/// Columns that the warps of a block take in one step.
constexpr u32 STEP = 32 * WARPS;

struct Linear {
    const bf16* weight;       // [outputs, inputs]
    const float* bias;        // [outputs], or null
    const float* norm_weight; // [inputs]; variants with a norm
    u32 inputs;
    u32 outputs;
    float eps;
};

/// What is read of x, and what becomes of the sums.
enum class In { Plain, Norm };
enum class Out { Store, Add, Silu };

/// 16 bytes to shared memory, or zeros if there is nothing to read.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Eight elements of the residual times the norm's weights; adds their squares.
__device__ __forceinline__ uint4 weighted(const uint4* x, const uint4* weight, float& squares) {
    const float* a = reinterpret_cast<const float*>(x);
    const float* b = reinterpret_cast<const float*>(x + THREADS);
    const float* v = reinterpret_cast<const float*>(weight);
    const float* w = reinterpret_cast<const float*>(weight + THREADS);
#pragma unroll
    for (u32 i = 0; i < 4; i++) squares = fmaf(a[i], a[i], fmaf(b[i], b[i], squares));
    return make_uint4(pack_bf16(a[0] * v[0], a[1] * v[1]), pack_bf16(a[2] * v[2], a[3] * v[3]),
                      pack_bf16(b[0] * w[0], b[1] * w[1]), pack_bf16(b[2] * w[2], b[3] * w[3]));
}

template <In IN, Out OUT, typename Y>
__device__ __forceinline__ void linear_small(const Linear& l, const void* x, Y* out, Extent extent) {
    constexpr u32 T = RUN, PER = OUT == Out::Silu ? 2 : 1;
    // Places of a step: weights, the norm's weights, x.
    constexpr u32 OF_NORM = IN == In::Norm ? 2 : 0, OF_X = IN == In::Norm ? 2 * HALVES : HALVES;
    constexpr u32 PLACES = T + OF_NORM + OF_X, PLACE = THREADS * 16;
    constexpr u32 DEPTH = RING_KB * 1024 / (PLACES * PLACE);
    constexpr u32 X_BYTES = IN == In::Norm ? 4 : 2;
    extern __shared__ uint4 ring[];
    __shared__ float partial[WARPS][T][HALVES * 64];
    __shared__ float squares_of[WARPS][HALVES * 8];
    let_next_start();
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, mine = warp * 32 + lane % 4 * 8;
    u32 units = (l.outputs / PER + 7) / 8;
    u32 first = (u64)blockIdx.x * units / gridDim.x, last = (u64)(blockIdx.x + 1) * units / gridDim.x;
    u32 steps = (l.inputs + STEP - 1) / STEP;
    // Whether this thread has columns in the last step of a row.
    bool has_tail = (steps - 1) * STEP + mine < l.inputs;
    u32 row_bytes = l.inputs * 2, place_0 = (u32)__cvta_generic_to_shared(ring + threadIdx.x);
    u32 place_end = place_0 + DEPTH * PLACES * PLACE;

    // Weights to ask for next: step, unit, address; units of this thread's row in a tile that may be ragged.
    u32 w_step = 0, w_unit = first, w_place = place_0, w_last = min(last, (l.outputs / PER + 7 - g) / 8);
    const char* w = reinterpret_cast<const char*>(l.weight) + (u64)(first * 8 + g) * row_bytes + mine * 2;
    u64 pair = (u64)(l.outputs / 2) * row_bytes;
    auto ask_weights = [&] {
        if (w_unit >= last) return;
        bool is_there = w_step + 1 < steps || has_tail;
#pragma unroll
        for (u32 j = 0; j < T; j++)
            if (w_unit + j / PER < w_last)
                copy_16(w_place + j * PLACE, w + (u64)(j / PER) * 8 * row_bytes + (j % PER ? pair : 0), is_there);
        if constexpr (IN == In::Norm) {
            const float* norm = l.norm_weight + (is_there ? w_step * STEP + mine : 0);
            copy_16(w_place + T * PLACE, norm, is_there);
            copy_16(w_place + (T + 1) * PLACE, norm + 4, is_there);
        }
        w_place = w_place + PLACES * PLACE == place_end ? place_0 : w_place + PLACES * PLACE;
        w += STEP * 2;
        if (++w_step == steps) {
            w_step = 0, w_unit += T / PER;
            w += (u64)(T / PER * 8) * row_bytes - steps * STEP * 2;
        }
    };
#pragma unroll
    for (u32 i = 0; i < DEPTH; i++) ask_weights(), commit();

    // Bit r: row r is real.
    u32 rows = extent.capacity();
    u32 real = __ballot_sync(0xffffffffu, lane < rows && extent.has(lane));
    u32 x_step = 0, x_left = (last - first + T / PER - 1) / (T / PER) * steps, x_place = place_0 + (T + OF_NORM) * PLACE;
    const char* x_row = static_cast<const char*>(x) + (u64)(g * l.inputs + mine) * X_BYTES;
    auto ask_x = [&] {
        if (x_left == 0) return;
        bool has_columns = x_step + 1 < steps || has_tail;
#pragma unroll
        for (u32 h = 0; h < HALVES; h++) {
            bool is_there = has_columns && real >> (g + 8 * h) & 1;
            const char* from = is_there ? x_row + (u64)(8 * h * l.inputs + x_step * STEP) * X_BYTES : static_cast<const char*>(x);
#pragma unroll
            for (u32 i = 0; i < OF_X / HALVES; i++)
                copy_16(x_place + (h * OF_X / HALVES + i) * PLACE, from + 16 * i, is_there);
        }
        x_place = x_place + PLACES * PLACE >= place_end ? place_0 + (T + OF_NORM) * PLACE : x_place + PLACES * PLACE;
        if (++x_step == steps) x_step = 0;
        x_left--;
    };
    wait_for_inputs();
#pragma unroll
    for (u32 i = 0; i < DEPTH; i++) ask_x(), commit();

    u32 at = 0;
    for (u32 unit = first; unit < last; unit += T / PER) {
        float sums[T][4] = {}, squares[HALVES] = {};
        for (u32 step = 0; step < steps; step++) {
            // All but the latest DEPTH - 1 groups are there: first of weights, then of x, then of both.
            asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
            const uint4* places = ring + at * PLACES * THREADS + threadIdx.x;
            uint4 a[2] = {};
#pragma unroll
            for (u32 h = 0; h < HALVES; h++) {
                if constexpr (IN == In::Norm)
                    a[h] = weighted(places + (T + 2 + 2 * h) * THREADS, places + T * THREADS, squares[h]);
                else a[h] = places[(T + h) * THREADS];
            }
#pragma unroll
            for (u32 j = 0; j < T; j++) {
                uint4 b = places[j * THREADS];
                multiply(sums[j], a[0].x, a[1].x, a[0].y, a[1].y, b.x, b.y);
                multiply(sums[j], a[0].z, a[1].z, a[0].w, a[1].w, b.z, b.w);
            }
            at = at + 1 == DEPTH ? 0 : at + 1;
            ask_weights();
            ask_x();
            commit();
        }
        // Sums of all warps, in their order.
        if (unit != first) __syncthreads();
#pragma unroll
        for (u32 j = 0; j < T; j++)
#pragma unroll
            for (u32 h = 0; h < HALVES; h++)
                *reinterpret_cast<float2*>(&partial[warp][j][h * 64 + g * 8 + lane % 4 * 2]) =
                    make_float2(sums[j][2 * h], sums[j][2 * h + 1]);
        if constexpr (IN == In::Norm) {
#pragma unroll
            for (u32 h = 0; h < HALVES; h++) {
                float s = squares[h];
                s += __shfl_xor_sync(0xffffffffu, s, 1);
                s += __shfl_xor_sync(0xffffffffu, s, 2);
                if (lane % 4 == 0) squares_of[warp][h * 8 + g] = s;
            }
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < rows * (T / PER) * 8; i += THREADS) {
            u32 row = i / (T / PER * 8), j = i / 8 % (T / PER), n = i % 8, column = (unit + j) * 8 + n;
            if (unit + j >= last || column >= l.outputs / PER || !(real >> row & 1)) continue;
            float scale = 1.0f;
            if constexpr (IN == In::Norm) {
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
                for (u32 w = 0; w < WARPS; w++) sum += partial[w][j * PER + k][row * 8 + n];
                y[k] = sum * scale + (l.bias ? l.bias[column + k * (l.outputs / 2)] : 0.0f);
            }
            u64 place = (u64)row * (l.outputs / PER) + column;
            if constexpr (OUT == Out::Silu) out[place] = From<Y>::of(__fdividef(y[0], 1.0f + __expf(-y[0])) * y[1]);
            else if constexpr (OUT == Out::Add) out[place] = From<Y>::of(to_float(out[place]) + y[0]);
            else out[place] = From<Y>::of(y[0]);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

#define SMALL(NAME, IN, OUT, Y)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(Linear l, const void* x, Y* out, Extent extent) {  \
        linear_small<IN, OUT, Y>(l, x, out, extent);                                                                 \
    }
SMALL(linear_small, In::Plain, Out::Store, bf16)
SMALL(linear_small_f32, In::Plain, Out::Store, float)
SMALL(linear_small_add32, In::Plain, Out::Add, float)
SMALL(linear_small_norm, In::Norm, Out::Store, bf16)
SMALL(linear_small_norm_f32, In::Norm, Out::Store, float)
#if RUN % 2 == 0
SMALL(linear_small_silu, In::Plain, Out::Silu, bf16)
SMALL(linear_small_norm_silu, In::Norm, Out::Silu, bf16)
#endif
