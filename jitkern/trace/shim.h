/* The declarations that the runtime and every stub share, pasted above them. Nothing is included
   and nothing is linked; Torch, the driver and the runtime come as a table of addresses. */
typedef int i32;
typedef unsigned u32;
typedef long long i64;
typedef unsigned long long u64;
typedef void *Handle; /* an at::Tensor on the heap, as Torch's stable C shim hands them out */

typedef struct { /* a tensor argument, described once per call */
  Handle handle; /* 0: None */
  char *data;
  const i64 *size, *stride;
  i64 dim, numel;
  i32 dtype, device, index; /* as Torch numbers them */
} Tensor;

typedef struct { /* an argument that is a list or a string; its place has count -1 where it is None */
  const Tensor *tensors;
  const u64 *values;
  const char *text;
  i64 count; /* items; bytes of a string */
} List;

enum { LISTS = 8 }; /* most lists of one table */
#define WORDS(capacity) ((capacity) / 2 * 5 + 1)

typedef struct { /* a table of tensors, see `launch/resources/tables.py`: the i-th tensors of some lists */
  u64 *words; /* WORDS(capacity) for each list: addresses, sizes; as i32, first chunks and count */
  i64 chunks;
  u64 bits[LISTS]; /* all addresses of a list, or-ed */
  i32 group;       /* the place of its dtypes */
  i32 capacity, least, count;
} Table;

typedef struct Call Call;

typedef struct { /* runtime/symbols.py fills this table, by these names and in this order */
  /* of Torch */
  i32 (*get_dim)(Handle, i64 *);
  i32 (*get_numel)(Handle, i64 *);
  i32 (*get_sizes)(Handle, const i64 **);
  i32 (*get_strides)(Handle, const i64 **);
  i32 (*get_dtype)(Handle, i32 *);
  i32 (*get_device_type)(Handle, i32 *);
  i32 (*get_device_index)(Handle, i32 *);
  i32 (*get_data_ptr)(Handle, char **);
  i32 (*empty_strided)(i64, const i64 *, const i64 *, i32, i32, i32, Handle *);
  i32 (*_reinterpret_tensor)(Handle, i64, const i64 *, const i64 *, i64, Handle *);
  i32 (*new_tensor_handle)(Handle, Handle *);
  i32 (*delete_tensor_object)(Handle);
  i32 (*copy_)(Handle, Handle, i32);
  i32 (*zero_)(Handle);
  i32 (*call_dispatcher)(const char *, const char *, u64 *);
  void (*check)(_Bool, const char *, const char *, u32, const char *);
  _Bool (*grad_mode_is_enabled)(void);
  i32 (*get_current_device_index)(i32 *);
  i32 (*create_device_guard)(i32, Handle *);
  i32 (*delete_device_guard)(Handle);
  i32 (*get_current_cuda_stream)(i32, void **);
  /* of Torch, by mangled names: null where this Torch lacks them */
  _Bool (*requires_grad)(const void *);
  void **(*forward_grad)(const void *, u64, Handle);
  _Bool (*is_included)(u32);
  void (*bump_version)(Handle);
  _Bool (*is_inference)(Handle);
  void (*operator_delete)(void *);
  void *(*operator_new)(u64);
  i32 (*list_size)(Handle, u64 *);
  i32 (*list_get_item)(Handle, u64, u64 *);
  i32 (*delete_list)(Handle);
  i32 (*string_length)(Handle, u64 *);
  i32 (*string_c_str)(Handle, const char **);
  i32 (*delete_string)(Handle);
  unsigned short (*default_dtype)(void);
  i64 (*function_modes)(void);
  void *(*context)(void);
  _Bool (*deterministic)(const void *);
  /* of Python, and the pow() that it calls */
  i32 (*PyGILState_Ensure)(void);
  void (*PyGILState_Release)(i32);
  void *(*PyDict_GetItemWithError)(void *, void *);
  i32 (*PyDict_Next)(void *, i64 *, void **, void **);
  void (*PyErr_SetInterrupt)(void);
  double (*pow)(double, double);
  /* of the CUDA driver: null where there is none */
  i32 (*cuLaunchKernelEx)(const void *, void *, void **, void **);
  i32 (*cuKernelSetAttribute)(i32, i32, void *, i32);
  i32 (*cuKernelGetAttribute)(i32 *, i32, void *, i32);
  i32 (*cuGetErrorString)(i32, const char **);
  i32 (*cuDeviceGetAttribute)(i32 *, i32, i32);
  i32 (*cuStreamIsCapturing)(void *, i32 *);
  i32 (*cuTensorMapEncodeTiled)(void *, i32, u32, void *, const u64 *, const u64 *, const u32 *,
                                const u32 *, i32, i32, i32, i32);
  i32 (*cuDevicePrimaryCtxRetain)(void **, i32);
  i32 (*cuCtxSetCurrent)(void *);
  /* of the runtime, for stubs */
  i32 (*allocate)(Call *, i64, const i64 *, const i64 *, i32, Handle *, char **);
  i32 (*launch)(Call *, void *, const char *, const i64 *, const i64 *, const i32 *, void **);
  i32 (*release)(Call *, Handle *, i32, i32);
  i64 (*attribute)(const Call *, i32);
  i64 (*workspace)(const Call *, i64, i32);
  i32 (*tensor_map)(Call *, void *, const i32 *, char *, const i64 *, const i64 *, const i32 *);
  i32 (*tabulate)(const Call *, const i32 *, const i32 *, i32, Table *, i32, i64, i32);
} Api;

struct Call { /* one call of an op, as a stub sees it */
  const Api *api;
  const Tensor *tensors; /* by position in the schema, as are the values */
  const u64 *values;
  const List *lists; /* only of an op that has lists or strings */
  void *const *kernels;
  Handle *returns;
  char *error;
  void *stream;
  i32 device, index; /* where to allocate and launch */
  i32 launched;      /* whether a kernel was launched */
};

enum { DONE, MISS, FAILED, BROKEN }; /* FAILED: before any launch; BROKEN: after one */

/* Whether Torch fills new memory, to reveal elements that nobody writes: then Python allocates. */
static inline i32 fills(const Api *api) { return api->context && api->deterministic && api->deterministic(api->context()); }
typedef union { u64 bits; double real; } Float;
static inline double real(u64 bits) { return ((Float){bits}).real; }
static inline i32 same(double a, double b) { return ((Float){.real = a}).bits == ((Float){.real = b}).bits; }
static inline i32 contiguous(const Tensor *t) {
  i64 expected = 1;
  for (i64 d = t->dim - 1; t->numel && d >= 0; d--) {
    if (t->size[d] == 1) continue;
    if (t->stride[d] != expected) return 0;
    expected *= t->size[d];
  }
  return 1;
}
static inline i32 spells(const List *list, const char *text, i64 bytes) {
  return list->count == bytes && !__builtin_memcmp(list->text, text, (u64)bytes);
}
/* Python's integers: a result beyond int64, or none at all, is marked as odd, and the stub misses. */
static inline i64 add(i64 a, i64 b, i32 *odd) { i64 r; *odd |= __builtin_add_overflow(a, b, &r); return r; }
static inline i64 sub(i64 a, i64 b, i32 *odd) { i64 r; *odd |= __builtin_sub_overflow(a, b, &r); return r; }
static inline i64 mul(i64 a, i64 b, i32 *odd) { i64 r; *odd |= __builtin_mul_overflow(a, b, &r); return r; }
static inline i64 floordiv(i64 a, i64 b, i32 *odd) {
  if (b == 0 || (b == -1 && a == -a)) return *odd |= b == 0 || a != 0, 0;
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
static inline i64 mod(i64 a, i64 b, i32 *odd) {
  if (b == 0 || b == -1) return *odd |= b == 0, 0;
  return a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0);
}
static inline i64 shl(i64 a, i64 b, i32 *odd) {
  if (b < 0 || b > 62) return *odd = 1, 0;
  return mul(a, 1LL << b, odd);
}
static inline i64 shr(i64 a, i64 b, i32 *odd) {
  if (b < 0) return *odd = 1, 0;
  return a >> (b > 63 ? 63 : b);
}
static inline i64 bit_length(i64 a, i32 *odd) {
  *odd |= a < 0;
  return a > 0 ? 64 - __builtin_clzll((u64)a) : 0;
}
static inline i64 max1(i64 a) { return a > 1 ? a : 1; }
/* Floats: an integer must be exact as a double, a divisor not 0, a power finite, a rounded value in range. */
static inline double exact(i64 a, i32 *odd) { *odd |= a > 1LL << 53 || a < -(1LL << 53); return (double)a; }
static inline double quotient(double a, double b, i32 *odd) { *odd |= b == 0; return b == 0 ? 0 : a / b; }
static inline double bounded(double a, i32 *odd) { *odd |= a - a != 0; return a; }
/* Python's own pow() in plain cases: of finite numbers, finite, no root of a negative number. */
static inline double power(const Api *api, double a, double b, i32 *odd) {
  *odd |= !api->pow || a - a != 0 || b - b != 0 || (a == 0 && b < 0) || (a < 0 && __builtin_floor(b) != b);
  return *odd ? 0 : bounded(api->pow(a, b), odd);
}
static inline i64 truncated(double a, i32 *odd) {
  if (!(a > -9e18 && a < 9e18)) return *odd = 1, 0;
  return (i64)a;
}
static inline i64 floored(double a, i32 *odd) { i64 r = truncated(a, odd); return r - (a < (double)r); }
static inline i64 ceiled(double a, i32 *odd) { i64 r = truncated(a, odd); return r + (a > (double)r); }
