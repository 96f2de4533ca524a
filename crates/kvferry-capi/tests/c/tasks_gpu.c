/* Tasks whose blocks are in memory of GPUs, on the fake driver, whose path is the argument. */
#include "kvferry_tasks.h"

#include "fake_gpu.h"

#define SIZE (1u << 16)
#define HALF (SIZE / 2)
#define COMPUTE 8u

static kvferry_error error;

struct range {
    uint64_t start, len;
};

/* The kernel of the fake driver's control functions, in the same layout. */
struct kernel {
    const char *name;
    const struct range *reads;
    size_t read_count;
    const struct range *writes;
    size_t write_count;
    int fill, expect;
    uint64_t delay_ns;
};

static void fills(void *stream, uint64_t memory, int byte) {
    const struct range place = {memory, SIZE};
    struct kernel kernel;
    memset(&kernel, 0, sizeof kernel);
    kernel.name = "fill";
    kernel.writes = &place;
    kernel.write_count = 1;
    kernel.fill = byte;
    kernel.expect = -1;
    CALL("fakecuda_launch", (size_t, const struct kernel *), (size_t)stream, &kernel);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    open_driver(argv[1]);
    error.size = sizeof error;
    void *context, *stream;
    uint64_t ours, theirs;
    CALL("cuInit", (unsigned), 0);
    CALL("cuDevicePrimaryCtxRetain", (void **, int), &context, 0);
    CALL("cuCtxPushCurrent_v2", (void *), context);
    CALL("cuMemAlloc_v2", (uint64_t *, size_t), &ours, SIZE);
    CALL("cuMemAlloc_v2", (uint64_t *, size_t), &theirs, SIZE);
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);

    kvferry_agent *a, *b;
    kvferry_tasks *sends, *receives;
    kvferry_region *from, *into;
    char address[300];
    CHECK(kvferry_agent_start(NULL, &a, &error) == 0 && kvferry_agent_start(NULL, &b, &error) == 0);
    CHECK(kvferry_tasks_start(a, &sends, &error) == 0 && kvferry_tasks_start(b, &receives, &error) == 0);
    CHECK(kvferry_region_register_cuda(a, ours, SIZE, -1, KVFERRY_ACCESS_READ, NULL, &from, &error) == 0);
    CHECK(kvferry_region_register_cuda(b, theirs, SIZE, -1, KVFERRY_ACCESS_NONE, NULL, &into, &error) == 0);
    CHECK(kvferry_agent_address(b, address, sizeof address, &error) == 0);

    /* Two blocks, which the receiver wants in the other order. */
    kvferry_task_part source[2] = {{1, (void *)(uintptr_t)ours, HALF}, {2, (void *)(uintptr_t)(ours + HALF), HALF}};
    kvferry_task_part target[2] = {{2, (void *)(uintptr_t)theirs, HALF}, {1, (void *)(uintptr_t)(theirs + HALF), HALF}};
    kvferry_send_task *send;
    kvferry_recv_task *recv;
    CHECK(kvferry_send_task_start(sends, address, "k", source, 2, NULL, &send, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(strstr(error.text, "say what the transfer comes after") != NULL);
    CHECK(kvferry_recv_task_start(receives, "k", target, 2, NULL, &recv, &error) == KVFERRY_INVALID_ARGUMENT);

    /* When the tasks start, a kernel still computes the sent bytes, and another one uses the receiver's memory. */
    kvferry_after after = {KVFERRY_AFTER_STREAM, 0, (uint64_t)(uintptr_t)stream};
    kvferry_task_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.after = &after;
    options.after_count = 1;
    CALL("fakecuda_hold", (unsigned), COMPUTE);
    fills(stream, ours, 5);
    fills(stream, theirs, 9);
    CHECK(kvferry_send_task_start(sends, address, "k", source, 2, &options, &send, &error) == 0);
    CHECK(kvferry_recv_task_start(receives, "k", target, 2, &options, &recv, &error) == 0);
    CHECK(kvferry_send_task_wait(send, 30, &error) == KVFERRY_PENDING);
    kvferry_task_gauges held;
    held.size = sizeof held;
    CHECK(kvferry_tasks_held(receives, &held, &error) == 0);
    CHECK(held.parked == 0 && held.reads == 0);
    CALL("fakecuda_hold", (unsigned), 0);
    CHECK(kvferry_send_task_wait(send, UINT64_MAX, &error) == 0);
    CHECK(kvferry_recv_task_wait(recv, UINT64_MAX, &error) == 0);
    static unsigned char got[SIZE];
    CALL("fakecuda_read", (uint64_t, unsigned char *, size_t), theirs, got, SIZE);
    for (size_t i = 0; i < SIZE; i++) CHECK(got[i] == 5);
    CHECK(kvferry_send_task_free(send, &error) == 0 && kvferry_recv_task_free(recv, &error) == 0);

    /* A send that is cancelled while it waits for the GPU. */
    CALL("fakecuda_hold", (unsigned), COMPUTE);
    fills(stream, ours, 6);
    CHECK(kvferry_send_task_start(sends, address, "c", source, 2, &options, &send, &error) == 0);
    CHECK(kvferry_send_task_cancel(send, &error) == 0);
    CHECK(kvferry_send_task_wait(send, UINT64_MAX, &error) == KVFERRY_CANCELLED);
    CALL("fakecuda_hold", (unsigned), 0);
    CHECK(kvferry_send_task_free(send, &error) == 0);

    /* The receiver has host memory, and its blocks in the caller's order. */
    static unsigned char host[SIZE];
    kvferry_region *of_host;
    CHECK(kvferry_region_register(b, host, SIZE, KVFERRY_ACCESS_NONE, NULL, &of_host, &error) == 0);
    after.kind = KVFERRY_AFTER_HOST;
    after.handle = 0;
    fill(got, SIZE, 3);
    CALL("cuStreamSynchronize", (void *), stream);
    CALL("fakecuda_write", (uint64_t, const unsigned char *, size_t), ours, got, SIZE);
    target[0].address = host;
    target[1].address = host + HALF;
    CHECK(kvferry_recv_task_start(receives, "h", target, 2, NULL, &recv, &error) == 0);
    CHECK(kvferry_send_task_start(sends, address, "h", source, 2, &options, &send, &error) == 0);
    CHECK(kvferry_recv_task_wait(recv, UINT64_MAX, &error) == 0);
    CHECK(memcmp(host, got + HALF, HALF) == 0 && memcmp(host + HALF, got, HALF) == 0);
    CHECK(kvferry_send_task_wait(send, UINT64_MAX, &error) == 0);
    CHECK(kvferry_send_task_free(send, &error) == 0 && kvferry_recv_task_free(recv, &error) == 0);

    /* A kernel that fails never computes what is sent, which is not the receiver's fault. The GPU is lost afterwards. */
    after.kind = KVFERRY_AFTER_STREAM;
    after.handle = (uint64_t)(uintptr_t)stream;
    CALL("fakecuda_hold", (unsigned), COMPUTE);
    CALL("fakecuda_fault", (const char *, uint64_t, uint64_t), "illegal_address", (uint64_t)1, (uint64_t)1);
    fills(stream, ours, 7);
    CHECK(kvferry_send_task_start(sends, address, "f", source, 2, &options, &send, &error) == 0);
    CALL("fakecuda_hold", (unsigned), 0);
    CHECK(kvferry_send_task_wait(send, UINT64_MAX, &error) == KVFERRY_INTERNAL);
    CHECK(strstr(error.text, "computes what is sent") != NULL);
    CHECK(kvferry_send_task_free(send, &error) == 0);

    CHECK(kvferry_tasks_free(sends, &error) == 0 && kvferry_tasks_free(receives, &error) == 0);
    CHECK(kvferry_region_unregister(from, &error) == 0 && kvferry_region_unregister(into, &error) == 0);
    CHECK(kvferry_agent_free(a, &error) == 0 && kvferry_agent_free(b, &error) == 0);
    puts("ok");
    return 0;
}
