// Sampling: what a slot keeps over steps, filled when a request comes or comes back. Both run in front of
// sample_peaks, in stream order behind the step before.
//   sample_load_seen     grid (ceil(512 blocks / 4096), loads at most), 256 threads
//   sample_load_biases   grid (loads at most), 256 threads
// `blocks` = ceil(vocab / 512) as in sample.cuh. Blocks whose load is not below `*count` return. No two loads of a
// launch have the same slot; the tokens of a long prompt may come in several launches, of which the first clears.
#include "sample.cuh"

constexpr u32 THREADS = 256;
/// Tokens whose counts one block holds.
constexpr u32 RANGE = 4096;

/// Written by `SeenLoad` in src/sample_rows.rs.
struct SeenLoad {
    u32 slot;
    u32 clears; // forgets what the slot held
    u32 first;  // of its tokens, in `tokens`
    u32 prompt; // tokens of the prompt, in front
    u32 generated;
    u32 unused[3];
};

/// Written by `BiasLoad` in src/sample_rows.rs.
struct BiasLoad {
    u32 slot;
    u32 first; // of its entries, in `entries`, sorted by token
    u32 entries;
    u32 unused;
};

/// Every block reads all tokens of a load and counts those of its range: nothing is ordered between blocks.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_load_seen(const SeenLoad* loads, const int* count, const u32* tokens, u16* seen, u32 vocab) {
    if (blockIdx.y >= (u32)*count) return;
    SeenLoad load = loads[blockIdx.y];
    u32 stride = ceil_div(vocab, BLOCK) * BLOCK, from = blockIdx.x * RANGE;
    __shared__ u32 counts[RANGE]; // bit 31: in the prompt
    u16* entries = seen + (u64)load.slot * stride + from;
    u32 width = min(RANGE, stride - from);
    for (u32 i = threadIdx.x; i < width; i += THREADS)
        counts[i] = load.clears ? 0 : (u32)(entries[i] & 0x7fff) | (u32)(entries[i] >> 15) << 31;
    __syncthreads();
    for (u32 i = threadIdx.x; i < load.prompt + load.generated; i += THREADS) {
        u32 at = tokens[load.first + i] - from;
        if (at >= width) continue;
        if (i < load.prompt) atomicOr(&counts[at], 1u << 31);
        else atomicAdd(&counts[at], 1);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < width; i += THREADS)
        entries[i] = (u16)(min(counts[i] & 0x7fffffffu, 0x7fffu) | counts[i] >> 31 << 15);
}

extern "C" __global__ void __launch_bounds__(THREADS) sample_load_biases(
    const BiasLoad* loads, const int* count, const Bias* entries, u32* biased, Bias* biases, u32 vocab, u32 bias_max) {
    if (blockIdx.x >= (u32)*count) return;
    BiasLoad load = loads[blockIdx.x];
    u32 words = ceil_div(vocab, BLOCK) * (BLOCK / 32);
    u32* bits = biased + (u64)load.slot * words;
    for (u32 i = threadIdx.x; i < words; i += THREADS) bits[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < load.entries; i += THREADS) {
        Bias entry = entries[load.first + i];
        biases[(u64)load.slot * bias_max + i] = entry;
        atomicOr(&bits[entry.token / 32], 1u << entry.token % 32);
    }
}
