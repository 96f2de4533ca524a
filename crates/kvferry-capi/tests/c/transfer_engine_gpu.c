/* Memory of GPUs through Mooncake's C API, on the fake driver, whose path is the argument. */
#include "kvferry_transfer_engine.h"

#include "fake_gpu.h"

#define SIZE (1u << 16)

static transfer_engine_t create(void) {
    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
    CHECK(engine != NULL);
    return engine;
}

/* Starts a task for all bytes but the first, and waits for its end. */
static int moves(transfer_engine_t engine, int opcode, void *local, segment_id_t to, uint64_t remote) {
    struct transfer_request request;
    memset(&request, 0, sizeof request);
    request.opcode = opcode;
    request.source = (unsigned char *)local + 1;
    request.target_id = to;
    request.target_offset = remote + 1;
    request.length = SIZE - 1;
    const batch_id_t batch = allocateBatchID(engine, 1);
    CHECK(batch != INVALID_BATCH);
    if (submitTransfer(engine, batch, &request, 1) != 0) {
        CHECK(freeBatchID(engine, batch) == 0);
        return STATUS_INVALID;
    }
    struct transfer_status status;
    do {
        CHECK(getTransferStatus(engine, batch, 0, &status) == 0);
        pause_ms(1);
    } while (status.status == STATUS_WAITING || status.status == STATUS_PENDING);
    CHECK(freeBatchID(engine, batch) == 0);
    return status.status;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    open_driver(argv[1]);
    void *context;
    uint64_t ours, theirs;
    CALL("cuInit", (unsigned), 0);
    CALL("cuDevicePrimaryCtxRetain", (void **, int), &context, 0);
    CALL("cuCtxPushCurrent_v2", (void *), context);
    CALL("cuMemAlloc_v2", (uint64_t *, size_t), &ours, SIZE);
    CALL("cuMemAlloc_v2", (uint64_t *, size_t), &theirs, SIZE);
    static unsigned char source[SIZE], target[SIZE];
    fill(source, SIZE, 1);
    CALL("fakecuda_write", (uint64_t, const unsigned char *, size_t), ours, source, SIZE);
    CALL("fakecuda_write", (uint64_t, const unsigned char *, size_t), theirs, target, SIZE);

    transfer_engine_t a = create(), b = create();
    void *const gpu = (void *)(uintptr_t)ours;
    buffer_entry_t buffers[2] = {{(void *)(uintptr_t)theirs, SIZE}, {target, SIZE}};
    CHECK(registerLocalMemory(a, gpu, SIZE, "cuda:0", 1) == 0);
    CHECK(registerLocalMemory(a, gpu, 16, NULL, 1) == -7);
    CHECK(registerLocalMemoryBatch(b, buffers, 2, "*") == 0);
    char address[64];
    CHECK(getLocalIpAndPort(b, address, sizeof address) == 0);
    const segment_id_t segment = openSegment(a, address);
    CHECK(segment > 0);

    /* From one GPU's memory to that of another, and on to the host's. */
    CHECK(moves(a, OPCODE_WRITE, gpu, segment, theirs) == STATUS_COMPLETED);
    CHECK(moves(a, OPCODE_READ, gpu, segment, theirs) == STATUS_COMPLETED);
    CHECK(moves(a, OPCODE_WRITE, gpu, segment, (uint64_t)(uintptr_t)target) == STATUS_COMPLETED);
    CHECK(target[0] == 0 && memcmp(source + 1, target + 1, SIZE - 1) == 0);
    CALL("fakecuda_read", (uint64_t, unsigned char *, size_t), theirs, target, SIZE);
    CHECK(target[0] == 0 && memcmp(source + 1, target + 1, SIZE - 1) == 0);

    CHECK(unregisterLocalMemory(a, gpu) == 0);
    CHECK(moves(a, OPCODE_WRITE, gpu, segment, theirs) == STATUS_INVALID);
    destroyTransferEngine(a);
    destroyTransferEngine(b);
    CALL("cuMemFree_v2", (uint64_t), ours);
    CALL("cuMemFree_v2", (uint64_t), theirs);
    puts("ok");
    return 0;
}
