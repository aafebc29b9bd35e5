// Op::Experts with FP8 (e4m3) weights for any number of rows: grouped products on wgmma, sm_90a.
//
// Definitions:
//   SCALE_BLOCKS  0: a scale for each weight row, and for each input row. 1: a scale for each 128 x 128 block of weights, and for
//                 each 128 inputs of an input row.
//   CLUSTER       1: reading the weights is the time; two blocks a multiprocessor, tile_rows = 64. 2: products are the time; two
//                 blocks share their weights, tile_rows = 256.
// Launches, in this order:
//   experts_plan's kernels (tile_rows, granule = 16)
//   quantise of x; the kernel behind it starts when the plan is made
//   experts_fp8_gate   gated[position, w] = silu(gate . x) * (up . x), bf16, positions in sorted order
//   quantise of gated, as many rows as the plan counted
//   experts_fp8_down   y[slot] = down gated[position], unweighted, bf16 [rows * top_k, hidden] by slot
//   and, if it sums, experts_combine_bf16_* over y; if not, y is the output.
//
// Both: grid = 2 * multiprocessors for CLUSTER 1, multiprocessors rounded down to an even number for 2; block 128 + 128 CLUSTER;
// dynamic shared memory SHARED_BYTES. hidden and width multiples of 16, of 128 for SCALE_BLOCKS.
// Weights are codes, a weight is code * scale:
//   SCALE_BLOCKS 0: gate_up scales [held, 2 width], down's [held, hidden]
//   SCALE_BLOCKS 1: [held, 2 width / 128, S(hidden)] and [held, hidden / 128, S(width)], S(inputs) = inputs / 128 rounded up to 4
// Inputs' scales as quantise.cu makes them: [rows], or [inputs / 128, rows rounded up to 4]; rows is the capacity of x, choices
// that of gated.
// Tensor maps: bytes, SWIZZLE_128B, element strides 1, no interleave, zeros outside; innermost first:
//   gate_up  dims {hidden, width, 2, held}, strides in bytes {hidden, width hidden, 2 width hidden}, box {128, 64, 2, 1}
//   down     dims {width, hidden, held}, strides {width, hidden width}, box {128, 128, 1}
//   gated    dims {width, rows * top_k}, strides {width}, box {128, 32} for CLUSTER 2, {128, 8} for 1
//
// Weights are operand A, 128 rows of each warpgroup that multiplies: 64 gate rows and their 64 up rows, so a lane holds both
// values of a column and the activation costs no exchange. Choices are operand B, in steps of 8. Warpgroup 0 fetches: weights by
// TMA (for CLUSTER 2 each block half for both), rows of x, which lie anywhere, and scales by cp.async. A stage is 128 inputs, a
// block of scales. The tensor cores keep fewer bits of a sum than f32 has, so a stage's sums are added to f32 ones (multiplied by
// both scales, if those are of blocks) before those of the next begin, while another warpgroup has the tensor cores. A sum runs
// along K in one order: bits of a row depend neither on CLUSTER nor on the rows beside it.
#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "dependent.cuh"
#include "experts_choices.cuh"
#include "hopper_fp8.cuh"

constexpr int GROUP = 128; // inputs of a stage, and sides of a block of scales
constexpr int CONSUMERS = CLUSTER;         // warpgroups that multiply
constexpr int TILE = 128 * CONSUMERS;      // weight rows of a cluster
constexpr int SHARE = 64 * CLUSTER;        // choices of a block
constexpr int STAGES = 4;
constexpr int A_BYTES = TILE * GROUP;
constexpr int STAGE_BYTES = A_BYTES + SHARE * GROUP;
constexpr int SCALE_BYTES = SCALE_BLOCKS ? SHARE * 4 : 0;
constexpr int STAGING_BYTES = 9216 * CONSUMERS;
constexpr int SCALES = STAGES * STAGE_BYTES + STAGING_BYTES;
constexpr int BARRIERS = SCALES + STAGES * SCALE_BYTES;
constexpr int THREADS = 128 + 128 * CONSUMERS;
constexpr int SHARED_BYTES = BARRIERS + STAGES * 16;
constexpr int BLOCKS_RESIDENT = CLUSTER == 1 ? 2 : 1; // on a multiprocessor
constexpr int WARPS = 4 * CONSUMERS * CLUSTER;        // that release a stage: the consumers of all blocks
constexpr int PRODUCER = 56, CONSUMER = CLUSTER == 1 ? 200 : 224; // registers of a thread
constexpr int SUMS = SHARE / 2;                       // of a lane, for 64 weight rows

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
    __device__ __forceinline__ u32 scales(u32 stage) const { return base + SCALES + stage * SCALE_BYTES; }
    __device__ __forceinline__ u32 full(u32 stage) const { return base + BARRIERS + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return base + BARRIERS + (STAGES + stage) * 8; }
    /// One lane of each warp for each block, since all fetch for all.
    __device__ __forceinline__ void release(u32 stage) const {
        __syncwarp();
        if (threadIdx.x % 32 < CLUSTER) barrier_arrive_there(cluster_address(empty(stage), threadIdx.x % 32));
    }
};

__device__ __forceinline__ constexpr int groups_of(int inputs) { return (inputs + GROUP - 1) / GROUP; }
/// From the scales of a row of weight blocks to the next.
__device__ __forceinline__ constexpr int scale_stride(int inputs) { return (groups_of(inputs) + 3) / 4 * 4; }
/// From the inputs' scales of a group to those of the next.
__device__ __forceinline__ constexpr int group_stride(int rows) { return (rows + 3) / 4 * 4; }

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

__device__ __forceinline__ void cp_async4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ float2 load_shared2(u32 from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from));
    return x;
}

/// Where a warpgroup's scales of weight blocks are: of its first and its second 64 rows, one for each stage.
struct BlockScales {
    const float* of[2];
};

/// The compiler moves nothing of it across: moved accumulators would make wgmmas wait for each other.
template <int N> __device__ __forceinline__ void keep_in_place(float (&part)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) asm volatile("" : "+f"(part[i])::"memory");
}

/// sum += the products of 128 inputs, N choices from `choice` on, times `weight` and the choices' scales.
template <int N>
__device__ __forceinline__ void product(float* sum, u64 a, u64 b, float weight, u32 scales) {
    float part[N / 2];
    keep_in_place<N>(part);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) WgmmaCodes<N>::run(part, a + 2 * k, b + 2 * k, k);
    wgmma_commit();
    keep_in_place<N>(part);
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#if SCALE_BLOCKS
        float2 scale = load_shared2(scales + j * 32 + threadIdx.x % 4 * 8);
        scale.x *= weight, scale.y *= weight;
        sum[4 * j] = fmaf(part[4 * j], scale.x, sum[4 * j]);
        sum[4 * j + 1] = fmaf(part[4 * j + 1], scale.y, sum[4 * j + 1]);
        sum[4 * j + 2] = fmaf(part[4 * j + 2], scale.x, sum[4 * j + 2]);
        sum[4 * j + 3] = fmaf(part[4 * j + 3], scale.y, sum[4 * j + 3]);
#else
#pragma unroll
        for (int i = 0; i < 4; i++) sum[4 * j + i] += part[4 * j + i];
#endif
    }
}

/// d = A B over `stages`; leaves `at` behind them.
template <int N, bool IS_GATHERED>
__device__ __forceinline__ void multiply(float (&d)[2][SUMS], const Ring& ring, Place& at, int stages, int warpgroup,
                                         const BlockScales& scales) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[0][i] = d[1][i] = 0.0f;
    float weight[2] = {1.0f, 1.0f}, next[2] = {1.0f, 1.0f};
#if SCALE_BLOCKS
    next[0] = scales.of[0][0], next[1] = scales.of[1][0];
#endif
#pragma unroll 1
    for (int stage = 0; stage < stages; stage++) {
        weight[0] = next[0], weight[1] = next[1];
#if SCALE_BLOCKS
        int ahead = min(stage + 1, stages - 1);
        next[0] = scales.of[0][ahead], next[1] = scales.of[1][ahead];
#endif
        barrier_wait(ring.full(at.stage), at.phase);
        if (IS_GATHERED) proxy_fence(); // cp.async is not the copy engine
        u64 a = wgmma_tile(ring.a(at.stage) + warpgroup * (128 * GROUP)), b = wgmma_tile(ring.b(at.stage));
        product<N>(d[0], a, b, weight[0], ring.scales(at.stage));
        product<N>(d[1], a + (64 * GROUP >> 4), b, weight[1], ring.scales(at.stage));
        ring.release(at.stage);
        at.next();
    }
}

template <bool IS_GATHERED>
__device__ __forceinline__ void multiply_any(int n, float (&d)[2][SUMS], const Ring& ring, Place& at, int stages, int warpgroup,
                                             const BlockScales& scales) {
    switch (n / 8) {
#define CASE(N) \
    case N: multiply<8 * N, IS_GATHERED>(d, ring, at, stages, warpgroup, scales); break;
        default: // nobody's part: the other block still needs this one's half of A
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#if CLUSTER == 2
        CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16)
#endif
#undef CASE
    }
}

/// Sends for the scale of this thread's choice in a stage, if it has one.
__device__ __forceinline__ void fetch_scale(const float* scales, int row, int stride, int group, u32 to) {
    if (row >= 0) cp_async4(to + threadIdx.x * 4, scales + (u64)group * stride + row);
}

struct GateJob {
    const TensorMap& matrix;
    const u8* x;
    const float* x_scales;
    const float* scales;
    bf16* gated;
    Plan plan;
    int inputs, outputs, rows, top_k;
    static constexpr int COLUMNS = TILE / 2, CHUNK = 32, ROW_BYTES = 128;
    static constexpr int FULL_ARRIVALS = 129;
    static constexpr bool IS_GATHERED = true, IS_SCATTERED = false;

    /// By one thread: a stage's weights, and what the stage waits for.
    __device__ __forceinline__ void fetch_weights(const Ring& ring, u32 stage, const Part& part, int m, int k, u32 rank) const {
        barrier_expect(ring.full(stage), A_BYTES);
        for (int half = rank; half < CONSUMERS; half += CLUSTER)
            tma_load_4d<CLUSTER>(ring.a(stage) + half * (128 * GROUP), matrix, ring.full(stage), k, m * COLUMNS + half * 64, 0, part.expert);
    }
    __device__ __forceinline__ int row_of(const Part& part, int place) const {
        return place < part.count ? (int)(plan.slots[part.first + place] / top_k) : -1;
    }
    /// 128 threads: an eighth of a row's 128 bytes each, 16 rows at a time.
    __device__ __forceinline__ void fetch(const Ring& ring, Place& at, const Part& part, int m, u32 rank, int ahead) const {
        int thread = threadIdx.x, chunk = thread % 8;
        int from_rows[SHARE / 16], scaled = thread < SHARE ? row_of(part, thread) : -1;
#pragma unroll
        for (int i = 0; i < SHARE / 16; i++) from_rows[i] = row_of(part, thread / 8 + 16 * i);
        u32 to = thread / 8 * 128 + ((chunk ^ thread / 8 % 8) << 4);
#pragma unroll 1
        for (int k = 0; k < inputs; k += GROUP, at.next()) {
            barrier_wait(ring.empty(at.stage), at.phase ^ 1);
            if (thread == 0 && k >= ahead * GROUP) fetch_weights(ring, at.stage, part, m, k, rank);
            const u8* from = x + k + chunk * 16;
            bool inside = k + chunk * 16 < inputs;
            u32 b = ring.b(at.stage) + to;
#pragma unroll
            for (int i = 0; i < SHARE / 16; i++) {
                if (i * 16 >= part.n) break;
                bool valid = inside && from_rows[i] >= 0;
                const u8* row = valid ? from + (u64)from_rows[i] * inputs : x;
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(b + i * 2048), "l"(row), "r"(valid ? 16 : 0) : "memory");
            }
            if (SCALE_BLOCKS) fetch_scale(x_scales, scaled, group_stride(rows), k / GROUP, ring.scales(at.stage));
            barrier_arrive_after_cp_async(ring.full(at.stage));
        }
    }
    __device__ __forceinline__ BlockScales block_scales(const Part& part, int column) const {
        const float* gate = scales + ((u64)part.expert * 2 * outputs + column) / GROUP * scale_stride(inputs);
        return {gate, gate + (u64)(outputs / GROUP) * scale_stride(inputs)};
    }
    /// Scales of the lane's rows: gate and up of columns lane / 4 and 8 more.
    __device__ __forceinline__ float row_scale(const Part& part, int column, int half, int more) const {
        column += threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * more;
        return column < outputs ? scales[((u64)part.expert * 2 + half) * outputs + column] : 0.0f;
    }
    __device__ __forceinline__ float choice_scale(u32 position) const { return x_scales[plan.slots[position] / top_k]; }

    /// Columns 16 warp .. of this warpgroup's 64, of 16 choices.
    __device__ __forceinline__ void stage(u32 to, const float* gate, const float* up) const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        u32 at = to + (lane / 16 * 8 + lane % 8) * (ROW_BYTES + 16) + warp * 32 + lane / 8 % 2 * 16;
        auto pair = [&](int i) { return pack_bf16(silu(gate[i]) * up[i], silu(gate[i + 1]) * up[i + 1]); };
        store_transposed_x4(at, pair(0), pair(2), pair(4), pair(6));
    }
    __device__ __forceinline__ bf16* output(u32 position, int column) const { return gated + (u64)position * outputs + column; }
};

struct DownJob {
    const TensorMap& matrix;
    const TensorMap& gated;
    const float* gated_scales;
    const float* scales;
    bf16* y;
    Plan plan;
    int inputs, outputs, choices;
    static constexpr int COLUMNS = TILE, CHUNK = 16, ROW_BYTES = 256;
    static constexpr int FULL_ARRIVALS = SCALE_BLOCKS ? 129 : 1;
    static constexpr int BOX = CLUSTER == 2 ? 32 : 8; // rows of gated that one instruction fetches
    static constexpr bool IS_GATHERED = false, IS_SCATTERED = true;

    __device__ __forceinline__ static int boxes(const Part& part) { return (part.n + BOX - 1) / BOX; }
    __device__ __forceinline__ void fetch_weights(const Ring& ring, u32 stage, const Part& part, int m, int k, u32 rank) const {
        barrier_expect(ring.full(stage), A_BYTES + boxes(part) * BOX * GROUP);
        for (int half = rank; half < CONSUMERS; half += CLUSTER)
            tma_load_3d<CLUSTER>(ring.a(stage) + half * (128 * GROUP), matrix, ring.full(stage), k, m * TILE + half * 128, part.expert);
    }
    /// One warp: every lane may fetch rows of gated. Those behind the part's come along and are nobody's. Scales: all warps.
    __device__ __forceinline__ void fetch(const Ring& ring, Place& at, const Part& part, int m, u32 rank, int ahead) const {
        int thread = threadIdx.x;
        if (!SCALE_BLOCKS && thread >= 32) return;
        int row = thread < part.count ? (int)part.first + thread : -1;
#pragma unroll 1
        for (int k = 0; k < inputs; k += GROUP, at.next()) {
            u32 full = ring.full(at.stage);
            barrier_wait(ring.empty(at.stage), at.phase ^ 1);
            if (thread == 0 && k >= ahead * GROUP) fetch_weights(ring, at.stage, part, m, k, rank);
            __syncwarp();
            if (thread < boxes(part)) tma_load_2d(ring.b(at.stage) + thread * BOX * GROUP, gated, full, k, part.first + thread * BOX);
            if (SCALE_BLOCKS) {
                fetch_scale(gated_scales, row, group_stride(choices), k / GROUP, ring.scales(at.stage));
                barrier_arrive_after_cp_async(full);
            }
        }
    }
    __device__ __forceinline__ BlockScales block_scales(const Part& part, int row) const {
        const float* of = scales + ((u64)part.expert * groups_of(outputs) + min(row, outputs - 1) / GROUP) * scale_stride(inputs);
        return {of, of};
    }
    __device__ __forceinline__ float row_scale(const Part& part, int row, int half, int more) const {
        row += half * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * more;
        return row < outputs ? scales[(u64)part.expert * outputs + row] : 0.0f;
    }
    __device__ __forceinline__ float choice_scale(u32 position) const { return gated_scales[position]; }

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
    __device__ __forceinline__ bf16* output(u32 slot, int column) const { return y + (u64)slot * outputs + column; }
};

/// What is known before the products, so that no store waits for it: where a part's outputs go, a lane every 32nd choice, and
/// scales that are not those of blocks.
template <typename Job> struct Targets {
    static constexpr int EACH = (SHARE + 31) / 32;
    u32 at[EACH];
#if !SCALE_BLOCKS
    float choice[EACH], row[2][2];
#endif
    __device__ __forceinline__ Targets(const Job& job, const Part& part, int column) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            u32 place = i * 32 + threadIdx.x % 32, position = part.first + place;
            bool inside = place < part.count;
            at[i] = inside ? Job::IS_SCATTERED ? job.plan.slots[position] : position : 0;
#if !SCALE_BLOCKS
            choice[i] = inside ? job.choice_scale(position) : 0.0f;
#endif
        }
#if !SCALE_BLOCKS
#pragma unroll
        for (int i = 0; i < 4; i++) row[i / 2][i % 2] = job.row_scale(part, column, i / 2, i % 2);
#endif
    }
    /// Of choice `base + more`, `more` < 32 - base % 32.
    __device__ __forceinline__ u32 of(int base, int more) const { return __shfl_sync(0xffffffffu, at[base / 32], base % 32 + more); }

    /// What 16 choices from `base` on come to.
    __device__ __forceinline__ void scaled(int base, const float (&d)[2][SUMS], float (&y)[2][8]) const {
#pragma unroll
        for (int i = 0; i < 8; i++) {
#if SCALE_BLOCKS
            y[0][i] = d[0][base / 2 + i], y[1][i] = d[1][base / 2 + i];
#else
            float x = __shfl_sync(0xffffffffu, choice[base / 32], base % 32 + i / 4 * 8 + i % 2 + threadIdx.x % 4 * 2);
            y[0][i] = d[0][base / 2 + i] * (row[0][i / 2 % 2] * x), y[1][i] = d[1][base / 2 + i] * (row[1][i / 2 % 2] * x);
#endif
        }
    }
};

/// A warpgroup's results through two buffers in shared memory, so that each choice's columns go out together; see
/// experts_gemm.cu.
template <typename Job>
__device__ __forceinline__ void write_out(const Job& job, const float (&d)[2][SUMS], u8* staging, int& buffer, const Part& part,
                                          const Targets<Job>& targets, int column, int id) {
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
        float y[2][8];
        targets.scaled(i * 16, d, y);
        job.stage(smem(at) + i % PER * 16 * STRIDE, y[0], y[1]);
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
    // The kernels before, right in front of the last one, waited for the plan; not this one, so it is read past the L1.
    int across = (job.outputs + Job::COLUMNS - 1) / Job::COLUMNS, items = __ldcg(&job.plan.counts[1]) * across, stages = groups_of(job.inputs);
    Place at;
    // The next tile is read a tile ahead.
    auto tile_of = [&](int item) { return item < items ? __ldcg(&job.plan.tiles[item / across]) : make_uint4(0, 0, 0, 0); };
    uint4 tile = tile_of(cluster), next;
    if (warpgroup == 0) {
        registers_less<PRODUCER>();
        // The first weights need nothing of the kernel in front.
        int ahead = cluster < items ? min(STAGES, stages) : 0;
        if (threadIdx.x == 0)
            for (int i = 0; i < ahead; i++) job.fetch_weights(ring, i, Part(tile, rank), cluster % across, i * GROUP, rank);
        wait_for_kernels_before();
        let_next_kernel_start();
#pragma unroll 1
        for (int item = cluster; item < items; item += clusters, tile = next, ahead = 0) {
            next = tile_of(item + clusters);
            job.fetch(ring, at, Part(tile, rank), item % across, rank, ahead);
        }
    } else {
        registers_more<CONSUMER>();
        warpgroup -= 1;
        int buffer = 0;
        u8* staging = gemm_shared + STAGES * STAGE_BYTES + warpgroup * 2 * Job::CHUNK * (Job::ROW_BYTES + 16);
        float d[2][SUMS];
        wait_for_kernels_before();
        let_next_kernel_start();
#pragma unroll 1
        for (int item = cluster; item < items; item += clusters, tile = next) {
            next = tile_of(item + clusters);
            Part part(tile, rank);
            int column = item % across * Job::COLUMNS + warpgroup * (Job::COLUMNS / CONSUMERS);
            Targets<Job> targets(job, part, column);
            multiply_any<Job::IS_GATHERED>(part.n, d, ring, at, stages, warpgroup, job.block_scales(part, column));
            write_out(job, d, staging, buffer, part, targets, column, 1 + warpgroup);
        }
    }
    __syncwarp();
    cluster_meet(); // the other block may still release stages here
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS_RESIDENT)
    experts_fp8_gate(const __grid_constant__ TensorMap gate_up, const u8* x, const float* x_scales, const float* scales, bf16* gated,
                          const u32* counts, const uint4* tiles, const u32* slots, int hidden, int width, int rows, int top_k) {
    grouped(GateJob{gate_up, x, x_scales, scales, gated, {counts, tiles, slots}, hidden, width, rows, top_k});
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS_RESIDENT)
    experts_fp8_down(const __grid_constant__ TensorMap down, const __grid_constant__ TensorMap gated, const float* gated_scales,
                          const float* scales, bf16* y, const u32* counts, const uint4* tiles, const u32* slots, int hidden, int width, int choices) {
    grouped(DownJob{down, gated, gated_scales, scales, y, {counts, tiles, slots}, width, hidden, choices});
}
#endif
