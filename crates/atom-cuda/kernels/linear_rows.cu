// linear_rows: out = x W^T (+ bias) for 1 to 128 rows, where time is still the reading of W: sm_90a, bf16, f32 sums.
//
// Definitions make the kernel `linear_rows`:
//   CLUSTER  1, or 2: two blocks share a tile of outputs, fetch half of its weights each for both, and have half of the rows
//            each. That puts twice as many multiprocessors on a matrix that has few tiles.
//   PARTS    1, or (CLUSTER 1, OUT 0 .. 2) 2: two blocks share a tile, and each sums half of the inputs. They finish half of
//            the rows each, first part + second part.
//   EACH     rows of a block, a multiple of 8 up to 64; rows at capacity are at most CLUSTER * EACH
//   STAGES   of the ring
//   OUT      0: bf16. 1: f32 (logits). 2: adds to the f32 residual `out`. 3: W is gate rows, then up rows, and
//            out[j] = silu(gate_j) * up_j, bf16, [rows, outputs / 2]
//
// Weights are operand A of wgmma, 64 rows of them a tile; rows of x are operand B. The copy engine brings both, 64 inputs a
// stage. Stages of weights are asked for before the wait for the kernel in front: they stream while that one still works.
//
// A norm between two of these products is no kernel (`Norms`): the one in front adds to the residual, writes the sum times
// the norm's weights in bf16, which is x of the one behind, and sums of squares; the one behind multiplies by 1 / rms. All
// that an end needs is read before the loop, while weights and x are still on their way.
//
// Where PARTS is 1 a sum runs along the inputs in one order whatever the tile, as in cuBLASLt's kernels without reductions,
// and what two kernels would round between them is rounded here (products, and products with their bias, to bf16), so
// outputs have the bits that those kernels and the ones behind them give, if no norm is shared.
//
// Launch contract. inputs is a multiple of 8; W, x, out start on 16 bytes. grid.x = CLUSTER * PARTS * ceil(tiles of outputs:
// 64, OUT 3: 32 pairs); block.x = 160; dynamic shared memory 1024 + STAGES * (8192 + 128 * EACH). Tensor maps: bf16,
// SWIZZLE_128B, zeros outside; innermost first:
//   weight  OUT 0 .. 2: dims {inputs, outputs, 1}, strides in bytes {2 inputs, any}, box {64, 64 / CLUSTER, 1}
//           OUT 3: dims {inputs, 8, 2, outputs / 16, 1}, strides {2 inputs, outputs inputs, 16 inputs, any},
//           box {64, 8, 2, 4 / CLUSTER, 1}
//   x       dims {inputs, rows at capacity}, strides {2 inputs}, box {64, EACH}
// `extent` is that of x and of out.
#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "rows.cuh"
#include "hopper.cuh"

constexpr int TILE = 64, WORKERS = 128, A_BYTES = TILE * 128, B_BYTES = EACH * 128, STAGE_BYTES = A_BYTES + B_BYTES;
/// Outputs of a tile, as they are stored.
constexpr int COLUMNS = OUT == 3 ? TILE / 2 : TILE;
/// Floats from one row of a tile's outputs to the next in shared memory: 8 rows of 4 lie in different banks.
constexpr int STRIDE = COLUMNS + 4;
static_assert(EACH * STRIDE * 4 <= STAGES * STAGE_BYTES, "outputs pass through the ring's memory");
static_assert(PARTS == 1 || (CLUSTER == 1 && OUT != 3), "parts are of a sum that one block would have");

/// Rows that a block finishes, 8 columns a thread at a time.
constexpr int FINISHED = EACH / PARTS, CHUNKS = COLUMNS / CHUNK, TURNS = (FINISHED * CHUNKS + WORKERS - 1) / WORKERS;
static_assert(WORKERS % CHUNKS == 0, "a thread's columns are the same in all rows");

#if OUT == 0 || OUT == 3
typedef bf16 Y;
#else
typedef float Y;
#endif

/// What two products make of the norm between them. Sums of squares are of 64 columns each: [rows at capacity, `tiles`].
struct Norms {
    const float* squares;     // of the residual that x is, times the norm's weights; null: x is as it is
    const float* next_weight; // OUT 2: of the norm behind, [outputs], or null
    bf16* next;               // [rows, outputs]: the new residual times these
    float* next_squares;
    u32 tiles;
    float eps;
};

/// Where a block stands.
struct Place {
    u32 tile;
    u32 share;      // of the rows, and of the weights that it fetches
    u32 part;       // of the inputs
    u32 first, end; // its stages along the inputs
};

__device__ __forceinline__ Place place_of(u32 inputs) {
    u32 rank = CLUSTER * PARTS > 1 ? cluster_rank() : 0, part = PARTS > 1 ? rank : 0, steps = (inputs + 63) / 64;
    return {blockIdx.x / (CLUSTER * PARTS), CLUSTER > 1 ? rank : 0, part, steps * part / PARTS, steps * (part + 1) / PARTS};
}

struct Ring {
    u32 start, barriers;
    __device__ __forceinline__ u32 a(u32 stage) const { return start + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 b(u32 stage) const { return a(stage) + A_BYTES; }
    __device__ __forceinline__ u32 full(u32 stage) const { return barriers + 8 * stage; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return barriers + 8 * (STAGES + stage); }
    /// This warp is done with a stage: all blocks that write to it hear of it.
    __device__ __forceinline__ void release(u32 stage) const {
        if (CLUSTER == 1) {
            u32 own = PARTS > 1 ? cluster_address(empty(stage), cluster_rank()) : empty(stage);
            if (threadIdx.x % 32 == 0) barrier_arrive_there(own);
        } else if (threadIdx.x % 32 < CLUSTER) {
            barrier_arrive_there(cluster_address(empty(stage), threadIdx.x % 32));
        }
    }
};

__device__ __forceinline__ void meet() {
    if (CLUSTER * PARTS > 1) cluster_meet();
    else __syncthreads();
}

/// What is left of a sum in bf16.
__device__ __forceinline__ float rounded(float x) { return to_float(to_bf16(x)); }

/// A product with its bias, if there is one, rounded as between two kernels.
__device__ __forceinline__ float with_bias(float sum, float bias, bool has_bias) {
    if (OUT == 1) return sum + bias;
    return has_bias ? rounded(rounded(sum) + bias) : rounded(sum);
}

/// One thread asks for everything.
__device__ __forceinline__ void fetch(const Ring& ring, const TensorMap& weight, const TensorMap& x, const Place& place) {
    auto ask_weights = [&](u32 stage, u32 step) {
        barrier_expect(ring.full(stage), STAGE_BYTES);
        u32 to = ring.a(stage) + place.share * (A_BYTES / CLUSTER);
        if (OUT == 3)
            tma_load_5d<CLUSTER>(to, weight, ring.full(stage), step * 64, 0, 0, place.tile * 4 + place.share * (4 / CLUSTER), 0);
        else
            tma_load_3d<CLUSTER>(to, weight, ring.full(stage), step * 64, place.tile * TILE + place.share * (TILE / CLUSTER), 0);
    };
    auto ask_rows = [&](u32 stage, u32 step) { tma_load_2d(ring.b(stage), x, ring.full(stage), step * 64, place.share * EACH); };
    u32 ahead = min(place.end - place.first, (u32)STAGES);
    for (u32 i = 0; i < ahead; i++) ask_weights(i, place.first + i);
    wait_for_inputs();
    for (u32 i = 0; i < ahead; i++) ask_rows(i, place.first + i);
    u32 stage = 0, phase = 0;
#pragma unroll 1
    for (u32 step = place.first + ahead; step < place.end; step++) {
        barrier_wait(ring.empty(stage), phase);
        ask_weights(stage, step);
        ask_rows(stage, step);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
}

/// 1 / rms of this block's rows, some threads for each. (One warp that took them one by one took half a microsecond each.)
__device__ __forceinline__ void find_scales(float* scales, const Norms& norms, u32 first_row, u32 rows, u32 inputs) {
    constexpr u32 THREADS = EACH > 32 ? 2 : EACH > 16 ? 4 : EACH > 8 ? 8 : 16; // of a row
    u32 own = threadIdx.x / THREADS, row = first_row + own;
    bool is_there = own < EACH && row < rows;
    const float* squares = norms.squares + (u64)(is_there ? row : 0) * norms.tiles;
    float sum = 0.0f;
#pragma unroll 8
    for (u32 tile = threadIdx.x % THREADS; tile < norms.tiles; tile += THREADS) sum += squares[tile];
#pragma unroll
    for (u32 lane = THREADS / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    if (is_there && threadIdx.x % THREADS == 0) scales[own] = inverse_root(sum, inputs, norms.eps);
}

/// d = W x^T of a tile and this block's inputs, 64 outputs by EACH rows.
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

/// A tile's sums to shared memory: as they are if they are parts, else with all that comes before the residual.
__device__ __forceinline__ void stage_sums(float* staged, const float (&d)[WGMMA_REGISTERS], const float* scales, const float* bias,
                                           const Place& place, u32 outputs) {
    u32 lane = threadIdx.x % 32, columns = OUT == 3 ? outputs / 2 : outputs;
    // Where the first 8 of this lane's outputs are, and 8 behind: the same pairs' up if OUT is 3.
    u32 column = threadIdx.x / 32 * (COLUMNS / 4) + lane / 4;
    float low = 0.0f, high = 0.0f;
    if (PARTS == 1 && bias) {
        u32 first = place.tile * COLUMNS + column, second = OUT == 3 ? first + columns : first + 8;
        low = first < columns ? bias[first] : 0.0f, high = second < outputs ? bias[second] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < EACH / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 row = 8 * j + lane % 4 * 2 + i;
            float* to = staged + row * STRIDE + column;
            float scale = scales ? scales[row] : 1.0f, a = d[4 * j + i] * scale, b = d[4 * j + 2 + i] * scale;
            // A part without inputs. (Zeros in front of the loop would have the compiler wait for each wgmma.)
            if (PARTS > 1 && place.first == place.end) a = b = 0.0f;
            if (PARTS == 1) a = with_bias(a, low, bias), b = with_bias(b, high, bias);
            if (OUT == 3) to[0] = __fdividef(a, 1.0f + __expf(-a)) * b;
            else to[0] = a, to[8] = b;
        }
}

__device__ __forceinline__ float4 read_there(u32 at) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at) : "memory");
    return x;
}

/// Eight of a row's sums, over all parts.
__device__ __forceinline__ Chunk sum_parts(u32 at, const float* bias, u32 column, u32 outputs) {
    Chunk y = {};
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) {
        u32 there = cluster_address(at, part);
        float4 a = read_there(there), b = read_there(there + 16);
        y.v[0] += a.x, y.v[1] += a.y, y.v[2] += a.z, y.v[3] += a.w;
        y.v[4] += b.x, y.v[5] += b.y, y.v[6] += b.z, y.v[7] += b.w;
    }
#pragma unroll
    for (u32 j = 0; j < CHUNK; j++) y.v[j] = with_bias(y.v[j], bias && column + j < outputs ? bias[column + j] : 0.0f, bias);
    return y;
}

/// What a thread needs to finish its rows.
struct End {
    Chunk before[OUT == 2 ? TURNS : 1]; // the residual
    Chunk weight;                       // of the norm behind
};

/// The row, of the block's and of all, that a thread finishes in a turn; false if there is none.
__device__ __forceinline__ bool row_of(u32 turn, const Place& place, const Extent& extent, u32& own, u32& row) {
    u32 i = turn * WORKERS + threadIdx.x;
    own = place.part * FINISHED + i / CHUNKS, row = place.share * EACH + own;
    return i < FINISHED * CHUNKS && row < extent.capacity() && extent.has(row);
}

/// Rows in shared memory to `out`: all of the block's, or its part's share of them.
__device__ __forceinline__ void finish(float* staged, const float* bias, Y* out, const Norms& norms, const End& end, const Place& place,
                                       u32 outputs, const Extent& extent) {
    u32 columns = OUT == 3 ? outputs / 2 : outputs, at = place.tile * COLUMNS + threadIdx.x % CHUNKS * CHUNK;
    bool is_there = at < columns;
#pragma unroll
    for (u32 turn = 0; turn < TURNS; turn++) {
        u32 own, row;
        if (!row_of(turn, place, extent, own, row)) continue;
        float* from = staged + own * STRIDE + threadIdx.x % CHUNKS * CHUNK;
        Chunk y = {};
        if (is_there) y = PARTS == 1 ? read_chunk(from) : sum_parts(smem(from), bias, at, outputs);
        if constexpr (OUT == 2) {
#pragma unroll
            for (u32 j = 0; j < CHUNK; j++) y.v[j] += end.before[turn].v[j];
        }
        if (is_there) write_row(out + (u64)row * columns, at, columns, y);
        if constexpr (OUT == 2) {
            if (!norms.next) continue;
            // Eight threads have the 64 columns of a sum of squares, and the same row, so all of them are here.
            float squares = square_sum(y);
            u32 eight = 0xffu << (threadIdx.x % 32 & ~7u);
#pragma unroll
            for (u32 lane = 1; lane < 8; lane *= 2) squares += __shfl_xor_sync(eight, squares, lane);
            if (threadIdx.x % 8 == 0) norms.next_squares[(u64)row * ((columns + 63) / 64) + place.tile] = squares;
#pragma unroll
            for (u32 j = 0; j < CHUNK; j++) y.v[j] *= end.weight.v[j];
            if (is_there) write_row(norms.next + (u64)row * columns, at, columns, y);
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER* PARTS, 1, 1) __launch_bounds__(WORKERS + 32)
    linear_rows(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const float* bias, Y* out, u32 inputs,
                u32 outputs, Extent extent, Norms norms) {
    extern __shared__ u8 shared[];
    __shared__ u64 barriers[2 * STAGES];
    __shared__ float scales[EACH];
    Place place = place_of(inputs);
    Ring ring{(smem(shared) + 1023) & ~1023u, smem(barriers)};
    float* staged = reinterpret_cast<float*>(shared + (ring.start - smem(shared)));
    let_next_start();
    if (threadIdx.x == WORKERS) {
        tma_prefetch_map(weight);
        tma_prefetch_map(x);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), 4 * CLUSTER);
        }
        barrier_init_fence();
    }
    meet();
    End end;
    if (threadIdx.x >= WORKERS) {
        if (threadIdx.x == WORKERS) fetch(ring, weight, x, place);
    } else {
        if (OUT == 2) {
            u32 at = place.tile * COLUMNS + threadIdx.x % CHUNKS * CHUNK;
            if (norms.next) end.weight = read_row(norms.next_weight, at, outputs);
            wait_for_inputs();
#pragma unroll
            for (u32 turn = 0; turn < TURNS; turn++) {
                u32 own, row;
                if (row_of(turn, place, extent, own, row)) end.before[turn] = read_row(out + (u64)row * outputs, at, outputs);
            }
        }
        if (norms.squares) {
            wait_for_inputs();
            find_scales(scales, norms, place.share * EACH, extent.capacity(), inputs);
        }
        float d[WGMMA_REGISTERS];
        multiply(d, ring, place.end - place.first);
        named_barrier<WORKERS>(1); // all warps are done with the ring, and have found their scales
        stage_sums(staged, d, norms.squares ? scales : nullptr, bias, place, outputs);
        if (PARTS == 1) {
            wait_for_inputs(); // what is overwritten was read
            named_barrier<WORKERS>(1);
            finish(staged, bias, out, norms, end, place, outputs, extent);
        }
    }
    __syncwarp();
    if (PARTS > 1) {
        meet();
        wait_for_inputs();
        if (threadIdx.x < WORKERS) finish(staged, bias, out, norms, end, place, outputs, extent);
        __syncwarp();
    }
    meet(); // another block may still release stages here, or read sums
}
#endif
