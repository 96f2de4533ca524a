/* Bad inputs where memory of GPUs is named, each refused with what to do, and some odd ones that work. On the fake driver,
   whose path is the argument. */
#include "kvferry.h"

#include "fake_gpu.h"

#define SIZE (1u << 16)
#define BOTH (KVFERRY_ACCESS_READ | KVFERRY_ACCESS_WRITE)
/* Engines of the fake driver: those of kernels. */
#define COMPUTE 8

static kvferry_error error;
static kvferry_agent *a, *b;
static kvferry_peer *peer;
static unsigned char host[SIZE], pinned[SIZE];

typedef struct {
    const char *what;
    uint64_t address;
    size_t len;
    const char *advice;
} bad_range;

typedef struct {
    uint64_t start, len;
} span;

typedef struct {
    const char *name;
    const span *reads;
    size_t read_count;
    const span *writes;
    size_t write_count;
    int fill, expect;
    uint64_t delay_ns;
} kernel;

static void *context_of(int device) {
    void *context;
    CALL("cuDevicePrimaryCtxRetain", (void **, int), &context, device);
    return context;
}

static uint64_t memory_of_gpu(void) {
    uint64_t memory;
    CALL("cuMemAlloc_v2", (uint64_t *, size_t), &memory, SIZE);
    return memory;
}

static void *new_stream(void) {
    void *stream;
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    return stream;
}

static void *new_event(void) {
    void *event;
    CALL("cuEventCreate", (void **, unsigned), &event, 2);
    return event;
}

static uint64_t number(const void *handle) { return (uint64_t)(uintptr_t)handle; }

static void has(const char *what, const char *advice) {
    if (strstr(error.text, advice) != NULL) return;
    fprintf(stderr, "%s: \"%s\" is not in: %s\n", what, advice, error.text);
    exit(1);
}

static void ranges_are_refused(uint64_t memory) {
    uint64_t freed = memory_of_gpu(), managed;
    CALL("cuMemFree_v2", (uint64_t), freed);
    CALL("cuMemAllocManaged", (uint64_t *, size_t, unsigned), &managed, SIZE, 1);
    CALL("cuMemHostRegister_v2", (void *, size_t, unsigned), pinned, SIZE, 0);
    const bad_range ranges[] = {
        {"null", 0, 16, "name bytes of one allocation"},
        {"nothing", memory, 0, "name bytes of one allocation"},
        {"the length overflows", memory, SIZE_MAX, "name bytes of one allocation"},
        {"the end overflows", UINT64_MAX - 4, 16, "name bytes of one allocation"},
        {"past the end", memory, SIZE + 1, "name bytes of one allocation"},
        {"from the middle past the end", memory + SIZE - 1, 2, "name bytes of one allocation"},
        {"freed", freed, SIZE, "was it freed?"},
        {"no memory at all", 16, 16, "was it freed?"},
        {"managed", managed, SIZE, "allocate it with cudaMalloc"},
        {"pageable", number(host), SIZE, "register it as host memory"},
        {"pinned", number(pinned), SIZE, "is pinned host memory"},
        {"pinned", number(pinned), SIZE, "register it as host memory"},
    };
    kvferry_region *region;
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        const bad_range *bad = &ranges[i];
        int code = kvferry_region_register_cuda(a, bad->address, bad->len, -1, BOTH, NULL, &region, &error);
        if (code != KVFERRY_INVALID_ARGUMENT) {
            fprintf(stderr, "%s: %d: %s\n", bad->what, code, error.text);
            exit(1);
        }
        has(bad->what, bad->advice);
    }
    /* A GPU's as the host's. */
    void *at = (void *)(uintptr_t)memory;
    CHECK(kvferry_region_register(a, at, SIZE, BOTH, NULL, &region, &error) == KVFERRY_UNSUPPORTED);
    has("a GPU's memory", "register it as memory of its GPU");
    at = (void *)(uintptr_t)managed;
    CHECK(kvferry_region_register(a, at, SIZE, BOTH, NULL, &region, &error) == KVFERRY_UNSUPPORTED);
    CALL("cuMemHostUnregister", (void *), pinned);
    CALL("cuMemFree_v2", (uint64_t), managed);
}

static int register_on(const char *device, uint64_t memory, kvferry_region **region) {
    return kvferry_region_register_cuda_device(a, memory, SIZE, device, BOTH, NULL, region, &error);
}

static uint64_t memory_of_second_gpu(void) {
    void *popped;
    CALL("cuCtxPushCurrent_v2", (void *), context_of(1));
    uint64_t memory = memory_of_gpu();
    CALL("cuCtxPopCurrent_v2", (void **), &popped);
    return memory;
}

/* The names of the fake driver's two GPUs. */
static void a_gpu_is_named_by_uuid_address_or_number(uint64_t memory) {
    const char *names[2][3] = {
        {"GPU-6b766665-7272-792d-6661-6b6563756400", "0000:10:00.0", "0"},
        {"GPU-6b766665-7272-792d-6661-6b6563756401", "0000:11:00.0", "1"},
    };
    const char *unknown[] = {"GPU-07070707-0707-0707-0707-070707070707", "0000:77:00.0", "7"};
    uint64_t memories[2] = {memory, memory_of_second_gpu()};
    kvferry_region *region;
    for (size_t gpu = 0; gpu < 2; gpu++) {
        for (size_t i = 0; i < 3; i++) {
            CHECK(register_on(names[gpu][i], memories[gpu], &region) == 0);
            CHECK(kvferry_region_unregister(region, &error) == 0);
            CHECK(register_on(names[gpu][i], memories[1 - gpu], &region) == KVFERRY_INVALID_ARGUMENT);
            has(names[gpu][i], gpu == 0 ? "not of GPU 0" : "not of GPU 1");
            CHECK(register_on(unknown[i], memories[gpu], &region) == KVFERRY_INVALID_ARGUMENT);
            has(unknown[i], "no CUDA device");
            has(unknown[i], names[0][0]);
            has(unknown[i], names[1][1]);
        }
    }
    CHECK(register_on("GPU-", memory, &region) == KVFERRY_INVALID_ARGUMENT);
    has("no name", "names no CUDA device");
    CHECK(register_on(NULL, memory, &region) == KVFERRY_INVALID_ARGUMENT);
    has("NULL", "the GPU's name is NULL");
}

static void order(kvferry_transfer_options *options, const kvferry_after *after) {
    memset(options, 0, sizeof *options);
    options->size = sizeof *options;
    options->after = after;
    options->after_count = 1;
}

/* No transfer begins after this stream or event. */
static void order_is_refused(kvferry_batch *batch, uint32_t kind, uint64_t handle, const char *advice) {
    kvferry_after after = {kind, 0, handle};
    kvferry_transfer_options options;
    kvferry_transfer *transfer;
    order(&options, &after);
    CHECK(kvferry_write(peer, batch, &options, NULL, &error) == KVFERRY_INVALID_ARGUMENT);
    has("write", advice);
    CHECK(kvferry_read(peer, batch, &options, NULL, &error) == KVFERRY_INVALID_ARGUMENT);
    has("read", advice);
    CHECK(kvferry_write_async(peer, batch, &options, &transfer, &error) == KVFERRY_INVALID_ARGUMENT);
    has("write_async", advice);
    CHECK(kvferry_read_async(peer, batch, &options, &transfer, &error) == KVFERRY_INVALID_ARGUMENT);
    has("read_async", advice);
}

static int end_capture(void *stream) {
    int (*function)(void *, void **);
    void *graph, *found = named("cuStreamEndCapture");
    memcpy(&function, &found, sizeof function);
    return function(stream, &graph);
}

static void orders_are_refused(kvferry_batch *batch) {
    void *stream = new_stream(), *event = new_event();
    CALL("cuStreamDestroy_v2", (void *), stream);
    CALL("cuEventDestroy_v2", (void *), event);
    order_is_refused(batch, KVFERRY_AFTER_STREAM, number(stream), "name one that exists");
    order_is_refused(batch, KVFERRY_AFTER_STREAM, 0x1234, "the CUDA driver has no stream 0x1234");
    order_is_refused(batch, KVFERRY_AFTER_EVENT, number(event), "name one that exists");
    order_is_refused(batch, KVFERRY_AFTER_EVENT, 0x1234, "the CUDA driver has no event 0x1234");
    order_is_refused(batch, KVFERRY_AFTER_EVENT, 0, "record the event");
    stream = new_stream();
    event = new_event();
    CALL("cuStreamBeginCapture_v2", (void *, int), stream, 0);
    CALL("cuEventRecord", (void *, void *), event, stream);
    order_is_refused(batch, KVFERRY_AFTER_STREAM, number(stream), "use a stream outside the capture");
    CHECK(end_capture(stream) == 0);
    CALL("cuStreamBeginCapture_v2", (void *, int), stream, 0);
    CALL("cuEventRecord", (void *, void *), event, stream);
    order_is_refused(batch, KVFERRY_AFTER_EVENT, number(event), "record one outside of it");
    /* A driver ends the capture when it is asked about such an event. */
    CHECK(end_capture(stream) != 0);
}

static void work_of_another_gpu_is_waited_for(kvferry_batch *batch, uint64_t memory) {
    CALL("cuCtxPushCurrent_v2", (void *), context_of(1));
    void *stream = new_stream(), *event = new_event(), *popped;
    const span writes = {memory, SIZE};
    const kernel fills = {"other", NULL, 0, &writes, 1, 7, -1, 1000};
    CALL("fakecuda_hold", (unsigned), COMPUTE);
    CALL("fakecuda_launch", (size_t, const kernel *), (size_t)(uintptr_t)stream, &fills);
    CALL("cuEventRecord", (void *, void *), event, stream);
    CALL("cuCtxPopCurrent_v2", (void **), &popped);
    kvferry_after after = {KVFERRY_AFTER_EVENT, 0, number(event)};
    kvferry_transfer_options options;
    kvferry_transfer *transfer;
    order(&options, &after);
    CHECK(kvferry_write_async(peer, batch, &options, &transfer, &error) == 0);
    CHECK(kvferry_transfer_wait(transfer, 20, NULL, &error) == KVFERRY_PENDING);
    CALL("fakecuda_hold", (unsigned), 0);
    CHECK(kvferry_transfer_wait(transfer, UINT64_MAX, NULL, &error) == 0);
    for (size_t i = 0; i < SIZE; i++) CHECK(host[i] == 7);
    CHECK(kvferry_transfer_free(transfer, &error) == 0);
}

/* Two pairs with the same bytes of the GPU: either wins. */
static void overlapping_destinations_are_read(kvferry_region *gpu, const kvferry_remote *remote, uint64_t memory) {
    kvferry_range ranges[2] = {{0, 0, SIZE / 2}, {0, SIZE / 2, SIZE / 2}};
    kvferry_batch *batch;
    kvferry_after after = {KVFERRY_AFTER_HOST, 0, 0};
    kvferry_transfer_options options;
    static unsigned char got[SIZE / 2];
    memset(host, 1, SIZE / 2);
    memset(host + SIZE / 2, 2, SIZE / 2);
    order(&options, &after);
    CHECK(kvferry_batch_new(2, &batch, &error) == 0);
    CHECK(kvferry_batch_push(batch, gpu, remote, ranges, 2, &error) == 0);
    CHECK(kvferry_read(peer, batch, &options, NULL, &error) == 0);
    CALL("fakecuda_read", (uint64_t, unsigned char *, size_t), memory, got, sizeof got);
    for (size_t i = 0; i < sizeof got; i++) CHECK(got[i] == 1 || got[i] == 2);
    CHECK(kvferry_batch_free(batch, &error) == 0);
}

static void a_removed_gpu_is_lost(kvferry_batch *batch, uint64_t memory) {
    kvferry_after after = {KVFERRY_AFTER_HOST, 0, 0};
    kvferry_transfer_options options;
    kvferry_region *region;
    void *stream = new_stream();
    order(&options, &after);
    CALL("fakecuda_fault", (const char *, uint64_t, uint64_t), "device_removed", 1, 1);
    /* The error of a GPU that is gone says nothing of the copies that it has begun. */
    CHECK(kvferry_write(peer, batch, &options, NULL, &error) != 0 && error.quiesced == 0);
    CHECK(kvferry_write(peer, batch, &options, NULL, &error) != 0);
    order_is_refused(batch, KVFERRY_AFTER_STREAM, number(stream), "GPU 0 is lost to this process");
    CHECK(kvferry_region_register_cuda(b, memory, SIZE, 0, BOTH, NULL, &region, &error) == KVFERRY_INVALID_ARGUMENT);
    has("a removed GPU", "restart the process");
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    open_driver(argv[1]);
    error.size = sizeof error;
    CHECK(kvferry_agent_start(NULL, &a, &error) == 0 && kvferry_agent_start(NULL, &b, &error) == 0);
    CALL("cuInit", (unsigned), 0);
    CALL("cuCtxPushCurrent_v2", (void *), context_of(0));
    uint64_t memory = memory_of_gpu();
    ranges_are_refused(memory);
    a_gpu_is_named_by_uuid_address_or_number(memory);

    kvferry_region *gpu, *target;
    kvferry_remote remote;
    kvferry_batch *batch;
    kvferry_range range = {0, 0, SIZE};
    char address[300];
    CHECK(kvferry_region_register_cuda(a, memory, SIZE, 0, BOTH, NULL, &gpu, &error) == 0);
    CHECK(kvferry_region_register(b, host, SIZE, BOTH, "kv", &target, &error) == 0);
    CHECK(kvferry_agent_address(b, address, sizeof address, &error) == 0);
    CHECK(kvferry_peer_open(a, address, &peer, &error) == 0);
    CHECK(kvferry_peer_region(peer, "kv", 0, &remote, &error) == 0);
    CHECK(kvferry_batch_new(1, &batch, &error) == 0);
    CHECK(kvferry_batch_push(batch, gpu, &remote, &range, 1, &error) == 0);
    orders_are_refused(batch);
    work_of_another_gpu_is_waited_for(batch, memory);
    overlapping_destinations_are_read(gpu, &remote, memory);
    a_removed_gpu_is_lost(batch, memory);

    CHECK(kvferry_batch_free(batch, &error) == 0);
    /* The copy of the GPU that is gone may still run. */
    CHECK(kvferry_region_unregister(gpu, &error) == KVFERRY_QUARANTINED);
    CHECK(kvferry_region_unregister(target, &error) == 0);
    CHECK(kvferry_peer_free(peer, &error) == 0);
    CHECK(kvferry_agent_free(a, &error) == 0 && kvferry_agent_free(b, &error) == 0);
    puts("ok");
    return 0;
}
