// route: from a row's logits to its experts, in ascending order, and their weights.
//
//   score = softmax(logits) or sigmoid(logits); key = score + bias
//   groups: only the `groups_kept` best groups of experts stay, by the sum of their two largest keys
//   chosen = the top_k largest keys; of equals the first. weight = score (/ sum of the chosen's) * scale
//
// A NaN among the logits makes all weights of the row NaN; the experts are `top_k` different ones all the same.
// Rows that the lane was granted but does not run get NO_EXPERT and weight 0.
//
// Launch contract. Logits, bias and out are f32; out is [rows, 2 top_k]: numbers, then weights. A warp takes a row.
//   route_4   experts <= 128        route_8   experts <= 256        route_16   experts <= 512
//   top_k <= experts, top_k <= 32; groups divides experts; groups_kept * (experts / groups) >= top_k.
//   block.x = 128; grid.x = ceil(rows at capacity / 4) (any number is right: warps loop); no dynamic shared memory.
//   `granted`: this lane's entry of group_rows.
//   count_experts: block.x = 512, grid.x = 1. Only in recordings that count; launched without overlap.
#include "route.cuh"

constexpr u32 ROUTE_WARPS = 4;
constexpr u32 EXPERTS_MAX = 512;

template <u32 EACH>
__device__ __forceinline__ void route(const float* logits, const float* bias, const Router& r, float* out,
                                      const u32* granted, Extent extent) {
    __shared__ u32 shared[ROUTE_WARPS][32 * EACH];
    let_next_start();
    u32 end = min(*granted, extent.capacity()), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 row = blockIdx.x * ROUTE_WARPS + warp;
    bool is_real = row < extent.capacity() && extent.has(row);
    wait_for_inputs();
    while (row < extent.capacity()) {
        float* to = out + (u64)row * 2 * r.top_k;
        if (is_real) {
            float x[EACH];
            read_logits<EACH>(logits + (u64)row * r.experts, r, x);
            route_row<EACH>(x, bias, r, to, shared[warp]);
        } else if (row < end) {
            for (u32 i = lane; i < 2 * r.top_k; i += 32) to[i] = i < r.top_k ? NO_EXPERT : 0.0f;
        }
        row += gridDim.x * ROUTE_WARPS;
        is_real = row < extent.capacity() && extent.has(row);
    }
}

/// Adds to `total` how many different experts the real rows' routes name. One block; `experts` <= 512.
extern "C" __global__ void __launch_bounds__(512)
    count_experts(const float* routes, u32 experts, u32 top_k, Extent extent, u64* total) {
    __shared__ u32 seen[EXPERTS_MAX / 32];
    __shared__ u32 count;
    for (u32 i = threadIdx.x; i < EXPERTS_MAX / 32; i += blockDim.x) seen[i] = 0;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < extent.capacity() * top_k; i += blockDim.x) {
        u32 row = i / top_k;
        if (!extent.has(row)) continue;
        float number = routes[(u64)row * 2 * top_k + i % top_k];
        if (number >= 0.0f && number < (float)experts) atomicOr(&seen[(u32)number / 32], 1u << ((u32)number % 32));
    }
    __syncthreads();
    if (threadIdx.x < EXPERTS_MAX / 32) atomicAdd(&count, (u32)__popc(seen[threadIdx.x]));
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd((unsigned long long*)total, (unsigned long long)count);
}

#define ROUTE(EACH)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * ROUTE_WARPS)                                                   \
        route_##EACH(const float* logits, const float* bias, Router router, float* out, const u32* granted,          \
                     Extent extent) {                                                                                \
        route<EACH>(logits, bias, router, out, granted, extent);                                                     \
    }
ROUTE(4)
ROUTE(8)
ROUTE(16)
