// quantise: rows of activations become e4m3 codes with f32 scales, for products with weights of FP8.
//
// Definitions:
//   HELD    chunks of 8 elements that a thread of quantise_bf16 holds of a row
//   GROUPS  0: one scale a row. 1: one for each 128 columns
//
// A scale is the largest magnitude / 448, and a code is the nearest to x * (1 / scale), both in f32. Magnitudes are
// compared as integers, in which NaN is larger than infinity and both are larger than any number: a row (or group) that has
// one of them gets it as its scale, and every output of that row is NaN. All zeros have scale 1. A scale is not below 2^-100,
// so that its reciprocal is finite.
//
// Kernels: quantise_bf16 takes bf16 rows; quantise_norm_bf16 the f32 residual, whose RMS norm it rounds to bf16 first, by the
// same sums as norm.cu: the codes are those of norm and quantise_bf16 one after the other.
//
// Launch contract. width is a multiple of 16. block.x = ceil(width / (8 * HELD)) rounded up to a multiple of 32; of
// quantise_norm_bf16 ceil(width / 16) rounded up so, as in norm.cu. grid.x any. codes: [rows, width]. scales: [rows], or
// [ceil(width / 128), stride] with rows next to each other.
//
// Blocks are small, so that one finds room beside two of linear_small_fp8.cu.
#include "rows.cuh"
#include "e4m3.cuh"


struct Quantised {
    u8* codes;
    float* scales;
    u32 stride;
    u32 in_turn; // the next kernel may start only when those before are done
};

/// Largest over the threads of a block, as block_sum is the sum.
__device__ __forceinline__ u32 block_max(u32 x, u32 (&of_warps)[2][32], u32 turn) {
    x = __reduce_max_sync(0xffffffffu, x);
    if (blockDim.x == 32) return x;
    u32 (&warps)[32] = of_warps[turn & 1];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    u32 lane = threadIdx.x % 32;
    return __reduce_max_sync(0xffffffffu, lane < blockDim.x / 32 ? warps[lane] : 0);
}

__device__ __forceinline__ u32 largest(const Chunk& c) {
    u32 most = 0;
#pragma unroll
    for (u32 i = 0; i < CHUNK; i++) most = max(most, __float_as_uint(c.v[i]) & 0x7fffffffu);
    return most;
}

__device__ __forceinline__ float scale_of(u32 most) {
    if (most == 0) return 1.0f;
    float scale = __fdiv_rn(__uint_as_float(most), 448.0f);
    return scale < 0x1p-100f ? 0x1p-100f : scale;
}

__device__ __forceinline__ void write_codes(u8* to, const Chunk& c, float inverse) {
    u32 words[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 low = pack_e4m3(c.v[4 * i] * inverse, c.v[4 * i + 1] * inverse);
        u32 high = pack_e4m3(c.v[4 * i + 2] * inverse, c.v[4 * i + 3] * inverse);
        words[i] = low | high << 16;
    }
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
}

/// bf16 as they come, with half the registers of a Chunk.
struct Raw {
    uint4 words;
};

__device__ __forceinline__ u32 largest(const Raw& c) {
    const u32 words[4] = {c.words.x, c.words.y, c.words.z, c.words.w};
    u32 most = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) most = max(most, max(words[i] << 16 & 0x7fff0000u, words[i] & 0x7fff0000u));
    return most;
}

__device__ __forceinline__ void write_codes(u8* to, const Raw& c, float inverse) {
    const u32 words[4] = {c.words.x, c.words.y, c.words.z, c.words.w};
    u32 codes[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) codes[i] = pack_e4m3(low_float(words[i]) * inverse, high_float(words[i]) * inverse);
    *reinterpret_cast<uint2*>(to) = make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
}

/// The codes of a row that the threads of a block hold.
template <typename Held, u32 COUNT>
__device__ __forceinline__ void quantise(const Held (&x)[COUNT], u32 row, u32 width, const Quantised& out,
                                         u32 (&of_warps)[2][32], u32 turn) {
    u32 most[COUNT];
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) most[i] = largest(x[i]);
    if (!GROUPS) {
#pragma unroll
        for (u32 i = 1; i < COUNT; i++) most[0] = max(most[0], most[i]);
        most[0] = block_max(most[0], of_warps, turn);
    } else {
        // A chunk has 8 of a group's columns, so 16 threads side by side have them all.
#pragma unroll
        for (u32 i = 0; i < COUNT; i++)
#pragma unroll
            for (u32 lane = 8; lane; lane >>= 1) most[i] = max(most[i], __shfl_xor_sync(0xffffffffu, most[i], lane));
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        u32 column = (i * blockDim.x + threadIdx.x) * CHUNK;
        if (column >= width) break;
        float scale = scale_of(most[GROUPS ? i : 0]);
        if (GROUPS && column % 128 == 0) out.scales[column / 128 * out.stride + row] = scale;
        if (!GROUPS && column == 0) out.scales[row] = scale;
        write_codes(out.codes + (u64)row * width + column, x[i], __frcp_rn(scale));
    }
}

extern "C" __global__ void __maxnreg__(48) quantise_bf16(const bf16* x, u32 width, Quantised out, Extent extent) {
    __shared__ u32 of_warps[2][32];
    if (!out.in_turn) let_next_start();
    wait_for_inputs();
    if (out.in_turn) let_next_start();
    u32 turn = 0;
    for (u32 row = blockIdx.x; row < extent.capacity(); row += gridDim.x) {
        if (!extent.has(row)) continue;
        Raw held[HELD];
#pragma unroll
        for (u32 i = 0; i < HELD; i++) {
            u32 column = (i * blockDim.x + threadIdx.x) * CHUNK;
            held[i].words = make_uint4(0, 0, 0, 0);
            if (column < width) held[i].words = *reinterpret_cast<const uint4*>(x + (u64)row * width + column);
        }
        quantise(held, row, width, out, of_warps, turn++);
    }
}

/// As in norm.cu.
constexpr u32 NORM_HELD = 2;

extern "C" __global__ void __maxnreg__(48)
    quantise_norm_bf16(const float* x, const float* weight, float eps, u32 width, Quantised out, Extent extent) {
    __shared__ BlockSums sums;
    __shared__ u32 of_warps[2][32];
    let_next_start();
    Chunk weights[NORM_HELD];
#pragma unroll
    for (u32 i = 0; i < NORM_HELD; i++) weights[i] = read_row(weight, (i * blockDim.x + threadIdx.x) * CHUNK, width);
    wait_for_inputs();
    u32 turn = 0;
    for (u32 row = blockIdx.x; row < extent.capacity(); row += gridDim.x) {
        if (!extent.has(row)) continue;
        Chunk held[NORM_HELD];
        float squares = 0.0f;
#pragma unroll
        for (u32 i = 0; i < NORM_HELD; i++)
            held[i] = read_row(x + (u64)row * width, (i * blockDim.x + threadIdx.x) * CHUNK, width);
#pragma unroll
        for (u32 i = 0; i < NORM_HELD; i++) squares += square_sum(held[i]);
        float scale = inverse_root(block_sum(squares, sums, turn), width, eps);
#pragma unroll
        for (u32 i = 0; i < NORM_HELD; i++) {
#pragma unroll
            for (u32 j = 0; j < CHUNK; j++) held[i].v[j] = held[i].v[j] * scale * weights[i].v[j];
            round_chunk<bf16>(held[i]);
        }
        quantise(held, row, width, out, of_warps, turn++);
    }
}
