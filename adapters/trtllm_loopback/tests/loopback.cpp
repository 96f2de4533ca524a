// The agent as TensorRT-LLM loads and calls it: loopback CASE FOLDER.
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <thread>

#include "blocks.h"

namespace {

constexpr std::size_t kMiB = 1 << 20;

void move_both_ways(Agent const &agent, Blocks const &blocks, unsigned seed) {
    blocks.fill(seed);
    agent->executeLoopbackRequest(blocks.memory(), blocks.files(true), true);
    blocks.check_memory(seed);
    blocks.check_files(seed);
    blocks.clear();
    agent->executeLoopbackRequest(blocks.memory(), blocks.files(false), false);
    blocks.check_memory(seed);
    blocks.remove();
}

void bytes(std::string const &folder) {
    for (const bool multi : {false, true}) {
        const Agent agent = make_agent(multi);
        for (const std::size_t shift : {0, 1}) {
            move_both_ways(agent, Blocks(folder, {1, 4095, 4096, 4097, 65536 + 3}, shift), 1);
            move_both_ways(agent, Blocks(folder, std::vector<std::size_t>(131, 8192), shift), 2);
            move_both_ways(agent, Blocks(folder, {17 * kMiB + 5}, shift), 3);
            move_both_ways(agent, Blocks(folder, {5 * kMiB, 3, 9 * kMiB + 4096, 5 * kMiB + 7, 4096}, shift), 4);
        }
        move_both_ways(agent, Blocks(folder, {4096, 0, 4096}), 5);
    }
    CHECK(handles_in_use() == 0);
}

void cases(std::string const &folder) {
    const Agent agent = make_agent(true);
    // Nothing to do, also by the table of virtual functions as TensorRT-LLM was compiled with it.
    const trt::MemoryDescs no_memory(trt::MemoryType::kDRAM, {});
    const trt::FileDescs no_files((std::vector<trt::FileDesc>()));
    agent->executeLoopbackRequest(no_memory, no_files, true);
    agent->executeLoopbackRequest(no_memory, no_files, false);
    using Execute = void (*)(trt::BaseLoopbackAgent *, trt::MemoryDescs const *, trt::FileDescs const *, bool);
    const auto table = *reinterpret_cast<void *const *const *>(agent.get());
    reinterpret_cast<Execute>(table[2])(agent.get(), &no_memory, &no_files, true);

    // What is behind the block in its file stays.
    const Blocks blocks(folder, {10000, 300});
    blocks.fill(1);
    agent->executeLoopbackRequest(blocks.memory(), blocks.files(true), true);
    const trt::MemoryDescs shorter(trt::MemoryType::kDRAM, {{blocks.at(1), 300, 0}});
    agent->executeLoopbackRequest(shorter, blocks.files(true, 1), true);
    const Bytes file = blocks.contents(0);
    CHECK(file.size() == 10000 && is_filled(file.data(), 300, 2));
    CHECK(file[300] == pattern(300, 1) && file[9999] == pattern(9999, 1));

    // The same memory twice in one request, whole and in part.
    const trt::MemoryDescs twice(trt::MemoryType::kDRAM, {{blocks.at(0) + 5000, 5000, 0}, {blocks.at(0), 10000, 0}});
    agent->executeLoopbackRequest(twice, blocks.files(true), true);
    CHECK(is_filled(blocks.contents(1).data(), 10000, 1));
    CHECK(std::memcmp(blocks.contents(0).data(), blocks.at(0) + 5000, 5000) == 0);

    const trt::MemoryDescs within(trt::MemoryType::kDRAM, {{blocks.at(0), 10000, 0}, {blocks.at(0) + 100, 300, 0}});
    agent->executeLoopbackRequest(within, blocks.files(true), true);
    CHECK(is_filled(blocks.contents(0).data(), 10000, 1));
    CHECK(std::memcmp(blocks.contents(1).data(), blocks.at(0) + 100, 300) == 0);

    // Other memory at an address that was used before.
    void *const place = mmap(nullptr, kMiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const trt::MemoryDescs mapped(trt::MemoryType::kDRAM, {{place, kMiB, 0}});
    for (unsigned seed = 0; seed < 30; seed++) {
        CHECK(mmap(place, kMiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == place);
        fill(place, kMiB, seed);
        agent->executeLoopbackRequest(mapped, blocks.files(true, 1), true);
        const Bytes written = blocks.contents(0);
        CHECK(written.size() == kMiB && is_filled(written.data(), kMiB, seed));
    }
    munmap(place, kMiB);
    CHECK(handles_in_use() == 1);

    // The port that the environment has for another agent of the process is not taken: here it could not be.
    setenv("KVFERRY_LISTEN", "192.0.2.1:1", 1);
    make_agent(false);
}

// Device memory of the fake driver, which the environment names.
class DeviceBlocks {
public:
    explicit DeviceBlocks(std::vector<std::size_t> lens) : lens_(std::move(lens)) {
        driver_ = dlopen(std::getenv("KVFERRY_LIBCUDA"), RTLD_NOW | RTLD_LOCAL);
        CHECK(driver_ != nullptr);
        void *context = nullptr;
        CHECK(named<int(unsigned)>("cuInit")(0) == 0);
        CHECK(named<int(void **, int)>("cuDevicePrimaryCtxRetain")(&context, 0) == 0);
        CHECK(named<int(void *)>("cuCtxPushCurrent_v2")(context) == 0);
        for (const std::size_t len : lens_) {
            std::uint64_t address = 0;
            CHECK(named<int(std::uint64_t *, std::size_t)>("cuMemAlloc_v2")(&address, len) == 0);
            addresses_.push_back(address);
        }
    }
    trt::MemoryDescs memory() const {
        std::vector<trt::MemoryDesc> descs;
        for (std::size_t i = 0; i < lens_.size(); i++)
            descs.emplace_back(reinterpret_cast<void *>(addresses_[i]), lens_[i], 0);
        return {trt::MemoryType::kVRAM, std::move(descs)};
    }
    void write(std::size_t index, unsigned seed) const {
        Bytes bytes(lens_[index]);
        fill(bytes.data(), bytes.size(), seed);
        CHECK(named<int(std::uint64_t, void const *, std::size_t)>("fakecuda_write")(addresses_[index], bytes.data(),
                                                                                     bytes.size()) == 0);
    }
    Bytes read(std::size_t index) const {
        Bytes bytes(lens_[index]);
        CHECK(named<int(std::uint64_t, void *, std::size_t)>("fakecuda_read")(addresses_[index], bytes.data(),
                                                                              bytes.size()) == 0);
        return bytes;
    }

private:
    template <typename Function>
    Function *named(char const *name) const {
        void *const found = dlsym(driver_, name);
        CHECK(found != nullptr);
        return reinterpret_cast<Function *>(found);
    }

    std::vector<std::size_t> lens_;
    std::vector<std::uint64_t> addresses_;
    void *driver_ = nullptr;
};

void on_device(std::string const &folder) {
    // Blocks that together exceed the stage, with lengths that are not multiples of a page.
    const std::vector<std::size_t> lens = {10000, 40u << 20, 1, 30u << 20, 4096};
    const DeviceBlocks device(lens);
    const Blocks files(folder, lens);
    const Agent agent = make_agent(true);
    for (std::size_t i = 0; i < lens.size(); i++) device.write(i, static_cast<unsigned>(i + 1));
    agent->executeLoopbackRequest(device.memory(), files.files(true), true);
    files.check_files(1);
    for (std::size_t i = 0; i < lens.size(); i++) device.write(i, 77);
    agent->executeLoopbackRequest(device.memory(), files.files(false), false);
    for (std::size_t i = 0; i < lens.size(); i++)
        CHECK(is_filled(device.read(i).data(), lens[i], static_cast<unsigned>(i + 1)));
    CHECK(::truncate(files.path(1).c_str(), 8191) == 0);
    check_says(refusal(agent, device.memory(), files.files(false), false), {"index 1", "compute the block again"});
    CHECK(handles_in_use() == 1);
}

// The disk loses the first reads, as many as stages may be left, and answers them once the file "answer" is there.
// It answers all others at once. A machine that is slow may end a request before it reads.
void hangs(std::string const &folder) {
    const std::vector<std::size_t> lens = {4096};
    const DeviceBlocks device(lens);
    const Blocks blocks(folder, lens);
    const Agent agent = make_agent(false);
    const auto onboard = [&](unsigned number) {
        std::vector<trt::FileDesc> descs;
        descs.emplace_back(folder + "/disk/" + std::to_string(number), O_RDONLY, 0, lens[0]);
        return refusal(agent, device.memory(), trt::FileDescs(std::move(descs)), false);
    };
    const auto says = [](std::string const &text, const char *words) { return text.find(words) != std::string::npos; };
    const std::string none = "no exception";
    std::string text, late;
    for (unsigned number = 0; !says(text, "host memory for 4 requests"); number++) {
        text = onboard(number % 4);
        if (says(text, "KVFERRY_TIMEOUT_MS")) late = text;
    }
    check_says(late, {"can't onboard 1 blocks", "does not answer"});
    check_says(text, {"check their disk"});
    // The agent and the stages.
    CHECK(handles_in_use() == 5);
    // Host memory needs no stage.
    blocks.fill(2);
    do text = refusal(agent, blocks.memory(), blocks.files(true), true);
    while (text != none);
    blocks.check_files(2);
    CHECK(std::ofstream(folder + "/answer").good());
    do text = onboard(0);
    while (text != none || handles_in_use() > 1);
    CHECK(is_filled(device.read(0).data(), lens[0], 1));
}

void refusals(std::string const &folder) {
    const Agent agent = make_agent(true, "Refusing");
    const Blocks blocks(folder, {4096, 8192, 4096});
    blocks.fill(1);
    const auto vram = blocks.memory(trt::MemoryType::kVRAM);
    check_says(refusal(agent, vram, blocks.files(true), true),
               {"agent 'Refusing' can't offload 3 blocks", "device memory (kVRAM)", "set the transfer mode to DRAM"});
    check_says(refusal(agent, blocks.memory(trt::MemoryType::kOBJ), blocks.files(true), true), {"memory of type 3"});
    check_says(refusal(agent, blocks.memory(), blocks.files(true, 2), true),
               {"3 blocks of memory and 2 files", "one file for each block"});
    for (std::size_t i = 0; i < blocks.size(); i++) CHECK(blocks.contents(i).empty());

    agent->executeLoopbackRequest(blocks.memory(), blocks.files(true), true);
    CHECK(::truncate(blocks.path(1).c_str(), 8191) == 0);
    check_says(refusal(agent, blocks.memory(), blocks.files(false), false),
               {"can't onboard 3 blocks: the file at index 1 (" + blocks.path(1) + "): ", "beyond the file's end",
                "len=8192", "file_len=8191", "compute the block again"});
    CHECK(blocks.contents(0).size() == 4096);

    check_says(refusal(agent, blocks.memory(), blocks.files(true), false), {"index 0", "opened for writing"});
    check_says(refusal(agent, blocks.memory(), blocks.files(false), true), {"index 0", "opened for reading"});
    CHECK(blocks.contents(0).size() == 4096);

    for (const bool is_offload : {true, false}) {
        const auto files = blocks.files(is_offload);
        const int fd = static_cast<int>(files.getDescs()[2].getFd());
        ::close(fd);
        check_says(refusal(agent, blocks.memory(), files, is_offload),
                   {"index 2 (descriptor " + std::to_string(fd) + ")", "not open", "Bad file descriptor"});
        // The number belongs to the list, which closes it.
        CHECK(::open("/dev/null", O_RDONLY) == fd);
    }

    const trt::MemoryDescs nowhere(trt::MemoryType::kDRAM, {{nullptr, 4096, 0}});
    check_says(refusal(agent, nowhere, blocks.files(true, 1), true), {"index 0", "the address 0"});
    const trt::MemoryDescs endless(trt::MemoryType::kDRAM, {{blocks.at(0), SIZE_MAX, 0}});
    check_says(refusal(agent, endless, blocks.files(true, 1), true), {"index 0", "beyond the address space"});
    void *const gone = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const trt::MemoryDescs unreadable(trt::MemoryType::kDRAM, {{gone, 4096, 0}});
    check_says(refusal(agent, unreadable, blocks.files(true, 1), true), {"not host memory", "can't read", "len=4096"});
    // It is refused before its file is touched.
    CHECK(blocks.contents(0).size() == 4096);

    std::vector<trt::FileDesc> folder_desc;
    folder_desc.emplace_back(folder, O_RDONLY, 0, 4096);
    const trt::MemoryDescs first(trt::MemoryType::kDRAM, {{blocks.at(0), 4096, 0}});
    check_says(refusal(agent, first, trt::FileDescs(std::move(folder_desc)), false),
               {"index 0 (" + folder + ")", "s a directory"});

    std::string none;
    try {
        Loader::instance().find<Agent (*)(trt::BaseAgentConfig const *)>("createNixlLoopbackAgent")(nullptr);
    } catch (std::exception const &problem) {
        none = problem.what();
    }
    check_says(none, {"the configuration is NULL"});
    none = "no exception";
    try {
        make_agent(true, std::string(1000, 'n').c_str());
    } catch (std::exception const &problem) {
        none = problem.what();
    }
    check_says(none, {"can't start", "name"});

    // After all that the agent works.
    move_both_ways(agent, blocks, 7);
    CHECK(handles_in_use() == 1);
}

// A request that fails midway: reason, file and advice, no part of a block is left, and the agent works.
void fails_for_space(Agent const &agent, Blocks const &blocks, std::size_t index, const char *reason) {
    blocks.fill(1);
    const std::string text = refusal(agent, blocks.memory(), blocks.files(true), true);
    check_says(text, {"the file at index " + std::to_string(index) + " (" + blocks.path(index) + ")", reason,
                      "check free space", "emptied"});
    CHECK(text.find("/proc/") == std::string::npos && text.find("pair=") == std::string::npos);
    for (std::size_t i = 0; i < blocks.size(); i++) CHECK(blocks.contents(i).empty());
    blocks.clear();
    check_says(refusal(agent, blocks.memory(), blocks.files(false), false), {"beyond the file's end"});
}

void file_too_large(std::string const &folder) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{6 * kMiB, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    for (const bool multi : {false, true}) {
        const Agent agent = make_agent(multi);
        fails_for_space(agent, Blocks(folder, {4096, 4 * kMiB, 9 * kMiB, 4096}), 2, "File too large");
        move_both_ways(agent, Blocks(folder, {4096, 4 * kMiB}), 3);
    }
}

void full_device(std::string const &) {
    const Agent agent = make_agent(true);
    Bytes block(3 * kMiB, 1);
    std::vector<trt::FileDesc> device;
    device.emplace_back("/dev/full", O_WRONLY, 0, block.size());
    const trt::MemoryDescs memory(trt::MemoryType::kDRAM, {{block.data(), block.size(), 0}});
    check_says(refusal(agent, memory, trt::FileDescs(std::move(device)), true),
               {"index 0 (/dev/full)", "No space left on device", "check free space"});
}

// Needs the right to mount.
void full_disk(std::string const &folder) {
    CHECK(unshare(CLONE_NEWNS) == 0);
    CHECK(mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0);
    CHECK(mount("kvferry", folder.c_str(), "tmpfs", 0, "size=8m") == 0);
    for (const bool multi : {false, true}) {
        const Agent agent = make_agent(multi);
        const Blocks blocks(folder, {12 * kMiB});
        fails_for_space(agent, blocks, 0, "No space left on device");
        blocks.remove();
        move_both_ways(agent, Blocks(folder, {2 * kMiB, 5 * kMiB}), 3);
    }
}

std::size_t threads() {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

std::size_t descriptors() {
    const std::filesystem::directory_iterator open("/proc/self/fd");
    return static_cast<std::size_t>(std::distance(begin(open), end(open)));
}

void ends(std::string const &folder) {
    // What the process keeps once it has had an agent is not counted again.
    std::map<int, std::pair<std::size_t, std::size_t>> after;
    for (int round = 0; round < 4; round++) {
        for (const bool multi : {false, true}) {
            const Agent agent = make_agent(multi), other = make_agent(multi);
            move_both_ways(agent, Blocks(folder, {9 * kMiB, 4096}), 1);
            move_both_ways(other, Blocks(folder, {4096}), 2);
        }
        CHECK(handles_in_use() == 0);
        // A thread that was joined is in /proc for a moment longer.
        for (int tries = 0; tries < 1000 && threads() > 1; tries++) pause_ms(10);
        CHECK(threads() == 1);
        after[round] = {threads(), descriptors()};
        CHECK(after[round] == after[0]);
    }
}

void many_threads(std::string const &folder) {
    const Agent agent = make_agent(true);
    std::vector<std::thread> threads;
    // All offload the same memory, each to files of its own.
    const Blocks shared(folder, {kMiB, 4096});
    shared.fill(9);
    for (unsigned number = 0; number < 6; number++)
        threads.emplace_back([&, number] {
            const std::string own = folder + "/" + std::to_string(number);
            std::filesystem::create_directories(own);
            for (unsigned round = 0; round < 10; round++) {
                const Blocks files(own, {kMiB, 4096});
                agent->executeLoopbackRequest(shared.memory(), files.files(true), true);
                files.check_files(9);
                files.remove();
                move_both_ways(agent, Blocks(own, {4096, 70000}), round);
            }
        });
    for (auto &thread : threads) thread.join();
    CHECK(handles_in_use() == 1);
}

void forked(std::string const &folder) {
    Agent agent = make_agent(true);
    const Blocks blocks(folder, {4096});
    move_both_ways(agent, blocks, 1);
    const pid_t child = fork();
    if (child == 0) {
        check_says(refusal(agent, blocks.memory(), blocks.files(true), true), {"after the fork"});
        agent.reset();
        move_both_ways(make_agent(true), Blocks(folder, {5000}), 2);
        std::exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    move_both_ways(agent, blocks, 3);
}

// The agents outlive main, and the loader closes the library before they are destroyed.
void stays_open(std::string const &folder) {
    static std::vector<Agent> agents;
    for (const bool multi : {false, true}) agents.push_back(make_agent(multi));
    for (auto const &agent : agents) move_both_ways(agent, Blocks(folder, {9 * kMiB, 1}), 1);
}

// Built in front of tests/original.cpp.
void original(std::string const &folder) {
    bytes(folder);
    for (const char *name : {"createNixlTransferAgent", "otherFunction"}) {
        const auto function = Loader::instance().find<int (*)()>(name);
        CHECK(function != nullptr && function() == 42);
    }
}

void alone(std::string const &folder) {
    move_both_ways(make_agent(true), Blocks(folder, {4096}), 1);
    CHECK(Loader::instance().find<void *>("createNixlTransferAgent") == nullptr);
}

// A dependency of the original is missing: the loader says which one.
void incomplete(std::string const &missing) {
    std::string reason = "no exception";
    try {
        make_agent(true);
    } catch (std::exception const &problem) {
        reason = problem.what();
    }
    check_says(reason, {missing, "cannot open shared object file"});
}

}  // namespace

int main(int argc, char **argv) {
    using Case = void (*)(std::string const &);
    const std::map<std::string, Case> all{{"bytes", bytes},
                                          {"cases", cases},
                                          {"refusals", refusals},
                                          {"file-too-large", file_too_large},
                                          {"full-device", full_device},
                                          {"on-device", on_device},
                                          {"hangs", hangs},
                                          {"full-disk", full_disk},
                                          {"ends", ends},
                                          {"many-threads", many_threads},
                                          {"forked", forked},
                                          {"stays-open", stays_open},
                                          {"original", original},
                                          {"alone", alone},
                                          {"incomplete", incomplete}};
    CHECK(argc == 3 && all.count(argv[1]) == 1);
    try {
        all.at(argv[1])(argv[2]);
    } catch (std::exception const &problem) {
        std::fprintf(stderr, "%s: %s\n", argv[1], problem.what());
        return 1;
    }
    return 0;
}
