/* kvferry_tasks.h from C: two agents in one process meet at keys. */
#include "kvferry_tasks.h"

#include <pthread.h>
#include <sys/wait.h>

#include "check.h"

#define SIZE (32u << 20)
#define BLOCK 4096u
/* Fault bound: no case waits this long. */
#define LONG_MS 30000u

static kvferry_error error;

typedef struct Side {
    kvferry_agent *agent;
    kvferry_tasks *tasks;
    kvferry_region *region;
    unsigned char *memory;
    char address[300];
} Side;

typedef struct Two {
    Side prefill, decode;
} Two;

static Side begin(const char *transports) {
    Side side;
    memset(&side, 0, sizeof side);
    error.size = sizeof error;
    kvferry_agent_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.transports = transports;
    CHECK(kvferry_agent_start(&options, &side.agent, &error) == 0);
    CHECK(kvferry_tasks_start(side.agent, &side.tasks, &error) == 0);
    side.memory = (unsigned char *)malloc(SIZE);
    memset(side.memory, 0, SIZE);
    CHECK(kvferry_region_register(side.agent, side.memory, SIZE, KVFERRY_ACCESS_READ, NULL, &side.region, &error) == 0);
    CHECK(kvferry_agent_address(side.agent, side.address, sizeof side.address, &error) == 0);
    return side;
}

static Two start(const char *transports) {
    Two two;
    two.prefill = begin(transports);
    two.decode = begin(transports);
    fill(two.prefill.memory, SIZE, 1);
    return two;
}

static kvferry_task_gauges held(const Side *side) {
    kvferry_task_gauges gauges;
    memset(&gauges, 0, sizeof gauges);
    gauges.size = sizeof gauges;
    CHECK(kvferry_tasks_held(side->tasks, &gauges, &error) == 0);
    return gauges;
}

/* Waits until a side holds nothing; what was given up stays until the time of its task has passed. */
static void must_hold_nothing(const Side *side) {
    for (int tries = 0; tries < 3000; tries++) {
        const kvferry_task_gauges now = held(side);
        if (now.sends + now.receives + now.parked + now.reads == 0) return;
        pause_ms(10);
    }
    CHECK(!"the gauges went to zero");
}

static void wait_until_parked(const Side *side, uint64_t count) {
    for (int tries = 0; tries < 3000 && held(side).parked != count; tries++) pause_ms(10);
    CHECK(held(side).parked == count);
}

static void finish(Side *side) {
    CHECK(kvferry_tasks_free(side->tasks, &error) == 0);
    CHECK(kvferry_region_unregister(side->region, &error) == 0);
    CHECK(kvferry_agent_free(side->agent, &error) == 0);
    free(side->memory);
}

static void end(Two *two) {
    must_hold_nothing(&two->prefill);
    must_hold_nothing(&two->decode);
    finish(&two->prefill);
    finish(&two->decode);
    CHECK(kvferry_handles_in_use() == 0);
}

static kvferry_task_options within(uint64_t timeout_ms) {
    kvferry_task_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.timeout_ms = timeout_ms;
    return options;
}

static kvferry_task_part part(const Side *side, int64_t key, uint64_t offset, uint64_t len) {
    kvferry_task_part one;
    one.key = key;
    one.address = side->memory + offset;
    one.len = len;
    return one;
}

static kvferry_send_task *offer(const Two *two, const char *key, uint64_t len, uint64_t timeout_ms) {
    const kvferry_task_part parts[1] = {part(&two->prefill, 1, 0, len)};
    const kvferry_task_options options = within(timeout_ms);
    kvferry_send_task *task = NULL;
    const char *to = two->decode.address;
    CHECK(kvferry_send_task_start(two->prefill.tasks, to, key, parts, 1, &options, &task, &error) == 0);
    return task;
}

static kvferry_recv_task *want(const Two *two, const char *key, uint64_t len, uint64_t timeout_ms) {
    const kvferry_task_part parts[1] = {part(&two->decode, 1, 0, len)};
    const kvferry_task_options options = within(timeout_ms);
    kvferry_recv_task *task = NULL;
    CHECK(kvferry_recv_task_start(two->decode.tasks, key, parts, 1, &options, &task, &error) == 0);
    return task;
}

static int sent(kvferry_send_task *task) {
    const int code = kvferry_send_task_wait(task, LONG_MS, &error);
    CHECK(kvferry_send_task_free(task, NULL) == 0);
    return code;
}

static int received(kvferry_recv_task *task) {
    const int code = kvferry_recv_task_wait(task, LONG_MS, &error);
    CHECK(kvferry_recv_task_free(task, NULL) == 0);
    return code;
}

static void both_orders_of_arrival_bring_every_byte(void) {
    const char *const transports[] = {"local", "tcp"};
    for (int i = 0; i < 4; i++) {
        Two two = start(transports[i / 2]);
        /* 512 blocks of two parts; the receiver wants every other block, and has them in reverse. */
        enum { BLOCKS = 512 };
        static kvferry_task_part from[2 * BLOCKS], to[BLOCKS];
        for (unsigned at = 0; at < BLOCKS; at++) {
            from[2 * at] = part(&two.prefill, (int64_t)at - 7, 2u * at * BLOCK, BLOCK);
            from[2 * at + 1] = part(&two.prefill, (int64_t)at - 7, (2u * at + 1) * BLOCK, BLOCK / 2);
        }
        for (unsigned at = 0; at < BLOCKS / 2; at++) {
            const unsigned block = BLOCKS - 2 - 2 * at;
            to[2 * at] = part(&two.decode, (int64_t)block - 7, 2u * at * BLOCK, BLOCK);
            to[2 * at + 1] = part(&two.decode, (int64_t)block - 7, (2u * at + 1) * BLOCK, BLOCK / 2);
        }
        const kvferry_task_options options = within(LONG_MS);
        kvferry_send_task *send = NULL;
        kvferry_recv_task *recv = NULL;
        for (int step = 0; step < 2; step++) {
            if (step == i % 2) {
                CHECK(kvferry_send_task_start(two.prefill.tasks, two.decode.address, "layer 0", from, 2 * BLOCKS, &options,
                                              &send, &error) == 0);
                if (step == 0) wait_until_parked(&two.decode, 1);
            } else {
                CHECK(kvferry_recv_task_start(two.decode.tasks, "layer 0", to, BLOCKS, &options, &recv, &error) == 0);
                if (step == 0) CHECK(kvferry_recv_task_wait(recv, 0, &error) == KVFERRY_PENDING);
            }
        }
        CHECK(received(recv) == 0);
        CHECK(sent(send) == 0);
        for (unsigned at = 0; at < BLOCKS; at++) {
            const unsigned char *theirs = (const unsigned char *)from[2 * (BLOCKS - 2 - at / 2 * 2) + at % 2].address;
            CHECK(memcmp(to[at].address, theirs, to[at].len) == 0);
            if (at % 2) CHECK(((unsigned char *)to[at].address)[BLOCK / 2] == 0);
        }
        end(&two);
    }
}

static void a_mismatch_names_the_block_at_both_ends(void) {
    Two two = start(NULL);
    kvferry_send_task *send = offer(&two, "k", BLOCK, LONG_MS);
    const kvferry_task_part wrong[2] = {part(&two.decode, 1, 0, BLOCK), part(&two.decode, 77, BLOCK, BLOCK)};
    kvferry_recv_task *recv = NULL;
    CHECK(kvferry_recv_task_start(two.decode.tasks, "k", wrong, 2, NULL, &recv, &error) == 0);
    CHECK(received(recv) == KVFERRY_MISMATCH && strstr(error.text, "77"));
    CHECK(sent(send) == KVFERRY_MISMATCH && strstr(error.text, "77"));
    recv = want(&two, "k", BLOCK + 1, LONG_MS);
    send = offer(&two, "k", BLOCK, LONG_MS);
    CHECK(received(recv) == KVFERRY_MISMATCH && strstr(error.text, "4096") && strstr(error.text, "4097"));
    CHECK(sent(send) == KVFERRY_MISMATCH);
    end(&two);
}

static void a_cancelled_or_stolen_task_refuses_its_sender(void) {
    Two two = start(NULL);
    kvferry_recv_task *recv = want(&two, "k", BLOCK, LONG_MS);
    CHECK(kvferry_recv_task_cancel(recv, &error) == 0);
    CHECK(kvferry_recv_task_wait(recv, 0, &error) == KVFERRY_CANCELLED);
    CHECK(sent(offer(&two, "k", BLOCK, LONG_MS)) == KVFERRY_CANCELLED);
    CHECK(kvferry_recv_task_free(recv, &error) == 0);
    recv = want(&two, "k", BLOCK, 60000);
    CHECK(kvferry_tasks_steal(two.decode.tasks, "k", &error) == 0);
    CHECK(kvferry_tasks_steal(two.decode.tasks, "k", &error) == 0);
    CHECK(received(recv) == KVFERRY_CANCELLED);
    CHECK(held(&two.decode).given_up == 1);
    CHECK(sent(offer(&two, "k", BLOCK, LONG_MS)) == KVFERRY_CANCELLED && strstr(error.text, "k"));
    /* The key is free for a new task. */
    recv = want(&two, "k", BLOCK, LONG_MS);
    kvferry_send_task *send = offer(&two, "k", BLOCK, LONG_MS);
    CHECK(received(recv) == 0 && sent(send) == 0);
    CHECK(held(&two.decode).given_up == 0);
    end(&two);
}

static void a_cancelled_send_ends_the_task_of_the_receiver(void) {
    Two two = start(NULL);
    kvferry_send_task *send = offer(&two, "k", BLOCK, LONG_MS);
    wait_until_parked(&two.decode, 1);
    CHECK(kvferry_send_task_cancel(send, &error) == 0);
    CHECK(sent(send) == KVFERRY_CANCELLED);
    wait_until_parked(&two.decode, 0);
    end(&two);
}

/* The memory is quiet at the end of a cancelled task: what is written there afterwards stays. */
static void no_byte_arrives_after_the_end_of_a_task(void) {
    Two two = start("tcp");
    int cancelled = 0;
    for (int round = 0; round < 200 && cancelled < 5; round++) {
        kvferry_recv_task *recv = want(&two, "k", SIZE, LONG_MS);
        kvferry_send_task *send = offer(&two, "k", SIZE, LONG_MS);
        while (held(&two.decode).reads == 0 && kvferry_recv_task_wait(recv, 0, NULL) == KVFERRY_PENDING) continue;
        CHECK(kvferry_recv_task_cancel(recv, &error) == 0);
        const int code = received(recv);
        CHECK(code == 0 || code == KVFERRY_CANCELLED);
        fill(two.decode.memory, SIZE, 9);
        CHECK(sent(send) == code);
        /* What was under way on the connection is through when the next bytes are. */
        kvferry_recv_task *next = want(&two, "next", BLOCK, LONG_MS);
        send = offer(&two, "next", BLOCK, LONG_MS);
        CHECK(received(next) == 0 && sent(send) == 0);
        CHECK(is_filled(two.decode.memory, BLOCK, 1));
        fill(two.decode.memory, BLOCK, 9);
        CHECK(is_filled(two.decode.memory, SIZE, 9));
        cancelled += code == KVFERRY_CANCELLED;
    }
    CHECK(cancelled > 0);
    end(&two);
}

static void a_deadline_ends_either_side_alone(void) {
    Two two = start(NULL);
    kvferry_recv_task *recv = want(&two, "alone", BLOCK, 50);
    CHECK(received(recv) == KVFERRY_DEADLINE && strstr(error.text, "alone"));
    CHECK(sent(offer(&two, "other", BLOCK, 50)) == KVFERRY_DEADLINE && strstr(error.text, "other"));
    wait_until_parked(&two.decode, 0);
    end(&two);
}

static void a_second_task_and_a_second_sender_of_a_key_are_refused(void) {
    Two two = start(NULL);
    kvferry_recv_task *recv = want(&two, "k", BLOCK, LONG_MS), *again = NULL;
    const kvferry_task_part parts[1] = {part(&two.decode, 1, 0, BLOCK)};
    CHECK(kvferry_recv_task_start(two.decode.tasks, "k", parts, 1, NULL, &again, &error) == KVFERRY_DUPLICATE);
    CHECK(again == NULL);
    kvferry_send_task *send = offer(&two, "k", BLOCK, LONG_MS);
    CHECK(kvferry_recv_task_wait(recv, LONG_MS, &error) == 0);
    CHECK(sent(send) == 0);
    CHECK(sent(offer(&two, "k", BLOCK, LONG_MS)) == KVFERRY_DUPLICATE);
    CHECK(kvferry_recv_task_free(recv, &error) == 0);
    end(&two);
}

static void memory_that_was_unregistered_is_not_read(void) {
    Two two = start(NULL);
    kvferry_send_task *send = offer(&two, "k", BLOCK, LONG_MS);
    wait_until_parked(&two.decode, 1);
    CHECK(kvferry_region_unregister(two.prefill.region, &error) == 0);
    kvferry_recv_task *recv = want(&two, "k", BLOCK, LONG_MS);
    CHECK(received(recv) == KVFERRY_IO && sent(send) == KVFERRY_IO);
    CHECK(two.decode.memory[0] == 0);
    const kvferry_task_part parts[1] = {part(&two.prefill, 1, 0, BLOCK)};
    CHECK(kvferry_send_task_start(two.prefill.tasks, two.decode.address, "k", parts, 1, NULL, &send, &error) ==
          KVFERRY_NOT_REGISTERED);
    CHECK(kvferry_region_register(two.prefill.agent, two.prefill.memory, SIZE, KVFERRY_ACCESS_READ, NULL,
                                  &two.prefill.region, &error) == 0);
    end(&two);
}

typedef struct Ended {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    kvferry_tasks *tasks;
    int calls, code;
} Ended;

static void ended(void *user, const kvferry_error *why) {
    Ended *ended = (Ended *)user;
    /* What waits for callbacks can't be called by one; the last one comes while the tasks are freed. */
    const int refused = kvferry_tasks_free(ended->tasks, NULL);
    CHECK(refused == KVFERRY_INVALID_ARGUMENT || refused == KVFERRY_BAD_HANDLE);
    pthread_mutex_lock(&ended->lock);
    ended->calls++;
    ended->code = why ? why->code : 0;
    pthread_cond_signal(&ended->changed);
    pthread_mutex_unlock(&ended->lock);
}

static void wait_for(Ended *ended, int calls) {
    pthread_mutex_lock(&ended->lock);
    while (ended->calls < calls) pthread_cond_wait(&ended->changed, &ended->lock);
    CHECK(ended->calls == calls);
    pthread_mutex_unlock(&ended->lock);
}

static void a_callback_is_called_once_with_the_outcome(void) {
    Two two = start(NULL);
    Ended at_prefill = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, two.prefill.tasks, 0, -1};
    Ended at_decode = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, two.decode.tasks, 0, -1};
    const kvferry_task_part from[1] = {part(&two.prefill, 1, 0, BLOCK)}, to[1] = {part(&two.decode, 1, 0, BLOCK)};
    kvferry_task_options options = within(LONG_MS);
    options.done = ended;
    for (int round = 1; round <= 50; round++) {
        kvferry_recv_task *recv = NULL;
        options.user = &at_decode;
        CHECK(kvferry_recv_task_start(two.decode.tasks, "k", to, 1, &options, &recv, &error) == 0);
        options.user = &at_prefill;
        CHECK(kvferry_send_task_start(two.prefill.tasks, two.decode.address, "k", from, 1, &options, NULL, &error) == 0);
        wait_for(&at_decode, round);
        wait_for(&at_prefill, round);
        CHECK(at_prefill.code == 0 && at_decode.code == 0);
        CHECK(kvferry_recv_task_free(recv, &error) == 0);
    }
    CHECK(kvferry_send_task_start(two.prefill.tasks, "127.0.0.1:1", "k", from, 1, &options, NULL, &error) == 0);
    wait_for(&at_prefill, 51);
    CHECK(at_prefill.code == KVFERRY_UNREACHABLE);
    /* Freeing the tasks ends what is open. */
    CHECK(kvferry_send_task_start(two.prefill.tasks, two.decode.address, "k", from, 1, &options, NULL, &error) == 0);
    CHECK(kvferry_tasks_free(two.prefill.tasks, &error) == 0);
    wait_for(&at_prefill, 52);
    CHECK(at_prefill.code == KVFERRY_CANCELLED);
    CHECK(kvferry_region_unregister(two.prefill.region, &error) == 0);
    CHECK(kvferry_agent_free(two.prefill.agent, &error) == 0);
    free(two.prefill.memory);
    must_hold_nothing(&two.decode);
    finish(&two.decode);
    CHECK(kvferry_handles_in_use() == 0);
}

static void wrong_arguments_are_errors_that_say_so(void) {
    Two two = start(NULL);
    kvferry_tasks *tasks = NULL;
    CHECK(kvferry_tasks_start(two.prefill.agent, &tasks, &error) == KVFERRY_INVALID_ARGUMENT && tasks == NULL);
    CHECK(kvferry_tasks_start(NULL, &tasks, &error) == KVFERRY_BAD_HANDLE);
    CHECK(kvferry_tasks_start(two.prefill.agent, NULL, &error) == KVFERRY_INVALID_ARGUMENT);
    tasks = two.prefill.tasks;
    const char *to = two.decode.address;
    kvferry_task_part parts[1] = {part(&two.prefill, 1, 0, BLOCK)};
    kvferry_send_task *send = NULL;
    kvferry_recv_task *recv = NULL;
    CHECK(kvferry_send_task_start(NULL, to, "k", parts, 1, NULL, &send, &error) == KVFERRY_BAD_HANDLE);
    CHECK(kvferry_send_task_start(tasks, NULL, "k", parts, 1, NULL, &send, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(kvferry_send_task_start(tasks, "nonsense", "k", parts, 1, NULL, &send, &error) != 0);
    CHECK(kvferry_send_task_start(tasks, to, NULL, parts, 1, NULL, &send, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(kvferry_send_task_start(tasks, to, "", parts, 1, NULL, &send, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(kvferry_send_task_start(tasks, to, "\xff", parts, 1, NULL, &send, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(kvferry_send_task_start(tasks, to, "k", NULL, 1, NULL, &send, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(kvferry_send_task_start(tasks, to, "k", parts, 0, NULL, &send, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(kvferry_send_task_start(tasks, to, "k", parts, 1, NULL, NULL, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(kvferry_recv_task_start(tasks, "k", parts, 1, NULL, NULL, &error) == KVFERRY_INVALID_ARGUMENT);
    CHECK(kvferry_recv_task_start(tasks, "", parts, 1, NULL, &recv, &error) == KVFERRY_INVALID_ARGUMENT);
    kvferry_task_options options = within(0);
    options.size = 4;
    CHECK(kvferry_recv_task_start(tasks, "k", parts, 1, &options, &recv, &error) == KVFERRY_INVALID_ARGUMENT);
    /* Past the end of the region, by length and by wrap-around. */
    parts[0] = part(&two.prefill, 5, SIZE - 8, 16);
    CHECK(kvferry_send_task_start(tasks, to, "k", parts, 1, NULL, &send, &error) == KVFERRY_NOT_REGISTERED);
    CHECK(strstr(error.text, "block 5"));
    parts[0].len = UINT64_MAX;
    CHECK(kvferry_recv_task_start(tasks, "k", parts, 1, NULL, &recv, &error) == KVFERRY_NOT_REGISTERED);
    CHECK(send == NULL && recv == NULL);
    for (uintptr_t number = 0; number < 4096; number++) {
        CHECK(kvferry_recv_task_wait((kvferry_recv_task *)number, 0, &error) == KVFERRY_BAD_HANDLE);
        CHECK(kvferry_send_task_cancel((kvferry_send_task *)number, &error) == KVFERRY_BAD_HANDLE);
    }
    recv = want(&two, "k", BLOCK, LONG_MS);
    CHECK(kvferry_send_task_free((kvferry_send_task *)(void *)recv, &error) == KVFERRY_BAD_HANDLE);
    /* Freeing a task cancels it. */
    CHECK(kvferry_recv_task_free(recv, &error) == 0);
    CHECK(kvferry_recv_task_free(recv, &error) == KVFERRY_BAD_HANDLE && strstr(error.text, "freed"));
    end(&two);
}

static void tasks_that_outlive_their_agents_have_ended(void) {
    Two two = start(NULL);
    kvferry_recv_task *recv = want(&two, "k", BLOCK, LONG_MS);
    kvferry_send_task *send = offer(&two, "other", BLOCK, LONG_MS);
    CHECK(kvferry_agent_free(two.prefill.agent, &error) == 0);
    CHECK(kvferry_send_task_wait(send, LONG_MS, &error) > KVFERRY_PENDING);
    CHECK(kvferry_tasks_free(two.decode.tasks, &error) == 0);
    CHECK(kvferry_recv_task_wait(recv, 0, &error) == KVFERRY_CANCELLED);
    CHECK(kvferry_recv_task_free(recv, &error) == 0);
    CHECK(kvferry_tasks_free(two.prefill.tasks, &error) == 0);
    CHECK(kvferry_send_task_free(send, &error) == 0);
    CHECK(kvferry_region_unregister(two.prefill.region, &error) == 0);
    CHECK(kvferry_region_unregister(two.decode.region, &error) == 0);
    CHECK(kvferry_agent_free(two.decode.agent, &error) == 0);
    free(two.prefill.memory);
    free(two.decode.memory);
    CHECK(kvferry_handles_in_use() == 0);
}

static void a_forked_child_gets_errors(void) {
    Two two = start(NULL);
    kvferry_recv_task *recv = want(&two, "k", BLOCK, LONG_MS);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(kvferry_recv_task_wait(recv, UINT64_MAX, &error) == KVFERRY_FORKED);
        CHECK(kvferry_recv_task_free(recv, &error) == KVFERRY_FORKED);
        CHECK(kvferry_tasks_steal(two.decode.tasks, "k", &error) == KVFERRY_FORKED);
        CHECK(kvferry_tasks_free(two.decode.tasks, &error) == KVFERRY_FORKED);
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    kvferry_send_task *send = offer(&two, "k", BLOCK, LONG_MS);
    CHECK(received(recv) == 0 && sent(send) == 0);
    end(&two);
}

static Two shared;

static void *send_cancel_and_steal(void *seed) {
    kvferry_error mine;
    mine.size = sizeof mine;
    unsigned number = (unsigned)(uintptr_t)seed;
    for (int i = 0; i < 100; i++) {
        char key[32];
        snprintf(key, sizeof key, "%u-%d", number, i);
        const uint64_t at = (number * 100 + (unsigned)i) * BLOCK;
        const kvferry_task_part from[1] = {part(&shared.prefill, 1, at, BLOCK)};
        const kvferry_task_part to[1] = {part(&shared.decode, 1, at, BLOCK)};
        const kvferry_task_options options = within(LONG_MS);
        kvferry_send_task *send = NULL;
        kvferry_recv_task *recv = NULL;
        CHECK(kvferry_send_task_start(shared.prefill.tasks, shared.decode.address, key, from, 1, &options, &send, &mine) ==
              0);
        CHECK(kvferry_recv_task_start(shared.decode.tasks, key, to, 1, &options, &recv, &mine) == 0);
        if (i % 4 == 1) CHECK(kvferry_recv_task_cancel(recv, &mine) == 0);
        if (i % 4 == 2) CHECK(kvferry_tasks_steal(shared.decode.tasks, key, &mine) == 0);
        if (i % 4 == 3) CHECK(kvferry_send_task_cancel(send, &mine) == 0);
        const int code = kvferry_recv_task_wait(recv, i % 4 == 3 ? 0 : LONG_MS, &mine);
        if (i % 4 == 0) CHECK(code == 0);
        if (code == 0) CHECK(memcmp(from[0].address, to[0].address, BLOCK) == 0);
        CHECK(kvferry_recv_task_free(recv, &mine) == 0);
        CHECK(kvferry_send_task_wait(send, LONG_MS, &mine) != KVFERRY_PENDING);
        CHECK(kvferry_send_task_free(send, &mine) == 0);
    }
    return NULL;
}

static void threads_share_tasks(void) {
    shared = start("tcp");
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, send_cancel_and_steal, (void *)i) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    end(&shared);
}

/* Last: the process ends with everything open. */
static void a_process_may_end_with_everything_open(void) {
    Two two = start("tcp");
    want(&two, "k", SIZE, LONG_MS);
    offer(&two, "k", SIZE, LONG_MS);
    offer(&two, "other", SIZE, LONG_MS);
}

int main(void) {
    both_orders_of_arrival_bring_every_byte();
    a_mismatch_names_the_block_at_both_ends();
    a_cancelled_or_stolen_task_refuses_its_sender();
    a_cancelled_send_ends_the_task_of_the_receiver();
    no_byte_arrives_after_the_end_of_a_task();
    a_deadline_ends_either_side_alone();
    a_second_task_and_a_second_sender_of_a_key_are_refused();
    memory_that_was_unregistered_is_not_read();
    a_callback_is_called_once_with_the_outcome();
    wrong_arguments_are_errors_that_say_so();
    tasks_that_outlive_their_agents_have_ended();
    a_forked_child_gets_errors();
    threads_share_tasks();
    a_process_may_end_with_everything_open();
    return 0;
}
