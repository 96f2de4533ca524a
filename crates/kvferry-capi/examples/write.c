/* Two agents in one process: one writes to the other's memory, and says so. */
#include <kvferry.h>
#include <stdio.h>
#include <string.h>

static kvferry_error error;

/* Ends the example if a call failed. */
static int failed(int code, const char *what) {
    if (code == KVFERRY_OK) return 0;
    fprintf(stderr, "%s: %s\n", what, error.text);
    return 1;
}

int main(void) {
    error.size = sizeof error;
    kvferry_agent_options options = {0};
    options.size = sizeof options;
    kvferry_agent *prefill = NULL, *decode = NULL;
    options.name = "prefill";
    if (failed(kvferry_agent_start(&options, &prefill, &error), "start prefill")) return 1;
    options.name = "decode";
    if (failed(kvferry_agent_start(&options, &decode, &error), "start decode")) return 1;

    /* The decode side lets its peer write to 4 KiB that it calls "kv". */
    static char source[4096], target[4096];
    strcpy(source, "key and value");
    kvferry_region *from = NULL, *to = NULL;
    if (failed(kvferry_region_register(prefill, source, sizeof source, KVFERRY_ACCESS_NONE, NULL, &from, &error),
               "register"))
        return 1;
    if (failed(kvferry_region_register(decode, target, sizeof target, KVFERRY_ACCESS_WRITE, "kv", &to, &error),
               "register"))
        return 1;

    /* The prefill side needs the address only, and asks for the region by its name. */
    char address[300];
    kvferry_peer *peer = NULL;
    kvferry_remote remote;
    if (failed(kvferry_agent_address(decode, address, sizeof address, &error), "address")) return 1;
    if (failed(kvferry_peer_open(prefill, address, &peer, &error), "open the peer")) return 1;
    if (failed(kvferry_peer_region(peer, "kv", 0, &remote, &error), "find the region")) return 1;

    kvferry_batch *batch = NULL;
    const kvferry_range ranges[] = {{0, 1024, 1024}, {1024, 0, 1024}};
    if (failed(kvferry_batch_new(2, &batch, &error), "new batch")) return 1;
    if (failed(kvferry_batch_push(batch, from, &remote, ranges, 2, &error), "push")) return 1;

    kvferry_transfer_options transfer = {0};
    transfer.size = sizeof transfer;
    transfer.notify_name = "request 7";
    if (failed(kvferry_write(peer, batch, &transfer, NULL, &error), "write")) return 1;

    kvferry_notification note = {0};
    note.size = sizeof note;
    if (failed(kvferry_notification_take(decode, 1000, &note, &error), "wait for the notification")) return 1;
    printf("%s from %s: %s\n", note.name, note.from, target + 1024);

    kvferry_notification_clear(&note);
    kvferry_batch_free(batch, NULL);
    kvferry_peer_free(peer, NULL);
    kvferry_region_unregister(from, NULL);
    kvferry_region_unregister(to, NULL);
    kvferry_agent_free(prefill, NULL);
    kvferry_agent_free(decode, NULL);
    return kvferry_handles_in_use() != 0;
}
