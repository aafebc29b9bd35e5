// Sampling, second part: one block a row chooses the token and reports (launch contract: sample.cu).
#include "sample_search.cuh"

// ---- choosing ----

__device__ u32 first_of(const Search& s, u32 key) {
    __syncthreads();
    if (threadIdx.x == 0) room.found = 0xffffffffu;
    __syncthreads();
    u32 group = 0xffffffffu;
    for (u32 g = threadIdx.x; g < s.groups; g += THREADS)
        if (room.keys[g] == key) group = min(group, g);
    group = __reduce_min_sync(0xffffffffu, group);
    if (s.lane == 0) atomicMin(&room.found, group);
    __syncthreads();
    group = room.found;
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
    u64 before = block_scan(sum, total);
    u64 target = part_of(total, uniform);
    if (before <= target && target < before + sum) {
        u32 b = from;
        for (; before + masses[b] <= target; b++) before += masses[b];
        room.found = b, room.left = target - before;
    }
    __syncthreads();
    u32 token = room.found * BLOCK + threadIdx.x;
    target = room.left;
    u64 own = token < s.logits.vocab ? mass(s.logits.at(token), w) : 0;
    before = block_scan(own, total);
    if (before <= target && target < before + own) room.found = token;
    __syncthreads();
    return room.found;
}

/// Truncates and draws from a sorted list that holds every token that may be kept.
__device__ u32 draw_from_list(const Search& s, const SampleRow& r, const Weights& w, u32 listed, u64 all, u32 uniform) {
    u64 own[EACH], sum = 0, total;
    u32 kept = r.top_k ? min(listed, r.top_k) : listed;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        u32 place = threadIdx.x * EACH + i;
        own[i] = place < kept ? mass(unordered((u32)(room.list[place] >> 32)), w) : 0;
        sum += own[i];
    }
    u64 before = block_scan(sum, total);
    if (r.top_p < 1.0f) {
        u64 need = share_of(all ? all : total, r.top_p), running = before;
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            if (running < need && need <= running + own[i]) room.left = running + own[i];
            running += own[i];
        }
        __syncthreads();
        total = room.left;
    }
    u64 target = part_of(total, uniform);
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        if (before <= target && target < before + own[i]) room.found = threadIdx.x * EACH + i;
        before += own[i];
    }
    __syncthreads();
    return ~(u32)room.list[room.found];
}

/// Weight of the tokens whose keys are at least `low`, those of `low` itself up to token `last` only.
__device__ __noinline__ u64 mass_from(const Search& search, const Weights& weights, u32 low, u32 last) {
    const Search s = search;
    const Weights w = weights;
    u64 sum = 0;
    each_group(s, low, [&](u32 group, const float(&x)[4]) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 key = ordered(x[j]), token = s.logits.token(group, s.lane, j);
            u64 own = mass(x[j], w);
            sum += token < s.logits.vocab && (key > low || (key == low && token <= last)) ? own : 0;
        }
    });
    return block_sum(sum);
}

/// The same without a list of all that may be kept. `listed`: how many tokens there are from `low` on. `most`: what is
/// known of the likeliest, less than what top_p keeps if nothing else truncates.
__device__ u32 draw_by_passes(const Search& s, const SampleRow& r, const Weights& w, u32 low, u32 listed, u64 all,
                              Known most, u32 uniform) {
    const Known nothing = {ordered(w.largest) + 1, 0};
    Known least = {ordered(last_weighing(w)), all};
    take_sample(s, w);
    if (r.top_k) {
        // The floor of min_p may lie above the last of top_k.
        bool floored = r.flags & TRUNCATES_MIN_P;
        Known bottom = {floored ? 0 : low, floored ? s.logits.vocab : listed};
        Reached cut = reach(s, false, w, bottom, nothing, r.top_k);
        least.key = floored && low > cut.key ? low : cut.key;
        least.sum = mass_from(s, w, least.key, least.key == cut.key ? cut.token : 0xffffffffu);
    } else if (!all) {
        least = {low, mass_from(s, w, low, 0xffffffffu)};
    }
    if (r.top_p < 1.0f) {
        Reached cut = reach(s, true, w, least, most, share_of(least.sum, r.top_p));
        least = {cut.key, cut.sum};
    }
    u64 need = part_of(least.sum, uniform) + 1;
    if (need <= most.sum) return reach(s, true, w, most, nothing, need).token;
    return reach(s, true, w, least, most, need).token;
}

/// Draws from the tokens that min_p, top_k and top_p leave. `all`: weight of all tokens, or 0 if none was taken.
__device__ u32 draw_truncated(const Search& s, const SampleRow& r, const Weights& w, u64 all, u32 uniform) {
    u32 low = 0, listed = 0;
    Known most = {ordered(w.largest) + 1, 0};
    if (all) {
        // The nucleus: one step down after another, until what is listed weighs enough or is too much.
        u64 need = share_of(all, r.top_p), weight = 0;
        for (float depth = 4.0f; weight < need; depth += 4.0f) {
            if (weight) most = {low, weight};
            low = ordered(depth > 28.0f ? last_weighing(w)
                                        : __fsub_rn(w.largest, __fdiv_rn(__fmul_rn(depth, w.temperature), w.scale)));
            listed = collect(s, low);
            if (listed > LIST) break;
            weight = 0;
            for (u32 i = threadIdx.x; i < listed; i += THREADS) weight += mass(unordered((u32)(room.list[i] >> 32)), w);
            weight = block_sum(weight);
        }
    } else {
        if (r.top_k && r.top_k <= s.groups) low = nth_group(s, r.top_k, ordered(w.largest));
        if (r.flags & TRUNCATES_MIN_P) {
            double largest = w.largest, floor = __dadd_rn(largest, r.min_p_log);
            low = max(low, ordered(__double2float_rn(floor < largest ? floor : largest)));
        }
        listed = collect(s, low);
    }
    if (listed > LIST) return draw_by_passes(s, r, w, low, listed, all, most, uniform);
    sort(listed);
    return draw_from_list(s, r, w, listed, all, uniform);
}

// ---- reporting ----

/// The `n` likeliest, sorted, at the front of the list.
__device__ void likeliest(const Search& s, u32 n, u32 peak) {
    u32 low = n <= s.groups ? nth_group(s, n, peak) : 0;
    u32 listed = collect(s, low);
    if (listed > LIST) {
        Weights any = weights(unordered(peak), 1.0f);
        take_sample(s, any);
        Reached cut = reach(s, false, any, {low, listed}, {peak + 1, 0}, n);
        listed = collect(s, cut.key + 1);
        list_equals(s, cut.key, n - listed, listed, false);
        listed = n;
    }
    sort(listed);
}

__device__ void load_keys(const Search& s, const SampleArgs& a, u32 row, Set set) {
    __syncthreads();
    const u32* keys = a.keys + (u64)(row * 2 + set) * s.groups;
    for (u32 g = threadIdx.x; g < s.groups; g += THREADS) room.keys[g] = keys[g];
    __syncthreads();
}

/// Log-probabilities of `token` and of the likeliest, of the model's own logits. `masses` are those of temperature 1.
__device__ void report(const Search& s, const SampleRow& r, const u64* masses, u32 peak, u32 token, Scored& result) {
    u64 sum = 0;
    for (u32 b = threadIdx.x; b < s.groups / GROUPS_OF_BLOCK; b += THREADS) sum += masses[b];
    double total = log(__dmul_rn(__ull2double_rn(block_sum(sum)), 1.0 / (1ull << 40)));
    double largest = unordered(peak);
    auto logprob = [&](float x) { return __double2float_rn(__dsub_rn(__dsub_rn((double)x, largest), total)); };
    u32 top = min(r.top, s.logits.vocab);
    if (top) likeliest(s, top, peak);
    if (threadIdx.x < top) {
        u64 key = room.list[threadIdx.x];
        result.tokens[threadIdx.x] = ~(u32)key;
        result.logprobs[threadIdx.x] = logprob(unordered((u32)(key >> 32)));
    }
    if (threadIdx.x == 0) result.token = token, result.logprob = logprob(s.logits.raw[token]), result.top = top;
}

/// Chooses or scores the token of a row, and keeps it for the slot's next step.
extern "C" __global__ void __launch_bounds__(THREADS) sample_finish(const __grid_constant__ SampleArgs a) {
    u32 row = blockIdx.x;
    let_next_start();
    bool real = row < (u32)a.header[OUT_ROWS];
    const SampleRow r = a.rows[row];
    wait_for_inputs();
    if (!real || only_takes_largest(r)) return;
    u32 blocks = ceil_div(a.vocab, BLOCK), groups = blocks * GROUPS_OF_BLOCK;
    Scored& result = a.results[row];
    const u64* masses = a.masses + (u64)row * 2 * blocks;
    bool scores = r.flags & SCORES_TARGET;
    Logits logits = logits_of(a, row, r, CHOICE);
    Search s = {logits, groups, threadIdx.x / 32, threadIdx.x % 32};
    load_keys(s, a, row, CHOICE);
    u32 peak = 0;
    for (u32 g = threadIdx.x; g < groups; g += THREADS) peak = max(peak, room.keys[g]);
    peak = block_max(peak);
    u32 raw_peak = peak;
    if (keeps_raw(r)) {
        raw_peak = 0;
        const u32* keys = a.keys + (u64)(row * 2 + RAW) * groups;
        for (u32 g = threadIdx.x; g < groups; g += THREADS) raw_peak = max(raw_peak, keys[g]);
        raw_peak = block_max(raw_peak);
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
                all = block_sum(all);
            }
            token = draw_truncated(s, r, w, all, uniform);
        }
    }
    // Nobody reads the slot's history any more when it changes.
    __syncthreads();
    if (threadIdx.x == 0) write_token(a, row, r, token);
    if (token == NOT_A_NUMBER || !(r.flags & REPORTS)) return;
    Logits raw = logits_of(a, row, r, RAW);
    Search reported = {raw, groups, s.warp, s.lane};
    if (keeps_raw(r)) load_keys(reported, a, row, RAW);
    report(reported, r, masses + blocks, raw_peak, token, result);
}
