/* What the host code of the CuTe DSL calls, on the CUDA driver alone. Handles, attributes and launch
   configurations of the CUDA runtime have the layout of the driver's. Nothing is included and
   nothing is linked: whoever loads the library fills `jitkern_driver`. Below this text `worker.py`
   writes the call of one kernel. */
typedef int (*Function)();
enum { LOAD, KERNEL, KERNEL_GET, KERNEL_SET, LAUNCH, DEVICE_GET, CURRENT, RETAIN, ENTER, EXPLAIN };
struct { const char *name; Function call; } jitkern_driver[] = {
    [LOAD] = {"cuLibraryLoadData"}, [KERNEL] = {"cuLibraryGetKernel"},
    [KERNEL_GET] = {"cuKernelGetAttribute"}, [KERNEL_SET] = {"cuKernelSetAttribute"},
    [LAUNCH] = {"cuLaunchKernelEx"}, [DEVICE_GET] = {"cuDeviceGetAttribute"},
    [CURRENT] = {"cuCtxGetDevice"}, [RETAIN] = {"cuDevicePrimaryCtxRetain"},
    [ENTER] = {"cuCtxSetCurrent"}, [EXPLAIN] = {"cuGetErrorString"}, {0}};
#define DRIVER(which) jitkern_driver[which].call
extern int snprintf(char *, unsigned long, const char *, ...) __attribute__((weak));
extern int sched_yield(void) __attribute__((weak));

int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned n, void *c,
                         void *d, unsigned m) {
  return DRIVER(LOAD)(library, code, a, b, n, c, d, m);
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  return DRIVER(KERNEL)(kernel, library, name);
}
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int on) {
  return DRIVER(KERNEL_GET)(value, attribute, kernel, on);
}
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int on) {
  return DRIVER(KERNEL_SET)(attribute, value, kernel, on);
}
int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
  int device, error = DRIVER(CURRENT)(&device);
  return error ? error : DRIVER(KERNEL_SET)(attribute, value, kernel, device);
}
int _cudaDeviceGetAttribute(int *value, int attribute, int on) {
  return DRIVER(DEVICE_GET)(value, attribute, on);
}
int _cudaGetDevice(int *device) { return DRIVER(CURRENT)(device); }
int _cudaLaunchKernelEx(const unsigned *config, void *kernel, void **parameters) {
  if (!config[0] || !config[1] || !config[2]) return 0; /* an empty grid */
  return DRIVER(LAUNCH)(config, kernel, parameters, (void *)0);
}

enum { DEVICES = 64, TEXT = 1024 };
void _mlir_jitkern_cuda_init(void **), _mlir_jitkern_cuda_load_to_device(void **);

/* Load the code, once, and prepare it for a device, once. The device is the current one. */
static int prepare(int device) {
  static void *library;
  static char ready[DEVICES], preparing;
  void *place = &library;
  int error = 0, known;
  if (device < 0 || device >= DEVICES) return 101; /* CUDA_ERROR_INVALID_DEVICE */
  if (DRIVER(CURRENT)(&known)) { /* a thread that has not used CUDA yet */
    void *context;
    error = DRIVER(RETAIN)(&context, device);
    if (!error) error = DRIVER(ENTER)(context);
  }
  if (error || __atomic_load_n(&ready[device], __ATOMIC_ACQUIRE)) return error;
  while (__atomic_test_and_set(&preparing, __ATOMIC_ACQUIRE)) sched_yield();
  if (!library) {
    void *init[] = {&place, &error};
    _mlir_jitkern_cuda_init(init);
  }
  if (!error && !ready[device]) {
    void *load[] = {&place, &device, &error};
    _mlir_jitkern_cuda_load_to_device(load);
    if (!error) __atomic_store_n(&ready[device], 1, __ATOMIC_RELEASE);
  }
  __atomic_clear(&preparing, __ATOMIC_RELEASE);
  return error;
}

static int explained(int error, const char *when, char *text) {
  const char *why = "unknown";
  DRIVER(EXPLAIN)(error, &why);
  snprintf(text, TEXT, "CUDA error %d (%s) when %s", error, why, when);
  return 1;
}

