// linear_rows: out = x W^T (+ bias) for 8 to 128 rows, where time is still the reading of W: sm_90a, bf16, f32 sums.
//
// Definitions make the kernel `linear_rows`:
//   CLUSTER  1, or 2: two blocks share a tile of outputs, fetch half of its weights each for both, and have half of the rows
//            each. That puts twice as many multiprocessors on a matrix that has few tiles.
//   EACH     rows of a block, a multiple of 8 up to 64; rows at capacity are at most CLUSTER * EACH
//   STAGES   of the ring
//   OUT      0: bf16. 1: f32 (logits). 2: adds to the f32 residual `out`. 3: W is gate rows, then up rows, and
//            out[j] = silu(gate_j) * up_j, bf16, [rows, outputs / 2]
//
// Weights are operand A of wgmma, 64 rows of them a tile; rows of x are operand B. The copy engine brings both, 64 inputs a
// stage. Stages of weights are asked for before the wait for the kernel in front: they stream while that one still works.
// A sum runs along the inputs in one order whatever the tile, as in cuBLASLt's kernels without reductions, and what two
// kernels would round between them is rounded here (products, and products with their bias, to bf16), so outputs have the
// bits that those kernels and the ones behind them give.
//
// Launch contract. inputs is a multiple of 8; W, x, out start on 16 bytes. grid.x = CLUSTER * ceil(tiles of outputs: 64, OUT 3:
// 32 pairs); block.x = 160; dynamic shared memory 1024 + STAGES * (8192 + 128 * EACH). Tensor maps: bf16, SWIZZLE_128B,
// zeros outside; innermost first:
//   weight  OUT 0 .. 2: dims {inputs, outputs, 1}, strides in bytes {2 inputs, any}, box {64, 64 / CLUSTER, 1}
//           OUT 3: dims {inputs, 8, 2, outputs / 16, 1}, strides {2 inputs, outputs inputs, 16 inputs, any},
//           box {64, 8, 2, 4 / CLUSTER, 1}
//   x       dims {inputs, rows at capacity}, strides {2 inputs}, box {64, EACH}
// `extent` is that of x and of out.
#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "rows.cuh"
#include "hopper.cuh"

constexpr int TILE = 64, A_BYTES = TILE * 128, B_BYTES = EACH * 128, STAGE_BYTES = A_BYTES + B_BYTES;
/// Outputs of a tile, as they are stored.
constexpr int COLUMNS = OUT == 3 ? TILE / 2 : TILE;
/// Floats from one row of a tile's outputs to the next in shared memory: 8 rows of 4 lie in different banks.
constexpr int STRIDE = COLUMNS + 4;
static_assert(EACH * STRIDE * 4 <= STAGES * STAGE_BYTES, "outputs pass through the ring's memory");

#if OUT == 0 || OUT == 3
typedef bf16 Y;
#else
typedef float Y;
#endif

struct Ring {
    u32 start, barriers;
    __device__ __forceinline__ u32 a(u32 stage) const { return start + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 b(u32 stage) const { return a(stage) + A_BYTES; }
    __device__ __forceinline__ u32 full(u32 stage) const { return barriers + 8 * stage; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return barriers + 8 * (STAGES + stage); }
    /// This warp is done with a stage: all blocks that write to it hear of it.
    __device__ __forceinline__ void release(u32 stage) const {
        if (threadIdx.x % 32 < CLUSTER) barrier_arrive_there(cluster_address(empty(stage), threadIdx.x % 32));
    }
};

__device__ __forceinline__ void meet() {
    if (CLUSTER > 1) cluster_meet();
    else __syncthreads();
}

/// What is left of a sum in bf16.
__device__ __forceinline__ float rounded(float x) { return to_float(to_bf16(x)); }

/// One thread asks for everything.
__device__ __forceinline__ void fetch(const Ring& ring, const TensorMap& weight, const TensorMap& x, u32 tile, u32 rank, u32 steps) {
    auto ask_weights = [&](u32 stage, u32 step) {
        barrier_expect(ring.full(stage), STAGE_BYTES);
        u32 to = ring.a(stage) + rank * (A_BYTES / CLUSTER);
        if (OUT == 3)
            tma_load_5d<CLUSTER>(to, weight, ring.full(stage), step * 64, 0, 0, tile * 4 + rank * (4 / CLUSTER), 0);
        else
            tma_load_3d<CLUSTER>(to, weight, ring.full(stage), step * 64, tile * TILE + rank * (TILE / CLUSTER), 0);
    };
    auto ask_rows = [&](u32 stage, u32 step) { tma_load_2d(ring.b(stage), x, ring.full(stage), step * 64, rank * EACH); };
    u32 ahead = min(steps, (u32)STAGES);
    for (u32 step = 0; step < ahead; step++) ask_weights(step, step);
    wait_for_inputs();
    for (u32 step = 0; step < ahead; step++) ask_rows(step, step);
    u32 stage = 0, phase = 0;
#pragma unroll 1
    for (u32 step = ahead; step < steps; step++) {
        barrier_wait(ring.empty(stage), phase);
        ask_weights(stage, step);
        ask_rows(stage, step);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
}

/// d = W x^T of a tile, 64 outputs by EACH rows.
__device__ __forceinline__ void multiply(float (&d)[WGMMA_REGISTERS], const Ring& ring, u32 steps) {
    u32 stage = 0, phase = 0, before = 0;
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        barrier_wait(ring.full(stage), phase);
        u64 a = wgmma_tile(ring.a(stage)), b = wgmma_tile(ring.b(stage));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) Wgmma<EACH>::run(d, a + 2 * k, b + 2 * k, step | k);
        wgmma_commit();
        wgmma_wait<1>();
        if (step) ring.release(before);
        before = stage;
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    wgmma_wait<0>();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(160)
    linear_rows(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const float* bias, Y* out, u32 inputs,
                u32 outputs, Extent extent) {
    extern __shared__ u8 shared[];
    __shared__ u64 barriers[2 * STAGES];
    Ring ring{(smem(shared) + 1023) & ~1023u, smem(barriers)};
    u32 rank = CLUSTER > 1 ? cluster_rank() : 0, tile = blockIdx.x / CLUSTER, steps = (inputs + 63) / 64;
    let_next_start();
    if (threadIdx.x == 128) {
        tma_prefetch_map(weight);
        tma_prefetch_map(x);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), 4 * CLUSTER);
        }
        barrier_init_fence();
    }
    meet();
    if (threadIdx.x >= 128) {
        if (threadIdx.x == 128) fetch(ring, weight, x, tile, rank, steps);
    } else {
        u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, columns = OUT == 3 ? outputs / 2 : outputs;
        float d[WGMMA_REGISTERS];
        multiply(d, ring, steps);
        // Where the first 8 of this lane's outputs are, and 8 behind: the same pairs' up if OUT is 3.
        u32 column = warp * (COLUMNS / 4) + lane / 4;
        float low = 0.0f, high = 0.0f;
        if (bias) {
            u32 first = tile * COLUMNS + column, second = OUT == 3 ? first + columns : first + 8;
            low = first < columns ? bias[first] : 0.0f, high = second < outputs ? bias[second] : 0.0f;
        }
        auto with_bias = [&](float sum, float b) {
            if (OUT == 1) return sum + b;
            return bias ? rounded(rounded(sum) + b) : rounded(sum);
        };
        float* staged = reinterpret_cast<float*>(shared + (ring.start - smem(shared)));
        named_barrier<128>(1); // all warps are done with the ring
#pragma unroll
        for (int j = 0; j < EACH / 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float* to = staged + (8 * j + lane % 4 * 2 + i) * STRIDE + column;
                float a = with_bias(d[4 * j + i], low), b = with_bias(d[4 * j + 2 + i], high);
                if (OUT == 3) to[0] = __fdividef(a, 1.0f + __expf(-a)) * b;
                else to[0] = a, to[8] = b;
            }
        wait_for_inputs(); // what is overwritten was read, what is added to is there
        named_barrier<128>(1);
        constexpr int CHUNKS = COLUMNS / CHUNK;
        for (u32 i = threadIdx.x; i < EACH * CHUNKS; i += 128) {
            u32 row = rank * EACH + i / CHUNKS, at = tile * COLUMNS + i % CHUNKS * CHUNK;
            if (row >= extent.capacity() || !extent.has(row) || at >= columns) continue;
            Chunk y = read_chunk(staged + i / CHUNKS * STRIDE + i % CHUNKS * CHUNK);
            Y* to = out + (u64)row * columns;
            if (OUT == 2) {
                Chunk before = read_row(to, at, columns);
#pragma unroll
                for (u32 j = 0; j < CHUNK; j++) y.v[j] += before.v[j];
            }
            write_row(to, at, columns, y);
        }
    }
    __syncwarp();
    meet(); // the other block may still release stages here
}
#endif
