/* The launch runtime: Torch calls it for an op through the op's trampoline (`code_page.py`). The
   runtime describes the tensors, tries the op's compiled variants, and if none fits asks the op's
   Python sibling, which computes the answer and may append a variant. The hit path takes no lock
   and runs no Python. `binding.py` loads the runtime and calls the functions at the end. */
extern int snprintf(char *, unsigned long, const char *, ...);
extern int sched_getaffinity(int, unsigned long, void *), sched_yield(void);
extern void *malloc(unsigned long), *aligned_alloc(unsigned long, unsigned long);
extern void *memset(void *, int, unsigned long);
extern void free(void *);
extern int pthread_key_create(unsigned *, void (*)(void *));
extern int pthread_setspecific(unsigned, const void *);

enum { OPS = 8192, ARGUMENTS = 32, RETURNS = 16, VARIANTS = 128, TEXT = 4096 };
enum { NAMESPACES = 4096, READ = 16, DEVICES = 64, ATTRIBUTES = 128, PAGE = 4096 };

typedef i32 Stub(Call *);

/* The world of a launch function (`trace/world.py`), unchanged while every word is: first `fixed`
   words, the parts of functions and the contents of their variables; then a version for each
   namespace, which a change of another name may have raised. */
typedef struct { const u64 *at; u64 seen; } Word;
typedef struct {
  void *namespace, *name, *value; /* value 0: the name is not bound */
  i64 word;                       /* the place of the namespace's version among the versions */
} Binding;
typedef struct {
  i32 fixed, namespaces, names, bindings; /* after the names, the items of dicts in their order */
  Word *words;
  const Binding *bound;
} World;

typedef struct { /* filled by binding.py; only `generation` and `used` change afterwards */
  Stub *stub;
  void *const *kernels;
  World *world;
  i32 index;      /* of the device that the call was traced for */
  i32 preference; /* the kind of source that the settings must prefer */
  i32 generation; /* of the declaration: a launch function may be declared again */
  i32 used;       /* the clock when this variant last served after another one */
} Variant;

typedef struct {
  /* T: a tensor, W: a tensor that is changed, i: an integer, f: a float, b: a bool; in swapped case
     (t, w, I, F, B): the same or None. L: a list of tensors, V: of tensors that are changed, n, d, z:
     of integers, floats, bools, s: a string; in upper case (N, D, Z, S): the same or None */
  char kinds[ARGUMENTS + 1], results[RETURNS + 1], name[128], sibling[128];
  i32 lists; /* whether an argument is a list or a string */
  i32 boxes; /* whether a result may be None */
  i32 cuda, autograd, count, last, generation, clock;
  i32 backend[2]; /* at the Autograd key: the slots of the op on the CPU and on CUDA, or -1 */
  u64 misses;
  const void *gradient; /* at the Autograd key: how `record` finds the gradient; 0: Python records */
  Variant *variants[VARIANTS];
} Op;

static Api api;
static Op ops[OPS]; /* untouched pages take no memory */
static i32 preferred;                    /* for all threads; -1: unknown */
static __thread i32 preferred_here = -1; /* for this thread; -1: the same as `preferred` */
static const void *undefined; /* c10::UndefinedTensorImpl */
static i64 keys_at;           /* the byte offset of the dispatch keys in a TensorImpl */
static u32 watching[16];      /* dispatch keys that modes, torch.func and tracing include; 0 ends */
static u64 plain_keys;        /* the keys of tensors that only Autograd and a backend see */
static void (*record)(const void *, u64 *, u64, u64, void (*)(i32, u64 *, u64, u64), i32);
/* Errors come back by value: Torch up to 2.12 logs each exception that crosses the shim. */
static __thread char message[TEXT];
static __thread i32 interrupted; /* whether `message` stands for a KeyboardInterrupt */
static void *watched_namespaces[NAMESPACES]; /* from Python 3.12 on: see jitkern_changed */
static u64 versions[NAMESPACES];
static i32 watched_count;

/* ------------------------------------------------------------------ functions for stubs */

static i32 allocate(Call *call, i64 dim, const i64 *size, const i64 *stride, i32 dtype,
                    Handle *handle, char **data) {
  return api.empty_strided(dim, size, stride, dtype, call->device, call->index, handle) ||
         api.get_data_ptr(*handle, data);
}

static i32 release(Call *call, Handle *owned, i32 count, i32 code) {
  for (i32 i = 0; i < count; i++)
    if (owned[i]) api.delete_tensor_object(owned[i]);
  return code == FAILED && call->launched ? BROKEN : code;
}

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

/* grid: three sizes; block: three sizes and the bytes of dynamic shared memory;
   options: null, or the cluster's three sizes (0: none), cooperative, programmatic, carve-out. */
static i32 launch(Call *call, void *kernel, const char *what, const i64 *grid, const i64 *block,
                  const i32 *options, void **parameters) {
  Attribute attributes[3];
  Config config = {{(u32)grid[0], (u32)grid[1], (u32)grid[2]},
                   {(u32)block[0], (u32)block[1], (u32)block[2]},
                   (u32)block[3], call->stream, attributes, 0};
  if (!grid[0] || !grid[1] || !grid[2]) return 0;
  if (block[3] > DYNAMIC_SHARED || options)
    prepare(kernel, call->index, (i32)block[3],
            options && options[0] * options[1] * options[2] > PORTABLE_CLUSTER, options ? options[5] : 0);
  if (options && options[0]) {
    Attribute *cluster = &attributes[config.count++];
    cluster->id = CLUSTER;
    for (i32 i = 0; i < 3; i++) cluster->value.cluster[i] = (u32)options[i];
  }
  for (i32 i = 3; options && i < 5; i++)
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
    const i32 none[3] = {0}, *of = options ? options : none;
    api.cuGetErrorString(error, &why);
    snprintf(call->error, TEXT,
             "CUDA error %d (%s) when launching %s with grid=(%lld, %lld, %lld) "
             "block=(%lld, %lld, %lld) smem=%lld cluster=(%d, %d, %d)",
             error, why, what, grid[0], grid[1], grid[2], block[0], block[1], block[2], block[3],
             of[0], of[1], of[2]);
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
static i32 tensor_map(Call *call, void *map, const i32 *options, char *data, const i64 *size,
                      const i64 *stride, const i32 *box) {
  static const u32 steps[] = {1, 1, 1, 1, 1};
  i32 error = api.cuTensorMapEncodeTiled(map, options[0], (u32)options[1], data, (const u64 *)size,
                                         (const u64 *)stride, (const u32 *)box, steps, 0,
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
/* Of this thread on the CPU; the memory before `data` begins with the address of the one before. */
static __thread struct { char *data; i64 bytes; } own[2];
static u32 at_exit; /* the key whose destructor frees these */

/* Enlarge a workspace of this thread. An earlier one stays until the thread ends: the call that asks
   may hold its address. */
static void enlarge(i64 bytes, i32 zeroed) {
  i64 most = bytes > 2 * own[zeroed].bytes ? bytes : 2 * own[zeroed].bytes;
  if (bytes > 1LL << 46) return;
  most = (most + PAGE - 1) / PAGE * PAGE + PAGE;
  char *data = aligned_alloc(PAGE, (u64)most);
  if (!data) return;
  memset(data, 0, (u64)most);
  *(char **)data = own[zeroed].data;
  own[zeroed].data = data + PAGE, own[zeroed].bytes = most - PAGE;
  pthread_setspecific(at_exit, own);
}

static void free_own(void *of_thread) {
  (void)of_thread; /* `own` of the thread that ends */
  for (i32 i = 0; i < 2; i++) {
    for (char *data = own[i].data, *before; data; data = before)
      before = *(char **)(data - PAGE), free(data - PAGE);
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

/* Fill the tables of the lists at these places, or return 0 if they do not fit this call. `types`
   has the dtypes of the lists for each group of tensors. The tables come in the order of the groups,
   which is that of their first tensors; all tables of a group but the last are full. */
static i32 tabulate(const Call *call, const i32 *places, const i32 *types, i32 lists, Table *tables,
                    i32 count, i64 chunk, i32 dense) {
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
      for (l = 0; l < lists && call->lists[places[l]].tensors[i].dtype == wanted[l];) l++;
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

/* ------------------------------------------------------------------ functions for Torch */

static Handle tensor(const Op *op, const u64 *stack, u64 i) {
  switch (op->kinds[i]) {
    case 'T': case 'W': return (Handle)stack[i];
    case 't': case 'w': return stack[i] ? *(Handle *)stack[i] : 0;
    default: return 0;
  }
}

/* The list or the string of an argument; 0 for another argument, and for None. */
static Handle content(const Op *op, const u64 *stack, u64 i) {
  switch (op->kinds[i]) {
    case 'L': case 'V': case 'n': case 'd': case 'z': case 's': return (Handle)stack[i];
    case 'N': case 'D': case 'Z': case 'S': return stack[i] ? *(Handle *)stack[i] : 0;
    default: return 0;
  }
}

/* The number of tensors in the list of an argument. */
static u64 listed(const Op *op, const u64 *stack, u64 i) {
  u64 count = 0;
  if (op->kinds[i] == 'L' || op->kinds[i] == 'V') api.list_size((Handle)stack[i], &count);
  return count;
}

static Handle item(const u64 *stack, u64 i, u64 at) {
  u64 handle = 0;
  api.list_get_item((Handle)stack[i], at, &handle);
  return (Handle)handle;
}

static void drop_list(const Op *op, const u64 *stack, u64 i) {
  Handle list = content(op, stack, i);
  if (!list) return;
  for (u64 at = listed(op, stack, i); at--;) api.delete_tensor_object(item(stack, i, at));
  ((op->kinds[i] | 32) == 's' ? api.delete_string : api.delete_list)(list);
}

static void drop(const Op *op, const u64 *stack, u64 given) {
  for (u64 i = 0; i < given; i++) {
    Handle handle = tensor(op, stack, i);
    if (handle) api.delete_tensor_object(handle);
    if (op->lists) drop_list(op, stack, i);
    switch (op->kinds[i]) {
      case 't': case 'w': case 'I': case 'F': case 'B': case 'N': case 'D': case 'Z': case 'S':
        if (stack[i]) api.operator_delete((void *)stack[i]);
    }
  }
}

/* Throw `message` as an exception. Torch makes it a RuntimeError, which `except Exception` catches;
   so after a Ctrl-C, make Python raise a KeyboardInterrupt as soon as its code goes on. */
static void raise(const Op *op, const char *otherwise) {
  char text[TEXT];
  if (interrupted) interrupted = 0, api.PyErr_SetInterrupt();
  snprintf(text, TEXT, "%s", message[0] ? message : otherwise);
  message[0] = 0; /* nothing runs after the next line */
  api.check(0, op->name, "jitkern", 0, text);
}

/* Ask the sibling, which takes the slot and the arguments; after an error it returns empty tensors. */
static void ask_python(const Op *op, u64 *stack, u64 given, u64 returned) {
  u64 passed[1 + ARGUMENTS + RETURNS] = {(u64)(op - ops)};
  Handle strings[ARGUMENTS]; /* passed as integers: Torch leaks those that it is given */
  u64 count = 0;
  for (u64 i = 0; i < given; i++) {
    passed[1 + i] = stack[i];
    if (!op->lists || (op->kinds[i] | 32) != 's') continue;
    Handle string = content(op, stack, i);
    if (string) strings[count++] = string;
    if (string && op->kinds[i] == 'S') api.operator_delete((void *)stack[i]);
    passed[1 + i] = (u64)string;
  }
  message[0] = 0;
  i32 failed = api.call_dispatcher(op->sibling, "", passed);
  while (count) api.delete_string(strings[--count]);
  if (failed) raise(op, "its Python sibling failed");
  for (u64 i = 0; i < returned; i++) {
    stack[i] = passed[i];
    if (!op->boxes || op->results[i] == 't') continue;
    stack[i] = *(u64 *)passed[i]; /* a sibling returns all results as ones that may be None */
    api.operator_delete((void *)passed[i]);
  }
  if (!message[0]) return;
  for (u64 i = 0; i < returned; i++)
    if (stack[i]) api.delete_tensor_object((Handle)stack[i]); /* a result that may be None is None */
  raise(op, "");
}

static void describe(Tensor *t, Handle handle) {
  t->handle = handle;
  if (!handle) return;
  api.get_dim(handle, &t->dim), api.get_numel(handle, &t->numel);
  api.get_sizes(handle, &t->size), api.get_strides(handle, &t->stride);
  api.get_dtype(handle, &t->dtype), api.get_data_ptr(handle, &t->data);
  api.get_device_type(handle, &t->device), api.get_device_index(handle, &t->index);
}

/* Describe the lists and strings of a call, in memory that the caller frees; 0 if there is none. */
static List *describe_lists(const Op *op, const u64 *stack, u64 given, i32 *index) {
  u64 tensors = 0, values = 0, count;
  for (u64 i = 0; i < given; i++) {
    Handle list = content(op, stack, i);
    tensors += count = listed(op, stack, i);
    if (list && !count && (op->kinds[i] | 32) != 's' && !api.list_size(list, &count)) values += count;
  }
  u64 bytes = given * sizeof(List) + tensors * sizeof(Tensor) + values * sizeof(u64);
  List *lists = malloc(bytes);
  if (!lists) return 0;
  Tensor *tensor_at = (Tensor *)(lists + given);
  u64 *value_at = (u64 *)(tensor_at + tensors);
  for (u64 i = 0; i < given; i++) {
    Handle list = content(op, stack, i);
    lists[i] = (List){tensor_at, value_at, 0, -1};
    if (!list) continue;
    if ((op->kinds[i] | 32) == 's') {
      api.string_length(list, (u64 *)&lists[i].count), api.string_c_str(list, &lists[i].text);
      continue;
    }
    api.list_size(list, (u64 *)&lists[i].count);
    for (i64 at = 0; at < lists[i].count; at++) {
      u64 value = 0;
      api.list_get_item(list, (u64)at, &value);
      if (op->kinds[i] != 'L' && op->kinds[i] != 'V') {
        *value_at++ = value;
        continue;
      }
      describe(tensor_at, (Handle)value);
      if (*index < 0 && tensor_at->device == 1) *index = tensor_at->index;
      tensor_at++;
    }
  }
  return lists;
}

static i32 writes(const Op *op) {
  for (const char *kind = op->kinds; *kind; kind++)
    if ((*kind | 32) == 'w' || *kind == 'V') return 1;
  return 0;
}

/* Raise the version of a changed tensor, so that Autograd notices the change of a saved one. */
static void changed(Handle handle) {
  if (!api.is_inference(handle)) api.bump_version(handle);
}

/* Whether all names have their old values, though some namespaces have changed. */
static i32 renewed(World *world) {
  u64 now[READ];
  i64 place = 0;
  Word *words = world->words + world->fixed;
  i32 same = 1, locked = api.PyGILState_Ensure();
  for (i32 i = 0; i < world->namespaces; i++) now[i] = *words[i].at;
  for (i32 i = 0; i < world->bindings && same; i++) {
    const Binding *bound = &world->bound[i];
    if (now[bound->word] == __atomic_load_n(&words[bound->word].seen, __ATOMIC_RELAXED)) continue;
    if (i < world->names) {
      same = api.PyDict_GetItemWithError(bound->namespace, bound->name) == bound->value;
      continue;
    }
    void *name, *value;
    if (i == world->names || bound->namespace != bound[-1].namespace) place = 0;
    same = api.PyDict_Next(bound->namespace, &place, &name, &value) && name == bound->name &&
           value == bound->value;
  }
  for (i32 i = 0; i < world->namespaces && same; i++)
    __atomic_store_n(&words[i].seen, now[i], __ATOMIC_RELAXED);
  api.PyGILState_Release(locked);
  return same;
}

static i32 holds(World *world) {
  i32 i = 0;
  for (; i < world->fixed; i++)
    if (*world->words[i].at != world->words[i].seen) return 0;
  for (; i < world->fixed + world->namespaces; i++)
    if (*world->words[i].at != __atomic_load_n(&world->words[i].seen, __ATOMIC_RELAXED))
      return renewed(world);
  return 1;
}

static i32 serve(Op *op, i32 i, Call *call) {
  Variant *variant = __atomic_load_n(&op->variants[i], __ATOMIC_ACQUIRE);
  i32 preference = preferred_here < 0 ? preferred : preferred_here;
  if (variant->index != call->index || variant->preference != preference ||
      variant->generation != __atomic_load_n(&op->generation, __ATOMIC_RELAXED))
    return MISS;
  call->kernels = variant->kernels;
  i32 code = holds(variant->world) ? variant->stub(call) : MISS;
  if (code != MISS && i != __atomic_load_n(&op->last, __ATOMIC_RELAXED)) {
    __atomic_store_n(&op->last, i, __ATOMIC_RELAXED);
    variant->used = ++op->clock; /* a race only makes the order of use inexact */
  }
  return code;
}

static i32 try_variants(Op *op, Call *call) {
  i32 count = __atomic_load_n(&op->count, __ATOMIC_ACQUIRE);
  i32 last = __atomic_load_n(&op->last, __ATOMIC_RELAXED);
  i32 code = last < count ? serve(op, last, call) : MISS;
  for (i32 i = count - 1; code == MISS && i >= 0; i--)
    if (i != last) code = serve(op, i, call);
  return code;
}

static void run(Op *op, u64 *stack, u64 given, u64 returned) {
  if (api.function_modes && api.function_modes()) { /* modes must see the calls of a launch function */
    __atomic_fetch_add(&op->misses, 1, __ATOMIC_RELAXED);
    ask_python(op, stack, given, returned);
    return;
  }
  Tensor tensors[ARGUMENTS];
  Handle returns[RETURNS], guard = 0;
  Call call = {.api = &api, .tensors = tensors, .values = stack, .returns = returns,
               .error = message, .device = op->cuda, .index = op->cuda ? -1 : 0};
  for (u64 i = 0; i < given; i++) {
    describe(&tensors[i], tensor(op, stack, i));
    if (call.index < 0 && tensors[i].handle && tensors[i].device == 1) call.index = tensors[i].index;
  }
  List *lists = 0;
  if (op->lists) {
    call.lists = lists = describe_lists(op, stack, given, &call.index);
    if (!lists) {
      ask_python(op, stack, given, returned);
      return;
    }
  }
  if (op->cuda) {
    i32 current = call.index;
    api.get_current_device_index(&current);
    if (current != call.index) api.create_device_guard(call.index, &guard);
    api.get_current_cuda_stream(call.index, &call.stream);
  }
  i32 code = try_variants(op, &call);
  if (guard) api.delete_device_guard(guard);
  if (lists) free(lists);
  if (code == BROKEN && !writes(op)) code = FAILED; /* nothing was changed: Python may answer */
  if (code == MISS || code == FAILED) {
    __atomic_fetch_add(&op->misses, 1, __ATOMIC_RELAXED);
    ask_python(op, stack, given, returned);
    return;
  }
  for (u64 i = 0; i < given; i++)
    if ((op->kinds[i] | 32) == 'w' && tensors[i].handle) changed(tensors[i].handle);
    else if (op->kinds[i] == 'V')
      for (u64 at = listed(op, stack, i); at--;) changed(item(stack, i, at));
  drop(op, stack, given);
  if (code == BROKEN) {
    raise(op, "an allocation or a copy failed after a kernel was launched: the arguments that the "
              "op changes in place may be changed");
  }
  for (u64 i = 0; i < returned; i++) stack[i] = (u64)returns[i];
  for (u64 i = 0; op->boxes && i < returned; i++) {
    if (op->results[i] != 't' || !stack[i]) continue;
    u64 *box = api.operator_new(sizeof *box); /* which Torch deletes */
    *box = stack[i], stack[i] = (u64)box;
  }
}

/* Whether a mode, torch.func or tracing must see the calls between Autograd and the backend. */
static i32 watched(void) {
  for (const u32 *key = watching; *key; key++)
    if (api.is_included(*key)) return 1;
  return 0;
}

/* Whether nothing but Autograd and a backend see a tensor. */
static inline i32 is_plain(Handle handle, i32 recording, i32 *cuda, i32 *needed) {
  const char *impl = *(char **)handle;
  if (*api.forward_grad(impl, 0, handle) != undefined) return 0;
  if (recording && api.requires_grad(impl)) *needed = 1;
  const u64 keys = *(const u64 *)(impl + keys_at);
  i32 device = 0;
  if (keys) api.get_device_type(handle, &device);
  *cuda |= device == 1;
  return keys && !(keys & ~plain_keys); /* no keys: None where the schema has a tensor */
}

static void run_slot(i32 slot, u64 *stack, u64 given, u64 returned) {
  run(&ops[slot], stack, given, returned);
}

/* At the Autograd key: if nobody watches, go straight on to the backend, which saves the
   dispatcher's 0.3 us, or through `record` (recorder.cpp) if a gradient is needed; otherwise ask
   Python. */
static void differentiate(Op *op, u64 *stack, u64 given, u64 returned) {
  i32 recording = api.grad_mode_is_enabled(), direct = 1, cuda = 0, needed = 0;
  for (u64 i = 0; i < given && direct; i++) {
    Handle handle = tensor(op, stack, i);
    if (handle) direct = is_plain(handle, recording, &cuda, &needed);
    if (!op->lists) continue;
    for (u64 at = listed(op, stack, i); at-- && direct;)
      direct = is_plain(item(stack, i, at), recording, &cuda, &needed);
  }
  const void *gradient = needed ? __atomic_load_n(&op->gradient, __ATOMIC_ACQUIRE) : 0;
  if (!direct || op->backend[cuda] < 0 || needed > !!gradient || watched()) {
    ask_python(op, stack, given, returned);
  } else if (needed) {
    record(gradient, stack, given, returned, run_slot, op->backend[cuda]);
  } else {
    run(&ops[op->backend[cuda]], stack, given, returned);
  }
}

/* The target of all trampolines. */
void jitkern_enter(u64 *stack, u64 given, u64 returned, u32 number) {
  (ops[number].autograd ? differentiate : run)(&ops[number], stack, given, returned);
}

/* ------------------------------------------------------------------ functions for binding.py */

void jitkern_bind(void *const *table, u64 bytes) {
  __builtin_memcpy(&api, table, bytes);
  api.allocate = allocate, api.launch = launch, api.release = release, api.tabulate = tabulate;
  api.attribute = attribute;
  if (!api.workspace) pthread_key_create(&at_exit, free_own);
  api.workspace = workspace, api.tensor_map = tensor_map;
}

/* Set what the Autograd key must know of this Torch; see the variables. */
void jitkern_autograd(const void *undefined_tensor, i64 at, u64 plain, const u32 *keys) {
  undefined = undefined_tensor, keys_at = at, plain_keys = plain;
  for (u64 i = 0; keys[i] && i < sizeof watching / sizeof *watching - 1; i++) watching[i] = keys[i];
}

/* Let `recorder` (recorder.cpp) record calls of an op at the Autograd key, with this gradient; 0: Python does. */
void jitkern_record(i32 slot, void *recorder, const void *gradient) {
  if (recorder) *(void **)&record = recorder;
  __atomic_store_n(&ops[slot].gradient, gradient, __ATOMIC_RELEASE);
}

void jitkern_backends(i32 slot, i32 cpu, i32 cuda) {
  ops[slot].backend[0] = cpu, ops[slot].backend[1] = cuda;
}

/* Declare the slot of an op at one dispatch key, before its trampoline leads here. */
void jitkern_declare(i32 slot, const char *kinds, const char *results, const char *name,
                     const char *sibling, i32 cuda, i32 autograd) {
  Op *op = &ops[slot];
  snprintf(op->kinds, sizeof op->kinds, "%s", kinds);
  snprintf(op->results, sizeof op->results, "%s", results);
  op->lists = op->boxes = 0;
  for (; *kinds; kinds++)
    for (const char *kind = "LVndzsNDZS"; *kind; kind++) op->lists |= *kinds == *kind;
  for (; *results; results++) op->boxes |= *results == 't';
  snprintf(op->name, sizeof op->name, "%s", name);
  snprintf(op->sibling, sizeof op->sibling, "%s", sibling);
  op->cuda = cuda, op->autograd = autograd, op->backend[0] = op->backend[1] = -1;
}

/* Add a variant, which replaces the one that served longest ago if all places are taken; return the
   place. Called under a lock. A variant is never freed: another thread may run its stub. */
i32 jitkern_append(i32 slot, Variant *variant) {
  Op *op = &ops[slot];
  i32 place = op->count;
  variant->generation = op->generation, variant->used = ++op->clock;
  for (i32 i = 0; i < op->count; i++) {
    i32 gone = op->variants[i]->generation != op->generation;
    if (gone || (op->count == VARIANTS && i != op->last &&
                 (place == VARIANTS || op->variants[i]->used - op->variants[place]->used < 0)))
      place = i;
    if (gone) break;
  }
  __atomic_store_n(&op->variants[place], variant, __ATOMIC_RELEASE);
  if (place == op->count) __atomic_store_n(&op->count, place + 1, __ATOMIC_RELEASE);
  return place;
}

/* Stop all present variants of a slot. */
void jitkern_forget(i32 slot) { __atomic_fetch_add(&ops[slot].generation, 1, __ATOMIC_RELAXED); }

/* Return the version of a namespace whose changes Python reports; 0 if there is no more room.
   Called under a lock. */
const u64 *jitkern_watch(void *namespace) {
  for (i32 i = 0; i < watched_count; i++)
    if (watched_namespaces[i] == namespace) return &versions[i];
  if (watched_count == NAMESPACES) return 0;
  watched_namespaces[watched_count] = namespace;
  return &versions[watched_count++];
}

/* The callback for PyDict_AddWatcher: raise the version of a changed namespace. */
i32 jitkern_changed(i32 event, void *namespace, void *name, void *value) {
  (void)event, (void)name, (void)value;
  for (i32 i = 0; i < watched_count; i++)
    if (watched_namespaces[i] == namespace) __atomic_fetch_add(&versions[i], 1, __ATOMIC_RELEASE);
  return 0;
}

void jitkern_prefer(i32 everywhere, i32 here) {
  __atomic_store_n(&preferred, everywhere, __ATOMIC_RELAXED);
  preferred_here = here;
}
void jitkern_fail(const char *text, i32 interrupt) {
  snprintf(message, TEXT, "%s", text);
  interrupted = interrupt;
}
/* Let C use a workspace that Python made for a stream; return whether it is new. Called under a lock. */
i32 jitkern_workspace(i32 index, void *stream, i32 zeroed, char *data, i64 bytes) {
  for (Workspace *w = workspaces; w; w = w->next)
    if (w->data == data) return 0;
  Workspace *made = malloc(sizeof *made);
  if (!made) return 0;
  *made = (Workspace){workspaces, stream, data, bytes, index, zeroed};
  __atomic_store_n(&workspaces, made, __ATOMIC_RELEASE);
  return 1;
}
u64 jitkern_misses(i32 slot) { return __atomic_load_n(&ops[slot].misses, __ATOMIC_RELAXED); }
