// What the sampling kernels share: a row's parameters, its logits as the choice sees them, and exact weights.
//
// Everything here follows atom-cpu's `sample` to the bit. A token's weight e^((logit - largest) / temperature) is a
// whole number of 2^-40, so sums of weights are exact: no number of blocks and no order of adding can change a draw, and
// the CPU draws the same token from the same logits. For that every step of a weight is written with a rounding
// intrinsic; nothing may be contracted or approximated. So tokens are the CPU's, without exception. Log-probabilities end
// in a logarithm in f64 of another library and may differ by a unit in the last place of f32.
#pragma once
#include "rows.cuh"

/// Tokens that one warp reads at a time, four a lane. The largest logit of each group is kept, so that who looks for
/// likely tokens reads few groups.
constexpr u32 GROUP = 128;
/// Groups that are weighed together.
constexpr u32 GROUPS_OF_BLOCK = 4;
constexpr u32 BLOCK = GROUP * GROUPS_OF_BLOCK;
constexpr u32 TOP_MAX = 20; // atom_base::limits::TOP_LOGPROBS_MAX

/// How one out row is sampled or scored. Written by `SampleRow` in src/sample_rows.rs.
struct SampleRow {
    u32 slot;
    u32 position; // of the token that is chosen
    u32 flags;    // see RowFlag
    u32 target;   // the token to score
    float temperature;
    float top_p;      // 1: off
    double min_p_log; // temperature * ln(min_p), 0 or less; read with TRUNCATES_MIN_P
    u32 top_k;        // 0: off; else less than the vocabulary
    u32 top;          // alternatives to report
    u32 choice;
    u32 biases; // entries in the slot's bias table
    u64 seed;
    float repetition;
    float frequency;
    float presence;
    u32 unused[3];
};
static_assert(sizeof(SampleRow) == 80);

enum RowFlag : u32 {
    SCORES_TARGET = 1,   // reports the target instead of choosing
    PENALISES = 2,       // reads and writes the slot's history
    BIASES = 4,          // adds the slot's biases
    REPORTS = 8,         // log-probabilities are asked for
    TRUNCATES_MIN_P = 16, // min_p is above 0
    MASKED = 32           // waits for the host to say which tokens may be chosen
};

struct Bias {
    u32 token;
    float bias;
};

/// What a row gets back. Read by `Scored` in src/sample_rows.rs.
struct Scored {
    u32 token; // NOT_A_NUMBER: no token can be chosen
    float logprob;
    u32 top; // entries below
    u32 unused;
    u32 tokens[TOP_MAX];
    float logprobs[TOP_MAX];
};
static_assert(sizeof(Scored) == 176);
constexpr u32 NOT_A_NUMBER = 0xffffffffu;

/// Parameters of sample_peaks, sample_masses and sample_finish. `blocks` = ceil(vocab / 512), `groups` = 4 blocks.
struct SampleArgs {
    float* logits;         // [out rows, vocab], starts on 16 bytes; written where a mask forbids a token
    const SampleRow* rows; // [out rows]
    const int* header;     // of the step
    u16* seen;             // [slots, 512 blocks]: bit 15: in the prompt; others: how often generated
    const u32* biased;     // [slots, 16 blocks]: a bit for each token that has a bias
    const Bias* biases;    // [slots, bias_max], sorted by token
    u32* keys;             // [out rows, 2, groups] scratch: largest logit of each group
    u64* masses;           // [out rows, 2, blocks] scratch: weight of each block
    u32* peaks;            // [out rows, 2, splits] scratch: largest logit of each split
    Scored* results;       // [out rows]
    u32* last_token;       // [slots]: what the row's slot said last
    const u8* gate;        // [2 turns, gate_stride], written by the host: u32[out rows], masks
    u32 vocab;             // at most 524,288
    u32 splits;            // grid.x of sample_peaks and sample_masses
    u32 bias_max;
    u32 gate_stride; // bytes of a turn
    u32 masks;       // where masks begin in a turn: u32[out rows, ceil(vocab / 32)]
    u32 unused;
};

/// Which logits an array is about: those that the choice is made from, and the model's own.
enum Set : u32 { CHOICE = 0, RAW = 1 };

__device__ __forceinline__ u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }

// ---- order ----

/// A float as a number of the same order. Both zeros are one; NaN from `max_nan` is above all.
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
    return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ float unordered(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/// The larger, the likelier, and among equals the lower token.
__device__ __forceinline__ u64 token_key(u32 key, u32 token) { return (u64)key << 32 | (u32)~token; }

/// NaN if either is.
__device__ __forceinline__ float max_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < __uint_as_float(0x7f800000u); }

// ---- logits ----

/// What penalties and biases do to a row's logits.
struct Changes {
    const u16* seen;   // null: no penalties
    const u32* biased; // null: no biases
    const Bias* biases;
    u32 bias_count;
    float repetition, frequency, presence;

    /// The logit of a token with this entry of its slot's history.
    __device__ __forceinline__ float penalised(float x, u32 entry) const {
        if (!entry) return x;
        x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
        u32 count = entry & 0x7fffu;
        return count ? __fsub_rn(__fsub_rn(x, __fmul_rn(frequency, (float)count)), presence) : x;
    }

    /// With every bias that is listed for the token, in the order of the list.
    __device__ float with_bias(float x, u32 token) const {
        u32 low = 0, high = bias_count;
        while (low < high) {
            u32 middle = (low + high) / 2;
            if (biases[middle].token < token) low = middle + 1;
            else high = middle;
        }
        for (; low < bias_count && biases[low].token == token; low++) x = __fadd_rn(x, biases[low].bias);
        return x;
    }
};

/// Four logits of tokens `first`, `first + apart` .. changed: entries of the history in 16 bits each, and a bit for each
/// that has a bias. Not inlined: few tokens come here, and passes over the others stay short.
__device__ __noinline__ float4 changed(Changes c, u32 first, u32 apart, uint2 entries, u32 biased, float4 x) {
    x.x = c.penalised(x.x, entries.x & 0xffffu), x.y = c.penalised(x.y, entries.x >> 16);
    x.z = c.penalised(x.z, entries.y & 0xffffu), x.w = c.penalised(x.w, entries.y >> 16);
    if (biased & 1) x.x = c.with_bias(x.x, first);
    if (biased & 2) x.y = c.with_bias(x.y, first + apart);
    if (biased & 4) x.z = c.with_bias(x.z, first + 2 * apart);
    if (biased & 8) x.w = c.with_bias(x.w, first + 3 * apart);
    return x;
}

/// A row's logits, as they are or as the choice sees them.
struct Logits {
    const float* raw;
    u32 vocab;
    bool aligned; // rows start on 16 bytes
    Changes c;

    __device__ __forceinline__ bool changes() const { return c.seen || c.biased; }

    __device__ __forceinline__ float at(u32 token) const {
        float x = raw[token];
        u32 entry = c.seen ? c.seen[token] : 0, biased = c.biased ? c.biased[token / 32] >> token % 32 & 1 : 0;
        return entry | biased ? changed(c, token, 0, make_uint2(entry, 0), biased, make_float4(x, 0, 0, 0)).x : x;
    }

    /// The token of a lane's `j`-th value of a group. Rows that start anywhere are read word by word.
    __device__ __forceinline__ u32 token(u32 group, u32 lane, u32 j) const {
        return group * GROUP + (aligned ? lane * 4 + j : j * 32 + lane);
    }

    /// Four values of a lane as the model gave them; minus infinity behind the vocabulary.
    __device__ __forceinline__ void load(u32 group, u32 lane, float (&x)[4]) const {
        const float below = __uint_as_float(0xff800000u);
        u32 first = token(group, lane, 0);
        if (aligned) {
            float4 v = make_float4(below, below, below, below);
            if (first < vocab) v = *(const float4*)(raw + first);
            x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        } else {
#pragma unroll
            for (u32 j = 0; j < 4; j++) x[j] = first + j * 32 < vocab ? raw[first + j * 32] : below;
        }
    }

    /// The same four values as the choice sees them.
    __device__ __forceinline__ void change(u32 group, u32 lane, float (&x)[4]) const {
        u32 first = token(group, lane, 0), apart = aligned ? 1 : 32, biased = 0;
        uint2 entries = make_uint2(0, 0);
        if (aligned) {
            if (c.seen) entries = *(const uint2*)(c.seen + first);
            if (c.biased) biased = c.biased[first / 32] >> first % 32 & 15;
        } else {
            if (c.seen) {
                entries.x = c.seen[first] | (u32)c.seen[first + 32] << 16;
                entries.y = c.seen[first + 64] | (u32)c.seen[first + 96] << 16;
            }
            if (c.biased) {
#pragma unroll
                for (u32 j = 0; j < 4; j++) biased |= (c.biased[first / 32 + j] >> first % 32 & 1) << j;
            }
        }
        if (!(entries.x | entries.y | biased)) return;
        float4 y = changed(c, first, apart, entries, biased, make_float4(x[0], x[1], x[2], x[3]));
        x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    }

    __device__ __forceinline__ void load_changed(u32 group, u32 lane, float (&x)[4]) const {
        load(group, lane, x);
        if (changes()) change(group, lane, x);
    }
};

/// `set` RAW: as the model gave them.
__device__ __forceinline__ Logits logits_of(const SampleArgs& a, u32 row, const SampleRow& r, Set set) {
    u32 blocks = ceil_div(a.vocab, BLOCK);
    Logits l;
    l.raw = a.logits + (u64)row * a.vocab;
    l.vocab = a.vocab;
    l.aligned = a.vocab % 4 == 0;
    l.c.seen = set == CHOICE && r.flags & PENALISES ? a.seen + (u64)r.slot * blocks * BLOCK : nullptr;
    l.c.biased = set == CHOICE && r.flags & BIASES ? a.biased + (u64)r.slot * blocks * (BLOCK / 32) : nullptr;
    l.c.biases = a.biases + (u64)r.slot * a.bias_max;
    l.c.bias_count = r.biases;
    l.c.repetition = r.repetition, l.c.frequency = r.frequency, l.c.presence = r.presence;
    return l;
}

/// Whether the model's own logits are kept apart: they are asked for, and the choice sees others.
__device__ __forceinline__ bool keeps_raw(const SampleRow& r) {
    return r.flags & REPORTS && r.flags & (PENALISES | BIASES);
}

/// Whether all tokens are weighed for the choice; otherwise nothing is, or the likeliest ones only.
__device__ __forceinline__ bool weighs_all(const SampleRow& r) {
    return !(r.flags & (SCORES_TARGET | TRUNCATES_MIN_P)) && r.temperature > 0.0f && r.top_k == 0;
}

/// Whether the row takes its largest logit and reports nothing else: sample_masses then does all, and sample_finish leaves.
__device__ __forceinline__ bool only_takes_largest(const SampleRow& r) {
    return !(r.flags & (SCORES_TARGET | REPORTS)) && r.temperature == 0.0f;
}

/// Writes a row's token without log-probabilities, and keeps it for the slot's next step; by one thread, when nobody reads
/// the slot's history any more.
__device__ __forceinline__ void write_token(const SampleArgs& a, u32 row, const SampleRow& r, u32 token) {
    Scored& result = a.results[row];
    result.token = token, result.logprob = __uint_as_float(0x7fc00000u), result.top = 0, result.unused = 0;
    if (r.flags & SCORES_TARGET) return;
    // A token that can't be chosen must still be one that the next step can look up.
    a.last_token[r.slot] = token == NOT_A_NUMBER ? 0 : token;
    if (r.flags & PENALISES && token != NOT_A_NUMBER) {
        u16& entry = a.seen[(u64)r.slot * ceil_div(a.vocab, BLOCK) * BLOCK + token];
        if ((entry & 0x7fff) != 0x7fff) entry++;
    }
}

// ---- weights ----

/// How a difference of logits is divided by the temperature; always as a division is rounded.
enum Division : u32 {
    UNIT,   // the temperature is 1
    INVERSE // by the inverse and a correction; right for 1 too
};

struct Weights {
    float largest;
    float temperature;   // times `scale`, as all below
    float inverse, rest; // 1 / temperature is their sum, nearly
    float lowest;        // differences below it weigh 0
    float scale;         // a power of two, so that the inverse of a tiny temperature is a normal number
};

__device__ __forceinline__ Weights weights(float largest, float temperature) {
    Weights w;
    w.largest = largest;
    w.scale = temperature < 1.0f / (1 << 20) ? __uint_as_float((127u + 100u) << 23) : 1.0f;
    w.temperature = __fmul_rn(temperature, w.scale);
    w.inverse = __fdiv_rn(1.0f, w.temperature);
    w.rest = __fmul_rn(__fmaf_rn(-w.temperature, w.inverse, 1.0f), w.inverse);
    // 2^-41 = e^-28.4 rounds to 0; at 30 temperatures no rounding of the quotient can bring it back.
    w.lowest = __fmul_rn(-30.0f, w.temperature);
    return w;
}

/// Lower logits weigh nothing.
__device__ __forceinline__ float last_weighing(const Weights& w) {
    return __fadd_rn(w.largest, __fdiv_rn(w.lowest, w.scale));
}

/// A quotient within an ulp whose remainder is exact comes out rounded right after one step of Newton's method
/// (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990, theorem 5). Where
/// the remainder is too small to be exact, quotients are below 1e-27, and their exponential is 1 all the same.
template <Division D> __device__ __forceinline__ float quotient(float logit, const Weights& w) {
    float a = __fsub_rn(logit, w.largest);
    if (D == UNIT) return fmaxf(a, w.lowest);
    a = fmaxf(__fmul_rn(a, w.scale), w.lowest);
    float q = __fmaf_rn(a, w.inverse, __fmul_rn(a, w.rest));
    return __fmaf_rn(__fmaf_rn(-w.temperature, q, a), w.inverse, q);
}

/// Parts of 2^-40 that a logit weighs: atom-cpu's exponential, step by step, for -30 .. 0.
template <Division D> __device__ __forceinline__ u64 mass_by(float logit, const Weights& w) {
    float x = quotient<D>(logit, w);
    float shifted = __fmaf_rn(x, 1.442695041f, 12582912.0f);
    float n = __fsub_rn(shifted, 12582912.0f);
    float r = __fmaf_rn(n, -0.693147181f, x);
    r = __fmaf_rn(n, 1.9046542e-9f, r);
    float p = 0.001381454f;
    p = __fmaf_rn(p, r, 0.008368745f);
    p = __fmaf_rn(p, r, 0.04166839f);
    p = __fmaf_rn(p, r, 0.16666521f);
    p = __fmaf_rn(p, r, 0.49999994f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    // 2^n and the 2^40 of a part in one: both products are exact.
    float scale = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u + (40u << 23));
    return __float2ull_rn(__fmul_rn(p, scale));
}

__device__ __forceinline__ u64 mass(float logit, const Weights& w) { return mass_by<INVERSE>(logit, w); }

// ---- the generator ----

/// 24 bits of Philox 4x32-10 for one draw of one token (atom-base, rng).
__device__ __forceinline__ u32 uniform_bits(u64 seed, u32 choice, u32 position, u32 draw) {
    u32 c0 = position, c1 = choice, c2 = draw, c3 = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (u32 round = 0; round < 10; round++) {
        u32 left = __umulhi(0xD2511F53u, c0), right = __umulhi(0xCD9E8D57u, c2);
        u32 left_low = 0xD2511F53u * c0, right_low = 0xCD9E8D57u * c2;
        c0 = right ^ c1 ^ k0, c1 = right_low, c2 = left ^ c3 ^ k1, c3 = left_low;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0 >> 8;
}

/// `total * bits / 2^24`, exactly, rounded down: below `total`.
__device__ __forceinline__ u64 part_of(u64 total, u32 bits) {
    return __umul64hi(total, (u64)bits) << 40 | (total * bits) >> 24;
}

/// The least mass that is `top_p` of `total`.
__device__ __forceinline__ u64 share_of(u64 total, float top_p) {
    u64 share = (u64)ceil(__dmul_rn((double)top_p, __ull2double_rn(total)));
    return share < 1 ? 1 : share > total ? total : share;
}

// ---- sums ----

__device__ __forceinline__ u64 warp_sum(u64 x) {
#pragma unroll
    for (u32 lane = 16; lane; lane >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

/// Largest logit of a row, from its splits; by one whole warp.
__device__ __forceinline__ float peak_of(const SampleArgs& a, u32 row, Set set) {
    const u32* peaks = a.peaks + (u64)(row * 2 + set) * a.splits;
    u32 key = 0;
    for (u32 i = threadIdx.x % 32; i < a.splits; i += 32) key = max(key, peaks[i]);
    return unordered(__reduce_max_sync(0xffffffffu, key));
}
