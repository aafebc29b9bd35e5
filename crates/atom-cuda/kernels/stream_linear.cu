// Op::Linear for few rows: bf16 weights stream once through persistent blocks; see stream.cuh. Also with the activation
// behind it (gate and up in one matrix), and with an RMS norm in front.
//
// Definitions: ROW_TILES (1, 2: up to 8 ROW_TILES rows), DEPTH (8, 6, 4: as for experts_small).
//   stream_linear[_half]_{bf16,out32}        out[r, o] = w[o] . x[r] + bias[o]; bias f32 [outputs] or null
//   stream_linear_norm[_half]_{bf16,x32_bf16}   the same of norm(x): x / sqrt(mean(x^2) + eps) * norm, rounded to bf16
//   stream_linear_gated_bf16, stream_linear_gated_norm_{bf16,x32_bf16}   weights [2 width, inputs]: gate, then up; out[r, w] = silu(gate) * up
//
// norm: x may be float (x32) or bf16; if `add` (bf16 [rows, inputs]) is not null the norm is that of x + add, which the last
// block also writes to `residual` (same type as x; another buffer than x, which others still read).
// `header[row_place]` is the number of real rows; no row behind them is read or written.
// half: a unit is 8 outputs, not 16: for matrices of fewer than 64 rows a multiprocessor. inputs a multiple of 8.
// grid = multiprocessors, block 256;
// dynamic shared memory = DEPTH * 16384 + ROW_TILES * 8192 + 8 * ROW_TILES * (ceil(inputs / 128) * 256 + 64)
// All may be launched with programmatic dependent launch: weights are fetched before the kernels in front are done.
#include "stream.cuh"

constexpr int LINEAR_WARPS = 8; // along K

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

/// Rows of x as they are.
struct Plain {
    const bf16* x;
    __device__ __forceinline__ void load(int rows, int inputs, u32 to) const {
        for (int row = threadIdx.x / 32; row < (rows + 7) / 8 * 8; row += 8)
            load_input_row(row < rows ? x + (u64)row * inputs : nullptr, to, inputs, row);
    }
};

__device__ __forceinline__ void load8(const float* from, float (&to)[8]) {
    float4 a = *(const float4*)from, b = *(const float4*)(from + 4);
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}
__device__ __forceinline__ void load8(const bf16* from, float (&to)[8]) {
    uint4 a = *(const uint4*)from;
    to[0] = low_float(a.x), to[1] = high_float(a.x), to[2] = low_float(a.y), to[3] = high_float(a.y);
    to[4] = low_float(a.z), to[5] = high_float(a.z), to[6] = low_float(a.w), to[7] = high_float(a.w);
}
__device__ __forceinline__ void store8(float* to, const float (&x)[8]) {
    *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
    *(float4*)(to + 4) = make_float4(x[4], x[5], x[6], x[7]);
}
__device__ __forceinline__ void store8(bf16* to, const float (&x)[8]) {
    *(uint4*)to = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

/// Rows of x, normalised by all threads together; each value is read twice, the second time from the caches.
template <typename R> struct Normed {
    static constexpr int ROWS = 8 * ROW_TILES;
    const R* x;
    const bf16* add;
    R* residual;
    const float* norm;
    float eps;

    __device__ __forceinline__ void sum8(u64 at, float (&v)[8]) const {
        load8(x + at, v);
        if (!add) return;
        float a[8];
        load8(add + at, a);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = to_float(From<R>::of(v[i] + a[i]));
    }
    /// 1 / root mean square of each row, by all threads.
    __device__ __forceinline__ void scales(int rows, int inputs, float (&scale)[ROWS]) const {
        __shared__ float sums[8][ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            scale[row] = 0.0f;
            if (row >= rows) continue;
#pragma unroll 2
            for (int chunk = threadIdx.x; chunk * 8 < inputs; chunk += STREAM_THREADS) {
                float v[8];
                sum8((u64)row * inputs + chunk * 8, v);
                // The last block always has a unit.
                if (add && blockIdx.x == gridDim.x - 1) store8(residual + (u64)row * inputs + chunk * 8, v);
#pragma unroll
                for (int i = 0; i < 8; i++) scale[row] = fmaf(v[i], v[i], scale[row]);
            }
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            float sum = warp_sum(scale[row]);
            if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][row] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < 8; warp++) sum += sums[warp][row];
            scale[row] = rsqrtf(sum / inputs + eps);
        }
    }
    __device__ __forceinline__ void load(int rows, int inputs, u32 to) const {
        float scale[ROWS];
        scales(rows, inputs, scale);
        int chunks = (inputs + 127) / 128 * 16;
        for (int chunk = threadIdx.x; chunk < chunks; chunk += STREAM_THREADS) {
            float w[8] = {};
            if (chunk * 8 < inputs) load8(norm + chunk * 8, w);
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                if (row >= (rows + 7) / 8 * 8) continue;
                uint4 out = make_uint4(0, 0, 0, 0);
                if (row < rows && chunk * 8 < inputs) {
                    float v[8];
                    sum8((u64)row * inputs + chunk * 8, v);
#pragma unroll
                    for (int i = 0; i < 8; i++) v[i] *= scale[row] * w[i];
                    out = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
                }
                store_input(to, inputs, row, chunk, out);
            }
        }
    }
};

/// One matrix: all units are of one tile.
template <typename Source> struct Matrix {
    static constexpr bool WEIGHTS_FIRST = true;
    Source source;
    const bf16* matrix;
    const int* real_rows;
    int inputs, outputs;

    __device__ __forceinline__ bool has_rows() const { return *real_rows > 0; }
    __device__ __forceinline__ int tile_of(int) const { return 0; }
    __device__ __forceinline__ int tile_rows(int) const { return *real_rows; }
    template <bool> __device__ __forceinline__ void load_inputs(int, u32 to) const { source.load(*real_rows, inputs, to); }
};

template <typename Source, typename Out, bool IS_HALF> struct LinearJob : Matrix<Source> {
    static constexpr bool HALF = IS_HALF;
    static constexpr int ROWS = HALF ? 8 : 16;
    const float* bias;
    Out* out;

    __device__ __forceinline__ int units() const { return (this->outputs + ROWS - 1) / ROWS; }
    __device__ __forceinline__ WeightRows weights(int unit, int, int g) const {
        int row = unit * ROWS + g;
        const bf16* low = this->matrix + (u64)row * this->inputs;
        return {row < this->outputs ? low : nullptr, !HALF && row + 8 < this->outputs ? low + (u64)8 * this->inputs : nullptr};
    }
    __device__ __forceinline__ void store(int unit, int, int, int row, int g, float4 sum) const {
        int rows = *this->real_rows, column = unit * ROWS + g;
        if (row < rows) put(row, column, sum.x, sum.z);
        if (row + 1 < rows) put(row + 1, column, sum.y, sum.w);
    }
    __device__ __forceinline__ void put(int row, int column, float low, float high) const {
        Out* to = out + (u64)row * this->outputs + column;
        if (column < this->outputs) to[0] = From<Out>::of(low + (bias ? bias[column] : 0.0f));
        if (!HALF && column + 8 < this->outputs) to[8] = From<Out>::of(high + (bias ? bias[column + 8] : 0.0f));
    }
};

/// A unit is 8 columns: gate rows low, up rows high. `outputs` is the width.
template <typename Source> struct GatedJob : Matrix<Source> {
    static constexpr bool HALF = false;
    bf16* out;

    __device__ __forceinline__ int units() const { return (this->outputs + 7) / 8; }
    __device__ __forceinline__ WeightRows weights(int unit, int, int g) const {
        int column = unit * 8 + g;
        if (column >= this->outputs) return {nullptr, nullptr};
        const bf16* gate = this->matrix + (u64)column * this->inputs;
        return {gate, gate + (u64)this->outputs * this->inputs};
    }
    __device__ __forceinline__ void store(int unit, int, int, int row, int g, float4 sum) const {
        int rows = *this->real_rows, column = unit * 8 + g;
        if (column >= this->outputs) return;
        bf16* to = out + (u64)row * this->outputs + column;
        if (row < rows) to[0] = to_bf16(silu(sum.x) * sum.z);
        if (row + 1 < rows) to[this->outputs] = to_bf16(silu(sum.y) * sum.w);
    }
};

extern __shared__ __align__(128) u8 linear_shared[];

#define KERNEL(NAME) extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 1) NAME
#define LINEAR(NAME, HALF, OUT)                                                                                                \
    KERNEL(NAME)                                                                                                               \
    (const int* header, int row_place, const bf16* x, const bf16* matrix, const float* bias, OUT* out, int inputs, int outputs) { \
        stream_products<LINEAR_WARPS, ROW_TILES, DEPTH>(                                                                       \
            LinearJob<Plain, OUT, HALF>{{{x}, matrix, header + row_place, inputs, outputs}, bias, out}, linear_shared);        \
    }
#define NORM_LINEAR(NAME, HALF, R, OUT)                                                                                        \
    KERNEL(NAME)                                                                                                               \
    (const int* header, int row_place, const R* x, const bf16* add, R* residual, const float* norm, float eps,                 \
     const bf16* matrix, const float* bias, OUT* out, int inputs, int outputs) {                                               \
        stream_products<LINEAR_WARPS, ROW_TILES, DEPTH>(                                                                       \
            LinearJob<Normed<R>, OUT, HALF>{                                                                                   \
                {{x, add, residual, norm, eps}, matrix, header + row_place, inputs, outputs}, bias, out},                      \
            linear_shared);                                                                                                    \
    }
#define NORM_GATED(NAME, R)                                                                                                    \
    KERNEL(NAME)                                                                                                               \
    (const int* header, int row_place, const R* x, const bf16* add, R* residual, const float* norm, float eps,                 \
     const bf16* matrix, bf16* out, int inputs, int width) {                                                                   \
        stream_products<LINEAR_WARPS, ROW_TILES, DEPTH>(                                                                       \
            GatedJob<Normed<R>>{{{x, add, residual, norm, eps}, matrix, header + row_place, inputs, width}, out},              \
            linear_shared);                                                                                                    \
    }

LINEAR(stream_linear_bf16, false, bf16)
LINEAR(stream_linear_out32, false, float)
LINEAR(stream_linear_half_bf16, true, bf16)
LINEAR(stream_linear_half_out32, true, float)
NORM_LINEAR(stream_linear_norm_bf16, false, bf16, bf16)
NORM_LINEAR(stream_linear_norm_x32_bf16, false, float, bf16)
NORM_LINEAR(stream_linear_norm_half_bf16, true, bf16, bf16)
NORM_LINEAR(stream_linear_norm_half_x32_bf16, true, float, bf16)
NORM_GATED(stream_linear_gated_norm_bf16, bf16)
NORM_GATED(stream_linear_gated_norm_x32_bf16, float)
KERNEL(stream_linear_gated_bf16)
(const int* header, int row_place, const bf16* x, const bf16* matrix, bf16* out, int inputs, int width) {
    stream_products<LINEAR_WARPS, ROW_TILES, DEPTH>(GatedJob<Plain>{{{x}, matrix, header + row_place, inputs, width}, out}, linear_shared);
}
