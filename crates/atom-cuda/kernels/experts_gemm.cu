// Op::Experts for many rows (prefill): grouped products on wgmma, sm_90a, bf16.
//
// Definition: CLUSTER. 2: compute bound, tile_rows = 320. 1: a block fetches all for itself, more of it ahead, for so few
// choices that reading the weights is the time; tile_rows = 64.
//   experts_plan (tile_rows, granule = 16), then
//   experts_gemm_gate_bf16   gated[position, w] = silu(gate . x) * (up . x), positions in sorted order
//   experts_gemm_down_bf16   y[slot] = down gated[position], unweighted, [rows * top_k, hidden] by slot
//   and, if it sums, experts_combine_bf16_* over y; if not, y is the output.
//
// Both: grid = multiprocessors of the device rounded down to a multiple of CLUSTER, block 384, dynamic shared memory 231488
// bytes (CLUSTER 1: 223312). hidden and width multiples of 8.
// Tensor maps: bf16, SWIZZLE_128B, element strides 1, no interleave, zeros outside; innermost first:
//   gate_up  dims {hidden, 8, 2, width / 8, held}, strides in bytes {2 hidden, 2 width hidden, 16 hidden, 4 width hidden},
//            box {64, 8, 2, 8, 1}
//   down     dims {width, hidden, held}, strides {2 width, 2 hidden width}, box {64, 128, 1}
//   gated    dims {width, rows * top_k}, strides {2 width}, box {64, 32} for CLUSTER 2, {64, 8} for 1
// Scratch: plan (see there), gated rows * top_k * width * 2 bytes, y rows * top_k * hidden * 2 bytes.
//
// Weights are operand A: 256 weight rows of a cluster, of which each of two blocks fetches half for both. Choices are
// operand B: a tile's, half for each block, in steps of 8, so that few of the columns computed are nobody's.
// (A block that fetches everything for itself is bound by the L2 cache: 513 TFLOP/s at 6.4 TB/s.) Rows of A alternate
// between 8 of gate and 8 of up, so a lane holds both values of a column and the activation costs no exchange. Warpgroup 0
// fetches (weights by TMA; rows of x, which lie anywhere, by cp.async), 1 and 2 multiply 128 weight rows each. A sum runs
// along K in one order whatever the tile: bits of a row depend neither on CLUSTER nor on the rows beside it.
//
// On an H200, Qwen3-30B-A3B's layer (hidden 2048, width 768, 128 experts, 8 a row), random routes, plan and combine included:
// CLUSTER 2: 16384 rows 2366 us (523 TFLOP/s of cuBLASLt's 776; first product 594, second 511), 8192 rows 1230 us (503; 576,
// 471; plan 14 us, combine 82 us), 4096 rows 641 us (483). CLUSTER 1: 1024 rows 385 us, 512 rows 324 us, 256 rows 310 us,
// 128 rows 302 us (93% of 4.28 TB/s).
#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "dependent.cuh"
#include "experts_choices.cuh"
#include "hopper.cuh"

constexpr int STAGES = CLUSTER == 2 ? 4 : 5;
constexpr int TILE = 256;            // weight rows of a cluster
constexpr int A_BYTES = TILE * 128;  // 64 values along K
constexpr int SHARE = CLUSTER == 2 ? 160 : 64; // choices of a block
constexpr int STAGE_BYTES = A_BYTES + SHARE * 128;
constexpr int STAGING_BYTES = 18432;
constexpr int BARRIERS = STAGES * STAGE_BYTES + STAGING_BYTES;
constexpr int WARPS = 8 * CLUSTER; // that release a stage: the consumers of all blocks

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
    /// One lane of each warp for each block, since all fetch for all.
    __device__ __forceinline__ void release(u32 stage) const {
        if (threadIdx.x % 32 < CLUSTER) barrier_arrive_there(cluster_address(empty(stage), threadIdx.x % 32));
    }
};

struct Plan {
    const u32* counts;
    const uint4* tiles;
    const u32* slots;
};

/// A block's part of a tile: `count` choices from position `first` on, `n` of them computed.
struct Part {
    u32 expert, first, count;
    int n;
    __device__ __forceinline__ Part(uint4 tile, u32 rank) {
        u32 half = ((tile.z + CLUSTER - 1) / CLUSTER + 7) / 8 * 8;
        expert = tile.x;
        first = tile.y + rank * half;
        count = rank ? tile.z - min(tile.z, half) : min(tile.z, half);
        n = (count + 7) / 8 * 8;
    }
};

/// d = A B over `blocks` stages; leaves `at` behind them.
template <int N, bool IS_GATHERED>
__device__ __forceinline__ void multiply(float (&d)[2][WGMMA_REGISTERS], const Ring& ring, Place& at, int blocks, int warpgroup) {
    u32 before = 0;
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
        barrier_wait(ring.full(at.stage), at.phase);
        if (IS_GATHERED) proxy_fence(); // cp.async is not the copy engine
        u64 a = wgmma_tile(ring.a(at.stage) + warpgroup * (A_BYTES / 2)), b = wgmma_tile(ring.b(at.stage));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            Wgmma<N>::run(d[0], a + 2 * k, b + 2 * k, block | k);
            Wgmma<N>::run(d[1], a + 2 * k + (A_BYTES / 4 >> 4), b + 2 * k, block | k);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (block) ring.release(before);
        before = at.stage;
        at.next();
    }
    wgmma_wait<0>();
    ring.release(before);
}

template <bool IS_GATHERED>
__device__ __forceinline__ void multiply_any(int n, float (&d)[2][WGMMA_REGISTERS], const Ring& ring, Place& at, int blocks, int warpgroup) {
    switch (n / 8) {
#define CASE(N) \
    case N: multiply<8 * N, IS_GATHERED>(d, ring, at, blocks, warpgroup); break;
        default: // nobody's part: the other block still needs this one's half of A
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#if CLUSTER == 2
        CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16) CASE(17) CASE(18) CASE(19) CASE(20)
#endif
#undef CASE
    }
}

struct GateJob {
    const TensorMap& matrix;
    const bf16* x;
    bf16* gated;
    Plan plan;
    int inputs, outputs, top_k;
    static constexpr int COLUMNS = TILE / 2, CHUNK = 32, ROW_BYTES = 128;
    static constexpr int FULL_ARRIVALS = 129;
    static constexpr bool IS_GATHERED = true;

    /// 128 threads: an eighth of a row's 128 bytes each, 16 rows at a time.
    __device__ __forceinline__ void fetch(const Ring& ring, Place& at, const Part& part, int m, u32 rank) const {
        int thread = threadIdx.x, chunk = thread % 8;
        int rows[SHARE / 16];
#pragma unroll
        for (int i = 0; i < SHARE / 16; i++) {
            int place = thread / 8 + 16 * i;
            rows[i] = place < part.count ? (int)(plan.slots[part.first + place] / top_k) : -1;
        }
        u32 to = thread / 8 * 128 + ((chunk ^ thread / 8 % 8) << 4);
#pragma unroll 1
        for (int k = 0; k < inputs; k += 64, at.next()) {
            barrier_wait(ring.empty(at.stage), at.phase ^ 1);
            if (thread == 0) {
                barrier_expect(ring.full(at.stage), A_BYTES);
                for (int half = rank; half < 2; half += CLUSTER) {
                    u32 a = ring.a(at.stage) + half * (A_BYTES / 2);
                    tma_load_5d<CLUSTER>(a, matrix, ring.full(at.stage), k, 0, 0, m * (COLUMNS / 8) + half * (COLUMNS / 16), part.expert);
                }
            }
            const bf16* from = x + k + chunk * 8;
            bool inside = k + chunk * 8 < inputs;
            u32 b = ring.b(at.stage) + to;
#pragma unroll
            for (int i = 0; i < SHARE / 16; i++) {
                if (i * 16 >= part.n) break;
                bool valid = inside && rows[i] >= 0;
                const bf16* row = valid ? from + (u64)rows[i] * inputs : x;
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(b + i * 2048), "l"(row), "r"(valid ? 16 : 0) : "memory");
            }
            barrier_arrive_after_cp_async(ring.full(at.stage));
        }
    }
    /// Columns 8 warp .. of both halves of this warpgroup's 64, of 16 choices.
    __device__ __forceinline__ void stage(u32 to, const float* low, const float* high) const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        u32 at = to + (lane / 16 * 8 + lane % 8) * (ROW_BYTES + 16) + lane / 8 % 2 * 64 + warp * 16;
        auto pair = [](const float* d) { return pack_bf16(silu(d[0]) * d[2], silu(d[1]) * d[3]); };
        store_transposed_x4(at, pair(low), pair(high), pair(low + 4), pair(high + 4));
    }
    static constexpr bool IS_SCATTERED = false;
    __device__ __forceinline__ bf16* output(u32 position, int column) const { return gated + (u64)position * outputs + column; }
};

struct DownJob {
    const TensorMap& matrix;
    const TensorMap& gated;
    bf16* y;
    Plan plan;
    int inputs, outputs;
    static constexpr int COLUMNS = TILE, CHUNK = 16, ROW_BYTES = 256;
    static constexpr int FULL_ARRIVALS = 1;
    static constexpr int BOX = CLUSTER == 2 ? 32 : 8; // rows of gated that one instruction fetches
    static constexpr bool IS_GATHERED = false;

    /// One warp: every lane may fetch rows of gated. Those behind the part's come along and are nobody's.
    __device__ __forceinline__ void fetch(const Ring& ring, Place& at, const Part& part, int m, u32 rank) const {
        if (threadIdx.x >= 32) return;
        int lane = threadIdx.x, boxes = (part.n + BOX - 1) / BOX;
#pragma unroll 1
        for (int k = 0; k < inputs; k += 64, at.next()) {
            u32 full = ring.full(at.stage);
            barrier_wait(ring.empty(at.stage), at.phase ^ 1);
            if (lane == 0) {
                barrier_expect(full, A_BYTES + boxes * BOX * 128);
                for (int half = rank; half < 2; half += CLUSTER)
                    tma_load_3d<CLUSTER>(ring.a(at.stage) + half * (A_BYTES / 2), matrix, full, k, m * TILE + half * (TILE / 2), part.expert);
            }
            __syncwarp();
            if (lane < boxes) tma_load_2d(ring.b(at.stage) + lane * BOX * 128, gated, full, k, part.first + lane * BOX);
        }
    }
    /// Columns 16 warp .. of both halves of this warpgroup's 128, of 16 choices.
    __device__ __forceinline__ void stage(u32 to, const float* low, const float* high) const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        u32 at = to + lane % 8 * (ROW_BYTES + 16) + lane / 16 * 128 + warp * 32 + lane / 8 % 2 * 16;
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            store_transposed_x4(at, pack_bf16(low[i], low[i + 1]), pack_bf16(low[i + 2], low[i + 3]), pack_bf16(high[i], high[i + 1]),
                                pack_bf16(high[i + 2], high[i + 3]));
            at += 8 * (ROW_BYTES + 16);
        }
    }
    static constexpr bool IS_SCATTERED = true;
    __device__ __forceinline__ bf16* output(u32 slot, int column) const { return y + (u64)slot * outputs + column; }
};

/// Where a part's outputs go, a lane every 32nd choice: known before the products, so that no store waits for it.
template <bool IS_SCATTERED> struct Targets {
    u32 at[(SHARE + 31) / 32];
    __device__ __forceinline__ Targets(const Plan& plan, const Part& part) {
#pragma unroll
        for (int i = 0; i < (SHARE + 31) / 32; i++) {
            u32 place = i * 32 + threadIdx.x % 32;
            at[i] = place < part.count ? IS_SCATTERED ? plan.slots[part.first + place] : part.first + place : 0;
        }
    }
    /// Of choice `base + more`, `more` < 32 - base % 32.
    __device__ __forceinline__ u32 of(int base, int more) const { return __shfl_sync(0xffffffffu, at[base / 32], base % 32 + more); }
};

/// A warpgroup's results through two buffers in shared memory, so that each choice's columns go out together. The stores
/// themselves run on while the next tile is multiplied. (A bulk copy for each choice was measured: 45 cycles each, 18,000 a
/// tile.) `buffer` alternates over all chunks of the kernel: who passes a chunk's barrier is done with the one before.
template <typename Job>
__device__ __forceinline__ void write_out(const Job& job, const float (&d)[2][WGMMA_REGISTERS], u8* staging, int& buffer, const Part& part,
                                          const Targets<Job::IS_SCATTERED>& targets, int column, int id) {
    constexpr int STRIDE = Job::ROW_BYTES + 16, PER = Job::CHUNK / 16, PIECES = Job::ROW_BYTES / 16, TURNS = Job::CHUNK * PIECES / 128;
    int thread = threadIdx.x % 128, piece = thread % PIECES;
    bool inside = column + piece * 8 < job.outputs;
    bf16* to[TURNS] = {};
#pragma unroll
    for (int i = 0; i < SHARE / 16; i++) {
        if (i * 16 >= part.n) break;
        u8* at = staging + buffer * Job::CHUNK * STRIDE;
        if (i % PER == 0) {
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                int base = i * 16 + turn * (128 / PIECES), more = thread / PIECES;
                if (base >= SHARE) continue;
                u32 target = targets.of(base, more);
                to[turn] = inside && base + more < part.count ? job.output(target, column + piece * 8) : nullptr;
            }
        }
        job.stage(smem(at) + i % PER * 16 * STRIDE, d[0] + 8 * i, d[1] + 8 * i);
        if (i % PER == PER - 1 || (i + 1) * 16 >= part.n) {
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
    u32 rank = cluster_rank(), cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    if (threadIdx.x == 0) {
        tma_prefetch_map(job.matrix);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full(i), Job::FULL_ARRIVALS);
            barrier_init(ring.empty(i), WARPS);
        }
        barrier_init_fence();
    }
    cluster_meet();
    wait_for_kernels_before();
    let_next_kernel_start();
    int across = (job.outputs + Job::COLUMNS - 1) / Job::COLUMNS, items = job.plan.counts[1] * across;
    Place at;
    // The next tile is read a tile ahead.
    auto tile_of = [&](int item) { return item < items ? job.plan.tiles[item / across] : make_uint4(0, 0, 0, 0); };
    uint4 tile = tile_of(cluster), next;
    if (warpgroup == 0) {
        registers_less<88>();
#pragma unroll 1
        for (int item = cluster; item < items; item += clusters, tile = next) {
            next = tile_of(item + clusters);
            job.fetch(ring, at, Part(tile, rank), item % across, rank);
        }
    } else {
        registers_more<208>();
        warpgroup -= 1;
        int buffer = 0;
        u8* staging = gemm_shared + STAGES * STAGE_BYTES + warpgroup * 2 * Job::CHUNK * (Job::ROW_BYTES + 16);
        float d[2][WGMMA_REGISTERS];
#pragma unroll 1
        for (int item = cluster; item < items; item += clusters, tile = next) {
            next = tile_of(item + clusters);
            Part part(tile, rank);
            Targets<Job::IS_SCATTERED> targets(job.plan, part);
            multiply_any<Job::IS_GATHERED>(part.n, d, ring, at, (job.inputs + 63) / 64, warpgroup);
            int column = item % across * Job::COLUMNS + warpgroup * (Job::COLUMNS / 2);
            write_out(job, d, staging, buffer, part, targets, column, 1 + warpgroup);
        }
    }
    __syncwarp();
    cluster_meet(); // the other block may still release stages here
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
    experts_gemm_gate_bf16(const __grid_constant__ TensorMap gate_up, const bf16* x, bf16* gated, const u32* counts, const uint4* tiles,
                           const u32* slots, int hidden, int width, int top_k) {
    grouped(GateJob{gate_up, x, gated, {counts, tiles, slots}, hidden, width, top_k});
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
    experts_gemm_down_bf16(const __grid_constant__ TensorMap down, const __grid_constant__ TensorMap gated, bf16* y, const u32* counts,
                           const uint4* tiles, const u32* slots, int hidden, int width) {
    grouped(DownJob{down, gated, y, {counts, tiles, slots}, width, hidden});
}
#endif
