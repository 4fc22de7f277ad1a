// In the manner of the CUDA samples: helper headers, templates, dynamic shared memory, extern "C".
#include <assert.h>
#ifndef __CUDACC_RTC__
#include <helper_cuda.h>
#include <helper_functions.h>
#endif

template <class T>
struct SharedMemory {
  __device__ inline operator T *() {
    extern __shared__ int __smem[];
    return (T *)__smem;
  }
};

// Sums blocks of g_idata; the host side is below.
template <class T, unsigned int blockSize>
__global__ void reduce(T *g_idata, T *g_odata, unsigned int n) {
  T *sdata = SharedMemory<T>();
  unsigned int tid = threadIdx.x, i = blockIdx.x * blockSize + tid;
  sdata[tid] = i < n ? g_idata[i] : 0;
  __syncthreads();
  for (unsigned int s = blockSize / 2; s > 0; s >>= 1) {
    if (tid < s) sdata[tid] += sdata[tid + s];
    __syncthreads();
  }
  if (tid == 0) g_odata[blockIdx.x] = sdata[0];
}

#ifndef __CUDACC_RTC__
extern "C" bool isPow2(unsigned int x) { return ((x & (x - 1)) == 0); }

template <class T>
void launch(int size, T *in, T *out) {
  const char *quote = "{ \"";
  reduce<T, 256><<<size / 256, 256, 256 * sizeof(T)>>>(in, out, size);
  getLastCudaError(quote);
}
template void launch<float>(int, float *, float *);

int main(int argc, char **argv) {
  findCudaDevice(argc, (const char **)argv);
  float *in = nullptr, *out = nullptr;
  checkCudaErrors(cudaMalloc(&in, 4096));
  launch<float>(1024, in, out);
}
#endif
