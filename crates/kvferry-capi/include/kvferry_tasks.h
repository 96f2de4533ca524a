/* kvferry's send and receive tasks, for C. Generated from crates/kvferry-capi/src/tasks. */

#ifndef KVFERRY_TASKS_H
#define KVFERRY_TASKS_H

#include "kvferry.h"

// A receive task. A handle, not an address.
typedef struct kvferry_recv_task kvferry_recv_task;

// A send. A handle, not an address.
typedef struct kvferry_send_task kvferry_send_task;

// The send and receive tasks of an agent. A handle, not an address.
typedef struct kvferry_tasks kvferry_tasks;

// Counts of what the tasks of an agent hold. Set `size` to `sizeof(kvferry_task_gauges)`.
typedef struct kvferry_task_gauges {
  size_t size;
  // Sends that have not ended.
  uint64_t sends;
  // Receive tasks that were not freed.
  uint64_t receives;
  // Offers of senders that wait for a task.
  uint64_t parked;
  // Keys that were stolen or whose task was cancelled, until the time of the task has passed.
  uint64_t given_up;
  // Tasks whose memory is being written.
  uint64_t reads;
} kvferry_task_gauges;

// A part of a block. Parts of one block follow each other and have one key; they meet by their place.
typedef struct kvferry_task_part {
  // The key of the block.
  int64_t key;
  // Memory in one registered region of the agent, the host's or a GPU's; NULL if there is no such part.
  void *address;
  uint64_t len;
} kvferry_task_part;

// Called once, when a task has ended. `error` is NULL if all bytes are in place; it does not live longer
// than the call.
//
// Runs on the thread of the tasks, with all signals blocked. It must not throw, and should not block:
// other tasks wait for the thread.
typedef void (*kvferry_task_done)(void *user, const kvferry_error *error);

// Settings of a task. Set `size` to `sizeof(kvferry_task_options)`, and the rest to zero.
typedef struct kvferry_task_options {
  size_t size;
  // Time for the whole task, the wait for the other side included; 0 is the agent's.
  uint64_t timeout_ms;
  kvferry_task_done done;
  // Passed to `done`.
  void *user;
  // The work that the task comes after, at least one element if the task has memory of a GPU: the work that computes
  // the sent bytes, or that used the memory of the receive task. The task waits for it; the call does not. Streams
  // and events exist until the call returns.
  const kvferry_after *after;
  size_t after_count;
} kvferry_task_options;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Starts the tasks of an agent. An agent has them once; its peers' messages go to them.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_tasks_start(const kvferry_agent *agent, struct kvferry_tasks **tasks, kvferry_error *error);

// Cancels all tasks, waits until no memory is written and all callbacks have returned, and frees the
// handle. Handles of tasks stay valid and are freed on their own.
//
// Any thread; not from a callback. Before the agent is freed. After a fork: `KVFERRY_FORKED`.
int kvferry_tasks_free(struct kvferry_tasks *tasks, kvferry_error *error);

// Counts what the tasks hold. All are zero once every task has ended and was freed, and their time has
// passed.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_tasks_held(const struct kvferry_tasks *tasks,
                       struct kvferry_task_gauges *gauges,
                       kvferry_error *error);

// Takes a key from the receiver: no sender that comes later finds its task, and a new task may use the
// key. A task that no sender has found ends as cancelled; one whose memory is being written goes on.
//
// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
int kvferry_tasks_steal(const struct kvferry_tasks *tasks, const char *key, kvferry_error *error);

// Offers blocks under a key to the receiver at `address`, which reads them. The task ends when the
// receiver has them, or can't have them any more; the memory is free again then, and must stay
// registered, readable for peers and unchanged until then. Memory of a GPU is offered once the work in `after` of the
// options has run.
//
// `KVFERRY_MISMATCH`: the receiver wants a block that is not offered, or of another length.
// `KVFERRY_DUPLICATE`: another sender has the key. `task` may be NULL if there is a callback.
//
// Any thread. Blocks while a host name is resolved. After a fork: `KVFERRY_FORKED`.
int kvferry_send_task_start(const struct kvferry_tasks *tasks,
                            const char *address,
                            const char *key,
                            const struct kvferry_task_part *parts,
                            size_t count,
                            const struct kvferry_task_options *options,
                            struct kvferry_send_task **task,
                            kvferry_error *error);

// The task's outcome, waiting for it for `timeout_ms` at most; 0 does not wait, `UINT64_MAX` waits
// without limit. `KVFERRY_PENDING` while it runs.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_send_task_wait(const struct kvferry_send_task *task, uint64_t timeout_ms, kvferry_error *error);

// Ends the task as cancelled. The receiver does not use what it has read. Without effect on a task that
// has ended.
//
// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
int kvferry_send_task_cancel(struct kvferry_send_task *task, kvferry_error *error);

// Frees the handle. A task that runs goes on, and its callback is called.
//
// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
int kvferry_send_task_free(struct kvferry_send_task *task, kvferry_error *error);

// Adds a receive task: blocks to be filled by the sender that offers `key`. The sender may have come
// before. Blocks that the sender offers and this list lacks are ignored.
//
// The memory may be written until the task has ended, by this process alone, and is not after that.
// `KVFERRY_DUPLICATE`: the key has a task, which is not changed.
//
// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
int kvferry_recv_task_start(const struct kvferry_tasks *tasks,
                            const char *key,
                            const struct kvferry_task_part *parts,
                            size_t count,
                            const struct kvferry_task_options *options,
                            struct kvferry_recv_task **task,
                            kvferry_error *error);

// The task's outcome, as `kvferry_send_task_wait`. Anything but `KVFERRY_PENDING` says that nothing
// writes to the task's memory any more.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_recv_task_wait(const struct kvferry_recv_task *task, uint64_t timeout_ms, kvferry_error *error);

// Cancels the task. It has ended when this returns, unless its memory is being written: then it ends
// when that has stopped. Without effect on a task that has ended.
//
// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
int kvferry_recv_task_cancel(struct kvferry_recv_task *task, kvferry_error *error);

// Cancels the task if it runs, waits until its memory is not written any more, and frees the handle.
// Another task may have the key then. Until it has, senders that come to the key of a cancelled task are
// refused, as long as the task's time has not passed.
//
// Any thread, callbacks included. Blocks. After a fork: `KVFERRY_FORKED`.
int kvferry_recv_task_free(struct kvferry_recv_task *task, kvferry_error *error);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVFERRY_TASKS_H */
