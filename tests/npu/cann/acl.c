/* The part of Ascend's runtime (CANN) that torch_npu needs to find a device: memory is the host's, and whatever is put
 * on a stream has happened when the call returns. For tests alone.
 *
 * What is asked for and not here is a stub that machine.py writes: it names itself and fails. Fresh memory is filled
 * with 0xff, which reads as NaN in every floating type, so that a value nobody wrote cannot pass for a 0.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define OK 0
#define INVALID 107000       /* ACL_ERROR_RT_PARAM_INVALID */
#define OUT_OF_MEMORY 207001 /* ACL_ERROR_RT_MEMORY_ALLOCATION */
#define ALIGNMENT 512
#define DEVICES_MAX 16

typedef int Status;

static long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value ? atol(value) : otherwise;
}

static unsigned devices(void) { return (unsigned)setting("EMULATED_NPU_DEVICES", 2); }
static size_t room(void) { return (size_t)setting("EMULATED_NPU_MIB", 4096) << 20; }

/* -- devices -- */

static _Thread_local int current = 0;
static size_t in_use[DEVICES_MAX];

Status aclInit(const char *configuration) { return OK; }
Status aclFinalize(void) { return OK; }
Status aclrtGetDeviceCount(unsigned *count) { *count = devices(); return OK; }
Status aclrtGetDevice(int *device) { *device = current; return OK; }
Status aclrtSetDevice(int device) {
    if (device < 0 || (unsigned)device >= devices()) return INVALID;
    current = device;
    return OK;
}
Status aclrtResetDevice(int device) { return OK; }
Status aclrtGetCurrentContext(void **context) { *context = &in_use[current]; return OK; }
Status aclrtSetCurrentContext(void *context) { return OK; }
Status aclrtDeviceCanAccessPeer(int *can, int from, int to) { *can = 0; return OK; }
Status aclrtDeviceGetBareTgid(int *id) { *id = 0; return OK; }
Status aclrtGetPrimaryCtxState(int device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = 1;
    return OK;
}
const char *aclrtGetSocName(void) { return "Ascend910B3"; }
Status aclsysGetCANNVersion(int package, char version[128]) { strcpy(version, "0.emulated"); return OK; }
const char *aclGetRecentErrMsg(void) { return "from the emulated runtime"; }
Status aclGetDeviceCapability(unsigned device, int what, long *value) { *value = 1; return OK; }
Status aclrtGetDeviceInfo(unsigned device, int what, long *value) { *value = 1; return OK; }

/* -- what is set and not read: everything is computed on the host -- */

Status aclrtSetDeviceSatMode(int mode) { return OK; }
Status aclSetCompileopt(int option, const char *value) { return OK; }
Status aclrtSetSysParamOpt(int option, int64_t value) { return OK; }
Status aclrtGetSysParamOpt(int option, int64_t *value) { *value = 0; return OK; }
Status aclrtCtxSetSysParamOpt(int option, int64_t value) { return OK; }
Status aclrtSetOpExecuteTimeOut(unsigned seconds) { return OK; }
Status aclrtSetOpExecuteTimeOutV2(uint64_t microseconds, uint64_t *actual) { *actual = microseconds; return OK; }
Status aclrtSetOpWaitTimeout(unsigned seconds) { return OK; }
size_t aclGetCompileoptSize(int option) { return sizeof "0"; }
Status aclGetCompileopt(int option, char *value, size_t room) { memcpy(value, "0", sizeof "0"); return OK; }

/* -- memory: the bytes of a block stand in front of it -- */

static void *block_of(size_t bytes) {
    void *base;
    if (posix_memalign(&base, ALIGNMENT, bytes + ALIGNMENT)) return NULL;
    memcpy(base, &bytes, sizeof bytes);
    memset((char *)base + ALIGNMENT, 0xff, bytes);
    return (char *)base + ALIGNMENT;
}

Status aclrtMalloc(void **pointer, size_t bytes, int policy) {
    if (in_use[current] + bytes > room()) return OUT_OF_MEMORY;
    if (!(*pointer = block_of(bytes))) return OUT_OF_MEMORY;
    in_use[current] += bytes;
    return OK;
}
Status aclrtFree(void *pointer) {
    char *base = (char *)pointer - ALIGNMENT;
    size_t bytes;
    memcpy(&bytes, base, sizeof bytes);
    in_use[current] -= bytes;
    free(base);
    return OK;
}
Status aclrtMallocAlign32(void **pointer, size_t bytes, int policy) { return aclrtMalloc(pointer, bytes, policy); }
Status aclrtMallocHost(void **pointer, size_t bytes) {
    return (*pointer = block_of(bytes)) ? OK : OUT_OF_MEMORY;
}
Status aclrtFreeHost(void *pointer) { free((char *)pointer - ALIGNMENT); return OK; }
Status aclrtGetMemInfo(int kind, size_t *left, size_t *total) {
    *total = room();
    *left = room() - in_use[current];
    return OK;
}
Status aclrtMemcpy(void *to, size_t space, const void *from, size_t bytes, int kind) {
    if (bytes > space) return INVALID;
    memmove(to, from, bytes);
    return OK;
}
Status aclrtMemcpyAsync(void *to, size_t space, const void *from, size_t bytes, int kind, void *stream) {
    return aclrtMemcpy(to, space, from, bytes, kind);
}
Status aclrtMemset(void *to, size_t space, int value, size_t bytes) {
    if (bytes > space) return INVALID;
    memset(to, value, bytes);
    return OK;
}
Status aclrtMemsetAsync(void *to, size_t space, int value, size_t bytes, void *stream) {
    return aclrtMemset(to, space, value, bytes);
}

/* -- streams and events: handles; an event holds the time it was recorded at -- */

static Status handle(void **made) { return (*made = calloc(1, sizeof(struct timespec))) ? OK : OUT_OF_MEMORY; }

Status aclrtCreateStream(void **stream) { return handle(stream); }
Status aclrtCreateStreamWithConfig(void **stream, unsigned priority, unsigned flags) { return handle(stream); }
Status aclrtDestroyStream(void *stream) { free(stream); return OK; }
Status aclrtDestroyStreamForce(void *stream) { free(stream); return OK; }
Status aclrtSynchronizeStream(void *stream) { return OK; }
Status aclrtSynchronizeStreamWithTimeout(void *stream, int milliseconds) { return OK; }
Status aclrtSynchronizeDevice(void) { return OK; }
Status aclrtSynchronizeDeviceWithTimeout(int milliseconds) { return OK; }
Status aclrtStreamQuery(void *stream, int *status) { *status = 0; return OK; }
Status aclrtStreamGetId(void *stream, int *id) { *id = 0; return OK; }
Status aclrtStreamWaitEvent(void *stream, void *event) { return OK; }
Status aclrtSetStreamFailureMode(void *stream, uint64_t mode) { return OK; }
Status aclrtCreateEventExWithFlag(void **event, unsigned flag) { return handle(event); }
Status aclrtCreateEventWithFlag(void **event, unsigned flag) { return handle(event); }
Status aclrtDestroyEvent(void *event) { free(event); return OK; }
Status aclrtRecordEvent(void *event, void *stream) { return clock_gettime(CLOCK_MONOTONIC, event) ? INVALID : OK; }
Status aclrtResetEvent(void *event, void *stream) { return OK; }
Status aclrtSynchronizeEvent(void *event) { return OK; }
Status aclrtQueryEventStatus(void *event, int *status) { *status = 1; return OK; }
Status aclrtQueryEventWaitStatus(void *event, int *status) { *status = 1; return OK; }
Status aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
    const struct timespec *a = start, *b = end;
    *milliseconds = (float)((b->tv_sec - a->tv_sec) * 1e3 + (b->tv_nsec - a->tv_nsec) / 1e6);
    return OK;
}
