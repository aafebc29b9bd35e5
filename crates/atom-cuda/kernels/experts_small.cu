// Op::Experts for few rows (decode): bf16 weights stream once through persistent blocks; see stream.cuh.
//
// Definitions: ROW_TILES (1, 2, 4: tiles of up to 8 ROW_TILES choices), DEPTH (of the ring, in steps of 64 bytes a thread).
//   experts_plan's experts_place (tile_rows = 8 * ROW_TILES, granule = 8), then
//   experts_small_gate_bf16          gated[position, w] = silu(gate . x) * (up . x), positions in sorted order
//       x [rows, hidden], gate_up [held, 2 width, hidden], gated [rows * top_k, width]
//   experts_small_down_{bf16,out32}  y [rows * top_k, hidden] by slot, bf16 or float, unweighted
//       gated, down [held, hidden, width]
//   and, if it sums, experts_combine_f32_* over y in f32.
//
// grid = multiprocessors of the device, block 256, one block a multiprocessor.
// dynamic shared memory = DEPTH * 16384 + ROW_TILES * 8192 + 8 * ROW_TILES * (ceil(inputs / 128) * 256 + 64), inputs = hidden
// for gate, width for down. hidden and width multiples of 8.
// Scratch: plan (see there), gated rows * top_k * width * 2 bytes, y rows * top_k * hidden * 4 bytes.
// With equal *_WARPS below, an output's bits do not depend on ROW_TILES, DEPTH, the grid or other rows.
#include "experts_choices.cuh"
#include "stream.cuh"

constexpr int GATE_WARPS = 8; // along K: 16 weight rows (8 gate, 8 up) a unit
constexpr int DOWN_WARPS = 4; // along K: 32 weight rows a unit, since width is short

struct GateJob {
    static constexpr bool WEIGHTS_FIRST = false; // the plan says which
    const bf16* x;
    const bf16* matrix;
    bf16* gated;
    const u32* counts;
    const uint4* tiles;
    const u32* slots;
    int inputs, width, top_k;

    __device__ __forceinline__ int per_tile() const { return (width + 7) / 8; }
    __device__ __forceinline__ int units() const { return counts[1] * per_tile(); }
    __device__ __forceinline__ int tile_of(int unit) const { return unit / per_tile(); }
    __device__ __forceinline__ int tile_rows(int tile) const { return tiles[tile].z; }
    template <bool ASYNC> __device__ __forceinline__ void load_inputs(int tile, u32 to) const {
        uint4 at = tiles[tile];
        for (int row = threadIdx.x / 32; row < at.z; row += 8)
            load_input_row<ASYNC>(x + (u64)(slots[at.y + row] / top_k) * inputs, to, inputs, row);
    }
    /// A unit has 8 columns: their gate rows are the low 8 rows of the MMA, their up rows the high 8.
    __device__ __forceinline__ WeightRows weights(int unit, int, int g) const {
        int column = unit % per_tile() * 8 + g;
        if (column >= width) return {nullptr, nullptr};
        const bf16* gate = matrix + ((u64)tiles[tile_of(unit)].x * 2 * width + column) * inputs;
        return {gate, gate + (u64)width * inputs};
    }
    __device__ __forceinline__ void store(int unit, int tile, int, int row, int g, float4 sum) const {
        int column = unit % per_tile() * 8 + g, count = tiles[tile].z;
        if (column >= width) return;
        bf16* to = gated + (u64)(tiles[tile].y + row) * width + column;
        if (row < count) to[0] = to_bf16(silu(sum.x) * sum.z);
        if (row + 1 < count) to[width] = to_bf16(silu(sum.y) * sum.w);
    }
};

template <typename Y> struct DownJob {
    static constexpr bool WEIGHTS_FIRST = true; // experts_small_gate, right before, waited for the plan
    const bf16* gated;
    const bf16* matrix;
    Y* y;
    const u32* counts;
    const uint4* tiles;
    const u32* slots;
    int inputs, hidden;
    static constexpr int ROWS = 16 * (8 / DOWN_WARPS);

    __device__ __forceinline__ int per_tile() const { return (hidden + ROWS - 1) / ROWS; }
    __device__ __forceinline__ int units() const { return counts[1] * per_tile(); }
    __device__ __forceinline__ int tile_of(int unit) const { return unit / per_tile(); }
    __device__ __forceinline__ int tile_rows(int tile) const { return tiles[tile].z; }
    template <bool ASYNC> __device__ __forceinline__ void load_inputs(int tile, u32 to) const {
        uint4 at = tiles[tile];
        for (int row = threadIdx.x / 32; row < at.z; row += 8)
            load_input_row<ASYNC>(gated + (u64)(at.y + row) * inputs, to, inputs, row);
    }
    __device__ __forceinline__ WeightRows weights(int unit, int group, int g) const {
        int row = unit % per_tile() * ROWS + group * 16 + g;
        const bf16* low = matrix + ((u64)tiles[tile_of(unit)].x * hidden + row) * inputs;
        return {row < hidden ? low : nullptr, row + 8 < hidden ? low + (u64)8 * inputs : nullptr};
    }
    __device__ __forceinline__ void store(int unit, int tile, int group, int row, int g, float4 sum) const {
        int column = unit % per_tile() * ROWS + group * 16 + g, count = tiles[tile].z, first = tiles[tile].y;
        if (row < count) put(slots[first + row], column, sum.x, sum.z);
        if (row + 1 < count) put(slots[first + row + 1], column, sum.y, sum.w);
    }
    __device__ __forceinline__ void put(u32 slot, int column, float low, float high) const {
        Y* to = y + (u64)slot * hidden + column;
        if (column < hidden) to[0] = From<Y>::of(low);
        if (column + 8 < hidden) to[8] = From<Y>::of(high);
    }
};

extern __shared__ __align__(128) u8 small_shared[];

extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 1)
    experts_small_gate_bf16(const bf16* x, const bf16* gate_up, bf16* gated, const u32* counts, const uint4* tiles, const u32* slots,
                            int hidden, int width, int top_k) {
    GateJob job{x, gate_up, gated, counts, tiles, slots, hidden, width, top_k};
    stream_products<GATE_WARPS, ROW_TILES, DEPTH>(job, small_shared);
}

#define SMALL_DOWN(NAME, Y)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(STREAM_THREADS, 1)                                                         \
        NAME(const bf16* gated, const bf16* down, Y* y, const u32* counts, const uint4* tiles, const u32* slots, int hidden, \
             int width) {                                                                                                   \
        DownJob<Y> job{gated, down, y, counts, tiles, slots, width, hidden};                                                \
        stream_products<DOWN_WARPS, ROW_TILES, DEPTH>(job, small_shared);                                                   \
    }
SMALL_DOWN(experts_small_down_bf16, bf16)
SMALL_DOWN(experts_small_down_out32, float)
