/* The launch runtime: Torch calls it for an op through the op's trampoline (`code_page.py`). The
   runtime describes the tensors, tries the op's programs, and if none fits calls the fallback
   op in Python, which computes the result and may append a program. The hit path takes no lock
   and runs no Python. `binding.py` loads the runtime and calls the functions at the end. */
enum { OPS = 8192, PROGRAMS = 128, NAMESPACES = 4096, READ = 16 };

/* The scope of a launch function (`trace/scope.py`), unchanged while every word is: first `fixed`
   words, the parts of functions and the contents of their variables; then a version for each
   namespace, which a change of another name may have raised. */
typedef struct { const u64 *at; u64 seen; } Word;
typedef struct {
  void *namespace, *name, *value; /* value 0: the name is not bound */
  i64 word;                       /* the place of the namespace's version among the versions */
} Binding;
typedef struct {
  i32 fixed, namespaces, bindings;
  Word *words;
  const Binding *bound;
} Scope;

typedef struct { /* filled by binding.py; only `generation` and `used` change afterwards */
  Program *program;
  void *const *kernels;
  Scope *scope;
  i32 index;      /* of the device that the call was traced for */
  i32 generation; /* of the declaration: a launch function may be declared again */
  i32 used;       /* the clock when it last served after another one */
} LoadedProgram;

typedef struct {
  /* T: a tensor, W: a tensor that is changed, i: an integer, f: a float, b: a bool; in swapped case
     (t, w, I, F, B): the same or None. L: a list of tensors, V: of tensors that are changed, n, d, z:
     of integers, floats, bools, s: a string; in upper case (N, D, Z, S): the same or None */
  char kinds[ARGUMENTS + 1], results[RETURNS + 1], name[128], fallback[128];
  i32 lists; /* whether an argument is a list or a string */
  i32 writes; /* whether an argument is changed */
  i32 boxes; /* whether a result may be None */
  i32 cuda, autograd, count, last, generation, clock;
  i32 parity, calls[2]; /* calls that may use a program, by the parity when they began; see jitkern_quiet */
  i32 backend[2]; /* at the Autograd key: the slots of the op on the CPU and on CUDA, or -1 */
  u64 misses;
  const void *gradient; /* at the Autograd key: how `record` finds the gradient; 0: Python records */
  LoadedProgram *programs[PROGRAMS];
} Op;

static Op ops[OPS]; /* untouched pages take no memory */
static i32 all_to_python; /* whether Python has all calls, because settings of some thread differ */
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
static i32 is_bound;

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

/* Replace what is no UTF-8 in a text: Python would raise a UnicodeDecodeError in place of it. */
static void mend(char *text) {
  for (unsigned char *at = (unsigned char *)text; *at;) {
    const u32 a = at[0], b = a < 0x80 ? 0 : at[1];
    i32 more = a < 0x80 ? 0 : a < 0xc2 ? -1 : a < 0xe0 ? 1 : a < 0xf0 ? 2 : a < 0xf5 ? 3 : -1;
    if ((a == 0xe0 && b < 0xa0) || (a == 0xed && b > 0x9f) || (a == 0xf0 && b < 0x90) || (a == 0xf4 && b > 0x8f))
      more = -1;
    i32 n = 1;
    while (n <= more && at[n] >> 6 == 2) n++;
    if (n <= more || more < 0) *at = '?', n = 1;
    at += n;
  }
}

/* Throw the exception of a kernel, whose text is in `message`. */
static void raise_of_kernel(const Op *op) {
  char text[TEXT];
  snprintf(text, TEXT, "%s: its kernel raised an exception: %s", op->name, message);
  mend(text);
  __builtin_memcpy(message, text, TEXT);
  raise(op, "");
}

/* Call the fallback op, which takes slot and arguments; after an error it returns empty tensors. */
static void call_python(const Op *op, u64 *stack, u64 given, u64 returned) {
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
  i32 failed = api.call_dispatcher(op->fallback, "", passed);
  while (count) api.delete_string(strings[--count]);
  if (failed) raise(op, "its Python fallback failed");
  for (u64 i = 0; i < returned; i++) {
    stack[i] = passed[i];
    if (!op->boxes || op->results[i] == 't') continue;
    stack[i] = *(u64 *)passed[i]; /* a fallback op returns all results as ones that may be None */
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

/* Whether the op would change an inference tensor, by this argument. */
static inline i32 changes_inference(const Op *op, const u64 *stack, u64 i) {
  Handle handle = (op->kinds[i] | 32) == 'w' ? tensor(op, stack, i) : 0;
  i32 found = handle && api.is_inference(handle);
  for (u64 at = op->kinds[i] == 'V' ? listed(op, stack, i) : 0; at--;)
    found |= api.is_inference(item(stack, i, at));
  return found;
}

/* Raise the version of a changed tensor, so that Autograd notices the change of a saved one.
   inference: whether one of the changed tensors is an inference tensor, which has no version. */
static void changed(Handle handle, i32 inference) {
  if (!inference || !api.is_inference(handle)) api.bump_version(handle);
}

/* Whether all names have their old values, though some namespaces have changed. */
static i32 renewed(Scope *scope) {
  u64 now[READ];
  Word *words = scope->words + scope->fixed;
  i32 same = 1, locked = api.PyGILState_Ensure();
  for (i32 i = 0; i < scope->namespaces; i++) now[i] = *words[i].at;
  for (i32 i = 0; i < scope->bindings && same; i++) {
    const Binding *bound = &scope->bound[i];
    if (now[bound->word] == __atomic_load_n(&words[bound->word].seen, __ATOMIC_RELAXED)) continue;
    same = api.PyDict_GetItemWithError(bound->namespace, bound->name) == bound->value;
  }
  for (i32 i = 0; i < scope->namespaces && same; i++)
    __atomic_store_n(&words[i].seen, now[i], __ATOMIC_RELAXED);
  api.PyGILState_Release(locked);
  return same;
}

static i32 holds(Scope *scope) {
  i32 i = 0;
  for (; i < scope->fixed; i++)
    if (*scope->words[i].at != scope->words[i].seen) return 0;
  for (; i < scope->fixed + scope->namespaces; i++) {
    const Word *word = &scope->words[i];
    if (__atomic_load_n(word->at, __ATOMIC_RELAXED) != __atomic_load_n(&word->seen, __ATOMIC_RELAXED))
      return renewed(scope);
  }
  return 1;
}

/* Return the next time of an op's clock. A race only makes the order of use inexact. */
static i32 tick(Op *op) {
  i32 now = __atomic_load_n(&op->clock, __ATOMIC_RELAXED) + 1;
  __atomic_store_n(&op->clock, now, __ATOMIC_RELAXED);
  return now;
}

static i32 serve(Op *op, i32 i, Call *call) {
  LoadedProgram *loaded = __atomic_load_n(&op->programs[i], __ATOMIC_ACQUIRE);
  if (loaded->index != call->index || __atomic_load_n(&all_to_python, __ATOMIC_RELAXED) ||
      loaded->generation != __atomic_load_n(&op->generation, __ATOMIC_RELAXED))
    return MISS;
  call->kernels = loaded->kernels;
  i32 code = holds(loaded->scope) ? interpret(loaded->program, call) : MISS;
  if (code != MISS && i != __atomic_load_n(&op->last, __ATOMIC_RELAXED)) {
    __atomic_store_n(&op->last, i, __ATOMIC_RELAXED);
    __atomic_store_n(&loaded->used, tick(op), __ATOMIC_RELAXED);
  }
  return code;
}

static i32 try_programs(Op *op, Call *call) {
  i32 *calls = &op->calls[__atomic_load_n(&op->parity, __ATOMIC_RELAXED)];
  __atomic_fetch_add(calls, 1, __ATOMIC_SEQ_CST);
  i32 count = __atomic_load_n(&op->count, __ATOMIC_ACQUIRE);
  i32 last = __atomic_load_n(&op->last, __ATOMIC_RELAXED);
  i32 code = last < count ? serve(op, last, call) : MISS;
  for (i32 i = count - 1; code == MISS && i >= 0; i--)
    if (i != last) code = serve(op, i, call);
  __atomic_fetch_sub(calls, 1, __ATOMIC_SEQ_CST);
  return code;
}

static void run(Op *op, u64 *stack, u64 given, u64 returned) {
  if (api.function_modes && api.function_modes()) { /* modes must see the calls of a launch function */
    __atomic_fetch_add(&op->misses, 1, __ATOMIC_RELAXED);
    call_python(op, stack, given, returned);
    return;
  }
  Tensor tensors[ARGUMENTS];
  Handle returns[RETURNS], guard = 0;
  i32 inference = 0;
  Call call = {.tensors = tensors, .values = stack, .returns = returns,
               .error = message, .device = op->cuda, .index = op->cuda ? -1 : 0};
  for (u64 i = 0; i < given; i++) {
    describe(&tensors[i], tensor(op, stack, i));
    if (call.index < 0 && tensors[i].handle && tensors[i].device == 1) call.index = tensors[i].index;
    if (op->writes) inference |= changes_inference(op, stack, i);
  }
  if (inference && !api.inference_mode()) { /* Python raises */
    call_python(op, stack, given, returned);
    return;
  }
  List *lists = 0;
  if (op->lists) {
    call.lists = lists = describe_lists(op, stack, given, &call.index);
    if (!lists) {
      call_python(op, stack, given, returned);
      return;
    }
  }
  if (op->cuda) {
    i32 current = call.index;
    api.get_current_device_index(&current);
    if (current != call.index) api.create_device_guard(call.index, &guard);
    api.get_current_cuda_stream(call.index, &call.stream);
  }
  i32 code = try_programs(op, &call);
  if (guard) api.delete_device_guard(guard);
  if (lists) free(lists);
  if (code == BROKEN && !op->writes) code = FAILED; /* nothing was changed: Python may answer */
  if (code == MISS || code == FAILED) {
    __atomic_fetch_add(&op->misses, 1, __ATOMIC_RELAXED);
    call_python(op, stack, given, returned);
    return;
  }
  for (u64 i = 0; i < given; i++)
    if ((op->kinds[i] | 32) == 'w' && tensors[i].handle) changed(tensors[i].handle, inference);
    else if (op->kinds[i] == 'V')
      for (u64 at = listed(op, stack, i); at--;) changed(item(stack, i, at), inference);
  drop(op, stack, given);
  if (code == RAISED) raise_of_kernel(op);
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
    call_python(op, stack, given, returned);
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

/* Make trampolines jump here. They load this address with acquire order, so that they find the tables filled. */
void jitkern_lead(void (**entry)(u64 *, u64, u64, u32)) { __atomic_store_n(entry, jitkern_enter, __ATOMIC_RELEASE); }

/* ------------------------------------------------------------------ functions for binding.py */

void jitkern_bind(void *const *table, u64 bytes) {
  __builtin_memcpy(&api, table, bytes);
  if (!is_bound) pthread_key_create(&at_exit, free_own);
  is_bound = 1;
}

/* Set what the Autograd key must know of this Torch; see the variables. */
void jitkern_autograd(const void *undefined_tensor, i64 at, u64 plain, const u32 *keys) {
  undefined = undefined_tensor, keys_at = at, plain_keys = plain;
  for (u64 i = 0; keys[i] && i < sizeof watching / sizeof *watching - 1; i++) watching[i] = keys[i];
}

/* Let `recorder` (recorder.cpp) record calls of an op at the Autograd key, with this gradient; 0: Python does.
   Called under a lock, and always with this recorder, or 0 where there is no gradient yet. */
void jitkern_record(i32 slot, void *recorder, const void *gradient) {
  if (!record) *(void **)&record = recorder;
  __atomic_store_n(&ops[slot].gradient, gradient, __ATOMIC_RELEASE);
}

void jitkern_backends(i32 slot, i32 cpu, i32 cuda) {
  ops[slot].backend[0] = cpu, ops[slot].backend[1] = cuda;
}

/* Declare the slot of an op at one dispatch key, before its trampoline leads here. */
void jitkern_declare(i32 slot, const char *kinds, const char *results, const char *name,
                     const char *fallback, i32 cuda, i32 autograd) {
  Op *op = &ops[slot];
  snprintf(op->kinds, sizeof op->kinds, "%s", kinds);
  snprintf(op->results, sizeof op->results, "%s", results);
  op->lists = op->writes = op->boxes = 0;
  for (; *kinds; kinds++) {
    op->writes |= (*kinds | 32) == 'w' || *kinds == 'V';
    for (const char *kind = "LVndzsNDZS"; *kind; kind++) op->lists |= *kinds == *kind;
  }
  for (; *results; results++) op->boxes |= *results == 't';
  snprintf(op->name, sizeof op->name, "%s", name);
  snprintf(op->fallback, sizeof op->fallback, "%s", fallback);
  op->cuda = cuda, op->autograd = autograd, op->backend[0] = op->backend[1] = -1;
}

/* Add a program, at the place that is given, or else (-1) at a free one; it replaces the program that
   served longest ago if all places are taken. Return the place, or -1 for a program that is none.
   Called under a lock. A thread may run the replaced program until jitkern_quiet says otherwise. */
i32 jitkern_append(i32 slot, LoadedProgram *loaded, i32 given) {
  Op *op = &ops[slot];
  if (!is_sound(loaded->program, loaded->kernels, op->kinds, op->results, op->cuda)) return -1;
  i32 place = given < 0 ? op->count : given, last = __atomic_load_n(&op->last, __ATOMIC_RELAXED), oldest = 0;
  loaded->generation = op->generation, loaded->used = tick(op);
  for (i32 i = 0; given < 0 && i < op->count; i++) {
    i32 gone = op->programs[i]->generation != op->generation;
    i32 age = loaded->used - __atomic_load_n(&op->programs[i]->used, __ATOMIC_RELAXED);
    if (gone || (op->count == PROGRAMS && i != last && (place == PROGRAMS || age > oldest)))
      place = i, oldest = age;
    if (gone) break;
  }
  __atomic_store_n(&op->programs[place], loaded, __ATOMIC_SEQ_CST);
  if (place == op->count) __atomic_store_n(&op->count, place + 1, __ATOMIC_RELEASE);
  return place;
}

/* Return whether no call uses a program that was replaced before the last time that this returned 1.
   Calls count by a parity, which changes then: those of the other parity end while no new ones begin.
   Called under a lock. */
i32 jitkern_quiet(i32 slot) {
  Op *op = &ops[slot];
  if (__atomic_load_n(&op->calls[1 - op->parity], __ATOMIC_SEQ_CST)) return 0;
  __atomic_store_n(&op->parity, 1 - op->parity, __ATOMIC_SEQ_CST);
  return 1;
}

/* Stop all present programs of a slot. */
void jitkern_forget(i32 slot) { __atomic_fetch_add(&ops[slot].generation, 1, __ATOMIC_RELAXED); }

/* Return the version of a namespace whose changes Python reports; 0 if there is no more room.
   Called under a lock. */
const u64 *jitkern_watch(void *namespace) {
  for (i32 i = 0; i < watched_count; i++)
    if (watched_namespaces[i] == namespace) return &versions[i];
  if (watched_count == NAMESPACES) return 0;
  watched_namespaces[watched_count] = namespace;
  __atomic_store_n(&watched_count, watched_count + 1, __ATOMIC_RELEASE); /* jitkern_changed takes no lock */
  return &versions[watched_count - 1];
}

/* The callback for PyDict_AddWatcher: raise the version of a changed namespace. */
i32 jitkern_changed(i32 event, void *namespace, void *name, void *value) {
  (void)event, (void)name, (void)value;
  i32 count = __atomic_load_n(&watched_count, __ATOMIC_ACQUIRE);
  for (i32 i = 0; i < count; i++)
    if (watched_namespaces[i] == namespace) __atomic_fetch_add(&versions[i], 1, __ATOMIC_RELEASE);
  return 0;
}

void jitkern_to_python(i32 all) { __atomic_store_n(&all_to_python, all, __ATOMIC_RELAXED); }
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
