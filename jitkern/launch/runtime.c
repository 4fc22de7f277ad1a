/* What Torch calls for an op: a trampoline per op and key, registered once and never replaced. It
   describes the tensors, tries the op's compiled variants, and where none fits asks the op's Python
   sibling, which computes the answer and may append a variant. The hit path takes no lock and runs
   no Python. `launch/runtime.py` drives it. */
extern int snprintf(char *, unsigned long, const char *, ...);

enum { OPS = 4096, ARGUMENTS = 32, RETURNS = 16, VARIANTS = 128, TEXT = 4096 };

typedef i32 Stub(Call *);
typedef struct {
  Stub *stub;
  void *const *kernels;
  i32 index;      /* of the device it was traced for */
  i32 preference; /* it serves while the settings prefer the same kind of source */
} Variant;

typedef struct {
  /* T: a tensor, W: one that is changed, i: an integer, f: a float, b: a bool; lower or upper case
     swapped (t, w, I, F, B): None is allowed */
  char kinds[ARGUMENTS + 1], name[128], sibling[128];
  i32 cuda, count, last;
  i32 backend[2]; /* of the slot at the Autograd key: those of the op on the CPU and on CUDA, or -1 */
  u64 misses;
  Variant variants[VARIANTS];
} Op;

static Api api;
static Op ops[OPS]; /* untouched pages of it take no memory */
static i32 declared, preferred;
static const void *undefined; /* c10::UndefinedTensorImpl */
static i64 keys_at;           /* where a TensorImpl has its dispatch keys */
static u32 watching[16];      /* dispatch keys that modes, torch.func and tracing include; 0 ends */
static u64 plain_keys;        /* those of tensors that nothing but Autograd and a backend sees */
/* Errors come back by value: Torch up to 2.12 logs each exception that crosses the shim. */
static __thread char message[TEXT];

/* ------------------------------------------------------------------------ what stubs call */

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
enum { MAX_DYNAMIC_SHARED = 8, DEFAULT_SHARED = 48 << 10 };

/* grid: three sizes; block: three sizes and the bytes of dynamic shared memory;
   options: null, or the cluster's three sizes (0: none), cooperative, programmatic. */
static i32 launch(Call *call, void *kernel, const char *what, const i64 *grid, const i64 *block,
                  const i32 *options, void **parameters) {
  Attribute attributes[3];
  Config config = {{(u32)grid[0], (u32)grid[1], (u32)grid[2]},
                   {(u32)block[0], (u32)block[1], (u32)block[2]},
                   (u32)block[3], call->stream, attributes, 0};
  if (!grid[0] || !grid[1] || !grid[2]) return 0;
  if (block[3] > DEFAULT_SHARED) /* where that is too much, the launch says so */
    api.cuKernelSetAttribute(MAX_DYNAMIC_SHARED, (i32)block[3], kernel, call->index);
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
    api.cuGetErrorString(error, &why);
    snprintf(call->error, TEXT,
             "CUDA error %d (%s) when launching %s with grid=(%lld, %lld, %lld) "
             "block=(%lld, %lld, %lld) smem=%lld",
             error, why, what, grid[0], grid[1], grid[2], block[0], block[1], block[2], block[3]);
    return 1;
  }
  call->launched = 1;
  return 0;
}

/* -------------------------------------------------------------------- what Torch calls */

static Handle tensor(const Op *op, const u64 *stack, u64 i) {
  switch (op->kinds[i]) {
    case 'T': case 'W': return (Handle)stack[i];
    case 't': case 'w': return stack[i] ? *(Handle *)stack[i] : 0;
    default: return 0;
  }
}

static void drop(const Op *op, const u64 *stack, u64 given) {
  for (u64 i = 0; i < given; i++) {
    Handle handle = tensor(op, stack, i);
    if (handle) api.delete_tensor_object(handle);
    switch (op->kinds[i]) {
      case 't': case 'w': case 'I': case 'F': case 'B':
        if (stack[i]) api.operator_delete((void *)stack[i]);
    }
  }
}

/* `message` becomes an exception. */
static void raise(const Op *op, const char *otherwise) {
  char text[TEXT];
  snprintf(text, TEXT, "%s", message[0] ? message : otherwise);
  message[0] = 0; /* nothing runs after the next line */
  api.check(0, op->name, "jitkern", 0, text);
}

/* The sibling takes the slot and the arguments; beside an error it returns empty tensors. */
static void ask_python(const Op *op, u64 *stack, u64 given, u64 returned) {
  u64 passed[1 + ARGUMENTS + RETURNS] = {(u64)(op - ops)};
  for (u64 i = 0; i < given; i++) passed[1 + i] = stack[i];
  message[0] = 0;
  if (api.call_dispatcher(op->sibling, "", passed)) raise(op, "its Python sibling failed");
  for (u64 i = 0; i < returned; i++) stack[i] = passed[i];
  if (!message[0]) return;
  for (u64 i = 0; i < returned; i++) api.delete_tensor_object((Handle)stack[i]);
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

static i32 writes(const Op *op) {
  for (const char *kind = op->kinds; *kind; kind++)
    if ((*kind | 32) == 'w') return 1;
  return 0;
}

static i32 serve(Op *op, i32 i, Call *call) {
  Variant *variant = &op->variants[i];
  if (variant->index != call->index || variant->preference != preferred) return MISS;
  call->kernels = variant->kernels;
  return variant->stub(call);
}

static i32 try_variants(Op *op, Call *call) {
  i32 count = __atomic_load_n(&op->count, __ATOMIC_ACQUIRE);
  i32 last = __atomic_load_n(&op->last, __ATOMIC_RELAXED);
  i32 code = last < count ? serve(op, last, call) : MISS;
  for (i32 i = count - 1; code == MISS && i >= 0; i--) {
    if (i == last) continue;
    code = serve(op, i, call);
    if (code != MISS) __atomic_store_n(&op->last, i, __ATOMIC_RELAXED);
  }
  return code;
}

static void run(Op *op, u64 *stack, u64 given, u64 returned) {
  Tensor tensors[ARGUMENTS];
  Handle returns[RETURNS], guard = 0;
  Call call = {.api = &api, .tensors = tensors, .values = stack, .returns = returns,
               .error = message, .device = op->cuda, .index = op->cuda ? -1 : 0};
  for (u64 i = 0; i < given; i++) {
    describe(&tensors[i], tensor(op, stack, i));
    if (call.index < 0 && tensors[i].handle && tensors[i].device == 1) call.index = tensors[i].index;
  }
  if (op->cuda) {
    i32 current = call.index;
    api.get_current_device_index(&current);
    if (current != call.index) api.create_device_guard(call.index, &guard);
    api.get_current_cuda_stream(call.index, &call.stream);
  }
  i32 code = try_variants(op, &call);
  if (guard) api.delete_device_guard(guard);
  if (code == BROKEN && !writes(op)) code = FAILED; /* nothing shows: Python answers it anew */
  if (code == MISS || code == FAILED) {
    __atomic_fetch_add(&op->misses, 1, __ATOMIC_RELAXED);
    ask_python(op, stack, given, returned);
    return;
  }
  for (u64 i = 0; i < given; i++)
    if ((op->kinds[i] | 32) == 'w' && tensors[i].handle && !api.is_inference(tensors[i].handle))
      api.bump_version(tensors[i].handle); /* so that Autograd notices what it had saved */
  drop(op, stack, given);
  if (code == BROKEN) {
    raise(op, "an allocation or a copy failed after a kernel was launched: what the op changes in "
              "place may be changed");
  }
  for (u64 i = 0; i < returned; i++) stack[i] = (u64)returns[i];
}

/* Whether something wants to see the calls between Autograd and the backend. */
static i32 watched(void) {
  for (const u32 *key = watching; *key; key++)
    if (api.is_included(*key)) return 1;
  return 0;
}

/* At the Autograd key: straight on to the backend where nothing asks for a gradient and nobody
   watches, which saves the 0.3 us of asking the dispatcher again; else Python knows what to do. */
static void differentiate(Op *op, u64 *stack, u64 given, u64 returned) {
  i32 recording = api.grad_mode_is_enabled(), wanted = 0, plain = 1, cuda = 0;
  for (u64 i = 0; i < given && plain && !wanted; i++) {
    Handle handle = tensor(op, stack, i);
    if (!handle) continue;
    const char *impl = *(char **)handle;
    wanted = (recording && api.requires_grad(impl)) ||
             *api.forward_grad(impl, 0, handle) != undefined;
    i32 device;
    api.get_device_type(handle, &device);
    cuda |= device == 1;
    plain &= !(*(const u64 *)(impl + keys_at) & ~plain_keys);
  }
  if (plain && !wanted && op->backend[cuda] >= 0 && !watched()) {
    run(&ops[op->backend[cuda]], stack, given, returned);
  } else {
    ask_python(op, stack, given, returned);
  }
}

/* A boxed kernel is given no context, so each op needs functions of its own: these put the op's
   number into the register of a fourth argument, and go on. */
__attribute__((visibility("hidden"))) extern const char trampolines[] __asm__("trampolines");
__attribute__((visibility("hidden"), used)) void enter(u64 *, u64, u64, u32) __asm__("enter");
#if defined __x86_64__
#define ENTER "movl $number, %ecx\n jmp enter\n"
#elif defined __aarch64__
#define ENTER "mov w3, #number\n b enter\n"
#endif
enum { TRAMPOLINE = 16 };
__asm__(".text\n .balign 16\n trampolines:\n .set number, 0\n .rept 8192\n" ENTER
        ".balign 16\n .set number, number + 1\n .endr\n");

void enter(u64 *stack, u64 given, u64 returned, u32 number) {
  (number & 1 ? differentiate : run)(&ops[number / 2], stack, given, returned);
}

/* ------------------------------------------------------------------ what runtime.py calls */

void jitkern_bind(void *const *table, u64 bytes) {
  __builtin_memcpy(&api, table, bytes);
  api.allocate = allocate, api.launch = launch, api.release = release;
}

/* What the Autograd key needs to know of this Torch; see the variables. */
void jitkern_autograd(const void *undefined_tensor, i64 at, u64 plain, const u32 *keys) {
  undefined = undefined_tensor, keys_at = at, plain_keys = plain;
  for (u64 i = 0; keys[i] && i < sizeof watching / sizeof *watching - 1; i++) watching[i] = keys[i];
}

void jitkern_backends(i32 slot, i32 cpu, i32 cuda) {
  ops[slot].backend[0] = cpu, ops[slot].backend[1] = cuda;
}

/* A slot for an op on one device type, or -1 where all are taken. Called under a lock. */
i32 jitkern_declare(const char *kinds, const char *name, const char *sibling, i32 cuda) {
  if (declared == OPS) return -1;
  Op *op = &ops[declared];
  snprintf(op->kinds, sizeof op->kinds, "%s", kinds);
  snprintf(op->name, sizeof op->name, "%s", name);
  snprintf(op->sibling, sizeof op->sibling, "%s", sibling);
  op->cuda = cuda;
  return declared++;
}

const void *jitkern_trampoline(i32 slot, i32 autograd) {
  return trampolines + TRAMPOLINE * (2 * slot + autograd);
}

/* Returns how many variants there are now, or -1 where there is no room. Called under a lock. */
i32 jitkern_append(i32 slot, Stub *stub, void *const *kernels, i32 index, i32 preference) {
  Op *op = &ops[slot];
  if (op->count == VARIANTS) return -1;
  op->variants[op->count] = (Variant){stub, kernels, index, preference};
  __atomic_store_n(&op->count, op->count + 1, __ATOMIC_RELEASE);
  return op->count;
}

void jitkern_prefer(i32 preference) { __atomic_store_n(&preferred, preference, __ATOMIC_RELAXED); }
void jitkern_fail(const char *text) { snprintf(message, TEXT, "%s", text); }
u64 jitkern_misses(i32 slot) { return __atomic_load_n(&ops[slot].misses, __ATOMIC_RELAXED); }

/* Whether forward-mode AD is at work on this TensorImpl. */
i32 jitkern_has_tangent(const void *impl) {
  const void *tensor = impl; /* an at::Tensor is its only member */
  return *api.forward_grad(impl, 0, (Handle)&tensor) != undefined;
}
