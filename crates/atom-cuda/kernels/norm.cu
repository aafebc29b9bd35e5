// RMS norms over whole rows: norm, add_norm; and those over all heads of q and of k: square_sums, scale_heads.
//
// Launch contract. `_bf16`: activations bf16; `_f32`: activations and residual f32; `_bf16_res32`: activations bf16,
// residual f32. Norm weights are f32. Buffers start on 16 bytes.
//   norm, add_norm        grid.x = rows of the extent at capacity (fewer is right too: blocks loop);
//                         block.x = norm_threads(width) = ceil(width / 16) rounded up to a multiple of 32, at
//                         most 1024, so width <= 16384. It depends on the width only, and so do a row's bits.
//   square_sums           grid.x alike; block.x = 256. scale_heads: grid.x alike; block.x = 256.
// Every block reads `extent` and its weights before it waits for the kernel in front (rows.cuh).
#include "rows.cuh"

/// Chunks of a row that a thread keeps in registers: a row is read once.
constexpr u32 HELD = 2;

/// Writes the norm of a row that the threads of a block hold.
template <typename T>
__device__ __forceinline__ void write_norm(const Chunk (&x)[HELD], const Chunk (&weight)[HELD], float eps, u32 width,
                                           T* out, BlockSums& sums, u32 turn) {
    float squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < HELD; i++) squares += square_sum(x[i]);
    float scale = inverse_root(block_sum(squares, sums, turn), width, eps);
#pragma unroll
    for (u32 i = 0; i < HELD; i++) {
        u32 column = (i * blockDim.x + threadIdx.x) * CHUNK;
        if (column >= width) break;
        Chunk y;
#pragma unroll
        for (u32 j = 0; j < CHUNK; j++) y.v[j] = x[i].v[j] * scale * weight[i].v[j];
        write_row(out, column, width, y);
    }
}

__device__ __forceinline__ void read_weight(const float* weight, u32 width, Chunk (&held)[HELD]) {
#pragma unroll
    for (u32 i = 0; i < HELD; i++) held[i] = read_row(weight, (i * blockDim.x + threadIdx.x) * CHUNK, width);
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`
template <typename T, typename R>
__device__ __forceinline__ void norm(const R* x, const float* weight, float eps, u32 width, T* out, Extent extent) {
    __shared__ BlockSums sums;
    let_next_start();
    Chunk scale[HELD];
    read_weight(weight, width, scale);
    u32 turn = 0;
    bool waits = true;
    for (u32 row = blockIdx.x; row < extent.capacity(); row += gridDim.x) {
        if (!extent.has(row)) continue;
        if (waits) wait_for_inputs();
        waits = false;
        Chunk held[HELD];
#pragma unroll
        for (u32 i = 0; i < HELD; i++)
            held[i] = read_row(x + (u64)row * width, (i * blockDim.x + threadIdx.x) * CHUNK, width);
        write_norm(held, scale, eps, width, out + (u64)row * width, sums, turn++);
    }
    if (waits) wait_for_inputs();
}

/// `residual += x; out = norm(residual)`, of the sum as it is stored.
template <typename T, typename R>
__device__ __forceinline__ void add_norm(R* residual, const T* x, const float* weight, float eps, u32 width, T* out,
                                         Extent extent) {
    __shared__ BlockSums sums;
    let_next_start();
    Chunk scale[HELD];
    read_weight(weight, width, scale);
    u32 turn = 0;
    bool waits = true;
    for (u32 row = blockIdx.x; row < extent.capacity(); row += gridDim.x) {
        if (!extent.has(row)) continue;
        if (waits) wait_for_inputs();
        waits = false;
        Chunk held[HELD], added[HELD];
#pragma unroll
        for (u32 i = 0; i < HELD; i++) {
            u32 column = (i * blockDim.x + threadIdx.x) * CHUNK;
            held[i] = read_row(residual + (u64)row * width, column, width);
            added[i] = read_row(x + (u64)row * width, column, width);
        }
#pragma unroll
        for (u32 i = 0; i < HELD; i++) {
            u32 column = (i * blockDim.x + threadIdx.x) * CHUNK;
#pragma unroll
            for (u32 j = 0; j < CHUNK; j++) held[i].v[j] += added[i].v[j];
            round_chunk<R>(held[i]);
            if (column < width) write_row(residual + (u64)row * width, column, width, held[i]);
        }
        write_norm(held, scale, eps, width, out + (u64)row * width, sums, turn++);
    }
    if (waits) wait_for_inputs();
}

/// `out[r] = [sum of squares of q, of k]`, q in the first `q_width` columns of `stride`, k in the next `k_width`.
template <typename T>
__device__ __forceinline__ void square_sums(const T* qkv, u32 q_width, u32 k_width, u32 stride, float* out,
                                            Extent extent) {
    __shared__ BlockSums sums;
    let_next_start();
    wait_for_inputs();
    for (u32 row = blockIdx.x; row < extent.capacity(); row += gridDim.x) {
        if (!extent.has(row)) continue;
        const T* heads = qkv + (u64)row * stride;
        float of_q = 0.0f, of_k = 0.0f;
        if ((q_width | k_width | stride) % CHUNK == 0) {
            for (u32 c = threadIdx.x * CHUNK; c < q_width; c += blockDim.x * CHUNK)
                of_q += square_sum(read_chunk(heads + c));
            for (u32 c = threadIdx.x * CHUNK; c < k_width; c += blockDim.x * CHUNK)
                of_k += square_sum(read_chunk(heads + q_width + c));
        } else {
            for (u32 c = threadIdx.x; c < q_width + k_width; c += blockDim.x) {
                float x = to_float(heads[c]);
                (c < q_width ? of_q : of_k) += x * x;
            }
        }
        of_q = block_sum(of_q, sums, 0);
        of_k = block_sum(of_k, sums, 1);
        if (threadIdx.x == 0) out[2 * row] = of_q, out[2 * row + 1] = of_k;
        __syncthreads();
    }
}

/// `q *= weight / sqrt(sum / elements + eps)`, and k alike.
template <typename T>
__device__ __forceinline__ void scale_heads(T* qkv, const float* sums, const float* q_weight, const float* k_weight,
                                            u32 q_width, u32 k_width, u32 stride, u32 q_elements, u32 k_elements,
                                            float eps, Extent extent) {
    let_next_start();
    wait_for_inputs();
    bool whole = (q_width | k_width | stride) % CHUNK == 0;
    for (u32 row = blockIdx.x; row < extent.capacity(); row += gridDim.x) {
        if (!extent.has(row)) continue;
        T* heads = qkv + (u64)row * stride;
        float of_q = inverse_root(sums[2 * row], q_elements, eps);
        float of_k = inverse_root(sums[2 * row + 1], k_elements, eps);
        if (!whole) {
            for (u32 c = threadIdx.x; c < q_width + k_width; c += blockDim.x) {
                float weight = c < q_width ? q_weight[c] : k_weight[c - q_width];
                heads[c] = From<T>::of(to_float(heads[c]) * (c < q_width ? of_q : of_k) * weight);
            }
            continue;
        }
        for (u32 c = threadIdx.x * CHUNK; c < q_width + k_width; c += blockDim.x * CHUNK) {
            Chunk x = read_chunk(heads + c);
            Chunk weight = read_chunk(c < q_width ? q_weight + c : k_weight + (c - q_width));
            float scale = c < q_width ? of_q : of_k;
#pragma unroll
            for (u32 j = 0; j < CHUNK; j++) x.v[j] = x.v[j] * scale * weight.v[j];
            write_chunk(heads + c, x);
        }
    }
}

#define NORM_OF(NAME, T, R)                                                                                           \
    extern "C" __global__ void __launch_bounds__(1024)                                                                \
        norm_##NAME(const R* x, const float* weight, float eps, u32 width, T* out, Extent extent) {                   \
        norm<T, R>(x, weight, eps, width, out, extent);                                                               \
    }
NORM_OF(bf16, bf16, bf16)
NORM_OF(f32, float, float)
NORM_OF(bf16_res32, bf16, float)

#define ADD_NORM(NAME, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(1024)                                                                \
        add_norm_##NAME(float* residual, const T* x, const float* weight, float eps, u32 width, T* out,               \
                        Extent extent) {                                                                              \
        add_norm<T, float>(residual, x, weight, eps, width, out, extent);                                             \
    }
ADD_NORM(f32, float)
ADD_NORM(bf16_res32, bf16)

#define HEAD_NORMS(NAME, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        square_sums_##NAME(const T* qkv, u32 q_width, u32 k_width, u32 stride, float* out, Extent extent) {           \
        square_sums<T>(qkv, q_width, k_width, stride, out, extent);                                                   \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        scale_heads_##NAME(T* qkv, const float* sums, const float* q_weight, const float* k_weight, u32 q_width,      \
                           u32 k_width, u32 stride, u32 q_elements, u32 k_elements, float eps, Extent extent) {       \
        scale_heads<T>(qkv, sums, q_weight, k_weight, q_width, k_width, stride, q_elements, k_elements, eps, extent); \
    }
HEAD_NORMS(bf16, bf16)
HEAD_NORMS(f32, float)
