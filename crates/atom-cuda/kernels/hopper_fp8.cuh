// wgmma of e4m3 (sm_90a), and a copy of four dimensions.
#pragma once
#include "hopper.cuh"

/// d[64, N] (+)= a[64, 32] b[N, 32]^T of e4m3 codes; a and b in shared memory, tiles as wgmma_tile says: 32 codes along K are
/// 32 bytes further. d is laid out as in Wgmma. Sums are of fewer bits than f32 has: add up few of them.
template <int N> struct WgmmaCodes;

#define WGMMA_CODES(N, REGS, A, B, ADD, ...)                                                                                \
    template <> struct WgmmaCodes<N> {                                                                                      \
        template <int SIZE> static __device__ __forceinline__ void run(float (&d)[SIZE], u64 a, u64 b, int add) {           \
            static_assert(SIZE >= N / 2);                                                                                   \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"                                                   \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGS "}, " A ", " B ", p, 1, 1;\n}"   \
                         : __VA_ARGS__                                                                                      \
                         : "l"(a), "l"(b), "r"(add));                                                                       \
        }                                                                                                                   \
    };
WGMMA_CODES(8, WGMMA_S1, "%4", "%5", "%6", WGMMA_O1)
WGMMA_CODES(16, WGMMA_S2, "%8", "%9", "%10", WGMMA_O2)
WGMMA_CODES(24, WGMMA_S3, "%12", "%13", "%14", WGMMA_O3)
WGMMA_CODES(32, WGMMA_S4, "%16", "%17", "%18", WGMMA_O4)
WGMMA_CODES(40, WGMMA_S5, "%20", "%21", "%22", WGMMA_O5)
WGMMA_CODES(48, WGMMA_S6, "%24", "%25", "%26", WGMMA_O6)
WGMMA_CODES(56, WGMMA_S7, "%28", "%29", "%30", WGMMA_O7)
WGMMA_CODES(64, WGMMA_S8, "%32", "%33", "%34", WGMMA_O8)
WGMMA_CODES(72, WGMMA_S9, "%36", "%37", "%38", WGMMA_O9)
WGMMA_CODES(80, WGMMA_S10, "%40", "%41", "%42", WGMMA_O10)
WGMMA_CODES(88, WGMMA_S11, "%44", "%45", "%46", WGMMA_O11)
WGMMA_CODES(96, WGMMA_S12, "%48", "%49", "%50", WGMMA_O12)
WGMMA_CODES(104, WGMMA_S13, "%52", "%53", "%54", WGMMA_O13)
WGMMA_CODES(112, WGMMA_S14, "%56", "%57", "%58", WGMMA_O14)
WGMMA_CODES(120, WGMMA_S15, "%60", "%61", "%62", WGMMA_O15)
WGMMA_CODES(128, WGMMA_S16, "%64", "%65", "%66", WGMMA_O16)
WGMMA_CODES(136, WGMMA_S17, "%68", "%69", "%70", WGMMA_O17)
WGMMA_CODES(144, WGMMA_S18, "%72", "%73", "%74", WGMMA_O18)
WGMMA_CODES(152, WGMMA_S19, "%76", "%77", "%78", WGMMA_O19)
WGMMA_CODES(160, WGMMA_S20, "%80", "%81", "%82", WGMMA_O20)

template <int BLOCKS_OF_CLUSTER>
__device__ __forceinline__ void tma_load_4d(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2, int c3) {
    if (BLOCKS_OF_CLUSTER == 1)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                     "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                     : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, %6, %7}], "
            "[%2], %3;" ::"r"(to),
            "l"(&map), "r"(barrier), "h"((u16)((1 << BLOCKS_OF_CLUSTER) - 1)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
            : "memory");
}
