// rotate_and_cache: per-head RMS norms of q and k (optional), rotary embedding, and k, v into their page.
//
//   for heads of q and k:  x = x / sqrt(mean(x^2) + eps) * weight            if there are norms
//   angle(i) = position * frequencies[i], c = magnitude * cos, s = magnitude * sin
//   (x[a], x[b]) = (x[a] c - x[b] s, x[b] c + x[a] s)    (a, b) = (i, i + dim/2), or (2i, 2i + 1) if `pairs`
//   q stays where it was; k goes to keys[page][head][offset], v unchanged to values[page][head][offset]
//
// Launch contract. `_bf16`, `_f32`: the type of qkv and of the cache. Buffers and pages start on 16 bytes.
//   rotate_and_cache_T         dim/2 and (head_dim - dim)/2 are multiples of 8, head_dim <= 512
//   rotate_and_cache_T_narrow  any even dim, any even head_dim <= 256
//   grid.x = rows at capacity (any number is right, blocks loop); block.x = 32 * warps, any number of warps up to 16:
//   sensible is one pass over the heads: ceil((q_heads + 2 kv_heads) / (32 / G)) warps, where G is the least power of
//   two >= head_dim / 16 (narrow: G = 32). grid.y = 1. `dim` <= 512.
// Angles are made before the wait for the kernel in front: positions come with the step's upload.
#include "rows.cuh"

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

/// W elements as they lie in memory.
template <u32 W, typename T> struct Raw {
    Few<W> x;
    __device__ __forceinline__ void read(const T* from) { x = read_few<W>(from); }
    __device__ __forceinline__ Few<W> widen() const { return x; }
};
template <> struct Raw<CHUNK, bf16> {
    uint4 x;
    __device__ __forceinline__ void read(const bf16* from) { x = *reinterpret_cast<const uint4*>(from); }
    __device__ __forceinline__ Few<CHUNK> widen() const {
        return {{low_float(x.x), high_float(x.x), low_float(x.y), high_float(x.y), low_float(x.z), high_float(x.z),
                 low_float(x.w), high_float(x.w)}};
    }
};

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

/// What a thread holds of a head: K parts.
template <typename F, u32 K> struct Held {
    F low[K], high[K];
};

/// W elements a read, K parts of a head a thread at the most. The next head is read before this one is worked on.
template <typename T, u32 W, u32 K>
__device__ __forceinline__ void rotate_and_cache(T* qkv, T* keys, T* values, const Rotation& r, Extent extent) {
    __shared__ float cosines[ANGLES_MAX], sines[ANGLES_MAX];
    let_next_start();
    u32 lane = threadIdx.x % 32, units = r.head_dim / (2 * W);
    // Lanes of a head.
    u32 group = units <= 1 ? 1 : 1u << (32 - __clz(units - 1));
    if (group > 32) group = 32;
    u32 heads = r.q_heads + 2 * r.kv_heads, at_once = 32 / group, first_unit = lane % group;
    u32 first_head = threadIdx.x / 32 * at_once + lane / group, stride = blockDim.x / 32 * at_once;
    Part parts[K];
#pragma unroll
    for (u32 k = 0; k < K; k++) parts[k] = part_of<W>(first_unit + k * group, r);
    auto read = [&](const T* line, u32 head, Held<Raw<W, T>, K>& held) {
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            if (head >= heads || first_unit + k * group >= units) continue;
            held.low[k].read(line + head * r.head_dim + parts[k].low);
            held.high[k].read(line + head * r.head_dim + parts[k].high);
        }
    };
    Held<Few<W>, K> weight;
    const float* weight_is = nullptr;
    bool waits = true;
    for (u32 row = blockIdx.x; row < extent.capacity(); row += gridDim.x) {
        if (!extent.has(row)) continue;
        u32 position = r.positions[row], cache_row = r.cache_rows[row];
        float frequency = threadIdx.x < r.dim / 2 ? r.frequencies[threadIdx.x] : 0.0f;
        if (waits) wait_for_inputs();
        else __syncthreads();
        waits = false;
        T* line = qkv + (u64)row * heads * r.head_dim;
        Held<Raw<W, T>, K> next;
        read(line, first_head, next);
        for (u32 i = threadIdx.x; i < r.dim / 2; i += blockDim.x) {
            float2 turned = cos_sin(position, i == threadIdx.x ? frequency : r.frequencies[i]);
            cosines[i] = turned.x * r.magnitude;
            sines[i] = turned.y * r.magnitude;
        }
        u32 page = cache_row / r.page_size, offset = cache_row % r.page_size;
        __syncthreads();
        // All lanes go round alike, for the sums over their groups.
        for (u32 head = first_head; head - lane / group < heads; head += stride) {
            bool is_q = head < r.q_heads, is_v = head >= r.q_heads + r.kv_heads, works = head < heads;
            Held<Few<W>, K> x;
#pragma unroll
            for (u32 k = 0; k < K; k++) x.low[k] = next.low[k].widen(), x.high[k] = next.high[k].widen();
            read(line, head + stride, next);
            T* to = line + head * r.head_dim;
            if (!is_q) {
                u32 kv = head - r.q_heads - (is_v ? r.kv_heads : 0);
                to = (is_v ? values : keys) + (((u64)page * r.kv_heads + kv) * r.page_size + offset) * r.head_dim;
            }
            float scale = 1.0f;
            if (r.q_norm) {
                float squares = 0.0f;
#pragma unroll
                for (u32 k = 0; k < K; k++) {
                    if (!works || first_unit + k * group >= units) continue;
#pragma unroll
                    for (u32 j = 0; j < W; j++) {
                        squares = fmaf(x.low[k].v[j], x.low[k].v[j], squares);
                        squares = fmaf(x.high[k].v[j], x.high[k].v[j], squares);
                    }
                }
                for (u32 step = group / 2; step; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
                scale = inverse_root(squares, r.head_dim, r.eps);
                const float* wanted = is_q ? r.q_norm : r.k_norm;
                if (wanted != weight_is && works && !is_v) {
#pragma unroll
                    for (u32 k = 0; k < K; k++) {
                        if (first_unit + k * group >= units) continue;
                        weight.low[k] = read_few<W>(wanted + parts[k].low);
                        weight.high[k] = read_few<W>(wanted + parts[k].high);
                    }
                    weight_is = wanted;
                }
            }
#pragma unroll
            for (u32 k = 0; k < K; k++) {
                if (!works || first_unit + k * group >= units) continue;
                if (r.q_norm && !is_v) {
#pragma unroll
                    for (u32 j = 0; j < W; j++) {
                        x.low[k].v[j] = x.low[k].v[j] * scale * weight.low[k].v[j];
                        x.high[k].v[j] = x.high[k].v[j] * scale * weight.high[k].v[j];
                    }
                }
                if (parts[k].turns && !is_v) turn<W>(x.low[k], x.high[k], parts[k], cosines, sines);
                write_few<W>(to + parts[k].low, x.low[k]);
                write_few<W>(to + parts[k].high, x.high[k]);
            }
        }
    }
    if (waits) wait_for_inputs();
}

#define ROTATE(NAME, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(512)                                                                \
        rotate_and_cache_##NAME(T* qkv, T* keys, T* values, Rotation rotation, Extent extent) {                      \
        rotate_and_cache<T, 8, 1>(qkv, keys, values, rotation, extent);                                              \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(512)                                                                \
        rotate_and_cache_##NAME##_narrow(T* qkv, T* keys, T* values, Rotation rotation, Extent extent) {             \
        rotate_and_cache<T, 1, 4>(qkv, keys, values, rotation, extent);                                              \
    }
ROTATE(bf16, bf16)
ROTATE(f32, float)
