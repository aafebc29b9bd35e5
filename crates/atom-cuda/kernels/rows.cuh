// What row-wise kernels share: which rows are real, chunks of eight elements, sums over a block, and
// programmatic dependent launch. Includes nothing; prelude.cuh stands in front.
#pragma once

/// Which rows of a buffer are real. Row `r` belongs to lane `r / lane_rows`, and is real if it is among the
/// first `counts[lane]` of that lane. Rows: counts = header + ROWS, one lane. OutRows: counts = header +
/// OUT_ROWS, one lane. GroupRows: counts = group_rows, all lanes. `lane_rows` is the capacity of a lane.
struct Extent {
    const u32* counts;
    u32 lanes;
    u32 lane_rows;

    __device__ __forceinline__ u32 capacity() const { return lanes * lane_rows; }

    __device__ __forceinline__ bool has(u32 row) const {
        if (lanes == 1) return row < counts[0];
        return row % lane_rows < counts[row / lane_rows];
    }
};

/// Lets the next kernel of the stream start as soon as all blocks of this one have come here (if that one was
/// launched with programmatic stream serialization; else nothing happens). Its part before `wait_for_inputs`
/// then overlaps with this kernel.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until everything that earlier kernels wrote is there. Before it a kernel may read only what no kernel
/// of the recording writes: weights, tables, and the arrays of the step's upload. It also orders writes: what a
/// kernel overwrites was read by earlier kernels, and these have ended.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Elements that a thread reads and writes together: 16 bytes of bf16, twice 16 of f32.
constexpr u32 CHUNK = 8;

struct Chunk {
    float v[CHUNK];
};

__device__ __forceinline__ Chunk read_chunk(const float* from) {
    float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ Chunk read_chunk(const bf16* from) {
    uint4 a = *reinterpret_cast<const uint4*>(from);
    return {{low_float(a.x), high_float(a.x), low_float(a.y), high_float(a.y), low_float(a.z), high_float(a.z),
             low_float(a.w), high_float(a.w)}};
}

__device__ __forceinline__ void write_chunk(float* to, const Chunk& c) {
    reinterpret_cast<float4*>(to)[0] = make_float4(c.v[0], c.v[1], c.v[2], c.v[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(c.v[4], c.v[5], c.v[6], c.v[7]);
}

__device__ __forceinline__ void write_chunk(bf16* to, const Chunk& c) {
    *reinterpret_cast<uint4*>(to) = make_uint4(pack_bf16(c.v[0], c.v[1]), pack_bf16(c.v[2], c.v[3]),
                                               pack_bf16(c.v[4], c.v[5]), pack_bf16(c.v[6], c.v[7]));
}

/// Elements `column ..` of a row of `width`; zeros behind its end. Rows of whole chunks are read 16 bytes at a
/// time, others element by element, since they do not start on 16 bytes.
template <typename T> __device__ __forceinline__ Chunk read_row(const T* row, u32 column, u32 width) {
    if (width % CHUNK == 0 && column < width) return read_chunk(row + column);
    Chunk c;
#pragma unroll
    for (u32 i = 0; i < CHUNK; i++) c.v[i] = column + i < width ? to_float(row[column + i]) : 0.0f;
    return c;
}

template <typename T> __device__ __forceinline__ void write_row(T* row, u32 column, u32 width, const Chunk& c) {
    if (width % CHUNK == 0 && column < width) return write_chunk(row + column, c);
#pragma unroll
    for (u32 i = 0; i < CHUNK; i++)
        if (column + i < width) row[column + i] = From<T>::of(c.v[i]);
}

/// What `write_row` followed by `read_row` gives.
template <typename T> __device__ __forceinline__ void round_chunk(Chunk& c) {
#pragma unroll
    for (u32 i = 0; i < CHUNK; i++) c.v[i] = to_float(From<T>::of(c.v[i]));
}

__device__ __forceinline__ float square_sum(const Chunk& c) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < CHUNK; i++) sum = fmaf(c.v[i], c.v[i], sum);
    return sum;
}

/// Room for sums over a block; two, so that a loop over rows needs one barrier a row.
struct BlockSums {
    float4 warps[2][8];
};

/// Sum over the threads of a block, in an order that depends on the number of threads only. `turn` is 0 and 1 in
/// alternation; all threads call it.
__device__ __forceinline__ float block_sum(float x, BlockSums& sums, u32 turn) {
    x = warp_sum(x);
    if (blockDim.x == 32) return x;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float4* of_warps = sums.warps[turn & 1];
    if (lane == 0) reinterpret_cast<float*>(of_warps)[warp] = x;
    __syncthreads();
    float sum = 0.0f;
    for (u32 i = 0; i < warps; i += 4) {
        float4 four = of_warps[i / 4];
        // Of the last four some may be no warp of this block.
        float b = i + 1 < warps ? four.y : 0.0f, c = i + 2 < warps ? four.z : 0.0f, d = i + 3 < warps ? four.w : 0.0f;
        sum += (four.x + b) + (c + d);
    }
    return sum;
}

/// `1 / sqrt(square_sum / elements + eps)`
__device__ __forceinline__ float inverse_root(float square_sum, u32 elements, float eps) {
    return 1.0f / sqrtf(square_sum / (float)elements + eps);
}
