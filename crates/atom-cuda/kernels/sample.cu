// Sampling, first part: over all logits, many blocks a row.
//
// A step samples by three launches on one stream, each with a SampleArgs by value (sample.cuh):
//   sample_peaks    grid (splits, out rows of the bucket), 128 threads
//   sample_masses   grid (splits, out rows of the bucket), 128 threads
//   sample_finish   grid (out rows of the bucket), 512 threads (sample_finish.cu)
// All three may overlap with the kernel in front (programmatic stream serialization); before they wait they read the
// header and `rows` only, which the step's upload brings. `splits` is fixed at capture; 1 ..= blocks, any number gives the same bits. Blocks whose row is not below
// header[OUT_ROWS] return. No scratch needs to be cleared: what a launch reads, an earlier one of the step wrote.
// The slot of a row that samples is no other's in the step. In front of them, in a step that admits requests with
// penalties or biases: sample_load_seen, sample_load_biases (sample_load.cu).
#include "sample.cuh"

constexpr u32 THREADS = 128;
constexpr u32 WARPS = THREADS / 32;

/// Blocks of tokens of a split, `from` and up to `to`.
struct Split {
    u32 from, to;
};

__device__ __forceinline__ Split split_of(const SampleArgs& a) {
    u32 blocks = ceil_div(a.vocab, BLOCK), each = ceil_div(blocks, a.splits);
    u32 from = blockIdx.x * each;
    return {from, min(from + each, blocks)};
}

/// Writes the largest values of four groups, one a lane, and returns the largest of them to all lanes.
__device__ __forceinline__ u32 group_peaks(const float (&x)[GROUPS_OF_BLOCK][4], u32 lane, u32* keys) {
    u32 mine = 0, largest = 0;
#pragma unroll
    for (u32 g = 0; g < GROUPS_OF_BLOCK; g++) {
        float top = max_nan(max_nan(x[g][0], x[g][1]), max_nan(x[g][2], x[g][3]));
        u32 key = __reduce_max_sync(0xffffffffu, ordered(top));
        mine = lane == g ? key : mine;
        largest = max(largest, key);
    }
    if (lane < GROUPS_OF_BLOCK) keys[lane] = mine;
    return largest;
}

/// Largest logit of every group of 128 tokens and of every split, of the logits that the choice is made from and,
/// where these differ and are asked for, of the model's own. Any NaN counts as largest.
extern "C" __global__ void __launch_bounds__(THREADS) sample_peaks(const __grid_constant__ SampleArgs a) {
    u32 row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    let_next_start();
    bool real = row < (u32)a.header[OUT_ROWS];
    const SampleRow& r = a.rows[row];
    wait_for_inputs();
    if (!real) return;
    Logits logits = logits_of(a, row, r, CHOICE);
    bool raw = keeps_raw(r), changes = logits.changes();
    u32 groups = ceil_div(a.vocab, BLOCK) * GROUPS_OF_BLOCK;
    u32* keys = a.keys + (u64)row * 2 * groups;
    u32 largest[2] = {0, 0};
    Split split = split_of(a);
    for (u32 block = split.from + warp; block < split.to; block += WARPS) {
        u32 group = block * GROUPS_OF_BLOCK;
        float x[GROUPS_OF_BLOCK][4];
#pragma unroll
        for (u32 g = 0; g < GROUPS_OF_BLOCK; g++) logits.load(group + g, lane, x[g]);
        if (raw) largest[RAW] = max(largest[RAW], group_peaks(x, lane, keys + groups + group));
        if (changes) {
#pragma unroll
            for (u32 g = 0; g < GROUPS_OF_BLOCK; g++) logits.change(group + g, lane, x[g]);
        }
        largest[CHOICE] = max(largest[CHOICE], group_peaks(x, lane, keys + group));
    }
    __shared__ u32 tops[2][WARPS];
    if (lane == 0) tops[CHOICE][warp] = largest[CHOICE], tops[RAW][warp] = largest[RAW];
    __syncthreads();
    if (threadIdx.x < 2) {
        u32 top = 0;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) top = max(top, tops[threadIdx.x][w]);
        a.peaks[(u64)(row * 2 + threadIdx.x) * a.splits + blockIdx.x] = top;
    }
}

/// Weight of every block of tokens for one set of logits; `both`: the other set's weights are the same.
template <Division D>
__device__ __forceinline__ void weigh_blocks_by(const SampleArgs& a, u32 row, const SampleRow& r, Set set,
                                                const Weights& w, bool both) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = ceil_div(a.vocab, BLOCK);
    Logits logits = logits_of(a, row, r, set);
    u64* masses = a.masses + (u64)row * 2 * blocks;
    Split split = split_of(a);
    for (u32 block = split.from + warp; block < split.to; block += WARPS) {
        float x[GROUPS_OF_BLOCK][4];
#pragma unroll
        for (u32 g = 0; g < GROUPS_OF_BLOCK; g++) logits.load_changed(block * GROUPS_OF_BLOCK + g, lane, x[g]);
        u64 sum = 0;
#pragma unroll
        for (u32 g = 0; g < GROUPS_OF_BLOCK; g++)
#pragma unroll
            for (u32 j = 0; j < 4; j++) sum += mass_by<D>(x[g][j], w);
        sum = warp_sum(sum);
        if (lane == 0 && (set == CHOICE || both)) masses[block] = sum;
        if (lane == 0 && (set == RAW || both)) masses[blocks + block] = sum;
    }
}

__device__ void weigh_blocks(const SampleArgs& a, u32 row, const SampleRow& r, Set set, float temperature, bool both) {
    Weights w = weights(peak_of(a, row, keeps_raw(r) ? set : CHOICE), temperature);
    if (temperature == 1.0f) weigh_blocks_by<UNIT>(a, row, r, set, w, both);
    else weigh_blocks_by<INVERSE>(a, row, r, set, w, both);
}

/// Weights at the row's temperature where all tokens take part in a draw, and at 1 where log-probabilities are asked for.
extern "C" __global__ void __launch_bounds__(THREADS) sample_masses(const __grid_constant__ SampleArgs a) {
    u32 row = blockIdx.y;
    let_next_start();
    const SampleRow& r = a.rows[row];
    bool real = row < (u32)a.header[OUT_ROWS], choice = real && weighs_all(r), raw = real && r.flags & REPORTS;
    wait_for_inputs();
    bool same = choice && raw && !keeps_raw(r) && r.temperature == 1.0f;
    // A row with NaN has no largest logit; its weights mean nothing and nobody reads them.
#pragma unroll 1
    for (u32 set = choice ? CHOICE : RAW; set < (raw && !same ? 2 : 1); set++)
        weigh_blocks(a, row, r, (Set)set, set == CHOICE ? r.temperature : 1.0f, same);
}
