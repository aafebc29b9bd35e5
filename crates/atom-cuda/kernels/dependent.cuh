// Programmatic dependent launch (sm_90 on): a kernel's blocks may start before the kernel in front is done. Every kernel of
// a chain that is launched so calls both, in this order; without the launch attribute both do nothing.
#pragma once

/// Until the kernels before are done, and their writes seen.
__device__ __forceinline__ void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// The next kernel may start where there is room; after wait_for_kernels_before, so that whoever waits for this kernel
/// also waits for those before.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
