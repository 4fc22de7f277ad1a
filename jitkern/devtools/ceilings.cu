// What memory gives: 16-byte accesses, 4 in flight a thread, past L1. n counts vectors of 16 bytes.
// Torch's own `copy_` reaches two thirds of the first on an H200, so it is no ceiling.

__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// A block of 256 threads copies 1024 vectors.
__global__ void __launch_bounds__(256) copy16(float* to, const float* from, long long n) {
  const uint4* x = reinterpret_cast<const uint4*>(from);
  uint4* out = reinterpret_cast<uint4*>(to);
  const long long i = blockIdx.x * 1024LL + threadIdx.x;
  uint4 v[4];
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (i + 256 * j < n) v[j] = load_once(x + i + 256 * j);
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (i + 256 * j < n) __stcs(out + i + 256 * j, v[j]);
}

// A block of 256 threads reads 2048 vectors. It writes only if what it read has one value of 2^32.
__global__ void __launch_bounds__(256) read16(float* to, const float* from, long long n) {
  const uint4* x = reinterpret_cast<const uint4*>(from);
  unsigned all = 0;
#pragma unroll
  for (int e = 0; e < 8; e += 4) {
    const long long i = blockIdx.x * 2048LL + 256LL * e + threadIdx.x;
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      v[j] = make_uint4(0, 0, 0, 0);
      if (i + 256 * j < n) v[j] = load_once(x + i + 256 * j);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) all ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (all == 0x12345678u) to[threadIdx.x] = 1;
}
