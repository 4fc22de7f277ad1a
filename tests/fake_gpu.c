/* A CUDA driver and the parts of Torch's CUDA backend that the launch runtime calls, on a machine
   without a GPU: kernels are not run, and what they would be given is noted. */
#include <string.h>

typedef unsigned long long u64;

int multiprocessors = 132, sets, queries, launches, asked, missed, capturing, refuses_maps, without_context, mode = 1;
int current, libraries, refuses_launches;
int set[16]; /* attributes of all kernels, by their numbers */
u64 stream = 77;
unsigned config[7], cluster[3];
u64 launched_on;
int sizes[16]; /* bytes of each parameter of the next launch */
unsigned char parameters[16][2048];
int (*real_empty_strided)(long long, const long long *, const long long *, int, int, int, void **);

int cuGetErrorString(int error, const char **text) { *text = "of the fake driver"; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return 0; }
int cuCtxSetCurrent(void *context) { without_context = 0; return 0; }
int cuCtxGetDevice(int *device) { *device = current; return without_context ? 201 : 0; }
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, int c, void *d, void *e, int f) {
  *library = (void *)1, libraries++;
  return 0;
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = (void *)name; return 0; }
int cuDeviceGetAttribute(int *value, int number, int device) {
  asked++;
  *value = number == 16 ? multiprocessors : 1000 + number;
  return 0;
}
int cuKernelSetAttribute(int number, int value, void *kernel, int device) { sets++; set[number] = value; return 0; }
int cuKernelGetAttribute(int *value, int number, void *kernel, int device) { queries++; *value = set[number]; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = capturing; return 0; }
int cuStreamGetCaptureInfo_v2(void *stream, int *status, u64 *number, void *graph, void *a, void *b) {
  if (without_context) return 201;
  *status = capturing, *number = (u64)stream + 1;
  return graph || a || b;
}
int cuThreadExchangeStreamCaptureMode(int *given) { int before = mode; mode = *given, *given = before; return 0; }
int cuLaunchKernelEx(const void *at, void *kernel, void **given, void **extra) {
  struct { unsigned numbers[7]; u64 stream; struct { int id, pad; unsigned value[16]; } *attributes; unsigned count; } launch;
  memcpy(&launch, at, sizeof launch);
  if (refuses_launches) return 1;
  launches++;
  memcpy(config, launch.numbers, sizeof config);
  memset(cluster, 0, sizeof cluster);
  for (unsigned i = 0; i < launch.count; i++)
    if (launch.attributes[i].id == 4) memcpy(cluster, launch.attributes[i].value, sizeof cluster);
  launched_on = launch.stream;
  for (int i = 0; i < 16 && sizes[i]; i++) memcpy(parameters[i], given[i], sizes[i]);
  return 0;
}
/* The map holds what it was made of, one number in eight bytes. */
int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const u64 *size, const u64 *stride,
                           const unsigned *box, const unsigned *step, int interleave, int swizzle, int promotion, int fill) {
  u64 made[16] = {type, rank, (u64)address, swizzle, promotion, fill};
  if (refuses_maps || (u64)map % 128 || interleave) return 1;
  for (unsigned i = 0; i < rank && i < 3; i++) {
    if (step[i] != 1) return 1;
    made[6 + i] = size[i], made[9 + i] = box[i];
    if (i) made[11 + i] = stride[i - 1];
  }
  memcpy(map, made, sizeof made);
  return 0;
}

int get_device_type(void *tensor, int *type) { *type = 1; return 0; }
int get_device_index(void *tensor, int *index) { *index = 0; return 0; }
int get_current_device_index(int *index) { *index = 0; return 0; }
int get_current_cuda_stream(int device, void **at) { *at = (void *)stream; return 0; }
int empty_strided(long long rank, const long long *size, const long long *stride, int dtype, int type, int index, void **tensor) {
  return real_empty_strided(rank, size, stride, dtype, 0, 0, tensor);
}
int call_dispatcher(const char *name, const char *overload, u64 *stack) {
  missed++;
  memset(stack, 0, 8 * 16);
  return 0;
}
