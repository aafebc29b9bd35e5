// Paged attention, one (row, query head) a block: the plain kernel. It is what f32 models use, and what the
// fast kernels are compared with on the device. Any head size, any ratio of heads, any page size.
//
// attend_simple_bf16, attend_simple_f32; with a cache of e4m3 attend_simple_bf16_e4m3, attend_simple_f32_e4m3
//   grid (rows of the bucket, q_heads), block 128, no dynamic shared memory; head_dim <= 512.
//   header, positions, row_slots, tables: of the step, in device memory; rows beyond header[ROWS] do nothing.
//   qkv   T [rows, q_stride], q heads first          keys, values  C [pages, kv_heads, page_size, head_dim]
//   out   T [rows, q_heads * head_dim]               sinks  f32 [q_heads] or null
//   A row at position p sees positions 0 ..= p, or with window > 0 the last `window` of them. A sink is a score of
//   its own (not scaled) that takes part in the softmax and has no value.
//
// Order of the sums: blocks of 128 absolute positions, first to last, so a row's bits depend on its own
// position only. Positions that a row may not see are not read.

#include "e4m3.cuh"

namespace {

constexpr int BLOCK = 128;
constexpr int HEAD_DIM_MAX = 512;
constexpr int PARTS = HEAD_DIM_MAX / BLOCK;

template <typename T, typename C>
struct Params {
    const u32* header;
    const u32* positions;
    const u32* row_slots;
    const u32* tables;
    u32 table_stride;
    const T* qkv;
    u32 q_stride;
    const C* keys;
    const C* values;
    T* out;
    const float* sinks;
    u32 q_heads, kv_heads, head_dim, page_size, window;
    float scale;
};

/// The largest (or the sum) of one float of each of the block's threads; `scratch` holds one a warp.
template <bool SUM>
__device__ float across(float x, float* scratch) {
    x = SUM ? warp_sum(x) : warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float y = scratch[0];
    for (int w = 1; w < BLOCK / 32; ++w) y = SUM ? y + scratch[w] : fmaxf(y, scratch[w]);
    return y;
}

template <typename T, typename C>
__device__ void attend(const Params<T, C>& p) {
    __shared__ float query[HEAD_DIM_MAX];
    __shared__ float weights[BLOCK];
    __shared__ u64 places[BLOCK];
    __shared__ float scratch[BLOCK / 32];
    const u32 row = blockIdx.x, head = blockIdx.y, t = threadIdx.x;
    if (row >= p.header[ROWS]) return;
    const u32 kv_head = head / (p.q_heads / p.kv_heads);
    const u32 position = p.positions[row];
    const u32* table = p.tables + (u64)p.row_slots[row] * p.table_stride;
    const T* q = p.qkv + (u64)row * p.q_stride + (u64)head * p.head_dim;
    for (u32 d = t; d < p.head_dim; d += BLOCK) query[d] = to_float(q[d]);
    const u32 first = p.window && position >= p.window ? position - p.window + 1 : 0;

    float max = -__int_as_float(0x7f800000), sum = 0.0f, acc[PARTS] = {};
    if (p.sinks) max = p.sinks[head], sum = 1.0f;
    for (u32 block = first / BLOCK * BLOCK; block <= position; block += BLOCK) {
        const u32 key = block + t;
        const bool seen = key >= first && key <= position;
        float score = -__int_as_float(0x7f800000);
        __syncthreads();
        if (seen) {
            const u64 page = table[key / p.page_size];
            const u64 place = ((page * p.kv_heads + kv_head) * p.page_size + key % p.page_size) * p.head_dim;
            places[t] = place;
            const C* k = p.keys + place;
            float dot = 0.0f;
            for (u32 d = 0; d < p.head_dim; ++d) dot = fmaf(query[d], to_float(k[d]), dot);
            score = dot * p.scale;
        }
        // A block that is visited holds a position that the row sees, so the new maximum is finite.
        const float new_max = fmaxf(max, across<false>(score, scratch));
        const float keep = expf(max - new_max);
        const float weight = expf(score - new_max);
        weights[t] = weight;
        sum = sum * keep + across<true>(weight, scratch);
        max = new_max;
        const u32 from = first > block ? first - block : 0;
        const u32 to = min(position - block + 1, (u32)BLOCK);
        for (int i = 0; i < PARTS; ++i) {
            const u32 d = t + i * BLOCK;
            if (d >= p.head_dim) break;
            float a = acc[i] * keep;
            for (u32 j = from; j < to; ++j) a = fmaf(weights[j], to_float(p.values[places[j] + d]), a);
            acc[i] = a;
        }
    }
    T* out = p.out + ((u64)row * p.q_heads + head) * p.head_dim;
    for (int i = 0; i < PARTS; ++i) {
        const u32 d = t + i * BLOCK;
        if (d < p.head_dim) out[d] = From<T>::of(acc[i] / sum);
    }
}

}  // namespace

#define ATTEND_SIMPLE(NAME, T, C)                                                                                  \
    extern "C" __global__ void __launch_bounds__(128) NAME(                                                        \
        const u32* header, const u32* positions, const u32* row_slots, const u32* tables, u32 table_stride,        \
        const T* qkv, u32 q_stride, const C* keys, const C* values, T* out, const float* sinks, u32 q_heads,       \
        u32 kv_heads, u32 head_dim, u32 page_size, u32 window, float scale) {                                      \
        attend<T, C>({header, positions, row_slots, tables, table_stride, qkv, q_stride, keys, values, out, sinks, \
                      q_heads, kv_heads, head_dim, page_size, window, scale});                                     \
    }

ATTEND_SIMPLE(attend_simple_bf16, bf16, bf16)
ATTEND_SIMPLE(attend_simple_f32, float, float)
ATTEND_SIMPLE(attend_simple_bf16_e4m3, bf16, e4m3)
ATTEND_SIMPLE(attend_simple_f32_e4m3, float, e4m3)
