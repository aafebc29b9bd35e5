// The part of attend_split.cu that depends on the cache's type, for e4m3: stages of 32 keys and values as the cache has
// them. They become halves in registers, which is exact; so products are of halves. Queries are brought below 2^15 by a power
// of two, and scores back, so bf16 loses nothing that matters (see Shift). Weights as halves keep three bits more than bf16.
// Included within its namespace.

__device__ __forceinline__ void multiply(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Where a 16-byte chunk of a key or value lies.
__device__ __forceinline__ u32 code_chunk_at(u32 row, u32 chunk) {
    return row * N + (N >= 128 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3)) * 16;
}

/// What `first` more rows, a multiple of what one instruction brings, change of `code_chunk_at` but for the rows themselves.
__device__ __forceinline__ constexpr u32 turn_of(u32 first) { return (N >= 128 ? first & 7 : first >> 1 & 3) * 16; }

/// Starts to bring keys and values of 32 positions, of which `seen` are real. A sixteen that is not to be read is zeros.
__device__ __forceinline__ void bring(const Params& p, u32 stage, const u32 (&row)[2], u32 seen) {
    // Keys of one instruction, and instructions of a sixteen; a lane's chunk is always the same.
    constexpr u32 TOGETHER = 512 / N, TIMES = 16 / TOGETHER;
    const u32 lane = threadIdx.x % 32, chunk = lane % (N / 16), in = lane / (N / 16);
    const bool has = chunk * 16 < p.head_dim;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const bool any = has && row[half] != NONE;
        const u64 from = any ? (u64)(row[half] + in) * p.head_dim + chunk * 16 : 0;
        const e4m3 *key = p.keys + from, *value = p.values + from;
#pragma unroll
        for (u32 i = 0; i < TIMES; ++i) {
            const u32 at = half * 16 + i * TOGETHER, to = stage + (code_chunk_at(in, chunk) ^ turn_of(at)) + at * N;
            const u32 bytes = any && at + in < seen ? 16 : 0;
            copy_16(to, key, bytes);
            copy_16(to + HALF_STAGE, value, bytes);
            key += TOGETHER * p.head_dim, value += TOGETHER * p.head_dim;
        }
    }
}

/// A lane's four codes of a key are elements 4 j ..; in a product it holds 2 j, 2 j + 1 and 8 more. So elements of queries
/// change places within each sixteen: 4 j + i to 2 j + i % 2 + i / 2 * 8. Threads of a row are neighbours in one warp.
__device__ __forceinline__ void put_query(char* shared, u32 m, u32 chunk, uint4 x) {
    const u32 words[4] = {x.x, x.y, x.z, x.w};
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) most = fmaxf(most, fmaxf(fabsf(low_float(words[i])), fabsf(high_float(words[i]))));
#pragma unroll
    for (int lane = N / 16; lane; lane >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lane));
    const Shift shift(most);
    const u32 half = chunk % 2 * 8, to = chunk - chunk % 2;
    *(uint2*)(shared + Q + chunk_at(m, to) + half) = make_uint2(shift.halves(x.x), shift.halves(x.z));
    *(uint2*)(shared + Q + chunk_at(m, to + 1) + half) = make_uint2(shift.halves(x.y), shift.halves(x.w));
    if (chunk == 0) ((float*)(shared + WORDS))[16 + m] = shift.back;
}

/// What scores of a row of queries are multiplied by.
__device__ __forceinline__ float row_scale(const Params& p, const char* shared, u32 m) {
    return p.scale * ((const float*)(shared + WORDS))[16 + m];
}

__device__ __forceinline__ void multiply_keys(float (&s)[16], u32 q, u32 keys) {
    const u32 lane = threadIdx.x % 32, matrix = lane / 8, in = lane % 8;
#pragma unroll
    for (int d = 0; d < N / 32; ++d) {
        u32 a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load_matrices(a[i], q + chunk_at((matrix & 1) * 8 + in, d * 4 + i * 2 + matrix / 2));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            // Matrices: two chunks of eight keys, then of eight more.
            u32 codes[4];
            load_matrices(codes, keys + code_chunk_at(n * 16 + matrix / 2 * 8 + in, d * 2 + (matrix & 1)));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint2 b = to_halves(codes[i]);
                multiply(s + n * 8 + i / 2 * 4, a[i % 2], b.x, b.y);
            }
        }
    }
}

/// Pairs of codes are transposed, not codes: a lane gets columns 2 c and 2 c + 1 of two values. Each of two products takes
/// one of them, so columns change places; see `put_sums`.
__device__ __forceinline__ void multiply_values(float (&out)[N / 2], const float (&s)[16], u32 values) {
    const u32 lane = threadIdx.x % 32;
    u32 a[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = pack_halves(s[i * 2], s[i * 2 + 1]);
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
        u32 codes[4];
        uint2 apart[4];
        load_transposed(codes, values + code_chunk_at(lane, n));
#pragma unroll
        for (int i = 0; i < 4; ++i) apart[i] = to_halves(__byte_perm(codes[i], 0, 0x3120));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            multiply(out + n * 8, a[i], apart[i * 2].x, apart[i * 2 + 1].x);
            multiply(out + n * 8 + 4, a[i], apart[i * 2].y, apart[i * 2 + 1].y);
        }
    }
}

/// Writes a warp's sums of one row for the other warps: columns are turned so that no two lanes meet in a bank.
__device__ __forceinline__ u32 turned(u32 row) { return (row & 1) * 16; }
__device__ __forceinline__ void put_sums(float* to, u32 row, int half, const float (&out)[N / 2]) {
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
        const float* x = out + n * 8 + half * 2;
        *(float4*)(to + row * N + ((n * 16 + threadIdx.x % 4 * 4) ^ turned(row))) = make_float4(x[0], x[4], x[1], x[5]);
    }
}
