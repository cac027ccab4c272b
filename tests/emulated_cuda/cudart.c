/* CUDA's runtime library on the CPU, loaded before the real one (LD_PRELOAD) under a CUDA build of PyTorch.
 *
 * - Device memory is host memory, poisoned when it is allocated; each device has EMULATED_CUDA_MB of it.
 * - A stream is a thread, which runs what it is given in order and late: before each piece of work it sleeps
 *   for a random time of at most EMULATED_CUDA_MAX_DELAY_US. Only events order two streams.
 * - Pinned memory is read when the copy runs, pageable memory before the call returns, as CUDA does it.
 * - Registering host memory fails as CUDA documents it, and a failed call leaves its error pending.
 * - Kernels do nothing, except the one of torch.cuda._sleep; kernels.py gives torch's operators their values.
 * - What a GPU would do silently ends the process with a message: a copy from or into memory that is gone,
 *   memory unregistered while a copy from it is pending, or unmapped while it is registered.
 *
 * Functions that are not here are the real library's, and fail because there is no driver. One long file,
 * because all of it shares one lock and the lists under it. */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define UNUSED(x) (void)(x)

enum { MAX_DEVICES = 8, POISON = 0xA5, POISON_BYTES = 4 << 20, CONTEXT_BYTES = 64 << 20 };

typedef struct Range { /* of memory that the runtime knows */
    struct Range *next;
    char *start;
    size_t nbytes;
    enum cudaMemoryType type;
    int device, is_registered;
} Range;

typedef struct Event {
    uint64_t recorded, reached; /* how often */
    double reached_s;
} Event;

typedef struct Work {
    struct Work *next;
    enum { COPY, FILL, RECORD, WAIT, CALL, SLEEP } kind;
    char *to;
    const char *from;
    size_t nbytes;
    int value, is_to_known, is_from_known;
    void *staged; /* of pageable memory; freed when the copy has run */
    Event *event;
    uint64_t generation; /* of the event */
    cudaHostFn_t function;
    void *argument;
    double seconds;
} Work;

typedef struct Stream {
    struct Stream *next;
    Work *first, *last;
    uint64_t num_given, num_done;
    int device, priority;
    unsigned seed;
} Stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* for all that follows */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Range *ranges;
static Stream *streams, *default_streams[MAX_DEVICES];
static size_t used_bytes[MAX_DEVICES], total_bytes;
static int num_devices, max_delay_us, has_context[MAX_DEVICES];
static pid_t owner;

static __thread int current;
static __thread cudaError_t pending;

static void take_lock(void) { pthread_mutex_lock(&lock); }
static void leave_lock(void) { pthread_mutex_unlock(&lock); }

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

__attribute__((constructor)) static void start(void) {
    num_devices = number("EMULATED_CUDA_DEVICES", 2);
    max_delay_us = number("EMULATED_CUDA_MAX_DELAY_US", 300);
    total_bytes = (size_t)number("EMULATED_CUDA_MB", 2048) << 20;
    pthread_atfork(take_lock, leave_lock, leave_lock);
}

static cudaError_t report(cudaError_t error) {
    if (error != cudaSuccess) pending = error;
    return error;
}

/* Whether this process may use the devices: one that was forked from a user of them may not. */
static int make_context(void) {
    if (!owner) owner = getpid();
    if (!has_context[current]) used_bytes[current] += CONTEXT_BYTES;
    has_context[current] = 1;
    return owner == getpid();
}

#define ENTER                                            \
    take_lock();                                         \
    if (!make_context()) {                               \
        leave_lock();                                    \
        return report(cudaErrorInitializationError);     \
    }
#define LEAVE(error)                                     \
    do {                                                 \
        cudaError_t error_ = (error);                    \
        leave_lock();                                    \
        return report(error_);                           \
    } while (0)

static void die(const char *what, const void *where, size_t nbytes) {
    fprintf(stderr, "emulated CUDA: %s: %p, %zu bytes\n", what, where, nbytes);
    fflush(stderr);
    abort();
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void sleep_s(double s) {
    struct timespec t = {(time_t)s, (long)((s - (time_t)s) * 1e9)};
    nanosleep(&t, NULL);
}

/* --- streams ------------------------------------------------------------------------------------------- */

static Range *range_of(const void *where) {
    for (Range *range = ranges; range; range = range->next)
        if ((char *)where >= range->start && (char *)where < range->start + range->nbytes) return range;
    return NULL;
}

static void run(Stream *stream, Work *work) {
    if (work->kind == WAIT) {
        take_lock();
        while (work->event->reached < work->generation) pthread_cond_wait(&changed, &lock);
        leave_lock();
        return;
    }
    if (max_delay_us && work->kind != RECORD) sleep_s((rand_r(&stream->seed) % max_delay_us) * 1e-6);
    take_lock();
    size_t nbytes = work->nbytes;
    if (work->is_to_known && !range_of(work->to)) die("a copy into memory that is gone", work->to, nbytes);
    if (work->is_from_known && !range_of(work->from)) die("a copy from memory that is gone", work->from, nbytes);
    leave_lock();
    if (work->kind == COPY) memcpy(work->to, work->from, work->nbytes);
    if (work->kind == FILL) memset(work->to, work->value, work->nbytes);
    if (work->kind == CALL) work->function(work->argument);
    if (work->kind == SLEEP) sleep_s(work->seconds);
    free(work->staged);
}

static void *serve(void *argument) {
    Stream *stream = argument;
    take_lock();
    for (;;) {
        while (!stream->first) pthread_cond_wait(&changed, &lock);
        Work *work = stream->first;
        leave_lock();
        run(stream, work);
        take_lock();
        if (work->kind == RECORD) {
            if (work->event->reached < work->generation) work->event->reached = work->generation;
            work->event->reached_s = now_s();
        }
        stream->first = work->next;
        if (!stream->first) stream->last = NULL;
        stream->num_done++;
        free(work);
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

static Stream *make_stream(int priority) {
    Stream *stream = calloc(1, sizeof *stream);
    *stream = (Stream){.next = streams, .device = current, .priority = priority};
    stream->seed = (unsigned)(uintptr_t)stream;
    streams = stream;
    pthread_t thread;
    pthread_create(&thread, NULL, serve, stream);
    pthread_detach(thread);
    return stream;
}

static Stream *stream_of(cudaStream_t handle) {
    if (handle > cudaStreamPerThread) return (Stream *)handle;
    if (!default_streams[current]) default_streams[current] = make_stream(0);
    return default_streams[current];
}

static void give(Stream *stream, Work work) {
    Work *kept = malloc(sizeof *kept);
    *kept = work;
    kept->next = NULL;
    if (stream->last) stream->last->next = kept;
    else stream->first = kept;
    stream->last = kept;
    stream->num_given++;
    pthread_cond_broadcast(&changed);
}

static void drain(Stream *stream) {
    uint64_t until = stream->num_given;
    while (stream->num_done < until) pthread_cond_wait(&changed, &lock);
}

static void drain_device(int device) {
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->device == device) drain(stream);
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    UNUSED(flags);
    ENTER;
    *stream = (cudaStream_t)make_stream(priority);
    LEAVE(cudaSuccess);
}
API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    UNUSED(stream); /* kept: work may be under way */
    return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    ENTER;
    *priority = stream_of(stream)->priority;
    LEAVE(cudaSuccess);
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
    ENTER;
    Stream *stream = stream_of(handle);
    LEAVE(stream->num_done == stream->num_given ? cudaSuccess : cudaErrorNotReady);
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER;
    drain(stream_of(stream));
    LEAVE(cudaSuccess);
}
API cudaError_t cudaDeviceSynchronize(void) {
    ENTER;
    drain_device(current);
    LEAVE(cudaSuccess);
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags) {
    UNUSED(flags);
    ENTER;
    Event *event = (Event *)handle;
    give(stream_of(stream), (Work){.kind = WAIT, .event = event, .generation = event->recorded});
    LEAVE(cudaSuccess);
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    ENTER;
    give(stream_of(stream), (Work){.kind = CALL, .function = function, .argument = argument});
    LEAVE(cudaSuccess);
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    UNUSED(stream);
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                         unsigned long long *id, cudaGraph_t *graph,
                                         const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                         size_t *num_dependencies) {
    UNUSED(stream), UNUSED(graph), UNUSED(dependencies), UNUSED(edges), UNUSED(num_dependencies);
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    UNUSED(mode);
    return cudaSuccess;
}

/* --- events -------------------------------------------------------------------------------------------- */

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    UNUSED(flags);
    ENTER;
    *event = (cudaEvent_t)calloc(1, sizeof(Event));
    LEAVE(cudaSuccess);
}
API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    UNUSED(event); /* kept: a stream may still come to it */
    return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    ENTER;
    Event *event = (Event *)handle;
    give(stream_of(stream), (Work){.kind = RECORD, .event = event, .generation = ++event->recorded});
    LEAVE(cudaSuccess);
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    UNUSED(flags);
    return cudaEventRecord(event, stream);
}
API cudaError_t cudaEventQuery(cudaEvent_t handle) {
    ENTER;
    Event *event = (Event *)handle;
    LEAVE(event->reached == event->recorded ? cudaSuccess : cudaErrorNotReady);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    ENTER;
    Event *event = (Event *)handle;
    uint64_t generation = event->recorded;
    while (event->reached < generation) pthread_cond_wait(&changed, &lock);
    LEAVE(cudaSuccess);
}
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    ENTER;
    *ms = (float)((((Event *)to)->reached_s - ((Event *)from)->reached_s) * 1e3);
    LEAVE(cudaSuccess);
}

/* --- memory -------------------------------------------------------------------------------------------- */

static void add_range(void *where, size_t nbytes, enum cudaMemoryType type, int is_registered) {
    Range *range = malloc(sizeof *range);
    *range = (Range){ranges, where, nbytes, type, current, is_registered};
    ranges = range;
}

static void drop_range(Range *gone) {
    Range **at = &ranges;
    while (*at != gone) at = &(*at)->next;
    *at = gone->next;
    free(gone);
}

static void *allocate(size_t nbytes, enum cudaMemoryType type) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *where = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (where == MAP_FAILED) die("mmap failed", NULL, nbytes);
    memset(where, POISON, nbytes < POISON_BYTES ? nbytes : POISON_BYTES);
    add_range(where, nbytes, type, 0);
    return where;
}

static cudaError_t deallocate(void *where, enum cudaMemoryType type) {
    ENTER;
    if (!where) LEAVE(cudaSuccess);
    Range *range = range_of(where);
    if (!range || range->start != where || range->type != type || range->is_registered)
        LEAVE(cudaErrorInvalidValue);
    for (int device = 0; device < num_devices; device++) drain_device(device);
    if (type == cudaMemoryTypeDevice) used_bytes[range->device] -= range->nbytes;
    munmap(range->start, range->nbytes);
    drop_range(range);
    LEAVE(cudaSuccess);
}

/* Whether all of it is mapped, and for writing if that is asked. */
static int is_mapped(const char *start, size_t nbytes, int for_writing) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], mode[8];
    uintptr_t at = (uintptr_t)start, end = at + nbytes, low, high;
    while (at < end && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %7s", &low, &high, mode) == 3 && low <= at && at < high) {
            if (for_writing && mode[1] != 'w') break;
            at = high;
        }
    fclose(maps);
    return at >= end;
}

API cudaError_t cudaMalloc(void **where, size_t nbytes) {
    ENTER;
    *where = NULL;
    if (used_bytes[current] + nbytes > total_bytes) LEAVE(cudaErrorMemoryAllocation);
    used_bytes[current] += nbytes;
    *where = allocate(nbytes, cudaMemoryTypeDevice);
    LEAVE(cudaSuccess);
}
API cudaError_t cudaHostAlloc(void **where, size_t nbytes, unsigned flags) {
    UNUSED(flags);
    ENTER;
    *where = allocate(nbytes, cudaMemoryTypeHost);
    LEAVE(cudaSuccess);
}
API cudaError_t cudaFree(void *where) { return deallocate(where, cudaMemoryTypeDevice); }
API cudaError_t cudaFreeHost(void *where) { return deallocate(where, cudaMemoryTypeHost); }
API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    ENTER;
    *total = total_bytes;
    *free_bytes = total_bytes - used_bytes[current];
    LEAVE(cudaSuccess);
}
API cudaError_t cudaHostRegister(void *where, size_t nbytes, unsigned flags) {
    ENTER;
    char *first = where;
    if (!first || !nbytes || !is_mapped(first, nbytes, !(flags & cudaHostRegisterReadOnly)))
        LEAVE(cudaErrorInvalidValue);
    for (Range *range = ranges; range; range = range->next)
        if (first < range->start + range->nbytes && range->start < first + nbytes)
            LEAVE(cudaErrorHostMemoryAlreadyRegistered);
    add_range(first, nbytes, cudaMemoryTypeHost, 1);
    LEAVE(cudaSuccess);
}

static int is_within(const char *where, const Range *range) {
    return where >= range->start && where < range->start + range->nbytes;
}

API cudaError_t cudaHostUnregister(void *where) {
    ENTER;
    Range *range = range_of(where);
    if (!range || range->start != where || !range->is_registered) LEAVE(cudaErrorHostMemoryNotRegistered);
    if (!is_mapped(range->start, range->nbytes, 0))
        die("memory was unmapped while it was registered", where, range->nbytes);
    for (Stream *stream = streams; stream; stream = stream->next)
        for (Work *work = stream->first; work; work = work->next)
            if ((work->is_to_known && is_within(work->to, range)) ||
                (work->is_from_known && is_within(work->from, range)))
                die("memory is unregistered while a copy is pending", where, range->nbytes);
    drop_range(range);
    LEAVE(cudaSuccess);
}
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *where) {
    ENTER;
    Range *range = range_of(where);
    int is_device = range && range->type == cudaMemoryTypeDevice;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = range ? range->type : cudaMemoryTypeUnregistered;
    attributes->device = range ? range->device : -2;
    attributes->devicePointer = range ? (void *)where : NULL;
    attributes->hostPointer = is_device ? NULL : (void *)where;
    LEAVE(cudaSuccess);
}

/* --- copies -------------------------------------------------------------------------------------------- */

static cudaError_t copy(void *to, const void *from, size_t nbytes, cudaStream_t handle, int must_wait) {
    ENTER;
    if (!nbytes) LEAVE(cudaSuccess);
    Stream *stream = stream_of(handle);
    Range *target = range_of(to), *source = range_of(from);
    if ((target && !is_within((char *)to + nbytes - 1, target)) ||
        (source && !is_within((char *)from + nbytes - 1, source)))
        LEAVE(cudaErrorInvalidValue);
    Work work = {.kind = COPY, .to = to, .from = from, .nbytes = nbytes};
    work.is_to_known = target != NULL;
    work.is_from_known = source != NULL;
    if (!source) {
        work.from = work.staged = malloc(nbytes);
        memcpy(work.staged, from, nbytes);
    }
    give(stream, work);
    if (!target || must_wait) drain(stream);
    LEAVE(cudaSuccess);
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind,
                                cudaStream_t stream) {
    UNUSED(kind);
    return copy(to, from, nbytes, stream, 0);
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind) {
    UNUSED(kind);
    return copy(to, from, nbytes, 0, 1);
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t nbytes,
                                    cudaStream_t stream) {
    UNUSED(to_device), UNUSED(from_device);
    return copy(to, from, nbytes, stream, 0);
}
API cudaError_t cudaMemsetAsync(void *to, int value, size_t nbytes, cudaStream_t stream) {
    ENTER;
    Work work = {.kind = FILL, .to = to, .value = value, .nbytes = nbytes, .is_to_known = 1};
    give(stream_of(stream), work);
    LEAVE(cudaSuccess);
}
API cudaError_t cudaMemset(void *to, int value, size_t nbytes) { return cudaMemsetAsync(to, value, nbytes, 0); }
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t nbytes, size_t offset,
                                   enum cudaMemcpyKind kind) {
    UNUSED(symbol), UNUSED(from), UNUSED(nbytes), UNUSED(offset), UNUSED(kind);
    return cudaSuccess;
}

/* --- devices and errors -------------------------------------------------------------------------------- */

API cudaError_t cudaGetDeviceCount(int *count) {
    *count = num_devices;
    return cudaSuccess;
}
API cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices) return report(cudaErrorInvalidDevice);
    current = device;
    ENTER; /* since CUDA 12 this makes the context */
    LEAVE(cudaSuccess);
}
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "Emulated CUDA");
    p->totalGlobalMem = total_bytes;
    p->major = 9;
    p->warpSize = 32;
    p->multiProcessorCount = 8;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxThreadsPerBlock = 1024;
    p->maxBlocksPerMultiProcessor = 32;
    p->sharedMemPerBlock = p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin = 49152;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->l2CacheSize = 1 << 20;
    p->textureAlignment = 512;
    for (int i = 0; i < 3; i++) {
        p->maxThreadsDim[i] = i < 2 ? 1024 : 64;
        p->maxGridSize[i] = i ? 65535 : 2147483647;
    }
    p->pciBusID = device;
    p->unifiedAddressing = p->canMapHostMemory = 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp p;
    cudaGetDeviceProperties(&p, device);
    *value = attribute == cudaDevAttrMultiProcessorCount               ? p.multiProcessorCount
             : attribute == cudaDevAttrMaxThreadsPerBlock              ? p.maxThreadsPerBlock
             : attribute == cudaDevAttrWarpSize                        ? p.warpSize
             : attribute == cudaDevAttrComputeCapabilityMajor          ? p.major
             : attribute == cudaDevAttrMaxSharedMemoryPerBlock         ? (int)p.sharedMemPerBlock
             : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin    ? (int)p.sharedMemPerBlockOptin
                                                                       : 0;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char *text, int nbytes, int device) {
    snprintf(text, nbytes, "0000:%02x:00.0", device);
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    UNUSED(device), UNUSED(peer);
    *can = 0;
    return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
API cudaError_t cudaGetLastError(void) {
    cudaError_t error = pending;
    pending = cudaSuccess;
    return error;
}
API cudaError_t cudaPeekAtLastError(void) { return pending; }

/* Whether the device was used; the driver's cuDevicePrimaryCtxGetState, which __main__.py puts where it is
 * looked up. */
API CUresult emulated_context_state(CUdevice device, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = has_context[device];
    return CUDA_SUCCESS;
}
static CUresult no_such_function(void) { return CUDA_ERROR_NOT_SUPPORTED; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                                 unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *status) {
    UNUSED(version), UNUSED(flags);
    int is_state = !strcmp(symbol, "cuDevicePrimaryCtxGetState");
    *function = is_state ? (void *)emulated_context_state : (void *)no_such_function;
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* --- kernels ------------------------------------------------------------------------------------------- */

typedef struct Kernel {
    struct Kernel *next;
    const void *host;
    const char *name;
} Kernel;

static Kernel *kernels[1 << 16]; /* by a hash of the host function */
static __thread struct {
    dim3 grid, block;
    size_t shared_bytes;
    void *stream;
} configuration;

static Kernel **bucket(const void *host) { return &kernels[((uintptr_t)host >> 4) & 0xFFFF]; }

static cudaError_t launch(const void *host, void **arguments, cudaStream_t stream) {
    ENTER;
    Kernel *kernel = *bucket(host);
    while (kernel && kernel->host != host) kernel = kernel->next;
    if (kernel && strstr(kernel->name, "spin_kernel")) { /* of torch.cuda._sleep: two cycles a nanosecond */
        int64_t cycles = *(int64_t *)arguments[0];
        give(stream_of(stream), (Work){.kind = SLEEP, .seconds = cycles * 0.5e-9});
    }
    LEAVE(cudaSuccess);
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                                   size_t shared_bytes, cudaStream_t stream) {
    UNUSED(grid), UNUSED(block), UNUSED(shared_bytes);
    return launch(kernel, arguments, stream);
}
API cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                                 size_t shared_bytes, cudaStream_t stream) {
    UNUSED(grid), UNUSED(block), UNUSED(shared_bytes);
    return launch(kernel, arguments, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    return launch(kernel, arguments, config->stream);
}
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
    *kernel = (cudaKernel_t)host;
    return cudaSuccess;
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared_bytes = shared_bytes;
    configuration.stream = stream;
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared_bytes = configuration.shared_bytes;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    UNUSED(kernel);
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) {
    UNUSED(kernel), UNUSED(attribute), UNUSED(value);
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *kernel, int block,
                                                                       size_t shared_bytes, unsigned flags) {
    UNUSED(kernel), UNUSED(block), UNUSED(shared_bytes), UNUSED(flags);
    *count = 2;
    return cudaSuccess;
}

/* What nvcc's start-up code calls for each module, function and variable of a library. */
API void **__cudaRegisterFatBinary(void *binary) { return binary; }
API void __cudaRegisterFatBinaryEnd(void **module) { UNUSED(module); }
API void __cudaUnregisterFatBinary(void **module) { UNUSED(module); }
API void __cudaRegisterVar(void **module, char *host, char *address, const char *name, int external,
                           size_t nbytes, int constant, int global) {
    UNUSED(module), UNUSED(host), UNUSED(address), UNUSED(name), UNUSED(external), UNUSED(nbytes);
    UNUSED(constant), UNUSED(global);
}
API void __cudaRegisterFunction(void **module, const char *host, char *device, const char *name, int limit,
                                uint3 *thread, uint3 *block, dim3 *block_size, dim3 *grid_size, int *warp) {
    UNUSED(module), UNUSED(device), UNUSED(limit), UNUSED(thread), UNUSED(block), UNUSED(block_size);
    UNUSED(grid_size), UNUSED(warp);
    Kernel *kernel = malloc(sizeof *kernel);
    *kernel = (Kernel){*bucket(host), host, name};
    *bucket(host) = kernel;
}
