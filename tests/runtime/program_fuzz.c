/* Programs with random changes, checked and then interpreted over tensors that fit them mostly. The
   test writes this below the text of the launch runtime, with programs in place of SEEDS. It is a
   library for a process that has Torch; with AddressSanitizer (ALONE) a program over a Torch and a
   driver that do no more than touch the memory which they are given. */
extern int printf(const char *, ...);
extern long strtol(const char *, char **, int);
extern void abort(void);

static u64 state;
static u64 next(void) { return state ^= state << 13, state ^= state >> 7, state ^= state << 17; }
static u64 below(u64 n) { return next() % n; }

typedef struct { const char *kinds, *results; i32 cuda; Program program; } Seed;
SEEDS
enum { ALL = sizeof seeds / sizeof *seeds, ROOM = 1 << 14, KERNELS = 8, ITEMS = 40 };

/* ------------------------------------------------------------------ kernels, which read their parameters */

static const Program *running;
static void touch(i32 kernel, void **parameters) {
  const i32 *kinds = running->parameters;
  for (; kernel; kinds++) kernel -= !*kinds;
  for (; *kinds; kinds++, parameters++)
    for (i32 i = 0; i < (*kinds >= IN_MEMORY ? *kinds - IN_MEMORY : 1); i++) (void)((volatile u64 *)*parameters)[i];
}
#define ENTRY(n) static i32 entry##n(void **parameters) { touch(n, parameters); return 0; }
ENTRY(0) ENTRY(1) ENTRY(2) ENTRY(3) ENTRY(4) ENTRY(5) ENTRY(6) ENTRY(7)
static i32 (*const entries[])(void **) = {entry0, entry1, entry2, entry3, entry4, entry5, entry6, entry7};

/* ------------------------------------------------------------------ arguments */

typedef struct { Tensor is; i32 fixed, variant; } Pooled; /* fixed: in memory that nobody may write to */
static Pooled pool[1 << 12];
static i32 pooled;

void fuzz_add(Handle handle, i32 fixed, i32 variant) {
  pool[pooled].fixed = fixed, pool[pooled].variant = variant;
  describe(&pool[pooled++].is, handle);
}

/* The operands of the first step of this kind which has this operand at a place; 0: there is none. */
static const i32 *step_of(const Program *p, i32 code, i32 place, i32 operand) {
  for (i32 at = 0; at + 4 < p->length; at += 2 + p->words[at + 1])
    if (p->words[at] == code && p->words[at + 2 + place] == operand) return p->words + at + 2;
  return 0;
}

/* The items that the program looks for in the list at this place, mostly. */
static i64 count_of(const Program *p, i32 place) {
  const i32 *count = step_of(p, COUNT, 1, place), *wanted = count ? step_of(p, EQUAL, 0, count[0]) : 0;
  const i64 number = wanted && wanted[1] < p->fixed ? (i64)p->constants[wanted[1]] : 2;
  return !below(20) || number > ITEMS ? (i64)below(ITEMS + 1) : !below(20) ? (i64)below(4) : number;
}

/* A tensor of the dtype and the rank that the program looks for; one of a list has a place below 0. */
static void pick(Tensor *t, const Program *p, i32 place, i32 fixed, i32 cuda, i32 variant) {
  const i32 *wanted = place < 0 ? step_of(p, TABULATE, 2, 0) : step_of(p, TENSOR, 0, place);
  const i32 dtype = !wanted ? -1 : place < 0 ? (i32)p->constants[wanted[wanted[-1] - 1]] : wanted[1];
  const i64 dim = wanted && place >= 0 ? wanted[2] : 2;
  const u64 start = below((u64)pooled);
  i32 best = -1, found = 0;
  for (i32 i = 0; i < pooled; i++) {
    const Pooled *one = &pool[(start + (u64)i) % (u64)pooled];
    const i32 alike = one->variant == variant || one->variant + variant == 1; /* but for their memory */
    const i32 fit = (i32)below(4) + (variant < 0 ? 0 : 16 * (one->is.dtype == dtype) + 8 * (one->is.dim == dim) + 4 * alike);
    if (one->fixed == fixed && fit > best) best = fit, found = (i32)(one - pool);
  }
  *t = pool[found].is, t->device = cuda, t->index = 0;
  if (place >= 0 ? !step_of(p, NO_TENSOR, 0, place) != !!below(30) : !below(1000)) t->handle = 0;
}

static void check_result(Handle);
static i64 counts[4]; /* of calls, by what came of them */

static void run_one(const Program *p, void *const *kernels, const Seed *seed, i32 cuda) {
  const i32 given = p->given, variant = below(3) ? 0 : (i32)below(6) - 1;
  Tensor *tensors = malloc(sizeof *tensors * (u64)(given + !given)), *items = malloc(sizeof *items * ITEMS * 2);
  List *lists = malloc(sizeof *lists * (u64)(given + !given));
  u64 *values = malloc(8 * (u64)(given + !given)), boxed = below(3), listed[ITEMS];
  Handle returns[RETURNS] = {0};
  static char error[TEXT];
  for (i32 i = 0; i < ITEMS; i++) listed[i] = below(2) ? below(9) : below(2) ? bits_of((double)below(9) / 2) : next();
  for (i32 i = 0; i < 2 * ITEMS && (among(seed->kinds, 'L') || among(seed->kinds, 'V')); i++)
    pick(&items[i], p, -1, i < ITEMS, cuda, variant);
  for (i32 i = 0; i < given; i++) {
    const char kind = seed->kinds[i];
    if (among("TtWw", kind)) pick(&tensors[i], p, i, (kind | 32) == 't', cuda, variant);
    else tensors[i] = (Tensor){0};
    values[i] = below(4) ? below(9) : below(3) ? below(50) : next();
    if (kind == 'b') values[i] = below(2) | next() << 8;
    if (kind == 'f') values[i] = bits_of((double)values[i] / 4 * (below(2) ? 1 : -1));
    const i32 *guard = step_of(p, GIVEN, 0, i), absent = (guard && !guard[1]) != !below(20);
    if (among("IFB", kind)) values[i] = absent ? 0 : (u64)&boxed;
    lists[i] = (List){0, 0, 0, -1};
    if (among("LV", kind)) lists[i].tensors = items + (kind == 'V' ? ITEMS : 0);
    if (among("ndzNDZ", kind)) lists[i].values = listed;
    if (among("LVndzNDZ", kind)) lists[i].count = count_of(p, i);
    if (among("LVndz", kind)) lists[i].count = max1(lists[i].count + 1) - 1;
    if (among("sS", kind) && p->text_count) {
      const i32 *wanted = step_of(p, SPELLS, 0, i);
      const Text *text = &p->texts[wanted && below(9) ? (u64)wanted[1] : below((u64)p->text_count)];
      lists[i].text = text->text, lists[i].count = kind == 'S' && count_of(p, i) < 0 ? -1 : text->bytes;
    }
  }
  Call call = {.tensors = tensors, .values = values, .lists = lists, .kernels = kernels, .returns = returns,
               .error = error, .device = cuda, .index = 0};
  running = p;
  const i32 code = interpret(p, &call);
  counts[code]++;
  for (i32 i = 0; seed->results[i]; i++) {
    if (code == DONE && !returns[i] && seed->results[i] != 't') abort();
    if (returns[i]) check_result(returns[i]), api.delete_tensor_object(returns[i]);
  }
  free(tensors), free(items), free(lists), free(values);
}

/* ------------------------------------------------------------------ changes */

static i32 words[2 * ROOM];

/* The places of the steps in words, as far as these are steps. */
static i32 steps_of(const i32 *at, i32 length, i32 *starts) {
  i32 found = 0;
  for (i32 i = 0; i + 1 < length && at[i] >= 0 && at[i] < INSTRUCTIONS && at[i + 1] >= 0 && at[i + 1] <= length - i - 2;)
    starts[found++] = i, i += 2 + at[i + 1];
  return found;
}

/* Put `count` words of `from` in place of `gone` words. */
static void splice(Program *p, i32 at, i32 gone, const i32 *from, i32 count) {
  i32 copy[64];
  if (count > 64 || p->length + count > ROOM) return;
  for (i32 i = 0; i < count; i++) copy[i] = from[i];
  __builtin_memmove(words + at + count, words + at + gone, 4 * (u64)(p->length - at - gone));
  __builtin_memcpy(words + at, copy, 4 * (u64)count);
  p->length += count - gone;
}

static char letter_of(i32 code, i32 place) {
  const char *shape = SHAPES[code];
  while (place-- && *shape && shape[1] != '*') shape++;
  return *shape;
}

/* An operand of the same kind from another step, mostly; else any word, or one at an edge. */
static i32 operand_like(const Program *p, const i32 *starts, i32 count, char letter) {
  const i32 edges[] = {-1, 0, 1, 7, 63, 64, 127, 128, p->memory - 1, p->memory, p->registers, p->text_count, p->kernels, (i32)next()};
  for (i32 i = below(4) ? 40 : 0; i--;) {
    const i32 *x = words + starts[below((u64)count)] + 2;
    if (!x[-1]) continue;
    const i32 place = (i32)below((u64)x[-1]);
    if (letter_of(x[-2], place) == letter) return x[place];
  }
  return below(3) ? edges[below(sizeof edges / sizeof *edges)] : words[below((u64)p->length)];
}

static void change(Program *p, u64 *constants) {
  static i32 starts[ROOM], others[ROOM];
  const u64 what = below(26);
  i32 *const numbers[] = {&p->registers, &p->tensors, &p->owned, &p->memory};
  const i32 count = steps_of(words, p->length, starts);
  if (!count) return;
  const i32 at = starts[below((u64)count)];
  if (what < 10) {
    const i32 place = (i32)below(2 + (u64)words[at + 1]) - 2;
    i32 *word = &words[at + 2 + place];
    if (place < 0 && below(4)) return;
    *word = place < 0 || below(2) ? *word + (i32)below(5) - 2 : operand_like(p, starts, count, letter_of(words[at], place));
    return;
  }
  if (what < 13 && p->fixed) {
    constants[below((u64)p->fixed)] = below(3) ? below(300) : below(2) ? 1ull << below(64) : next();
    return;
  }
  if (what < 15) {
    *numbers[below(4)] += (i32)below(7) - 3;
    return;
  }
  if (what < 17) {
    words[at] = (i32)below(INSTRUCTIONS);
  } else if (what < 18) {
    splice(p, at, 2 + words[at + 1], words, 0);
  } else if (what < 19) {
    p->length = at;
  } else if (what < 22) {
    const i32 from = starts[below((u64)count)];
    splice(p, at, 0, words + from, 2 + words[from + 1]);
  } else {
    const Program *other = &seeds[below(ALL)].program;
    const i32 its = steps_of(other->words, other->length, others);
    if (!its) return;
    const i32 from = others[below((u64)its)];
    splice(p, at, 0, other->words + from, 2 + other->words[from + 1]);
    const i32 now = steps_of(words, p->length, starts);
    for (i32 i = 0; i < words[at + 1] && below(20); i++)
      words[at + 2 + i] = operand_like(p, starts, now, letter_of(words[at], i));
  }
}

/* Number the results of all steps anew, so that more programs get by the first checks. */
static void renumber(Program *p) {
  static i32 starts[ROOM];
  const i32 count = steps_of(words, p->length, starts);
  i32 given = 0;
  while (given < 32 && p->given > given) given++;
  p->registers = p->fixed, p->tensors = p->owned = 0;
  for (i32 s = 0; s < count; s++) {
    i32 *x = words + starts[s] + 2;
    const char *shape = SHAPES[words[starts[s]]];
    for (i32 i = 0; i < x[-1] && shape[i]; i++) {
      if (shape[i] == '*') break;
      if (among("=NFPM", shape[i])) x[i] = p->registers++;
      if (shape[i] == 'o') x[i] = p->owned++;
      if (shape[i] == '+') x[i] = given + p->tensors++;
    }
  }
}

static void *copy_of(const void *from, u64 bytes) { /* of exactly this size, so that a word beyond is seen */
  void *made = malloc(bytes + !bytes);
  return __builtin_memcpy(made, from, bytes);
}

/* Try so many programs, one in eight of them as it was made. out: tried, sound, sound as made, seeds
   that were served as made, and calls by what came of them. Return the seed that is refused as it
   was made, or -1. */
i32 fuzz(i64 times, u64 from, i64 *out) {
  static char served[ALL];
  const Api whole = api;
  state = from * 0x9e3779b97f4a7c15ull | 1;
  for (i64 i = 0; i < times; i++) {
    const Seed *seed = &seeds[below(ALL)];
    const i32 changes = i % 8 ? 1 + (i32)below(3) : 0, cuda = changes && !below(40) ? !seed->cuda : seed->cuda;
    Program p = seed->program;
    void *kernels[KERNELS];
    u64 *constants = copy_of(p.constants, 8 * (u64)p.fixed);
    __builtin_memcpy(words, p.words, 4 * (u64)p.length);
    p.given = 0;
    while (seed->kinds[p.given]) p.given++;
    for (i32 c = 0; c < changes; c++) change(&p, constants);
    if (changes && below(2)) renumber(&p);
    p.words = copy_of(words, 4 * (u64)p.length), p.constants = constants;
    for (u64 k = 0; k < KERNELS; k++) kernels[k] = cuda ? (void *)(k + 1) : (void *)entries[k];
    const i32 none = changes && p.kernels && !below(200);
    if (p.kernels > KERNELS) abort();
    if (none) kernels[below((u64)p.kernels)] = 0;
    if (!cuda) __builtin_memset(&api.cuLaunchKernelEx, 0, sizeof api - __builtin_offsetof(Api, cuLaunchKernelEx));
    const i32 sound = is_sound(&p, kernels, seed->kinds, seed->results, cuda);
    if (!sound && !changes) return (i32)(seed - seeds);
    if (sound && none) abort();
    const i64 before = counts[DONE];
    if (sound) run_one(&p, kernels, seed, cuda);
    if (!changes && counts[DONE] > before) served[seed - seeds] = 1;
    out[0]++, out[1] += sound, out[2] += !changes;
    api = whole;
    free((void *)p.words), free(constants);
    if (i % 1000 == 0) free_own(0);
  }
  free_own(0);
  for (i32 i = 0; i < ALL; i++) out[3] += served[i];
  for (i32 i = 0; i < 4; i++) out[4 + i] = counts[i];
  return -1;
}

#ifndef ALONE
static void check_result(Handle result) { (void)result; }
#else /* ------------------------------------------------------------------ a Torch and a driver of its own */

/* A tensor whose elements have one byte each. fixed: nobody may write to it; lent: an argument, or a view of one. */
typedef struct { void *impl; i64 dim, numel, length, *size, *stride; char *data, *block; i32 dtype, fixed, lent; } Fake;
static i32 alive;

/* The bytes of a tensor; abort if Torch should never be asked for such sizes and strides. */
static i64 length_of(i64 rank, const i64 *size, const i64 *stride, i64 *numel) {
  __int128 last = 0, count = 1, most = 1;
  for (i64 d = 0; d < rank; d++) {
    if (size[d] < 0 || stride[d] < 0) abort();
    if (size[d]) last += (__int128)(size[d] - 1) * stride[d], most *= size[d];
    count *= size[d];
    if (last >> 62 || most >> 63) abort();
  }
  *numel = (i64)count;
  return count ? (i64)last + 1 : 0;
}
static Fake *fake(i64 rank, const i64 *size, const i64 *stride, i32 dtype) {
  Fake made = {.dim = rank, .size = copy_of(size, 8 * (u64)rank), .stride = copy_of(stride, 8 * (u64)rank), .dtype = dtype};
  if (dtype < 0 || dtype > 46) abort();
  made.length = length_of(rank, size, stride, &made.numel), alive++;
  Fake *t = copy_of(&made, sizeof made);
  return t->impl = t;
}
static void check_result(Handle result) { if (((Fake *)result)->lent) abort(); }
static i32 deleted(Handle of) {
  Fake *t = of;
  return free(t->size), free(t->stride), free(t->block), free(t), alive--, 0;
}
static i32 empty_strided(i64 rank, const i64 *size, const i64 *stride, i32 dtype, i32 device, i32 index, Handle *made) {
  (void)device, (void)index;
  i64 numel, length = length_of(rank, size, stride, &numel);
  if (length > 1 << 16 || !below(50)) return 1;
  Fake *t = *made = fake(rank, size, stride, dtype);
  return t->data = t->block = malloc((u64)length), 0;
}
static i32 viewed(Handle of, i64 rank, const i64 *size, const i64 *stride, i64 offset, Handle *made) {
  const Fake *base = of;
  i64 numel, length = length_of(rank, size, stride, &numel);
  if (offset < 0 || offset >> 56 || (length && (__int128)offset + length > base->length)) abort();
  if (!below(50)) return 1;
  Fake *t = *made = fake(rank, size, stride, base->dtype);
  return t->data = base->data + (length ? offset : 0), t->fixed = base->fixed, t->lent = base->lent, 0;
}
static void touch_all(const Fake *t, i32 change) {
  i64 place[RANKS] = {0}, d = 0;
  if (change && t->fixed) abort();
  for (i64 n = 0; n < t->numel && n < 4096; n++) {
    volatile char *element = t->data + (n == 4095 ? t->length - 1 : 0);
    for (d = 0; n < 4095 && d < t->dim; d++) element += place[d] * t->stride[d];
    if (change) *element = 1;
    (void)*element;
    for (d = t->dim - 1; d >= 0 && ++place[d] == t->size[d]; d--) place[d] = 0;
  }
}
static i32 copied(Handle to, Handle from, i32 later) { return (void)later, touch_all(from, 0), touch_all(to, 1), !below(50); }
static i32 zeroed(Handle of) { return touch_all(of, 1), !below(50); }
static i32 dim_of(Handle of, i64 *n) { return *n = ((Fake *)of)->dim, 0; }
static i32 numel_of(Handle of, i64 *n) { return *n = ((Fake *)of)->numel, 0; }
static i32 sizes_of(Handle of, const i64 **n) { return *n = ((Fake *)of)->size, 0; }
static i32 strides_of(Handle of, const i64 **n) { return *n = ((Fake *)of)->stride, 0; }
static i32 dtype_of(Handle of, i32 *n) { return *n = ((Fake *)of)->dtype, 0; }
static i32 none_of(Handle of, i32 *n) { return (void)of, *n = 0, 0; }
static i32 data_of(Handle of, char **data) { return *data = ((Fake *)of)->data, 0; }
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
  return __builtin_memset(map, 0, 128), !below(50);
}
static i32 launch_of(const void *configuration, void *kernel, void **parameters, void **extra) {
  const Config *config = configuration;
  for (u32 i = 0; i < config->count; i++) (void)*(volatile i32 *)&config->attributes[i].id;
  (void)extra, touch((i32)(u64)kernel - 1, parameters);
  return below(50) ? 0 : 1;
}
static i32 set(i32 attribute, i32 value, void *kernel, i32 device) { return (void)attribute, (void)value, (void)kernel, (void)device, 0; }
static i32 get(i32 *value, i32 attribute, void *kernel, i32 device) { return (void)attribute, (void)kernel, (void)device, *value = 65536, 0; }

int main(int count, char **arguments) { /* programs to try, and a seed */
  (void)count;
  static const i32 dtypes[] = {0, 3, 4, 5, 6, 7, 11, 15};
  i64 out[8] = {0};
  api = (Api){.get_dim = dim_of, .get_numel = numel_of, .get_sizes = sizes_of, .get_strides = strides_of,
              .get_dtype = dtype_of, .get_device_type = none_of, .get_device_index = none_of, .get_data_ptr = data_of,
              .empty_strided = empty_strided, ._reinterpret_tensor = viewed, .delete_tensor_object = deleted,
              .copy_ = copied, .zero_ = zeroed, .default_dtype = dtype_now, .pow = power_of,
              .cuDeviceGetAttribute = fact, .cuStreamIsCapturing = capturing, .cuGetErrorString = why,
              .cuTensorMapEncodeTiled = encode, .cuLaunchKernelEx = launch_of, .cuKernelSetAttribute = set,
              .cuKernelGetAttribute = get};
  pthread_key_create(&at_exit, free_own);
  state = 1;
  for (u64 i = 0; i < sizeof dtypes / sizeof *dtypes * 5 * 5 * 2; i++) { /* dtypes, ranks, variants, fixed */
    const i64 rank = (i64)(i / 2 % 5), variant = (i64)(i / 10 % 5);
    i64 size[5], stride[5], step = 1, numel;
    for (i64 d = rank - 1; d >= 0; d--) {
      size[d] = variant < 2 ? 4 : variant == 4 && d == 0 ? 0 : (i64)(1 + below(5)), stride[d] = step;
      if (variant == 3) stride[d] = (i64)below(3) * step; /* gaps and overlaps */
      if (variant == 3 && !stride[d] && !below(4)) size[d] = 1ll << below(12);
      step *= max1(size[d]);
    }
    Fake *t = fake(rank, size, stride, dtypes[i / 50]);
    t->data = t->block = malloc((u64)length_of(rank, size, stride, &numel)), t->fixed = (i32)(i % 2), t->lent = 1;
    fuzz_add(t, t->fixed, (i32)variant);
  }
  static char room[1 << 14];
  for (i32 zero = 0; zero < 2; zero++) jitkern_workspace(0, 0, zero, room + (zero << 13), 1 << 13);
  const i32 before = alive;
  printf("%d ", fuzz(strtol(arguments[1], 0, 10), (u64)strtol(arguments[2], 0, 10), out));
  printf("%d", alive - before);
  for (i32 i = 0; i < 8; i++) printf(" %lld", out[i]);
  for (i32 i = 0; i < pooled; i++) deleted(pool[i].is.handle);
  return 0;
}
#endif
