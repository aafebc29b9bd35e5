// The end of a step: what the host waits for.
//
// Results lie in device memory while kernels work on them. This kernel copies them to the host's memory and then stores
// the step's number there; whoever loads that number with acquire sees the results. So a step needs neither a copy down
// nor an event, and no call of the driver tells that it has ended.
#include "sample.cuh"

constexpr u32 LINE = 128;
constexpr u32 COUNT = 8; // bytes into a line
/// 16 bytes each: the first has token and log-probability, the others the alternatives.
constexpr u32 PARTS = sizeof(Scored) / 16;
static_assert(sizeof(Scored) % 16 == 0);

/// `host`: for each of two turns a line with the number of the step that ended last in that turn and what it has counted, if
/// `count` isn't null; then `stride` bytes of
/// results for each turn. `results` [out rows], null where nobody samples. One block.
extern "C" __global__ void __launch_bounds__(1024) publish(const int* header, const Scored* results, u64* count,
                                                            u8* host, u32 stride) {
    u32 sequence = header[SEQUENCE], turn = sequence & 1, rows = results ? (u32)header[OUT_ROWS] : 0;
    wait_for_inputs();
    Scored* out = (Scored*)(host + 2 * LINE + (u64)turn * stride);
    for (u32 row = threadIdx.x; row < rows; row += blockDim.x) {
        const uint4* from = (const uint4*)(results + row);
        uint4* to = (uint4*)(out + row);
        uint4 first = from[0];
        to[0] = first;
        if (first.z == 0) continue; // no alternatives
#pragma unroll
        for (u32 part = 1; part < PARTS; part++) to[part] = from[part];
    }
    if (count && threadIdx.x == 0) {
        *(u64*)(host + (u64)turn * LINE + COUNT) = *count;
        *count = 0;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(host + (u64)turn * LINE), "r"(sequence) : "memory");
}
