// Sampling, second part: one block a row chooses the token and reports (launch contract: sample.cu).
//
// The order of keys (likelier first, then lower token) is total, and every truncation keeps the first of it; the draw
// follows it too. So each question is "where does a running sum over that order reach a number?". Where the likely
// tokens are few, they are listed and sorted, and one running sum answers all. Where they are many (a flat
// distribution, ties, a large top_k), `reach` narrows the logit down in which a sum is reached, 3 bits a pass.
#include "sample.cuh"

constexpr u32 THREADS = 512;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 GROUPS_MAX = 4096;
/// Likely tokens that are sorted in shared memory.
constexpr u32 LIST = 2048;
constexpr u32 EACH = LIST / THREADS;

struct Room {
    u32 keys[GROUPS_MAX]; // largest logit of each group
    union {
        u64 list[LIST];         // keys of likely tokens
        u32 counts[GROUPS_MAX]; // of tokens of one logit
    };
    u64 sums[7][WARPS];
    u32 bins[256];
    u32 listed;
    u32 found;
    u64 left;
};

/// One row of one set of logits, in the hands of a block.
struct Search {
    Room& room;
    const Logits& logits;
    u32 groups;
    u32 warp, lane;
};

// ---- a block's sums; all threads call them and get the result ----

__device__ __forceinline__ u64 block_sum(Room& room, u64 x) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) room.sums[0][threadIdx.x / 32] = x;
    __syncthreads();
    u64 sum = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) sum += room.sums[0][w];
    return sum;
}

__device__ __forceinline__ u32 block_max(Room& room, u32 x) {
    x = __reduce_max_sync(0xffffffffu, x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) room.sums[0][threadIdx.x / 32] = x;
    __syncthreads();
    u32 top = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) top = max(top, (u32)room.sums[0][w]);
    return top;
}

/// Sum of `x` of all lower threads; `total` of all.
__device__ __forceinline__ u64 block_scan(Room& room, u64 x, u64& total) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 up_to = x;
#pragma unroll
    for (u32 d = 1; d < 32; d <<= 1) {
        u64 other = __shfl_up_sync(0xffffffffu, up_to, d);
        if (lane >= d) up_to += other;
    }
    __syncthreads();
    if (lane == 31) room.sums[0][warp] = up_to;
    __syncthreads();
    u64 before = up_to - x;
    total = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) {
        if (w < warp) before += room.sums[0][w];
        total += room.sums[0][w];
    }
    return before;
}

// ---- passes over the groups that may matter ----

/// Calls `f(group)` with a whole warp for every group whose largest logit is at least `low`.
template <typename F> __device__ __forceinline__ void each_group(const Search& s, u32 low, F f) {
    for (u32 first = s.warp * 32; first < s.groups; first += THREADS) {
        u32 group = first + s.lane;
        u32 hits = __ballot_sync(0xffffffffu, group < s.groups && s.room.keys[group] >= low);
        for (; hits; hits &= hits - 1) f(first + __ffs(hits) - 1);
    }
}

/// Calls `f(key, x)` for every token whose key is in `low .. high`.
template <typename F> __device__ __forceinline__ void each_token(const Search& s, u32 low, u32 high, F f) {
    each_group(s, low, [&](u32 group) {
        float x[4];
        s.logits.load_changed(group, s.lane, x);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 key = ordered(x[j]);
            if (key >= low && key < high && s.logits.token(group, s.lane, j) < s.logits.vocab) f(key, x[j]);
        }
    });
}

/// Puts the tokens whose keys are at least `low` on the list, in no order, and returns how many there are: more than
/// LIST have no room, and the list then is of no use.
__device__ u32 collect(const Search& s, u32 low) {
    __syncthreads();
    if (threadIdx.x == 0) s.room.listed = 0;
    __syncthreads();
    each_group(s, low, [&](u32 group) {
        float x[4];
        s.logits.load_changed(group, s.lane, x);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 key = ordered(x[j]), token = s.logits.token(group, s.lane, j);
            bool in = key >= low && token < s.logits.vocab;
            u32 all = __ballot_sync(0xffffffffu, in);
            if (!all) continue;
            u32 start = 0;
            if (s.lane == 0) start = atomicAdd(&s.room.listed, __popc(all));
            u32 place = __shfl_sync(0xffffffffu, start, 0) + __popc(all & ((1u << s.lane) - 1));
            if (in && place < LIST) s.room.list[place] = token_key(key, token);
        }
    });
    __syncthreads();
    return s.room.listed;
}

/// Sorts the first `n` of the list, likeliest first. No two keys are equal.
__device__ void sort(Room& room, u32 n) {
    if (n <= THREADS) {
        u64 key = threadIdx.x < n ? room.list[threadIdx.x] : 0;
        u32 rank = 0;
        if (threadIdx.x < n)
            for (u32 i = 0; i < n; i++) rank += room.list[i] > key;
        __syncthreads();
        if (threadIdx.x < n) room.list[rank] = key;
        __syncthreads();
        return;
    }
    u32 size = 2 * THREADS;
    while (size < n) size *= 2;
    for (u32 i = n + threadIdx.x; i < size; i += THREADS) room.list[i] = 0;
    __syncthreads();
    for (u32 run = 2; run <= size; run *= 2) {
        for (u32 step = run / 2; step; step /= 2) {
            for (u32 pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                u32 i = pair / step * step * 2 + pair % step, j = i + step;
                u64 a = room.list[i], b = room.list[j];
                if ((a < b) == ((i & run) == 0)) room.list[i] = b, room.list[j] = a;
            }
            __syncthreads();
        }
    }
}

/// The `n`-th largest of the groups' largest logits, `1 <= n <= groups`: at least `n` tokens are as large.
__device__ u32 nth_group(const Search& s, u32 n) {
    u32 prefix = 0;
    for (u32 shift = 24;; shift -= 8) {
        __syncthreads();
        if (threadIdx.x < 256) s.room.bins[threadIdx.x] = 0;
        __syncthreads();
        for (u32 g = threadIdx.x; g < s.groups; g += THREADS) {
            u32 key = s.room.keys[g];
            if (shift == 24 || key >> (shift + 8) == prefix) atomicAdd(&s.room.bins[key >> shift & 255], 1);
        }
        __syncthreads();
        if (s.warp == 0) {
            // Lane 0 has the highest eight bins.
            u32 bins[8], sum = 0;
#pragma unroll
            for (u32 i = 0; i < 8; i++) sum += bins[i] = s.room.bins[255 - s.lane * 8 - i];
            u32 up_to = sum;
#pragma unroll
            for (u32 d = 1; d < 32; d <<= 1) {
                u32 other = __shfl_up_sync(0xffffffffu, up_to, d);
                if (s.lane >= d) up_to += other;
            }
            u32 before = up_to - sum;
            if (before < n && n <= up_to) {
                u32 i = 0;
                while (before + bins[i] < n) before += bins[i++];
                s.room.found = 255 - s.lane * 8 - i, s.room.left = n - before;
            }
        }
        __syncthreads();
        prefix = prefix << 8 | s.room.found, n = (u32)s.room.left;
        if (shift == 0) return prefix;
    }
}

/// Where a sum over the order of keys reaches a number: among the tokens of logit `key`; all likelier ones amount to
/// `above`, less than the number.
struct Reached {
    u32 key;
    u64 above;
};

/// Amounts are weights, or 1 each where there are no weights. Everything from `low` on must reach `need`, at least 1.
__device__ Reached reach(const Search& s, const Weights* w, u32 low, u32 high, u64 need) {
    u64 above = 0;
    while (high - low > 1) {
        // Rounded up, so that 8 steps pass `high`; of a small range some pivots lie behind it and count nothing.
        u32 step = (high - low - 1) / 8 + 1;
        u64 sums[7] = {};
        each_token(s, low, high, [&](u32 key, float x) {
            u64 amount = w ? mass(x, *w) : 1;
#pragma unroll
            for (u32 i = 0; i < 7; i++) sums[i] += key - low >= step * (i + 1) ? amount : 0;
        });
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < 7; i++) {
            sums[i] = warp_sum(sums[i]);
            if (s.lane == 0) s.room.sums[i][s.warp] = sums[i];
        }
        __syncthreads();
        u32 base = low;
        u64 beyond = above;
#pragma unroll
        for (u32 i = 0; i < 7; i++) {
            u64 sum = beyond;
#pragma unroll
            for (u32 v = 0; v < WARPS; v++) sum += s.room.sums[i][v];
            // Sums fall from pivot to pivot: the last that suffices is the new low, the next the new high.
            u64 pivot = (u64)base + (u64)step * (i + 1);
            if (sum >= need) low = (u32)pivot;
            else if (pivot < high) high = (u32)pivot, above = sum;
        }
    }
    return {low, above};
}

/// Tokens whose key is `key`, ranked by token: those of ranks below `count` go to `list[at + rank]`. If `only_last`, just
/// the last of them does, to `list[at]`.
__device__ void list_equals(const Search& s, u32 key, u64 count, u32 at, bool only_last) {
    // Counts of groups lie where the list does, so ranks are found before anything is listed.
    u64 held = 0;
    __syncthreads();
    if (threadIdx.x < at) held = s.room.list[threadIdx.x];
    __syncthreads();
    for (u32 g = threadIdx.x; g < s.groups; g += THREADS) s.room.counts[g] = 0;
    __syncthreads();
    each_group(s, key, [&](u32 group) {
        float x[4];
        s.logits.load_changed(group, s.lane, x);
        u32 count = 0;
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            count += ordered(x[j]) == key && s.logits.token(group, s.lane, j) < s.logits.vocab;
        count = __reduce_add_sync(0xffffffffu, count);
        if (s.lane == 0) s.room.counts[group] = count;
    });
    __syncthreads();
    // Each thread has a run of groups; ranks of their first tokens replace the counts.
    u32 each = ceil_div(s.groups, THREADS), from = min(threadIdx.x * each, s.groups), to = min(from + each, s.groups);
    u64 sum = 0, total;
    for (u32 g = from; g < to; g++) sum += s.room.counts[g];
    u64 rank = block_scan(s.room, sum, total);
    u64 first = only_last ? count - 1 : 0;
    u32 mine[GROUPS_MAX / THREADS];
    for (u32 g = from; g < to; g++) mine[g - from] = s.room.counts[g];
    __syncthreads();
    if (threadIdx.x < at) s.room.list[threadIdx.x] = held;
    for (u32 g = from; g < to; g++) {
        u64 next = rank + mine[g - from];
        // Few groups hold ranks that are asked for: `count` is at most TOP_MAX, or one rank is.
        if (rank < count && next > first)
            for (u32 token = g * GROUP; token < min((g + 1) * GROUP, s.logits.vocab); token++) {
                if (ordered(s.logits.at(token)) != key) continue;
                if (rank >= first && rank < count) s.room.list[at + rank - first] = token_key(key, token);
                rank++;
            }
        rank = next;
    }
    __syncthreads();
}

// ---- choosing ----

__device__ u32 first_of(const Search& s, u32 key) {
    __syncthreads();
    if (threadIdx.x == 0) s.room.found = 0xffffffffu;
    __syncthreads();
    u32 group = 0xffffffffu;
    for (u32 g = threadIdx.x; g < s.groups; g += THREADS)
        if (s.room.keys[g] == key) group = min(group, g);
    group = __reduce_min_sync(0xffffffffu, group);
    if (s.lane == 0) atomicMin(&s.room.found, group);
    __syncthreads();
    group = s.room.found;
    float x[4];
    s.logits.load_changed(group, s.lane, x);
    u32 token = 0xffffffffu;
#pragma unroll
    for (u32 j = 0; j < 4; j++)
        if (ordered(x[j]) == key) token = min(token, s.logits.token(group, s.lane, j));
    return __reduce_min_sync(0xffffffffu, token);
}

/// The draw over all tokens in order of token.
__device__ u32 draw_by_token(const Search& s, const u64* masses, const Weights& w, u32 uniform) {
    u32 blocks = s.groups / GROUPS_OF_BLOCK, each = ceil_div(blocks, THREADS);
    u32 from = min(threadIdx.x * each, blocks), to = min(from + each, blocks);
    u64 sum = 0, total;
    for (u32 b = from; b < to; b++) sum += masses[b];
    u64 before = block_scan(s.room, sum, total);
    u64 target = part_of(total, uniform);
    if (before <= target && target < before + sum) {
        u32 b = from;
        for (; before + masses[b] <= target; b++) before += masses[b];
        s.room.found = b, s.room.left = target - before;
    }
    __syncthreads();
    u32 token = s.room.found * BLOCK + threadIdx.x;
    target = s.room.left;
    u64 own = token < s.logits.vocab ? mass(s.logits.at(token), w) : 0;
    before = block_scan(s.room, own, total);
    if (before <= target && target < before + own) s.room.found = token;
    __syncthreads();
    return s.room.found;
}

/// Truncates and draws from a sorted list that holds every token that may be kept.
__device__ u32 draw_from_list(const Search& s, const SampleRow& r, const Weights& w, u32 listed, u64 all, u32 uniform) {
    u64 own[EACH], sum = 0, total;
    u32 kept = r.top_k ? min(listed, r.top_k) : listed;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        u32 place = threadIdx.x * EACH + i;
        own[i] = place < kept ? mass(unordered((u32)(s.room.list[place] >> 32)), w) : 0;
        sum += own[i];
    }
    u64 before = block_scan(s.room, sum, total);
    if (r.top_p < 1.0f) {
        u64 need = share_of(all ? all : total, r.top_p), running = before;
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            if (running < need && need <= running + own[i]) s.room.left = running + own[i];
            running += own[i];
        }
        __syncthreads();
        total = s.room.left;
    }
    u64 target = part_of(total, uniform);
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        if (before <= target && target < before + own[i]) s.room.found = threadIdx.x * EACH + i;
        before += own[i];
    }
    __syncthreads();
    return ~(u32)s.room.list[s.room.found];
}

__device__ __forceinline__ u64 mass_from(const Search& s, const Weights& w, u32 low) {
    u64 sum = 0;
    each_token(s, low, 0xffffffffu, [&](u32, float x) { sum += mass(x, w); });
    return block_sum(s.room, sum);
}

/// The same without a list.
__device__ u32 draw_by_passes(const Search& s, const SampleRow& r, const Weights& w, u32 low, u64 all, u32 uniform) {
    u32 end = ordered(w.largest) + 1, weighing = ordered(__fadd_rn(w.largest, w.lowest));
    u64 total = all;
    if (r.top_k) {
        // The floor of min_p may lie above the last of top_k.
        bool floored = r.flags & TRUNCATES_MIN_P;
        Reached cut = reach(s, nullptr, floored ? 0 : low, end, r.top_k);
        if (floored && low > cut.key) total = mass_from(s, w, low);
        else total = mass_from(s, w, cut.key + 1) + (r.top_k - cut.above) * mass(unordered(cut.key), w);
    } else if (!all) {
        total = mass_from(s, w, low);
    }
    Reached cut;
    if (r.top_p < 1.0f) {
        u64 need = share_of(total, r.top_p);
        cut = reach(s, &w, weighing, end, need);
        u64 each = mass(unordered(cut.key), w);
        total = cut.above + (need - cut.above + each - 1) / each * each;
    }
    u64 target = part_of(total, uniform);
    cut = reach(s, &w, weighing, end, target + 1);
    u64 each = mass(unordered(cut.key), w);
    list_equals(s, cut.key, (target + 1 - cut.above + each - 1) / each, 0, true);
    return ~(u32)s.room.list[0];
}

/// Draws from the tokens that min_p, top_k and top_p leave. `all`: weight of all tokens, or 0 if none was taken.
__device__ u32 draw_truncated(const Search& s, const SampleRow& r, const Weights& w, u64 all, u32 uniform) {
    u32 low = 0, listed;
    if (all) {
        // The nucleus: one step down after another, until what is listed weighs enough or is too much.
        u64 need = share_of(all, r.top_p), weight = 0;
        for (float depth = 4.0f; weight < need; depth += 4.0f) {
            low = depth > 28.0f ? ordered(__fadd_rn(w.largest, w.lowest))
                                : ordered(__fsub_rn(w.largest, __fmul_rn(depth, w.temperature)));
            listed = collect(s, low);
            if (listed > LIST) break;
            weight = 0;
            for (u32 i = threadIdx.x; i < listed; i += THREADS) weight += mass(unordered((u32)(s.room.list[i] >> 32)), w);
            weight = block_sum(s.room, weight);
        }
    } else {
        if (r.top_k && r.top_k <= s.groups) low = nth_group(s, r.top_k);
        if (r.flags & TRUNCATES_MIN_P) {
            double largest = w.largest, floor = __dadd_rn(largest, r.min_p_log);
            low = max(low, ordered(__double2float_rn(floor < largest ? floor : largest)));
        }
        listed = collect(s, low);
    }
    if (listed > LIST) return draw_by_passes(s, r, w, low, all, uniform);
    sort(s.room, listed);
    return draw_from_list(s, r, w, listed, all, uniform);
}

// ---- reporting ----

/// The `n` likeliest, sorted, at the front of the list.
__device__ void likeliest(const Search& s, u32 n, u32 peak) {
    u32 low = n <= s.groups ? nth_group(s, n) : 0;
    u32 listed = collect(s, low);
    if (listed > LIST) {
        Reached cut = reach(s, nullptr, low, peak + 1, n);
        listed = collect(s, cut.key + 1);
        list_equals(s, cut.key, n - listed, listed, false);
        listed = n;
    }
    sort(s.room, listed);
}

__device__ void load_keys(const Search& s, const SampleArgs& a, u32 row, Set set) {
    __syncthreads();
    const u32* keys = a.keys + (u64)(row * 2 + set) * s.groups;
    for (u32 g = threadIdx.x; g < s.groups; g += THREADS) s.room.keys[g] = keys[g];
    __syncthreads();
}

/// Log-probabilities of `token` and of the likeliest, of the model's own logits. `masses` are those of temperature 1.
__device__ void report(const Search& s, const SampleRow& r, const u64* masses, u32 peak, u32 token, Scored& result) {
    u64 sum = 0;
    for (u32 b = threadIdx.x; b < s.groups / GROUPS_OF_BLOCK; b += THREADS) sum += masses[b];
    double total = log(__dmul_rn(__ull2double_rn(block_sum(s.room, sum)), 1.0 / (1ull << 40)));
    double largest = unordered(peak);
    auto logprob = [&](float x) { return __double2float_rn(__dsub_rn(__dsub_rn((double)x, largest), total)); };
    u32 top = min(r.top, s.logits.vocab);
    if (top) likeliest(s, top, peak);
    if (threadIdx.x < top) {
        u64 key = s.room.list[threadIdx.x];
        result.tokens[threadIdx.x] = ~(u32)key;
        result.logprobs[threadIdx.x] = logprob(unordered((u32)(key >> 32)));
    }
    if (threadIdx.x == 0) result.token = token, result.logprob = logprob(s.logits.raw[token]), result.top = top;
}

/// Chooses or scores the token of a row, and keeps it for the slot's next step.
extern "C" __global__ void __launch_bounds__(THREADS) sample_finish(const __grid_constant__ SampleArgs a) {
    __shared__ Room room;
    u32 row = blockIdx.x;
    if (row >= (u32)a.header[OUT_ROWS]) return;
    const SampleRow r = a.rows[row];
    u32 blocks = ceil_div(a.vocab, BLOCK), groups = blocks * GROUPS_OF_BLOCK;
    Scored& result = a.results[row];
    const u64* masses = a.masses + (u64)row * 2 * blocks;
    bool scores = r.flags & SCORES_TARGET;
    Logits logits = logits_of(a, row, r, CHOICE);
    Search s = {room, logits, groups, threadIdx.x / 32, threadIdx.x % 32};
    load_keys(s, a, row, CHOICE);
    u32 peak = 0;
    for (u32 g = threadIdx.x; g < groups; g += THREADS) peak = max(peak, room.keys[g]);
    peak = block_max(room, peak);
    u32 raw_peak = peak;
    if (keeps_raw(r)) {
        raw_peak = 0;
        const u32* keys = a.keys + (u64)(row * 2 + RAW) * groups;
        for (u32 g = threadIdx.x; g < groups; g += THREADS) raw_peak = max(raw_peak, keys[g]);
        raw_peak = block_max(room, raw_peak);
    }
    u32 token = r.target;
    if (!is_finite(unordered(peak)) || !is_finite(unordered(raw_peak))) {
        token = NOT_A_NUMBER;
    } else if (!scores && r.temperature == 0.0f) {
        token = first_of(s, peak);
    } else if (!scores) {
        Weights w = weights(unordered(peak), r.temperature);
        u32 uniform = uniform_bits(r.seed, r.choice, r.position, 0);
        if (weighs_all(r) && r.top_p >= 1.0f) {
            token = draw_by_token(s, masses, w, uniform);
        } else {
            u64 all = 0;
            if (weighs_all(r)) {
                for (u32 b = threadIdx.x; b < blocks; b += THREADS) all += masses[b];
                all = block_sum(room, all);
            }
            token = draw_truncated(s, r, w, all, uniform);
        }
    }
    // Nobody reads the slot's history any more when it changes.
    __syncthreads();
    if (threadIdx.x == 0) {
        result.token = token, result.logprob = __uint_as_float(0x7fc00000u), result.top = 0, result.unused = 0;
        // A token that can't be chosen must still be one that the next step can look up.
        if (!scores) a.last_token[r.slot] = token == NOT_A_NUMBER ? 0 : token;
        if (!scores && r.flags & PENALISES && token != NOT_A_NUMBER) {
            u16& entry = a.seen[(u64)r.slot * blocks * BLOCK + token];
            if ((entry & 0x7fff) != 0x7fff) entry++;
        }
    }
    if (token == NOT_A_NUMBER || !(r.flags & REPORTS)) return;
    Logits raw = logits_of(a, row, r, RAW);
    Search reported = {room, raw, groups, s.warp, s.lane};
    if (keeps_raw(r)) load_keys(reported, a, row, RAW);
    report(reported, r, masses + blocks, raw_peak, token, result);
}
