// rotate_and_cache: per-head RMS norms of q and k (optional), rotary embedding, and k, v into their page.
//
//   for heads of q and k:  x = x / sqrt(mean(x^2) + eps) * weight            if there are norms
//   angle(i) = position * frequencies[i], c = magnitude * cos, s = magnitude * sin
//   (x[a], x[b]) = (x[a] c - x[b] s, x[b] c + x[a] s)    (a, b) = (i, i + dim/2), or (2i, 2i + 1) if `pairs`
//   q stays where it was; k goes to keys[page][head][offset], v unchanged to values[page][head][offset]
//
// Launch contract. `_bf16`, `_f32`: the type of qkv and of the cache; `_bf16_e4m3`, `_f32_e4m3`: of qkv, with a cache of
// e4m3. Numbers are rounded once, on their way there. Buffers and pages start on 16 bytes.
//   rotate_and_cache_T         dim/2 and (head_dim - dim)/2 are multiples of 8, head_dim <= 512
//   rotate_and_cache_T_narrow  any even dim, any even head_dim <= 256
//   grid.x = rows at capacity (any number is right, blocks loop); block.x = 32 * warps, any number of warps up to 16.
//   Few rows want one pass over the heads: ceil((q_heads + 2 kv_heads) / (32 / G)) warps, where G is the least power of
//   two >= head_dim / 16 (narrow: G = 32); many rows want 2 warps. `dim` <= 512.
// Angles are made before the wait for the kernel in front: positions come with the step's upload.
#include "rows.cuh"
#include "e4m3.cuh"

struct Rotation {
    const u32* positions;      // [rows]
    const u32* cache_rows;     // [rows]: page * page_size + offset
    const float* frequencies;  // [dim / 2]
    const float* q_norm;       // [head_dim], or null: no norms
    const float* k_norm;       // [head_dim]
    float eps;
    float magnitude;
    u32 q_heads;
    u32 kv_heads;
    u32 head_dim;
    u32 dim;
    u32 pairs;
    u32 page_size;
};

/// Cosine and sine of `position * frequency`, right to about 1e-7 for positions up to 2^20 and more: the product is
/// kept in two floats, and whole quarter turns are taken off with pi/2 in two floats.
__device__ __forceinline__ float2 cos_sin(u32 position, float frequency) {
    float p = (float)position;
    float angle = p * frequency, rest = fmaf(p, frequency, -angle);
    float quarters = rintf(angle * 0.636619772f);
    float r = fmaf(-quarters, 1.57079637f, angle);
    r = fmaf(-quarters, -4.37113883e-8f, r) + rest;
    float z = r * r;
    // Minimax polynomials on |r| <= pi/4 (Cephes, sinf and cosf).
    float sine = fmaf(fmaf(fmaf(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f) * z, r, r);
    float cosine = fmaf(fmaf(fmaf(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f), z * z,
                        fmaf(-0.5f, z, 1.0f));
    int quadrant = (int)quarters & 3;
    float c = quadrant & 1 ? sine : cosine, s = quadrant & 1 ? cosine : sine;
    return make_float2(quadrant == 1 || quadrant == 2 ? -c : c, quadrant >= 2 ? -s : s);
}

template <u32 W> struct Few {
    float v[W];
};

template <u32 W, typename T> __device__ __forceinline__ Few<W> read_few(const T* from) {
    Few<W> x;
    if constexpr (W == CHUNK) {
        Chunk c = read_chunk(from);
#pragma unroll
        for (u32 j = 0; j < W; j++) x.v[j] = c.v[j];
    } else {
#pragma unroll
        for (u32 j = 0; j < W; j++) x.v[j] = to_float(from[j]);
    }
    return x;
}

__device__ __forceinline__ void write_chunk(e4m3* to, const Chunk& c) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_e4m3(c.v[0], c.v[1]) | pack_e4m3(c.v[2], c.v[3]) << 16,
                                               pack_e4m3(c.v[4], c.v[5]) | pack_e4m3(c.v[6], c.v[7]) << 16);
}

template <u32 W, typename T> __device__ __forceinline__ void write_few(T* to, const Few<W>& x) {
    if constexpr (W == CHUNK) {
        Chunk c;
#pragma unroll
        for (u32 j = 0; j < W; j++) c.v[j] = x.v[j];
        write_chunk(to, c);
    } else {
#pragma unroll
        for (u32 j = 0; j < W; j++) to[j] = From<T>::of(x.v[j]);
    }
}

constexpr u32 ANGLES_MAX = 256;

/// The part of a head that a thread works on: two times W elements at `low` and `high`. If they turn, the first angle
/// is `angle`, and partners are each other (halves, or W = 1) or neighbours (pairs).
struct Part {
    u32 low, high, angle, angle_high;
    bool turns, neighbours;
};

template <u32 W> __device__ __forceinline__ Part part_of(u32 unit, const Rotation& r) {
    u32 turning = r.dim / (2 * W);
    bool turns = unit < turning;
    u32 low = 2 * W * unit;
    Part p = {low, low + W, low / 2, (low + W) / 2, turns, W > 1};
    if (turns && !r.pairs) p = {W * unit, W * unit + r.dim / 2, W * unit, 0, true, false};
    return p;
}

template <u32 W>
__device__ __forceinline__ void turn(Few<W>& low, Few<W>& high, const Part& part, const float* cosines,
                                     const float* sines) {
    if (!part.neighbours) {
#pragma unroll
        for (u32 j = 0; j < W; j++) {
            float c = cosines[part.angle + j], s = sines[part.angle + j], x = low.v[j], y = high.v[j];
            low.v[j] = fmaf(x, c, -(y * s));
            high.v[j] = fmaf(y, c, x * s);
        }
        return;
    }
    if constexpr (W > 1) {
#pragma unroll
        for (u32 j = 0; j < W; j += 2) {
            float c = cosines[part.angle + j / 2], s = sines[part.angle + j / 2], x = low.v[j], y = low.v[j + 1];
            low.v[j] = fmaf(x, c, -(y * s));
            low.v[j + 1] = fmaf(y, c, x * s);
            c = cosines[part.angle_high + j / 2], s = sines[part.angle_high + j / 2], x = high.v[j], y = high.v[j + 1];
            high.v[j] = fmaf(x, c, -(y * s));
            high.v[j + 1] = fmaf(y, c, x * s);
        }
    }
}

template <typename A, typename B> constexpr bool same = false;
template <typename A> constexpr bool same<A, A> = true;

/// T in qkv, C in the cache; W elements a read, K parts of a head a thread at the most.
template <typename T, typename C, u32 W, u32 K>
__device__ __forceinline__ void rotate_and_cache(T* qkv, C* keys, C* values, const Rotation& r, Extent extent) {
    __shared__ float cosines[ANGLES_MAX], sines[ANGLES_MAX];
    let_next_start();
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u32 units = r.head_dim / (2 * W);
    // Lanes of a head.
    u32 group = units <= 1 ? 1 : 1u << (32 - __clz(units - 1));
    if (group > 32) group = 32;
    u32 heads = r.q_heads + 2 * r.kv_heads, at_once = 32 / group, first_unit = lane % group;
    Part parts[K];
#pragma unroll
    for (u32 k = 0; k < K; k++) parts[k] = part_of<W>(first_unit + k * group, r);
    // Weights of the head in hand, which are those of the next one as well until k follows q.
    Few<W> low_weight[K], high_weight[K];
    const float* weight_is = nullptr;
    auto read_weights = [&](u32 head) {
        const float* weight = head < r.q_heads ? r.q_norm : r.k_norm;
        if (!weight || weight == weight_is || head >= r.q_heads + r.kv_heads) return;
        weight_is = weight;
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            if (first_unit + k * group >= units) continue;
            low_weight[k] = read_few<W>(weight + parts[k].low);
            high_weight[k] = read_few<W>(weight + parts[k].high);
        }
    };
    read_weights(warp * at_once + lane / group);
    bool waits = true;
    for (u32 row = blockIdx.x; row < extent.capacity(); row += gridDim.x) {
        if (!extent.has(row)) continue;
        if (!waits) __syncthreads();
        for (u32 i = threadIdx.x; i < r.dim / 2; i += blockDim.x) {
            float2 turned = cos_sin(r.positions[row], r.frequencies[i]);
            cosines[i] = turned.x * r.magnitude;
            sines[i] = turned.y * r.magnitude;
        }
        u32 page = r.cache_rows[row] / r.page_size, offset = r.cache_rows[row] % r.page_size;
        __syncthreads();
        if (waits) wait_for_inputs();
        waits = false;
        T* line = qkv + (u64)row * heads * r.head_dim;
        for (u32 base = warp * at_once; base < heads; base += warps * at_once) {
            u32 head = base + lane / group;
            bool is_q = head < r.q_heads, is_v = head >= r.q_heads + r.kv_heads, works = head < heads;
            T* from = line + head * r.head_dim;
            void* to = from;
            if (!is_q) {
                u32 kv = head - r.q_heads - (is_v ? r.kv_heads : 0);
                to = (is_v ? values : keys) + (((u64)page * r.kv_heads + kv) * r.page_size + offset) * r.head_dim;
            }
            Few<W> low[K], high[K];
            float squares = 0.0f;
#pragma unroll
            for (u32 k = 0; k < K; k++) {
                if (!works || first_unit + k * group >= units) continue;
                low[k] = read_few<W>(from + parts[k].low), high[k] = read_few<W>(from + parts[k].high);
#pragma unroll
                for (u32 j = 0; j < W; j++) {
                    squares = fmaf(low[k].v[j], low[k].v[j], squares);
                    squares = fmaf(high[k].v[j], high[k].v[j], squares);
                }
            }
            float scale = 1.0f;
            if (r.q_norm) {
                for (u32 step = group / 2; step; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
                scale = inverse_root(squares, r.head_dim, r.eps);
            }
            read_weights(head);
#pragma unroll
            for (u32 k = 0; k < K; k++) {
                if (!works || first_unit + k * group >= units) continue;
                if (r.q_norm && !is_v) {
#pragma unroll
                    for (u32 j = 0; j < W; j++) {
                        low[k].v[j] = low[k].v[j] * scale * low_weight[k].v[j];
                        high[k].v[j] = high[k].v[j] * scale * high_weight[k].v[j];
                    }
                }
                if (parts[k].turns && !is_v) turn<W>(low[k], high[k], parts[k], cosines, sines);
                if (!same<T, C> && is_q) {
                    write_few<W>((T*)to + parts[k].low, low[k]);
                    write_few<W>((T*)to + parts[k].high, high[k]);
                } else {
                    write_few<W>((C*)to + parts[k].low, low[k]);
                    write_few<W>((C*)to + parts[k].high, high[k]);
                }
            }
        }
    }
    if (waits) wait_for_inputs();
}

#define ROTATE(NAME, T, C)                                                                                           \
    extern "C" __global__ void __launch_bounds__(512, 2)                                                              \
        rotate_and_cache_##NAME(T* qkv, C* keys, C* values, Rotation rotation, Extent extent) {                      \
        rotate_and_cache<T, C, 8, 1>(qkv, keys, values, rotation, extent);                                           \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(512, 2)                                                              \
        rotate_and_cache_##NAME##_narrow(T* qkv, C* keys, C* values, Rotation rotation, Extent extent) {             \
        rotate_and_cache<T, C, 1, 4>(qkv, keys, values, rotation, extent);                                           \
    }
ROTATE(bf16, bf16, bf16)
ROTATE(f32, float, float)
ROTATE(bf16_e4m3, bf16, e4m3)
ROTATE(f32_e4m3, float, e4m3)
