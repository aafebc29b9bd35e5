// The part of attend_split.cu that depends on the cache's type, for bf16: stages of sixteen keys and values as the cache has
// them. Included within its namespace.

__device__ __forceinline__ void multiply(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Starts to bring keys and values of sixteen positions, of which `seen` are real.
__device__ __forceinline__ void bring(const Params& p, u32 stage, const u32 (&row)[1], u32 seen) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
        const u32 at = i * 32 + lane, key = at / (N / 8), chunk = at % (N / 8);
        const bool real = key < seen && chunk * 8 < p.head_dim;
        const u64 from = real ? (u64)(row[0] + key) * p.head_dim + chunk * 8 : 0;
        const u32 to = stage + chunk_at(key, chunk);
        copy_16(to, p.keys + from, real ? 16 : 0);
        copy_16(to + HALF_STAGE, p.values + from, real ? 16 : 0);
    }
}

/// Puts eight elements of row m of the queries in their place.
__device__ __forceinline__ void put_query(char* shared, u32 m, u32 chunk, uint4 x) {
    *(uint4*)(shared + Q + chunk_at(m, chunk)) = x;
}

/// What scores of a row of queries are multiplied by.
__device__ __forceinline__ float row_scale(const Params& p, const char*, u32) { return p.scale; }

__device__ __forceinline__ void multiply_keys(float (&s)[8], u32 q, u32 keys) {
    const u32 lane = threadIdx.x % 32, matrix = lane / 8, in = lane % 8;
#pragma unroll
    for (int d = 0; d < N / 16; ++d) {
        u32 a[4], b[4];
        load_matrices(a, q + chunk_at((matrix & 1) * 8 + in, d * 2 + matrix / 2));
        load_matrices(b, keys + chunk_at(matrix / 2 * 8 + in, d * 2 + (matrix & 1)));
        multiply(s, a, b[0], b[1]);
        multiply(s + 4, a, b[2], b[3]);
    }
}

__device__ __forceinline__ void multiply_values(float (&out)[N / 2], const float (&s)[8], u32 values) {
    const u32 lane = threadIdx.x % 32, matrix = lane / 8, in = lane % 8;
    const u32 a[4] = {pack_bf16(s[0], s[1]), pack_bf16(s[2], s[3]), pack_bf16(s[4], s[5]), pack_bf16(s[6], s[7])};
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
        u32 b[4];
        load_transposed(b, values + chunk_at((matrix & 1) * 8 + in, n * 2 + matrix / 2));
        multiply(out + n * 8, a, b[0], b[1]);
        multiply(out + n * 8 + 4, a, b[2], b[3]);
    }
}

/// Writes a warp's sums of one row for the other warps: columns are turned so that no two lanes meet in a bank.
__device__ __forceinline__ u32 turned(u32 row) { return (row & 3) * 8; }
__device__ __forceinline__ void put_sums(float* to, u32 row, int half, const float (&out)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i)
        *(float2*)(to + row * N + ((i * 8 + threadIdx.x % 4 * 2) ^ turned(row))) =
            make_float2(out[i * 4 + half * 2], out[i * 4 + half * 2 + 1]);
}
