// linear_small: out = x W^T (+ bias) for 1 to 16 rows, where time is the reading of W. bf16 inputs and weights, f32 sums.
//
//   linear_small_M_T             out = x W^T + bias, bf16
//   linear_small_M_T_f32         the same, out is f32 (logits)
//   linear_small_M_T_add32       residual += x W^T + bias, residual f32, [rows, outputs]
//   linear_small_M_T_silu        W = gate rows, then up rows; out[j] = silu(gate_j) * up_j, bf16, outputs / 2 wide
//   linear_small_M_T_norm, _norm_f32, _norm_silu    x is the f32 residual; its RMS norm goes in: the weight is applied on
//                                the way in and 1 / rms on the way out, so that no kernel stands in front
// M is 8 or 16: rows of x at the most. T tiles of 8 outputs are summed together.
//
// How. A block takes a run of tiles, reads each weight once, 16 bytes a thread straight into its own place of a ring in
// shared memory (nobody else reads it, so there are no barriers), and feeds them to the tensor cores: a thread's 16
// bytes of a weight row and the same 16 bytes of an x row are the fragments of two products, if both count k in the
// same permuted order. The 8 warps of a block take turns at 32 columns each; their sums are added in order of warps once
// a run of T tiles is done. The order of additions depends on `inputs` only. The ring is filled before the wait for the
// kernel in front: weights stream while that one still works, since two such blocks fit on a multiprocessor.
//
// Launch contract. inputs is a multiple of 8; x, W start on 16 bytes; block.x = 256; grid.x = multiprocessors (any number
// is right; silu: pairs of a gate and an up tile are given out, outputs / 2 is a multiple of 8). Dynamic shared memory
// RING_BYTES = 98304. Choose T = tiles of a block = ceil(ceil(outputs / 8) / grid.x) if that is <= 4, else the largest of
// 3, 4 that divides it, or 4; silu: 2 * pairs of a block up to 6 (M = 16: up to 4). `extent` is that of x, with at most M
// rows at capacity.
#include "rows.cuh"

constexpr u32 WARPS = 8;
constexpr u32 THREADS = 32 * WARPS;
/// Tiles in the ring: 24 times 256 threads times 16 bytes.
constexpr u32 RING_TILES = 24;
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

__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Eight elements of a row of x as they are read: bf16, or f32 with the norm's weights.
template <In IN> struct Piece;
template <> struct Piece<In::Plain> {
    uint4 x;
    __device__ __forceinline__ void read(const Linear&, const void* rows, u64 at, u32, bool is_there) {
        x = is_there ? *reinterpret_cast<const uint4*>(static_cast<const bf16*>(rows) + at) : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ uint4 fragment(const Linear&, u32, float&) const { return x; }
};
template <> struct Piece<In::Norm> {
    Chunk x;
    __device__ __forceinline__ void read(const Linear&, const void* rows, u64 at, u32, bool is_there) {
        if (is_there) x = read_chunk(static_cast<const float*>(rows) + at);
        else x = {};
    }
    __device__ __forceinline__ uint4 fragment(const Linear& l, u32 column, float& squares) const {
        if (column >= l.inputs) return make_uint4(0, 0, 0, 0);
        squares += square_sum(x);
        Chunk w = read_chunk(l.norm_weight + column);
        return make_uint4(pack_bf16(x.v[0] * w.v[0], x.v[1] * w.v[1]), pack_bf16(x.v[2] * w.v[2], x.v[3] * w.v[3]),
                          pack_bf16(x.v[4] * w.v[4], x.v[5] * w.v[5]), pack_bf16(x.v[6] * w.v[6], x.v[7] * w.v[7]));
    }
};

/// HALVES of 8 rows, T tiles at once. `gated` pairs every tile with the one `outputs / 2` rows below.
template <u32 HALVES, u32 T, In IN, Out OUT, typename Y>
__device__ __forceinline__ void linear_small(const Linear& l, const void* x, Y* out, Extent extent) {
    constexpr u32 DEPTH = RING_TILES / T;
    // Steps of x in registers ahead of their use.
    constexpr u32 AHEAD = IN == In::Norm ? 2 : 4;
    constexpr u32 PER = OUT == Out::Silu ? 2 : 1;
    extern __shared__ uint4 ring[];
    __shared__ float partial[WARPS][T][HALVES * 64];
    __shared__ float squares_of[WARPS][HALVES * 8];
    let_next_start();
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    u32 units = (l.outputs / PER + 7) / 8;
    u32 first = (u64)blockIdx.x * units / gridDim.x, last = (u64)(blockIdx.x + 1) * units / gridDim.x;
    u32 steps = (l.inputs + STEP - 1) / STEP, mine = warp * 32 + lane % 4 * 8;
    u32 slot = (u32)__cvta_generic_to_shared(ring + threadIdx.x);

    // What is asked for next: a step of a run of tiles, and its place in the ring.
    u32 next_unit = first, next_column = mine, next_place = 0;
    auto ask = [&] {
#pragma unroll
        for (u32 j = 0; j < T; j++) {
            u32 unit = next_unit + j / PER;
            u32 row = unit * 8 + g + j % PER * (l.outputs / 2);
            bool is_there = unit < last && row < l.outputs && next_column < l.inputs;
            copy_16(slot + (next_place * T + j) * THREADS * 16, l.weight + (is_there ? (u64)row * l.inputs + next_column : 0),
                    is_there);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        next_place = next_place + 1 == DEPTH ? 0 : next_place + 1;
        next_column += STEP;
        if (next_column - mine >= steps * STEP) next_column = mine, next_unit += T / PER;
    };
#pragma unroll
    for (u32 i = 0; i < DEPTH; i++) ask();

    u32 rows = extent.capacity();
    // Bit r: row r is real.
    u32 real = __ballot_sync(0xffffffffu, lane < rows && extent.has(lane));
    wait_for_inputs();
    Piece<IN> pieces[AHEAD][HALVES];
    auto read = [&](u32 p, u32 step) {
        u32 column = step * STEP + mine;
#pragma unroll
        for (u32 h = 0; h < HALVES; h++)
            pieces[p][h].read(l, x, (u64)(g + 8 * h) * l.inputs + column, column, real >> (g + 8 * h) & 1 && column < l.inputs);
    };
#pragma unroll
    for (u32 p = 0; p < AHEAD; p++) read(p, p);

    u32 place = 0;
    for (u32 unit = first; unit < last; unit += T / PER) {
        float sums[T][4] = {}, squares[HALVES] = {};
        for (u32 step = 0; step < steps; step += AHEAD) {
#pragma unroll
            for (u32 p = 0; p < AHEAD; p++) {
                if (step + p >= steps) break;
                uint4 a[2] = {};
#pragma unroll
                for (u32 h = 0; h < HALVES; h++)
                    a[h] = pieces[p][h].fragment(l, (step + p) * STEP + mine, squares[h]);
                // The place `p` then holds step `p` of the next run.
                read(p, step + p + AHEAD < steps ? step + p + AHEAD : p);
                asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
#pragma unroll
                for (u32 j = 0; j < T; j++) {
                    uint4 w = ring[(place * T + j) * THREADS + threadIdx.x];
                    multiply(sums[j], a[0].x, a[1].x, a[0].y, a[1].y, w.x, w.y);
                    multiply(sums[j], a[0].z, a[1].z, a[0].w, a[1].w, w.z, w.w);
                }
                place = place + 1 == DEPTH ? 0 : place + 1;
                ask();
            }
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
                float squares = 0.0f;
#pragma unroll
                for (u32 w = 0; w < WARPS; w++) squares += squares_of[w][row];
                scale = inverse_root(squares, l.inputs, l.eps);
            }
            float y[PER];
#pragma unroll
            for (u32 k = 0; k < PER; k++) {
                float sum = 0.0f;
#pragma unroll
                for (u32 w = 0; w < WARPS; w++) sum += partial[w][j * PER + k][row * 8 + n];
                y[k] = sum * scale + (l.bias ? l.bias[column + k * (l.outputs / 2)] : 0.0f);
            }
            u64 at = (u64)row * (l.outputs / PER) + column;
            if constexpr (OUT == Out::Silu) out[at] = From<Y>::of(__fdividef(y[0], 1.0f + __expf(-y[0])) * y[1]);
            else if constexpr (OUT == Out::Add) out[at] = From<Y>::of(to_float(out[at]) + y[0]);
            else out[at] = From<Y>::of(y[0]);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

#define SMALL(NAME, HALVES, T, IN, OUT, Y)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(Linear l, const void* x, Y* out, Extent extent) {     \
        linear_small<HALVES, T, IN, OUT, Y>(l, x, out, extent);                                                      \
    }
#define SMALL_OF_TILES(M, HALVES, T)                                                                                 \
    SMALL(linear_small_##M##_##T, HALVES, T, In::Plain, Out::Store, bf16)                                            \
    SMALL(linear_small_##M##_##T##_f32, HALVES, T, In::Plain, Out::Store, float)                                     \
    SMALL(linear_small_##M##_##T##_add32, HALVES, T, In::Plain, Out::Add, float)                                     \
    SMALL(linear_small_##M##_##T##_norm, HALVES, T, In::Norm, Out::Store, bf16)                                      \
    SMALL(linear_small_##M##_##T##_norm_f32, HALVES, T, In::Norm, Out::Store, float)
SMALL_OF_TILES(8, 1, 1)
SMALL_OF_TILES(8, 1, 2)
SMALL_OF_TILES(8, 1, 3)
SMALL_OF_TILES(8, 1, 4)
SMALL_OF_TILES(16, 2, 1)
SMALL_OF_TILES(16, 2, 2)
SMALL_OF_TILES(16, 2, 3)
SMALL_OF_TILES(16, 2, 4)
#define SMALL_SILU(M, HALVES, T)                                                                                     \
    SMALL(linear_small_##M##_##T##_silu, HALVES, T, In::Plain, Out::Silu, bf16)                                      \
    SMALL(linear_small_##M##_##T##_norm_silu, HALVES, T, In::Norm, Out::Silu, bf16)
SMALL_SILU(8, 1, 2)
SMALL_SILU(8, 1, 4)
SMALL_SILU(8, 1, 6)
SMALL_SILU(16, 2, 2)
SMALL_SILU(16, 2, 4)
