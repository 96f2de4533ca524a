// A CUDA driver that does nothing and records every call, for the tests beside this file.
//
// Macros: VERSION, the CUDA version; WITHOUT_BATCH, WITHOUT_BATCH_V2, WITHOUT_LAUNCH_HOST_FUNC, WITHOUT_EVENTS,
// WITHOUT_FIND, absent functions; HIDDEN_BATCH, batch calls that only cuGetProcAddress finds; DENIED_BATCH, batch
// calls that it does not find.
// STUB_FAIL in the environment is a list such as "cuInit=100,cuMemcpyAsync=700"; a test may replace it.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 13000
#endif

typedef int CUresult;
typedef uint64_t Address;
typedef void *Handle;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char calls[1 << 16];
static size_t used;
static char failing[1024];
static uint64_t next_handle = 0x1000;
static __thread Handle contexts[16];
static __thread int depth;
static __thread unsigned mode;

const char *stub_calls(void) { return calls; }
void stub_clear(void) { used = 0; calls[0] = 0; }
void stub_fail(const char *list) { snprintf(failing, sizeof failing, "%s", list); }
int stub_depth(void) { return depth; }
unsigned stub_mode(void) { return mode; }
void stub_set_mode(unsigned to) { mode = to; }

// 1 while a thread is held in cuInit, which STUB_HELD_INIT in the environment makes it be.
static atomic_int in_init;
int stub_in_init(void) { return atomic_load(&in_init); }
void stub_release_init(void) { atomic_store(&in_init, 0); }

__attribute__((constructor)) static void start(void) {
    const char *list = getenv("STUB_FAIL");
    if (list) stub_fail(list);
}

static int code_of(const char *name) {
    size_t len = strlen(name);
    for (const char *at = failing; (at = strstr(at, name)); at += len)
        if ((at == failing || at[-1] == ',') && at[len] == '=') return atoi(at + len + 1);
    return 0;
}

// Records a call with its arguments and returns the code that it fails with.
__attribute__((format(printf, 2, 3))) static int record(const char *name, const char *format, ...) {
    va_list arguments;
    pthread_mutex_lock(&lock);
    used += snprintf(calls + used, sizeof calls - used, "%s", name);
    va_start(arguments, format);
    used += vsnprintf(calls + used, sizeof calls - used, format, arguments);
    va_end(arguments);
    used += snprintf(calls + used, sizeof calls - used, "\n");
    pthread_mutex_unlock(&lock);
    return code_of(name);
}

#define CALL(name, ...) do { int code = record(name, __VA_ARGS__); if (code) return code; } while (0)
#define NEW(place) (*(place) = (Handle)(next_handle += 0x10))

CUresult cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
CUresult cuInit(unsigned flags) {
    if (getenv("STUB_HELD_INIT")) {
        atomic_store(&in_init, 1);
        while (atomic_load(&in_init)) usleep(1000);
    }
    CALL("cuInit", " %u", flags);
    return 0;
}
CUresult cuDeviceGetCount(int *n) { CALL("cuDeviceGetCount", "%s", ""); *n = getenv("STUB_DEVICES") ? atoi(getenv("STUB_DEVICES")) : 2; return 0; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
CUresult cuDeviceGetName(char *to, int n, int device) { snprintf(to, n, "Stub %d", device); return 0; }
// A device whose names the driver does not tell has its number behind the name of the call in STUB_FAIL.
static int code_for(const char *name, int device) {
    char full[64];
    snprintf(full, sizeof full, "%s %d", name, device);
    return code_of(full);
}
CUresult cuDeviceGetUuid_v2(unsigned char *to, int device) {
    int code = code_for("cuDeviceGetUuid", device);
    if (code) return code;
    memset(to, 0xa0 + device, 16);
    return 0;
}
CUresult cuDeviceGetPCIBusId(char *to, int n, int device) {
    int code = code_for("cuDeviceGetPCIBusId", device);
    if (code) return code;
    snprintf(to, n, "0000:%02X:00.0", 0x1b + device);
    return 0;
}
CUresult cuDeviceGetAttribute(int *value, unsigned attribute, int device) {
    if (attribute == 128) return 1; // an attribute that this driver does not know
    *value = attribute == 118 ? 100 : (int)attribute;
    return device < 2 ? 0 : 101;
}
CUresult cuDevicePrimaryCtxRetain(Handle *context, int device) { CALL("cuDevicePrimaryCtxRetain", " %d", device); *context = (Handle)(0xc000ul + device); return 0; }
CUresult cuDevicePrimaryCtxRelease_v2(int device) { CALL("cuDevicePrimaryCtxRelease", " %d", device); return 0; }
CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = device == 0; return 0; }
CUresult cuCtxPushCurrent_v2(Handle context) { CALL("cuCtxPushCurrent", " %p", context); contexts[depth++] = context; return 0; }
CUresult cuCtxPopCurrent_v2(Handle *context) { CALL("cuCtxPopCurrent", "%s", ""); *context = contexts[--depth]; return 0; }
CUresult cuCtxGetCurrent(Handle *context) { *context = depth ? contexts[depth - 1] : NULL; return 0; }
CUresult cuCtxGetDevice(int *device) { *device = (int)((uintptr_t)contexts[depth - 1] & 0xf); return 0; }
CUresult cuCtxSynchronize(void) { CALL("cuCtxSynchronize", "%s", ""); return 0; }
CUresult cuThreadExchangeStreamCaptureMode(unsigned *with) {
    unsigned old = mode;
    CALL("cuThreadExchangeStreamCaptureMode", " %u", *with);
    mode = *with; *with = old;
    return 0;
}
CUresult cuMemcpyAsync(Address to, Address from, size_t n, Handle stream) { CALL("cuMemcpyAsync", " %lx %lx %zu", to, from, n); return 0; }
CUresult cuMemsetD8Async(Address to, unsigned char byte, size_t n, Handle stream) { CALL("cuMemsetD8Async", " %lx %u %zu", to, byte, n); return 0; }
CUresult cuStreamCreate(Handle *stream, unsigned flags) { CALL("cuStreamCreate", " %u", flags); NEW(stream); return 0; }
CUresult cuStreamDestroy_v2(Handle stream) { CALL("cuStreamDestroy", " %p", stream); return 0; }
CUresult cuStreamQuery(Handle stream) { CALL("cuStreamQuery", " %p", stream); return 0; }
CUresult cuStreamSynchronize(Handle stream) { CALL("cuStreamSynchronize", " %p", stream); return 0; }
CUresult cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) { CALL("cuStreamWaitEvent", " %p %p %u", stream, event, flags); return 0; }
CUresult cuStreamIsCapturing(Handle stream, unsigned *status) { CALL("cuStreamIsCapturing", " %p", stream); *status = stream == (Handle)0xcab ? 1 : 0; return 0; }
CUresult cuStreamGetCtx(Handle stream, Handle *context) { CALL("cuStreamGetCtx", " %p", stream); *context = (Handle)0xc001; return 0; }
#ifndef WITHOUT_EVENTS
CUresult cuEventCreate(Handle *event, unsigned flags) { CALL("cuEventCreate", " %u", flags); NEW(event); return 0; }
CUresult cuEventDestroy_v2(Handle event) { CALL("cuEventDestroy", " %p", event); return 0; }
#endif
CUresult cuEventRecord(Handle event, Handle stream) { CALL("cuEventRecord", " %p %p", event, stream); return 0; }
CUresult cuEventQuery(Handle event) { CALL("cuEventQuery", " %p", event); return 0; }
CUresult cuEventSynchronize(Handle event) { CALL("cuEventSynchronize", " %p", event); return 0; }
CUresult cuGetErrorName(int code, const char **to) { *to = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 999 ? "CUDA_ERROR_UNKNOWN" : NULL; return *to ? 0 : 1; }
CUresult cuGetErrorString(int code, const char **to) { *to = code == 700 ? "an illegal memory access was encountered" : NULL; return *to ? 0 : 1; }
CUresult cuMemAlloc_v2(Address *at, size_t n) { CALL("cuMemAlloc", " %zu", n); *at = 0x700000000000; return 0; }
CUresult cuMemFree_v2(Address at) { CALL("cuMemFree", " %lx", at); return 0; }
CUresult cuMemHostRegister_v2(void *at, size_t n, unsigned flags) { CALL("cuMemHostRegister", " %zu %u", n, flags); return 0; }
CUresult cuMemHostUnregister(void *at) { CALL("cuMemHostUnregister", "%s", ""); return 0; }
CUresult cuMemHostGetDevicePointer_v2(Address *to, void *at, unsigned flags) { *to = (Address)at; return 0; }

static void record_lists(const char *name, Address *to, Address *from, size_t *n, size_t count, unsigned *attribute, size_t *first, size_t attributes) {
    pthread_mutex_lock(&lock);
    used += snprintf(calls + used, sizeof calls - used, "%s order %u flags %u first %zu of %zu:", name, attribute[0], attribute[5], first[0], attributes);
    for (size_t i = 0; i < count; i++) used += snprintf(calls + used, sizeof calls - used, " %lx<-%lx+%zu", to[i], from[i], n[i]);
    used += snprintf(calls + used, sizeof calls - used, "\n");
    pthread_mutex_unlock(&lock);
}
#ifdef HIDDEN_BATCH
#define BATCH static
#else
#define BATCH
#endif
#ifndef WITHOUT_BATCH
BATCH CUresult cuMemcpyBatchAsync(Address *to, Address *from, size_t *n, size_t count, unsigned *attributes, size_t *first, size_t attribute_count, size_t *failed, Handle stream) {
    record_lists("cuMemcpyBatchAsync", to, from, n, count, attributes, first, attribute_count);
    int code = code_of("cuMemcpyBatchAsync");
    if (code) *failed = 1;
    return code;
}
#ifndef WITHOUT_BATCH_V2
BATCH CUresult cuMemcpyBatchAsync_v2(Address *to, Address *from, size_t *n, size_t count, unsigned *attributes, size_t *first, size_t attribute_count, Handle stream) {
    record_lists("cuMemcpyBatchAsync_v2", to, from, n, count, attributes, first, attribute_count);
    return code_of("cuMemcpyBatchAsync");
}
#endif
#endif

typedef void (*HostFunction)(void *);
#ifndef WITHOUT_LAUNCH_HOST_FUNC
CUresult cuLaunchHostFunc(Handle stream, HostFunction function, void *data) { CALL("cuLaunchHostFunc", "%s", ""); function(data); return 0; }
#endif
CUresult cuModuleLoadDataEx(Handle *module, const char *ptx, unsigned n, unsigned *options, void **values) {
    int code = record("cuModuleLoadDataEx", " %s %u options %u %u size %zu", ptx, n, options[0], options[1], (size_t)values[1]);
    if (code) { snprintf(values[0], (size_t)values[1], "line 1: nonsense"); return code; }
    NEW(module);
    return 0;
}
CUresult cuModuleUnload(Handle module) { CALL("cuModuleUnload", " %p", module); return 0; }
CUresult cuModuleGetFunction(Handle *function, Handle module, const char *name) { CALL("cuModuleGetFunction", " %s", name); NEW(function); return 0; }
CUresult cuLaunchKernel(Handle f, unsigned bx, unsigned by, unsigned bz, unsigned tx, unsigned ty, unsigned tz, unsigned shared, Handle stream, void **parameters, void **extra) {
    CALL("cuLaunchKernel", " %u %u %u %u %u %u %u parameters %lx %x", bx, by, bz, tx, ty, tz, shared, *(uint64_t *)parameters[0], *(uint32_t *)parameters[1]);
    return 0;
}

// Memory that exists: device memory at 0x70.., two mapped pieces at 0x71.. and a hole, pinned host memory at
// 0x72.., managed memory at 0x73.., memory of a pool of device 1 at 0x74..; a megabyte each, pieces of 2 MiB.
// At 0x75.. is a reserved range whose memory has no type.
#define MIB 0x100000ul
CUresult cuPointerGetAttributes(unsigned n, unsigned *names, void **places, Address at) {
    unsigned space = at >> 40;
    Address base = at & ~0xfffffffffful, offset = at - base;
    int piece = offset / (2 * MIB);
    CALL("cuPointerGetAttributes", " %u %lx", n, at);
    for (unsigned i = 0; i < n; i++) {
        uint64_t v = 0;
        size_t bytes = 8;
        switch (names[i]) {
        case 1: v = space == 0x71 || space == 0x74 ? 0 : 0xc000; break;
        case 2: v = space == 0x75 ? 0 : space == 0x72 ? 1 : 2; bytes = 4; break;
        case 7: v = 40 + (space & 0xf); break;
        case 8: v = space == 0x73; bytes = 1; break;
        case 9: v = space == 0x74; bytes = 4; break;
        case 10: v = space == 0x70; bytes = 1; break;
        case 11: v = base; break;
        case 12: v = space == 0x71 ? 64 * MIB : MIB; break;
        case 13: v = space == 0x74 || (space == 0x71 && piece < 2); bytes = 1; break;
        case 15: v = 1; bytes = 1; break;
        case 18: v = 2 * MIB; break;
        case 19: v = base + piece * 2 * MIB; break;
        case 20: v = 90 + piece; break;
        default: return 1;
        }
        if (names[i] >= 18 && (VERSION < 11080)) return 1;
        if (names[i] >= 18 && piece >= 2) v = 0;
        if (space < 0x70 || space > 0x75 || (space != 0x71 && offset >= MIB)) v = names[i] == 9 ? (uint64_t)-2 : 0;
        memcpy(places[i], &v, bytes);
    }
    return 0;
}
CUresult cuPointerGetAttribute(void *place, unsigned name, Address at) {
    CALL("cuPointerGetAttribute", " %u %lx", name, at);
    // Of an address that the driver does not know, this function fails where the other one gives zeros.
    unsigned type = 0, of_type = 2;
    void *to = &type;
    CUresult code = cuPointerGetAttributes(1, &of_type, &to, at);
    if (code || !type) return code ? code : 1;
    return cuPointerGetAttributes(1, &name, &place, at);
}
CUresult cuMemRetainAllocationHandle(uint64_t *handle, void *at) {
    CALL("cuMemRetainAllocationHandle", " %p", at);
    if ((Address)at >> 40 != 0x71) return 1;
    *handle = 7;
    return 0;
}
CUresult cuMemRelease(uint64_t handle) { CALL("cuMemRelease", " %lu", handle); return 0; }
CUresult cuMemGetAllocationPropertiesFromHandle(unsigned *properties, uint64_t handle) {
    properties[0] = 1; properties[1] = 1; properties[2] = 1; properties[3] = 0;
    ((unsigned char *)properties)[25] = 1;
    return 0;
}
CUresult cuMemGetAllocationGranularity(size_t *n, const unsigned *properties, unsigned which) { CALL("cuMemGetAllocationGranularity", " %u %u %u %u %u", properties[0], properties[1], properties[2], properties[3], which); *n = 2 * MIB; return 0; }
CUresult cuMemAddressReserve(Address *at, size_t n, size_t alignment, Address wanted, unsigned long long flags) { CALL("cuMemAddressReserve", " %zu", n); *at = 0x750000000000; return 0; }
CUresult cuMemAddressFree(Address at, size_t n) { CALL("cuMemAddressFree", " %lx %zu", at, n); return 0; }
CUresult cuMemCreate(uint64_t *handle, size_t n, const unsigned *properties, unsigned long long flags) { CALL("cuMemCreate", " %zu %u %u %u %u", n, properties[0], properties[1], properties[2], properties[3]); *handle = next_handle += 0x10; return 0; }
CUresult cuMemMap(Address at, size_t n, size_t offset, uint64_t handle, unsigned long long flags) {
    int code = record("cuMemMap", " %lx %zu %lx", at, n, handle);
    // Only the second piece of a range fails.
    return (at & 0xffffff) ? code : 0;
}
CUresult cuMemUnmap(Address at, size_t n) { CALL("cuMemUnmap", " %lx %zu", at, n); return 0; }
CUresult cuMemSetAccess(Address at, size_t n, const unsigned *access, size_t count) { CALL("cuMemSetAccess", " %lx %zu %u %u %u %zu", at, n, access[0], access[1], access[2], count); return 0; }
CUresult cuMemExportToShareableHandle(void *to, uint64_t handle, unsigned type, unsigned long long flags) {
    CALL("cuMemExportToShareableHandle", " %u", type);
    if (type == 8) memset(to, 0xfa, 64); else { int pair[2]; if (pipe(pair)) return 1; close(pair[1]); *(int *)to = pair[0]; }
    return 0;
}
CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *from, unsigned type) { CALL("cuMemImportFromShareableHandle", " %u %d", type, type == 8 ? *(unsigned char *)from : (int)(intptr_t)from); *handle = next_handle += 0x10; return 0; }
CUresult cuMemGetHandleForAddressRange(int *to, Address at, size_t n, unsigned type, unsigned long long flags) { CALL("cuMemGetHandleForAddressRange", " %lx %zu %u %llu", at, n, type, flags); int pair[2]; if (pipe(pair)) return 1; close(pair[1]); *to = pair[0]; return 0; }
CUresult cuFlushGPUDirectRDMAWrites(unsigned target, unsigned scope) { CALL("cuFlushGPUDirectRDMAWrites", " %u %u", target, scope); return 0; }
CUresult cuMemGetAddressRange_v2(Address *base, size_t *n, Address at) { *base = at & ~0xfffffffffful; *n = MIB; return 0; }
typedef struct { unsigned char bytes[64]; } Ipc;
CUresult cuIpcGetMemHandle(Ipc *to, Address base) { CALL("cuIpcGetMemHandle", " %lx", base); memset(to, 0x1c, 64); return 0; }
CUresult cuIpcOpenMemHandle_v2(Address *to, Ipc from, unsigned flags) { CALL("cuIpcOpenMemHandle", " %x %x %u", from.bytes[0], from.bytes[63], flags); *to = 0x760000000000; return 0; }
CUresult cuIpcCloseMemHandle(Address at) { CALL("cuIpcCloseMemHandle", " %lx", at); return 0; }

#ifndef WITHOUT_FIND
static void *find(const char *name, int version) {
    if (version > VERSION) return NULL;
    if (!strcmp(name, "cuMemcpyBatchAsync")) {
#if defined(WITHOUT_BATCH) || defined(DENIED_BATCH)
        return NULL;
#elif defined(WITHOUT_BATCH_V2)
        return (void *)cuMemcpyBatchAsync;
#else
        return version >= 13000 ? (void *)cuMemcpyBatchAsync_v2 : (void *)cuMemcpyBatchAsync;
#endif
    }
    // The driver's own file, which is not in the global scope.
    Dl_info info;
    char suffixed[128];
    if (!dladdr((void *)stub_calls, &info)) return NULL;
    void *self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    snprintf(suffixed, sizeof suffixed, "%s_v2", name);
    void *at = dlsym(self, suffixed);
    if (!at) at = dlsym(self, name);
    dlclose(self);
    return at;
}
#if VERSION >= 12000
CUresult cuGetProcAddress_v2(const char *name, void **to, int version, uint64_t flags, unsigned *status) { record("cuGetProcAddress_v2", " %s %d %lu", name, version, flags); *to = find(name, version); *status = *to ? 0 : 1; return 0; }
#endif
CUresult cuGetProcAddress(const char *name, void **to, int version, uint64_t flags) { record("cuGetProcAddress", " %s %d %lu", name, version, flags); *to = find(name, version); return *to ? 0 : 500; }
#endif
