// The part of attend_tiles.cu that is for a cache of e4m3. Codes come to shared memory as they are, in columns of 64; the
// three warps of the producer's warpgroup that have nothing else to do make halves of them, which is exact, where wgmma
// wants them. Queries are brought below 2^15 by a power of two for each row, and scores back: bf16 loses nothing that matters
// (see Shift). Weights as halves keep three bits more than bf16. Included within its namespace.

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

/// A warpgroup's queries as halves: in registers where these are enough, so that products read less of shared memory and the
/// next tile's may come; else in their place.
template <int N>
struct Queries {
    static constexpr bool HELD = N <= 128;
    u32 at;
    u32 words[HELD ? N / 4 : 1];

    /// Makes halves of what came. Returns what scores of this thread's rows are multiplied by.
    __device__ __forceinline__ Scales take(const Params& p) {
        if constexpr (HELD) return hold(p);
        return convert(p);
    }

    __device__ __forceinline__ Scales hold(const Params& p) {
        const u32 lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
        float most[2] = {0.0f, 0.0f};
#pragma unroll
        for (int d = 0; d < N / 16; ++d) {
            u32* to = words + d * 4;
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                         : "r"(at + d / 4 * 128 * 128 + row * 128 + ((d % 4 * 2 + lane / 16) ^ (row & 7)) * 16)
                         : "memory");
#pragma unroll
            for (int i = 0; i < 4; ++i)
                most[i % 2] = fmaxf(most[i % 2], fmaxf(fabsf(low_float(to[i])), fabsf(high_float(to[i]))));
        }
        Scales scales;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            most[half] = fmaxf(most[half], __shfl_xor_sync(0xffffffffu, most[half], 1));
            const Shift shift(fmaxf(most[half], __shfl_xor_sync(0xffffffffu, most[half], 2)));
#pragma unroll
            for (int i = half; i < N / 4; i += 2) words[i] = shift.halves(words[i]);
            scales.of[half] = p.scale * shift.back;
        }
        return scales;
    }

    /// Two threads a row, of the warp that multiplies it.
    __device__ __forceinline__ Scales convert(const Params& p) {
        using S = Shape<N>;
        const u32 row = threadIdx.x % 128 / 2, part = threadIdx.x % 2, lane = threadIdx.x % 32;
        // Where in a row an element stands is all the same here.
        auto place = [&](int i) { return at + i / 4 * 128 * 128 + row * 128 + ((i % 4 * 2 + part) ^ (row & 7)) * 16; };
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < S::CHUNKS * 4; ++i) {
            const uint4 x = load_16(place(i));
            for (u32 word : {x.x, x.y, x.z, x.w})
                most = fmaxf(most, fmaxf(fabsf(low_float(word)), fabsf(high_float(word))));
        }
        const Shift shift(fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1)));
#pragma unroll
        for (int i = 0; i < S::CHUNKS * 4; ++i) {
            const uint4 x = load_16(place(i));
            store_16(place(i), make_uint4(shift.halves(x.x), shift.halves(x.y), shift.halves(x.z), shift.halves(x.w)));
        }
        proxy_fence();
        // 1 to 3 are taken.
        asm volatile("bar.sync %0, 128;" ::"r"(3 + threadIdx.x / 128) : "memory");
        return {p.scale * __shfl_sync(0xffffffffu, shift.back, lane / 4 * 2),
                p.scale * __shfl_sync(0xffffffffu, shift.back, lane / 4 * 2 + 16)};
    }

    static __device__ __forceinline__ uint4 load_16(u32 from) {
        uint4 x;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
        return x;
    }
    static __device__ __forceinline__ void store_16(u32 to, uint4 x) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
    }
};

template <int N>
__device__ __forceinline__ void multiply_keys(float (&s)[Shape<N>::KEYS / 2], const Queries<N>& q, u32 k) {
    using S = Shape<N>;
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < N / 16; ++d) {
        const u32 step = d % 4 * 32;
        const u64 keys = wgmma_tile(k + d / 4 * S::KEYS * 128 + step);
        if constexpr (Queries<N>::HELD) Mma<S::KEYS>::keys_of(s, &q.words[d * 4], keys, d != 0);
        else Mma<S::KEYS>::keys(s, wgmma_tile(q.at + d / 4 * 128 * 128 + step), keys, d != 0);
    }
    wgmma_commit();
}
