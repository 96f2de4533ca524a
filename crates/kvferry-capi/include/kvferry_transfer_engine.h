/* Mooncake's C API as libkvferry.so.0 has it. Generated from crates/kvferry-capi/src. */

#ifndef KVFERRY_TRANSFER_ENGINE_H
#define KVFERRY_TRANSFER_ENGINE_H

#include <stddef.h>
#include <stdint.h>

// The engine's own segment.
#define LOCAL_SEGMENT 0

// Copies from the segment to local memory.
#define OPCODE_READ 0

// Copies from local memory to the segment.
#define OPCODE_WRITE 1

// Not returned.
#define STATUS_WAITING 0

// The task's bytes move, or wait to be moved.
#define STATUS_PENDING 1

// Not returned.
#define STATUS_INVALID 2

// Not returned.
#define STATUS_CANCELED 3

// The task's bytes have arrived.
#define STATUS_COMPLETED 4

// Not returned: a task that ran out of time has failed.
#define STATUS_TIMEOUT 5

// The transfer failed, and nothing touches the task's local memory any more.
#define STATUS_FAILED 6

// An engine. A handle, not an address.
typedef void *transfer_engine_t;

// A transport. Any value that is not NULL stands for the engine's own choice.
typedef void *transport_t;

// A segment's number; 0 is the engine's own, a negative one an error's code.
typedef int32_t segment_id_t;

// A range of memory.
typedef struct buffer_entry {
  void *addr;
  size_t length;
} buffer_entry;

typedef struct buffer_entry buffer_entry_t;

// The load of a network adapter. kvferry reports none.
typedef struct nic_load_stat {
  char device_name[64];
  uint64_t inflight_bytes;
  double ewma_bandwidth_bps;
} nic_load_stat;

typedef struct nic_load_stat nic_load_stat_t;

// A batch's number. Numbers are never used again.
typedef uint64_t batch_id_t;

// One task.
typedef struct transfer_request {
  int opcode;
  void *source;
  segment_id_t target_id;
  uint64_t target_offset;
  uint64_t length;
} transfer_request;

// A notification: two texts.
typedef struct notify_msg {
  char *name;
  char *msg;
} notify_msg;

typedef struct notify_msg notify_msg_t;

// How far a task is.
typedef struct transfer_status {
  int status;
  uint64_t transferred_bytes;
} transfer_status;

typedef struct transfer_request transfer_request_t;

typedef struct transfer_status transfer_status_t;

// No batch.
#define INVALID_BATCH UINT64_MAX

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Starts an engine; NULL if it can't be started. The metadata server is `P2PHANDSHAKE` or
// `http://host:port/metadata`. The port is ignored: the engine takes a free one, see
// `getLocalIpAndPort`. Transports need not be installed.
transfer_engine_t createTransferEngine(const char *metadata_conn_string,
                                       const char *local_server_name,
                                       const char *ip_or_host_name,
                                       uint64_t rpc_port,
                                       int auto_discover);

// Ends an engine. Its transfers fail, its memory is unregistered, its sessions end.
void destroyTransferEngine(transfer_engine_t engine);

// Copies the `host:port` that peers pass to `openSegment`.
int getLocalIpAndPort(transfer_engine_t engine, char *buf_out, size_t buf_len);

// The engine chooses transports by itself; this returns a value that is not NULL.
transport_t installTransport(transfer_engine_t engine, const char *proto, void **args);

// The engine chooses transports by itself; this does nothing.
int uninstallTransport(transfer_engine_t engine, const char *proto);

// The number of the segment of the engine at `host:port`, or of that name at the metadata server. Connects
// to it. Memory that the peer registers later belongs to the segment, too.
segment_id_t openSegment(transfer_engine_t engine, const char *segment_name);

// Does what `openSegment` does, and looks the peer's address up again.
segment_id_t openSegmentNoCache(transfer_engine_t engine, const char *segment_name);

// Checks the number. The segment stays open, as with Mooncake.
int closeSegment(transfer_engine_t engine, segment_id_t segment_id);

// Forgets what is known of the segment's address.
int removeLocalSegment(transfer_engine_t engine, const char *segment_name);

// Registers memory of the host or of a GPU. -7: it overlaps registered memory, even if it is the same.
//
// A location that names a GPU, as "cuda:0", loads the CUDA driver. A process that has memory of a GPU has loaded the
// driver before: then the driver tells whose memory it is, whatever the location. Callers wait for the work that uses
// memory of GPUs before they start transfers of it, unless the environment has
// `KVFERRY_MOONCAKE_AFTER=default-stream`.
int registerLocalMemory(transfer_engine_t engine,
                        void *addr,
                        size_t length,
                        const char *location,
                        int remote_accessible);

// Unregisters memory. When this returns 0, no copier touches it any more. -3: nothing is registered there.
int unregisterLocalMemory(transfer_engine_t engine, void *addr);

// Registers ranges that peers may read and write: all, or none on an error. Otherwise the same as `registerLocalMemory`.
int registerLocalMemoryBatch(transfer_engine_t engine,
                             buffer_entry_t *buffer_list,
                             size_t buffer_len,
                             const char *location);

// Unregisters ranges, each even if another fails; returns the first failure.
int unregisterLocalMemoryBatch(transfer_engine_t engine, void **addr_list, size_t addr_len);

// Has no effect: what peers register is looked up when bytes move.
int syncSegmentCache(transfer_engine_t engine);

// Has no effect: the engine finds its transports by itself.
int discoverTopology(transfer_engine_t engine);

// Has no effect: `openSegment` has connected.
int warmupEfaSegment(transfer_engine_t engine, const char *segment_name);

// Reports no adapters: `*count` becomes 0.
int getNicLoadStats(transfer_engine_t engine, nic_load_stat_t *stats, size_t *count);

// Has no effect: kvferry installs no signal handlers. A process that ends with engines open ends cleanly.
void enableGracefulShutdown(transfer_engine_t engine);

// Describes the peers' connections: kvferry lists none. Writes an empty text, or `[]` as JSON.
int showLinks(transfer_engine_t engine, char *buf_out, size_t buf_len, int json);

// Makes a batch. Its size is not a limit: a batch holds up to 1 048 576 tasks. An engine has at most
// 16 384 batches; beyond that, the oldest one whose tasks have all ended is dropped.
batch_id_t allocateBatchID(transfer_engine_t engine, size_t batch_size);

// Frees a batch whose tasks have ended. -4: some have not.
int freeBatchID(transfer_engine_t engine, batch_id_t batch_id);

// Adds tasks to a batch and starts them: all, or none if the code is not 0. Task numbers go on counting.
// The tasks of one call that go to one segment in one direction end alike.
//
// Any thread.
int submitTransfer(transfer_engine_t engine,
                   batch_id_t batch_id,
                   struct transfer_request *entries,
                   size_t count);

// Does what `submitTransfer` does. The message goes to the owner of the first task's segment when all tasks of this
// call are complete, and not if one fails.
int submitTransferWithNotify(transfer_engine_t engine,
                             batch_id_t batch_id,
                             struct transfer_request *entries,
                             size_t count,
                             notify_msg_t notify_msg);

// Says how far a task is. After `STATUS_FAILED`, `kvferry_last_error` has the reason.
//
// Any thread. Does not block, and takes no lock that transfers hold.
int getTransferStatus(transfer_engine_t engine,
                      batch_id_t batch_id,
                      size_t task_id,
                      struct transfer_status *status);

// Sends a message to the owner of a segment, after all tasks for it that are complete. Waits until the
// peer has queued it.
int genNotifyInEngine(transfer_engine_t engine, uint64_t target_id, notify_msg_t notify_msg);

// Takes the messages that have arrived, in memory of `malloc`, for `freeNotifsMsgBuf`. NULL, and 0 in
// `*size`, if there are none or on an error.
notify_msg_t *getNotifsFromEngine(transfer_engine_t engine, int *size);

// Frees what `getNotifsFromEngine` returned. Accepts NULL.
int freeNotifsMsgBuf(notify_msg_t *msg, int size);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVFERRY_TRANSFER_ENGINE_H */
