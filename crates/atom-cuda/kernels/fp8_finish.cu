// fp8_finish: sums of products of e4m3 codes, as they come from cuBLASLt without scales, become what a product gives:
// out = sum * x scale * weight scale (+ bias), with the activation or the addition behind it.
//
// Definition: OUT as in linear_small_fp8.cu: 0 bf16, 1 f32, 2 adds to the f32 residual, 3 silu(gate) * up of gate columns, then
// up columns.
//
// Launch contract. outputs is a multiple of 16. grid.x = rows of the extent at capacity; grid.y and block.x any: threads of
// both go over the chunks of 8 outputs of a row.
#include "rows.cuh"

struct Finish {
    const float* sums;          // [rows, outputs]
    const float* weight_scales; // [outputs]
    const float* x_scales;      // [rows]
    const float* bias;          // [outputs], or null
    u32 outputs;
};

#if OUT == 0 || OUT == 3
typedef bf16 Y;
#else
typedef float Y;
#endif

__device__ __forceinline__ Chunk scaled(const Finish& f, u32 row, u32 column, float of_x) {
    Chunk sum = read_chunk(f.sums + (u64)row * f.outputs + column), of_w = read_chunk(f.weight_scales + column);
    Chunk bias = {};
    if (f.bias) bias = read_chunk(f.bias + column);
#pragma unroll
    for (u32 i = 0; i < CHUNK; i++) sum.v[i] = sum.v[i] * (of_w.v[i] * of_x) + bias.v[i];
    return sum;
}

extern "C" __global__ void __launch_bounds__(256) fp8_finish(Finish f, Y* out, Extent extent) {
    let_next_start();
    wait_for_inputs();
    u32 row = blockIdx.x, columns = OUT == 3 ? f.outputs / 2 : f.outputs;
    if (!extent.has(row)) return;
    float of_x = f.x_scales[row];
    for (u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK; column < columns;
         column += gridDim.y * blockDim.x * CHUNK) {
        Chunk y = scaled(f, row, column, of_x);
        Y* place = out + (u64)row * columns + column;
        if (OUT == 3) {
            Chunk up = scaled(f, row, columns + column, of_x);
#pragma unroll
            for (u32 i = 0; i < CHUNK; i++) y.v[i] = __fdividef(y.v[i], 1.0f + __expf(-y.v[i])) * up.v[i];
        }
        if (OUT == 2) {
            Chunk before = read_chunk(place);
#pragma unroll
            for (u32 i = 0; i < CHUNK; i++) y.v[i] += before.v[i];
        }
        write_chunk(place, y);
    }
}
