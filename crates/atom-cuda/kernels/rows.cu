// Row-wise copies and sums: embed, gated_silu, add, pick_rows, convert.
//
// Launch contract. `_bf16` and `_f32` name the activation type; embed writes an f32 residual, embed_bf16_res32 from a bf16
// table. Buffers start on 16 bytes. All kernels: grid.x = rows of the extent at capacity, grid.y = pieces of a row,
// block.x = threads; any numbers are right, since blocks loop over rows and threads over a row's chunks of 8.
// Sensible: block.x = 256, grid.y = ceil(width / 2048); for more than 4096 rows grid.y = 1.
// Every block reads `extent` (and tokens, row numbers) before it waits for the kernel in front (rows.cuh).
#include "rows.cuh"

/// Calls `body(row, column)` for the chunks of real rows that are this thread's; waits before the first.
template <typename Body> __device__ __forceinline__ void each_chunk(Extent extent, u32 width, Body body) {
    let_next_start();
    bool waits = true;
    for (u32 row = blockIdx.x; row < extent.capacity(); row += gridDim.x) {
        if (!extent.has(row)) continue;
        if (waits) wait_for_inputs();
        waits = false;
        u32 step = gridDim.y * blockDim.x * CHUNK;
#pragma unroll 2
        for (u32 c = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK; c < width; c += step) body(row, c);
    }
    if (waits) wait_for_inputs();
}

/// A token with this bit is the last token of the slot that the other bits number: the host does not know it yet.
constexpr u32 OF_SLOT = 1u << 31;

/// `out[r] = table[token[r]]`
template <typename T, typename R>
__device__ __forceinline__ void embed(const T* table, const u32* tokens, const u32* last_tokens, u32 width, R* out,
                                      Extent extent) {
    each_chunk(extent, width, [&](u32 row, u32 c) {
        u32 token = tokens[row];
        if (token & OF_SLOT) token = last_tokens[token & ~OF_SLOT];
        write_row(out + (u64)row * width, c, width, read_row(table + (u64)token * width, c, width));
    });
}

/// `gate / (1 + e^-gate) * up`
__device__ __forceinline__ float silu_times(float gate, float up, float) {
    return gate / (1.0f + expf(-gate)) * up;
}
/// The same within a few units of f32's last place, far below that of bf16.
__device__ __forceinline__ float silu_times(float gate, float up, bf16) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

/// `out = silu(gate) * up`; a row of `gate_up` is gate, then up.
template <typename T>
__device__ __forceinline__ void gated_silu(const T* gate_up, u32 width, T* out, Extent extent) {
    each_chunk(extent, width, [&](u32 row, u32 c) {
        const T* gate = gate_up + (u64)row * 2 * width;
        Chunk a = read_row(gate, c, width), b = read_row(gate + width, c, width);
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++) a.v[i] = silu_times(a.v[i], b.v[i], T{});
        write_row(out + (u64)row * width, c, width, a);
    });
}

/// `out += x`
template <typename T> __device__ __forceinline__ void add(const T* x, u32 width, T* out, Extent extent) {
    each_chunk(extent, width, [&](u32 row, u32 c) {
        Chunk a = read_row(x + (u64)row * width, c, width), b = read_row(out + (u64)row * width, c, width);
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++) b.v[i] += a.v[i];
        write_row(out + (u64)row * width, c, width, b);
    });
}

/// `out[i] = x[out_rows[i]]`; `extent` is that of `out`.
template <typename T>
__device__ __forceinline__ void pick_rows(const T* x, const u32* out_rows, u32 width, T* out, Extent extent) {
    each_chunk(extent, width, [&](u32 row, u32 c) {
        write_row(out + (u64)row * width, c, width, read_row(x + (u64)out_rows[row] * width, c, width));
    });
}

/// `out = x` in another type.
template <typename X, typename Y>
__device__ __forceinline__ void convert(const X* x, u32 width, Y* out, Extent extent) {
    each_chunk(extent, width, [&](u32 row, u32 c) {
        write_row(out + (u64)row * width, c, width, read_row(x + (u64)row * width, c, width));
    });
}

#define EMBED(NAME, T, R)                                                                                             \
    extern "C" __global__ void __launch_bounds__(1024) embed_##NAME(const T* table, const u32* tokens,                \
                                                                   const u32* last_tokens, u32 width, R* out,         \
                                                                   Extent extent) {                                   \
        embed<T, R>(table, tokens, last_tokens, width, out, extent);                                                  \
    }
EMBED(f32, float, float)
EMBED(bf16_res32, bf16, float)

#define ROWS_OF(NAME, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(1024)                                                                \
        gated_silu_##NAME(const T* gate_up, u32 width, T* out, Extent extent) {                                       \
        gated_silu<T>(gate_up, width, out, extent);                                                                   \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024) add_##NAME(const T* x, u32 width, T* out, Extent extent) {     \
        add<T>(x, width, out, extent);                                                                                \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024)                                                                \
        pick_rows_##NAME(const T* x, const u32* out_rows, u32 width, T* out, Extent extent) {                         \
        pick_rows<T>(x, out_rows, width, out, extent);                                                                \
    }
ROWS_OF(bf16, bf16)
ROWS_OF(f32, float)

extern "C" __global__ void __launch_bounds__(1024)
    convert_f32_to_bf16(const float* x, u32 width, bf16* out, Extent extent) {
    convert(x, width, out, extent);
}
extern "C" __global__ void __launch_bounds__(1024)
    convert_bf16_to_f32(const bf16* x, u32 width, float* out, Extent extent) {
    convert(x, width, out, extent);
}
