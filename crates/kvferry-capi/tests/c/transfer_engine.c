/* Mooncake's C API, called as TensorRT-LLM's wrapper, NIXL's plug-in and Mooncake's own users call it. */
#include "kvferry_transfer_engine.h"

#include <limits.h>
#include <pthread.h>

#include "check.h"

/* The reason of a failure is in the same library. */
#ifdef __cplusplus
extern "C"
#endif
const char *kvferry_last_error(void);

#define BLOCK 4096u
#define BLOCKS 3000u
#define SIZE (BLOCK * BLOCKS)

static transfer_engine_t create(void) {
    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
    CHECK(engine != NULL);
    return engine;
}

static segment_id_t segment_of(transfer_engine_t from, transfer_engine_t of) {
    char address[64];
    CHECK(getLocalIpAndPort(of, address, sizeof address) == 0);
    CHECK(memchr(address, 0, sizeof address) != NULL && strchr(address, ':') != NULL);
    const segment_id_t segment = openSegment(from, address);
    CHECK(segment >= 0);
    return segment;
}

/* Polls every task every millisecond, as TensorRT-LLM does: only these states are ever seen. */
static int ends_as(transfer_engine_t engine, batch_id_t batch, size_t first, size_t count) {
    for (;;) {
        size_t completed = 0, failed = 0;
        for (size_t task = first; task < first + count; task++) {
            struct transfer_status status;
            CHECK(getTransferStatus(engine, batch, task, &status) == 0);
            CHECK(status.status == STATUS_WAITING || status.status == STATUS_PENDING ||
                  status.status == STATUS_COMPLETED || status.status == STATUS_FAILED);
            completed += status.status == STATUS_COMPLETED;
            failed += status.status == STATUS_FAILED;
        }
        if (completed + failed == count) return failed ? STATUS_FAILED : STATUS_COMPLETED;
        pause_ms(1);
    }
}

static struct transfer_request request(int opcode, void *local, segment_id_t to, void *remote, size_t len) {
    struct transfer_request made;
    memset(&made, 0, sizeof made);
    made.opcode = opcode;
    made.source = local;
    made.target_id = to;
    made.target_offset = (uint64_t)(uintptr_t)remote;
    made.length = len;
    return made;
}

static struct notify_msg message(const char *name, const char *text) {
    struct notify_msg made = {(char *)(uintptr_t)name, (char *)(uintptr_t)text};
    return made;
}

/* Waits for one message and compares it. */
static void expect(transfer_engine_t engine, const char *name, const char *text) {
    for (int tries = 0;; tries++) {
        int size = -1;
        struct notify_msg *messages = getNotifsFromEngine(engine, &size);
        CHECK(size >= 0);
        if (size > 0) {
            CHECK(size == 1 && strcmp(messages[0].name, name) == 0 && strcmp(messages[0].msg, text) == 0);
            CHECK(freeNotifsMsgBuf(messages, size) == 0);
            return;
        }
        CHECK(messages == NULL && freeNotifsMsgBuf(messages, size) == 0 && tries < 30000);
        pause_ms(1);
    }
}

static void expect_none(transfer_engine_t engine) {
    int size = -1;
    CHECK(getNotifsFromEngine(engine, &size) == NULL && size == 0);
}

static unsigned char *memory(unsigned seed) {
    unsigned char *made = (unsigned char *)malloc(SIZE);
    CHECK(made != NULL);
    if (seed)
        fill(made, SIZE, seed);
    else
        memset(made, 0, SIZE);
    return made;
}

/* One batch of 1 024 takes 3 000 tasks, in two calls, with the numbers going on; memory is registered after
 * openSegment. */
static void more_tasks_than_the_batch_was_made_for(transfer_engine_t a, transfer_engine_t b) {
    static struct transfer_request requests[BLOCKS];
    const segment_id_t to = segment_of(a, b);
    unsigned char *source = memory(1), *target = memory(0);
    CHECK(registerLocalMemory(a, source, SIZE, "*", 1) == 0);
    CHECK(registerLocalMemory(b, target, SIZE, "*", 1) == 0);
    for (unsigned i = 0; i < BLOCKS; i++)
        requests[i] = request(OPCODE_WRITE, source + i * BLOCK, to, target + (BLOCKS - 1 - i) * BLOCK, BLOCK);
    const batch_id_t batch = allocateBatchID(a, 1024);
    CHECK(batch != INVALID_BATCH);
    CHECK(submitTransfer(a, batch, requests, 1500) == 0);
    CHECK(submitTransfer(a, batch, requests + 1500, 1500) == 0);
    CHECK(ends_as(a, batch, 0, BLOCKS) == STATUS_COMPLETED);
    for (unsigned i = 0; i < BLOCKS; i++)
        CHECK(memcmp(source + i * BLOCK, target + (BLOCKS - 1 - i) * BLOCK, BLOCK) == 0);
    struct transfer_status status;
    CHECK(getTransferStatus(a, batch, 7, &status) == 0 && status.transferred_bytes == BLOCK);
    CHECK(getTransferStatus(a, batch, BLOCKS, &status) < 0);
    CHECK(freeBatchID(a, batch) == 0);
    /* The same bytes come back by reading. */
    memset(source, 0, SIZE);
    fill(target, SIZE, 5);
    struct transfer_request read = request(OPCODE_READ, source, to, target, SIZE);
    const batch_id_t second = allocateBatchID(a, 1024);
    CHECK(second != batch && submitTransfer(a, second, &read, 1) == 0);
    CHECK(ends_as(a, second, 0, 1) == STATUS_COMPLETED && is_filled(source, SIZE, 5));
    CHECK(freeBatchID(a, second) == 0);
    CHECK(unregisterLocalMemory(a, source) == 0 && unregisterLocalMemory(b, target) == 0);
    free(source);
    free(target);
}

static void stale_freed_and_invented_ids_are_errors(transfer_engine_t a, transfer_engine_t b) {
    const segment_id_t to = segment_of(a, b);
    static unsigned char bytes[64];
    struct transfer_request one = request(OPCODE_WRITE, bytes, to, bytes, 1);
    struct transfer_status status;
    const batch_id_t batch = allocateBatchID(a, 1024);
    CHECK(freeBatchID(a, batch) == 0);
    const batch_id_t wrong[] = {batch, batch + 1000, 0, INVALID_BATCH, (batch_id_t)(uintptr_t)&one};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK(submitTransfer(a, wrong[i], &one, 1) < 0);
        CHECK(getTransferStatus(a, wrong[i], 0, &status) < 0);
        CHECK(freeBatchID(a, wrong[i]) < 0);
    }
    CHECK(strstr(kvferry_last_error(), "no batch has the number") != NULL);
    const batch_id_t good = allocateBatchID(a, 1024);
    one.target_id = 12345;
    CHECK(submitTransfer(a, good, &one, 1) < 0);
    one.target_id = -1;
    CHECK(submitTransfer(a, good, &one, 1) < 0);
    one.target_id = to;
    one.opcode = 2;
    CHECK(submitTransfer(a, good, &one, 1) < 0);
    CHECK(submitTransfer(a, good, NULL, 1) < 0);
    CHECK(submitTransfer(a, good, NULL, 0) == 0);
    /* Nothing of a refused call is a task. */
    CHECK(getTransferStatus(a, good, 0, &status) < 0 && getTransferStatus(a, good, SIZE_MAX, &status) < 0);
    CHECK(freeBatchID(a, good) == 0);
    CHECK(closeSegment(a, to) == 0 && closeSegment(a, 12345) < 0);
    CHECK(genNotifyInEngine(a, UINT64_MAX, message("a", "b")) < 0);
    CHECK(openSegment(a, "127.0.0.1:1") < 0 && openSegment(a, NULL) < 0 && openSegment(a, "") < 0);
    char tiny[4];
    CHECK(getLocalIpAndPort(a, tiny, sizeof tiny) < 0);
}

static void registering_has_mooncakes_codes(transfer_engine_t a) {
    static unsigned char bytes[2][4096];
    CHECK(registerLocalMemory(a, bytes[0], 4096, "cpu:0", 1) == 0);
    CHECK(registerLocalMemory(a, bytes[0], 4096, "*", 1) == -7);
    CHECK(registerLocalMemory(a, bytes[0] + 1, 1, "*", 1) == -7);
    CHECK(registerLocalMemory(a, bytes[1], 0, "*", 1) == -1);
    CHECK(unregisterLocalMemory(a, bytes[1]) == -3);
    struct buffer_entry list[2] = {{bytes[1], 4096}, {bytes[0], 10}};
    CHECK(registerLocalMemoryBatch(a, list, 2, "*") == -7);
    CHECK(unregisterLocalMemory(a, bytes[1]) == -3);
    CHECK(registerLocalMemoryBatch(a, list, 1, "*") == 0);
    void *both[2] = {bytes[0], bytes[1]};
    CHECK(unregisterLocalMemoryBatch(a, both, 2) == 0 && unregisterLocalMemoryBatch(a, both, 2) == -3);
}

/* The wrapper knows an address and does not register a longer buffer there: the transfer fails, and says why. */
static void memory_beyond_what_was_registered_fails(transfer_engine_t a, transfer_engine_t b) {
    const segment_id_t to = segment_of(a, b);
    unsigned char *source = memory(1), *target = memory(0);
    CHECK(registerLocalMemory(b, target, SIZE / 2, "*", 1) == 0);
    struct transfer_request one = request(OPCODE_WRITE, source, to, target, SIZE);
    const batch_id_t batch = allocateBatchID(a, 1024);
    CHECK(submitTransferWithNotify(a, batch, &one, 1, message("never", "sent")) == 0);
    CHECK(ends_as(a, batch, 0, 1) == STATUS_FAILED);
    CHECK(strlen(kvferry_last_error()) > 10);
    CHECK(target[0] == 0 && target[SIZE - 1] == 0);
    CHECK(freeBatchID(a, batch) == 0);
    /* A message that arrives after it: the one of the failed transfer was not sent. */
    CHECK(genNotifyInEngine(a, (uint64_t)to, message("later", "text")) == 0);
    expect(b, "later", "text");
    CHECK(unregisterLocalMemory(b, target) == 0);
    free(source);
    free(target);
}

static void messages_follow_the_data(transfer_engine_t a, transfer_engine_t b) {
    const segment_id_t to = segment_of(a, b);
    unsigned char *source = memory(1), *target = memory(0);
    CHECK(registerLocalMemory(b, target, SIZE, "*", 1) == 0);
    struct transfer_request requests[3] = {
        request(OPCODE_WRITE, source, to, target, SIZE / 2),
        request(OPCODE_WRITE, source + SIZE / 2, to, target + SIZE / 2, SIZE / 2),
        request(OPCODE_READ, source, to, target, 1),
    };
    /* One transfer carries its message; two, a write and a read, are followed by it. */
    for (size_t count = 2; count <= 3; count++) {
        char text[8] = "text-?";
        text[5] = (char)('0' + (char)count);
        const batch_id_t batch = allocateBatchID(a, 1024);
        CHECK(submitTransferWithNotify(a, batch, requests, count, message("agent", text)) == 0);
        memset(text, 'x', sizeof text - 1); /* not used after the call returned */
        char expected[8] = "text-?";
        expected[5] = (char)('0' + (char)count);
        expect(b, "agent", expected);
        CHECK(memcmp(source, target, SIZE) == 0);
        CHECK(ends_as(a, batch, 0, count) == STATUS_COMPLETED);
        CHECK(freeBatchID(a, batch) == 0);
    }
    CHECK(genNotifyInEngine(a, (uint64_t)to, message("sync", "")) == 0);
    expect(b, "sync", "");
    const batch_id_t empty = allocateBatchID(a, 1024);
    CHECK(submitTransferWithNotify(a, empty, NULL, 0, message("no", "task")) < 0);
    CHECK(freeBatchID(a, empty) == 0);
    expect_none(b);
    CHECK(unregisterLocalMemory(b, target) == 0);
    free(source);
    free(target);
}

/* Batches that failed are never freed: the oldest ended one goes when there are too many. */
static void batches_may_be_left(transfer_engine_t a, transfer_engine_t b) {
    const segment_id_t to = segment_of(a, b);
    static unsigned char byte;
    struct transfer_request one = request(OPCODE_WRITE, &byte, to, &byte, 1); /* not registered: fails */
    const batch_id_t first = allocateBatchID(a, 1024);
    CHECK(submitTransfer(a, first, &one, 1) == 0 && ends_as(a, first, 0, 1) == STATUS_FAILED);
    one.length = 0; /* ends at once */
    for (int i = 0; i < 20000; i++) {
        const batch_id_t batch = allocateBatchID(a, 1024);
        CHECK(batch != INVALID_BATCH && submitTransfer(a, batch, &one, 1) == 0);
        if (i == 19999) CHECK(ends_as(a, batch, 0, 1) == STATUS_COMPLETED);
    }
    struct transfer_status status;
    CHECK(getTransferStatus(a, first, 0, &status) < 0);
}

/* The engine's own segment, by its number and by its name. */
static void an_engine_reaches_itself(transfer_engine_t a) {
    unsigned char *source = memory(9), *target = memory(0);
    CHECK(registerLocalMemory(a, target, SIZE, "*", 1) == 0);
    CHECK(segment_of(a, a) == LOCAL_SEGMENT);
    struct transfer_request one = request(OPCODE_WRITE, source, LOCAL_SEGMENT, target, SIZE);
    const batch_id_t batch = allocateBatchID(a, 1);
    CHECK(submitTransfer(a, batch, &one, 1) == 0);
    CHECK(ends_as(a, batch, 0, 1) == STATUS_COMPLETED && is_filled(target, SIZE, 9));
    CHECK(freeBatchID(a, batch) == 0 && unregisterLocalMemory(a, target) == 0);
    free(source);
    free(target);
}

typedef struct Worker {
    transfer_engine_t a;
    segment_id_t to;
    unsigned char *source, *target;
    unsigned number;
} Worker;

static void *work(void *argument) {
    Worker *worker = (Worker *)argument;
    const size_t part = SIZE / 4;
    for (int i = 0; i < 30; i++) {
        struct transfer_request one = request(OPCODE_WRITE, worker->source + worker->number * part, worker->to,
                                              worker->target + worker->number * part, part);
        const batch_id_t batch = allocateBatchID(worker->a, 1024);
        CHECK(submitTransfer(worker->a, batch, &one, 1) == 0);
        CHECK(ends_as(worker->a, batch, 0, 1) == STATUS_COMPLETED);
        CHECK(genNotifyInEngine(worker->a, (uint64_t)worker->to, message("thread", "done")) == 0);
        CHECK(freeBatchID(worker->a, batch) == 0);
    }
    return NULL;
}

static void threads_call_without_a_lock(transfer_engine_t a, transfer_engine_t b) {
    unsigned char *source = memory(4), *target = memory(0);
    CHECK(registerLocalMemory(b, target, SIZE, "*", 1) == 0);
    Worker workers[4];
    pthread_t threads[4];
    for (unsigned i = 0; i < 4; i++) {
        const Worker worker = {a, segment_of(a, b), source, target, i};
        workers[i] = worker;
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (unsigned i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(is_filled(target, SIZE, 4));
    int messages = 0, size = 0;
    for (struct notify_msg *some; (some = getNotifsFromEngine(b, &size)) != NULL; messages += size)
        CHECK(freeNotifsMsgBuf(some, size) == 0);
    CHECK(messages == 120);
    CHECK(unregisterLocalMemory(b, target) == 0);
    free(source);
    free(target);
}

/* Its peer ends while bytes move: every task ends, as complete or as failed, and none stays. */
static void the_end_of_a_peer_ends_its_tasks(transfer_engine_t a) {
    transfer_engine_t b = create();
    const segment_id_t to = segment_of(a, b);
    unsigned char *source = memory(1), *target = memory(0);
    CHECK(registerLocalMemory(b, target, SIZE, "*", 1) == 0);
    struct transfer_request one = request(OPCODE_WRITE, source, to, target, SIZE);
    const batch_id_t batch = allocateBatchID(a, 1024);
    for (int i = 0; i < 50; i++) CHECK(submitTransfer(a, batch, &one, 1) == 0);
    destroyTransferEngine(b);
    free(target);
    (void)ends_as(a, batch, 0, 50);
    CHECK(submitTransfer(a, batch, &one, 1) == 0 && ends_as(a, batch, 50, 1) == STATUS_FAILED);
    CHECK(freeBatchID(a, batch) == 0);
    free(source);
}

static void the_rest_does_no_harm(transfer_engine_t a) {
    CHECK(installTransport(a, "tcp", NULL) != NULL && uninstallTransport(a, "tcp") == 0);
    CHECK(syncSegmentCache(a) == 0 && discoverTopology(a) == 0 && warmupEfaSegment(a, "x") == 0);
    struct nic_load_stat stats[2];
    size_t count = 2;
    CHECK(getNicLoadStats(a, stats, &count) == 0 && count == 0);
    char text[16];
    CHECK(showLinks(a, text, sizeof text, 1) == 0 && strcmp(text, "[]") == 0);
    enableGracefulShutdown(a);
    CHECK(removeLocalSegment(a, "x") == 0);
}

static void calls_without_an_engine_are_errors(transfer_engine_t ended) {
    int here = 0;
    void *const wrong[] = {NULL, &here, ended, (void *)(uintptr_t)-1};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        transfer_engine_t engine = wrong[i];
        char text[64];
        struct transfer_status status;
        int size = 7;
        CHECK(getLocalIpAndPort(engine, text, sizeof text) < 0 && openSegment(engine, "x") < 0);
        CHECK(registerLocalMemory(engine, &here, 4, "*", 1) < 0 && unregisterLocalMemory(engine, &here) < 0);
        CHECK(allocateBatchID(engine, 1024) == INVALID_BATCH && freeBatchID(engine, 1) < 0);
        CHECK(submitTransfer(engine, 1, NULL, 0) < 0 && getTransferStatus(engine, 1, 0, &status) < 0);
        CHECK(getNotifsFromEngine(engine, &size) == NULL && installTransport(engine, "tcp", NULL) == NULL);
        CHECK(size == 0);
        destroyTransferEngine(engine);
    }
    CHECK(createTransferEngine(NULL, "127.0.0.1", "", 0, 1) == NULL);
    CHECK(createTransferEngine("etcd://x", "127.0.0.1", "", 0, 1) == NULL);
    CHECK(strstr(kvferry_last_error(), "P2PHANDSHAKE") != NULL);
}

int main(void) {
    transfer_engine_t a = create(), b = create();
    more_tasks_than_the_batch_was_made_for(a, b);
    stale_freed_and_invented_ids_are_errors(a, b);
    registering_has_mooncakes_codes(a);
    memory_beyond_what_was_registered_fails(a, b);
    messages_follow_the_data(a, b);
    an_engine_reaches_itself(a);
    threads_call_without_a_lock(a, b);
    the_end_of_a_peer_ends_its_tasks(a);
    batches_may_be_left(a, b);
    the_rest_does_no_harm(a);
    destroyTransferEngine(b);
    calls_without_an_engine_are_errors(b);
    /* The engine `a` and a batch stay open: the process ends all the same. */
    CHECK(allocateBatchID(a, 1024) != INVALID_BATCH);
    return 0;
}
