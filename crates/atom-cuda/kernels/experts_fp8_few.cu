// Op::Experts for few rows (decode), FP8: each active expert's codes stream once through persistent blocks.
//
// Definitions: SCALE_BLOCKS (experts_fp8.cuh), DEPTH (of the rings).
//   experts_plan's experts_place (tile_rows = 8, granule = 8) and experts_fp8_rows of x, then
//   experts_fp8_few_gate          gated[position, w] = silu(gate . x) * (up . x), bf16, positions in sorted order
//       x [rows, hidden] codes, gate_up [held, 2 width, hidden] codes
//       dynamic shared memory = DEPTH * 17408 + 8192 + 8 * (ceil(hidden / 128) * 128 + 64)
//   experts_fp8_rows of gated, then
//   experts_fp8_few_down_{bf16,out32}
//       sums = 1: out [rows, hidden] = weighted sums in the order of the route, from 0, in f32, every real row
//       sums = 0: out [rows, top_k * hidden], y at the place of its choice
//       gated [positions, width] codes, down [held, hidden, width] codes
//       dynamic shared memory = DEPTH * 25600 + 64 * rows * top_k + 8192
//
// grid = multiprocessors, block 256, one block a multiprocessor; rows * top_k <= 512; hidden and width multiples of 16.
// A lane reads 16 contiguous codes of a weight row, four MMAs' share in f16, into which e4m3 goes exactly; the order along K
// is free as long as both operands agree. Scales of a step come with its weights: of 8 choices, of 8 low and 8 high rows.
#include "experts_fp8.cuh"
#include "stream.cuh"

constexpr int FEW_CHOICES = 512;
constexpr int GATE_SLOT = STREAM_THREADS * 64 + 1024; // of a ring: weights, then scales, 128 bytes a warp
constexpr int DOWN_SLOT = STREAM_THREADS * 96 + 1024;

__device__ __forceinline__ void cp_async4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void store_shared16(u32 to, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ __forceinline__ float load_shared(u32 from) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
    return x;
}
__device__ __forceinline__ float2 load_shared2(u32 from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}

/// c += a b in f16: a is 16 x 16, b is 16 x 8.
__device__ __forceinline__ void mma_f16(float4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#ifdef LOGIC
constexpr float FACTOR = 65536.0f;
__device__ __forceinline__ u32 merge(u32 sign, u32 rest) {
    u32 y;
    asm("lop3.b32 %0, %1, 0x80008000, %2, 0xf8;" : "=r"(y) : "r"(sign), "r"(rest & 0x3f803f80u));
    return y;
}
__device__ __forceinline__ u32 even_halves(u32 w) { return merge(w * 256u, w * 128u); }
__device__ __forceinline__ u32 odd_halves(u32 w) { return merge(w, w >> 1); }
#else
constexpr float FACTOR = 1.0f;
__device__ __forceinline__ u32 even_halves(u32 w) { return low_halves(w); }
__device__ __forceinline__ u32 odd_halves(u32 w) { return high_halves(w); }
#endif
__device__ __forceinline__ void multiply_word(float4& c, u32 low, u32 high, u32 x) {
    mma_f16(c, even_halves(low), even_halves(high), odd_halves(low), odd_halves(high), even_halves(x), odd_halves(x));
}
/// 64 inputs: 16 codes of each lane.
__device__ __forceinline__ void multiply_codes(float4& c, uint4 low, uint4 high, uint4 x) {
    multiply_word(c, low.x, high.x, x.x);
    multiply_word(c, low.y, high.y, x.y);
    multiply_word(c, low.z, high.z, x.z);
    multiply_word(c, low.w, high.w, x.w);
}
/// sum += part times the scales of its rows and choices, which lie at `scales`: of 8 choices, 8 low rows, 8 high rows.
__device__ __forceinline__ void add_scaled(float4& sum, float4 part, u32 scales) {
    int lane = threadIdx.x % 32;
    float2 x = load_shared2(scales + lane % 4 * 8);
    x.x *= FACTOR, x.y *= FACTOR;
    float low = load_shared(scales + 32 + lane / 4 * 4), high = load_shared(scales + 64 + lane / 4 * 4);
    sum.x = fmaf(part.x, low * x.x, sum.x);
    sum.y = fmaf(part.y, low * x.y, sum.y);
    sum.z = fmaf(part.z, high * x.x, sum.z);
    sum.w = fmaf(part.w, high * x.y, sum.w);
}

struct Plan {
    const u32* counts;
    const uint4* tiles;
    const u32* slots;
};

struct Gate {
    Plan plan;
    const u8* x;
    const float* x_scales;
    const u8* matrix;
    const float* scales;
    bf16* gated;
    int inputs, width, rows, top_k;

    __device__ __forceinline__ int per_tile() const { return (width + 7) / 8; }
    __device__ __forceinline__ int units() const { return plan.counts[1] * per_tile(); }
    __device__ __forceinline__ int groups() const { return groups_of(inputs); }
    __device__ __forceinline__ int row_bytes() const { return groups() * GROUP + 64; }

    /// Rows of a tile into shared memory, zeros behind their inputs. ASYNC: by cp.async, which the caller commits and waits for.
    template <bool ASYNC> __device__ __forceinline__ void load_inputs(uint4 tile, u32 to) const {
        int row = threadIdx.x / 32;
        if (row >= tile.z) return;
        const u8* from = x + (u64)(plan.slots[tile.y + row] / top_k) * inputs;
        to += row * row_bytes();
#pragma unroll 4
        for (int c = threadIdx.x % 32 * 16; c < groups() * GROUP; c += 512) {
            bool valid = c < inputs;
            if (ASYNC)
                cp_async16(to + c, valid ? from + c : x, valid);
            else
                store_shared16(to + c, valid ? *(const uint4*)(from + c) : make_uint4(0, 0, 0, 0));
        }
    }
    /// From a lane's scale to that of the next 128 inputs.
    __device__ __forceinline__ u32 scale_step() const { return !SCALE_BLOCKS ? 0 : threadIdx.x % 32 < 8 ? group_stride(rows) : 1; }
    /// Where this lane's scales of a tile begin, those of weights for its first column; null for lanes that fetch none. A unit has
    /// 8 columns: their gate rows are the low 8 rows of the MMA, their up rows the high 8.
    __device__ __forceinline__ const float* scales_of(uint4 tile) const {
        int lane = threadIdx.x % 32, i = lane % 8;
        if (lane < 8) return i < tile.z ? x_scales + plan.slots[tile.y + i] / top_k : nullptr;
        if (lane >= 24) return nullptr;
        u64 row = ((u64)tile.x * 2 + (lane >= 16)) * width;
        return SCALE_BLOCKS ? scales + row / GROUP * scale_stride(inputs) : scales + row + i;
    }
    /// From there to those of a column.
    __device__ __forceinline__ int scales_to(int column) const {
        return threadIdx.x % 32 < 8 ? 0 : SCALE_BLOCKS ? column / GROUP * scale_stride(inputs) : column;
    }
    __device__ __forceinline__ void store(uint4 tile, int column, int row, float4 sum) const {
        bf16* to = gated + (u64)(tile.y + row) * width + column;
        if (row < tile.z) to[0] = to_bf16(silu(sum.x) * sum.z);
        if (row + 1 < tile.z) to[width] = to_bf16(silu(sum.y) * sum.w);
    }
};

/// A warp's weights on their way: units of 8 columns, steps of 128 inputs of which this warp takes every eighth.
template <int AHEAD> struct GateStream {
    const Gate& job;
    u32 ring;
    int left, tile, column, step = 0, slot = 0, steps;
    const u8 *low = nullptr, *high = nullptr; // rows of the column
    const float* scales = nullptr;            // of the tile

    __device__ __forceinline__ GateStream(const Gate& job, u32 ring, int unit, int end)
        : job(job), ring(ring), left(end - unit), steps((job.groups() - (int)threadIdx.x / 32 + 7) / 8) {
        tile = unit / job.per_tile();
        column = unit % job.per_tile() * 8;
        if (left > 0) enter();
    }
    __device__ __forceinline__ void enter() {
        uint4 at = job.plan.tiles[tile];
        low = job.matrix + ((u64)at.x * 2 * job.width + column + threadIdx.x % 32 / 4) * job.inputs;
        high = low + (u64)job.width * job.inputs;
        scales = job.scales_of(at);
    }
    __device__ __forceinline__ void fetch() {
        if (left > 0 && steps > 0) {
            int group = threadIdx.x / 32 + step * 8, k = group * GROUP + threadIdx.x % 4 * 16;
            u32 to = ring + slot * GATE_SLOT + threadIdx.x * 16;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int at = k + j / 2 * 64;
                bool valid = at < job.inputs;
                cp_async16(to + j * STREAM_THREADS * 16, valid ? (j % 2 ? high : low) + at : job.matrix, valid);
            }
            if (scales)
                cp_async4(ring + slot * GATE_SLOT + STREAM_THREADS * 64 + threadIdx.x * 4,
                          scales + job.scales_to(column) + (u64)group * job.scale_step());
            if (++step == steps) {
                step = 0, left--, column += 8;
                low += (u64)8 * job.inputs, high += (u64)8 * job.inputs;
                if (column == job.width) {
                    column = 0, tile++;
                    if (left > 0) enter();
                }
            }
        }
        slot = slot + 1 == AHEAD ? 0 : slot + 1;
        cp_async_commit();
    }
};

template <int AHEAD> __device__ __forceinline__ void gate_units(const Gate& job, u8* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 ring = shared_address(shared);
    float4* sums = (float4*)(shared + AHEAD * GATE_SLOT); // [2][8 warps][32 lanes]
    u32 inputs = shared_address(sums + 2 * 8 * 32);
    u32 b_at = inputs + lane / 4 * job.row_bytes() + lane % 4 * 16;
    wait_for_kernels_before();
    int total = job.units(), per_tile = job.per_tile();
    int begin = (u64)total * blockIdx.x / gridDim.x, end = (u64)total * (blockIdx.x + 1) / gridDim.x;
    int at_tile = begin / per_tile, column = begin % per_tile * 8;
    uint4 tile = make_uint4(0, 0, 0, 0);
    if (begin < end) {
        // In front of the weights, whose first loads would keep memory busy for microseconds.
        tile = job.plan.tiles[at_tile];
        job.load_inputs<true>(tile, inputs);
    }
    cp_async_commit();
    GateStream<AHEAD> stream(job, ring, begin, end);
#pragma unroll 1
    for (int i = 0; i < AHEAD - 1; i++) stream.fetch();
    let_next_kernel_start();
    cp_async_wait<AHEAD - 1>();
    __syncthreads();
    int slot = 0, parity = 0;
#pragma unroll 1
    for (int unit = begin; unit < end; unit++, parity ^= 1, column += 8) {
        if (column == job.width) {
            at_tile++, column = 0;
            tile = job.plan.tiles[at_tile];
            __syncthreads();
            job.load_inputs<false>(tile, inputs);
            __syncthreads();
        }
        bool real = lane / 4 < tile.z;
        float4 acc = {};
#pragma unroll 1
        for (int step = 0; step < stream.steps; step++) {
            cp_async_wait<AHEAD - 2>();
            __syncwarp();
            u32 from = ring + slot * GATE_SLOT + threadIdx.x * 16;
            uint4 a[4], b[2] = {};
#pragma unroll
            for (int j = 0; j < 4; j++) a[j] = load_shared16(from + j * STREAM_THREADS * 16);
            // Rows that are nobody's have no place in shared memory.
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (real) b[j] = load_shared16(b_at + (warp + step * 8) * GROUP + j * 64);
            float4 part = {}, other = {};
            multiply_codes(part, a[0], a[1], b[0]);
            multiply_codes(other, a[2], a[3], b[1]);
            part.x += other.x, part.y += other.y, part.z += other.z, part.w += other.w;
            add_scaled(acc, part, ring + slot * GATE_SLOT + STREAM_THREADS * 64 + warp * 128);
            slot = slot + 1 == AHEAD ? 0 : slot + 1;
            stream.fetch();
        }
        float4* mine = sums + parity * 8 * 32;
        mine[threadIdx.x] = acc;
        __syncthreads();
        if (warp == unit % 8) {
            float4 sum = mine[lane];
#pragma unroll
            for (int w = 1; w < 8; w++) {
                float4 part = mine[w * 32 + lane];
                sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
            }
            job.store(tile, column + lane / 4, lane % 4 * 2, sum);
        }
    }
    cp_async_wait<0>();
}

/// What the second product's blocks keep of the plan, in shared memory.
struct DownPlan {
    float weight[FEW_CHOICES]; // of each slot
    u16 place[FEW_CHOICES];    // position of each slot, NO_PLACE for choices that are not ours
};
constexpr u16 NO_PLACE = 0xffff;
static_assert(sizeof(DownPlan) <= 8192);

/// The second product: a block has all experts of its outputs, so it also weighs and adds. A warp takes every eighth tile, so
/// 8 experts are under way and no warp waits for another before all are done.
struct Down {
    Plan plan;
    const u8* gated;
    const float* gated_scales;
    const u8* matrix;
    const float* scales;
    int inputs, hidden, choices;

    __device__ __forceinline__ int groups() const { return groups_of(inputs); }
    __device__ __forceinline__ int units() const { return (hidden + 15) / 16; }
    __device__ __forceinline__ u32 scale_step() const { return !SCALE_BLOCKS ? 0 : threadIdx.x % 32 < 8 ? group_stride(choices) : 1; }
    /// As in Gate::scales_of, of 16 rows.
    __device__ __forceinline__ const float* scales_of(uint4 tile, int row) const {
        int lane = threadIdx.x % 32, i = lane % 8;
        if (lane < 8) return i < tile.z ? gated_scales + tile.y + i : nullptr;
        if (lane >= 24) return nullptr;
        if (SCALE_BLOCKS) return scales + ((u64)tile.x * groups_of(hidden) + row / GROUP) * scale_stride(inputs);
        return scales + (u64)tile.x * hidden + row + lane - 8;
    }
};

/// Where a warp is: units of 16 outputs are blockIdx.x, + gridDim.x, ..; tiles are its own, steps are 128 inputs.
struct DownCursor {
    int unit, tile, step = 0, slot = 0, tiles;
    const u8 *low, *high, *input;
    const float* scales;

    __device__ __forceinline__ DownCursor(const Down& down, int tiles) : unit(blockIdx.x), tile(threadIdx.x / 32), tiles(tiles) {
        if (tile >= tiles) unit = down.units();
        enter(down);
    }
    __device__ __forceinline__ void enter(const Down& down) {
        if (unit >= down.units()) return;
        int g = threadIdx.x % 32 / 4, row = unit * 16 + g;
        uint4 at = down.plan.tiles[tile];
        low = down.matrix + ((u64)at.x * down.hidden + row) * down.inputs;
        high = low + (u64)8 * down.inputs;
        input = g < at.z ? down.gated + (u64)(at.y + g) * down.inputs : nullptr;
        scales = down.scales_of(at, unit * 16);
    }
    /// Sends for the weights, the inputs or both of this step, and goes to the next.
    template <int AHEAD, bool WEIGHTS, bool INPUTS> __device__ __forceinline__ void fetch(const Down& down, u32 ring) {
        if (unit < down.units()) {
            u32 to = ring + slot * DOWN_SLOT + threadIdx.x * 16;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int k = step * GROUP + threadIdx.x % 4 * 16 + j * 64;
                bool inside = k < down.inputs;
                if (WEIGHTS) {
                    cp_async16(to + (2 * j) * STREAM_THREADS * 16, inside ? low + k : down.matrix, inside);
                    cp_async16(to + (2 * j + 1) * STREAM_THREADS * 16, inside ? high + k : down.matrix, inside);
                }
                if (INPUTS) cp_async16(to + (4 + j) * STREAM_THREADS * 16, inside && input ? input + k : down.gated, inside && input);
            }
            if (INPUTS && scales) cp_async4(ring + slot * DOWN_SLOT + STREAM_THREADS * 96 + threadIdx.x * 4, scales + (u64)step * down.scale_step());
            if (++step == down.groups()) {
                step = 0;
                tile += 8;
                if (tile >= tiles) tile = threadIdx.x / 32, unit += gridDim.x;
                enter(down);
            }
        }
        slot = slot + 1 == AHEAD ? 0 : slot + 1;
        cp_async_commit();
    }
};

/// One tile's 16 outputs of up to 8 choices, into y by position.
template <int AHEAD> __device__ __forceinline__ void down_tile(const Down& down, DownCursor& next, u32 ring, int& slot, uint4 at, float* y) {
    float4 acc = {};
#pragma unroll 1
    for (int step = 0; step < down.groups(); step++) {
        cp_async_wait<AHEAD - 2>();
        __syncwarp();
        u32 from = ring + slot * DOWN_SLOT + threadIdx.x * 16;
        uint4 a[6];
#pragma unroll
        for (int j = 0; j < 6; j++) a[j] = load_shared16(from + j * STREAM_THREADS * 16);
        float4 part = {}, other = {};
        multiply_codes(part, a[0], a[1], a[4]);
        multiply_codes(other, a[2], a[3], a[5]);
        part.x += other.x, part.y += other.y, part.z += other.z, part.w += other.w;
        add_scaled(acc, part, ring + slot * DOWN_SLOT + STREAM_THREADS * 96 + threadIdx.x / 32 * 128);
        slot = slot + 1 == AHEAD ? 0 : slot + 1;
        next.fetch<AHEAD, true, true>(down, ring);
    }
    int g = threadIdx.x % 32 / 4, choice = threadIdx.x % 4 * 2;
    float* to = y + (at.y + choice) * 16 + g;
    if (choice < at.z) to[0] = acc.x, to[8] = acc.z;
    if (choice + 1 < at.z) to[16] = acc.y, to[24] = acc.w;
}

__device__ __forceinline__ void read_plan(DownPlan& plan, const Down& down, const float* routes, const Choosers& who) {
    int choices = who.lanes * who.lane_rows * who.top_k;
    for (int slot = threadIdx.x; slot < choices; slot += STREAM_THREADS) {
        plan.weight[slot] = routes[(u64)(slot / who.top_k) * 2 * who.top_k + who.top_k + slot % who.top_k];
        plan.place[slot] = NO_PLACE;
    }
    __syncthreads();
    for (int position = threadIdx.x; position < down.plan.counts[0]; position += STREAM_THREADS)
        plan.place[down.plan.slots[position]] = position;
    __syncthreads();
}

template <typename Out>
__device__ __forceinline__ void write_out(const DownPlan& plan, const Choosers& who, const float* y, Out* out, int unit, int hidden,
                                          int sums) {
    int rows = who.lanes * who.lane_rows;
    for (int i = threadIdx.x; i < rows * 16; i += STREAM_THREADS) {
        int row = i / 16, column = unit * 16 + i % 16;
        if (column >= hidden || !is_real(who, row)) continue;
        float sum = 0.0f;
        for (int p = 0; p < who.top_k; p++) {
            int slot = row * who.top_k + p, position = plan.place[slot];
            if (position == NO_PLACE) continue;
            float value = y[position * 16 + i % 16];
            if (sums)
                sum = fmaf(plan.weight[slot], value, sum);
            else
                out[(u64)slot * hidden + column] = From<Out>::of(value);
        }
        if (sums) out[(u64)row * hidden + column] = From<Out>::of(sum);
    }
}

template <int AHEAD, typename Out>
__device__ __forceinline__ void down_units(const Down& down, const float* routes, const Choosers& who, u8* shared, Out* out, int sums) {
    DownPlan& plan = *(DownPlan*)shared;
    u32 ring = shared_address(shared + 8192);
    float* y = (float*)(shared + 8192 + AHEAD * DOWN_SLOT);
    // The kernels before, right in front of the last one, waited for the plan.
    int tiles = down.plan.counts[1];
    DownCursor next(down, tiles), inputs(down, tiles);
#pragma unroll 1
    for (int i = 0; i < AHEAD - 1; i++) next.fetch<AHEAD, true, false>(down, ring);
    read_plan(plan, down, routes, who);
    wait_for_kernels_before();
    let_next_kernel_start();
#pragma unroll 1
    for (int i = 0; i < AHEAD - 1; i++) inputs.fetch<AHEAD, false, true>(down, ring);
    int slot = 0;
    for (int unit = blockIdx.x; unit < down.units(); unit += gridDim.x) {
        for (int tile = threadIdx.x / 32; tile < tiles; tile += 8) down_tile<AHEAD>(down, next, ring, slot, down.plan.tiles[tile], y);
        __syncthreads();
        write_out(plan, who, y, out, unit, down.hidden, sums);
        __syncthreads();
    }
    cp_async_wait<0>();
}

extern __shared__ __align__(128) u8 few_shared[];

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)
    experts_fp8_few_gate(const u8* x, const float* x_scales, const u8* gate_up, const float* scales, bf16* gated, const u32* counts,
                         const uint4* tiles, const u32* slots, int hidden, int width, int rows, int top_k) {
    gate_units<DEPTH>(Gate{{counts, tiles, slots}, x, x_scales, gate_up, scales, gated, hidden, width, rows, top_k}, few_shared);
}

#define FEW_DOWN(NAME, OUT)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 2)                                                          \
        NAME(const u8* gated, const float* gated_scales, const float* routes, const u8* down, const float* scales, OUT* out, \
             const u32* counts, const uint4* tiles, const u32* slots, const u32* real_rows, int lanes, int lane_rows,        \
             int top_k, int first, int held, int hidden, int width, int sums) {                                              \
        down_units<DEPTH, OUT>(Down{{counts, tiles, slots}, gated, gated_scales, down, scales, width, hidden, lanes * lane_rows * top_k}, routes,       \
                               {real_rows, lanes, lane_rows, top_k, first, held}, few_shared, out, sums);                    \
    }
FEW_DOWN(experts_fp8_few_down_bf16, bf16)
FEW_DOWN(experts_fp8_few_down_out32, float)
