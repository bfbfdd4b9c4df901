/* A stand-in for libcuda.so.1: NVIDIA's driver needs a GPU, and these tests none.

   "Device" memory is a memfd of the process that allocated it, so that others really share it. The first page of each
   holds who has it open. What the driver leaves undefined or forbids ends the process with a sentence in the file that
   STANDIN_LOG names: freeing twice, freeing what a living process has open, closing what is not open, copying past the
   end, calls without a context. A copy is complete only after cuCtxSynchronize or the next call of the stream.

   STANDIN_TOTAL    bytes of a device (default 256 MiB)
   STANDIN_DEVICES  how many there are (default 1)
   STANDIN_GONE     a file; once it is there, the device is lost: every call fails
   STANDIN_REFUSES  name of a call that fails, with the code after a colon: cuIpcGetMemHandle:801
   CUDA_VISIBLE_DEVICES  one number: the first device is that one */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096
#define SLOTS 1000
#define MOST 4096
typedef struct { char reserved[64]; } Handle;
typedef struct { uint32_t magic; int32_t pid, fd; uint64_t size, serial; } Told;
typedef struct { char *base; uint64_t size, serial; int fd; int mine; } Memory;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Memory memories[MOST];
static uint64_t used, serials;
static pid_t initialised;
static __thread int current;
static char *late_to;
static char late[64];
static uint64_t late_size;

static void violated(const char *what) {
    const char *path = getenv("STANDIN_LOG");
    FILE *file = path ? fopen(path, "a") : stderr;
    if (file) { fprintf(file, "stand-in, process %d: %s\n", getpid(), what); fclose(file); }
    abort();
}

static int refused(const char *call) {
    const char *gone = getenv("STANDIN_GONE");
    if (gone && !access(gone, F_OK)) return 719;
    const char *told = getenv("STANDIN_REFUSES");
    size_t length = strlen(call);
    return told && !strncmp(told, call, length) && told[length] == ':' ? atoi(told + length + 1) : 0;
}

#define BEGIN(name) do { int code = refused(name); if (code) return code; \
    if (initialised != getpid()) return 3; } while (0)
#define IN_CONTEXT(name) do { BEGIN(name); if (!current) return 201; } while (0)

static void settle(void) {
    if (late_to) memcpy(late_to, late, late_size);
    late_to = NULL;
}

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *told = getenv(name);
    return told ? strtoull(told, NULL, 10) : otherwise;
}

static int has_ended(pid_t pid) {
    char path[64], state = 'Z', line[512], *at;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 1;
    if (fgets(line, sizeof line, file) && (at = strrchr(line, ')'))) state = at[2];
    fclose(file);
    return state == 'Z' || state == 'X';
}

static Memory *of(uint64_t address) {
    for (int at = 0; at < MOST; at++) {
        Memory *each = &memories[at];
        uint64_t start = (uint64_t)each->base + PAGE;
        if (each->base && address >= start && address < start + each->size) return each;
    }
    return NULL;
}

static Memory *unused(void) {
    for (int at = 0; at < MOST; at++) if (!memories[at].base) return &memories[at];
    violated("too many allocations for the stand-in");
    return NULL;
}

int cuInit(unsigned flags) {
    int code = refused("cuInit");
    if (code) return code;
    if (initialised && initialised != getpid()) return 3; /* a child that was forked */
    initialised = getpid();
    return flags ? 1 : number("STANDIN_DEVICES", 1) ? 0 : 100;
}

int cuGetErrorName(int code, const char **text) {
    static char name[32];
    snprintf(name, sizeof name, "CUDA_ERROR_%d", code);
    *text = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 3 ? "CUDA_ERROR_NOT_INITIALIZED"
        : code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : name;
    return 0;
}

int cuDeviceGetCount(int *count) { BEGIN("cuDeviceGetCount"); *count = (int)number("STANDIN_DEVICES", 1); return 0; }
int cuDeviceGet(int *device, int ordinal) { BEGIN("cuDeviceGet"); *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    BEGIN("cuDeviceGetName");
    snprintf(name, (size_t)size, "stand-in %d, no GPU", device);
    return 0;
}
int cuDeviceGetUuid_v2(char *uuid, int device) {
    BEGIN("cuDeviceGetUuid_v2");
    memset(uuid, 0x5a, 16);
    uuid[0] = (char)(device + (int)number("CUDA_VISIBLE_DEVICES", 0));
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    BEGIN("cuDevicePrimaryCtxRetain");
    *context = (void *)(intptr_t)(device + 1);
    return 0;
}
int cuCtxPushCurrent_v2(void *context) { BEGIN("cuCtxPushCurrent_v2"); if (!context) return 201; current++; return 0; }
int cuCtxPopCurrent_v2(void **context) {
    BEGIN("cuCtxPopCurrent_v2");
    if (!current) return 201;
    current--;
    *context = NULL;
    return 0;
}
int cuCtxSynchronize(void) {
    IN_CONTEXT("cuCtxSynchronize");
    pthread_mutex_lock(&lock);
    settle();
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    IN_CONTEXT("cuMemGetInfo_v2");
    *total = number("STANDIN_TOTAL", 256u << 20);
    *free = *total > used ? *total - used : 0;
    return 0;
}

int cuMemAlloc_v2(uint64_t *address, size_t size) {
    IN_CONTEXT("cuMemAlloc_v2");
    if (!size) return 1;
    pthread_mutex_lock(&lock);
    if (used + size > number("STANDIN_TOTAL", 256u << 20)) { pthread_mutex_unlock(&lock); return 2; }
    int fd = memfd_create("stand-in-device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)(size + PAGE))) violated("the stand-in has no memory");
    char *base = mmap(NULL, size + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) violated("the stand-in has no memory");
    *unused() = (Memory){base, size, ++serials, fd, 1};
    used += size;
    *address = (uint64_t)base + PAGE;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuMemFree_v2(uint64_t address) {
    IN_CONTEXT("cuMemFree_v2");
    pthread_mutex_lock(&lock);
    settle();
    Memory *found = of(address);
    if (!found || !found->mine || address != (uint64_t)found->base + PAGE) violated("freed what is not allocated: a double free");
    int32_t *pids = (int32_t *)found->base;
    for (int at = 0; at < SLOTS; at++)
        if (pids[at] && !has_ended(pids[at])) violated("freed while another process has it open");
    memset(found->base, 0xdd, found->size + PAGE); /* who reads it now sees that it was freed */
    munmap(found->base, found->size + PAGE);
    close(found->fd);
    used -= found->size;
    found->base = NULL;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
    IN_CONTEXT("cuMemcpyHtoD_v2");
    pthread_mutex_lock(&lock);
    settle();
    Memory *found = of(to);
    if (!found || to + size > (uint64_t)found->base + PAGE + found->size) violated("copied past the end");
    late_size = size < sizeof late ? size : sizeof late;
    memcpy((char *)to, from, size - late_size);
    late_to = (char *)to + size - late_size;
    memcpy(late, (const char *)from + size - late_size, late_size);
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    IN_CONTEXT("cuMemcpyDtoH_v2");
    pthread_mutex_lock(&lock);
    settle();
    Memory *found = of(from);
    if (!found || from + size > (uint64_t)found->base + PAGE + found->size) violated("copied past the end");
    memcpy(to, (const char *)from, size);
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
    IN_CONTEXT("cuIpcGetMemHandle");
    pthread_mutex_lock(&lock);
    Memory *found = of(address);
    if (!found || !found->mine || address != (uint64_t)found->base + PAGE) { pthread_mutex_unlock(&lock); return 400; }
    Told told = {0x57a2d1, getpid(), found->fd, found->size, found->serial};
    memset(handle, 0x33, sizeof *handle);
    memcpy(handle, &told, sizeof told);
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
    IN_CONTEXT("cuIpcOpenMemHandle_v2");
    Told told;
    char path[64];
    memcpy(&told, &handle, sizeof told);
    if (flags != 1 || told.magic != 0x57a2d1 || handle.reserved[63] != 0x33) return 1;
    if (told.pid == getpid()) return 201; /* the driver: not in the process that shares it */
    pthread_mutex_lock(&lock);
    for (int at = 0; at < MOST; at++)
        if (memories[at].base && !memories[at].mine && memories[at].serial == told.serial && memories[at].fd == told.pid)
            violated("opened twice in one process");
    snprintf(path, sizeof path, "/proc/%d/fd/%d", told.pid, told.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) { pthread_mutex_unlock(&lock); return 205; }
    char *base = mmap(NULL, told.size + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED) { pthread_mutex_unlock(&lock); return 205; }
    int32_t *pids = (int32_t *)base;
    int at = 0;
    for (; at < SLOTS; at++) {
        int32_t other = pids[at];
        if ((!other || has_ended(other)) && __sync_bool_compare_and_swap(&pids[at], other, getpid())) break;
    }
    if (at == SLOTS) violated("open in too many processes for the stand-in");
    *unused() = (Memory){base, told.size, told.serial, told.pid, 0};
    *address = (uint64_t)base + PAGE;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuIpcCloseMemHandle(uint64_t address) {
    IN_CONTEXT("cuIpcCloseMemHandle");
    pthread_mutex_lock(&lock);
    Memory *found = of(address);
    if (!found || found->mine || address != (uint64_t)found->base + PAGE) violated("closed what is not open");
    int32_t *pids = (int32_t *)found->base;
    int32_t self = getpid();
    for (int at = 0; at < SLOTS; at++) if (__sync_bool_compare_and_swap(&pids[at], self, 0)) break;
    munmap(found->base, found->size + PAGE);
    found->base = NULL;
    pthread_mutex_unlock(&lock);
    return 0;
}
