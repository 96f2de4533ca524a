/* Data races that the thread sanitizer must find, or its silence about the other programs says nothing: race CASE. */
#include "kvferry.h"

#include <stdatomic.h>

#include "check.h"

#define SIZE (1u << 20)

static int shared;
/* Says that the callback ran, and orders nothing. */
static atomic_int has_run;

static void count(void *user, const kvferry_error *why, const kvferry_transfer_stats *stats) {
    CHECK(user == NULL && why == NULL && stats != NULL);
    shared++;
    atomic_store_explicit(&has_run, 1, memory_order_relaxed);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    const int in_callback = strcmp(argv[1], "callback") == 0;
    CHECK(in_callback || strcmp(argv[1], "memory") == 0);
    kvferry_agent_options settings;
    memset(&settings, 0, sizeof settings);
    settings.size = sizeof settings;
    settings.transports = "tcp";
    kvferry_agent *agent = NULL, *other = NULL;
    CHECK(kvferry_agent_start(&settings, &agent, NULL) == 0 && kvferry_agent_start(&settings, &other, NULL) == 0);
    unsigned char *const source = (unsigned char *)calloc(1, SIZE), *const target = (unsigned char *)calloc(1, SIZE);
    kvferry_region *from = NULL, *to = NULL;
    CHECK(kvferry_region_register(agent, source, SIZE, KVFERRY_ACCESS_NONE, NULL, &from, NULL) == 0);
    CHECK(kvferry_region_register(other, target, SIZE, KVFERRY_ACCESS_WRITE, NULL, &to, NULL) == 0);
    kvferry_remote remote;
    CHECK(kvferry_region_remote(to, &remote, NULL) == 0);
    char address[300];
    CHECK(kvferry_agent_address(other, address, sizeof address, NULL) == 0);
    kvferry_peer *peer = NULL;
    CHECK(kvferry_peer_open(agent, address, &peer, NULL) == 0);
    CHECK(kvferry_peer_connect(peer, 0, NULL, NULL) == 0);
    kvferry_batch *batch = NULL;
    const kvferry_range all = {0, 0, SIZE};
    CHECK(kvferry_batch_new(1, &batch, NULL) == 0 && kvferry_batch_push(batch, from, &remote, &all, 1, NULL) == 0);

    kvferry_transfer_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.done = count;
    kvferry_transfer *transfer = NULL;
    CHECK(kvferry_write_async(peer, batch, &options, &transfer, NULL) == 0);
    for (int i = 0; i < 30000 && !atomic_load_explicit(&has_run, memory_order_relaxed); i++) pause_ms(1);
    /* Both have happened, but nothing orders this after them: the callback, and sending the memory. */
    if (in_callback)
        shared++;
    else
        source[SIZE / 2] = 1;
    CHECK(kvferry_transfer_wait(transfer, UINT64_MAX, NULL, NULL) == 0);
    return 0;
}
