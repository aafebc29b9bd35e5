// linear_rows_fp8: out = x W^T (+ bias) of e4m3 codes for 8 to 128 rows, where time is still the reading of W: sm_90a.
//
// Definitions make the kernel `linear_rows_fp8`:
//   CLUSTER  1, or 2: two blocks share a tile of outputs, fetch half of its weights each for both, and have half of the rows
//            each
//   EACH     rows of a block: 8, 16, 32 or 64; rows at capacity are at most CLUSTER * EACH
//   STAGES   of the ring
//   GROUPS   0: W has a scale for each output and x one for each row. 1: W has scales for blocks of 128 x 128 and x for 128
//            columns of a row
//   OUT      0: bf16. 1: f32 (logits). 2: adds to the f32 residual `out`. 3: W is gate rows, then up rows, and
//            out[j] = silu(gate_j) * up_j, bf16, [rows, outputs / 2]
//
// How. As linear_rows.cu, with stages of 128 inputs. The tensor cores keep fewer bits than f32 of what they add, so each
// stage is a sum of its own, added to the others in f32; scales of groups come in there.
//
// Launch contract. inputs is a multiple of 16; W, x, out start on 16 bytes. grid.x = CLUSTER * ceil(tiles of outputs: 64, OUT
// 3: 32 pairs); block.x = 160; dynamic shared memory 1024 + STAGES * (8192 + 128 * EACH), and if GROUPS
// 4 * ceil(inputs / 128) * (EACH + 2). Tensor maps: bytes, SWIZZLE_128B, zeros outside; innermost first:
//   weight  OUT 0 .. 2: dims {inputs, outputs, 1}, strides {inputs, any}, box {128, 64 / CLUSTER, 1}
//           OUT 3: dims {inputs, 8, 2, outputs / 16, 1}, strides {inputs, outputs / 2 inputs, 8 inputs, any},
//           box {128, 8, 2, 4 / CLUSTER, 1}
//   x       dims {inputs, rows at capacity}, strides {inputs}, box {128, EACH}
// `extent` is that of x and of out.
#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "rows.cuh"
#include "hopper.cuh"

constexpr int TILE = 64, A_BYTES = TILE * 128, B_BYTES = EACH * 128, STAGE_BYTES = A_BYTES + B_BYTES;
/// Outputs of a tile, as they are stored.
constexpr int COLUMNS = OUT == 3 ? TILE / 2 : TILE;
/// Floats from one row of a tile's outputs to the next in shared memory: 8 rows of 4 lie in different banks.
constexpr int STRIDE = COLUMNS + 4;
constexpr int SUMS = EACH / 2;
static_assert(EACH * STRIDE * 4 <= STAGES * STAGE_BYTES, "outputs pass through the ring's memory");

#if OUT == 0 || OUT == 3
typedef bf16 Y;
#else
typedef float Y;
#endif

struct Scales {
    const float* weight; // [outputs], or [blocks of outputs, weight_stride]
    const float* x;      // [rows], or [groups, x_stride]
    u32 weight_stride;
    u32 x_stride;
};

/// d[64, EACH] = a[64, 32] b[EACH, 32]^T of codes; `add` = 0 starts from zero. Places of d as in Wgmma.
#define PRODUCT_OF(N, REGS, A, B, ADD, ...)                                                                                \
    __device__ __forceinline__ void product(float (&d)[N / 2], u64 a, u64 b, int add) {                                    \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"                                                      \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGS "}, " A ", " B ", p, 1, 1;\n}"      \
                     : __VA_ARGS__                                                                                         \
                     : "l"(a), "l"(b), "r"(add));                                                                          \
    }
#if EACH == 8
PRODUCT_OF(8, WGMMA_S1, "%4", "%5", "%6", WGMMA_O1)
#elif EACH == 16
PRODUCT_OF(16, WGMMA_S2, "%8", "%9", "%10", WGMMA_O2)
#elif EACH == 32
PRODUCT_OF(32, WGMMA_S4, "%16", "%17", "%18", WGMMA_O4)
#else
PRODUCT_OF(64, WGMMA_S8, "%32", "%33", "%34", WGMMA_O8)
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

/// One thread asks for everything.
__device__ __forceinline__ void fetch(const Ring& ring, const TensorMap& weight, const TensorMap& x, u32 tile, u32 rank, u32 steps) {
    auto ask_weights = [&](u32 stage, u32 step) {
        barrier_expect(ring.full(stage), STAGE_BYTES);
        u32 to = ring.a(stage) + rank * (A_BYTES / CLUSTER);
        if (OUT == 3)
            tma_load_5d<CLUSTER>(to, weight, ring.full(stage), step * 128, 0, 0, tile * 4 + rank * (4 / CLUSTER), 0);
        else
            tma_load_3d<CLUSTER>(to, weight, ring.full(stage), step * 128, tile * TILE + rank * (TILE / CLUSTER), 0);
    };
    auto ask_rows = [&](u32 stage, u32 step) { tma_load_2d(ring.b(stage), x, ring.full(stage), step * 128, rank * EACH); };
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

/// sums = W x^T of a tile, 64 outputs by EACH rows. `of_x` is [groups, EACH], `of_w` [groups, 2]: of the tile's first outputs of
/// a lane and of its second ones.
__device__ __forceinline__ void multiply(float (&sums)[SUMS], const Ring& ring, u32 steps, const float* of_x, const float2* of_w) {
    u32 stage = 0, phase = 0, lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        barrier_wait(ring.full(stage), phase);
        u64 a = wgmma_tile(ring.a(stage)), b = wgmma_tile(ring.b(stage));
        float d[SUMS];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) product(d, a + 2 * k, b + 2 * k, k);
        wgmma_commit();
        wgmma_wait<0>();
        ring.release(stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
        if (GROUPS) {
            float2 w = of_w[step];
#pragma unroll
            for (int j = 0; j < EACH / 8; j++) {
                float2 s = *reinterpret_cast<const float2*>(of_x + step * EACH + 8 * j + lane % 4 * 2);
                sums[4 * j] = fmaf(d[4 * j], s.x * w.x, sums[4 * j]);
                sums[4 * j + 1] = fmaf(d[4 * j + 1], s.y * w.x, sums[4 * j + 1]);
                sums[4 * j + 2] = fmaf(d[4 * j + 2], s.x * w.y, sums[4 * j + 2]);
                sums[4 * j + 3] = fmaf(d[4 * j + 3], s.y * w.y, sums[4 * j + 3]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums[i] += d[i];
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(160)
    linear_rows_fp8(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, Scales scales, const float* bias,
                    Y* out, u32 inputs, u32 outputs, Extent extent) {
    extern __shared__ u8 shared[];
    __shared__ u64 barriers[2 * STAGES];
    Ring ring{(smem(shared) + 1023) & ~1023u, smem(barriers)};
    u8* begin = shared + (ring.start - smem(shared));
    u32 rank = CLUSTER > 1 ? cluster_rank() : 0, tile = blockIdx.x / CLUSTER, steps = (inputs + 127) / 128;
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
        auto is_real = [&](u32 row) { return row < extent.capacity() && extent.has(row); };
        float* of_x = reinterpret_cast<float*>(begin + STAGES * STAGE_BYTES);
        float2* of_w = reinterpret_cast<float2*>(of_x + steps * EACH);
        if (GROUPS) {
            const float* low = scales.weight + (u64)(tile * COLUMNS / 128) * scales.weight_stride;
            const float* high = OUT == 3 ? scales.weight + (u64)((tile * COLUMNS + columns) / 128) * scales.weight_stride : low;
            for (u32 i = threadIdx.x; i < steps; i += 128) of_w[i] = make_float2(low[i], high[i]);
        }
        // Where the first 8 of this lane's outputs are, and 8 behind: the same pairs' up if OUT is 3.
        u32 column = warp * (COLUMNS / 4) + lane / 4;
        u32 first = tile * COLUMNS + column, second = OUT == 3 ? first + columns : first + 8;
        bool has_first = first < columns, has_second = second < outputs;
        float low = bias && has_first ? bias[first] : 0.0f, high = bias && has_second ? bias[second] : 0.0f;
        float of_low = !GROUPS && has_first ? scales.weight[first] : 1.0f;
        float of_high = !GROUPS && has_second ? scales.weight[second] : 1.0f;
        wait_for_inputs();
        if (GROUPS) {
            for (u32 i = threadIdx.x; i < steps * EACH; i += 128) {
                u32 row = rank * EACH + i % EACH;
                of_x[i] = is_real(row) ? scales.x[(u64)(i / EACH) * scales.x_stride + row] : 0.0f;
            }
            named_barrier<128>(1);
        }
        float of_rows[EACH / 4];
        if (!GROUPS) {
#pragma unroll
            for (int j = 0; j < EACH / 4; j++) {
                u32 row = rank * EACH + j / 2 * 8 + lane % 4 * 2 + j % 2;
                of_rows[j] = is_real(row) ? scales.x[row] : 0.0f;
            }
        }
        float sums[SUMS] = {};
        multiply(sums, ring, steps, of_x, of_w);
        float* staged = reinterpret_cast<float*>(begin);
        named_barrier<128>(1); // all warps are done with the ring
#pragma unroll
        for (int j = 0; j < EACH / 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float* to = staged + (8 * j + lane % 4 * 2 + i) * STRIDE + column;
                float of_row = GROUPS ? 1.0f : of_rows[2 * j + i];
                float a = fmaf(sums[4 * j + i], of_row * of_low, low), b = fmaf(sums[4 * j + 2 + i], of_row * of_high, high);
                if (OUT == 3) to[0] = __fdividef(a, 1.0f + __expf(-a)) * b;
                else to[0] = a, to[8] = b;
            }
        named_barrier<128>(1);
        constexpr int CHUNKS = COLUMNS / CHUNK;
        for (u32 i = threadIdx.x; i < EACH * CHUNKS; i += 128) {
            u32 row = rank * EACH + i / CHUNKS, at = tile * COLUMNS + i % CHUNKS * CHUNK;
            if (!is_real(row) || at >= columns) continue;
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
