// Products of few rows with weights that are read once: as fast as memory gives them.
//
// A thread has a ring in shared memory that it alone writes (cp.async) and reads, so weights need no barrier and their
// loads go on across units, barriers and changes of tile. Weights are operand A of mma.m16n8k16 (16 weight rows), rows
// of x are operand B (8 to a tile). A lane reads 16 contiguous bytes of a weight row; since the order along K is free as
// long as A and B agree, these 8 values are the lane's part of two MMAs and no ldmatrix is needed.
//
// A block is 8 warps: 8 / KW groups of 16 weight rows, KW warps along K. The order of an output's sum depends on K and
// KW only, not on the rows beside it, the grid or the place of the row in the batch.
#pragma once
#include "dependent.cuh"

constexpr int STREAM_THREADS = 256;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

/// 16 bytes from global to shared memory, zeros if not `valid`.
__device__ __forceinline__ void cp_async16(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ uint4 load_shared16(u32 from) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}

/// c += a b: a is 16 x 16, b is 16 x 8.
__device__ __forceinline__ void mma16816(float4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Bytes of one row of x in shared memory: whole blocks of 128, and 64 bytes so that neighbours use other banks.
__host__ __device__ constexpr int stream_row_bytes(int inputs) { return (inputs + 127) / 128 * 256 + 64; }

/// 16 bytes of row `row` of x in shared memory, 8 inputs each.
__device__ __forceinline__ void store_input(u32 inputs_at, int inputs, int row, int chunk, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(inputs_at + row * stream_row_bytes(inputs) + chunk * 16), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

/// One row of a tile as it is, by one warp; zeros behind the inputs. ASYNC: by cp.async, which the caller commits and waits
/// for.
template <bool ASYNC> __device__ __forceinline__ void load_input_row(const bf16* from, u32 inputs_at, int inputs, int row) {
    int chunks = (inputs + 127) / 128 * 16;
#pragma unroll 8
    for (int chunk = threadIdx.x % 32; chunk < chunks; chunk += 32) {
        bool valid = chunk * 8 < inputs;
        if (ASYNC && valid) {
            cp_async16(inputs_at + row * stream_row_bytes(inputs) + chunk * 16, from + chunk * 8, true);
            continue;
        }
        uint4 x = make_uint4(0, 0, 0, 0);
        if (valid) x = *(const uint4*)(from + chunk * 8);
        store_input(inputs_at, inputs, row, chunk, x);
    }
}

/// Weight rows of a lane in one unit, null where the matrix has none.
struct WeightRows {
    const bf16* low;
    const bf16* high;
};

/// The weights of a thread on their way.
template <int KW, int AHEAD, typename Job> struct Stream {
    const Job& job;
    u32 ring;
    int unit, end, step, slot = 0;
    WeightRows rows;

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int along() { return threadIdx.x / 32 % KW; }
    static __device__ __forceinline__ int group() { return threadIdx.x / 32 / KW; }

    __device__ __forceinline__ Stream(const Job& job, u32 ring, int unit, int end)
        : job(job), ring(ring + threadIdx.x * 16), unit(unit), end(end), step(0) {
        if (unit < end) rows = job.weights(unit, group(), lane() / 4);
    }

    /// Blocks of 64 inputs that are this warp's.
    __device__ __forceinline__ int steps() const { return ((job.inputs + 63) / 64 - along() + KW - 1) / KW; }

    __device__ __forceinline__ void fetch() {
        if (unit < end && steps() > 0) {
            int k = (along() + step * KW) * 64 + lane() % 4 * 8;
            u32 to = ring + slot * (STREAM_THREADS * 64);
#pragma unroll
            for (int j = 0; j < 4; j++, to += STREAM_THREADS * 16) {
                const bf16* row = j % 2 == 0 ? rows.low : rows.high;
                int at = k + j / 2 * 32;
                bool valid = row && at < job.inputs;
                cp_async16(to, valid ? row + at : job.matrix, valid);
            }
            if (++step == steps()) {
                step = 0;
                if (++unit < end) rows = job.weights(unit, group(), lane() / 4);
            }
        }
        slot = slot + 1 == AHEAD ? 0 : slot + 1;
        cp_async_commit();
    }
};

/// All units of this block's share. Dynamic shared memory: the ring, AHEAD * 16384 bytes; sums, NT * 8192; rows of x,
/// stream_row_bytes(inputs) for each that a tile may have.
///
/// A Job says: `matrix` (any address that may be read), `inputs`; units() in all, their order being that of their tiles;
/// tile_of(unit); tile_rows(tile), at most 8 NT; load_inputs<ASYNC>(tile, to); weights(unit, group, row of 8);
/// store(unit, tile, group, row, row of 8, sums of two rows of x: low and high weight row of each);
/// WEIGHTS_FIRST: whether weights(..) needs nothing that the kernel in front writes.
template <int KW, int NT, int AHEAD, typename Job> __device__ __forceinline__ void stream_products(const Job& job, u8* shared) {
    constexpr int GROUPS = 8 / KW;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float4* sums = (float4*)(shared + AHEAD * STREAM_THREADS * 64); // [2][8 warps][NT][32 lanes]
    u32 inputs = shared_address(sums + 2 * 8 * NT * 32);
    u32 b_at = inputs + lane / 4 * stream_row_bytes(job.inputs) + lane % 4 * 16;
    if (!Job::WEIGHTS_FIRST) wait_for_kernels_before();
    int total = job.units();
    int begin = (u64)total * blockIdx.x / gridDim.x, end = (u64)total * (blockIdx.x + 1) / gridDim.x;
    Stream<KW, AHEAD, Job> stream(job, shared_address(shared), begin, end);
    const int steps = stream.steps(), along = stream.along();
    int slot = 0, tile = -1, tile_count = 0, parity = 0;
    if (!Job::WEIGHTS_FIRST && begin < end) {
        // In front of the weights, whose first loads would keep memory busy for microseconds.
        tile = job.tile_of(begin);
        tile_count = job.tile_rows(tile);
        job.template load_inputs<true>(tile, inputs);
        cp_async_commit();
    }
#pragma unroll 1
    for (int i = 0; i < AHEAD - 1; i++) stream.fetch();
    if (Job::WEIGHTS_FIRST) wait_for_kernels_before();
    let_next_kernel_start();
    if (!Job::WEIGHTS_FIRST) {
        cp_async_wait<AHEAD - 1>();
        __syncthreads();
    }
#pragma unroll 1
    for (int unit = begin; unit < end; unit++, parity ^= 1) {
        if (job.tile_of(unit) != tile) {
            tile = job.tile_of(unit);
            tile_count = job.tile_rows(tile);
            __syncthreads();
            job.template load_inputs<false>(tile, inputs);
            __syncthreads();
        }
        float4 acc[NT] = {};
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            cp_async_wait<AHEAD - 2>();
            u32 a_at = shared_address(shared) + (slot * 4 * STREAM_THREADS + threadIdx.x) * 16;
            uint4 a[4];
#pragma unroll
            for (int j = 0; j < 4; j++) a[j] = load_shared16(a_at + j * STREAM_THREADS * 16);
            slot = slot + 1 == AHEAD ? 0 : slot + 1;
            stream.fetch();
            u32 b_k = b_at + (along + step * KW) * 128;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                if (n * 8 >= tile_count) break;
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    uint4 b = make_uint4(0, 0, 0, 0); // rows that are nobody's have no place in shared memory
                    if (n * 8 + lane / 4 < tile_count) b = load_shared16(b_k + n * 8 * stream_row_bytes(job.inputs) + j * 64);
                    mma16816(acc[n], a[2 * j].x, a[2 * j + 1].x, a[2 * j].y, a[2 * j + 1].y, b.x, b.y);
                    mma16816(acc[n], a[2 * j].z, a[2 * j + 1].z, a[2 * j].w, a[2 * j + 1].w, b.z, b.w);
                }
            }
        }
        float4* mine = sums + parity * 8 * NT * 32;
#pragma unroll
        for (int n = 0; n < NT; n++) mine[(warp * NT + n) * 32 + lane] = acc[n];
        __syncthreads();
        for (int i = threadIdx.x; i < GROUPS * NT * 32; i += STREAM_THREADS) {
            int group = i / (NT * 32), n = i / 32 % NT;
            if (n * 8 >= tile_count) continue;
            float4 sum = mine[(group * KW * NT + n) * 32 + i % 32];
#pragma unroll
            for (int w = 1; w < KW; w++) {
                float4 part = mine[((group * KW + w) * NT + n) * 32 + i % 32];
                sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
            }
            job.store(unit, tile, group, n * 8 + i % 4 * 2, i % 32 / 4, sum);
        }
    }
    cp_async_wait<0>();
}
