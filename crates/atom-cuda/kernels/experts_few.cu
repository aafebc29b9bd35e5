// Op::Experts for the fewest rows (decode), bf16: two launches. Each block sorts the choices for itself, in shared memory;
// the second product has all experts of its outputs in one block, so it also weighs and adds.
//
// Definition: DEPTH (of the rings).
//   experts_few_gate_bf16          gated[position, w] = silu(gate . x) * (up . x), positions in sorted order
//       dynamic shared memory = FEW + 16 held + DEPTH * 16384 + 8192 + min(rows, 8) * (ceil(hidden / 128) * 256 + 64)
//   experts_few_down_{bf16,out32}  right behind it; sums = 1: out [rows, hidden] = weighted sums in the order of the route,
//       from 0, in f32, every real row; sums = 0: out [rows, top_k * hidden], y at the place of its choice
//       dynamic shared memory = FEW + 16 held + DEPTH * 24576 + 64 * rows * top_k
//   FEW = 12288; grid = multiprocessors, block 256
//
// rows (capacity lanes * lane_rows) <= 64, rows * top_k <= 512, held <= 1024; hidden and width multiples of 8.
// x [rows, hidden], routes [rows, 2 top_k] f32, gate_up [held, 2 width, hidden], down [held, hidden, width].
// Scratch: gated, rows * top_k * width * 2 bytes. Tiles are of up to 8 choices; an expert with more is read again.
// Both may be launched with programmatic dependent launch (down then fetches weights while gate ends).
// On an H200, Qwen3-30B-A3B's layer (hidden 2048, width 768, 128 experts, 8 a row), random routes, weights read once:
// 1 row 22.6-24.5 us (72-78% of the copy bandwidth, 4.28 TB/s), 2 rows 41 (83%), 4 rows 71 (90%), 8 rows 119 (96%),
// 16 rows 186 (99%), 32 rows 248 (100%), 64 rows 281-292 (95-99%).
// (Both in one launch, with a meeting of all blocks between, was measured: 24.0 us for one row, against 22.6.)
// A sum runs along K in one order, whatever the rows: 8 warps' shares in gate, one warp in down.
#include "experts_choices.cuh"
#include "stream.cuh"

constexpr int FEW_CHOICES = 512, FEW_TILES = 576, FEW_BYTES = 12288;

/// The choices of a step by expert, in shared memory; FewExpert[held] lie behind it.
struct FewPlan {
    u32 tiles;
    u32 sums[8];
    ushort4 tile[FEW_TILES];   // expert, first position, choices
    u16 slot[FEW_CHOICES];     // of each position
    u16 place[FEW_CHOICES];    // position of each slot, NO_PLACE for choices that are not ours
    float weight[FEW_CHOICES]; // of each slot
};
struct FewExpert {
    u64 rows; // that chose it
    u32 first;
    u32 unused;
};
constexpr u16 NO_PLACE = 0xffff;
static_assert(sizeof(FewPlan) <= FEW_BYTES);

__device__ __forceinline__ FewExpert* few_experts(FewPlan& plan) { return (FewExpert*)((u8*)&plan + FEW_BYTES); }

/// Exclusive sum over 256 threads.
__device__ __forceinline__ u32 few_scan(u32 value, u32* sums, u32& total) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 scan = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(0xffffffffu, scan, step);
        if (lane >= step) scan += other;
    }
    if (lane == 31) sums[warp] = scan;
    __syncthreads();
    u32 before = 0;
    total = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    return before + scan - value;
}

/// Tiles and places of experts from the rows that chose them: each thread has consecutive experts.
__device__ __forceinline__ void few_tiles(FewPlan& plan, int held) {
    FewExpert* experts = few_experts(plan);
    int per = (held + 255) / 256, begin = threadIdx.x * per, end = min(begin + per, held);
    u32 sum = 0, total; // choices in the low half, tiles in the high half
    for (int e = begin; e < end; e++) {
        u32 count = __popcll(experts[e].rows);
        sum += count + ((count + 7) / 8 << 16);
    }
    u32 at = few_scan(sum, plan.sums, total);
    for (int e = begin; e < end; e++) {
        u32 count = __popcll(experts[e].rows), first = at & 0xffff;
        experts[e].first = first;
        for (u32 c = 0; c < count; c += 8) plan.tile[(at >> 16) + c / 8] = make_ushort4(e, first + c, min(count - c, 8u), 0);
        at += count + ((count + 7) / 8 << 16);
    }
    if (threadIdx.x == 0) plan.tiles = total >> 16;
}

/// The plan of a single row: its choices are in the order of experts already.
__device__ __forceinline__ void few_plan_of_one(FewPlan& plan, const float* routes, const Choosers& who) {
    int place = threadIdx.x;
    if (place < 32) {
        float number = place < who.top_k ? routes[place] : NO_EXPERT;
        float weight = place < who.top_k ? routes[place + who.top_k] : 0.0f;
        int expert = is_real(who, 0) ? held_expert(who, number) : -1;
        u32 ours = __ballot_sync(0xffffffffu, expert >= 0), position = __popc(ours & ((1u << place) - 1));
        plan.weight[place] = weight;
        plan.place[place] = expert >= 0 ? position : NO_PLACE;
        if (expert >= 0) {
            plan.tile[position] = make_ushort4(expert, position, 1, 0);
            plan.slot[position] = place;
        }
        if (place == 0) plan.tiles = __popc(ours);
    }
    __syncthreads();
}

__device__ __forceinline__ void few_plan(FewPlan& plan, const float* routes, const Choosers& who) {
    if (who.lanes * who.lane_rows == 1 && who.top_k <= 32) return few_plan_of_one(plan, routes, who);
    FewExpert* experts = few_experts(plan);
    int choices = who.lanes * who.lane_rows * who.top_k, expert[2], row[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int slot = threadIdx.x + i * 256;
        row[i] = slot / who.top_k;
        expert[i] = -1;
        if (slot >= choices) continue;
        u64 at = (u64)row[i] * 2 * who.top_k + slot % who.top_k;
        float number = routes[at];
        plan.weight[slot] = routes[at + who.top_k];
        plan.place[slot] = NO_PLACE;
        if (is_real(who, row[i])) expert[i] = held_expert(who, number);
    }
    for (int e = threadIdx.x; e < who.held; e += 256) experts[e].rows = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (expert[i] >= 0) atomicOr(&experts[expert[i]].rows, 1ull << row[i]);
    __syncthreads();
    few_tiles(plan, who.held);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (expert[i] < 0) continue;
        const FewExpert& mine = experts[expert[i]];
        int position = mine.first + __popcll(mine.rows & ((1ull << row[i]) - 1)), slot = threadIdx.x + i * 256;
        plan.slot[position] = slot;
        plan.place[slot] = position;
    }
    __syncthreads();
}

struct FewGateJob {
    static constexpr bool WEIGHTS_FIRST = false;
    const FewPlan& plan;
    const bf16* x;
    const bf16* matrix;
    bf16* gated;
    int inputs, width, top_k;

    __device__ __forceinline__ int per_tile() const { return (width + 7) / 8; }
    __device__ __forceinline__ int units() const { return plan.tiles * per_tile(); }
    __device__ __forceinline__ int tile_of(int unit) const { return unit / per_tile(); }
    __device__ __forceinline__ int tile_rows(int tile) const { return plan.tile[tile].z; }
    template <bool ASYNC> __device__ __forceinline__ void load_inputs(int tile, u32 to) const {
        ushort4 at = plan.tile[tile];
        int row = threadIdx.x / 32;
        if (row < at.z) load_input_row<ASYNC>(x + (u64)(plan.slot[at.y + row] / top_k) * inputs, to, inputs, row);
    }
    /// A unit has 8 columns: their gate rows are the low 8 rows of the MMA, their up rows the high 8.
    __device__ __forceinline__ WeightRows weights(int unit, int, int g) const {
        int column = unit % per_tile() * 8 + g;
        if (column >= width) return {nullptr, nullptr};
        const bf16* gate = matrix + ((u64)plan.tile[tile_of(unit)].x * 2 * width + column) * inputs;
        return {gate, gate + (u64)width * inputs};
    }
    __device__ __forceinline__ void store(int unit, int tile, int, int row, int g, float4 sum) const {
        int column = unit % per_tile() * 8 + g;
        ushort4 at = plan.tile[tile];
        if (column >= width) return;
        bf16* to = gated + (u64)(at.y + row) * width + column;
        if (row < at.z) to[0] = to_bf16(silu(sum.x) * sum.z);
        if (row + 1 < at.z) to[width] = to_bf16(silu(sum.y) * sum.w);
    }
};

/// The second product: a warp takes every eighth tile, so 8 experts are under way and no warp waits for another before all
/// are done. A thread's ring holds its weights and its inputs.
struct FewDown {
    static constexpr int SLOT = STREAM_THREADS * 96;
    const FewPlan& plan;
    const bf16* gated;
    const bf16* matrix;
    int inputs, hidden;

    __device__ __forceinline__ int steps() const { return (inputs + 63) / 64; }
    __device__ __forceinline__ int units() const { return (hidden + 15) / 16; }
};

/// Where a warp is: units of 16 outputs are blockIdx.x, + gridDim.x, ..; tiles are its own, steps are 64 inputs.
struct FewCursor {
    int unit, tile, step = 0, slot = 0;
    const bf16 *low, *high, *input;

    __device__ __forceinline__ FewCursor(const FewDown& down) : unit(blockIdx.x), tile(threadIdx.x / 32) {
        if (tile >= down.plan.tiles) unit = down.units();
        enter(down);
    }
    __device__ __forceinline__ void enter(const FewDown& down) {
        if (unit >= down.units()) return;
        int g = threadIdx.x % 32 / 4, row = unit * 16 + g;
        ushort4 at = down.plan.tile[tile];
        const bf16* from = down.matrix + ((u64)at.x * down.hidden + row) * down.inputs;
        low = row < down.hidden ? from : nullptr;
        high = row + 8 < down.hidden ? from + (u64)8 * down.inputs : nullptr;
        input = g < at.z ? down.gated + (u64)(at.y + g) * down.inputs : nullptr;
    }
    /// Sends for the weights, the inputs or both of this step, and goes to the next.
    template <int AHEAD, bool WEIGHTS, bool INPUTS> __device__ __forceinline__ void fetch(const FewDown& down, u32 ring) {
        if (unit < down.units()) {
            u32 to = ring + slot * FewDown::SLOT + threadIdx.x * 16;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int k = step * 64 + threadIdx.x % 4 * 8 + j * 32;
                bool inside = k < down.inputs;
                if (WEIGHTS) {
                    cp_async16(to + (2 * j) * STREAM_THREADS * 16, inside && low ? low + k : down.matrix, inside && low);
                    cp_async16(to + (2 * j + 1) * STREAM_THREADS * 16, inside && high ? high + k : down.matrix, inside && high);
                }
                if (INPUTS) cp_async16(to + (4 + j) * STREAM_THREADS * 16, inside && input ? input + k : down.gated, inside && input);
            }
            if (++step == down.steps()) {
                step = 0;
                tile += 8;
                if (tile >= down.plan.tiles) tile = threadIdx.x / 32, unit += gridDim.x;
                enter(down);
            }
        }
        slot = slot + 1 == AHEAD ? 0 : slot + 1;
        cp_async_commit();
    }
};

/// One tile's 16 outputs of up to 8 choices, into y by position.
template <int AHEAD> __device__ __forceinline__ void few_tile(const FewDown& down, FewCursor& next, u32 ring, int& slot, ushort4 at, float* y) {
    float4 acc = {};
#pragma unroll 1
    for (int step = 0; step < down.steps(); step++) {
        cp_async_wait<AHEAD - 2>();
        u32 from = ring + slot * FewDown::SLOT + threadIdx.x * 16;
        uint4 a[6];
#pragma unroll
        for (int j = 0; j < 6; j++) a[j] = load_shared16(from + j * STREAM_THREADS * 16);
        slot = slot + 1 == AHEAD ? 0 : slot + 1;
        next.fetch<AHEAD, true, true>(down, ring);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            mma16816(acc, a[2 * j].x, a[2 * j + 1].x, a[2 * j].y, a[2 * j + 1].y, a[4 + j].x, a[4 + j].y);
            mma16816(acc, a[2 * j].z, a[2 * j + 1].z, a[2 * j].w, a[2 * j + 1].w, a[4 + j].z, a[4 + j].w);
        }
    }
    int g = threadIdx.x % 32 / 4, choice = threadIdx.x % 4 * 2;
    float* to = y + (at.y + choice) * 16 + g;
    if (choice < at.z) to[0] = acc.x, to[8] = acc.z;
    if (choice + 1 < at.z) to[16] = acc.y, to[24] = acc.w;
}

template <typename Out>
__device__ __forceinline__ void few_out(const FewPlan& plan, const Choosers& who, const float* y, Out* out, int unit, int hidden, int sums) {
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
__device__ __forceinline__ void few_down(const FewDown& down, const Choosers& who, u8* shared, Out* out, int sums) {
    u32 ring = shared_address(shared);
    float* y = (float*)(shared + AHEAD * FewDown::SLOT);
    FewCursor next(down), inputs(down);
#pragma unroll 1
    for (int i = 0; i < AHEAD - 1; i++) next.fetch<AHEAD, true, false>(down, ring);
    wait_for_kernels_before();
    let_next_kernel_start();
#pragma unroll 1
    for (int i = 0; i < AHEAD - 1; i++) inputs.fetch<AHEAD, false, true>(down, ring);
    int slot = 0;
    for (int unit = blockIdx.x; unit < down.units(); unit += gridDim.x) {
        for (int tile = threadIdx.x / 32; tile < down.plan.tiles; tile += 8) few_tile<AHEAD>(down, next, ring, slot, down.plan.tile[tile], y);
        __syncthreads();
        few_out(down.plan, who, y, out, unit, down.hidden, sums);
        __syncthreads();
    }
    cp_async_wait<0>();
}

extern __shared__ __align__(128) u8 few_shared[];

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 1)
    experts_few_gate_bf16(const bf16* x, const float* routes, const bf16* gate_up, bf16* gated, const u32* real_rows, int lanes,
                          int lane_rows, int top_k, int first, int held, int hidden, int width) {
    FewPlan& plan = *(FewPlan*)few_shared;
    wait_for_kernels_before();
    few_plan(plan, routes, {real_rows, lanes, lane_rows, top_k, first, held});
    u8* rest = few_shared + FEW_BYTES + held * sizeof(FewExpert);
    stream_products<8, 1, DEPTH>(FewGateJob{plan, x, gate_up, gated, hidden, width, top_k}, rest);
}

#define FEW_DOWN(NAME, OUT)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 1)                                                         \
        NAME(const bf16* gated, const float* routes, const bf16* down, OUT* out, const u32* real_rows, int lanes,           \
             int lane_rows, int top_k, int first, int held, int hidden, int width, int sums) {                              \
        FewPlan& plan = *(FewPlan*)few_shared;                                                                              \
        Choosers who{real_rows, lanes, lane_rows, top_k, first, held};                                                      \
        few_plan(plan, routes, who);                                                                                        \
        u8* rest = few_shared + FEW_BYTES + held * sizeof(FewExpert);                                                       \
        few_down<DEPTH, OUT>(FewDown{plan, gated, down, width, hidden}, who, rest, out, sums);                              \
    }
FEW_DOWN(experts_few_down_bf16, bf16)
FEW_DOWN(experts_few_down_out32, float)
