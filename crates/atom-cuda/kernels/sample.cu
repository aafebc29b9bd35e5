// Sampling, first part: over all logits, many blocks a row.
//
// A step samples by three launches on one stream, each with a SampleArgs by value (sample.cuh):
//   sample_peaks    grid (splits, out rows of the bucket), 128 threads
//   sample_masses   grid (splits, out rows of the bucket), 128 threads
//   sample_finish   grid (out rows of the bucket), 512 threads (sample_finish.cu)
// All three may overlap with the kernel in front (programmatic stream serialization); before they wait they read the
// header and `rows` only, which the step's upload brings. `splits` is fixed at capture; 1 ..= blocks, any number gives the same bits. Blocks whose row is not below
// header[OUT_ROWS] return. A row with a mask waits for it in sample_peaks. No scratch needs to be cleared: what a launch reads, an earlier one of the step wrote.
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

/// A lane's values of a block, as the model gave them. Whole blocks of aligned rows, nearly all, go without questions.
__device__ __forceinline__ void load_block(const Logits& logits, u32 block, u32 lane, float (&x)[GROUPS_OF_BLOCK][4]) {
    if (logits.aligned && (block + 1) * BLOCK <= logits.vocab) {
        const float4* from = (const float4*)(logits.raw + block * BLOCK) + lane;
#pragma unroll
        for (u32 g = 0; g < GROUPS_OF_BLOCK; g++) {
            float4 v = from[g * (GROUP / 4)];
            x[g][0] = v.x, x[g][1] = v.y, x[g][2] = v.z, x[g][3] = v.w;
        }
    } else {
#pragma unroll
        for (u32 g = 0; g < GROUPS_OF_BLOCK; g++) logits.load(block * GROUPS_OF_BLOCK + g, lane, x[g]);
    }
}

/// The same as the choice sees them.
__device__ __forceinline__ void change_block(const Logits& logits, u32 block, u32 lane, float (&x)[GROUPS_OF_BLOCK][4]) {
    if (!logits.changes()) return;
#pragma unroll
    for (u32 g = 0; g < GROUPS_OF_BLOCK; g++) logits.change(block * GROUPS_OF_BLOCK + g, lane, x[g]);
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

/// Stands beside a step's number where the host has no mask for a row.
constexpr u32 NO_MASK = 0x80000000u;

/// Waits for the row's mask and makes every token of the split that it forbids impossible. What is no number stays so: then
/// no token is chosen, as without a mask. Where the host has none, or says nothing for eight times as long as a step may
/// take, the row has no number and chooses nothing.
__device__ __noinline__ void forbid(const SampleArgs& a, u32 row, Split split) {
    u32 sequence = a.header[SEQUENCE];
    const u8* turn = a.gate + (u64)(sequence & 1) * a.gate_stride;
    __shared__ bool is_there;
    if (threadIdx.x == 0) {
        u64 since = now_ns(), limit = (u64)(u32)a.header[PATIENCE_MS] * 1000000;
        u32 word;
        while (true) {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(turn + 4ull * row) : "memory");
            if ((word & ~NO_MASK) == sequence || now_ns() - since > limit) break;
            __nanosleep(500);
        }
        is_there = word == sequence;
    }
    __syncthreads();
    float* logits = a.logits + (u64)row * a.vocab;
    u32 words = ceil_div(a.vocab, 32), lane = threadIdx.x % 32, to = min(split.to * (BLOCK / 32), words);
    const u32* mask = (const u32*)(turn + a.masks) + (u64)row * words;
    if (!is_there) {
        if (threadIdx.x == 0 && split.from < split.to) logits[split.from * BLOCK] = __uint_as_float(0x7fc00000u);
        to = 0;
    }
    // A warp fetches a line of the host's memory at a time: 1,024 tokens.
    for (u32 first = split.from * (BLOCK / 32) + threadIdx.x / 32 * 32; first < to; first += THREADS) {
        u32 mine = ~0u;
        if (first + lane < to)
            asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(mine) : "l"(mask + first + lane));
        for (u32 i = 0; i < 32; i++) {
            u32 allowed = __shfl_sync(0xffffffffu, mine, i), token = (first + i) * 32 + lane;
            if (allowed >> lane & 1 || token >= a.vocab) continue;
            if (logits[token] < __uint_as_float(0x7f800000u)) logits[token] = __uint_as_float(0xff800000u);
        }
    }
    __syncthreads();
}

/// Largest logit of every group of 128 tokens and of every split, of the logits that the choice is made from and,
/// where these differ and are asked for, of the model's own. Any NaN counts as largest.
extern "C" __global__ void __launch_bounds__(THREADS, 8) sample_peaks(const __grid_constant__ SampleArgs a) {
    u32 row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    let_next_start();
    bool real = row < (u32)a.header[OUT_ROWS];
    const SampleRow& r = a.rows[row];
    wait_for_inputs();
    if (!real) return;
    Split split = split_of(a);
    if (r.flags & MASKED) forbid(a, row, split);
    Logits logits = logits_of(a, row, r, CHOICE);
    bool raw = keeps_raw(r);
    u32 groups = ceil_div(a.vocab, BLOCK) * GROUPS_OF_BLOCK;
    u32* keys = a.keys + (u64)row * 2 * groups;
    u32 largest[2] = {0, 0};
    for (u32 block = split.from + warp; block < split.to; block += WARPS) {
        u32 group = block * GROUPS_OF_BLOCK;
        float x[GROUPS_OF_BLOCK][4];
        load_block(logits, block, lane, x);
        if (raw) largest[RAW] = max(largest[RAW], group_peaks(x, lane, keys + groups + group));
        change_block(logits, block, lane, x);
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
        load_block(logits, block, lane, x);
        change_block(logits, block, lane, x);
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

/// The largest logit's first token, by one block.
__device__ __forceinline__ void take_largest(const SampleArgs& a, u32 row, const SampleRow& r) {
    u32 lane = threadIdx.x % 32, blocks = ceil_div(a.vocab, BLOCK), each = ceil_div(blocks, a.splits);
    u32 peak = ordered(peak_of(a, row, CHOICE)), token = 0xffffffffu;
    if (is_finite(unordered(peak))) {
        // Every warp looks for the first split and in it for the first group that has it; the first warp goes on.
        const u32* peaks = a.peaks + (u64)row * 2 * a.splits;
        u32 split = 0xffffffffu, group = 0xffffffffu;
        for (u32 i = lane; i < a.splits; i += 32)
            if (peaks[i] == peak) split = min(split, i);
        split = __reduce_min_sync(0xffffffffu, split);
        const u32* keys = a.keys + (u64)row * 2 * blocks * GROUPS_OF_BLOCK;
        u32 to = min((split + 1) * each, blocks) * GROUPS_OF_BLOCK;
        __shared__ u32 found[WARPS];
        for (u32 g = split * each * GROUPS_OF_BLOCK + threadIdx.x; g < to; g += THREADS)
            if (keys[g] == peak) group = min(group, g);
        group = __reduce_min_sync(0xffffffffu, group);
        if (lane == 0) found[threadIdx.x / 32] = group;
        __syncthreads();
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) group = min(group, found[w]);
        if (threadIdx.x >= 32) return;
        Logits logits = logits_of(a, row, r, CHOICE);
        float x[4];
        logits.load(group, lane, x);
        if (logits.changes()) logits.change(group, lane, x);
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            if (ordered(x[j]) == peak) token = min(token, logits.token(group, lane, j));
        token = __reduce_min_sync(0xffffffffu, token);
    }
    if (threadIdx.x == 0) write_token(a, row, r, token);
}

/// Weights at the row's temperature where all tokens take part in a draw, and at 1 where log-probabilities are asked for.
/// Where neither is needed, the row is done here.
extern "C" __global__ void __launch_bounds__(THREADS, 8) sample_masses(const __grid_constant__ SampleArgs a) {
    u32 row = blockIdx.y;
    let_next_start();
    const SampleRow& r = a.rows[row];
    bool real = row < (u32)a.header[OUT_ROWS], choice = real && weighs_all(r), raw = real && r.flags & REPORTS;
    wait_for_inputs();
    if (real && only_takes_largest(r)) {
        if (blockIdx.x == 0) take_largest(a, row, r);
        return;
    }
    bool same = choice && raw && !keeps_raw(r) && r.temperature == 1.0f;
    // A row with NaN has no largest logit; its weights mean nothing and nobody reads them.
#pragma unroll 1
    for (u32 set = choice ? CHOICE : RAW; set < (raw && !same ? 2 : 1); set++)
        weigh_blocks(a, row, r, (Set)set, set == CHOICE ? r.temperature : 1.0f, same);
}
