/* Ascend's collectives (HCCL) between processes of one machine, over shared memory. For tests alone.
 *
 * A communicator is a file that all map: a barrier, and for every rank what it calls and the bytes it gives. All
 * ranks must make the same call with the same type and the same count, else every one of them fails and says both. As
 * on a device, sums are taken in the type of the tensors (bf16 and fp16 through fp32) and float64 is not reduced.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define OK 0
#define PARAMETER 1
#define TIMED_OUT 9
#define SYSTEM 4
#define UNSUPPORTED 5

#define RANKS_MAX 16
#define ROOM (64ul << 20) /* bytes that a rank can give in one call; pages are taken as they are touched */
#define SECONDS 120

typedef int Result;
typedef enum { INT8, INT16, INT32, FP16, FP32, INT64, UINT64, UINT8, UINT16, UINT32, FP64, BF16, TYPES } Type;
typedef enum { SUM, PRODUCT, MAXIMUM, MINIMUM } Operation;
static const size_t SIZE[TYPES] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};

typedef struct {
    char name[24];
    uint64_t type, count, extra;
    uint64_t counts[RANKS_MAX]; /* of an all-to-all of unequal parts: elements to each rank */
} Call;

typedef struct {
    _Atomic uint32_t arrived, round, failed;
    Call calls[RANKS_MAX];
} Board;

typedef struct {
    Board *board;
    char *bytes;
    uint32_t ranks, rank;
    char name[128];
} Comm;

static char *given(const Comm *comm, uint32_t rank) { return comm->bytes + (size_t)rank * ROOM; }

static Result complain(const Comm *comm, Result result, const char *what) {
    fprintf(stderr, "emulated HCCL, rank %u of %u: %s\n", comm->rank, comm->ranks, what);
    return result;
}

static Result barrier(Comm *comm) {
    Board *board = comm->board;
    uint32_t round = atomic_load(&board->round);
    if (atomic_fetch_add(&board->arrived, 1) + 1 == comm->ranks) {
        atomic_store(&board->arrived, 0);
        atomic_fetch_add(&board->round, 1);
        return OK;
    }
    time_t began = time(NULL);
    while (atomic_load(&board->round) == round) {
        if (time(NULL) - began > SECONDS) return complain(comm, TIMED_OUT, "the other ranks did not come");
        sched_yield();
    }
    return OK;
}

/* Show this rank's call and bytes to the others, and see that all make the same one. */
static Result meet(Comm *comm, const Call *call, const void *from, size_t bytes) {
    if (call->type >= TYPES) return complain(comm, PARAMETER, "no such type");
    if (bytes > ROOM) return complain(comm, UNSUPPORTED, "more bytes than this emulation holds");
    comm->board->calls[comm->rank] = *call;
    if (bytes) memcpy(given(comm, comm->rank), from, bytes);
    Result result = barrier(comm);
    for (uint32_t rank = 0; result == OK && rank < comm->ranks; rank++) {
        const Call *other = &comm->board->calls[rank];
        if (strcmp(other->name, call->name) || other->type != call->type || other->count != call->count ||
            other->extra != call->extra) {
            char text[256];
            snprintf(text, sizeof text, "%s of %lu elements of type %lu meets %s of %lu of type %lu on rank %u",
                     call->name, call->count, call->type, other->name, other->count, other->type, rank);
            result = complain(comm, PARAMETER, text);
        }
    }
    return result;
}

/* No rank may write its next call before all have read this one. */
static Result part(Comm *comm, Result result) {
    Result left = barrier(comm);
    return result == OK ? left : result;
}

static Call call_of(const char *name, Type type, uint64_t count, uint64_t extra) {
    Call call = {.type = type, .count = count, .extra = extra};
    strncpy(call.name, name, sizeof call.name - 1);
    return call;
}

/* -- reductions -- */

static float of_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static uint16_t to_bf16(float value) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static float of_fp16(uint16_t x) {
    _Float16 value;
    memcpy(&value, &x, sizeof value);
    return (float)value;
}
static uint16_t to_fp16(float value) {
    _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

#define COMBINED(a, b) \
    (operation == SUM ? (a) + (b) : operation == PRODUCT ? (a) * (b) : (operation == MAXIMUM) == ((a) > (b)) ? (a) : (b))

#define REDUCED(STORED, HELD, IN, OUT)                                              \
    for (uint64_t i = 0; i < count; i++) {                                          \
        HELD total = IN(((STORED *)(given(comm, 0) + skip))[i]);                    \
        for (uint32_t rank = 1; rank < comm->ranks; rank++) {                       \
            HELD other = IN(((STORED *)(given(comm, rank) + skip))[i]);             \
            total = COMBINED(total, other);                                         \
        }                                                                           \
        ((STORED *)to)[i] = OUT(total);                                             \
    }

static Result reduce(Comm *comm, void *to, size_t skip, uint64_t count, Type type, Operation operation) {
    if (operation > MINIMUM) return complain(comm, UNSUPPORTED, "this reduction is not there");
    switch (type) {
        case FP32: REDUCED(float, float, , ) return OK;
        case BF16: REDUCED(uint16_t, float, of_bf16, to_bf16) return OK;
        case FP16: REDUCED(uint16_t, float, of_fp16, to_fp16) return OK;
        case INT64: REDUCED(int64_t, int64_t, , ) return OK;
        case INT32: REDUCED(int32_t, int32_t, , ) return OK;
        case INT16: REDUCED(int16_t, int16_t, , ) return OK;
        case INT8: REDUCED(int8_t, int8_t, , ) return OK;
        case UINT8: REDUCED(uint8_t, uint8_t, , ) return OK;
        case FP64: return complain(comm, UNSUPPORTED, "float64 cannot be reduced on this device");
        default: return complain(comm, UNSUPPORTED, "this type cannot be reduced");
    }
}

Result HcclAllReduce(void *from, void *to, uint64_t count, Type type, Operation operation, Comm *comm, void *stream) {
    Call call = call_of("all_reduce", type, count, operation);
    Result result = meet(comm, &call, from, count * SIZE[type]);
    return part(comm, result ? result : reduce(comm, to, 0, count, type, operation));
}
Result HcclReduceScatter(void *from, void *to, uint64_t count, Type type, Operation operation, Comm *comm, void *s) {
    Call call = call_of("reduce_scatter", type, count, operation);
    size_t bytes = count * SIZE[type];
    Result result = meet(comm, &call, from, bytes * comm->ranks);
    return part(comm, result ? result : reduce(comm, to, bytes * comm->rank, count, type, operation));
}
Result HcclReduce(void *from, void *to, uint64_t count, Type type, Operation operation, uint32_t root, Comm *comm,
                  void *stream) {
    Call call = call_of("reduce", type, count, operation * RANKS_MAX + root);
    Result result = meet(comm, &call, from, count * SIZE[type]);
    if (result == OK && comm->rank == root) result = reduce(comm, to, 0, count, type, operation);
    return part(comm, result);
}

/* -- movements -- */

Result HcclAllGather(void *from, void *to, uint64_t count, Type type, Comm *comm, void *stream) {
    Call call = call_of("all_gather", type, count, 0);
    size_t bytes = count * SIZE[type];
    Result result = meet(comm, &call, from, bytes);
    for (uint32_t rank = 0; result == OK && rank < comm->ranks; rank++)
        memcpy((char *)to + rank * bytes, given(comm, rank), bytes);
    return part(comm, result);
}
Result HcclBroadcast(void *buffer, uint64_t count, Type type, uint32_t root, Comm *comm, void *stream) {
    Call call = call_of("broadcast", type, count, root);
    size_t bytes = count * SIZE[type];
    Result result = meet(comm, &call, buffer, comm->rank == root ? bytes : 0);
    if (result == OK) memcpy(buffer, given(comm, root), bytes);
    return part(comm, result);
}
Result HcclScatter(void *from, void *to, uint64_t count, Type type, uint32_t root, Comm *comm, void *stream) {
    Call call = call_of("scatter", type, count, root);
    size_t bytes = count * SIZE[type];
    Result result = meet(comm, &call, from, comm->rank == root ? bytes * comm->ranks : 0);
    if (result == OK) memcpy(to, given(comm, root) + bytes * comm->rank, bytes);
    return part(comm, result);
}
Result HcclAlltoAll(const void *from, uint64_t sent, Type type, void *to, uint64_t received, Type other, Comm *comm,
                    void *stream) {
    Call call = call_of("all_to_all", type, sent, received + 31 * other);
    size_t bytes = sent * SIZE[type];
    Result result = meet(comm, &call, from, bytes * comm->ranks);
    for (uint32_t rank = 0; result == OK && rank < comm->ranks; rank++)
        memcpy((char *)to + rank * bytes, given(comm, rank) + bytes * comm->rank, bytes);
    return part(comm, result);
}
Result HcclAlltoAllV(const void *from, const uint64_t *counts, const uint64_t *starts, Type type, void *to,
                     const uint64_t *expected, const uint64_t *places, Type other, Comm *comm, void *stream) {
    Call call = call_of("all_to_all_v", type, 0, other);
    uint64_t elements = 0;
    for (uint32_t rank = 0; rank < comm->ranks; rank++) {
        if (starts[rank] != elements) return complain(comm, PARAMETER, "parts of an all-to-all do not follow on");
        call.counts[rank] = counts[rank];
        elements += counts[rank];
    }
    Result result = meet(comm, &call, from, elements * SIZE[type]);
    for (uint32_t rank = 0; result == OK && rank < comm->ranks; rank++) {
        const uint64_t *theirs = comm->board->calls[rank].counts;
        uint64_t before = 0;
        for (uint32_t k = 0; k < comm->rank; k++) before += theirs[k];
        if (theirs[comm->rank] != expected[rank])
            result = complain(comm, PARAMETER, "a rank sends another count than is expected of it");
        else
            memcpy((char *)to + places[rank] * SIZE[type], given(comm, rank) + before * SIZE[type],
                   theirs[comm->rank] * SIZE[type]);
    }
    return part(comm, result);
}
Result HcclBarrier(Comm *comm, void *stream) { return barrier(comm); }

/* -- communicators -- */

Result HcclGetRootInfo(char *root) {
    static int number = 0;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    memset(root, 0, 4108);
    const char *folder = getenv("TMPDIR");
    snprintf(root, 120, "%.60s/hccl_%d_%ld_%d", folder ? folder : "/tmp", getpid(), now.tv_nsec, number++);
    return OK;
}
Result HcclCommInitRootInfo(uint32_t ranks, const char *root, uint32_t rank, Comm **made) {
    if (ranks > RANKS_MAX) return UNSUPPORTED;
    Comm *comm = calloc(1, sizeof *comm);
    comm->ranks = ranks;
    comm->rank = rank;
    strncpy(comm->name, root, sizeof comm->name - 1);
    size_t front = (sizeof(Board) + 4095) / 4096 * 4096, bytes = front + ranks * ROOM;
    int file = open(comm->name, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, (off_t)bytes)) return SYSTEM;
    char *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (start == MAP_FAILED) return SYSTEM;
    comm->board = (Board *)start;
    comm->bytes = start + front;
    Result result = barrier(comm);
    if (rank == 0) unlink(comm->name);
    *made = comm;
    return result;
}
Result HcclCommInitRootInfoConfig(uint32_t ranks, const char *root, uint32_t rank, const void *settings, Comm **made) {
    return HcclCommInitRootInfo(ranks, root, rank, made);
}
Result HcclCommDestroy(Comm *comm) { return OK; } /* its memory goes with the process */
Result HcclGetCommAsyncError(Comm *comm, Result *error) { *error = OK; return OK; }
Result HcclGetCommName(Comm *comm, char *name) { strncpy(name, comm->name, 127); return OK; }
uint32_t HcclGetCommConfigCapability(void) { return 0; }
Result HcclSetConfig(int what, long value) { return OK; }
const char *HcclGetErrorString(Result result) { return "see what the emulated HCCL said above"; }
