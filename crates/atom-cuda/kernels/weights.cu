// Weights: synthetic ones made where they are needed, and biases of products.
#include "e4m3.cuh"

/// The Philox 4x32-10 block function (Salmon et al., SC 2011), as atom-base has it.
__device__ __forceinline__ uint4 philox(uint4 c, u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 left = 0xD2511F53ull * c.x, right = 0xCD9E8D57ull * c.z;
        c = make_uint4((u32)(right >> 32) ^ c.y ^ k0, (u32)right, (u32)(left >> 32) ^ c.w ^ k1, (u32)left);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

/// Element `index` of a synthetic tensor, by the rule of atom-weights' `Checkpoint::synthetic`. Logarithm, sine and
/// cosine are the device's own: within a unit in f64's last place of the host's, so one element in a hundred million
/// may round to the neighbouring float.
__device__ __forceinline__ float synthetic(u64 index, u32 k0, u32 k1, double offset, double scale) {
    u64 pair = index / 2;
    uint4 words = philox(make_uint4((u32)pair, (u32)(pair >> 32), 0, 0), k0, k1);
    double u1 = (double)((words.x >> 8) + 1) * (1.0 / (1 << 24)), u2 = (double)(words.y >> 8) * (1.0 / (1 << 24));
    double radius = sqrt(__dmul_rn(-2.0, log(u1))), angle = __dmul_rn(6.283185307179586, u2), sine, cosine;
    sincos(angle, &sine, &cosine);
    float x = (float)__dmul_rn(radius, index % 2 ? sine : cosine);
    return (float)__dadd_rn(offset, __dmul_rn((double)x, scale));
}

/// The nearest number that an e4m3 code has.
__device__ __forceinline__ float nearest_e4m3(float x) {
    // Codes have 3 bits behind the leading one, and steps of 2^-9 where that is below 2^-6.
    int exponent = max((int)(__float_as_uint(x) >> 23 & 255) - 127, -6);
    float step = __uint_as_float((u32)(exponent - 3 + 127) << 23);
    return fminf(fmaxf(rintf(x / step) * step, -448.0f), 448.0f);
}

/// What is stored of a number whose tensor has codes with this scale; 0 if it has none.
template <typename T> struct Stored {
    static __device__ __forceinline__ T of(float x, float scale) {
        return From<T>::of(scale == 0.0f ? x : nearest_e4m3(__fdiv_rn(x, scale)) * scale);
    }
};

/// out[r, c] = element `first + r * stride + c`
template <typename T>
__device__ __forceinline__ void make(T* out, u64 rows, u64 cols, u64 first, u64 stride, u32 k0, u32 k1, double offset,
                                     double scale, float of_codes) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < rows * cols; i += (u64)gridDim.x * blockDim.x) {
        float x = synthetic(first + i / cols * stride + i % cols, k0, k1, offset, scale);
        out[i] = Stored<T>::of(x, of_codes);
    }
}

template <> struct Stored<e4m3> {
    static __device__ __forceinline__ e4m3 of(float x, float scale) { return From<e4m3>::of(__fdiv_rn(x, scale)); }
};

#define SYNTHETIC(NAME, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        synthetic_##NAME(T* out, u64 rows, u64 cols, u64 first, u64 stride, u32 k0, u32 k1, double offset,            \
                         double scale, float of_codes) {                                                              \
        make(out, rows, cols, first, stride, k0, k1, offset, scale, of_codes);                                        \
    }
SYNTHETIC(bf16, bf16)
SYNTHETIC(f32, float)
SYNTHETIC(e4m3, e4m3)

#include "rows.cuh"

/// out[r] += bias for every real row. grid.x = rows at capacity, block.x = any.
template <typename T> __device__ __forceinline__ void add_bias(T* out, const float* bias, u32 width, Extent extent) {
    let_next_start();
    wait_for_inputs();
    for (u32 row = blockIdx.x; row < extent.capacity(); row += gridDim.x) {
        if (!extent.has(row)) continue;
        T* to = out + (u64)row * width;
        for (u32 c = threadIdx.x; c < width; c += blockDim.x) to[c] = From<T>::of(to_float(to[c]) + bias[c]);
    }
}

extern "C" __global__ void __launch_bounds__(256) add_bias_bf16(bf16* out, const float* bias, u32 width, Extent extent) {
    add_bias(out, bias, width, extent);
}
extern "C" __global__ void __launch_bounds__(256) add_bias_f32(float* out, const float* bias, u32 width, Extent extent) {
    add_bias(out, bias, width, extent);
}
