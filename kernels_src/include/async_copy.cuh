// Private. Copies from global to shared memory that run while the thread goes on (cp.async), in groups to wait for.
#pragma once

namespace jitkern {

// 16 bytes into shared memory, past L1, or zeros if `bytes` is 0. The thread itself may read them after a wait.
__device__ __forceinline__ void copy_async(void *shared, const void *global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace jitkern
