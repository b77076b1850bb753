// SPDX-License-Identifier: Apache-2.0
// Counts the bytes that tensors lie on, now and at most: a tracker that knows nothing of the library.
//
// Loaded before a program (LD_PRELOAD), it stands before the two doors through which MindSpore's CPU backend and NumPy get
// memory of a tensor: MindSpore's pool, of which results of ops are parts, and malloc. Of malloc only what NumPy and
// MindSpore's tensors ask for counts: kernels take memory of their own (oneDNN's, a vector within a kernel), compilers too.
// What lies in shared memory `heap.py` tells.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

#define LEAST 4096  // of malloc: smaller pieces are Python's objects
#define PLACES (1 << 20)
#define LONGEST (1 << 21)

typedef struct { void *at; long size; } Piece;
typedef struct { void *at; long size; int mark; const char *who; } Change;
static Piece pieces[PLACES];  // of what counts; open addressing
static Change changes[LONGEST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long now, most;
static int kept, recording, mark;
static void *GONE = (void *)1;
static _Thread_local int in_pool;  // what the pool itself asks for is counted as it hands it out

// The table takes its pages before anything is measured.
__attribute__((constructor)) static void begin(void) {
    for (size_t i = 0; i < PLACES; i += 4096 / sizeof(Piece)) *(volatile long *)&pieces[i].size = 0;
}

static size_t place(void *at) { return (((size_t)at >> 4) * 0x9E3779B97F4A7C15u) >> 44; }

static void note(void *at, long size, const char *who) {
    now += size;
    if (now > most) most = now;
    if (recording && kept < LONGEST) changes[kept++] = (Change){at, size, mark, who};
}

static void begins(void *at, long size, const char *who) {
    pthread_mutex_lock(&lock);
    size_t i = place(at);
    while (pieces[i].at && pieces[i].at != GONE) i = (i + 1) % PLACES;
    pieces[i] = (Piece){at, size};
    note(at, size, who);
    pthread_mutex_unlock(&lock);
}

static void ends(void *at) {
    pthread_mutex_lock(&lock);
    for (size_t i = place(at); pieces[i].at; i = (i + 1) % PLACES)
        if (pieces[i].at == at) {
            pieces[i].at = GONE;
            note(at, -pieces[i].size, "");
            break;
        }
    pthread_mutex_unlock(&lock);
}

// -- malloc ---------------------------------------------------------------------------------------------------------
static const char *const OWNERS[] = {"_multiarray_umath", "libmindspore_core", NULL};

static const char *owner(void *caller) {
    Dl_info info;
    if (!dladdr(caller, &info) || !info.dli_fname) return NULL;
    const char *name = strrchr(info.dli_fname, '/');
    name = name ? name + 1 : info.dli_fname;
#ifdef ANYONE
    return name;
#endif
    for (int i = 0; OWNERS[i]; i++)
        if (strstr(name, OWNERS[i])) return name;
    return NULL;
}

static void *born(void *at, void *caller) {
    if (at && !in_pool && malloc_usable_size(at) >= LEAST) {
        const char *who = owner(caller);
        if (who) begins(at, (long)malloc_usable_size(at), who);
    }
    return at;
}
static void dies(void *at) {
    if (at && !in_pool && malloc_usable_size(at) >= LEAST) ends(at);
}

static void *(*real_malloc)(size_t), *(*real_realloc)(void *, size_t), *(*real_calloc)(size_t, size_t);
static void *(*real_memalign)(size_t, size_t);
static void (*real_free)(void *);
static char early[65536];  // for what dlsym itself asks for
static size_t early_used;

static void find(void) {
    static int within;
    if (real_malloc || within) return;
    within = 1;
    real_free = dlsym(RTLD_NEXT, "free");
    real_calloc = dlsym(RTLD_NEXT, "calloc");
    real_realloc = dlsym(RTLD_NEXT, "realloc");
    real_memalign = dlsym(RTLD_NEXT, "memalign");
    real_malloc = dlsym(RTLD_NEXT, "malloc");
    within = 0;
}
static int is_early(void *at) { return (char *)at >= early && (char *)at < early + sizeof early; }
static void *from_early(size_t size) {
    void *at = early + early_used;
    early_used += (size + 15) & ~(size_t)15;
    return early_used <= sizeof early ? at : NULL;
}
static void *taken(size_t size, void *caller) {
    find();
    return real_malloc ? born(real_malloc(size), caller) : from_early(size);
}
static void *aligned(size_t align, size_t size, void *caller) {
    find();
    return born(real_memalign(align, size), caller);
}

#define CALLER __builtin_return_address(0)
void *malloc(size_t size) { return taken(size, CALLER); }
void *_Znwm(size_t size) { return taken(size, CALLER); }  // operator new
void *_Znam(size_t size) { return taken(size, CALLER); }  // operator new[]
void *memalign(size_t align, size_t size) { return aligned(align, size, CALLER); }
void *aligned_alloc(size_t align, size_t size) { return aligned(align, size, CALLER); }
int posix_memalign(void **out, size_t align, size_t size) { return (*out = aligned(align, size, CALLER)) ? 0 : 12; }
void *calloc(size_t n, size_t size) {
    find();
    return real_malloc ? born(real_calloc(n, size), CALLER) : from_early(n * size);
}
void *realloc(void *at, size_t size) {
    find();
    if (is_early(at)) {
        void *to = malloc(size);
        if (to) memcpy(to, at, size);
        return to;
    }
    dies(at);
    return born(real_realloc(at, size), CALLER);
}
void free(void *at) {
    if (!at || is_early(at)) return;
    find();
    dies(at);
    real_free(at);
}

// -- MindSpore's pool: virtual methods, so the table of its class finds these first ------------------------------------
static void *pool_symbol(const char *name) {
    void *library = dlopen("libmindspore_memory_pool.so", RTLD_NOLOAD | RTLD_LAZY);
    return library ? dlsym(library, name) : NULL;
}
typedef void *Take(void *, size_t, char, char, unsigned);
typedef void Give(void *, void *const *);

static void *take(Take *real, void *pool, size_t size, char a, char b, unsigned c) {
    in_pool++;
    void *at = real(pool, size, a, b, c);
    if (!--in_pool && at) begins(at, (long)size, "pool");
    return at;
}
static void give(Give *real, void *pool, void *const *at) {
    if (!in_pool) ends(*at);
    in_pool++;
    real(pool, at);
    in_pool--;
}
#define TAKE(symbol) void *symbol(void *pool, size_t size, char a, char b, unsigned c) { \
    static Take *real; if (!real) real = pool_symbol(#symbol); return take(real, pool, size, a, b, c); }
#define GIVE(symbol) void symbol(void *pool, void *const *at) { \
    static Give *real; if (!real) real = pool_symbol(#symbol); give(real, pool, at); }
TAKE(_ZN9mindspore6device21DynamicMemPoolBestFit14AllocTensorMemEmbbj)
TAKE(_ZTv0_n48_N9mindspore6device21DynamicMemPoolBestFit14AllocTensorMemEmbbj)
GIVE(_ZN9mindspore6device21DynamicMemPoolBestFit13FreeTensorMemERKPv)
GIVE(_ZTv0_n64_N9mindspore6device21DynamicMemPoolBestFit13FreeTensorMemERKPv)

void heap_begins(long at, long size) { begins((void *)at, size, "arena"); }  // of memory from elsewhere
void heap_ends(long at) { ends((void *)at); }

// -- for who measures -------------------------------------------------------------------------------------------------
long heap_now(void) { return now; }
long heap_most(void) { return most; }
void heap_again(void) { most = now; }
void heap_record(int on) { recording = on; if (on) kept = 0; }
int heap_changes(void) { return kept; }
Change *heap_list(void) { return changes; }
void heap_mark(int at) { mark = at; }
