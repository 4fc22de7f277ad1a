#include <cuda.h>

template <typename T>
__global__ void tile(T *out, const __grid_constant__ CUtensorMap map, int row) {
  __shared__ alignas(128) T tile[16 * 64];
  __shared__ alignas(8) unsigned long long barrier;
  unsigned to = (unsigned)__cvta_generic_to_shared(tile);
  unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(at), "r"((unsigned)sizeof tile) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&map), "r"(0), "r"(row), "r"(at) : "memory");
  }
  __syncthreads();
  asm volatile("{\n.reg .pred done;\nAGAIN:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra AGAIN;\n}"
               ::"r"(at) : "memory");
  for (int i = threadIdx.x; i < 16 * 64; i += blockDim.x) out[i] = tile[i];
}
