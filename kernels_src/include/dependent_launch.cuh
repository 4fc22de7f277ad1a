// Private. Launches with pdl=True (programmatic dependent launch) begin before the kernels before them are done. Before
// sm_90 there are none: only `prefetch_line` does something there.
#pragma once

namespace jitkern {

// Once all blocks of this kernel have come here, or have ended, the next kernel may begin and come to its own wait.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// What the kernels before this one wrote is there from here on. Pointers to it are not __restrict__, nor read by __ldg: the
// compiler might move such loads up.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Asks L2 for the 128 bytes of the line that has this address. A kernel before this one may still write them.
__device__ __forceinline__ void prefetch_line(const void *in) { asm volatile("prefetch.global.L2 [%0];" ::"l"(in)); }
// The same for `bytes` from an address on, both multiples of 16.
__device__ __forceinline__ void prefetch(const void *from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

}  // namespace jitkern
