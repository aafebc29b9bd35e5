// Pasted in front of every kernel source. No header of CUDA is included: NVRTC is all that a machine needs.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

/// A bfloat16 as it lies in memory.
struct alignas(2) bf16 {
    u16 bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

/// Rounds to nearest even; NaN stays NaN.
__device__ __forceinline__ bf16 to_bf16(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

/// Two floats as two bfloat16 in one word, `low` first in memory.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

template <typename T> struct From;
template <> struct From<float> {
    static __device__ __forceinline__ float of(float x) { return x; }
};
template <> struct From<bf16> {
    static __device__ __forceinline__ bf16 of(float x) { return to_bf16(x); }
};

/// Places in a step's header.
enum Header {
    ROWS = 0,
    OUT_ROWS = 1,
    SPANS = 2,
    TILES = 3,
    ITEMS = 4,
    SLOT_LOADS = 5,
    TABLE_ENTRIES = 6,
    SEQUENCE = 7,    // number of the step, 31 bits
    PATIENCE_MS = 8, // how long a kernel waits for the host or for another rank at the most
    // Numbers of the first collectives of the step among the ranks of the lane, and among the lanes of the group.
    LANE_ROUND = 9,
    GROUP_ROUND = 10,
};

__device__ __forceinline__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane; lane >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane; lane >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}
