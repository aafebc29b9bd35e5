// Op::Experts for many rows (prefill): grouped products on wgmma, sm_90a, bf16.
//
//   experts_plan (tile_rows = 256, granule = 16), then
//   experts_gemm_gate_bf16   gated[position, w] = silu(gate . x) * (up . x), positions in sorted order
//   experts_gemm_down_bf16   y[slot] = down gated[position], unweighted, [rows * top_k, hidden] by slot
//   and, if it sums, experts_combine_bf16_* over y; if not, y is the output.
//
// Both: grid = multiprocessors of the device, block 384, dynamic shared memory 227456 bytes. hidden and width multiples of 8.
// Tensor maps: bf16, SWIZZLE_128B, element strides 1, no interleave, zeros outside, L2 promotion 256 bytes; innermost first:
//   gate_up  dims {hidden, 8, 2, width / 8, held}, strides in bytes {2 hidden, 2 width hidden, 16 hidden, 4 width hidden},
//            box {64, 8, 2, 8, 1}
//   down     dims {width, hidden, held}, strides {2 width, 2 hidden width}, box {64, 128, 1}
//   gated    dims {width, rows * top_k}, strides {2 width}, box {64, 16}
// Scratch: plan (see there), gated rows * top_k * width * 2 bytes, y rows * top_k * hidden * 2 bytes.
//
// Weights are operand A: 128 weight rows a block, choices are operand B: up to 256, in steps of 16, so that few of the
// columns computed are nobody's. Rows of A alternate between 8 of gate and 8 of up, so a lane holds both values of a
// column and the activation costs no exchange. Warpgroup 0 fetches (weights by TMA; rows of x, which lie anywhere, by
// cp.async), 1 and 2 multiply 64 weight rows each. A sum runs along K in one order whatever the tile.
#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "dependent.cuh"
#include "experts_choices.cuh"
#include "hopper.cuh"

constexpr int STAGES = 4;
constexpr int TILE = 128;                     // weight rows of a block
constexpr int A_BYTES = TILE * 128;           // 64 values along K
constexpr int STAGE_BYTES = A_BYTES + 256 * 128;
constexpr int STAGING_BYTES = 30720;
constexpr int BARRIERS = STAGES * STAGE_BYTES + STAGING_BYTES;

extern __shared__ __align__(1024) u8 gemm_shared[];

/// The place in the ring of stages.
struct Place {
    u32 stage = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

struct Ring {
    u32 base;
    __device__ __forceinline__ u32 a(u32 stage) const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 b(u32 stage) const { return base + stage * STAGE_BYTES + A_BYTES; }
    __device__ __forceinline__ u32 full(u32 stage) const { return base + BARRIERS + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return base + BARRIERS + (STAGES + stage) * 8; }
};

struct Plan {
    const u32* counts;
    const uint4* tiles;
    const u32* slots;
};

/// d = A B over `blocks` stages; leaves `at` behind them.
template <int N> __device__ __forceinline__ void multiply(float (&d)[128], const Ring& ring, Place& at, int blocks, int warpgroup) {
    u32 before = 0;
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
        barrier_wait(ring.full(at.stage), at.phase);
        proxy_fence();
        u64 a = wgmma_tile(ring.a(at.stage) + warpgroup * (A_BYTES / 2)), b = wgmma_tile(ring.b(at.stage));
        wgmma_fence();
        Wgmma<N>::run(d, a, b, block);
        Wgmma<N>::run(d, a + 2, b + 2, 1);
        Wgmma<N>::run(d, a + 4, b + 4, 1);
        Wgmma<N>::run(d, a + 6, b + 6, 1);
        wgmma_commit();
        wgmma_wait<1>();
        if (block && threadIdx.x % 32 == 0) barrier_arrive(ring.empty(before));
        before = at.stage;
        at.next();
    }
    wgmma_wait<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty(before));
}

__device__ __forceinline__ void multiply_any(int n16, float (&d)[128], const Ring& ring, Place& at, int blocks, int warpgroup) {
    switch (n16) {
#define CASE(N) \
    case N: multiply<16 * N>(d, ring, at, blocks, warpgroup); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
        CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16)
#undef CASE
    }
}

struct GateJob {
    const TensorMap& matrix;
    const bf16* x;
    bf16* gated;
    Plan plan;
    int inputs, outputs, top_k;
    static constexpr int COLUMNS = TILE / 2, CHUNK = 96, ROW_BYTES = 64;
    static constexpr int FULL_ARRIVALS = 129;

    /// 128 threads: an eighth of a row's 128 bytes each, 16 rows at a time.
    __device__ __forceinline__ void fetch(const Ring& ring, Place& at, uint4 tile, int m) const {
        int thread = threadIdx.x, chunk = thread % 8, n16 = (tile.z + 15) / 16;
        int rows[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            int place = thread / 8 + 16 * i;
            rows[i] = place < tile.z ? (int)(plan.slots[tile.y + place] / top_k) : -1;
        }
        u32 to = thread / 8 * 128 + ((chunk ^ thread / 8 % 8) << 4);
#pragma unroll 1
        for (int k = 0; k < inputs; k += 64, at.next()) {
            barrier_wait(ring.empty(at.stage), at.phase ^ 1);
            if (thread == 0) {
                barrier_expect(ring.full(at.stage), A_BYTES);
                tma_load_5d(ring.a(at.stage), matrix, ring.full(at.stage), k, 0, 0, m * (COLUMNS / 8), tile.x);
            }
            const bf16* from = x + k + chunk * 8;
            bool inside = k + chunk * 8 < inputs;
            u32 b = ring.b(at.stage) + to;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                if (i >= n16) break;
                bool valid = inside && rows[i] >= 0;
                const bf16* row = valid ? from + (u64)rows[i] * inputs : x;
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(b + i * 2048), "l"(row), "r"(valid ? 16 : 0) : "memory");
            }
            barrier_arrive_after_cp_async(ring.full(at.stage));
        }
    }
    /// 8 columns of 16 choices of this warp.
    __device__ __forceinline__ void stage(u32 to, const float* d) const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        u32 low = pack_bf16(silu(d[0]) * d[2], silu(d[1]) * d[3]), high = pack_bf16(silu(d[4]) * d[6], silu(d[5]) * d[7]);
        store_transposed_x2(to + lane % 16 * (ROW_BYTES + 16) + warp * 16, low, high);
    }
    __device__ __forceinline__ bf16* output(u32 position, int column) const { return gated + (u64)position * outputs + column; }
};

struct DownJob {
    const TensorMap& matrix;
    const TensorMap& gated;
    bf16* y;
    Plan plan;
    int inputs, outputs;
    static constexpr int COLUMNS = TILE, CHUNK = 48, ROW_BYTES = 128;
    static constexpr int FULL_ARRIVALS = 1;

    /// One warp: every lane may fetch 16 rows of gated.
    __device__ __forceinline__ void fetch(const Ring& ring, Place& at, uint4 tile, int m) const {
        if (threadIdx.x >= 32) return;
        int lane = threadIdx.x, n16 = (tile.z + 15) / 16;
#pragma unroll 1
        for (int k = 0; k < inputs; k += 64, at.next()) {
            u32 full = ring.full(at.stage);
            barrier_wait(ring.empty(at.stage), at.phase ^ 1);
            if (lane == 0) {
                barrier_expect(full, A_BYTES + n16 * 2048);
                tma_load_3d(ring.a(at.stage), matrix, full, k, m * TILE, tile.x);
            }
            __syncwarp();
            if (lane < n16) tma_load_2d(ring.b(at.stage) + lane * 2048, gated, full, k, tile.y + lane * 16);
        }
    }
    /// 16 columns of 16 choices of this warp.
    __device__ __forceinline__ void stage(u32 to, const float* d) const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        u32 at = to + (lane / 16 * 8 + lane % 8) * (ROW_BYTES + 16) + warp * 32 + lane / 8 % 2 * 16;
        store_transposed_x4(at, pack_bf16(d[0], d[1]), pack_bf16(d[2], d[3]), pack_bf16(d[4], d[5]), pack_bf16(d[6], d[7]));
    }
    __device__ __forceinline__ bf16* output(u32 position, int column) const { return y + (u64)plan.slots[position] * outputs + column; }
};

/// A warpgroup's results through two buffers in shared memory, so that each choice's columns go out together. The stores
/// themselves run on while the next tile is multiplied. (A bulk copy for each choice was measured: 45 cycles each, 18,000 a
/// tile.) `buffer` alternates over all chunks of the kernel: who passes a chunk's barrier is done with the one before.
template <typename Job> __device__ __forceinline__ void write_out(const Job& job, const float (&d)[128], u8* staging, int& buffer, uint4 tile, int column, int id) {
    constexpr int STRIDE = Job::ROW_BYTES + 16, PER = Job::CHUNK / 16, PIECES = Job::ROW_BYTES / 16, TURNS = Job::CHUNK * PIECES / 128;
    int thread = threadIdx.x % 128, n16 = (tile.z + 15) / 16, piece = thread % PIECES;
    bool inside = column + piece * 8 < job.outputs;
    bf16* to[TURNS];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (i >= n16) break;
        u8* at = staging + buffer * Job::CHUNK * STRIDE;
        if (i % PER == 0) {
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                int place = i * 16 + turn * (128 / PIECES) + thread / PIECES;
                to[turn] = inside && place < tile.z ? job.output(tile.y + place, column + piece * 8) : nullptr;
            }
        }
        job.stage(smem(at) + i % PER * 16 * STRIDE, d + 8 * i);
        if (i % PER == PER - 1 || i == n16 - 1) {
            named_barrier<128>(id);
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++)
                if (to[turn]) *(uint4*)to[turn] = *(const uint4*)(at + (turn * (128 / PIECES) + thread / PIECES) * STRIDE + piece * 16);
            buffer ^= 1;
        }
    }
}

template <typename Job> __device__ __forceinline__ void grouped(const Job& job) {
    Ring ring{smem(gemm_shared)};
    int warpgroup = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        tma_prefetch_map(job.matrix);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full(i), Job::FULL_ARRIVALS);
            barrier_init(ring.empty(i), 8);
        }
        barrier_init_fence();
    }
    __syncthreads();
    wait_for_kernels_before();
    let_next_kernel_start();
    int across = (job.outputs + Job::COLUMNS - 1) / Job::COLUMNS, items = job.plan.counts[1] * across;
    Place at;
    if (warpgroup == 0) {
        registers_less<88>();
#pragma unroll 1
        for (int item = blockIdx.x; item < items; item += gridDim.x) job.fetch(ring, at, job.plan.tiles[item / across], item % across);
    } else {
        registers_more<208>();
        warpgroup -= 1;
        int buffer = 0;
        u8* staging = gemm_shared + STAGES * STAGE_BYTES + warpgroup * 2 * Job::CHUNK * (Job::ROW_BYTES + 16);
        float d[128];
#pragma unroll 1
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            uint4 tile = job.plan.tiles[item / across];
            multiply_any((tile.z + 15) / 16, d, ring, at, (job.inputs + 63) / 64, warpgroup);
            int column = item % across * Job::COLUMNS + warpgroup * (Job::COLUMNS / 2);
            write_out(job, d, staging, buffer, tile, column, 1 + warpgroup);
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    experts_gemm_gate_bf16(const __grid_constant__ TensorMap gate_up, const bf16* x, bf16* gated, const u32* counts, const uint4* tiles,
                           const u32* slots, int hidden, int width, int top_k) {
    grouped(GateJob{gate_up, x, gated, {counts, tiles, slots}, hidden, width, top_k});
}

extern "C" __global__ void __launch_bounds__(384, 1)
    experts_gemm_down_bf16(const __grid_constant__ TensorMap down, const __grid_constant__ TensorMap gated, bf16* y, const u32* counts,
                           const uint4* tiles, const u32* slots, int hidden, int width) {
    grouped(DownJob{down, gated, y, {counts, tiles, slots}, width, hidden});
}
#endif
