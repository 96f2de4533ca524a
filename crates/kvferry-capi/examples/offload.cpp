// Memory to a file and back, from C++, with a callback at the end.
#include <kvferry.h>

#include <cstdio>
#include <cstring>
#include <future>
#include <stdexcept>
#include <string>

namespace {

kvferry_error fresh() {
    kvferry_error error{};
    error.size = sizeof error;
    return error;
}

void check(int code, const kvferry_error &error) {
    if (code != KVFERRY_OK) throw std::runtime_error(error.text);
}

// Runs on a thread of kvferry: it must not block or throw.
extern "C" void ended(void *user, const kvferry_error *error, const kvferry_transfer_stats *) {
    static_cast<std::promise<std::string> *>(user)->set_value(error ? error->text : "");
}

void run(const char *path) {
    kvferry_error error = fresh();
    kvferry_agent *agent = nullptr;
    check(kvferry_agent_start(nullptr, &agent, &error), error);
    kvferry_region *pool = nullptr;
    check(kvferry_region_allocate(agent, 1 << 20, KVFERRY_ACCESS_NONE, nullptr, &pool, &error), error);
    kvferry_region_info info{};
    info.size = sizeof info;
    check(kvferry_region_facts(pool, &info, &error), error);
    std::memset(info.address, 42, 65536);

    kvferry_file_options options{};
    options.size = sizeof options;
    options.create = 1;
    options.len = 1 << 20;
    kvferry_file *file = nullptr;
    kvferry_remote remote{};
    check(kvferry_file_open(agent, path, &options, &file, &error), error);
    check(kvferry_file_remote(file, &remote, &error), error);

    kvferry_batch *batch = nullptr;
    const kvferry_range out{0, 4096, 65536}, back{131072, 4096, 65536};
    check(kvferry_batch_new(1, &batch, &error), error);
    check(kvferry_batch_push(batch, pool, &remote, &out, 1, &error), error);
    check(kvferry_file_write(agent, batch, nullptr, nullptr, &error), error);

    std::promise<std::string> end;
    kvferry_transfer_options read{};
    read.size = sizeof read;
    read.done = ended;
    read.user = &end;
    check(kvferry_batch_clear(batch, &error), error);
    check(kvferry_batch_push(batch, pool, &remote, &back, 1, &error), error);
    check(kvferry_file_read_async(agent, batch, &read, nullptr, &error), error);
    const std::string why = end.get_future().get();
    if (!why.empty()) throw std::runtime_error(why);

    const char *bytes = static_cast<const char *>(info.address);
    if (std::memcmp(bytes, bytes + 131072, 65536) != 0) throw std::runtime_error("other bytes");
    check(kvferry_batch_free(batch, &error), error);
    check(kvferry_file_close(file, &error), error);
    check(kvferry_region_unregister(pool, &error), error);
    check(kvferry_agent_free(agent, &error), error);
}

}  // namespace

int main(int argc, char **argv) {
    try {
        run(argc > 1 ? argv[1] : "kvferry-example.kv");
    } catch (const std::exception &problem) {
        std::fprintf(stderr, "%s\n", problem.what());
        return 1;
    }
    std::puts("64 KiB went to the file and came back");
    return kvferry_handles_in_use() != 0;
}
