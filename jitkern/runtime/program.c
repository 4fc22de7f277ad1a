/* Programs (`trace/program.py`): the check that one is sound, and its interpreter. A sound program
   reads and writes nothing but its registers, its memory, and what a call gives it. Above this text
   `binding.py` writes the instructions. Nothing is included and nothing is linked; Torch and the
   driver come as a table of addresses. */
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
  i64 chunks, count;
  u64 bits[LISTS]; /* all addresses of a list, or-ed */
  i32 group;       /* the place of its dtypes */
  i32 capacity, least, unused;
} Table;

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
  _Bool (*inference_mode)(void);
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
} Api;

static Api api;

typedef struct { /* one call of an op, as a program sees it */
  const Tensor *tensors; /* by position in the schema, as are the values */
  const u64 *values;
  const List *lists; /* only of an op that has lists or strings */
  void *const *kernels;
  Handle *returns;
  char *error;
  void *stream;
  i32 device, index; /* where to allocate and launch */
  i32 launched;      /* whether a kernel was launched */
} Call;

/* FAILED: before any launch; BROKEN: after one; RAISED: a kernel raised an exception, whose text is in `error`. */
enum { DONE, MISS, FAILED, BROKEN, RAISED };

/* Whether Torch fills new memory, to reveal elements that nobody writes: then Python allocates. */
static inline i32 fills(void) { return api.context && api.deterministic && api.deterministic(api.context()); }
typedef union { u64 bits; double real; } Float;
static inline double real(u64 bits) { return ((Float){bits}).real; }
static inline u64 bits_of(double a) { return ((Float){.real = a}).bits; }
static inline u64 narrowed(double a) {
  union { u64 bits; float real; } one = {0};
  one.real = (float)a;
  return one.bits;
}
static inline i32 contiguous(const Tensor *t) {
  i64 expected = 1;
  for (i64 d = t->dim - 1; t->numel && d >= 0; d--) {
    if (t->size[d] == 1) continue;
    if (t->stride[d] != expected) return 0;
    expected *= t->size[d];
  }
  return 1;
}
/* Python's integers: a result beyond int64, or none at all, is marked as odd, and the program misses. */
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
static inline i32 is_whole(double a) { return a - a == 0 && (a >= 1LL << 53 || a <= -(1LL << 53) || (double)(i64)a == a); }
/* Python's own pow() in plain cases: of finite numbers, finite, no root of a negative number. */
static inline double power(double a, double b, i32 *odd) {
  *odd |= !api.pow || a - a != 0 || b - b != 0 || (a == 0 && b < 0) || (a < 0 && !is_whole(b));
  return *odd ? 0 : bounded(api.pow(a, b), odd);
}
static inline i64 truncated(double a, i32 *odd) {
  if (!(a > -9e18 && a < 9e18)) return *odd = 1, 0;
  return (i64)a;
}
static inline i64 floored(double a, i32 *odd) { i64 r = truncated(a, odd); return r - (a < (double)r); }
static inline i64 ceiled(double a, i32 *odd) { i64 r = truncated(a, odd); return r + (a > (double)r); }

extern int snprintf(char *, unsigned long, const char *, ...);
extern int sched_getaffinity(int, unsigned long, void *), sched_yield(void);
extern void *malloc(unsigned long), *calloc(unsigned long, unsigned long);
extern void free(void *);
extern int pthread_key_create(unsigned *, void (*)(void *));
extern int pthread_setspecific(unsigned, const void *);

enum { ARGUMENTS = 32, RETURNS = 16, TEXT = 4096, DEVICES = 64, ATTRIBUTES = 128, PAGE = 4096 };
enum { MOST_WORDS = 1 << 16, MOST_REGISTERS = 1 << 13, MOST_TENSORS = 1 << 12, MOST_MEMORY = 1 << 18, RANKS = 64 };
enum { MOST_PASSED = 1 << 12, ON_STACK = 1 << 12 /* words: a thread may have a small stack */ };

typedef struct { const char *text; i64 bytes; } Text;

typedef struct { /* filled by binding.py from a Program of `trace/program.py` */
  const i32 *words;
  const u64 *constants;
  const Text *texts;
  const i32 *parameters; /* of each kernel, see `parameter_kind` there; 0 ends those of one */
  i32 length, fixed, text_count, kernels, registers, tensors, owned, memory;
  i32 given, passes, room; /* set by `is_sound`: arguments of the op, the most of a kernel, words in all */
} Program;

/* ------------------------------------------------------------------ what steps do */

typedef struct { /* CUlaunchAttribute */
  i32 id, pad;
  union { char pad[64]; u32 cluster[3]; i32 flag; } value;
} Attribute;
typedef struct { /* CUlaunchConfig */
  u32 grid[3], block[3], smem;
  void *stream;
  Attribute *attributes;
  u32 count;
} Config;
enum { COOPERATIVE = 2, CLUSTER = 4, PROGRAMMATIC = 6, INVALID_CONTEXT = 201 };
enum { MAX_DYNAMIC_SHARED = 8, CARVEOUT = 9, NON_PORTABLE_CLUSTER = 14 }; /* CUfunction_attribute */
/* A kernel has 48 KB of shared memory without asking, of which its static memory takes a part: up to 32 KB here. */
enum { UNASKED_SHARED = 48 << 10, DYNAMIC_SHARED = 16 << 10, PORTABLE_CLUSTER = 8, PREPARED = 64 };

/* What is set of a kernel on a device, as this thread knows: `shared` and `wide` are never lowered. */
typedef struct { void *kernel; i32 device, shared, wide, carveout; } Prepared;
static __thread Prepared prepared[PREPARED];
static char preparing; /* held while a thread asks for a limit and raises the limit */

/* Set the attributes of a kernel that a launch needs, unless they are set. If that fails, the launch
   does. carveout: 1 more than the percentage; 0 for any. */
static void prepare(void *kernel, i32 device, i32 shared, i32 wide, i32 carveout) {
  Prepared *known = &prepared[((u64)kernel >> 4 ^ (u64)device) % PREPARED];
  if (known->kernel != kernel || known->device != device)
    *known = (Prepared){.kernel = kernel, .device = device, .shared = DYNAMIC_SHARED};
  i32 more = shared > known->shared, wider = wide > known->wide;
  i32 other = carveout && carveout != known->carveout, now = 0;
  if (!more && !wider && !other) return;
  while (__atomic_test_and_set(&preparing, __ATOMIC_ACQUIRE)) sched_yield();
  if (more) {
    i32 raised = !api.cuKernelGetAttribute(&now, MAX_DYNAMIC_SHARED, kernel, device) && now > UNASKED_SHARED;
    if (now < shared) now = shared, raised = 0;
    if (raised || !api.cuKernelSetAttribute(MAX_DYNAMIC_SHARED, now, kernel, device)) known->shared = now;
  }
  if (wider && !api.cuKernelSetAttribute(NON_PORTABLE_CLUSTER, 1, kernel, device)) known->wide = 1;
  if (other && !api.cuKernelSetAttribute(CARVEOUT, carveout - 1, kernel, device))
    known->carveout = carveout;
  __atomic_clear(&preparing, __ATOMIC_RELEASE);
}

/* grid: three sizes; block: three sizes and the bytes of dynamic shared memory; options: the
   cluster's three sizes (0: none), cooperative, programmatic, carve-out. */
static i32 launch(Call *call, void *kernel, const char *what, const i64 *grid, const i64 *block,
                  const i64 *options, void **parameters) {
  Attribute attributes[3];
  Config config = {{(u32)grid[0], (u32)grid[1], (u32)grid[2]},
                   {(u32)block[0], (u32)block[1], (u32)block[2]},
                   (u32)block[3], call->stream, attributes, 0};
  if (!grid[0] || !grid[1] || !grid[2]) return 0;
  i32 wide = options[0] * options[1] * options[2] > PORTABLE_CLUSTER;
  if (block[3] > DYNAMIC_SHARED || wide || options[5])
    prepare(kernel, call->index, (i32)block[3], wide, (i32)options[5]);
  if (options[0]) {
    Attribute *cluster = &attributes[config.count++];
    cluster->id = CLUSTER;
    for (i32 i = 0; i < 3; i++) cluster->value.cluster[i] = (u32)options[i];
  }
  for (i32 i = 3; i < 5; i++)
    if (options[i])
      attributes[config.count++] =
          (Attribute){i == 3 ? COOPERATIVE : PROGRAMMATIC, 0, {.flag = 1}};
  i32 error = api.cuLaunchKernelEx(&config, kernel, parameters, 0);
  if (error == INVALID_CONTEXT) { /* a thread that has not used CUDA yet: nothing was launched */
    void *context;
    error = api.cuDevicePrimaryCtxRetain(&context, call->index);
    if (!error) error = api.cuCtxSetCurrent(context);
    if (!error) error = api.cuLaunchKernelEx(&config, kernel, parameters, 0);
  }
  if (error) {
    const char *why = "unknown";
    api.cuGetErrorString(error, &why);
    snprintf(call->error, TEXT,
             "CUDA error %d (%s) when launching %s with grid=(%lld, %lld, %lld) "
             "block=(%lld, %lld, %lld) smem=%lld cluster=(%lld, %lld, %lld)",
             error, why, what, grid[0], grid[1], grid[2], block[0], block[1], block[2], block[3],
             options[0], options[1], options[2]);
    return 1;
  }
  call->launched = 1;
  return 0;
}

/* Return an attribute of the call's device, by its number in CUdevice_attribute; on the CPU the
   number of processors, whatever is asked; 0 if it is unknown. */
static i64 attribute(const Call *call, i32 number) {
  static i32 known[DEVICES][ATTRIBUTES]; /* 0: not asked yet */
  if (!call->device) {
    u64 words[16] = {0};
    i64 count = 0;
    sched_getaffinity(0, sizeof words, words);
    for (i32 i = 0; i < 16; i++)
      for (u64 word = words[i]; word; word &= word - 1) count++;
    return count;
  }
  if (call->index < 0 || call->index >= DEVICES) return 0;
  i32 value = __atomic_load_n(&known[call->index][number], __ATOMIC_RELAXED);
  if (!value) {
    if (api.cuDeviceGetAttribute(&value, number, call->index)) return 0;
    __atomic_store_n(&known[call->index][number], value, __ATOMIC_RELAXED);
  }
  return value;
}

/* Make a CUtensorMap at `map`. options: the type of the elements, the rank, swizzle, promotion, fill;
   sizes, strides in bytes (without the innermost) and box: the innermost dimension first. */
static i32 tensor_map(const Call *call, void *map, const i32 *options, char *data, const i64 *size,
                      const i64 *stride, const u32 *box) {
  static const u32 steps[] = {1, 1, 1, 1, 1};
  i32 error = api.cuTensorMapEncodeTiled(map, options[0], (u32)options[1], data, (const u64 *)size,
                                         (const u64 *)stride, box, steps, 0,
                                         options[2], options[3], options[4]);
  if (error) snprintf(call->error, TEXT, "CUDA error %d when making a tensor map", error);
  return error;
}

typedef struct Workspace {
  struct Workspace *next;
  void *stream;
  char *data;
  i64 bytes;
  i32 index, zeroed;
} Workspace;
static Workspace *workspaces; /* of streams, the latest first; none is removed */
/* Of this thread on the CPU; before `data` lie the `data` before it, and the address to free. */
static __thread struct { char *data; i64 bytes; } own[2];
static u32 at_exit; /* the key whose destructor frees these */

/* Enlarge a workspace of this thread. An earlier one stays until the thread ends: the call that asks
   may hold its address. The new one is all zero, and takes no memory where nobody writes. */
static void enlarge(i64 bytes, i32 zeroed) {
  i64 most = bytes > 2 * own[zeroed].bytes ? bytes : 2 * own[zeroed].bytes;
  if (bytes > 1LL << 46) return;
  most = (most + PAGE - 1) / PAGE * PAGE;
  char *block = calloc(1, (u64)most + 2 * PAGE);
  if (!block) return;
  char **data = (char **)(((u64)block + 2 * PAGE - 1) / PAGE * PAGE);
  data[-2] = own[zeroed].data, data[-1] = block;
  own[zeroed].data = (char *)data, own[zeroed].bytes = most;
  pthread_setspecific(at_exit, own);
}

static void free_own(void *of_thread) {
  (void)of_thread; /* `own` of the thread that ends */
  for (i32 i = 0; i < 2; i++) {
    for (char *data = own[i].data, *before; data; data = before)
      before = ((char **)data)[-2], free(((char **)data)[-1]);
    own[i].data = 0, own[i].bytes = 0;
  }
}

/* Return the address of a workspace of that many bytes at least, which this call may use; 0 if there
   is none yet: Python makes those of streams. A graph that is captured has its own, in Python. */
static i64 workspace(const Call *call, i64 bytes, i32 zeroed) {
  i32 capturing = 0;
  if (!call->device) {
    if (!own[zeroed].data || own[zeroed].bytes < bytes) enlarge(bytes, zeroed);
    return own[zeroed].bytes < bytes ? 0 : (i64)own[zeroed].data;
  }
  if (api.cuStreamIsCapturing(call->stream, &capturing) || capturing) return 0;
  for (Workspace *w = __atomic_load_n(&workspaces, __ATOMIC_ACQUIRE); w; w = w->next)
    if (w->stream == call->stream && w->index == call->index && w->zeroed == zeroed)
      return bytes <= w->bytes ? (i64)w->data : 0;
  return 0;
}

/* Whether the strides leave no gap; `dense`: in whatever order. */
static i32 fits(const Tensor *t, i32 dense) {
  if (!dense || contiguous(t)) return contiguous(t);
  i64 expected = 1;
  while (expected < t->numel) {
    i64 d = 0;
    while (d < t->dim && (t->size[d] == 1 || t->stride[d] != expected)) d++;
    if (d == t->dim) return 0;
    expected *= t->size[d];
  }
  return 1;
}

/* Fill the tables of the lists at these places, or return 0 if they do not fit this call. `types` are
   the registers of the dtypes of the lists, for each group of tensors. The tables come in the order of the groups,
   which is that of their first tensors; all tables of a group but the last are full. */
static i32 tabulate(const Call *call, const i32 *places, const i32 *types, const u64 *r, i32 lists,
                    Table *tables, i32 count, i64 chunk, i32 dense) {
  const List *first = &call->lists[places[0]];
  for (i32 l = 1; l < lists; l++)
    if (call->lists[places[l]].count != first->count) return 0;
  for (i32 p = 0; p < count; p++) {
    tables[p].count = 0, tables[p].chunks = 0;
    for (i32 l = 0; l < lists; l++) tables[p].bits[l] = 0;
  }
  for (i64 i = 0; i < first->count; i++) {
    i32 p = 0, l = 0;
    for (; p < count; p++) { /* to the last table of its dtypes that is not full */
      const i32 *wanted = types + tables[p].group * lists;
      for (l = 0; l < lists && call->lists[places[l]].tensors[i].dtype == (i32)r[wanted[l]];) l++;
      if (l == lists && tables[p].count < tables[p].capacity) break;
      if (!tables[p].count && (!p || tables[p].group != tables[p - 1].group))
        return 0; /* the first tensor of an earlier group would come later */
    }
    if (p == count) return 0;
    Table *table = &tables[p];
    i64 capacity = table->capacity, at = table->count++, numel = first->tensors[i].numel;
    for (l = 0; l < lists; l++) {
      const Tensor *t = &call->lists[places[l]].tensors[i];
      if (t->numel != numel || t->device != call->device || !fits(t, dense)) return 0;
      if (t->device == 1 && t->index != call->index) return 0;
      u64 *words = table->words + l * WORDS(capacity);
      i32 *chunks = (i32 *)(words + 2 * capacity);
      words[at] = (u64)t->data, words[capacity + at] = (u64)numel;
      chunks[at] = (i32)table->chunks, chunks[capacity + 1] = (i32)at + 1;
      table->bits[l] |= (u64)t->data;
    }
    table->chunks += numel / chunk + (numel % chunk != 0);
    if (table->chunks > 0x7fffffff) return 0;
    for (l = 0; l < lists; l++)
      ((i32 *)(table->words + l * WORDS(capacity) + 2 * capacity))[at + 1] = (i32)table->chunks;
  }
  for (i32 p = 0; p < count; p++)
    if (tables[p].count < tables[p].least) return 0;
  return 1;
}


/* ------------------------------------------------------------------ the check */

/* What the check knows of a program up to a step. */
typedef struct {
  const Program *program;
  const char *kinds, *results;
  i32 cuda, given, results_given, registers, tensors, owned, passed, most, ending;
  i32 acting;               /* whether a step has had an effect: no guard may follow */
  u64 returned;             /* results */
  i32 kind[MOST_REGISTERS]; /* a letter, or IN_MEMORY and the word that it points to */
  const i32 *passes[MOST_PASSED];
  signed char rank[ARGUMENTS + MOST_TENSORS]; /* of a tensor, -1 until a guard has looked at it */
  char changes[ARGUMENTS + MOST_TENSORS];     /* whether the op may change a tensor */
  char own[MOST_TENSORS]; /* allocations: `O`, of a view of a tensor `H` if it may be changed, else `h` */
  char filled[];          /* words of the memory: `m` for those of tables that FIELD reads, else `c` */
} Known;

static i32 among(const char *set, i32 one) {
  for (; *set; set++)
    if (*set == one) return 1;
  return 0;
}

/* Whether a register has a kind, by its letter. */
static i32 is_kind(const Known *k, char letter, i32 x) {
  if (x < 0 || x >= k->registers) return 0;
  const i32 kind = k->kind[x], address = kind == 'p' || kind >= IN_MEMORY;
  return letter == 'r' || kind == letter || (letter == 'p' && address) || (letter == 'n' && address) ||
         (kind == '#' && among("nf", letter));
}

static i32 is_argument(const Known *k, const char *kinds, i32 x) {
  return x >= 0 && x < k->given && among(kinds, k->kinds[x]);
}

static i32 is_operand(const Known *k, char letter, i32 x) {
  const Program *p = k->program;
  switch (letter) {
    case '=': case 'N': case 'F': case 'P': case 'M': return x == k->registers && x < p->registers;
    case 'n': case 'f': case 'b': case 'p': case 'r': return is_kind(k, letter, x);
    case '#': return x >= 0 && x < p->fixed;
    case 'i': return 1;
    case 'd': return x >= 0 && x < 64 && DTYPES >> x & 1;
    case 'a': return is_argument(k, "ifb", x);
    case 'A': return is_argument(k, "IFB", x);
    case 'l': return is_argument(k, "LVndzNDZsS", x);
    case 'L': return is_argument(k, "LV", x);
    case 'v': return is_argument(k, "ndzNDZ", x);
    case 's': return is_argument(k, "sS", x);
    case 'T': return is_argument(k, "TtWw", x) || (x >= k->given && x < k->tensors);
    case 't': return x >= 0 && x < k->tensors && k->rank[x] >= 0;
    case '+': return x == k->tensors && x < k->given + p->tensors;
    case 'o': return x == k->owned && x < p->owned;
    case 'h': return x >= 0 ? is_operand(k, 't', x) : ~x < k->owned && k->own[~x];
    case 'H': return is_operand(k, 'h', x) && (x >= 0 ? k->changes[x] : k->own[~x] != 'h');
    case 'O': return x < 0 && ~x < k->owned && k->own[~x] == 'O';
    case 'k': return x >= 0 && x < p->kernels;
    case 'g': return k->cuda && x >= 0 && x < p->kernels;
    case 'x': return x >= 0 && x < p->text_count;
    case 'm': return x >= 0 && x < p->memory;
    case 'c': return k->cuda && x >= 0 && x % LINE == 0 && x + LINE <= p->memory;
    default: return 0;
  }
}

/* Whether so many words of the memory are filled. */
static i32 is_filled(const Known *k, i32 at, i32 words) {
  if ((i64)at + words > k->program->memory) return 0;
  for (i32 i = at; i < at + words; i++)
    if (!k->filled[i]) return 0;
  return 1;
}

static void fill(Known *k, char letter, i64 at, i64 words) { __builtin_memset(k->filled + at, letter, (u64)words); }

/* Whether a kernel takes what is passed: operands of PASS. An address may be null. */
static i32 is_parameter(const Known *k, i32 wanted, const i32 *pass) {
  const i32 kind = k->kind[pass[1]];
  if (wanted >= IN_MEMORY)
    return pass[0] == POINTED && kind >= IN_MEMORY && is_filled(k, kind - IN_MEMORY, wanted - IN_MEMORY);
  if (wanted == 'F') return pass[0] == FLOAT && is_kind(k, 'f', pass[1]);
  if (pass[0] != WORD) return 0;
  if (kind >= IN_MEMORY && !is_filled(k, kind - IN_MEMORY, 1)) return 0;
  return is_kind(k, (char)wanted, pass[1]) || (wanted == 'p' && kind == '#' && !k->program->constants[pass[1]]);
}

/* A function of the CPU that launches on a GPU takes the stream, too. */
static i32 are_parameters(const Known *k, i32 kernel, i32 host) {
  const i32 *wanted = k->program->parameters;
  for (; kernel; wanted++) kernel -= !*wanted;
  for (i32 i = 0; i < k->passed; i++)
    if (!wanted[i] || !is_parameter(k, wanted[i], k->passes[i])) return 0;
  return wanted[k->passed] == (host && k->cuda ? 'S' : 0);
}

/* Whether the constants of a TABULATE (see `Tracer.tabulate`) fit the memory, of which it fills a part. */
static i32 is_tabulation(Known *k, const i32 *x, i32 count) {
  const Program *p = k->program;
  const i64 at = x[0], lists = x[3];
  const u64 *constants = p->constants;
  count -= 4, x += 4;
  if (count < 1 || lists < 1 || lists > LISTS || (i64)constants[x[-3]] < 1) return 0;
  const u64 tables = constants[x[0]];
  if (tables < 1 || tables > (u64)p->memory || at + (i64)tables * TABLE > p->memory) return 0;
  if ((i64)count < 1 + lists + 4 * (i64)tables) return 0;
  for (i64 l = 0; l < lists; l++) {
    const u64 place = constants[x[1 + l]];
    if (place >= ARGUMENTS || !is_operand(k, 'L', (i32)place)) return 0;
  }
  const i64 groups = (count - 1 - lists - 4 * (i64)tables) / lists;
  for (u64 i = 0; i < tables; i++) {
    const i32 *of = x + 1 + lists + 4 * (i64)i;
    const u64 group = constants[of[0]], capacity = constants[of[1]], words = constants[of[3]];
    if (group >= (u64)groups || !capacity || capacity > (u64)p->memory || words > (u64)p->memory) return 0;
    const u64 needed = (u64)lists * WORDS(capacity);
    if (capacity % 2 || words + needed > (u64)p->memory) return 0;
    if (words < (u64)at + tables * TABLE && words + needed > (u64)at) return 0;
    fill(k, 'c', (i64)words, (i64)needed), fill(k, 'm', at + (i64)i * TABLE + 1, 2 + lists);
  }
  return 1;
}

/* The kind of a register that takes an argument of this kind, or an item of one. */
static i32 kind_of(char argument) {
  return among("fFdD", argument) ? 'f' : among("bBzZ", argument) ? 'b' : 'n';
}

static i32 is_step(Known *k, i32 code, const i32 *x, i32 count) {
  const char *shape = SHAPES[code];
  char letter = 0;
  for (i32 at = 0; at < count; at++) {
    if (*shape && *shape != '*') letter = *shape++;
    else if (*shape != '*') return 0;
    if (!is_operand(k, letter, x[at])) return 0;
  }
  if (*shape && *shape != '*' && shape[1] != '*') return 0; /* too few */
  if (code < ADDRESS && k->acting) return 0;
  if (k->ending && code != RETURN && code != RETURN_NONE) return 0;
  if (k->passed && code != PASS && code != CALL && code != LAUNCH && code != ADDRESS) return 0;
  k->acting |= code > ADDRESS;
  switch (code) {
    case SIZE: case STRIDE: if (x[2] < 0 || x[2] >= k->rank[x[1]]) return 0; break;
    case ITEM: if (x[2] < 0) return 0; break;
    case LISTED:
      if (x[2] < 0) return 0;
      k->changes[k->tensors] = k->kinds[x[1]] == 'V', k->rank[k->tensors++] = -1;
      break;
    case ATTRIBUTE: if (x[1] < 0 || x[1] >= ATTRIBUTES) return 0; break;
    case TABULATE: if (!is_tabulation(k, x, count)) return 0; break;
    case FIELD: if (k->filled[x[1]] != 'm') return 0; break;
    case WORKSPACE: if (x[2] < 0 || x[2] > 1) return 0; break;
    case TENSOR: if (x[2] < 0 || x[2] >= RANKS) return 0; k->rank[x[0]] = (signed char)x[2]; break;
    case ALLOCATE: if ((count - 3) % 2 || (count - 3) / 2 >= RANKS) return 0; k->own[k->owned++] = 'O'; break;
    case VIEW:
      if (count % 2 == 0 || (count - 3) / 2 >= RANKS) return 0;
      k->own[k->owned++] = x[1] < 0 ? k->own[~x[1]] : k->changes[x[1]] ? 'H' : 'h';
      break;
    case TENSOR_MAP:
      if (x[2] < 1 || x[2] > 5 || count != 7 + 3 * x[2] - 1) return 0;
      fill(k, 'c', x[0], LINE);
      break;
    case PASS:
      if (k->passed == MOST_PASSED) return 0;
      k->passes[k->passed++] = x;
      if (k->passed > k->most) k->most = k->passed;
      break;
    case CALL: case LAUNCH:
      if (!are_parameters(k, x[0], code == CALL)) return 0;
      k->passed = 0;
      break;
    case RETURN: case RETURN_NONE:
      if (x[0] < 0 || x[0] >= k->results_given || k->returned >> x[0] & 1) return 0;
      if (code == RETURN_NONE && k->results[x[0]] != 't') return 0;
      if (code == RETURN) k->own[~x[1]] = 0;
      k->returned |= 1ull << x[0], k->ending = 1;
      break;
    default: break;
  }
  const char result = SHAPES[code][0];
  if (among("NFP", result)) k->kind[k->registers++] = result | 32;
  if (result == 'M') k->kind[k->registers++] = IN_MEMORY + x[1];
  if (result == '=') k->kind[k->registers++] = kind_of(k->kinds[x[1]]);
  return 1;
}

/* Whether a program can be interpreted for an op with these kinds of arguments and results. */
static i32 is_sound(Program *p, void *const *kernels, const char *kinds, const char *results, i32 cuda) {
  i32 given = 0, all = 0, sound = !cuda || api.cuLaunchKernelEx;
  while (kinds[given]) given++;
  while (results[all]) all++;
  if (p->length < 0 || p->length > MOST_WORDS || p->fixed < 0 || p->registers < p->fixed) return 0;
  if (p->registers > MOST_REGISTERS || p->tensors < 0 || p->tensors > MOST_TENSORS) return 0;
  if (p->owned < 0 || p->owned > MOST_TENSORS || p->memory < 0 || p->memory > MOST_MEMORY) return 0;
  for (i32 i = 0; i < p->kernels; i++) sound = sound && kernels[i];
  Known *k = calloc(1, sizeof *k + (u64)p->memory);
  if (!k) return 0;
  k->program = p, k->kinds = kinds, k->results = results, k->cuda = cuda;
  k->given = k->tensors = given, k->results_given = all, k->registers = p->fixed;
  for (i32 i = 0; i < p->fixed; i++) k->kind[i] = '#';
  for (i32 i = 0; i < given; i++) k->rank[i] = -1, k->changes[i] = (kinds[i] | 32) == 'w';
  for (i32 at = 0; sound && at < p->length;) {
    const i32 code = p->words[at], count = at + 1 < p->length ? p->words[at + 1] : -1;
    sound = code >= 0 && code < INSTRUCTIONS && count >= 0 && count <= p->length - at - 2 &&
            is_step(k, code, p->words + at + 2, count);
    at += 2 + count;
  }
  sound = sound && !k->passed && k->returned == (1ull << all) - 1;
  p->given = given, p->passes = k->most + 2; /* the stream and the device */
  p->room = p->memory + LINE + p->registers + 2 * p->passes + given + p->tensors + p->owned;
  free(k);
  return sound;
}

/* ------------------------------------------------------------------ the interpreter */

static i32 tabulated(const Call *call, const i32 *x, const u64 *r, u64 *memory) {
  const i32 lists = x[3], tables = (i32)r[x[4]];
  const i32 *of = x + 5 + lists;
  Table *first = (Table *)(memory + x[0]);
  i32 places[LISTS];
  for (i32 l = 0; l < lists; l++) places[l] = (i32)r[x[5 + l]];
  for (i32 i = 0; i < tables; i++, of += 4)
    first[i] = (Table){.words = memory + r[of[3]], .group = (i32)r[of[0]], .capacity = (i32)r[of[1]],
                       .least = (i32)r[of[2]]};
  return tabulate(call, places, of, r, lists, first, tables, (i64)r[x[1]], x[2]);
}

/* Return the elements from the first to the last of a tensor; -1 if there is no such tensor. */
static i64 extent(i64 rank, const i64 *size, const i64 *stride) {
  i64 last = 0, numel = 1;
  i32 odd = 0, empty = 0;
  for (i64 d = 0; d < rank; d++) {
    odd |= size[d] < 0 || stride[d] < 0, empty |= !size[d];
    last = add(last, mul(max1(size[d]) - 1, stride[d], &odd), &odd), numel = mul(numel, max1(size[d]), &odd);
  }
  return odd || last < 0 || last > 1LL << 56 ? -1 : empty ? 0 : last + 1;
}

/* Make a view of a tensor, of these sizes, strides and offset, unless it reaches beyond the tensor. */
static i32 view(Handle of, i64 rank, const i64 *numbers, Handle *made) {
  const i64 *size, *stride, offset = numbers[2 * rank], length = extent(rank, numbers, numbers + rank);
  i64 dim;
  if (api.get_dim(of, &dim) || api.get_sizes(of, &size) || api.get_strides(of, &stride)) return 1;
  if (length < 0 || offset < 0 || offset > (length ? extent(dim, size, stride) - length : 1LL << 56)) return 1;
  return api._reinterpret_tensor(of, rank, numbers, numbers + rank, offset, made);
}

/* Serve a call, or miss, in this room. */
static i32 run_steps(const Program *p, Call *call, u64 *r, u64 *slots, void **parameters, const Tensor **t,
                     Handle *owned, u64 *store) {
  const i32 given = p->given;
  i32 odd = 0, passed = 0, code = DONE;
  u64 *const memory = (u64 *)(((u64)store + 8 * LINE - 1) / (8 * LINE) * (8 * LINE));
  for (i32 i = 0; i < p->fixed; i++) r[i] = p->constants[i];
  for (i32 i = 0; i < given; i++) t[i] = &call->tensors[i];
  for (i32 i = 0; i < p->owned; i++) owned[i] = 0;
#define I(at) ((i64)r[x[at]])
#define F(at) real(r[x[at]])
#define HANDLE(at) (x[at] < 0 ? owned[~x[at]] : t[x[at]]->handle)
#define SET(value) r[x[0]] = (u64)(value); break
#define SET_REAL(value) r[x[0]] = bits_of(value); break
#define EXPECT(condition) if (!(condition)) return MISS; break
#define TRY(failure) if (failure) goto failed; break
  for (const i32 *at = p->words, *end = at + p->length; at < end; at += 2 + at[1]) {
    const i32 *x = at + 2, count = at[1];
    switch (*at) {
      case NUMBER: SET(call->values[x[1]]);
      case OPTIONAL: if (!call->values[x[1]]) return MISS; SET(*(const u64 *)call->values[x[1]]);
      case SIZE: SET(t[x[1]]->size[x[2]]);
      case STRIDE: SET(t[x[1]]->stride[x[2]]);
      case DATA: SET(t[x[1]]->data);
      case NUMEL: SET(t[x[1]]->numel);
      case COUNT: SET(call->lists[x[1]].count);
      case ITEM: if (x[2] >= call->lists[x[1]].count) return MISS; SET(call->lists[x[1]].values[x[2]]);
      case ATTRIBUTE: r[x[0]] = (u64)attribute(call, x[1]); EXPECT((i64)r[x[0]] > 0);
      case WORKSPACE: r[x[0]] = (u64)workspace(call, I(1), x[2]); EXPECT(r[x[0]]);
      case TABULATE: EXPECT(tabulated(call, x, r, memory));
      case FIELD: SET(memory[x[1]]);
      case MEMORY: SET(memory + x[1]);
      case GIVEN: EXPECT(!call->values[x[0]] == !x[1]);
      case TRUTH: EXPECT((i32)(r[x[0]] & 255) == x[1]);
      case TENSOR: {
        const Tensor *of = t[x[0]];
        EXPECT(of->handle && of->dtype == x[1] && of->dim == x[2] && of->device == call->device &&
               (!call->device || of->index == call->index));
      }
      case NO_TENSOR: EXPECT(!t[x[0]]->handle);
      case LISTED:
        if (x[2] >= call->lists[x[1]].count) return MISS;
        t[x[0]] = &call->lists[x[1]].tensors[x[2]];
        break;
      case IDENTICAL: {
        const Handle a = t[x[0]]->handle, b = t[x[1]]->handle;
        EXPECT((a && b && *(void **)a == *(void **)b) == x[2]);
      }
      case CONTIGUOUS: EXPECT(contiguous(t[x[0]]) == x[1]);
      case SPELLS: {
        const List *list = &call->lists[x[0]];
        const Text *text = &p->texts[x[1]];
        EXPECT(list->count == text->bytes && !__builtin_memcmp(list->text, text->text, (u64)text->bytes));
      }
      case DEFAULT_DTYPE: EXPECT(api.default_dtype && api.default_dtype() == x[0]);
      case UNFILLED: EXPECT(!fills());
      case LESS: EXPECT((I(0) < I(1)) == x[2]);
      case EQUAL: EXPECT((I(0) == I(1)) == x[2]);
      case REAL_LESS: EXPECT((F(0) < F(1)) == x[2]);
      case REAL_AT_MOST: EXPECT((F(0) <= F(1)) == x[2]);
      case REAL_EQUAL: EXPECT((F(0) == F(1)) == x[2]);
      case MASKED: EXPECT(!(I(0) & I(1)) == !x[2]);
      case ADD: SET(add(I(1), I(2), &odd));
      case SUBTRACT: SET(sub(I(1), I(2), &odd));
      case MULTIPLY: SET(mul(I(1), I(2), &odd));
      case DIVIDE: SET(floordiv(I(1), I(2), &odd));
      case MODULO: SET(mod(I(1), I(2), &odd));
      case SHIFT_LEFT: SET(shl(I(1), I(2), &odd));
      case SHIFT_RIGHT: SET(shr(I(1), I(2), &odd));
      case AND: SET(I(1) & I(2));
      case OR: SET(I(1) | I(2));
      case XOR: SET(I(1) ^ I(2));
      case REAL_ADD: SET_REAL(F(1) + F(2));
      case REAL_SUBTRACT: SET_REAL(F(1) - F(2));
      case REAL_MULTIPLY: SET_REAL(F(1) * F(2));
      case QUOTIENT: SET_REAL(quotient(F(1), F(2), &odd));
      case POWER: SET_REAL(power(F(1), F(2), &odd));
      case MAX1: SET(max1(I(1)));
      case BIT_LENGTH: SET(bit_length(I(1), &odd));
      case REAL: SET_REAL((double)I(1));
      case EXACT: SET_REAL(exact(I(1), &odd));
      case ABS: SET_REAL(__builtin_fabs(F(1)));
      case SQUARE_ROOT: SET_REAL(__builtin_sqrt(F(1)));
      case FLOOR: SET(floored(F(1), &odd));
      case CEIL: SET(ceiled(F(1), &odd));
      case TRUNCATE: SET(truncated(F(1), &odd));
      case ADDRESS: SET(r[x[1]] + r[x[2]]);
      case ALLOCATE: {
        const i32 rank = (count - 3) / 2;
        i64 numbers[2 * rank + 1];
        for (i32 i = 0; i < 2 * rank; i++) numbers[i] = I(3 + i);
        char *data = 0;
        if (extent(rank, numbers, numbers + rank) < 0 ||
            api.empty_strided(rank, numbers, numbers + rank, x[2], call->device, call->index, &owned[x[1]]) ||
            api.get_data_ptr(owned[x[1]], &data))
          goto failed;
        SET(data);
      }
      case VIEW: {
        const i32 rank = (count - 3) / 2;
        i64 numbers[2 * rank + 1];
        for (i32 i = 0; i <= 2 * rank; i++) numbers[i] = I(2 + i);
        TRY(view(HANDLE(1), rank, numbers, &owned[x[0]]));
      }
      case COPY: TRY(api.copy_(HANDLE(0), HANDLE(1), x[2]));
      case ZERO: TRY(api.zero_(HANDLE(0)));
      case CHANGED: call->launched = 1; break;
      case TENSOR_MAP: {
        const i32 rank = x[2];
        i64 numbers[2 * rank];
        u32 box[rank];
        for (i32 i = 0; i < 2 * rank - 1; i++) numbers[i] = I(7 + i);
        for (i32 i = 0; i < rank; i++) box[i] = (u32)I(6 + 2 * rank + i);
        TRY(tensor_map(call, memory + x[0], x + 1, (char *)r[x[6]], numbers, numbers + rank, box));
      }
      case PASS:
        slots[passed] = r[x[1]];
        if (x[0] == FLOAT) slots[passed] = narrowed(F(1));
        parameters[passed] = x[0] == POINTED ? (void *)r[x[1]] : &slots[passed];
        passed++;
        break;
      case CALL:
        parameters[passed] = &call->stream, parameters[passed + 1] = &call->index;
        call->launched = 1, passed = 0;
        if (((i32 (*)(void **, char *))call->kernels[x[0]])(parameters, call->error)) {
          code = RAISED;
          goto ended;
        }
        break;
      case LAUNCH: {
        i64 grid[3], block[4], options[6];
        for (i32 i = 0; i < 3; i++) grid[i] = I(2 + i);
        for (i32 i = 0; i < 4; i++) block[i] = I(5 + i);
        for (i32 i = 0; i < 6; i++) options[i] = I(9 + i);
        passed = 0;
        TRY(launch(call, call->kernels[x[0]], p->texts[x[1]].text, grid, block, options, parameters));
      }
      case RETURN: call->returns[x[0]] = owned[~x[1]], owned[~x[1]] = 0; break;
      case RETURN_NONE: call->returns[x[0]] = 0; break;
    }
    if (odd) return MISS; /* before any action */
  }
  goto ended;
failed:
  code = call->launched ? BROKEN : FAILED;
ended:
  for (i32 i = 0; i < p->owned; i++)
    if (owned[i]) api.delete_tensor_object(owned[i]);
  return code;
}

static i32 interpret(const Program *p, Call *call) {
  const i32 tensors = p->given + p->tensors;
  if (p->room <= ON_STACK) {
    u64 r[p->registers + 1], slots[p->passes + 1], store[p->memory + LINE];
    void *parameters[p->passes + 1];
    const Tensor *t[tensors + 1];
    Handle owned[p->owned + 1];
    return run_steps(p, call, r, slots, parameters, t, owned, store);
  }
  u64 *room = malloc(8ul * (u64)p->room);
  if (!room) return MISS;
  u64 *r = room + p->memory + LINE, *slots = r + p->registers;
  void **parameters = (void **)(slots + p->passes), **t = parameters + p->passes;
  i32 code = run_steps(p, call, r, slots, parameters, (const Tensor **)t, t + tensors, room);
  free(room);
  return code;
}
