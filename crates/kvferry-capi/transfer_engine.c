// libtransfer_engine.so: the functions of Mooncake's transfer_engine_c.h under their own names. Each jumps to the one
// in libkvferry.so.0, which has a prefix: a program that uses kvferry.h beside Mooncake's own library gets Mooncake's
// functions from there, because libkvferry.so.0 has none of these names.

#if defined(__x86_64__)
#define JUMP(target) "endbr64\n jmp *" target "@GOTPCREL(%rip)\n"
#elif defined(__aarch64__)
// `hint 34` is `bti c`. x16 and x17 are free for a jump between a caller and its function.
#define JUMP(target) "hint 34\n adrp x16, :got:" target "\n ldr x17, [x16, :got_lo12:" target "]\n br x17\n"
#else
#error "no jump is written for this processor"
#endif

#define FORWARD(name)                                                                            \
    __asm__(".text\n .balign 16\n .globl " #name "\n .type " #name ", %function\n" #name ":\n "    \
            JUMP("kvferry_mooncake_" #name) ".size " #name ", . - " #name "\n")

FORWARD(allocateBatchID);
FORWARD(closeSegment);
FORWARD(createTransferEngine);
FORWARD(destroyTransferEngine);
FORWARD(discoverTopology);
FORWARD(enableGracefulShutdown);
FORWARD(freeBatchID);
FORWARD(freeNotifsMsgBuf);
FORWARD(genNotifyInEngine);
FORWARD(getLocalIpAndPort);
FORWARD(getNicLoadStats);
FORWARD(getNotifsFromEngine);
FORWARD(getTransferStatus);
FORWARD(installTransport);
FORWARD(openSegment);
FORWARD(openSegmentNoCache);
FORWARD(registerLocalMemory);
FORWARD(registerLocalMemoryBatch);
FORWARD(removeLocalSegment);
FORWARD(showLinks);
FORWARD(submitTransfer);
FORWARD(submitTransferWithNotify);
FORWARD(syncSegmentCache);
FORWARD(uninstallTransport);
FORWARD(unregisterLocalMemory);
FORWARD(unregisterLocalMemoryBatch);
FORWARD(warmupEfaSegment);
