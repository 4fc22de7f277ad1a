/* Programs with random changes, checked and then interpreted over tensors of their ranks and over a
   driver and a Torch that do nothing. Below the text of the runtime's `program.c`, and above `main`,
   the test writes the programs (SEEDS). Built with AddressSanitizer. */
extern int printf(const char *, ...);
extern long strtol(const char *, char **, int);

static u64 state = 88172645463325252ull;
static u64 next(void) { return state ^= state << 13, state ^= state >> 7, state ^= state << 17; }
static u64 below(u64 n) { return next() % n; }

static i32 alive; /* tensors that Torch was asked for */
static i32 make(i64 rank, const i64 *size, const i64 *stride, Handle *made) {
  volatile i64 read = 0;
  for (i64 d = 0; d < rank; d++) read += size[d] + stride[d];
  if (!below(50)) return 1;
  *made = malloc(8), *(u64 *)*made = read & 0, alive++;
  return 0;
}
static i32 empty_strided(i64 rank, const i64 *size, const i64 *stride, i32 dtype, i32 device, i32 index, Handle *made) {
  (void)dtype, (void)device, (void)index;
  return make(rank, size, stride, made);
}
static i32 view(Handle of, i64 rank, const i64 *size, const i64 *stride, i64 offset, Handle *made) {
  (void)offset, (void)*(volatile u64 *)of;
  return make(rank, size, stride, made);
}
static i32 data_of(Handle of, char **data) { return *data = of, 0; }
static i32 deleted(Handle of) { return free(of), alive--, 0; }
static i32 copied(Handle to, Handle from, i32 later) { return (void)*(volatile u64 *)to, (void)*(volatile u64 *)from, (void)later, !below(50); }
static i32 zeroed(Handle of) { return (void)*(volatile u64 *)of, !below(50); }
static unsigned short dtype_now(void) { return 6; }
static double power_of(double a, double b) { return a * b; }
static i32 fact(i32 *value, i32 number, i32 device) { return (void)device, *value = number, 0; }
static i32 capturing(void *stream, i32 *answer) { return (void)stream, *answer = 0, 0; }
static i32 why(i32 error, const char **text) { return (void)error, *text = "why", 0; }
static i32 encode(void *map, i32 type, u32 rank, void *data, const u64 *size, const u64 *stride, const u32 *box,
                  const u32 *steps, i32 a, i32 b, i32 c, i32 d) {
  (void)type, (void)data, (void)steps, (void)a, (void)b, (void)c, (void)d;
  volatile u64 read = 0;
  for (u32 i = 0; i < rank; i++) read += size[i] + box[i] + (i ? stride[i - 1] : 0);
  return memset(map, 0, 128), 0;
}
enum { KERNELS = 8 };
static i32 arity[KERNELS];
static void touch(void **parameters, i32 count) {
  for (i32 i = 0; i < count; i++) (void)*(volatile u64 *)parameters[i];
}
static i32 launch_of(const void *config, void *kernel, void **parameters, void **extra) {
  (void)config, (void)extra, touch(parameters, arity[(u64)kernel]);
  return below(50) ? 0 : 1;
}
static i32 set(i32 attribute, i32 value, void *kernel, i32 device) { return (void)attribute, (void)value, (void)kernel, (void)device, 0; }
static i32 get(i32 *value, i32 attribute, void *kernel, i32 device) { return (void)attribute, (void)kernel, (void)device, *value = 65536, 0; }
#define ENTRY(n) static i32 entry##n(void **parameters, char *error) { touch(parameters, arity[n]); return 0; }
ENTRY(0) ENTRY(1) ENTRY(2) ENTRY(3) ENTRY(4) ENTRY(5) ENTRY(6) ENTRY(7)
static i32 (*const entries[])(void **, char *) = {entry0, entry1, entry2, entry3, entry4, entry5, entry6, entry7};

typedef struct { const char *kinds, *results; i32 cuda; Program program; } Seed;
SEEDS

static i64 *numbers(i64 count) { /* of exactly this size, so that a step beyond is seen */
  i64 *made = malloc((u64)count * 8 + !count);
  for (i64 i = 0; i < count; i++) made[i] = below(20) ? (i64)below(40) : (i64)next();
  return made;
}

static void describe_one(Tensor *t, const Program *p, i32 number, i32 cuda) {
  static u64 impl[64];
  *t = (Tensor){.dtype = (i32)below(12), .dim = (i64)below(6), .device = cuda, .index = 0};
  for (i32 at = 0; at + 4 < p->length; at += 2 + p->words[at + 1]) {
    if (p->words[at + 1] < 0 || p->words[at] == RETURN) break;
    if (p->words[at] == TENSOR && p->words[at + 2] == number && below(20))
      t->dtype = p->words[at + 3], t->dim = p->words[at + 4] & 63;
  }
  t->handle = below(30) ? &impl[below(64)] : 0;
  t->size = numbers(t->dim), t->stride = numbers(t->dim), t->numel = (i64)below(100), t->data = (char *)(below(8) * 16);
}

static void forget(Tensor *t) { free((void *)t->size), free((void *)t->stride); }

static void run(Program *p, const Seed *seed) {
  const i32 given = p->given;
  Tensor *tensors = malloc(sizeof *tensors * (u64)(given + !given)), items[4];
  List *lists = malloc(sizeof *lists * (u64)(given + !given));
  u64 *values = malloc(8 * (u64)(given + !given)), boxed = below(5), listed[4] = {1, 2, 3, 4};
  void *kernels[KERNELS];
  Handle returns[RETURNS] = {0};
  char error[TEXT];
  for (i32 i = 0; i < KERNELS; i++) kernels[i] = seed->cuda ? (void *)(u64)i : (void *)entries[i];
  for (i32 i = 0; i < 4; i++) describe_one(&items[i], p, given + i, seed->cuda);
  for (i32 i = 0; i < given; i++) {
    describe_one(&tensors[i], p, i, seed->cuda);
    values[i] = among("IFB", seed->kinds[i]) ? (below(3) ? (u64)&boxed : 0) : below(10) ? below(50) : next();
    lists[i] = (List){items, listed, "text", (i64)below(6) - 1};
    if (lists[i].count > 4) lists[i].count = 4;
  }
  Call call = {.tensors = tensors, .values = values, .lists = lists, .kernels = kernels, .returns = returns,
               .error = error, .device = seed->cuda, .index = 0};
  interpret(p, &call);
  for (i32 i = 0; i < RETURNS; i++)
    if (returns[i]) deleted(returns[i]);
  for (i32 i = 0; i < given; i++) forget(&tensors[i]);
  for (i32 i = 0; i < 4; i++) forget(&items[i]);
  free(tensors), free(lists), free(values);
}

int main(int count, char **arguments) {
  const long times = count > 1 ? strtol(arguments[1], 0, 10) : 1000;
  long sound = 0, whole = 0;
  api = (Api){.empty_strided = empty_strided, ._reinterpret_tensor = view, .get_data_ptr = data_of,
              .delete_tensor_object = deleted, .copy_ = copied, .zero_ = zeroed, .default_dtype = dtype_now,
              .pow = power_of, .cuDeviceGetAttribute = fact, .cuStreamIsCapturing = capturing,
              .cuGetErrorString = why, .cuTensorMapEncodeTiled = encode, .cuLaunchKernelEx = launch_of,
              .cuKernelSetAttribute = set, .cuKernelGetAttribute = get};
  for (long i = 0; i < times; i++) {
    const Seed *seed = &seeds[below(sizeof seeds / sizeof *seeds)];
    Program p = seed->program;
    i32 *words = malloc(4 * (u64)p.length + !p.length);
    u64 *constants = malloc(8 * (u64)p.fixed + !p.fixed);
    for (i32 w = 0; w < p.length; w++) words[w] = p.words[w];
    for (i32 w = 0; w < p.fixed; w++) constants[w] = p.constants[w];
    p.words = words, p.constants = constants;
    const u64 changes = i % 8 ? 1 + below(3) : 0;
    for (u64 c = 0; c < changes; c++) {
      const u64 what = below(20);
      if (what < 14 && p.length) {
        i32 *word = &words[below((u64)p.length)];
        *word = below(3) ? *word + (i32)below(5) - 2 : below(2) ? (i32)below(70) : (i32)next();
      } else if (what < 16 && p.fixed) {
        constants[below((u64)p.fixed)] = below(2) ? below(300) : next();
      } else if (what < 17 && p.length) {
        p.length -= (i32)below((u64)p.length);
      } else {
        i32 *const counts[] = {&p.registers, &p.tensors, &p.owned, &p.memory};
        *counts[below(4)] += (i32)below(7) - 3;
      }
    }
    for (i32 k = 0; k < p.kernels && k < KERNELS; k++) arity[k] = p.arities[k];
    if (is_sound(&p, seed->kinds, seed->results)) sound++, whole += !changes, run(&p, seed);
    else if (!changes) {
      printf("seed %ld is refused as it was made\n", (long)(seed - seeds));
      return 1;
    }
    free(words), free(constants);
  }
  free_own(0);
  printf("%ld sound, %ld of them unchanged, %d tensors alive\n", sound, whole, alive);
  return alive != 0;
}
