// Private. Barriers in shared memory (mbarrier), and copies of many bytes that one thread begins and that arrive at a
// barrier. Both are of sm_90 and later; in a kernel for older GPUs they do nothing, and must not be reached.
//
// A barrier's phase is over after `count` arrivals and the bytes that these expect. Then the next phase begins. Phases have
// the parities 0, 1, 0, ...; a new barrier counts as one whose phase of parity 1 is over.
#pragma once

namespace jitkern {

__device__ __forceinline__ void make_barrier(unsigned barrier, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#endif
}
__device__ __forceinline__ void barriers_are_made() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Between what threads wrote to shared memory and what copies of many bytes, or matrix instructions, do there.
__device__ __forceinline__ void fence_memory() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void arrive(unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ void arrive_and_expect(unsigned barrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
// Arrives once all that this thread copies by cp.async is there.
__device__ __forceinline__ void arrive_after_copies(unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}
// Waits until the phase of this parity is over.
__device__ __forceinline__ void wait_for_phase(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred over; again: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1; @over bra done; bra again; done: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}
// Bytes and both places are multiples of 16.
__device__ __forceinline__ void copy_bytes(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
#endif
}
// The same of bytes that nobody reads again: they are the first to leave L2.
__device__ __forceinline__ void copy_bytes_once(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
               : "memory");
#endif
}

}  // namespace jitkern
