// From a row's logits to its experts and their weights: the rule is that of route.cu. A warp takes a row.
#pragma once
#include "rows.cuh"

struct Router {
    u32 experts;
    u32 top_k;
    u32 is_sigmoid;
    u32 groups;
    u32 groups_kept;
    u32 normalise;
    float scale;
};

constexpr float NO_EXPERT = -1.0f;
/// Added to the sum of sigmoids, as the reference implementations of such routers do.
constexpr float SIGMOID_SUM_MIN = 1e-20f;
constexpr u32 ALL = 0xffffffffu;
/// Key of what was taken: below that of every number and of minus infinity.
constexpr u32 TAKEN = 0;

/// Keys in the order of floats, as integers; what is no number comes as minus infinity.
__device__ __forceinline__ u32 ordered(float key) {
    if (key != key) key = -__int_as_float(0x7f800000);
    // Both zeros are the same.
    u32 bits = __float_as_uint(key + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float unordered(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ u32 warp_largest(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL, x);
#else
#error "integer reductions over a warp need sm_80"
#endif
}

/// Takes the experts of all groups but the best out of `keys`. Lane `g` looks at groups g, g + 32 ..
template <u32 EACH>
__device__ __forceinline__ void keep_best_groups(u32 (&keys)[EACH], const Router& r, u32 lane, u32* shared) {
    u32 size = r.experts / r.groups;
#pragma unroll
    for (u32 j = 0; j < EACH; j++) shared[lane * EACH + j] = keys[j];
    __syncwarp();
    // Keys of this lane's groups; a group is kept if its bit is set.
    u32 of_groups[EACH], kept = 0;
#pragma unroll
    for (u32 j = 0; j < EACH; j++) {
        u32 group = lane + 32 * j;
        of_groups[j] = TAKEN;
        if (group >= r.groups) continue;
        float first = -__int_as_float(0x7f800000), second = first;
        for (u32 i = 0; i < size; i++) {
            float key = unordered(shared[group * size + i]);
            if (key > first) second = first, first = key;
            else second = fmaxf(second, key);
        }
        of_groups[j] = ordered(size == 1 ? first : first + second);
    }
    for (u32 n = 0; n < r.groups_kept; n++) {
        u32 mine = TAKEN;
#pragma unroll
        for (u32 j = 0; j < EACH; j++) mine = max(mine, of_groups[j]);
        u32 best = warp_largest(mine);
        // Groups are numbered by j first, then by lane.
        bool found = false;
#pragma unroll
        for (u32 j = 0; j < EACH; j++) {
            u32 lanes = __ballot_sync(ALL, of_groups[j] == best);
            if (!found && lanes && lane == __ffs(lanes) - 1) of_groups[j] = TAKEN, kept |= 1u << j;
            found |= lanes != 0;
        }
    }
    // All of `shared` was read by the ballots: its first words now hold what is kept.
    shared[lane] = kept;
    __syncwarp();
#pragma unroll
    for (u32 j = 0; j < EACH; j++) {
        u32 expert = lane * EACH + j, group = expert / size;
        if (expert < r.experts && !(shared[group % 32] >> (group / 32) & 1)) keys[j] = TAKEN;
    }
    __syncwarp();
}

/// Lane `l` holds logits of experts `l * EACH ..`; gives their scores. Softmax of a NaN is NaN everywhere.
template <u32 EACH>
__device__ __forceinline__ void score(const float (&logits)[EACH], float (&scores)[EACH], const Router& r, u32 lane) {
    if (r.is_sigmoid) {
#pragma unroll
        for (u32 j = 0; j < EACH; j++) scores[j] = 1.0f / (1.0f + expf(-logits[j]));
        return;
    }
    float peak = -__int_as_float(0x7f800000);
#pragma unroll
    for (u32 j = 0; j < EACH; j++) peak = fmaxf(peak, logits[j]);
    peak = warp_max(peak);
    float sum = 0.0f;
#pragma unroll
    for (u32 j = 0; j < EACH; j++) {
        scores[j] = lane * EACH + j < r.experts ? expf(logits[j] - peak) : 0.0f;
        sum += scores[j];
    }
    sum = 1.0f / warp_sum(sum);
#pragma unroll
    for (u32 j = 0; j < EACH; j++) scores[j] *= sum;
}

/// Chooses `top_k` experts: bit `j` of the result is set if this lane's expert `j` is one. `largest` is the first
/// one's key.
template <u32 EACH> __device__ __forceinline__ u32 choose(u32 (&keys)[EACH], u32 top_k, u32 lane, u32& largest) {
    u32 chosen = 0;
    for (u32 n = 0; n < top_k; n++) {
        u32 mine = keys[0];
#pragma unroll
        for (u32 j = 1; j < EACH; j++) mine = max(mine, keys[j]);
        u32 best = warp_largest(mine);
        if (n == 0) largest = best;
        bool wins = lane == __ffs(__ballot_sync(ALL, mine == best)) - 1;
#pragma unroll
        for (u32 j = 0; j < EACH; j++) {
            bool is_it = wins && keys[j] == best;
            if (is_it) keys[j] = TAKEN, chosen |= 1u << j, wins = false;
        }
    }
    return chosen;
}

template <u32 EACH>
__device__ __forceinline__ void read_logits(const float* logits, const Router& r, float (&x)[EACH]) {
    u32 lane = threadIdx.x % 32;
    if (r.experts == 32 * EACH) {
#pragma unroll
        for (u32 j = 0; j < EACH; j += 4) {
            float4 four = *reinterpret_cast<const float4*>(logits + lane * EACH + j);
            x[j] = four.x, x[j + 1] = four.y, x[j + 2] = four.z, x[j + 3] = four.w;
        }
    } else {
#pragma unroll
        for (u32 j = 0; j < EACH; j++)
            x[j] = lane * EACH + j < r.experts ? logits[lane * EACH + j] : -__int_as_float(0x7f800000);
    }
}

/// A warp's row, of logits that its lanes hold in order. `shared` has a word for each.
template <u32 EACH>
__device__ __forceinline__ void route_row(const float (&x)[EACH], const float* bias, const Router& r, float* out,
                                          u32* shared) {
    u32 lane = threadIdx.x % 32;
    float scores[EACH];
    bool has_nan = false;
#pragma unroll
    for (u32 j = 0; j < EACH; j++) has_nan |= x[j] != x[j];
    has_nan = __any_sync(ALL, has_nan);
    // Where only the chosen's weights matter and order is that of logits, nothing else is exponentiated.
    bool is_plain = !r.is_sigmoid && r.normalise && !bias && r.groups == 1;
    if (!is_plain) score<EACH>(x, scores, r, lane);
    u32 keys[EACH], largest;
#pragma unroll
    for (u32 j = 0; j < EACH; j++) {
        u32 expert = lane * EACH + j;
        float key = is_plain ? x[j] : bias && expert < r.experts ? scores[j] + bias[expert] : scores[j];
        keys[j] = expert < r.experts ? ordered(key) : TAKEN;
    }
    if (r.groups > 1) keep_best_groups<EACH>(keys, r, lane, shared);
    u32 chosen = choose<EACH>(keys, r.top_k, lane, largest);
    float sum = 0.0f;
    u32 before = 0, below = (1u << lane) - 1;
#pragma unroll
    for (u32 j = 0; j < EACH; j++) {
        bool is_chosen = chosen >> j & 1;
        before += __popc(__ballot_sync(ALL, is_chosen) & below);
        if (!is_chosen) continue;
        if (is_plain) scores[j] = expf(x[j] - unordered(largest));
        sum += scores[j];
    }
    float factor = r.scale, lift = 1.0f;
    if (r.normalise) {
        sum = warp_sum(sum);
        // A sum so small that its inverse is infinite comes of a bias that chose experts without any score.
        lift = sum < 1e-30f ? 1e30f : 1.0f;
        factor = 1.0f / ((r.is_sigmoid ? sum + SIGMOID_SUM_MIN : sum) * lift) * r.scale;
    }
#pragma unroll
    for (u32 j = 0; j < EACH; j++) {
        if (!(chosen >> j & 1)) continue;
        out[before] = (float)(lane * EACH + j);
        out[r.top_k + before] = has_nan ? __int_as_float(0x7fffffff) : scores[j] * lift * factor;
        before++;
    }
}
