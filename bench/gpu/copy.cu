// Plain copy kernels without a library, for `kvferry bench gpu --kernel`:
//
//     nvcc -ptx -arch=sm_90 -O3 -o copy.ptx bench/gpu/copy.cu
//
// A job's addresses and length are multiples of 16, and no two jobs overlap.

struct Job {
    unsigned long long src, dst, len;
};

template <unsigned THREADS>
__device__ void copy(const Job &job, unsigned thread) {
    const uint4 *src = reinterpret_cast<const uint4 *>(job.src);
    uint4 *dst = reinterpret_cast<uint4 *>(job.dst);
    const unsigned long long units = job.len / sizeof(uint4);
    unsigned long long at = thread;
    // Four loads before the first store: they are in flight together.
    for (; at + 3 * THREADS < units; at += 4 * THREADS) {
        const uint4 a = __ldcs(src + at);
        const uint4 b = __ldcs(src + at + THREADS);
        const uint4 c = __ldcs(src + at + 2 * THREADS);
        const uint4 d = __ldcs(src + at + 3 * THREADS);
        __stcs(dst + at, a);
        __stcs(dst + at + THREADS, b);
        __stcs(dst + at + 2 * THREADS, c);
        __stcs(dst + at + 3 * THREADS, d);
    }
    for (; at < units; at += THREADS) {
        __stcs(dst + at, __ldcs(src + at));
    }
}

// A warp for each job.
extern "C" __global__ void __launch_bounds__(256) copy_by_warps(const Job *jobs, unsigned count) {
    const unsigned warps = gridDim.x * (blockDim.x / 32);
    for (unsigned at = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; at < count; at += warps) {
        copy<32>(jobs[at], threadIdx.x % 32);
    }
}

// A block of 256 threads for each job.
extern "C" __global__ void __launch_bounds__(256) copy_by_blocks(const Job *jobs, unsigned count) {
    for (unsigned at = blockIdx.x; at < count; at += gridDim.x) {
        copy<256>(jobs[at], threadIdx.x);
    }
}
