// Op::Experts, plainly: a warp for each dot product, every type, any size. The reference on the device, and
// what float models run. Two launches, no list of choices.
//
//   experts_simple_gate_{bf16,f32}   gated[slot, w] = silu(gate_e[w] . x[row]) * (up_e[w] . x[row])
//       grid (rows * top_k, ceil(width / 8)), block 256, no dynamic shared memory
//       x [rows, hidden] T, routes [rows, 2 top_k] f32, gate_up [held, 2 width, hidden] T, gated [rows * top_k, width] T
//   experts_simple_down_{bf16,f32,bf16_out32}   out type T, T, float
//       grid (rows, ceil(hidden / 8)), block 256, no dynamic shared memory
//       gated as above, down [held, hidden, width] T
//       sums = 1: out [rows, hidden], choices added in the order of the route, from 0, in f32, every real row
//       sums = 0: out [rows, top_k * hidden], y at the place of its choice, other places not written
//
// `rows` in a grid is the capacity lanes * lane_rows. Scratch: gated, rows * top_k * width of T.
#include "experts_choices.cuh"

constexpr int SIMPLE_WARPS = 8;

/// Sum over the warp of a[k] * b[k].
template <typename T>
__device__ __forceinline__ float warp_dot(const T* a, const T* b, int count) {
    float sum = 0.0f;
    for (int k = threadIdx.x % 32; k < count; k += 32) sum = fmaf(to_float(a[k]), to_float(b[k]), sum);
    return warp_sum(sum);
}

template <typename T>
__device__ __forceinline__ void simple_gate(const T* x, const float* routes, const T* gate_up, T* gated, const Choosers& who,
                                            int hidden, int width) {
    int slot = blockIdx.x, row = slot / who.top_k, place = slot % who.top_k;
    int column = blockIdx.y * SIMPLE_WARPS + threadIdx.x / 32;
    if (column >= width || !is_real(who, row)) return;
    int expert = held_expert(who, routes[(u64)row * 2 * who.top_k + place]);
    if (expert < 0) return;
    const T* gate = gate_up + ((u64)expert * 2 * width + column) * hidden;
    const T* input = x + (u64)row * hidden;
    float g = warp_dot(gate, input, hidden);
    float u = warp_dot(gate + (u64)width * hidden, input, hidden);
    if (threadIdx.x % 32 == 0) gated[(u64)slot * width + column] = From<T>::of(silu(g) * u);
}

template <typename T, typename Out>
__device__ __forceinline__ void simple_down(const T* gated, const float* routes, const T* down, Out* out, const Choosers& who,
                                            int hidden, int width, int sums) {
    int row = blockIdx.x, column = blockIdx.y * SIMPLE_WARPS + threadIdx.x / 32;
    if (column >= hidden || !is_real(who, row)) return;
    const float* route = routes + (u64)row * 2 * who.top_k;
    float sum = 0.0f;
    for (int place = 0; place < who.top_k; place++) {
        int expert = held_expert(who, route[place]);
        if (expert < 0) continue;
        u64 slot = (u64)row * who.top_k + place;
        float y = warp_dot(down + ((u64)expert * hidden + column) * width, gated + slot * width, width);
        if (sums) {
            sum = fmaf(route[who.top_k + place], y, sum);
        } else if (threadIdx.x % 32 == 0) {
            out[slot * hidden + column] = From<Out>::of(y);
        }
    }
    if (sums && threadIdx.x % 32 == 0) out[(u64)row * hidden + column] = From<Out>::of(sum);
}

#define SIMPLE_GATE(NAME, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) NAME(const T* x, const float* routes, const T* gate_up, T* gated,   \
                                                           const u32* real_rows, int lanes, int lane_rows, int top_k,     \
                                                           int first, int held, int hidden, int width) {                  \
        simple_gate<T>(x, routes, gate_up, gated, {real_rows, lanes, lane_rows, top_k, first, held}, hidden, width);      \
    }
SIMPLE_GATE(experts_simple_gate_bf16, bf16)
SIMPLE_GATE(experts_simple_gate_f32, float)

#define SIMPLE_DOWN(NAME, T, OUT)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) NAME(const T* gated, const float* routes, const T* down, OUT* out,     \
                                                           const u32* real_rows, int lanes, int lane_rows, int top_k,        \
                                                           int first, int held, int hidden, int width, int sums) {           \
        simple_down<T, OUT>(gated, routes, down, out, {real_rows, lanes, lane_rows, top_k, first, held}, hidden, width,      \
                            sums);                                                                                           \
    }
SIMPLE_DOWN(experts_simple_down_bf16, bf16, bf16)
SIMPLE_DOWN(experts_simple_down_bf16_out32, bf16, float)
SIMPLE_DOWN(experts_simple_down_f32, float, float)
