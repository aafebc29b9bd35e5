// Op::Experts for a single row, bf16: one launch, in which memory never rests between the two products.
//
// Definition: DEPTH (of the rings).
//   experts_one_{bf16,out32}   grid = multiprocessors (all blocks meet, so each must have its place), block 512
//       sums 0: out [top_k * hidden], y at the place of its choice; 1: out [hidden] = weighted sum in the order of the route,
//       from 0, in f32; 2: that is added to out
//       dynamic shared memory = DEPTH * 32768 + max(2 * hidden, 2 * top_k * width)
//       counter: a u32 whose low 31 bits are far from overflowing, 0 at the start; every launch leaves them as they were
//
// One row, real or not; top_k <= 32; hidden and width multiples of 8.
// x [hidden], routes [2 top_k] f32, gate_up [held, 2 width, hidden], down [held, hidden, width].
// Scratch: gated, top_k * width * 2 bytes.
//
// A warp's sequence of weights is that of its columns of gate and up, then that of its share of down: the ring in shared
// memory goes on across the meeting, so the second product's weights come in while the last columns of the first are summed
// and the blocks wait for each other. Columns are given out one by one, so that all blocks end together, and need no other
// warp; a lane reads 16 bytes of a weight row, a warp 512. What is left to do behind the meeting is on the tensor cores (by
// ordinary products it took 5 us): a warp has 16 outputs of every eighth choice, and every other 64 of the inputs.
// A sum runs along K in one order, whatever the grid.
#include "experts_choices.cuh"
#include "stream.cuh"

constexpr int ONE_THREADS = 512, ONE_WARPS = ONE_THREADS / 32;
constexpr int PIECE = 256;                    // elements of a weight row that a warp reads at a time
constexpr int SLOT = 4 * 2 * PIECE;           // bytes of a warp's step
constexpr int UNIT = 16, DOWN_K = 64;         // of a step of down: weight rows, elements along K
constexpr int HALVES = 2, TURNS = ONE_WARPS / HALVES; // warps of a choice, choices at a time
constexpr int CHOICES_MAX = 32;

extern __shared__ __align__(128) u8 one_shared[];

/// The row's choices that are held here, in the order of its route.
struct Chosen {
    int count;
    int expert[CHOICES_MAX];
    int place[CHOICES_MAX];
    float weight[CHOICES_MAX];
};

struct One {
    const bf16* gate_up;
    const bf16* down;
    int hidden, width;
    const Chosen& chosen;

    __device__ __forceinline__ int columns() const { return chosen.count * width; }
    __device__ __forceinline__ int column_steps() const { return (hidden + 2 * PIECE - 1) / (2 * PIECE); }
    __device__ __forceinline__ int units() const { return (hidden + UNIT - 1) / UNIT; }
    __device__ __forceinline__ int down_steps() const { return (width + DOWN_K - 1) / DOWN_K; }
};

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }
/// Columns of gate and up that are this warp's.
__device__ __forceinline__ int first_column() { return blockIdx.x + gridDim.x * warp(); }
__device__ __forceinline__ int next_column(int column) { return column + gridDim.x * ONE_WARPS; }

/// Sends for this warp's weights, step after step.
struct Sender {
    const One& one;
    u32 ring;
    int column, unit, step = 0, choice, slot = 0;
    const bf16 *low, *high; // of gate and up, then of rows of down
    bool has_low, has_high;

    __device__ __forceinline__ Sender(const One& one, u32 ring)
        : one(one), ring(ring), column(first_column()), unit(blockIdx.x), choice(warp() / HALVES) {
        if (choice >= one.chosen.count || warp() % HALVES >= one.down_steps()) unit = one.units();
        enter();
    }
    __device__ __forceinline__ void enter() {
        if (column < one.columns()) {
            int at = column / one.width;
            low = one.gate_up + ((u64)one.chosen.expert[at] * 2 * one.width + (column - at * one.width)) * one.hidden + lane() * 8;
            high = low + (u64)one.width * one.hidden;
        } else if (unit < one.units()) {
            int row = unit * UNIT + lane() / 4;
            has_low = row < one.hidden, has_high = row + 8 < one.hidden;
            low = one.down + ((u64)one.chosen.expert[choice] * one.hidden + row) * one.width + lane() % 4 * 8;
            high = low + (u64)8 * one.width;
            step = warp() % HALVES;
        }
    }
    __device__ __forceinline__ void send(u32 to, const bf16* from, bool valid) const { cp_async16(to, valid ? from : one.down, valid); }

    __device__ __forceinline__ void fetch() {
        u32 to = ring + slot * SLOT;
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
        if (column < one.columns()) {
            int at = step * 2 * PIECE, k = at + lane() * 8;
            bool first = k < one.hidden, second = k + PIECE < one.hidden;
            send(to, low + at, first);
            send(to + 512, high + at, first);
            send(to + 1024, low + at + PIECE, second);
            send(to + 1536, high + at + PIECE, second);
            if (++step == one.column_steps()) step = 0, column = next_column(column), enter();
        } else if (unit < one.units()) {
            int at = step * DOWN_K, k = at + lane() % 4 * 8;
            bool first = k < one.width, second = k + 32 < one.width;
            send(to, low + at, first && has_low);
            send(to + 512, high + at, first && has_high);
            send(to + 1024, low + at + 32, second && has_low);
            send(to + 1536, high + at + 32, second && has_high);
            step += HALVES;
            if (step >= one.down_steps()) {
                choice += TURNS;
                if (choice >= one.chosen.count) choice = warp() / HALVES, unit += gridDim.x;
                enter();
            }
        }
        cp_async_commit();
    }
};

/// A warp's steps as they arrive: four times 16 bytes of each lane.
struct Receiver {
    u32 ring;
    int slot = 0;
    __device__ __forceinline__ void take(uint4 (&a)[4]) {
        cp_async_wait<DEPTH - 2>();
        u32 from = ring + slot * SLOT;
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = load_shared16(from + i * 512);
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
    }
};

__device__ __forceinline__ float dot8(uint4 a, uint4 b, float sum) {
    sum = fmaf(low_float(a.x), low_float(b.x), sum), sum = fmaf(high_float(a.x), high_float(b.x), sum);
    sum = fmaf(low_float(a.y), low_float(b.y), sum), sum = fmaf(high_float(a.y), high_float(b.y), sum);
    sum = fmaf(low_float(a.z), low_float(b.z), sum), sum = fmaf(high_float(a.z), high_float(b.z), sum);
    return fmaf(high_float(a.w), high_float(b.w), fmaf(low_float(a.w), low_float(b.w), sum));
}

/// All blocks of the grid: what was written before is seen behind it. The first block's share makes the top bit flip once all
/// have come.
__device__ __forceinline__ void meet(u32* counter) {
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 share = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1, before, now;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(share) : "memory");
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
        while (((before ^ now) & 0x80000000u) == 0);
    }
    __syncthreads();
}

/// 16 bytes of what another multiprocessor wrote: not from this one's cache.
__device__ __forceinline__ uint4 load_fresh16(const void* from) {
    uint4 x;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
    return x;
}

__device__ __forceinline__ void read_choices(const float* routes, const Choosers& who, Chosen& chosen) {
    if (threadIdx.x < 32) {
        int place = threadIdx.x;
        float number = place < who.top_k ? routes[place] : NO_EXPERT;
        float weight = place < who.top_k ? routes[place + who.top_k] : 0.0f;
        int expert = held_expert(who, number);
        u32 ours = __ballot_sync(0xffffffffu, expert >= 0), at = __popc(ours & ((1u << place) - 1));
        if (expert >= 0) chosen.expert[at] = expert, chosen.place[at] = place, chosen.weight[at] = weight;
        if (place == 0) chosen.count = __popc(ours);
    }
    __syncthreads();
}

/// The first product's columns of this warp.
__device__ __forceinline__ void gate_columns(const One& one, u32 x, bf16* gated, Sender& sender, Receiver& receiver) {
    for (int column = first_column(); column < one.columns(); column = next_column(column)) {
        float gate[2] = {}, up[2] = {};
#pragma unroll 1
        for (int step = 0; step < one.column_steps(); step++) {
            uint4 a[4], v[2] = {};
            receiver.take(a);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int k = (2 * step + i) * PIECE + lane() * 8;
                if (k < one.hidden) v[i] = load_shared16(x + k * 2);
            }
            sender.fetch();
#pragma unroll
            for (int i = 0; i < 2; i++) gate[i] = dot8(a[2 * i], v[i], gate[i]), up[i] = dot8(a[2 * i + 1], v[i], up[i]);
        }
        float of_gate = warp_sum(gate[0] + gate[1]), of_up = warp_sum(up[0] + up[1]);
        if (lane() == 0) gated[column] = to_bf16(silu(of_gate) * of_up);
    }
}

/// A row of 16 outputs for every choice, by the warps of its two halves.
struct Outputs {
    float y[CHOICES_MAX][HALVES][UNIT];
};

/// This warp's part of a unit of the second product. The row is column 0 of operand B: lanes 0 to 3 have it.
__device__ __forceinline__ void down_unit(const One& one, u32 gated, Outputs& outputs, Sender& sender, Receiver& receiver) {
    int half = warp() % HALVES;
    for (int choice = warp() / HALVES; choice < one.chosen.count; choice += TURNS) {
        float4 sum = {};
#pragma unroll 1
        for (int step = half; step < one.down_steps(); step += HALVES) {
            uint4 a[4], b[2] = {};
            receiver.take(a);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int k = step * DOWN_K + lane() % 4 * 8 + 32 * i;
                if (lane() < 4 && k < one.width) b[i] = load_shared16(gated + (choice * one.width + k) * 2);
            }
            sender.fetch();
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma16816(sum, a[2 * i].x, a[2 * i + 1].x, a[2 * i].y, a[2 * i + 1].y, b[i].x, b[i].y);
                mma16816(sum, a[2 * i].z, a[2 * i + 1].z, a[2 * i].w, a[2 * i + 1].w, b[i].z, b[i].w);
            }
        }
        float* y = outputs.y[choice][half] + lane() / 4;
        if (lane() % 4 == 0) y[0] = sum.x, y[8] = sum.z;
    }
}

template <typename Out>
__device__ __forceinline__ void write_unit(const One& one, const Outputs& outputs, Out* out, int unit, int sums) {
    int row = threadIdx.x % UNIT, output = unit * UNIT + row, choice = threadIdx.x / UNIT;
    if (output >= one.hidden) return;
    if (!sums) {
        if (choice >= one.chosen.count) return;
        float y = outputs.y[choice][0][row] + outputs.y[choice][1][row];
        out[(u64)one.chosen.place[choice] * one.hidden + output] = From<Out>::of(y);
    } else if (choice == 0) {
        float total = 0.0f, before = sums == 2 ? to_float(out[output]) : 0.0f;
        for (int c = 0; c < one.chosen.count; c++) total = fmaf(one.chosen.weight[c], outputs.y[c][0][row] + outputs.y[c][1][row], total);
        out[output] = From<Out>::of(before + total);
    }
}

template <typename Out>
__device__ __forceinline__ void experts_one(const bf16* x, const float* routes, const bf16* gate_up, const bf16* down, bf16* gated, Out* out,
                                            u32* counter, const Choosers& who, int hidden, int width, int sums) {
    __shared__ Chosen chosen;
    __shared__ Outputs outputs;
    let_next_kernel_start();
    wait_for_kernels_before();
    // The same for all blocks: nobody waits for one that is gone.
    if (!is_real(who, 0)) return;
    u8* rest = one_shared + DEPTH * ONE_WARPS * SLOT;
    u32 ring = shared_address(one_shared) + warp() * DEPTH * SLOT + lane() * 16, inputs = shared_address(rest);
    for (int i = threadIdx.x * 8; i < hidden; i += ONE_THREADS * 8) cp_async16(inputs + i * 2, x + i, true);
    cp_async_commit();
    read_choices(routes, who, chosen);
    One one{gate_up, down, hidden, width, chosen};
    Sender sender(one, ring);
    Receiver receiver{ring};
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; i++) sender.fetch();
    cp_async_wait<DEPTH - 1>();
    __syncthreads();
    gate_columns(one, inputs, gated, sender, receiver);
    meet(counter);
    for (int i = threadIdx.x * 8; i < one.columns(); i += ONE_THREADS * 8) *(uint4*)(rest + i * 2) = load_fresh16(gated + i);
    __syncthreads();
    for (int unit = blockIdx.x; unit < one.units(); unit += gridDim.x) {
        down_unit(one, inputs, outputs, sender, receiver);
        __syncthreads();
        write_unit(one, outputs, out, unit, sums);
        __syncthreads();
    }
    cp_async_wait<0>();
}

#define EXPERTS_ONE(NAME, OUT)                                                                                              \
    extern "C" __global__ void __launch_bounds__(ONE_THREADS, 2)                                                            \
        NAME(const bf16* x, const float* routes, const bf16* gate_up, const bf16* down, bf16* gated, OUT* out, u32* counter, \
             const u32* real_rows, int lanes, int lane_rows, int top_k, int first, int held, int hidden, int width, int sums) { \
        experts_one(x, routes, gate_up, down, gated, out, counter, {real_rows, lanes, lane_rows, top_k, first, held},        \
                    hidden, width, sums);                                                                                   \
    }
EXPERTS_ONE(experts_one_bf16, bf16)
EXPERTS_ONE(experts_one_out32, float)
