/* kvferry.h from C: transfers, their ends, and everything that a caller can do wrong. */
#include "kvferry.h"

#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "check.h"

#define SIZE (1u << 20)

static kvferry_error error;

typedef struct Two {
    kvferry_agent *a, *b;
    kvferry_peer *peer;
    kvferry_region *from, *to;
    kvferry_remote remote;
    unsigned char *source, *target;
} Two;

static Two start(const char *transports) {
    Two two;
    memset(&two, 0, sizeof two);
    error.size = sizeof error;
    kvferry_agent_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.transports = transports;
    CHECK(kvferry_agent_start(&options, &two.a, &error) == KVFERRY_OK);
    CHECK(kvferry_agent_start(&options, &two.b, &error) == KVFERRY_OK);
    two.source = (unsigned char *)malloc(SIZE);
    two.target = (unsigned char *)malloc(SIZE);
    fill(two.source, SIZE, 1);
    memset(two.target, 0, SIZE);
    CHECK(kvferry_region_register(two.a, two.source, SIZE, KVFERRY_ACCESS_NONE, NULL, &two.from, &error) == 0);
    CHECK(kvferry_region_register(two.b, two.target, SIZE, KVFERRY_ACCESS_READ | KVFERRY_ACCESS_WRITE, "kv", &two.to,
                                  &error) == 0);
    char address[300];
    CHECK(kvferry_agent_address(two.b, address, sizeof address, &error) == 0);
    CHECK(kvferry_peer_open(two.a, address, &two.peer, &error) == 0);
    CHECK(kvferry_peer_region(two.peer, "kv", 0, &two.remote, &error) == 0);
    return two;
}

static void end(Two *two) {
    CHECK(kvferry_peer_free(two->peer, &error) == 0);
    CHECK(kvferry_region_unregister(two->from, &error) == 0);
    CHECK(kvferry_region_unregister(two->to, &error) == 0);
    CHECK(kvferry_agent_free(two->a, &error) == 0);
    CHECK(kvferry_agent_free(two->b, &error) == 0);
    free(two->source);
    free(two->target);
    CHECK(kvferry_handles_in_use() == 0);
}

/* 1 024 pieces, in reverse order at the peer. */
static kvferry_batch *reversed(const Two *two) {
    enum { PIECES = 1024 };
    static kvferry_range ranges[PIECES];
    const unsigned len = SIZE / PIECES;
    for (unsigned i = 0; i < PIECES; i++) {
        ranges[i].local_offset = (uint64_t)i * len;
        ranges[i].remote_offset = (uint64_t)(PIECES - 1 - i) * len;
        ranges[i].len = len;
    }
    kvferry_batch *batch = NULL;
    CHECK(kvferry_batch_new(PIECES, &batch, &error) == 0);
    CHECK(kvferry_batch_push(batch, two->from, &two->remote, ranges, PIECES, &error) == 0);
    return batch;
}

static void must_be_reversed(const Two *two) {
    const unsigned len = SIZE / 1024;
    for (unsigned i = 0; i < 1024; i++)
        CHECK(memcmp(two->source + i * len, two->target + (1023 - i) * len, len) == 0);
}

static kvferry_transfer_options plain(void) {
    kvferry_transfer_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    return options;
}

static void every_byte_lands_by_write_and_read(void) {
    const char *const transports[] = {"local", "tcp"};
    for (int i = 0; i < 2; i++) {
        Two two = start(transports[i]);
        kvferry_batch *batch = reversed(&two);
        kvferry_transfer_stats stats;
        memset(&stats, 0, sizeof stats);
        stats.size = sizeof stats;
        CHECK(kvferry_write(two.peer, batch, NULL, &stats, &error) == 0);
        CHECK(stats.bytes == SIZE && stats.pairs == 1024 && strcmp(stats.transport, transports[i]) == 0);
        must_be_reversed(&two);
        memset(two.source, 0, SIZE);
        fill(two.target, SIZE, 3);
        CHECK(kvferry_read(two.peer, batch, NULL, NULL, NULL) == 0);
        must_be_reversed(&two);
        CHECK(kvferry_batch_free(batch, &error) == 0);
        end(&two);
    }
}

static void a_transfer_ends_by_descriptor_and_by_waiting(void) {
    Two two = start(NULL);
    kvferry_batch *batch = reversed(&two);
    kvferry_transfer *transfer = NULL;
    CHECK(kvferry_write_async(two.peer, batch, NULL, &transfer, &error) == 0);
    CHECK(kvferry_batch_free(batch, &error) == 0);
    int fd = -1;
    CHECK(kvferry_transfer_fd(transfer, &fd, &error) == 0);
    struct pollfd ready = {fd, POLLIN, 0};
    CHECK(poll(&ready, 1, 30000) == 1);
    CHECK(kvferry_transfer_wait(transfer, 0, NULL, &error) == KVFERRY_OK);
    CHECK(kvferry_transfer_wait(transfer, UINT64_MAX, NULL, &error) == KVFERRY_OK);
    must_be_reversed(&two);
    CHECK(kvferry_transfer_free(transfer, &error) == 0);
    CHECK(kvferry_transfer_free(transfer, &error) == KVFERRY_BAD_HANDLE);
    end(&two);
}

typedef struct Ended {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int calls, code;
    uint64_t bytes;
} Ended;

static void ended(void *user, const kvferry_error *why, const kvferry_transfer_stats *stats) {
    Ended *ended = (Ended *)user;
    CHECK((why == NULL) != (stats == NULL));
    pthread_mutex_lock(&ended->lock);
    ended->calls++;
    ended->code = why ? why->code : 0;
    ended->bytes = stats ? stats->bytes : 0;
    pthread_cond_signal(&ended->changed);
    pthread_mutex_unlock(&ended->lock);
}

static void wait_for(Ended *ended, int calls) {
    pthread_mutex_lock(&ended->lock);
    while (ended->calls < calls) pthread_cond_wait(&ended->changed, &ended->lock);
    pthread_mutex_unlock(&ended->lock);
}

static void a_callback_is_called_once_with_the_outcome(void) {
    Two two = start(NULL);
    kvferry_batch *batch = reversed(&two);
    Ended end_of = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, -1, 0};
    kvferry_transfer_options options = plain();
    options.done = ended;
    options.user = &end_of;
    for (int round = 1; round <= 50; round++) {
        kvferry_transfer *transfer = NULL;
        CHECK(kvferry_write_async(two.peer, batch, &options, round % 2 ? &transfer : NULL, &error) == 0);
        if (transfer) CHECK(kvferry_transfer_free(transfer, &error) == 0);
        wait_for(&end_of, round);
        CHECK(end_of.code == 0 && end_of.bytes == SIZE);
    }
    /* The peer has unregistered the memory: the callback has the reason. */
    CHECK(kvferry_region_unregister(two.to, &error) == 0);
    CHECK(kvferry_write_async(two.peer, batch, &options, NULL, &error) == 0);
    wait_for(&end_of, 51);
    CHECK(end_of.code == KVFERRY_NOT_REGISTERED);
    /* A shutdown ends what is under way. */
    CHECK(kvferry_agent_shutdown(two.a, &error) == 0);
    const int code = kvferry_write_async(two.peer, batch, &options, NULL, &error);
    CHECK(code == 0);
    wait_for(&end_of, 52);
    CHECK(end_of.code == KVFERRY_SHUTDOWN && end_of.calls == 52);
    CHECK(kvferry_batch_free(batch, &error) == 0);
    CHECK(kvferry_region_register(two.b, two.target, SIZE, KVFERRY_ACCESS_WRITE, NULL, &two.to, &error) == 0);
    end(&two);
}

typedef struct Shuts {
    Ended ended;
    Two *two;
    pthread_t caller;
    int shutdown, unregister, is_own_thread;
} Shuts;

static void shuts_down(void *user, const kvferry_error *why, const kvferry_transfer_stats *stats) {
    Shuts *shuts = (Shuts *)user;
    kvferry_error of_callback;
    memset(&of_callback, 0, sizeof of_callback);
    of_callback.size = sizeof of_callback;
    shuts->is_own_thread = !pthread_equal(pthread_self(), shuts->caller);
    if (shuts->is_own_thread) {
        shuts->shutdown = kvferry_agent_shutdown(shuts->two->a, &of_callback);
        shuts->unregister = kvferry_region_unregister(shuts->two->from, &of_callback);
    }
    ended(&shuts->ended, why, stats);
}

/* The agent's threads are not stopped before the callback has returned: until then they may use the memory. */
static void memory_is_not_given_back_in_a_callback_that_shuts_its_agent_down(void) {
    Two two = start("tcp");
    kvferry_batch *batch = reversed(&two);
    Shuts shuts = {{PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, -1, 0}, &two, pthread_self(), -1, -1, 0};
    kvferry_transfer_options options = plain();
    options.done = shuts_down;
    options.user = &shuts;
    /* The caller's thread may see the end first. */
    for (int round = 1; !shuts.is_own_thread; round++) {
        CHECK(round <= 10000);
        CHECK(kvferry_write_async(two.peer, batch, &options, NULL, &error) == 0);
        wait_for(&shuts.ended, round);
    }
    CHECK(shuts.shutdown == 0 && shuts.unregister == KVFERRY_QUARANTINED);
    CHECK(kvferry_agent_shutdown(two.a, &error) == 0);
    CHECK(kvferry_batch_free(batch, &error) == 0);
    end(&two);
}

static void notifications_follow_the_data_with_their_bytes(void) {
    Two two = start(NULL);
    kvferry_batch *batch = reversed(&two);
    const uint8_t message[5] = {1, 0, 2, 0, 255};
    kvferry_transfer_options options = plain();
    options.notify_name = "done";
    options.notify_message = message;
    options.notify_len = sizeof message;
    int fd = -1;
    CHECK(kvferry_notification_fd(two.b, &fd, &error) == 0);
    CHECK(kvferry_write(two.peer, batch, &options, NULL, &error) == 0);
    struct pollfd ready = {fd, POLLIN, 0};
    CHECK(poll(&ready, 1, 30000) == 1);
    must_be_reversed(&two);
    kvferry_notification note;
    memset(&note, 0, sizeof note);
    note.size = sizeof note;
    CHECK(kvferry_notification_take(two.b, 0, &note, &error) == 0);
    CHECK(strcmp(note.name, "done") == 0 && note.message_len == 5 && memcmp(note.message, message, 5) == 0);
    kvferry_notification_clear(&note);
    kvferry_notification_clear(&note);
    kvferry_notification_clear(NULL);
    CHECK(kvferry_notification_take(two.b, 0, &note, &error) == KVFERRY_PENDING && note.name == NULL);
    CHECK(kvferry_notify(two.peer, "alone", NULL, 0, 0, &error) == 0);
    CHECK(kvferry_notification_take(two.b, 10000, &note, &error) == 0 && note.message_len == 0);
    kvferry_notification_clear(&note);
    note.size = sizeof note - 4;
    CHECK(kvferry_notification_take(two.b, 0, &note, &error) == KVFERRY_INVALID_ARGUMENT);
    note.size = 8;
    CHECK(kvferry_notification_take(two.b, 0, &note, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(kvferry_batch_free(batch, &error) == 0);
    end(&two);
}

static void wrong_handles_are_errors(void) {
    Two two = start(NULL);
    kvferry_batch *batch = NULL;
    CHECK(kvferry_batch_new(0, &batch, &error) == 0);
    CHECK(kvferry_write(NULL, batch, NULL, NULL, &error) == KVFERRY_BAD_HANDLE && strstr(error.text, "NULL"));
    /* Handles of another kind, addresses, numbers: nothing is dereferenced. */
    CHECK(kvferry_write((kvferry_peer *)(void *)batch, batch, NULL, NULL, &error) == KVFERRY_BAD_HANDLE);
    CHECK(kvferry_write((kvferry_peer *)(void *)&two, batch, NULL, NULL, &error) == KVFERRY_BAD_HANDLE);
    CHECK(kvferry_write((kvferry_peer *)(uintptr_t)-1, batch, NULL, NULL, &error) == KVFERRY_BAD_HANDLE);
    for (uintptr_t number = 1; number < 4096; number++) {
        kvferry_transfer *invented = (kvferry_transfer *)number;
        CHECK(kvferry_transfer_wait(invented, 0, NULL, &error) == KVFERRY_BAD_HANDLE);
    }
    CHECK(kvferry_batch_free(batch, &error) == 0);
    CHECK(kvferry_batch_free(batch, &error) == KVFERRY_BAD_HANDLE && strstr(error.text, "freed"));
    CHECK(strcmp(kvferry_last_error(), error.text) == 0);
    CHECK(kvferry_batch_clear(batch, NULL) == KVFERRY_BAD_HANDLE);
    CHECK(strcmp(kvferry_error_name(KVFERRY_BAD_HANDLE), "bad_handle") == 0);
    CHECK(strcmp(kvferry_error_name(-7), "unknown") == 0 && strcmp(kvferry_error_name(99), "unknown") == 0);
    end(&two);
}

static void wrong_arguments_are_errors_that_say_so(void) {
    Two two = start(NULL);
    kvferry_agent *agent = NULL;
    kvferry_agent_options options;
    memset(&options, 0, sizeof options);
    CHECK(kvferry_agent_start(&options, &agent, &error) == KVFERRY_INVALID_ARGUMENT && strstr(error.text, "size"));
    options.size = sizeof options;
    CHECK(kvferry_agent_start(&options, NULL, &error) == KVFERRY_INVALID_ARGUMENT);
    options.transports = "pigeon";
    CHECK(kvferry_agent_start(&options, &agent, &error) == KVFERRY_INVALID_ARGUMENT && agent == NULL);
    options.transports = NULL;
    options.name = "\xff";
    CHECK(kvferry_agent_start(&options, &agent, &error) == KVFERRY_INVALID_ARGUMENT && strstr(error.text, "UTF-8"));
    options.name = NULL;
    options.checksum = 9;
    CHECK(kvferry_agent_start(&options, &agent, &error) == KVFERRY_INVALID_ARGUMENT);
    options.checksum = 0;
    /* A key that could not be loaded is not the wish for an agent without a secret. */
    options.secret_len = 32;
    CHECK(kvferry_agent_start(&options, &agent, &error) == KVFERRY_INVALID_ARGUMENT && strstr(error.text, "secret"));
    options.secret = (const uint8_t *)"";
    options.secret_len = 0;
    CHECK(kvferry_agent_start(&options, &agent, &error) == KVFERRY_INVALID_ARGUMENT && strstr(error.text, "secret"));
    CHECK(agent == NULL);

    /* A program of a later version: what this library does not know must be zero. */
    struct {
        kvferry_transfer_options known;
        uint64_t later;
    } wide;
    memset(&wide, 0, sizeof wide);
    wide.known.size = sizeof wide;
    kvferry_batch *batch = reversed(&two);
    CHECK(kvferry_write(two.peer, batch, &wide.known, NULL, &error) == 0);
    wide.later = 1;
    CHECK(kvferry_write(two.peer, batch, &wide.known, NULL, &error) == KVFERRY_UNSUPPORTED);
    /* A program of an earlier version: it knows less, and more is not written. */
    kvferry_transfer_stats stats;
    memset(&stats, 0xee, sizeof stats);
    stats.size = 16;
    CHECK(kvferry_write(two.peer, batch, NULL, &stats, &error) == 0);
    CHECK(stats.size == 16 && stats.bytes == SIZE && stats.streams == 0xeeeeeeee);

    size_t pairs = 0;
    const kvferry_range ranges[3] = {{0, 0, 1}, {SIZE - 1, 0, 2}, {0, 0, 1}};
    CHECK(kvferry_batch_push(batch, two.from, &two.remote, ranges, 3, &error) == KVFERRY_OUT_OF_BOUNDS);
    CHECK(kvferry_batch_push(batch, two.from, NULL, ranges, 1, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(kvferry_batch_push(batch, two.from, &two.remote, NULL, 1, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(kvferry_batch_size(batch, &pairs, NULL, &error) == 0 && pairs == 1024);
    CHECK(kvferry_write_async(two.peer, batch, NULL, NULL, &error) == KVFERRY_INVALID_ARGUMENT);
    kvferry_region *again = NULL;
    CHECK(kvferry_region_register(two.a, two.source + 1, 1, 0, NULL, &again, &error) == KVFERRY_OVERLAP);
    CHECK(kvferry_region_register(two.a, NULL, 4096, 0, NULL, &again, &error) == KVFERRY_INVALID_ARGUMENT);
    /* As the addresses of a device are: reserved, and without access. */
    void *reserved = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(reserved != MAP_FAILED);
    CHECK(kvferry_region_register(two.a, reserved, 4096, 0, NULL, &again, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(strstr(error.text, "not host memory"));
    CHECK(munmap(reserved, 4096) == 0);
    CHECK(kvferry_region_register(two.a, two.target, 1, 8, NULL, &again, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(kvferry_region_register(two.a, two.target, 1, 0, "", &again, &error) == KVFERRY_INVALID_ARGUMENT);
    char tiny[4];
    CHECK(kvferry_agent_address(two.a, tiny, sizeof tiny, &error) == KVFERRY_TOO_LARGE);
    kvferry_peer *nobody = NULL;
    CHECK(kvferry_peer_open(two.a, "127.0.0.1:1", &nobody, &error) == 0);
    CHECK(kvferry_peer_connect(nobody, 5000, NULL, &error) == KVFERRY_UNREACHABLE);
    CHECK(kvferry_peer_free(nobody, &error) == 0);
    CHECK(kvferry_batch_free(batch, &error) == 0);
    end(&two);
}

static void after_a_shutdown_calls_say_so_and_handles_are_freed(void) {
    Two two = start(NULL);
    kvferry_batch *batch = reversed(&two);
    CHECK(kvferry_agent_free(two.a, &error) == 0);
    CHECK(kvferry_write(two.peer, batch, NULL, NULL, &error) == KVFERRY_SHUTDOWN);
    CHECK(kvferry_agent_free(two.a, &error) == KVFERRY_BAD_HANDLE);
    CHECK(kvferry_batch_free(batch, &error) == 0);
    CHECK(kvferry_agent_start(NULL, &two.a, &error) == 0);
    end(&two);
}

static void a_forked_child_gets_errors_and_can_start_anew(void) {
    Two two = start(NULL);
    kvferry_batch *batch = reversed(&two);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(kvferry_write(two.peer, batch, NULL, NULL, &error) == KVFERRY_FORKED);
        CHECK(kvferry_region_unregister(two.from, &error) == KVFERRY_FORKED);
        CHECK(kvferry_agent_free(two.a, &error) == KVFERRY_FORKED);
        CHECK(kvferry_handles_in_use() == 0);
        Two anew = start(NULL);
        kvferry_batch *other = reversed(&anew);
        CHECK(kvferry_write(anew.peer, other, NULL, NULL, &error) == 0);
        must_be_reversed(&anew);
        CHECK(kvferry_batch_free(other, &error) == 0);
        end(&anew);
        exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(kvferry_write(two.peer, batch, NULL, NULL, &error) == 0);
    must_be_reversed(&two);
    CHECK(kvferry_batch_free(batch, &error) == 0);
    end(&two);
}

static Two shared;
static kvferry_batch *shared_batch;

static void *write_and_cancel(void *nothing) {
    kvferry_error mine;
    mine.size = sizeof mine;
    for (int i = 0; i < 100; i++) {
        kvferry_transfer *transfer = NULL;
        CHECK(kvferry_write_async(shared.peer, shared_batch, NULL, &transfer, &mine) == 0);
        if (i % 2) CHECK(kvferry_transfer_cancel(transfer, &mine) == 0);
        const int code = kvferry_transfer_wait(transfer, UINT64_MAX, NULL, &mine);
        CHECK(code == KVFERRY_OK || code == KVFERRY_CANCELLED);
        CHECK(kvferry_transfer_free(transfer, &mine) == 0);
    }
    return nothing;
}

static void threads_share_handles(void) {
    shared = start("tcp");
    shared_batch = reversed(&shared);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, write_and_cancel, NULL) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(kvferry_batch_free(shared_batch, &error) == 0);
    end(&shared);
}

/* Last: the process ends with everything open, and a transfer under way. */
static void a_process_may_end_with_everything_open(void) {
    Two two = start("tcp");
    kvferry_batch *batch = reversed(&two);
    kvferry_transfer *transfer = NULL;
    CHECK(kvferry_write_async(two.peer, batch, NULL, &transfer, &error) == 0);
}

int main(void) {
    every_byte_lands_by_write_and_read();
    a_transfer_ends_by_descriptor_and_by_waiting();
    a_callback_is_called_once_with_the_outcome();
    memory_is_not_given_back_in_a_callback_that_shuts_its_agent_down();
    notifications_follow_the_data_with_their_bytes();
    wrong_handles_are_errors();
    wrong_arguments_are_errors_that_say_so();
    after_a_shutdown_calls_say_so_and_handles_are_freed();
    a_forked_child_gets_errors_and_can_start_anew();
    threads_share_handles();
    a_process_may_end_with_everything_open();
    return 0;
}
