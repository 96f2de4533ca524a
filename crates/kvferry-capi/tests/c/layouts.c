/* All headers in one program, in C and in C++, and the layouts that compiled programs rely on. */
#include "kvferry.h"
#include "kvferry_tasks.h"
#include "kvferry_transfer_engine.h"

#ifdef __cplusplus
#define IS(condition) static_assert(condition, #condition)
#else
#define IS(condition) _Static_assert(condition, #condition)
#endif

/* Mooncake's, which programs were compiled with. */
IS(offsetof(struct transfer_request, opcode) == 0);
IS(offsetof(struct transfer_request, source) == 8);
IS(offsetof(struct transfer_request, target_id) == 16);
IS(offsetof(struct transfer_request, target_offset) == 24);
IS(offsetof(struct transfer_request, length) == 32);
IS(sizeof(struct transfer_request) == 40);
IS(sizeof(struct transfer_status) == 16 && offsetof(struct transfer_status, transferred_bytes) == 8);
IS(sizeof(struct notify_msg) == 16 && sizeof(struct buffer_entry) == 16);
IS(sizeof(struct nic_load_stat) == 80 && offsetof(struct nic_load_stat, inflight_bytes) == 64);
IS(sizeof(segment_id_t) == 4 && sizeof(batch_id_t) == 8);

/* Ours: fields are only added at the end. */
IS(sizeof(kvferry_remote) == 40);
IS(sizeof(kvferry_error) == 512 && offsetof(kvferry_error, text) == 16);
IS(sizeof(kvferry_agent_options) == 96);
IS(sizeof(kvferry_transfer_options) == 80 && offsetof(kvferry_transfer_options, after) == 64);
IS(sizeof(kvferry_transfer_stats) == 56);
IS(sizeof(kvferry_region_info) == 40);
IS(sizeof(kvferry_file_options) == 40);
IS(sizeof(kvferry_notification) == 48);
IS(sizeof(kvferry_range) == 24 && sizeof(kvferry_addresses) == 24);
IS(sizeof(kvferry_task_part) == 24 && offsetof(kvferry_task_part, address) == 8);
IS(sizeof(kvferry_task_options) == 48 && offsetof(kvferry_task_options, after) == 32);
IS(sizeof(kvferry_task_gauges) == 48);

int main(void) { return kvferry_version()[0] == 0; }
