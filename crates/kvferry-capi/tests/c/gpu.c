/* Memory of GPUs on the fake driver, whose path is the argument. */
#include "kvferry.h"

#include <sys/wait.h>

#include "fake_gpu.h"

#define SIZE (1u << 16)

static kvferry_error error;

/* A child of a process with a GPU: old handles are refused, and its own agent moves host memory. Ends the process. */
static void run_child(kvferry_peer *old, kvferry_batch *batch, kvferry_region *gpu, kvferry_transfer_options *options,
                      const char *address, uint64_t remote) {
    static unsigned char bytes[SIZE];
    memset(bytes, 9, SIZE);
    CHECK(kvferry_write(old, batch, options, NULL, &error) == KVFERRY_FORKED);
    CHECK(kvferry_region_unregister(gpu, &error) == KVFERRY_FORKED);
    kvferry_agent *fresh;
    kvferry_region *host;
    kvferry_peer *peer;
    kvferry_batch *by_address;
    kvferry_addresses pair = {bytes, remote, SIZE};
    CHECK(kvferry_agent_start(NULL, &fresh, &error) == 0);
    CHECK(kvferry_region_register_cuda(fresh, (uint64_t)(uintptr_t)bytes, SIZE, -1, KVFERRY_ACCESS_NONE, NULL, &host,
                                       &error) != 0);
    CHECK(strstr(error.text, "forked") != NULL);
    CHECK(kvferry_region_register(fresh, bytes, SIZE, KVFERRY_ACCESS_NONE, NULL, &host, &error) == 0);
    CHECK(kvferry_peer_open(fresh, address, &peer, &error) == 0);
    CHECK(kvferry_batch_new(1, &by_address, &error) == 0);
    CHECK(kvferry_batch_push_addresses(by_address, &pair, 1, &error) == 0);
    CHECK(kvferry_write(peer, by_address, NULL, NULL, &error) == 0);
    _exit(0);
}

/* The number of a name in the text of counters. */
static long number(const char *text, const char *name) {
    char key[64];
    snprintf(key, sizeof key, "\"%s\":", name);
    const char *found = strstr(text, key);
    CHECK(found != NULL);
    return atol(found + strlen(key));
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    open_driver(argv[1]);
    error.size = sizeof error;
    kvferry_agent *a, *b;
    CHECK(kvferry_agent_start(NULL, &a, &error) == 0 && kvferry_agent_start(NULL, &b, &error) == 0);

    void *context, *stream;
    uint64_t memory;
    CALL("cuInit", (unsigned), 0);
    CALL("cuDevicePrimaryCtxRetain", (void **, int), &context, 0);
    CALL("cuCtxPushCurrent_v2", (void *), context);
    CALL("cuMemAlloc_v2", (uint64_t *, size_t), &memory, SIZE);
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    static unsigned char source[SIZE], target[SIZE];
    fill(source, SIZE, 1);
    CALL("fakecuda_write", (uint64_t, const unsigned char *, size_t), memory, source, SIZE);

    kvferry_region *gpu, *host;
    CHECK(kvferry_region_register_cuda(a, memory, SIZE, 1, KVFERRY_ACCESS_NONE, NULL, &gpu, &error) ==
          KVFERRY_INVALID_ARGUMENT);
    CHECK(strstr(error.text, "not of GPU 1") != NULL);
    CHECK(kvferry_region_register_cuda(a, (uint64_t)(uintptr_t)source, SIZE, -1, KVFERRY_ACCESS_NONE, NULL, &gpu,
                                       &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(strstr(error.text, "register it as host memory") != NULL);
    CHECK(kvferry_region_register_cuda(a, memory, SIZE, -1, KVFERRY_ACCESS_NONE, NULL, &gpu, &error) == 0);
    CHECK(kvferry_region_register(b, target, SIZE, KVFERRY_ACCESS_READ | KVFERRY_ACCESS_WRITE, "kv", &host, &error) == 0);
    char address[300];
    kvferry_peer *peer;
    kvferry_remote remote;
    CHECK(kvferry_agent_address(b, address, sizeof address, &error) == 0);
    CHECK(kvferry_peer_open(a, address, &peer, &error) == 0);
    CHECK(kvferry_peer_region(peer, "kv", 0, &remote, &error) == 0);
    kvferry_batch *batch;
    kvferry_range range = {0, 0, SIZE};
    CHECK(kvferry_batch_new(1, &batch, &error) == 0);
    CHECK(kvferry_batch_push(batch, gpu, &remote, &range, 1, &error) == 0);

    CHECK(kvferry_write(peer, batch, NULL, NULL, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(strstr(error.text, "say what the transfer comes after") != NULL);
    kvferry_after after[2] = {{KVFERRY_AFTER_STREAM, 0, (uint64_t)(uintptr_t)stream}, {KVFERRY_AFTER_HOST, 0, 0}};
    kvferry_transfer_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.after = after;
    options.after_count = 2;
    CHECK(kvferry_write(peer, batch, &options, NULL, &error) == 0);
    CHECK(memcmp(source, target, SIZE) == 0);
    after[0].kind = 7;
    CHECK(kvferry_read(peer, batch, &options, NULL, &error) == KVFERRY_INVALID_ARGUMENT);
    /* Fields that an element does not use must be zero: they may get a meaning later. */
    after[0].kind = KVFERRY_AFTER_STREAM;
    after[0].reserved = 1;
    CHECK(kvferry_read(peer, batch, &options, NULL, &error) == KVFERRY_INVALID_ARGUMENT);
    after[0] = after[1];
    after[0].handle = 1;
    CHECK(kvferry_read(peer, batch, &options, NULL, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(strstr(error.text, "to zero") != NULL);
    after[0].kind = KVFERRY_AFTER_EVENT;
    after[0].handle = 0;
    CHECK(kvferry_read(peer, batch, &options, NULL, &error) == KVFERRY_INVALID_ARGUMENT);
    memset(target, 5, SIZE);
    after[0] = after[1];
    kvferry_transfer *transfer;
    CHECK(kvferry_read_async(peer, batch, &options, &transfer, &error) == 0);
    CHECK(kvferry_transfer_wait(transfer, UINT64_MAX, NULL, &error) == 0);
    CALL("fakecuda_read", (uint64_t, unsigned char *, size_t), memory, source, SIZE);
    CHECK(memcmp(source, target, SIZE) == 0);

    /* The counters, as JSON: the agent's and the GPU's. */
    static char stats[16384];
    CHECK(kvferry_agent_stats(a, stats, 16, &error) == KVFERRY_TOO_LARGE && strstr(error.text, "buffer of") != NULL);
    CHECK(kvferry_agent_stats(NULL, stats, sizeof stats, &error) == KVFERRY_BAD_HANDLE);
    CHECK(kvferry_agent_stats(a, stats, sizeof stats, &error) == 0);
    CHECK(strlen(stats) < 4096 + 2048);
    CHECK(stats[0] == '{' && stats[strlen(stats) - 1] == '}');
    CHECK(number(stats, "transfers_done") == 2 && number(stats, "fallbacks_peer_device") == 0);
    CHECK(number(stats, "gpu0_bytes_out") == SIZE && number(stats, "gpu0_bytes_in") == SIZE);
    CHECK(number(stats, "gpu0_kernel_refused") == 0 && number(stats, "gpu0_lost") == 0);
    CHECK(kvferry_agent_stats(b, stats, sizeof stats, &error) == 0);
    CHECK(number(stats, "transfers_done") == 0);

    /* Memory of the GPU, named by address: the processor can't touch it. */
    kvferry_region_info info;
    memset(&info, 0, sizeof info);
    info.size = sizeof info;
    CHECK(kvferry_region_facts(gpu, &info, &error) == 0 && (uint64_t)(uintptr_t)info.address == memory);
    kvferry_batch *by_address;
    kvferry_addresses pair = {info.address, remote.address, SIZE};
    CHECK(kvferry_batch_new(1, &by_address, &error) == 0);
    CHECK(kvferry_batch_push_addresses(by_address, &pair, 1, &error) == 0);
    CHECK(kvferry_write(peer, by_address, NULL, NULL, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(strstr(error.text, "say what the transfer comes after") != NULL);
    memset(target, 6, SIZE);
    CHECK(kvferry_write(peer, by_address, &options, NULL, &error) == 0);
    CHECK(memcmp(source, target, SIZE) == 0);

    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) run_child(peer, batch, gpu, &options, address, remote.address);
    int status = -1;
    uint64_t violations = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CALL("fakecuda_counter", (const char *, uint64_t *), "fork_violations", &violations);
    CHECK(violations == 0);
    for (size_t at = 0; at < SIZE; at++) CHECK(target[at] == 9);
    CHECK(kvferry_write(peer, batch, &options, NULL, &error) == 0);
    CHECK(memcmp(source, target, SIZE) == 0);

    CHECK(kvferry_transfer_free(transfer, &error) == 0);
    CHECK(kvferry_batch_free(batch, &error) == 0);
    CHECK(kvferry_region_unregister(gpu, &error) == 0);
    CHECK(kvferry_write(peer, by_address, &options, NULL, &error) == KVFERRY_NOT_REGISTERED);
    CHECK(strstr(error.text, "memory of a GPU that is not registered") != NULL);
    CHECK(kvferry_batch_free(by_address, &error) == 0);
    CHECK(kvferry_peer_free(peer, &error) == 0);
    CHECK(kvferry_region_unregister(host, &error) == 0);
    CALL("cuMemFree_v2", (uint64_t), memory);
    CHECK(kvferry_agent_free(a, &error) == 0 && kvferry_agent_free(b, &error) == 0);
    puts("ok");
    return 0;
}
