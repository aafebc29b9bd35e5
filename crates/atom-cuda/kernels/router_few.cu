// What stands between a layer's attention and its experts, where rows are few: (the addition to the residual,) the norm, the
// router's product and its choice, in one launch.
//
//   residual += added, if there is any; normed = norm(residual); routes = route(normed W^T)
//
// The rule of the choice is that of route.cu. The router sees the norm before it is rounded to bf16.
//
// Definition: PIECES, groups of 2048 columns: ceil(hidden / 2048).
//   router_few   clusters of 8 blocks of 512, each takes a row at a time: any number of them is right; no dynamic shared memory
//       experts <= 128, top_k <= min(experts, 32), hidden a multiple of 4
//       residual, norm_weight, bias, routes f32; added (null: none), normed, weight [experts, hidden] bf16
//       `granted`: this lane's entry of group_rows. `extent` has one lane.
//
// How. A thread has 4 columns of each group: of x, of the norm's weights and of 16 experts' rows, which it reads before it
// waits for the kernel in front. So nothing is left to read then but the row itself, and each block's 16 sums over its threads
// meet in the first block, whose first warp chooses.
#include "hopper.cuh"
#include "route.cuh"

// Clusters are of compute capability 9.0 and later.
#if __CUDA_ARCH__ >= 900

constexpr u32 THREADS = 512, WARPS = THREADS / 32, BLOCKS = 8, EACH = 16;
constexpr u32 EXPERTS_MAX = BLOCKS * EACH;

/// Sums of a row over each warp; two rows take turns.
struct Parts {
    float logits[2][WARPS][EXPERTS_MAX]; // of the first block only
    float squares[2][WARPS];
};

__device__ __forceinline__ void store_there(u32 at, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}

/// Of 2 HALF values a lane keeps those of its half, with what the lane opposite has of them.
template <u32 HALF> __device__ __forceinline__ void fold(float (&x)[EACH]) {
    bool is_high = threadIdx.x & 2 * HALF;
#pragma unroll
    for (u32 i = 0; i < HALF; i++) {
        float mine = is_high ? x[i + HALF] : x[i], other = is_high ? x[i] : x[i + HALF];
        x[i] = mine + __shfl_xor_sync(ALL, other, 2 * HALF);
    }
}

/// Sums of 16 values over a warp: lanes 2 e and 2 e + 1 end with that of value e.
__device__ __forceinline__ float warp_sums(float (&x)[EACH]) {
    fold<8>(x), fold<4>(x), fold<2>(x), fold<1>(x);
    return x[0] + __shfl_xor_sync(ALL, x[0], 1);
}

struct Columns {
    float v[4 * PIECES];
};

template <typename T> __device__ __forceinline__ Columns read_columns(const T* row, u32 hidden) {
    Columns x = {};
#pragma unroll
    for (u32 p = 0; p < PIECES; p++) {
        u32 column = (p * THREADS + threadIdx.x) * 4;
        if (column >= hidden) continue;
        if constexpr (sizeof(T) == 4) {
            float4 four = *reinterpret_cast<const float4*>(row + column);
            x.v[4 * p] = four.x, x.v[4 * p + 1] = four.y, x.v[4 * p + 2] = four.z, x.v[4 * p + 3] = four.w;
        } else {
            uint2 four = *reinterpret_cast<const uint2*>(row + column);
            x.v[4 * p] = low_float(four.x), x.v[4 * p + 1] = high_float(four.x);
            x.v[4 * p + 2] = low_float(four.y), x.v[4 * p + 3] = high_float(four.y);
        }
    }
    return x;
}

/// Of one row, by all threads of a block.
struct Choice {
    u32 keys[EXPERTS_MAX];
    u32 chosen[WARPS]; // experts of each warp: bit 4 e is set for the e-th of eight
    float weights[32];
    float largest;
    u32 has_nan;
};

/// The choice where only the chosen's softmax matters: an expert's place in the order of all is how many come before it, which
/// four threads count. (Taking the largest eight times by one warp took 1.7 us.)
__device__ __forceinline__ void choose_plain(const float (&parts)[WARPS][EXPERTS_MAX], float root, const Router& r, float* out, Choice& c) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) c.has_nan = 0;
    __syncthreads(); // also: the row before was read
    u32 expert = threadIdx.x / 4, quarter = threadIdx.x % 4;
    float logit = 0.0f;
#pragma unroll
    for (u32 i = 0; i < WARPS / 4; i++) logit += parts[quarter * (WARPS / 4) + i][expert];
    logit += __shfl_xor_sync(ALL, logit, 1);
    logit = (logit + __shfl_xor_sync(ALL, logit, 2)) * root;
    u32 key = expert < r.experts ? ordered(logit) : TAKEN;
    if (quarter == 0) {
        c.keys[expert] = key;
        if (expert < r.experts && logit != logit) c.has_nan = 1;
    }
    __syncthreads();
    // Of equals the first comes first.
    u32 before = 0;
#pragma unroll
    for (u32 i = 0; i < EXPERTS_MAX / 16; i++) {
        u32 other = i * 16 + quarter * 4;
        uint4 four = *reinterpret_cast<const uint4*>(&c.keys[other]);
        before += four.x > key || (four.x == key && other < expert);
        before += four.y > key || (four.y == key && other + 1 < expert);
        before += four.z > key || (four.z == key && other + 2 < expert);
        before += four.w > key || (four.w == key && other + 3 < expert);
    }
    before += __shfl_xor_sync(ALL, before, 1);
    before += __shfl_xor_sync(ALL, before, 2);
    bool is_chosen = before < r.top_k;
    u32 mine = __ballot_sync(ALL, is_chosen && quarter == 0);
    if (lane == 0) c.chosen[warp] = mine;
    if (before == 0 && quarter == 0) c.largest = unordered(key);
    __syncthreads();
    u32 place = __popc(mine & ((1u << lane) - 1));
    for (u32 w = 0; w < warp; w++) place += __popc(c.chosen[w]);
    bool writes = is_chosen && quarter == 0;
    float score = expf(logit - c.largest);
    if (writes) c.weights[place] = score;
    __syncthreads();
    if (!writes) return;
    float sum = 0.0f;
    for (u32 i = 0; i < r.top_k; i++) sum += c.weights[i];
    out[place] = (float)expert;
    out[r.top_k + place] = c.has_nan ? __int_as_float(0x7fffffff) : score / sum * r.scale;
}

/// This thread's columns of its block's experts.
__device__ __forceinline__ void read_weights(const bf16* weight, u32 experts, u32 hidden, uint2 (&w)[EACH][PIECES]) {
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
        u32 expert = cluster_rank() * EACH + e;
#pragma unroll
        for (u32 p = 0; p < PIECES; p++) {
            u32 column = (p * THREADS + threadIdx.x) * 4;
            bool is_there = expert < experts && column < hidden;
            w[e][p] = is_there ? *reinterpret_cast<const uint2*>(weight + (u64)expert * hidden + column) : make_uint2(0, 0);
        }
    }
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __maxnreg__(PIECES == 1 ? 80 : 128)
    router_few(float* residual, const bf16* added, const float* norm_weight, float eps, u32 hidden, bf16* normed, const bf16* weight,
               const float* bias, Router router, float* routes, const u32* granted, Extent extent) {
    __shared__ Parts parts;
    __shared__ Choice choice;
    bool is_plain = !router.is_sigmoid && router.normalise && !bias && router.groups == 1;
    let_next_start();
    u32 rank = cluster_rank(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint2 w[EACH][PIECES];
    read_weights(weight, router.experts, hidden, w);
    Columns scale = read_columns(norm_weight, hidden);
    cluster_meet(); // nobody writes to a block that isn't there yet
    u32 end = min(*granted, extent.capacity()), first = cluster_address(smem(&parts.logits[0][warp][rank * EACH + lane / 2]), 0);
    wait_for_inputs();
    u32 turn = 0;
    for (u32 row = blockIdx.x / BLOCKS; row < end; row += gridDim.x / BLOCKS) {
        float* to = routes + (u64)row * 2 * router.top_k;
        if (!extent.has(row)) {
            if (rank == 0 && threadIdx.x < 2 * router.top_k) to[threadIdx.x] = threadIdx.x < router.top_k ? NO_EXPERT : 0.0f;
            continue;
        }
        Columns x = read_columns(residual + (u64)row * hidden, hidden);
        if (added) {
            Columns more = read_columns(added + (u64)row * hidden, hidden);
#pragma unroll
            for (u32 i = 0; i < 4 * PIECES; i++) x.v[i] += more.v[i];
        }
        float sums[EACH], squares = 0.0f;
        Columns v;
#pragma unroll
        for (u32 i = 0; i < 4 * PIECES; i++) squares = fmaf(x.v[i], x.v[i], squares), v.v[i] = x.v[i] * scale.v[i];
#pragma unroll
        for (u32 e = 0; e < EACH; e++) {
            sums[e] = 0.0f;
#pragma unroll
            for (u32 p = 0; p < PIECES; p++) {
                sums[e] = fmaf(v.v[4 * p], low_float(w[e][p].x), sums[e]), sums[e] = fmaf(v.v[4 * p + 1], high_float(w[e][p].x), sums[e]);
                sums[e] = fmaf(v.v[4 * p + 2], low_float(w[e][p].y), sums[e]), sums[e] = fmaf(v.v[4 * p + 3], high_float(w[e][p].y), sums[e]);
            }
        }
        float sum = warp_sums(sums);
        if (lane % 2 == 0) store_there(first + turn * sizeof(parts.logits[0]), sum);
        squares = warp_sum(squares);
        if (lane == 0) parts.squares[turn][warp] = squares;
        cluster_meet();
        squares = 0.0f;
#pragma unroll
        for (u32 i = 0; i < WARPS; i++) squares += parts.squares[turn][i];
        float root = inverse_root(squares, hidden, eps);
        if (rank == 0 && is_plain) {
            choose_plain(parts.logits[turn], root, router, to, choice);
        } else if (rank == 0 && warp == 0) {
            float logits[4] = {};
#pragma unroll
            for (u32 i = 0; i < WARPS; i++) {
                float4 four = *reinterpret_cast<const float4*>(&parts.logits[turn][i][lane * 4]);
                logits[0] += four.x, logits[1] += four.y, logits[2] += four.z, logits[3] += four.w;
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) logits[i] = lane * 4 + i < router.experts ? logits[i] * root : -__int_as_float(0x7f800000);
            route_row<4>(logits, bias, router, to, choice.keys);
        }
        // Each block has two warps' columns of what all of them know; all have read the residual.
        if (warp / 2 == rank) {
#pragma unroll
            for (u32 p = 0; p < PIECES; p++) {
                u32 column = (p * THREADS + threadIdx.x) * 4;
                if (column >= hidden) continue;
                float y[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) y[i] = x.v[4 * p + i] * root * scale.v[4 * p + i];
                *reinterpret_cast<uint2*>(normed + (u64)row * hidden + column) = make_uint2(pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]));
                if (added)
                    *reinterpret_cast<float4*>(residual + (u64)row * hidden + column) =
                        make_float4(x.v[4 * p], x.v[4 * p + 1], x.v[4 * p + 2], x.v[4 * p + 3]);
            }
        }
        turn ^= 1;
        // Registers have no room for them during the choice.
        if (row + gridDim.x / BLOCKS < end) read_weights(weight, router.experts, hidden, w);
    }
}

#endif
