/* A CUDA driver that does nothing, for `python -m benchmarks run host --device idle`: device memory is the host's,
 * launches are not made, every call succeeds. One device that says it is a Hopper, and the version of a driver that tells nothing of
 * parameters (their places are then read off the binary). What cuda-bindings looks up and is not here it takes for
 * missing. cuGetExportTable is nvrtc's, which looks for the driver, too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;
enum { NOT_FOUND = 500 };
static __thread void *contexts[64];
static __thread int depth;

int cuInit(unsigned flags) { return 0; }
int cuGetExportTable(const void **table, const void *id) { *table = 0; return NOT_FOUND; }
int cuDriverGetVersion(int *version) { *version = 12030; return 0; }
int cuGetErrorString(int status, const char **text) { *text = "fake"; return 0; }

int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "none"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 1ull << 37; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case 75: *value = 9; break;        /* compute capability, major */
        case 16: *value = 132; break;      /* multiprocessors */
        case 13: *value = 1980000; break;  /* clock, kHz */
        case 36: *value = 3201000; break;  /* memory clock, kHz */
        case 37: *value = 6144; break;     /* bus width, bits */
        case 97: *value = 232448; break;   /* shared memory of a block */
        default: *value = 0;
    }
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(size_t)(0x1000 + device); return 0; }
int cuCtxGetCurrent(void **context) { *context = depth ? contexts[depth - 1] : 0; return 0; }
int cuCtxSetCurrent(void *context) { depth += !depth; contexts[depth - 1] = context; return 0; }
int cuCtxPushCurrent_v2(void *context) { contexts[depth++] = context; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = contexts[--depth]; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuStreamSynchronize(void *stream) { return 0; }
int cuStreamIsCapturing(void *stream, int *state) { *state = 0; return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }

int cuModuleLoadData(void **module, const void *image) { *module = (void *)0x2000; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)0x3000; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 0; return 0; }
int cuTensorMapReplaceAddress(void *map, void *address) { *(void **)map = address; return 0; }
int cuTensorMapEncodeTiled(void *map, int dtype, unsigned axes, void *address) {
    memset(map, 0, 128);
    return cuTensorMapReplaceAddress(map, address);
}
int cuLaunchKernel(void *function) { return 0; }
int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) { return 0; }

int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) { *memory = malloc(bytes); return 0; }
int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t bytes, void *stream) {
    memcpy((void *)to, from, bytes);
    return 0;
}
int cuMemcpyDtoH_v2(void *to, u64 from, size_t bytes) { memcpy(to, (void *)from, bytes); return 0; }
int cuMemsetD8Async(u64 to, unsigned char value, size_t bytes, void *stream) {
    memset((void *)to, value, bytes);
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **found, int version, u64 flags, int *status) {
    Dl_info here, there;
    char versioned[128];
    dladdr((void *)cuInit, &here);
    *found = 0;
    for (int second = 1; second >= 0 && !*found; second--) {
        snprintf(versioned, sizeof versioned, second ? "%s_v2" : "%s", name);
        void *place = dlsym(RTLD_DEFAULT, versioned);
        if (place && dladdr(place, &there) && there.dli_fbase == here.dli_fbase) *found = place;
    }
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : NOT_FOUND;
}
int cuGetProcAddress(const char *name, void **found, int version, u64 flags) {
    return cuGetProcAddress_v2(name, found, version, flags, 0);
}
