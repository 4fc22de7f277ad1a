/* Pasted below the text of the runtime, and compiled with -fsanitize=thread: threads call an op while the main thread
   loads the runtime, appends programs, and changes all that a call reads without a lock. */
#include <pthread.h>
#include <stdlib.h>

enum { CALLERS = 3, APPENDED = PROGRAMS + 10, HITS = 50 };

static void (*entry)(u64 *, u64, u64, u32); /* what a trampoline jumps to */
static pthread_mutex_t interpreter = PTHREAD_MUTEX_INITIALIZER;
static long hits[CALLERS];
static int done;

static i32 ensure(void) { return pthread_mutex_lock(&interpreter); }
static void let_go(i32 state) { pthread_mutex_unlock(&interpreter), (void)state; }
static void *value_of(void *namespace, void *name) { return (void)namespace, name; }
static i32 ask(const char *name, const char *overload, u64 *stack) { return (void)name, (void)overload, stack[0] = 0; }
static void no_runtime(u64 *stack, u64 given, u64 returned, u32 number) {
  (void)given, (void)returned, stack[0] = number;
}
static i32 empty(i64 rank, const i64 *size, const i64 *stride, i32 dtype, i32 device, i32 index, Handle *made) {
  (void)rank, (void)size, (void)stride, (void)dtype, (void)device, (void)index;
  return *made = (Handle)1, 0;
}
static i32 data_of(Handle of, char **data) { return *data = of, 0; }

/* Serve calls with the number of the first constant, with a workspace and a new tensor. */
static const i32 steps[] = {
    NUMBER, 2, 2, 0, EQUAL, 3, 2, 0, 1, WORKSPACE, 3, 3, 1, 0, ALLOCATE, 3, 4, 0, 6, RETURN, 2, 0, -1,
};

static void *call(void *at) {
  long *count = at;
  for (u64 i = 0; !__atomic_load_n(&done, __ATOMIC_RELAXED); i++) {
    u64 stack[1] = {i % APPENDED};
    __atomic_load_n(&entry, __ATOMIC_ACQUIRE)(stack, 1, 1, 0);
    __atomic_fetch_add(count, stack[0] == 1, __ATOMIC_RELAXED);
  }
  return 0;
}

/* Wait until each caller was served so many times more. */
static void await(long more) {
  for (int i = 0; i < CALLERS; i++) {
    long until = __atomic_load_n(&hits[i], __ATOMIC_RELAXED) + more;
    while (__atomic_load_n(&hits[i], __ATOMIC_RELAXED) < until) sched_yield();
  }
}

static LoadedProgram *made(u64 number, const u64 *version, void *namespace) {
  Word *words = malloc(2 * sizeof *words);
  Binding *bound = malloc(sizeof *bound);
  Scope *scope = malloc(sizeof *scope);
  LoadedProgram *loaded = calloc(1, sizeof *loaded);
  Program *program = malloc(sizeof *program);
  u64 *fixed = malloc(2 * sizeof *fixed);
  fixed[0] = number, fixed[1] = 64;
  *program = (Program){.words = steps, .constants = fixed, .length = sizeof steps / sizeof *steps, .fixed = 2,
                       .registers = 5, .owned = 1};
  words[0] = (Word){fixed, number}, words[1] = (Word){version, *version};
  *bound = (Binding){namespace, bound, bound, 0};
  *scope = (Scope){1, 1, 1, words, bound};
  *loaded = (LoadedProgram){.program = program, .scope = scope};
  return loaded;
}

int main(void) {
  pthread_t callers[CALLERS];
  static char namespaces[APPENDED];
  entry = no_runtime;
  for (int i = 0; i < CALLERS; i++) pthread_create(&callers[i], 0, call, &hits[i]);
  Api table = {.call_dispatcher = ask, .PyGILState_Ensure = ensure, .PyGILState_Release = let_go,
               .PyDict_GetItemWithError = value_of, .empty_strided = empty, .get_data_ptr = data_of};
  jitkern_bind((void *const *)&table, sizeof table);
  jitkern_declare(0, "i", "T", "test::op", "test::sibling", 0, 0);
  jitkern_lead(&entry);
  for (u64 i = 0; i < APPENDED; i++) {
    void *namespace = &namespaces[i];
    const u64 *version = jitkern_watch(namespace);
    jitkern_append(0, made(i, version, namespace), -1);
    if (i % 16 == 0) await(1);
    ensure();
    jitkern_changed(0, namespace, 0, 0);
    let_go(0);
    jitkern_workspace(0, namespace, 0, malloc(64), 64);
  }
  jitkern_to_python(1);
  jitkern_to_python(0);
  await(HITS);
  jitkern_forget(0);
  jitkern_append(0, made(0, jitkern_watch(namespaces), namespaces), -1);
  await(HITS);
  __atomic_store_n(&done, 1, __ATOMIC_RELAXED);
  for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], 0);
  return jitkern_misses(0) == 0;
}
