// The list of choices by expert, and the sum over a row's choices, both on the device in a fixed grid.
//
// Choices are sorted by expert, inside an expert by row: the order depends on the routes only. The list is cut into
// tiles, each of one expert and at most `tile_rows` choices; an expert's choices are shared out evenly over its tiles.
//
//   experts_count   grid blocks, block 256, dynamic shared memory 32 * held bytes; launched only if blocks > 1
//   experts_place   grid blocks, block 256, dynamic shared memory 36 * held bytes; needs experts_count's histogram
//       blocks = ceil(rows / 256) where rows is the capacity lanes * lane_rows; held <= 1024
//       routes     [rows, 2 top_k] f32
//       histogram  scratch, blocks * held u32 (may be null if blocks = 1)
//       counts     out, 2 u32: choices, tiles
//       tiles      out, (min(held, C) + C / tile_rows) * 16 bytes, where C = rows * top_k: {expert, first, count, 0}
//       slots      out, C u32: the slot (row * top_k + place) of each choice, in sorted order
//       tile_rows, granule: a tile's capacity, and what the shares of an expert's tiles are rounded up to; granule
//                  divides tile_rows
//
//   experts_combine_{f32_bf16,f32_f32,bf16_bf16,bf16_f32}   types of y, out
//       grid (rows, ceil(hidden / 1024)), block 128, no dynamic shared memory; hidden a multiple of 8
//       y [rows * top_k, hidden] by slot; out [rows, hidden] = sum of weight * y in the order of the route, from 0, in
//       f32, for every real row; y of choices that are not held here is not read
//   experts_combine_norm_{f32,bf16}   type of y
//       grid rows, block ceil(hidden / 8) rounded up to 32, at most 1024; hidden a multiple of 8
//       residual [rows, hidden] f32 += that sum, unrounded; out [rows, hidden] bf16 = its norm
#include "dependent.cuh"
#include "experts_choices.cuh"
#include "rows.cuh"

constexpr int PLAN_ROWS = 256;
constexpr int PLAN_WORDS = PLAN_ROWS / 32;

extern __shared__ __align__(16) u32 plan_shared[];

/// Eight places of this thread's row: experts held here, or -1.
__device__ __forceinline__ void read_choices(const float* route, const Choosers& who, bool real, int from, int (&experts)[8]) {
    float numbers[8];
#pragma unroll
    for (int i = 0; i < 8; i++) numbers[i] = real && from + i < who.top_k ? route[from + i] : -1.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) experts[i] = real && from + i < who.top_k ? held_expert(who, numbers[i]) : -1;
}

/// Sets bit `row` of an expert's words for every choice of this block's rows, a thread a row: no order of threads shows.
__device__ __forceinline__ void mark_choices(const float* routes, const Choosers& who, u32* bits) {
    for (int i = threadIdx.x; i < who.held * PLAN_WORDS / 4; i += blockDim.x) ((uint4*)bits)[i] = make_uint4(0, 0, 0, 0);
    int row = blockIdx.x * PLAN_ROWS + threadIdx.x;
    bool real = is_real(who, row);
    __syncthreads();
    for (int from = 0; from < who.top_k; from += 8) {
        int experts[8];
        read_choices(routes + (u64)row * 2 * who.top_k, who, real, from, experts);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (experts[i] >= 0) atomicOr(&bits[experts[i] * PLAN_WORDS + threadIdx.x / 32], 1u << (threadIdx.x % 32));
    }
    __syncthreads();
}

__device__ __forceinline__ u32 marked(const u32* words) {
    u32 count = 0;
#pragma unroll
    for (int i = 0; i < PLAN_WORDS; i++) count += __popc(words[i]);
    return count;
}

extern "C" __global__ void __launch_bounds__(256) experts_count(const float* routes, u32* histogram, const u32* real_rows,
                                                                int lanes, int lane_rows, int top_k, int first, int held) {
    Choosers who{real_rows, lanes, lane_rows, top_k, first, held};
    wait_for_kernels_before();
    let_next_kernel_start();
    mark_choices(routes, who, plan_shared);
    for (int e = threadIdx.x; e < held; e += blockDim.x)
        histogram[(u64)blockIdx.x * held + e] = marked(plan_shared + e * PLAN_WORDS);
}

/// Exclusive sum over the block's 256 threads; `total` is the sum of all.
__device__ __forceinline__ u64 block_scan(u64 value, u64& total) {
    __shared__ u64 sums[8];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 scan = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u64 other = __shfl_up_sync(0xffffffffu, scan, step);
        if (lane >= step) scan += other;
    }
    if (lane == 31) sums[warp] = scan;
    __syncthreads();
    u64 before = 0;
    total = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    return before + scan - value;
}

extern "C" __global__ void __launch_bounds__(256)
    experts_place(const float* routes, const u32* histogram, u32* counts, uint4* tiles, u32* slots, const u32* real_rows,
                  int lanes, int lane_rows, int top_k, int first, int held, int tile_rows, int granule) {
    Choosers who{real_rows, lanes, lane_rows, top_k, first, held};
    wait_for_kernels_before();
    let_next_kernel_start();
    u32 *bits = plan_shared, *base = plan_shared + held * PLAN_WORDS;
    mark_choices(routes, who, bits);

    // A thread has up to four consecutive experts: 1024 in all.
    int per = (held + 255) / 256, mine = threadIdx.x * per;
    u32 total[4] = {}, before[4] = {};
    u64 sum = 0; // choices in the low half, tiles in the high half
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int e = mine + i;
        if (i >= per || e >= held) continue;
        if (gridDim.x == 1) {
            total[i] = marked(bits + e * PLAN_WORDS);
        } else {
#pragma unroll 8
            for (int b = 0; b < gridDim.x; b++) {
                u32 count = histogram[(u64)b * held + e];
                total[i] += count;
                if (b < blockIdx.x) before[i] += count;
            }
        }
        sum += total[i] + ((u64)((total[i] + tile_rows - 1) / tile_rows) << 32);
    }
    u64 all, at = block_scan(sum, all);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int e = mine + i;
        if (i >= per || e >= held) continue;
        base[e] = (u32)at + before[i];
        u32 cuts = (total[i] + tile_rows - 1) / tile_rows;
        if (blockIdx.x == 0 && cuts) {
            u32 share = (total[i] + cuts - 1) / cuts;
            share = (share + granule - 1) / granule * granule;
            for (u32 c = 0; c < cuts; c++)
                tiles[(at >> 32) + c] = make_uint4(e, (u32)at + c * share, min(share, total[i] - c * share), 0);
        }
        at += total[i] + ((u64)cuts << 32);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        counts[0] = (u32)all;
        counts[1] = (u32)(all >> 32);
    }
    __syncthreads();

    int row = blockIdx.x * PLAN_ROWS + threadIdx.x, word = threadIdx.x / 32;
    bool real = is_real(who, row);
    for (int from = 0; from < top_k; from += 8) {
        int experts[8];
        read_choices(routes + (u64)row * 2 * top_k, who, real, from, experts);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (experts[i] < 0) continue;
            const u32* words = bits + experts[i] * PLAN_WORDS;
            u32 rank = __popc(words[word] & ((1u << (threadIdx.x % 32)) - 1));
            for (int w = 0; w < word; w++) rank += __popc(words[w]);
            slots[base[experts[i]] + rank] = row * top_k + from + i;
        }
    }
}

/// Eight values as they lie.
template <typename T> struct Eight;
template <> struct alignas(16) Eight<float> {
    float4 low, high;
};
template <> struct alignas(16) Eight<bf16> {
    uint4 pairs;
};

__device__ __forceinline__ void spread(const Eight<float>& from, float (&to)[8]) {
    to[0] = from.low.x, to[1] = from.low.y, to[2] = from.low.z, to[3] = from.low.w;
    to[4] = from.high.x, to[5] = from.high.y, to[6] = from.high.z, to[7] = from.high.w;
}

__device__ __forceinline__ void spread(const Eight<bf16>& from, float (&to)[8]) {
    const uint4& a = from.pairs;
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

/// Eight columns of a row's sum.
template <typename Y> __device__ __forceinline__ void weighted_sum(const Y* y, const float* routes, const Choosers& who, int row, int column, int hidden, float (&sum)[8]) {
    const float* route = routes + (u64)row * 2 * who.top_k;
    // Eight places at a time, so that their loads are on the way together.
    for (int place = 0; place < who.top_k; place += 8) {
        float weight[8];
        bool held[8];
        Eight<Y> value[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            held[i] = place + i < who.top_k && held_expert(who, route[min(place + i, who.top_k - 1)]) >= 0;
            weight[i] = held[i] ? route[who.top_k + place + i] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (held[i]) value[i] = *(const Eight<Y>*)(y + ((u64)row * who.top_k + place + i) * hidden + column);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (!held[i]) continue;
            float v[8];
            spread(value[i], v);
#pragma unroll
            for (int c = 0; c < 8; c++) sum[c] = fmaf(weight[i], v[c], sum[c]);
        }
    }
}

template <typename Y, typename Out>
__device__ __forceinline__ void combine(const Y* y, const float* routes, Out* out, const Choosers& who, int hidden) {
    int row = blockIdx.x, column = (blockIdx.y * 128 + threadIdx.x) * 8;
    wait_for_kernels_before();
    let_next_kernel_start();
    if (column >= hidden || !is_real(who, row)) return;
    float sum[8] = {};
    weighted_sum(y, routes, who, row, column, hidden, sum);
    store8(out + (u64)row * hidden + column, sum);
}

/// The sum goes to the residual, and the norm of that out: neither is written and read in between.
template <typename Y>
__device__ __forceinline__ void combine_norm(const Y* y, const float* routes, float* residual, const float* norm_weight, float eps, bf16* out,
                                             const Choosers& who, int hidden) {
    __shared__ BlockSums sums;
    int row = blockIdx.x, column = threadIdx.x * 8;
    bool has_columns = column < hidden;
    Chunk scale = {}, held = {};
    if (has_columns) scale = read_chunk(norm_weight + column);
    wait_for_kernels_before();
    let_next_kernel_start();
    if (!is_real(who, row)) return;
    if (has_columns) {
        held = read_chunk(residual + (u64)row * hidden + column);
        float sum[8] = {};
        weighted_sum(y, routes, who, row, column, hidden, sum);
#pragma unroll
        for (int i = 0; i < 8; i++) held.v[i] += sum[i];
        write_chunk(residual + (u64)row * hidden + column, held);
    }
    float root = inverse_root(block_sum(square_sum(held), sums, 0), hidden, eps);
    if (!has_columns) return;
#pragma unroll
    for (int i = 0; i < 8; i++) held.v[i] *= root * scale.v[i];
    write_chunk(out + (u64)row * hidden + column, held);
}

#define COMBINE(NAME, Y, OUT)                                                                                             \
    extern "C" __global__ void __launch_bounds__(128) NAME(const Y* y, const float* routes, OUT* out,                     \
                                                           const u32* real_rows, int lanes, int lane_rows, int top_k,     \
                                                           int first, int held, int hidden) {                             \
        combine<Y, OUT>(y, routes, out, {real_rows, lanes, lane_rows, top_k, first, held}, hidden);                       \
    }
COMBINE(experts_combine_f32_bf16, float, bf16)
COMBINE(experts_combine_f32_f32, float, float)
COMBINE(experts_combine_bf16_bf16, bf16, bf16)
COMBINE(experts_combine_bf16_f32, bf16, float)

#define COMBINE_NORM(NAME, Y)                                                                                             \
    extern "C" __global__ void __launch_bounds__(1024) NAME(                                                              \
        const Y* y, const float* routes, float* residual, const float* norm_weight, float eps, bf16* out,                 \
        const u32* real_rows, int lanes, int lane_rows, int top_k, int first, int held, int hidden) {                     \
        combine_norm<Y>(y, routes, residual, norm_weight, eps, out, {real_rows, lanes, lane_rows, top_k, first, held},    \
                        hidden);                                                                                          \
    }
COMBINE_NORM(experts_combine_norm_f32, float)
COMBINE_NORM(experts_combine_norm_bf16, bf16)
