/* kvferry's C API; docs/c_api.md explains it. Generated from crates/kvferry-capi/src. */

#ifndef KVFERRY_H
#define KVFERRY_H

#include <stddef.h>
#include <stdint.h>

// Success.
#define KVFERRY_OK 0

// Not an error: the transfer has not ended, or no notification came in time.
#define KVFERRY_PENDING 1

// A handle is NULL, was freed, or is of another kind.
#define KVFERRY_BAD_HANDLE 2

// The receiver of a task wants a block that the sender lacks, or of another length.
#define KVFERRY_MISMATCH 3

// Another task has the key.
#define KVFERRY_DUPLICATE 4

// An argument is invalid: a zero length, a size that is not sizeof, text that is not UTF-8.
#define KVFERRY_INVALID_ARGUMENT 10

// The range overlaps a registered one.
#define KVFERRY_OVERLAP 11

// The range or region is not registered, or not any more.
#define KVFERRY_NOT_REGISTERED 12

// A range reaches beyond its region.
#define KVFERRY_OUT_OF_BOUNDS 13

// The region does not permit the access.
#define KVFERRY_ACCESS_DENIED 14

// The region was unregistered while it was in use.
#define KVFERRY_REVOKED 15

// A process that does not answer may still write to memory that was unregistered: do not reuse it.
#define KVFERRY_QUARANTINED 16

// No connection to the peer could be made.
#define KVFERRY_UNREACHABLE 17

// The connection to the peer broke.
#define KVFERRY_PEER_RESET 18

// The peer is connected but silent.
#define KVFERRY_PEER_SILENT 19

// The peer ended the session.
#define KVFERRY_PEER_CLOSED 20

// The peer requires a secret and this agent has none.
#define KVFERRY_AUTH_REQUIRED 21

// This agent has a secret and the peer has none.
#define KVFERRY_AUTH_UNSUPPORTED 22

// The secrets of the two agents differ.
#define KVFERRY_AUTH_FAILED 23

// The two agents share no protocol version.
#define KVFERRY_VERSION_MISMATCH 24

// A description belongs to an earlier incarnation of the peer.
#define KVFERRY_STALE_INCARNATION 25

// The call did not end within its time.
#define KVFERRY_DEADLINE 26

// The caller cancelled the transfer.
#define KVFERRY_CANCELLED 27

// The call was interrupted. No function of this header returns it.
#define KVFERRY_INTERRUPTED 28

// The received bytes differ from the sent bytes.
#define KVFERRY_CHECKSUM 29

// A limit was exceeded, or a buffer of the caller is too small.
#define KVFERRY_TOO_LARGE 30

// A bounded queue is full.
#define KVFERRY_BUSY 31

// The agent is shut down.
#define KVFERRY_SHUTDOWN 32

// The handle belongs to the process that forked this one.
#define KVFERRY_FORKED 33

// No permitted transport, or this version of the library, supports the operation.
#define KVFERRY_UNSUPPORTED 34

// The peer violated the protocol.
#define KVFERRY_PROTOCOL 35

// The operating system reported an error.
#define KVFERRY_IO 36

// A defect in kvferry.
#define KVFERRY_INTERNAL 37

// The choice of the environment variable `KVFERRY_CHECKSUM`, else on between hosts and off on one host.
#define KVFERRY_CHECKSUM_DEFAULT 0

// Payload carries CRC32C checksums with every peer that supports them.
#define KVFERRY_CHECKSUM_ON 1

// No checksums, unless the peer requires them.
#define KVFERRY_CHECKSUM_OFF 2

// Peers may do nothing: the memory is the local side of transfers only.
#define KVFERRY_ACCESS_NONE 0

// Peers may read.
#define KVFERRY_ACCESS_READ 1

// Peers may write.
#define KVFERRY_ACCESS_WRITE 2

// The caller has waited for what uses the memory of GPUs.
#define KVFERRY_AFTER_HOST 0

// Work that a stream (`CUstream`, `cudaStream_t`) has when the transfer is started. 0 and 1 are the default stream, 2 the
// calling thread's.
#define KVFERRY_AFTER_STREAM 1

// Work before the last record of an event (`CUevent`, `cudaEvent_t`).
#define KVFERRY_AFTER_EVENT 2

// Past the page cache where ranges and memory are aligned.
#define KVFERRY_DIRECT_AUTO 0

// I/O goes through the page cache.
#define KVFERRY_DIRECT_OFF 1

// Same as auto, but opening fails where the file system does not have it.
#define KVFERRY_DIRECT_REQUIRE 2

// One kvferry endpoint in a process. A handle, not an address.
typedef struct kvferry_agent kvferry_agent;

// Pairs of ranges. A handle, not an address. A batch may be used in many transfers.
typedef struct kvferry_batch kvferry_batch;

// A range of a file of this host. A handle, not an address.
typedef struct kvferry_file kvferry_file;

// A peer of an agent, by address. A handle, not an address.
typedef struct kvferry_peer kvferry_peer;

// Registered memory. A handle, not an address.
typedef struct kvferry_region kvferry_region;

// A transfer that was started. A handle, not an address.
typedef struct kvferry_transfer kvferry_transfer;

// Called with a warning for the operator, one line. `text` does not live longer than the call.
//
// Runs on the thread that starts the agent. It must not throw.
typedef void (*kvferry_warning)(void *user, const char *text);

// Settings of an agent. Set `size` to `sizeof(kvferry_agent_options)`, and the rest to zero: a zero or
// NULL is what the environment variables say (`KVFERRY_LISTEN`, …), else the default.
typedef struct kvferry_agent_options {
  size_t size;
  // The name that peers see, 1 to 256 bytes.
  const char *name;
  // `host:port` to listen on. Port 0 lets the kernel choose. Default: `127.0.0.1:0`.
  const char *listen;
  // `host` or `host:port` that peers are told.
  const char *advertise;
  // The secret, shared by all agents that may connect to each other. NULL with a `secret_len` that is
  // not 0 is refused: it is a key that could not be loaded, not the wish for none.
  const uint8_t *secret;
  size_t secret_len;
  // Names of transports, separated by commas. Default: all.
  const char *transports;
  // `auto`, `uring` or `posix`.
  const char *file_engine;
  // A `KVFERRY_CHECKSUM_`.
  int32_t checksum;
  // Threads for inbound streams and asynchronous transfers, 1 to 64. Default: half of the cores.
  uint32_t io_threads;
  // Data streams to one peer at most, 1 to 64.
  uint32_t streams_per_peer;
  // 1: accept stock Mooncake peers, on a second port.
  uint32_t mooncake;
  // How long a peer may be silent during a transfer, in milliseconds. Default: 3 000.
  uint64_t silence_ms;
  // The time limit of calls that set none, in milliseconds. Default: 30 000.
  uint64_t timeout_ms;
} kvferry_agent_options;

// Why a call failed. Set `size` to `sizeof(kvferry_error)` before the call. Every function that takes
// one fills it in, also on success; NULL is allowed.
typedef struct kvferry_error {
  size_t size;
  // The code that the function returned.
  int32_t code;
  // For a transfer that ended early: 1 if it is certain that none of its bytes arrive any more, 0 if
  // that is not certain, -1 if nothing was in progress.
  int32_t quiesced;
  // One line of UTF-8; empty on success. Cut if it does not fit.
  char text[496];
} kvferry_error;

// Facts of a region. Set `size` to `sizeof(kvferry_region_info)`.
typedef struct kvferry_region_info {
  size_t size;
  // The address in this process, or the GPU's address of its memory.
  void *address;
  size_t len;
  // `KVFERRY_ACCESS_` bits.
  uint32_t access;
  // 1 until it is unregistered.
  uint32_t registered;
  // 1 while a process that does not answer may still touch the memory of an unregistered region.
  uint32_t quarantined;
  uint32_t reserved;
} kvferry_region_info;

// A region as peers name it. A value: copy it, send it to the peer by any means. Programs of different releases exchange it,
// so it never changes: what else there is to know of a region, its owner tells the peer's agent by `id`.
typedef struct kvferry_remote {
  // The incarnation of the agent that owns the region; later ones refuse the description.
  uint8_t incarnation[16];
  // The address in the owner's process; 0 for a file, and for memory of a GPU that is not registered by its address.
  uint64_t address;
  uint64_t len;
  uint32_t id;
  // `KVFERRY_ACCESS_` bits.
  uint32_t access;
} kvferry_remote;

// Facts about a connected peer. Set `size` to `sizeof(kvferry_peer_info)`.
typedef struct kvferry_peer_info {
  size_t size;
  // The peer's name; cut if it does not fit.
  char name[264];
  // `local`, `tcp`, `mooncake`, …
  char transport[24];
  // 1 if both sides proved that they know the secret.
  uint32_t authenticated;
  // 1 if payload carries checksums.
  uint32_t checksum;
} kvferry_peer_info;

// A range of a local region and its place in a remote one, in bytes.
typedef struct kvferry_range {
  uint64_t local_offset;
  uint64_t remote_offset;
  uint64_t len;
} kvferry_range;

// Local memory, registered or not, and its address in the peer's process.
typedef struct kvferry_addresses {
  void *local;
  uint64_t remote;
  uint64_t len;
} kvferry_addresses;

// Figures of a transfer. Set `size` to `sizeof(kvferry_transfer_stats)`.
typedef struct kvferry_transfer_stats {
  size_t size;
  uint64_t bytes;
  // Pairs of the batch.
  uint64_t pairs;
  // Streams or copying threads that moved the bytes.
  uint32_t streams;
  uint32_t reserved;
  // `local`, `tcp`, …; empty if there was nothing to move.
  char transport[24];
} kvferry_transfer_stats;

// Called once, when a transfer has ended. `error` is NULL if all bytes arrived, else `stats` is NULL;
// neither lives longer than the call.
//
// Runs on a thread of kvferry with all signals blocked, or within the call that starts or cancels the
// transfer. It must not block and must not throw: other transfers wait for the thread. It may call every
// function that does not block.
typedef void (*kvferry_done)(void *user,
                             const struct kvferry_error *error,
                             const struct kvferry_transfer_stats *stats);

// Work that a transfer of memory of GPUs comes after. Set all of it, `reserved` to zero.
typedef struct kvferry_after {
  // `KVFERRY_AFTER_`.
  uint32_t kind;
  uint32_t reserved;
  // The stream or the event; 0 for `KVFERRY_AFTER_HOST`.
  uint64_t handle;
} kvferry_after;

// Settings of a transfer. Set `size` to `sizeof(kvferry_transfer_options)`, and the rest to zero.
typedef struct kvferry_transfer_options {
  size_t size;
  // Time for the whole transfer, connecting included; 0 is the agent's.
  uint64_t timeout_ms;
  // Name of a notification that is delivered when all bytes are in place at the peer. May be NULL.
  const char *notify_name;
  const uint8_t *notify_message;
  size_t notify_len;
  // Streams to divide the batch among; 0: its size decides.
  uint32_t streams;
  uint32_t reserved;
  // Called at the end of an asynchronous transfer. May be NULL.
  kvferry_done done;
  // Passed to `done`.
  void *user;
  // Work that the transfer comes after, one entry at least, where local memory is a GPU's. Streams and events exist until the
  // call returns.
  const struct kvferry_after *after;
  size_t after_count;
} kvferry_transfer_options;

// A message that arrived. Set `size` to `sizeof(kvferry_notification)`, and the rest to zero. The
// pointers are valid until `kvferry_notification_clear`.
typedef struct kvferry_notification {
  size_t size;
  // The sender's name.
  const char *from;
  // The message's name.
  const char *name;
  // Any bytes, and a NUL that `message_len` does not count.
  const uint8_t *message;
  size_t message_len;
  // Memory that `kvferry_notification_clear` frees.
  void *memory;
} kvferry_notification;

// Options to open a file with. Set `size` to `sizeof(kvferry_file_options)`, and the rest to zero: the whole of
// an existing file, to be read.
typedef struct kvferry_file_options {
  size_t size;
  // 1: to be read and written.
  uint32_t write;
  // 1: made if it does not exist, at least `offset + len` bytes long. Implies `write`.
  uint32_t create;
  // Offset in the file at which the region begins.
  uint64_t offset;
  // Bytes of the region; 0: up to the end.
  uint64_t len;
  // A `KVFERRY_DIRECT_`.
  uint32_t direct;
  uint32_t reserved;
} kvferry_file_options;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The reason of the last call of this thread that failed, of this header's functions and of Mooncake's.
// Valid until the thread's next call. Never NULL.
//
// Any thread; also after a fork.
const char *kvferry_last_error(void);

// The name of a code, such as "peer_reset"; "unknown" for a number that is none. Lives for ever.
//
// Any thread; also after a fork.
const char *kvferry_error_name(int code);

// The library's version, such as "0.1.0". Lives for ever.
//
// Any thread; also after a fork.
const char *kvferry_version(void);

// How many handles of this process were not freed. For tests that look for leaks.
//
// Any thread; also after a fork.
size_t kvferry_handles_in_use(void);

// Sets who gets warnings about settings that let strangers in: an agent without a secret that listens
// beyond loopback, or on loopback where the kernel does not tell the users of connections; or a short
// secret. Each is said once per process. Without a receiver, or with NULL, they go to stderr.
//
// Any thread, before agents are started.
void kvferry_on_warning(kvferry_warning warning, void *user);

// Starts an agent: opens its port and starts its threads. `options` may be NULL.
//
// Any thread. A forked child starts agents of its own.
int kvferry_agent_start(const struct kvferry_agent_options *options,
                        struct kvferry_agent **agent,
                        struct kvferry_error *error);

// Ends every session, fails every transfer and unregisters every region. Takes at most 0.2 s plus the
// silence limit. The handle stays valid; other calls with the agent return `KVFERRY_SHUTDOWN`.
//
// Any thread, more than once. From a callback on a thread of the agent it returns at once, and a thread of its
// own goes on; a later call waits for it. After a fork: `KVFERRY_FORKED`.
int kvferry_agent_shutdown(struct kvferry_agent *agent,
                           struct kvferry_error *error);

// Shuts the agent down and frees the handle. Handles of its regions, peers, files and transfers stay
// valid and are freed on their own, before or after.
//
// Any thread; not from a callback. After a fork: `KVFERRY_FORKED`.
int kvferry_agent_free(struct kvferry_agent *agent, struct kvferry_error *error);

// Copies the `host:port` that peers connect to, with its NUL. 300 bytes are enough for every address.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_agent_address(const struct kvferry_agent *agent,
                          char *buffer,
                          size_t capacity,
                          struct kvferry_error *error);

// Copies the random id that the agent drew when it started, 16 bytes. A restarted agent has another.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_agent_incarnation(const struct kvferry_agent *agent, uint8_t *id, struct kvferry_error *error);

// Copies the agent's counters with their NUL: a JSON object of numbers by name, as in
// `{"transfers_started":7, …}`. It has those of each GPU with registered memory, too, for all agents of the
// process: `gpu0_bytes_out` and so on. 4096 bytes are enough without a GPU, and 2048 more for each GPU; with fewer,
// the error says how many. Names may be added, and their order may change.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_agent_stats(const struct kvferry_agent *agent,
                        char *buffer,
                        size_t capacity,
                        struct kvferry_error *error);

// Registers `len` bytes at `address`. `access` is what peers may do with them. Peers find the region by
// its `name`, if that is not NULL.
//
// The memory must stay mapped, and its pages must not be replaced, until `kvferry_region_unregister`
// has returned `KVFERRY_OK`. Peers write to it at any time.
//
// `KVFERRY_UNSUPPORTED`: it is memory of a device. `KVFERRY_INVALID_ARGUMENT`: this process can't read
// it, or can't write to it though `access` has `KVFERRY_ACCESS_WRITE`.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_region_register(const struct kvferry_agent *agent,
                            void *address,
                            size_t len,
                            uint32_t access,
                            const char *name,
                            struct kvferry_region **region,
                            struct kvferry_error *error);

// Registers `len` bytes of a GPU at `address`, as `cudaMalloc` or the driver's virtual memory functions gave them.
// `device` is the number of the GPU in this process that owns them, or -1 for whichever does. Else as
// `kvferry_region_register`. Transfers name in `after` of their options what they come after.
//
// The first region of a GPU loads the CUDA driver, `libcuda.so.1`. The memory stays allocated until
// `kvferry_region_unregister` has returned `KVFERRY_OK`.
//
// `KVFERRY_INVALID_ARGUMENT`: there is no driver, or the range is not in an allocation of the GPU.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_region_register_cuda(const struct kvferry_agent *agent,
                                 uint64_t address,
                                 size_t len,
                                 int32_t device,
                                 uint32_t access,
                                 const char *name,
                                 struct kvferry_region **region,
                                 struct kvferry_error *error);

// Registers memory of a GPU as `kvferry_region_register_cuda` does. `device` names the GPU that owns it: by its UUID,
// such as `GPU-8c1b1a5e-…` of `nvidia-smi -L`, by its address on the PCI bus, such as `0000:1b:00.0`, or by its number
// in this process. UUID and address are the same in all processes, whatever `CUDA_VISIBLE_DEVICES` is.
//
// `KVFERRY_INVALID_ARGUMENT`: also if no GPU that this process sees has the name; the error's text lists those that it
// sees.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_region_register_cuda_device(const struct kvferry_agent *agent,
                                        uint64_t address,
                                        size_t len,
                                        const char *device,
                                        uint32_t access,
                                        const char *name,
                                        struct kvferry_region **region,
                                        struct kvferry_error *error);

// Allocates `len` zeroed bytes and registers them; `kvferry_region_unregister` frees them. From 1 MiB
// on, agents of the same user on this host map the memory, which is the fastest way to copy.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_region_allocate(const struct kvferry_agent *agent,
                            size_t len,
                            uint32_t access,
                            const char *name,
                            struct kvferry_region **region,
                            struct kvferry_error *error);

// Unregisters a region and frees its handle. When this returns `KVFERRY_OK`, no copier touches the
// memory any more.
//
// `KVFERRY_QUARANTINED`: a process of this host or a device that may use the memory does not answer, or a
// shutdown of the agent has not ended, as one that a callback has called. The handle stays valid; do not
// reuse the memory, and call again later.
//
// Any thread; also after the agent was shut down or freed. After a fork: `KVFERRY_FORKED`.
int kvferry_region_unregister(struct kvferry_region *region, struct kvferry_error *error);

// Fills in facts of a region.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_region_facts(const struct kvferry_region *region,
                         struct kvferry_region_info *info,
                         struct kvferry_error *error);

// The description that peers need to name the region.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_region_remote(const struct kvferry_region *region,
                          struct kvferry_remote *remote,
                          struct kvferry_error *error);

// A peer by its `host:port`. Sends nothing: the first transfer, or `kvferry_peer_connect`, connects. A
// peer that restarts at its address is connected to again.
//
// Any thread. Blocks while a host name is resolved. After a fork: `KVFERRY_FORKED`.
int kvferry_peer_open(const struct kvferry_agent *agent,
                      const char *address,
                      struct kvferry_peer **peer,
                      struct kvferry_error *error);

// Connects to the peer if there is no live session, and fills in what is known of it. `timeout_ms` 0 is
// the agent's time limit; `info` may be NULL.
//
// Any thread. Blocks. After a fork: `KVFERRY_FORKED`.
int kvferry_peer_connect(const struct kvferry_peer *peer,
                         uint64_t timeout_ms,
                         struct kvferry_peer_info *info,
                         struct kvferry_error *error);

// The peer's region of that name.
//
// Any thread. Blocks for one round trip, for `timeout_ms` at most. After a fork: `KVFERRY_FORKED`.
int kvferry_peer_region(const struct kvferry_peer *peer,
                        const char *name,
                        uint64_t timeout_ms,
                        struct kvferry_remote *remote,
                        struct kvferry_error *error);

// Measures one round trip to the peer, in nanoseconds. `nanoseconds` may be NULL.
//
// Any thread. Blocks for `timeout_ms` at most. After a fork: `KVFERRY_FORKED`.
int kvferry_peer_probe(const struct kvferry_peer *peer,
                       uint64_t timeout_ms,
                       uint64_t *nanoseconds,
                       struct kvferry_error *error);

// Ends the live session; its transfers fail. The next call connects again.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_peer_disconnect(struct kvferry_peer *peer, struct kvferry_error *error);

// Frees the handle. The session stays, for other handles of the same peer.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_peer_free(struct kvferry_peer *peer, struct kvferry_error *error);

// Makes an empty batch with room for `capacity` pairs.
//
// Any thread; also after a fork.
int kvferry_batch_new(size_t capacity, struct kvferry_batch **batch, struct kvferry_error *error);

// Adds `count` ranges of `local` with their places in `remote`: all, or none on an error.
//
// One thread at a time; a second one waits. After a fork: `KVFERRY_FORKED`.
int kvferry_batch_push(struct kvferry_batch *batch,
                       const struct kvferry_region *local,
                       const struct kvferry_remote *remote,
                       const struct kvferry_range *ranges,
                       size_t count,
                       struct kvferry_error *error);

// Adds `count` pairs by address: all, or none on an error. The peer checks that its addresses are
// registered. Transfers move such batches with kvferry and stock Mooncake peers. The caller registers local memory
// of a GPU with the agent before a transfer, which names in `after` the work that it comes after.
//
// One thread at a time; a second one waits. After a fork: `KVFERRY_FORKED`.
int kvferry_batch_push_addresses(struct kvferry_batch *batch,
                                 const struct kvferry_addresses *pairs,
                                 size_t count,
                                 struct kvferry_error *error);

// How many pairs the batch has, and their bytes. Each place may be NULL.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_batch_size(const struct kvferry_batch *batch,
                       size_t *pairs,
                       uint64_t *bytes,
                       struct kvferry_error *error);

// Removes all pairs. Transfers that use the batch are not changed.
//
// One thread at a time; a second one waits. After a fork: `KVFERRY_FORKED`.
int kvferry_batch_clear(struct kvferry_batch *batch, struct kvferry_error *error);

// Frees the handle. Transfers that use the batch go on.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_batch_free(struct kvferry_batch *batch, struct kvferry_error *error);

// Writes a batch to the peer's memory and waits. `options` and `stats` may be NULL.
//
// When it returns, kvferry does not read the local memory any more. After an error, `quiesced` says
// whether it is certain that no more bytes arrive at the peer.
//
// Any thread; moves the bytes on this one. After a fork: `KVFERRY_FORKED`.
int kvferry_write(const struct kvferry_peer *peer,
                  const struct kvferry_batch *batch,
                  const struct kvferry_transfer_options *options,
                  struct kvferry_transfer_stats *stats,
                  struct kvferry_error *error);

// Reads a batch from the peer's memory and waits, as `kvferry_write`. When it returns, kvferry does not
// write the local memory any more.
//
// Any thread; moves the bytes on this one. After a fork: `KVFERRY_FORKED`.
int kvferry_read(const struct kvferry_peer *peer,
                 const struct kvferry_batch *batch,
                 const struct kvferry_transfer_options *options,
                 struct kvferry_transfer_stats *stats,
                 struct kvferry_error *error);

// Starts writing a batch and returns. The transfer's end is seen by `options->done`, by
// `kvferry_transfer_fd`, or by asking. `transfer` may be NULL if there is a callback. The batch may be
// changed or freed at once; local memory that is not registered stays valid until the end.
//
// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
int kvferry_write_async(const struct kvferry_peer *peer,
                        const struct kvferry_batch *batch,
                        const struct kvferry_transfer_options *options,
                        struct kvferry_transfer **transfer,
                        struct kvferry_error *error);

// Starts reading a batch, as `kvferry_write_async`.
//
// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
int kvferry_read_async(const struct kvferry_peer *peer,
                       const struct kvferry_batch *batch,
                       const struct kvferry_transfer_options *options,
                       struct kvferry_transfer **transfer,
                       struct kvferry_error *error);

// The transfer's outcome, waiting for it for `timeout_ms` at most; 0 does not wait, `UINT64_MAX` waits
// without limit. `KVFERRY_PENDING` while it runs. Every call returns the same outcome. `stats` may be
// NULL.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_transfer_wait(const struct kvferry_transfer *transfer,
                          uint64_t timeout_ms,
                          struct kvferry_transfer_stats *stats,
                          struct kvferry_error *error);

// Cancels the transfer. Its outcome comes once the peer has confirmed that no bytes arrive any more, or
// can't confirm it.
//
// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
int kvferry_transfer_cancel(struct kvferry_transfer *transfer, struct kvferry_error *error);

// A descriptor for `poll` that is readable once the transfer has ended. It belongs to the handle: do not
// close it, and do not use it after `kvferry_transfer_free`.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_transfer_fd(const struct kvferry_transfer *transfer, int *fd, struct kvferry_error *error);

// Frees the handle. A transfer that runs goes on, and its callback is called.
//
// Any thread; also from the transfer's callback. After a fork: `KVFERRY_FORKED`.
int kvferry_transfer_free(struct kvferry_transfer *transfer, struct kvferry_error *error);

// Sends a notification without a batch, after all transfers to the peer that are complete. Waits until
// the peer has queued it, for `timeout_ms` at most; 0 is the agent's time limit.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_notify(const struct kvferry_peer *peer,
                   const char *name,
                   const uint8_t *message,
                   size_t message_len,
                   uint64_t timeout_ms,
                   struct kvferry_error *error);

// Takes the oldest notification, waiting for it for `timeout_ms` at most; 0 does not wait.
// `KVFERRY_PENDING` if none came in time. The caller frees what is filled in, with
// `kvferry_notification_clear`.
//
// Any thread; each notification goes to one. After a fork: `KVFERRY_FORKED`.
int kvferry_notification_take(const struct kvferry_agent *agent,
                              uint64_t timeout_ms,
                              struct kvferry_notification *notification,
                              struct kvferry_error *error);

// Frees the memory of a notification. Without effect on one that was cleared, and on NULL.
//
// Any thread; also after a fork.
void kvferry_notification_clear(struct kvferry_notification *notification);

// A descriptor for `poll` that is readable while notifications are queued. It belongs to the agent: do
// not close it, and do not use it after `kvferry_agent_free`.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_notification_fd(const struct kvferry_agent *agent, int *fd, struct kvferry_error *error);

// Opens a range of a file as a region that batches can name as their remote side.
//
// Any thread. Blocks as long as the file system does. After a fork: `KVFERRY_FORKED`.
int kvferry_file_open(const struct kvferry_agent *agent,
                      const char *path,
                      const struct kvferry_file_options *options,
                      struct kvferry_file **file,
                      struct kvferry_error *error);

// The description that batches need to name the file, for `kvferry_batch_push`.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_file_remote(const struct kvferry_file *file,
                        struct kvferry_remote *remote,
                        struct kvferry_error *error);

// Waits until everything that was written to the file before is on its device (`fdatasync`).
//
// Any thread. Blocks without a time limit. After a fork: `KVFERRY_FORKED`.
int kvferry_file_sync(struct kvferry_file *file, struct kvferry_error *error);

// Closes the file and frees its handle. Transfers that have begun keep it open until they end.
//
// Any thread; also after the agent was shut down or freed. After a fork: `KVFERRY_FORKED`.
int kvferry_file_close(struct kvferry_file *file, struct kvferry_error *error);

// Writes memory to files (offload) and waits: the remote side of the batch names files of this agent. The
// bytes are on the device after `kvferry_file_sync`. `options` and `stats` may be NULL.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_file_write(const struct kvferry_agent *agent,
                       const struct kvferry_batch *batch,
                       const struct kvferry_transfer_options *options,
                       struct kvferry_transfer_stats *stats,
                       struct kvferry_error *error);

// Reads files into memory (onboard) and waits, as `kvferry_file_write`.
//
// Any thread. After a fork: `KVFERRY_FORKED`.
int kvferry_file_read(const struct kvferry_agent *agent,
                      const struct kvferry_batch *batch,
                      const struct kvferry_transfer_options *options,
                      struct kvferry_transfer_stats *stats,
                      struct kvferry_error *error);

// Starts writing memory to files, as `kvferry_write_async`.
//
// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
int kvferry_file_write_async(const struct kvferry_agent *agent,
                             const struct kvferry_batch *batch,
                             const struct kvferry_transfer_options *options,
                             struct kvferry_transfer **transfer,
                             struct kvferry_error *error);

// Starts reading files into memory, as `kvferry_write_async`.
//
// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
int kvferry_file_read_async(const struct kvferry_agent *agent,
                            const struct kvferry_batch *batch,
                            const struct kvferry_transfer_options *options,
                            struct kvferry_transfer **transfer,
                            struct kvferry_error *error);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVFERRY_H */
