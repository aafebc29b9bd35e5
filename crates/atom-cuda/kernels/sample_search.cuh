// What sample_finish searches with: one block over one row.
//
// The order of keys (likelier first, then lower token) is total, and every truncation keeps the first of it; the draw
// follows it too. So each question is "where does a running sum over that order reach a number?". Where the likely
// tokens are few, they are listed and sorted, and one running sum answers all. Where they are many (a flat
// distribution, ties, a large top_k), a sample of the row says about where the sum reaches the number, and `reach`
// narrows the place down by exact sums until what is left can be listed.
//
// A Search lies in its caller's frame; functions that are not inlined copy it, so that loops find it in registers.
#pragma once
#include "sample.cuh"

constexpr u32 THREADS = 512;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 GROUPS_MAX = 2560; // 327,680 tokens
/// Likely tokens that are sorted in shared memory.
constexpr u32 LIST = 4096;
constexpr u32 EACH = LIST / THREADS;

constexpr u32 BINS = 256;
/// Tokens of a sample, and how many stand in a row of its table.
constexpr u32 SAMPLE = 2048;
constexpr u32 SAMPLE_EACH = 8;

struct Room {
    u32 keys[GROUPS_MAX]; // largest logit of each group
    union {
        u64 list[LIST];         // keys of likely tokens
        u32 counts[GROUPS_MAX]; // of tokens of one logit
    };
    u64 sums[WARPS];
    union {
        u32 bins[BINS];
        u64 below[SAMPLE / SAMPLE_EACH + 1]; // of the sample, weight of what is likelier than `samples[i]`
    };
    u32 samples[SAMPLE / SAMPLE_EACH + 1]; // keys, falling, the last of them 0
    u32 listed;
    u32 found;
    u64 left;
};

/// At file scope, so that functions that are not inlined know it for shared memory.
__shared__ Room room;

/// One row of one set of logits, in the hands of a block.
struct Search {
    Logits logits;
    u32 groups;
    u32 warp, lane;
};

// ---- a block's sums; all threads call them and get the result ----

__device__ __forceinline__ u64 block_sum(u64 x) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) room.sums[threadIdx.x / 32] = x;
    __syncthreads();
    u64 sum = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) sum += room.sums[w];
    return sum;
}

__device__ __forceinline__ u32 block_max(u32 x) {
    x = __reduce_max_sync(0xffffffffu, x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) room.sums[threadIdx.x / 32] = x;
    __syncthreads();
    u32 top = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) top = max(top, (u32)room.sums[w]);
    return top;
}

/// Sum of `x` of all lower threads; `total` of all.
__device__ __forceinline__ u64 block_scan(u64 x, u64& total) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 up_to = x;
#pragma unroll
    for (u32 d = 1; d < 32; d <<= 1) {
        u64 other = __shfl_up_sync(0xffffffffu, up_to, d);
        if (lane >= d) up_to += other;
    }
    __syncthreads();
    if (lane == 31) room.sums[warp] = up_to;
    __syncthreads();
    u64 before = up_to - x;
    total = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) {
        if (w < warp) before += room.sums[w];
        total += room.sums[w];
    }
    return before;
}

// ---- passes over the groups that may matter ----

/// Calls `f(group, x)` with a whole warp for every group whose largest logit is at least `low`; `x` are the lane's values.
/// Four groups are read at a time, since one would wait for its memory alone.
template <typename F> __device__ __forceinline__ void each_group(const Search& s, u32 low, F f) {
    constexpr u32 AT_ONCE = 4;
    for (u32 first = s.warp * 32; first < s.groups; first += THREADS) {
        u32 mine = first + s.lane;
        u32 hits = __ballot_sync(0xffffffffu, mine < s.groups && room.keys[mine] >= low);
        while (hits) {
            u32 group[AT_ONCE];
            float x[AT_ONCE][4];
            u32 count = min(__popc(hits), AT_ONCE);
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                group[i] = first + __ffs(hits) - 1;
                if (i < count) s.logits.load(group[i], s.lane, x[i]);
                hits &= hits - 1;
            }
            bool changes = s.logits.changes();
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                if (i >= count) continue;
                if (changes) s.logits.change(group[i], s.lane, x[i]);
                f(group[i], x[i]);
            }
        }
    }
}

/// Puts the tokens of a group that are marked in `in`, a bit for each of the lane's values, on the list.
__device__ __forceinline__ void list_marked(const Search& s, u32 group, const float (&x)[4], u32 in) {
    if (!__any_sync(0xffffffffu, in)) return;
    // Places are handed out by warp: one atomic for all of a group.
    u32 own = __popc(in), up_to = own;
#pragma unroll
    for (u32 d = 1; d < 32; d <<= 1) {
        u32 other = __shfl_up_sync(0xffffffffu, up_to, d);
        if (s.lane >= d) up_to += other;
    }
    u32 start = 0;
    if (s.lane == 31) start = atomicAdd(&room.listed, up_to);
    u32 place = __shfl_sync(0xffffffffu, start, 31) + up_to - own;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        if (!(in >> j & 1)) continue;
        if (place < LIST) room.list[place] = token_key(ordered(x[j]), s.logits.token(group, s.lane, j));
        place++;
    }
}

/// Puts the tokens whose keys are at least `low` on the list, in no order, and returns how many there are: of more than
/// LIST not all have room, and the list is of no use.
__device__ __noinline__ u32 collect(const Search& search, u32 low) {
    const Search s = search;
    __syncthreads();
    if (threadIdx.x == 0) room.listed = 0;
    __syncthreads();
    each_group(s, low, [&](u32 group, const float(&x)[4]) {
        u32 in = 0;
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            in |= (u32)(ordered(x[j]) >= low && s.logits.token(group, s.lane, j) < s.logits.vocab) << j;
        list_marked(s, group, x, in);
    });
    __syncthreads();
    return room.listed;
}

/// Sorts the first `n` of the list, likeliest first. No two keys are equal.
__device__ __noinline__ void sort(u32 n) {
    constexpr u32 FEW = 128;
    if (n <= FEW) {
        u64 key = threadIdx.x < n ? room.list[threadIdx.x] : 0;
        u32 rank = 0;
        if (threadIdx.x < n)
            for (u32 i = 0; i < n; i++) rank += room.list[i] > key;
        __syncthreads();
        if (threadIdx.x < n) room.list[rank] = key;
        __syncthreads();
        return;
    }
    u32 size = 2 * FEW;
    while (size < n) size *= 2;
    for (u32 i = n + threadIdx.x; i < size; i += THREADS) room.list[i] = 0;
    __syncthreads();
    for (u32 run = 2; run <= size; run *= 2) {
        for (u32 step = run / 2; step; step /= 2) {
            for (u32 pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                u32 within = pair & (step - 1), i = (pair - within) * 2 + within, j = i + step;
                u64 a = room.list[i], b = room.list[j];
                if ((a < b) == ((i & run) == 0)) room.list[i] = b, room.list[j] = a;
            }
            __syncthreads();
        }
    }
}

/// Tokens whose key is `key`, ranked by token: those of ranks below `count` go to `list[at + rank]`. If `only_last`, just
/// the last of them does, to `list[at]`.
__device__ __noinline__ void list_equals(const Search& search, u32 key, u64 count, u32 at, bool only_last) {
    const Search s = search;
    // Counts of groups lie where the list does, so ranks are found before anything is listed.
    u64 held = 0;
    __syncthreads();
    if (threadIdx.x < at) held = room.list[threadIdx.x];
    __syncthreads();
    for (u32 g = threadIdx.x; g < s.groups; g += THREADS) room.counts[g] = 0;
    __syncthreads();
    each_group(s, key, [&](u32 group, const float(&x)[4]) {
        u32 count = 0;
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            count += ordered(x[j]) == key && s.logits.token(group, s.lane, j) < s.logits.vocab;
        count = __reduce_add_sync(0xffffffffu, count);
        if (s.lane == 0) room.counts[group] = count;
    });
    __syncthreads();
    // Each thread has a run of groups; ranks of their first tokens replace the counts.
    u32 each = ceil_div(s.groups, THREADS), from = min(threadIdx.x * each, s.groups), to = min(from + each, s.groups);
    u64 sum = 0, total;
    for (u32 g = from; g < to; g++) sum += room.counts[g];
    u64 rank = block_scan(sum, total);
    u64 first = only_last ? count - 1 : 0;
    u32 mine[GROUPS_MAX / THREADS];
    for (u32 g = from; g < to; g++) mine[g - from] = room.counts[g];
    __syncthreads();
    if (threadIdx.x < at) room.list[threadIdx.x] = held;
    for (u32 g = from; g < to; g++) {
        u64 next = rank + mine[g - from];
        // Few groups hold ranks that are asked for: `count` is at most TOP_MAX, or one rank is.
        if (rank < count && next > first)
            for (u32 token = g * GROUP; token < min((g + 1) * GROUP, s.logits.vocab); token++) {
                if (ordered(s.logits.at(token)) != key) continue;
                if (rank >= first && rank < count) room.list[at + rank - first] = token_key(key, token);
                rank++;
            }
        rank = next;
    }
    __syncthreads();
}

/// A key that at least `n` groups reach, `1 <= n <= groups`, so at least `n` tokens do, and few more groups than `n`.
__device__ __noinline__ u32 nth_group(const Search& search, u32 n, u32 peak) {
    const Search s = search;
    u32 least = 0xffffffffu;
    const u32 impossible = ordered(__uint_as_float(0xff800000u));
    if (threadIdx.x < BINS) room.bins[threadIdx.x] = 0;
    for (u32 g = threadIdx.x; g < s.groups; g += THREADS)
        if (room.keys[g] > impossible) least = min(least, room.keys[g]);
    least = ~block_max(~least);
    // Equal steps down from the peak. Rounding can't turn the order of two distances.
    float top = unordered(peak), range = __fsub_rn(top, unordered(least));
    float scale = range > 0.0f ? __fdiv_rn(BINS - 1, range) : 0.0f;
    auto bin = [&](u32 key) {
        return key <= impossible ? BINS - 1
                                 : min(__float2uint_rz(__fmul_rn(__fsub_rn(top, unordered(key)), scale)), BINS - 1);
    };
    for (u32 g = threadIdx.x; g < s.groups; g += THREADS) atomicAdd(&room.bins[bin(room.keys[g])], 1);
    __syncthreads();
    if (s.warp == 0) {
        u32 bins[BINS / 32], sum = 0;
#pragma unroll
        for (u32 i = 0; i < BINS / 32; i++) sum += bins[i] = room.bins[s.lane * (BINS / 32) + i];
        u32 up_to = sum;
#pragma unroll
        for (u32 d = 1; d < 32; d <<= 1) {
            u32 other = __shfl_up_sync(0xffffffffu, up_to, d);
            if (s.lane >= d) up_to += other;
        }
        u32 before = up_to - sum, last = 0;
#pragma unroll
        for (u32 i = 0; i < BINS / 32; i++) {
            before += bins[i];
            last += before < n;
        }
        if (up_to - sum < n && n <= up_to) room.found = s.lane * (BINS / 32) + last;
    }
    __syncthreads();
    u32 last = room.found, low = 0xffffffffu;
    for (u32 g = threadIdx.x; g < s.groups; g += THREADS)
        if (bin(room.keys[g]) <= last) low = min(low, room.keys[g]);
    return ~block_max(~low);
}

/// Where a sum over the order of keys reaches a number: at `token`, whose logit's key is `key`; with it the sum is `sum`.
struct Reached {
    u32 key;
    u32 token;
    u64 sum;
};

/// A table of the row's logits from a sample of them. Takes the list's place.
__device__ __noinline__ void take_sample(const Search& search, const Weights& weights) {
    const Search s = search;
    const Weights w = weights;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < SAMPLE / THREADS; i++) {
        u32 place = i * THREADS + threadIdx.x, token = (u64)place * s.logits.vocab / SAMPLE;
        room.list[place] = token_key(ordered(s.logits.at(token)), token);
    }
    __syncthreads();
    sort(SAMPLE);
    constexpr u32 OWN = SAMPLE / THREADS;
    u64 sum = 0, total;
#pragma unroll
    for (u32 i = 0; i < OWN; i++) sum += mass(unordered((u32)(room.list[threadIdx.x * OWN + i] >> 32)), w);
    u64 before = block_scan(sum, total);
    constexpr u32 SHARERS = SAMPLE_EACH / OWN;
    if (threadIdx.x % SHARERS == 0) {
        room.samples[threadIdx.x / SHARERS] = room.list[threadIdx.x * OWN] >> 32;
        room.below[threadIdx.x / SHARERS] = before;
    }
    if (threadIdx.x == 0) room.samples[SAMPLE / SAMPLE_EACH] = 0, room.below[SAMPLE / SAMPLE_EACH] = total;
    __syncthreads();
}

/// Where the sample puts the place between `high` and `low` that has `part` of their amount above it: a window of keys
/// around it. If the sample has nothing to say there, all of it on the first pass, and later its middle third.
__device__ __forceinline__ void guess(const Search& s, bool by_mass, u32 pass, u32 low, u32 high, double part, u32& from,
                                      u32& to) {
    constexpr int TABLE = SAMPLE / SAMPLE_EACH;
    // As wide as three quarters of the list have room for: about the error of the sample in a vocabulary of 160,000.
    const int away = max(((int)(LIST * 3 / 4 * TABLE / s.logits.vocab) - 1) / 2, 1);
    bool mine = threadIdx.x < TABLE;
    u32 key = mine ? room.samples[threadIdx.x] : 0;
    auto amount = [&](u32 i) { return by_mass ? (double)room.below[i] : (double)i; };
    u32 first = __syncthreads_count(mine && key >= high), last = __syncthreads_count(mine && key >= low);
    double wanted = amount(first) + part * (amount(last) - amount(first));
    int row = __syncthreads_count(mine && amount(threadIdx.x) < wanted);
    if (last > first + 1 && pass < 4) {
        from = room.samples[min(row + away, TABLE)];
        // At least one key, so that many tokens of one logit are told apart from the others at once.
        to = max(room.samples[max(row - away, 0)], room.samples[min(row, TABLE)] + 1);
    } else if (pass < 4) {
        from = low, to = high;
    } else {
        u32 third = max((high - low) / 3, 1u);
        from = low + third, to = high - third;
    }
    from = min(max(from, low), high - 1);
    to = min(max(to, from + 1), high);
}

/// What stands at keys of at least `key` amounts to `sum`.
struct Known {
    u32 key;
    u64 sum;
};

/// Amounts are weights, or 1 each where there are no weights. `high` is known to amount to less than `need`; everything
/// from `low.key` on must reach it, and amounts to about `low.sum`. A pass lists the tokens of a window and sums what lies above it and in it; that
/// answers, or tells on which side of the window to go on. A sample must have been taken.
__device__ __noinline__ Reached reach(const Search& search, bool by_mass, const Weights& weights, Known least,
                                      Known most, u64 need) {
    const Search s = search;
    const Weights w = weights;
    u64 above = most.sum, about = least.sum;
    u32 low = max(least.key, 1), high = most.key, listed = LIST + 1; // 0 is no logit's key
    for (u32 pass = 0; listed > LIST && !(pass && high - low == 1); pass++) {
        u32 from, to;
        double part = about > need ? (double)(need - above) / (double)(about - above) : 1.0;
        guess(s, by_mass, pass, low, high, part, from, to);
        __syncthreads();
        if (threadIdx.x == 0) room.listed = 0;
        __syncthreads();
        u64 over = 0, within = 0;
        each_group(s, from, [&](u32 group, const float(&x)[4]) {
            u32 in = 0;
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 key = ordered(x[j]);
                u64 amount = by_mass ? mass(x[j], w) : 1;
                // Behind the vocabulary all is as unlikely as can be, but a token that counts may be so too.
                if (s.logits.token(group, s.lane, j) >= s.logits.vocab) key = 0;
                bool is_in = key >= from && key < to;
                in |= (u32)is_in << j;
                within += is_in ? amount : 0;
                over += key >= to && key < high ? amount : 0;
            }
            list_marked(s, group, x, in);
        });
        over = above + block_sum(over);
        within = over + block_sum(within);
        if (need <= over) {
            low = to, about = over;
        } else if (need > within) {
            high = from, above = within;
        } else {
            low = from, high = to, above = over, about = within, listed = room.listed;
        }
    }
    if (listed > LIST) {
        // One logit, and more tokens than the list holds.
        u64 each = by_mass ? mass(unordered(low), w) : 1, count = (need - above + each - 1) / each;
        list_equals(s, low, count, 0, true);
        return {low, ~(u32)room.list[0], above + count * each};
    }
    sort(listed);
    u64 own[EACH], sum = 0, total;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        u32 place = threadIdx.x * EACH + i;
        own[i] = place >= listed ? 0 : !by_mass ? 1 : mass(unordered((u32)(room.list[place] >> 32)), w);
        sum += own[i];
    }
    u64 running = above + block_scan(sum, total);
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        if (running < need && need <= running + own[i]) {
            room.found = threadIdx.x * EACH + i;
            room.left = running + own[i];
        }
        running += own[i];
    }
    __syncthreads();
    u64 key = room.list[room.found];
    return {(u32)(key >> 32), ~(u32)key, room.left};
}
