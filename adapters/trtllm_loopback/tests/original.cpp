// Stands for TensorRT-LLM's library: the agent that ours replaces, and functions that must stay. With DEPENDS
// it needs a second library, as the real one needs NIXL.
#ifdef DEPENDS
extern "C" int answer();
#else
static int answer() { return 42; }
#endif

extern "C" {
__attribute__((visibility("default"))) int createNixlTransferAgent() { return answer(); }
__attribute__((visibility("default"))) int otherFunction() { return answer(); }
// Never called: ours comes first.
__attribute__((visibility("default"))) void createNixlLoopbackAgent() { __builtin_trap(); }
}
