// Stands for TensorRT-LLM's library: the agent that ours replaces, and functions that must stay. It needs a second
// library, as the real one needs NIXL; DEPENDENCY makes that one.
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int answer();

#ifdef DEPENDENCY
int answer() { return 42; }
#else
EXPORTED int createNixlTransferAgent() { return answer(); }
EXPORTED int otherFunction() { return answer(); }
// Never called: ours comes first.
EXPORTED void createNixlLoopbackAgent() { __builtin_trap(); }
#endif
