// linear_gated: out = silu(x Wg^T (+ bias)) * (x Wu^T (+ bias)) for many rows, bound by arithmetic: sm_90a, bf16, f32 sums.
//
// W is gate rows, then up rows. A tile is 256 rows of x by 128 columns of out, shared by a cluster of two blocks: each has half
// of the rows, and fetches half of the weights for both. Rows of x are operand A of wgmma; operand B is 256 rows of W, 8 of
// gate and 8 of up in turn, so that a lane has both values of a column and the activation costs no exchange.
//
// One warp fetches by TMA, 64 inputs a stage; two warpgroups multiply 64 rows each and write them. The second follows
// SKEW stages behind the first, so that one's activation and stores run beside the other's products. Blocks stay: tiles go
// round the clusters in order, GROUP tiles of rows beside each other before the next columns, so that what is in
// flight at a time stays in the L2 cache. What that is worth on an H200: docs/performance/gpu-products.md.
//
// A sum runs along the inputs in one order, as in cuBLASLt's kernels without reductions, and gate and up are rounded to bf16
// as between two kernels (before and behind the bias): outputs have the bits of a product followed by gated_silu.
//
// Launch contract. inputs is a multiple of 8 and at least 256 (the skew is less than a tile's stages), outputs one of 16; W, x,
// out start on 16 bytes. grid.x = multiprocessors of the device rounded down to a multiple of 2; block.x = 384; dynamic shared
// memory 229440 bytes. Tensor maps: bf16, SWIZZLE_128B, zeros outside; innermost first:
//   weight  dims {inputs, 8, 2, outputs / 16, 1}, strides in bytes {2 inputs, outputs inputs, 16 inputs, any}, box {64, 8, 2, 8, 1}
//   x       dims {inputs, rows at capacity}, strides {2 inputs}, box {64, 128}
// `extent` is that of x and of out. Tiles behind the last real row are not computed if there is one lane.
#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "rows.cuh"
#include "hopper.cuh"

constexpr u32 CLUSTER = 2, STAGES = 4, SKEW = 2, GROUP = 8;
/// Rows and columns of out that a block makes of a tile.
constexpr u32 HIGH = 128, WIDE = 128;
constexpr u32 A_BYTES = HIGH * 128, B_BYTES = 2 * WIDE * 128, STAGE_BYTES = A_BYTES + B_BYTES;
/// A warp's outputs pass through this: 16 rows.
constexpr u32 STAGING_BYTES = 16 * WIDE * 2;
constexpr u32 STAGING = STAGES * STAGE_BYTES, BARRIERS = STAGING + 8 * STAGING_BYTES;

extern __shared__ __align__(1024) u8 gated_shared[];

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
    __device__ __forceinline__ u32 b(u32 stage) const { return a(stage) + A_BYTES; }
    __device__ __forceinline__ u32 full(u32 stage) const { return base + BARRIERS + 8 * stage; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return base + BARRIERS + 8 * (STAGES + stage); }
    /// This warp is done with a stage: both blocks write to it.
    __device__ __forceinline__ void release(u32 stage) const {
        if (threadIdx.x % 32 < CLUSTER) barrier_arrive_there(cluster_address(empty(stage), threadIdx.x % 32));
    }
};

/// Tiles of a block, in the order in which they are done.
struct Tiles {
    u32 downs, acrosses, rank;
    __device__ __forceinline__ u32 count() const { return downs * acrosses; }
    /// The first row and the first column of out.
    __device__ __forceinline__ uint2 at(u32 tile) const {
        u32 group = tile / (GROUP * acrosses), in = tile % (GROUP * acrosses), high = min(GROUP, downs - group * GROUP);
        return make_uint2(((group * GROUP + in % high) * CLUSTER + rank) * HIGH, in / high * WIDE);
    }
};

/// One thread asks for everything.
__device__ __forceinline__ void fetch(const Ring& ring, const TensorMap& weight, const TensorMap& x, const Tiles& tiles, u32 steps) {
    Place place;
    for (u32 tile = blockIdx.x / CLUSTER; tile < tiles.count(); tile += gridDim.x / CLUSTER) {
        uint2 at = tiles.at(tile);
#pragma unroll 1
        for (u32 step = 0; step < steps; step++, place.next()) {
            u32 full = ring.full(place.stage), half = tiles.rank * (B_BYTES / CLUSTER);
            barrier_wait(ring.empty(place.stage), place.phase ^ 1);
            barrier_expect(full, STAGE_BYTES);
            tma_load_2d(ring.a(place.stage), x, full, step * 64, at.x);
            tma_load_5d<CLUSTER>(ring.b(place.stage) + half, weight, full, step * 64, 0, 0, at.y / 8 + tiles.rank * (WIDE / 8 / CLUSTER), 0);
        }
    }
}

/// The second warpgroup waits for the first, which says once a tile that it is SKEW stages into it.
__device__ __forceinline__ void skew_wait() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ __forceinline__ void skew_go() { asm volatile("bar.arrive 1, 256;" ::: "memory"); }

/// d = a tile's sums: 64 rows of x by 256 of W.
__device__ __forceinline__ void multiply(float (&d)[128], const Ring& ring, Place& place, u32 steps, u32 warpgroup) {
    u32 before = 0;
    if (warpgroup == 1) skew_wait();
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        barrier_wait(ring.full(place.stage), place.phase);
        u64 a = wgmma_tile(ring.a(place.stage) + warpgroup * (A_BYTES / 2)), b = wgmma_tile(ring.b(place.stage));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) Wgmma<256>::run(d, a + 2 * k, b + 2 * k, step | k);
        wgmma_commit();
        wgmma_wait<1>();
        if (step) ring.release(before);
        if (warpgroup == 0 && step == SKEW - 1) skew_go();
        before = place.stage;
        place.next();
    }
    wgmma_wait<0>();
    ring.release(before);
}

/// What is left of a sum in bf16.
__device__ __forceinline__ float rounded(float x) { return to_float(to_bf16(x)); }

/// As gated_silu has it in rows.cu, from sums.
__device__ __forceinline__ float gated(float gate, float up) {
    gate = rounded(gate);
    return __fdividef(gate, 1.0f + __expf(-gate)) * rounded(up);
}

/// Sums with their biases: lane % 4 has two of each eight columns.
__device__ __forceinline__ void add_bias(float (&d)[128], const float* bias, u32 column, u32 columns) {
#pragma unroll
    for (u32 j = 0; j < 32; j++) {
        u32 at = column + j / 2 * 8 + threadIdx.x % 4 * 2;
        if (at >= columns) continue;
        float2 b = *reinterpret_cast<const float2*>(bias + j % 2 * columns + at);
#pragma unroll
        for (u32 i = 0; i < 4; i++) d[4 * j + i] = rounded(d[4 * j + i]) + (i % 2 ? b.y : b.x);
    }
}

/// A warp's 16 rows, through its own shared memory: rows of 16 pieces of 16 bytes, each in place piece ^ row % 8.
__device__ __forceinline__ void write_out(const float (&d)[128], u8* staged, bf16* out, uint2 at, u32 columns, const Extent& extent, u32 real) {
    u32 lane = threadIdx.x % 32, row = lane % 16;
    __syncwarp(); // the tile before was read
#pragma unroll
    for (u32 g = 0; g < WIDE / 8; g += 2) {
        // Columns 8 g .. of rows 0 .. 7 and 8 .. 15, then 8 more columns.
        u32 pairs[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float* low = d + 8 * (g + i / 2) + i % 2 * 2;
            pairs[i] = pack_bf16(gated(low[0], low[4]), gated(low[1], low[5]));
        }
        store_x4(smem(staged) + row * (2 * WIDE) + ((g + lane / 16) ^ row % 8) * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    __syncwarp();
    u32 piece = lane % 16, column = at.y + piece * 8;
#pragma unroll
    for (u32 i = 0; i < 16; i += 2) {
        u32 row = i + lane / 16;
        if (at.x + row >= real || column >= columns || (extent.lanes > 1 && !extent.has(at.x + row))) continue;
        uint4 y = *reinterpret_cast<const uint4*>(staged + row * (2 * WIDE) + (piece ^ row % 8) * 16);
        *reinterpret_cast<uint4*>(out + (u64)(at.x + row) * columns + column) = y;
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
    linear_gated(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const float* bias, bf16* out, u32 inputs,
                 u32 outputs, Extent extent) {
    Ring ring{smem(gated_shared)};
    let_next_start();
    if (threadIdx.x == 0) {
        tma_prefetch_map(weight);
        tma_prefetch_map(x);
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), 8 * CLUSTER);
        }
        barrier_init_fence();
    }
    cluster_meet();
    u32 real = extent.lanes == 1 ? min(extent.counts[0], extent.lane_rows) : extent.capacity(), columns = outputs / 2;
    u32 steps = (inputs + 63) / 64, warpgroup = threadIdx.x / 128;
    Tiles tiles{(real + CLUSTER * HIGH - 1) / (CLUSTER * HIGH), (columns + WIDE - 1) / WIDE, cluster_rank()};
    wait_for_inputs();
    if (warpgroup == 0) {
        registers_less<24>();
        if (threadIdx.x == 0) fetch(ring, weight, x, tiles, steps);
    } else {
        registers_more<240>();
        u32 warp = threadIdx.x / 32 - 4;
        u8* staged = gated_shared + STAGING + warp * STAGING_BYTES;
        Place place;
        float d[128];
        for (u32 tile = blockIdx.x / CLUSTER; tile < tiles.count(); tile += gridDim.x / CLUSTER) {
            uint2 at = tiles.at(tile);
            multiply(d, ring, place, steps, warpgroup - 1);
            if (bias) add_bias(d, bias, at.y, columns);
            write_out(d, staged, out, make_uint2(at.x + warp * 16, at.y), columns, extent, real);
        }
    }
    __syncwarp();
    cluster_meet(); // the other block may still release stages here
}
#endif
