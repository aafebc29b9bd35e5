// The part of attend_tiles.cu that is for a cache of e4m3. Codes come to shared memory as they are, in columns of 64; the three warps of the
// producer's warpgroup that have nothing else to do make halves of them, which is exact, where wgmma wants them. Queries
// are brought below 2^15 by a power of two for each row, in place, and scores back: bf16 loses nothing that matters (see
// Shift). Weights as halves keep three bits more than bf16. Included within its namespace.

constexpr int CONVERTERS = 3;  // warps

/// What the producer fills: codes, [W / 64, KEYS, 64].
template <int N>
struct Incoming {
    static constexpr int COUNT = INCOMING, BYTES = Shape<N>::CODE_BYTES, K = Shape<N>::K_IN, V = Shape<N>::V_IN;
    static __device__ __forceinline__ Ring<INCOMING>& keys(Barriers* bars) { return bars->k_in; }
    static __device__ __forceinline__ Ring<INCOMING>& values(Barriers* bars) { return bars->v_in; }
};

/// Codes of keys or values of one block of positions; each lane brings one granule of its page.
template <int N>
__device__ __forceinline__ void bring_block(const Params& p, const TensorMap* map, u32 to, u32 full, u32 key, u32 end,
                                            u32 page, u32 head) {
    using S = Shape<N>;
    const u32 lane = threadIdx.x % 32;
    const u32 count = min((u32)S::KEYS / p.granule, (end - key + p.granule - 1) / p.granule);
    if (lane == 0) barrier_expect(full, count * p.granule * 64 * S::CHUNKS);
    __syncwarp();
    if (lane < count) {
        const u32 at = key + lane * p.granule;
        const u32 row = (page * p.kv_heads + head) * p.page_size + at % p.page_size;
#pragma unroll
        for (int c = 0; c < S::CHUNKS; ++c)
            tma_load_2d(to + (c * S::KEYS + lane * p.granule) * 64, *map, full, c * 64, row);
    }
}

/// A block of codes as halves in columns of 64, 128-byte swizzled. Rows from `real` on were not brought and are zeros: weights
/// of 0 must meet numbers. A warp takes every third eight rows of all columns; where a lane reads and writes in each is the
/// same, and the lanes of two rows write to all banks.
template <int N>
__device__ __forceinline__ void convert_block(const char* codes, char* to, u32 real) {
    using S = Shape<N>;
    constexpr u32 EIGHTS = S::KEYS / 8 * S::CHUNKS, AT_ONCE = 4;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 1, row = lane / 4, unit = lane % 4 * 2;
    codes += lane * 16, to += row * 128;
    char *low = to + (unit ^ row) * 16, *high = to + ((unit + 1) ^ row) * 16;
#pragma unroll 1
    for (u32 eight = warp; eight < EIGHTS; eight += AT_ONCE * CONVERTERS) {
        uint4 x[AT_ONCE];
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; ++j)
            if (eight + j * CONVERTERS < EIGHTS) x[j] = *(const uint4*)(codes + (eight + j * CONVERTERS) * 512);
        if (real < S::KEYS) {
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; ++j)
                if ((eight + j * CONVERTERS) * 8 % S::KEYS + row >= real) x[j] = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; ++j) {
            if (eight + j * CONVERTERS >= EIGHTS) continue;
            const uint2 a = to_halves(x[j].x), b = to_halves(x[j].y), c = to_halves(x[j].z), d = to_halves(x[j].w);
            *(uint4*)(low + (eight + j * CONVERTERS) * 1024) = make_uint4(a.x, a.y, b.x, b.y);
            *(uint4*)(high + (eight + j * CONVERTERS) * 1024) = make_uint4(c.x, c.y, d.x, d.y);
        }
    }
}

template <int N>
__device__ void convert(const Params& p, char* shared, Barriers* bars) {
    using S = Shape<N>;
    u32 k_count = 0, v_count = 0;
    auto block = [&](Ring<INCOMING>& from, Ring<STAGES>& ring, int codes, int to, u32& count, u32 real) {
        from.wait_full(count);
        ring.wait_empty(count);
        convert_block<N>(shared + codes + count % INCOMING * S::CODE_BYTES, shared + to + count % STAGES * S::KV_BYTES, real);
        proxy_fence();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(smem(&from.empty[count % INCOMING]));
            barrier_arrive(smem(&ring.full[count % STAGES]));
        }
        ++count;
    };
    for (u32 tile_count = 0;; ++tile_count) {
        // A tile's first keys come with its box.
        bars->k_in.wait_full(k_count);
        const Box box = bars->boxes[tile_count % 2];
        if (box.head == NONE) return;
        const Range<S::KEYS> range(box.tile, p.window);
        auto keys = [&](int n) { block(bars->k_in, bars->k, S::K_IN, S::K, k_count, range.end - n * S::KEYS); };
        keys(range.last);
        for (int n = range.last; n >= range.first; --n) {
            if (n > range.first) keys(n - 1);
            block(bars->v_in, bars->v, S::V_IN, S::V, v_count, range.end - n * S::KEYS);
        }
    }
}

/// Makes halves of a warpgroup's 64 rows of queries; two threads a row, of the warp that multiplies it.
template <int N>
__device__ __forceinline__ Scales queries_to_halves(char* q, u32 warpgroup, float scale) {
    using S = Shape<N>;
    const u32 row = threadIdx.x % 128 / 2, part = threadIdx.x % 2;
    // Where in a row an element stands is all the same here.
    auto at = [&](int i) { return (uint4*)(q + i / 4 * 128 * 128 + row * 128 + ((i % 4 * 2 + part) ^ (row & 7)) * 16); };
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < S::CHUNKS * 4; ++i) {
        const uint4 x = *at(i);
        for (u32 word : {x.x, x.y, x.z, x.w}) most = fmaxf(most, fmaxf(fabsf(low_float(word)), fabsf(high_float(word))));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    const Shift shift(most);
#pragma unroll
    for (int i = 0; i < S::CHUNKS * 4; ++i) {
        const uint4 x = *at(i);
        *at(i) = make_uint4(shift.halves(x.x), shift.halves(x.y), shift.halves(x.z), shift.halves(x.w));
    }
    const u32 lane = threadIdx.x % 32;
    Scales scales;
    scales.of[0] = scale * __shfl_sync(0xffffffffu, shift.back, lane / 4 * 2);
    scales.of[1] = scale * __shfl_sync(0xffffffffu, shift.back, lane / 4 * 2 + 16);
    proxy_fence();
    // 1 to 3 are taken.
    asm volatile("bar.sync %0, 128;" ::"r"(4 + warpgroup) : "memory");
    return scales;
}
