//! PTX kernels on the driver's memory.

use crate::driver::{Driver, pattern, processor_time, ready};
use kvferry_fakecuda::UNWRITTEN;

/// One warp for each job {source, destination, length}: 16 bytes a lane, then single bytes.
const SCATTER: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry scatter(.param .u64 jobs, .param .u64 count)
{
    .reg .pred %p<4>;
    .reg .b32 %r<8>;
    .reg .b64 %d<16>;
    .reg .b64 %job, %jobs, %count;
    ld.param.u64 %jobs, [jobs];
    ld.param.u64 %count, [count];
    cvta.to.global.u64 %jobs, %jobs;
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mad.lo.u32 %r3, %r0, %r1, %r2;
    shr.u32 %r4, %r3, 5;
    cvt.u64.u32 %job, %r4;
    setp.ge.u64 %p0, %job, %count;
    @%p0 bra END;
    mul.lo.u64 %d0, %job, 24;
    add.u64 %d0, %d0, %jobs;
    ld.global.nc.u64 %d1, [%d0];
    ld.global.nc.u64 %d2, [%d0+8];
    ld.global.nc.u64 %d3, [%d0+16];
    mov.u32 %r5, %laneid;
    cvt.u64.u32 %d4, %r5;
    or.b64 %d5, %d1, %d2;
    and.b64 %d5, %d5, 15;
    and.b64 %d6, %d3, -16;
    setp.ne.u64 %p1, %d5, 0;
    selp.b64 %d6, 0, %d6, %p1;
    shl.b64 %d7, %d4, 4;
WIDE:
    setp.ge.u64 %p2, %d7, %d6;
    @%p2 bra TAIL;
    add.u64 %d8, %d1, %d7;
    add.u64 %d9, %d2, %d7;
    ld.global.nc.v2.u64 {%d10, %d11}, [%d8];
    st.global.cg.v2.u64 [%d9], {%d10, %d11};
    add.u64 %d7, %d7, 512;
    bra WIDE;
TAIL:
    add.u64 %d7, %d6, %d4;
BYTES:
    setp.ge.u64 %p3, %d7, %d3;
    @%p3 bra END;
    add.u64 %d8, %d1, %d7;
    add.u64 %d9, %d2, %d7;
    ld.global.nc.u8 %r6, [%d8];
    st.global.cg.u8 [%d9], %r6;
    add.u64 %d7, %d7, 32;
    bra BYTES;
END:
    ret;
}
";

struct Kernel {
    cuda: &'static Driver,
    function: usize,
    stream: usize,
    jobs: u64,
}

impl Kernel {
    fn new() -> Self {
        let cuda = ready(&[]);
        let module = cuda.load(SCATTER).unwrap();
        let function = cuda.function(module, "scatter").unwrap();
        let (stream, jobs) = (cuda.stream().unwrap(), cuda.alloc_host(1 << 20).unwrap());
        Self { cuda, function, stream, jobs }
    }

    fn launch(&self, jobs: &[(u64, u64, u64)]) -> Result<(), i32> {
        let words = jobs.iter().flat_map(|&(from, to, len)| [from, to, len]);
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        self.cuda.fake.write(self.jobs, &bytes).unwrap();
        let count = jobs.len() as u64;
        let grid = count.div_ceil(4) as u32;
        self.cuda.launch(self.function, grid, 128, self.stream, &[self.jobs, count])
    }
}

/// Jobs of random lengths and alignments, whose destinations do not overlap.
fn random_jobs(rng: &mut fastrand::Rng, from: u64, to: u64, len: u64) -> Vec<(u64, u64, u64)> {
    let mut jobs = Vec::new();
    let mut at = 0;
    while at + 4096 < len {
        let job = rng.u64(..2000);
        let aligned = rng.bool();
        let mask = if aligned { !15 } else { !0 };
        at = (at + 15) & mask | if aligned { 0 } else { rng.u64(..16) };
        jobs.push((from + (rng.u64(..len - job) & mask), to + at, job));
        at += job;
    }
    rng.shuffle(&mut jobs);
    jobs
}

#[test]
fn a_scatter_kernel_moves_the_bytes_of_every_job_and_no_others() {
    let k = Kernel::new();
    let len = 200_000;
    let (from, to) = (k.cuda.alloc(len).unwrap(), k.cuda.alloc(len).unwrap());
    let host = k.cuda.alloc_host(len).unwrap();
    let bytes = pattern(len, 7);
    k.cuda.fake.write(from, &bytes).unwrap();
    k.cuda.fake.write(host, &bytes).unwrap();
    let mut rng = fastrand::Rng::with_seed(4);
    for source in [from, host] {
        k.cuda.fake.write(to, &vec![UNWRITTEN; len]).unwrap();
        let jobs = random_jobs(&mut rng, source, to, len as u64);
        k.launch(&jobs).unwrap();
        k.cuda.wait_stream(k.stream).unwrap();
        let mut expected = vec![UNWRITTEN; len];
        for (source_at, at, n) in jobs {
            let (a, b, n) = ((source_at - source) as usize, (at - to) as usize, n as usize);
            expected[b..b + n].copy_from_slice(&bytes[a..a + n]);
        }
        assert!(k.cuda.fake.read(to, len).unwrap() == expected);
        assert_eq!(k.cuda.fake.findings(), [""; 0]);
    }
}

#[test]
fn the_race_checker_knows_what_a_kernel_touches() {
    let k = Kernel::new();
    let (a, b) = (k.cuda.alloc(65536).unwrap(), k.cuda.alloc(65536).unwrap());
    let other = k.cuda.stream().unwrap();
    k.launch(&[(a, b, 4096)]).unwrap();
    k.cuda.fill(b + 4096, 0, 4096, other).unwrap();
    assert_eq!(k.cuda.fake.findings(), [""; 0]);
    k.cuda.fill(b + 4080, 0, 16, other).unwrap();
    k.cuda.synchronize().unwrap();
    let findings = k.cuda.fake.findings();
    assert_eq!(findings.len(), 1);
    assert!(findings[0].contains("kernel `scatter`"), "{}", findings[0]);
}

#[test]
fn accesses_of_a_kernel_whose_jobs_are_still_on_their_way_are_found_when_it_runs() {
    let k = Kernel::new();
    let (a, b) = (k.cuda.alloc(65536).unwrap(), k.cuda.alloc(65536).unwrap());
    let (jobs, other) = (k.cuda.alloc(4096).unwrap(), k.cuda.stream().unwrap());
    let words: Vec<u8> = [a, b, 4096].into_iter().flat_map(u64::to_le_bytes).collect();
    k.cuda.fake.write(k.jobs, &words).unwrap();
    k.cuda.fake.hold(kvferry_fakecuda::control::ALL_ENGINES);
    k.cuda.copy(jobs, k.jobs, 24, k.stream).unwrap();
    k.cuda.launch(k.function, 1, 32, k.stream, &[jobs, 1]).unwrap();
    k.cuda.fill(b, 0, 16, other).unwrap();
    assert_eq!(k.cuda.fake.findings(), [""; 0]);
    k.cuda.fake.release();
    k.cuda.synchronize().unwrap();
    assert_eq!(k.cuda.fake.findings().len(), 1, "{:?}", k.cuda.fake.findings());
}

#[test]
fn a_job_outside_of_memory_or_unaligned_ends_with_an_error_that_sticks() {
    let k = Kernel::new();
    let a = k.cuda.alloc(4096).unwrap();
    k.launch(&[(a, a + 4090, 16)]).unwrap();
    assert_eq!(k.cuda.wait_stream(k.stream), Err(700));
    assert!(k.cuda.fake.findings()[0].contains("line"), "{:?}", k.cuda.fake.findings());
    assert_eq!(k.cuda.alloc(1), Err(700));

    let k = Kernel::new();
    k.cuda.launch(k.function, 1, 32, k.stream, &[k.jobs + 4, 1]).unwrap();
    assert_eq!(k.cuda.wait_stream(k.stream), Err(716));

    let k = Kernel::new();
    let pageable = [0_u8; 64];
    let a = k.cuda.alloc(4096).unwrap();
    k.launch(&[(pageable.as_ptr() as u64, a, 16)]).unwrap();
    assert_eq!(k.cuda.wait_stream(k.stream), Err(700), "pageable memory is out of reach");
}

#[test]
fn a_kernel_reaches_a_peer_only_when_access_is_enabled() {
    let k = Kernel::new();
    let own = k.cuda.retain(0).unwrap();
    let second = k.cuda.retain(1).unwrap();
    k.cuda.set_current(second).unwrap();
    let there = k.cuda.alloc(4096).unwrap();
    k.cuda.set_current(own).unwrap();
    let here = k.cuda.alloc(4096).unwrap();
    k.cuda.enable_peer(second).unwrap();
    k.launch(&[(there, here, 4096)]).unwrap();
    k.cuda.wait_stream(k.stream).unwrap();
    let k = Kernel::new();
    let second = k.cuda.retain(1).unwrap();
    let own = k.cuda.retain(0).unwrap();
    k.cuda.set_current(second).unwrap();
    let there = k.cuda.alloc(4096).unwrap();
    k.cuda.set_current(own).unwrap();
    let here = k.cuda.alloc(4096).unwrap();
    k.launch(&[(there, here, 4096)]).unwrap();
    assert_eq!(k.cuda.wait_stream(k.stream), Err(700));
}

#[test]
fn a_read_only_load_of_bytes_that_the_kernel_writes_is_a_finding() {
    let k = Kernel::new();
    let a = k.cuda.alloc(8192).unwrap();
    k.launch(&[(a, a + 4096, 4096)]).unwrap();
    k.cuda.wait_stream(k.stream).unwrap();
    assert_eq!(k.cuda.fake.findings(), [""; 0]);
    k.launch(&[(a, a + 2048, 4096)]).unwrap();
    k.cuda.wait_stream(k.stream).unwrap();
    assert!(k.cuda.fake.findings()[0].contains("ld.global.nc"));
}

#[test]
fn a_refused_module_writes_its_line_to_the_error_log() {
    let k = Kernel::new();
    let text = SCATTER.replace("or.b64 %d5, %d1, %d2;", "popc.b64 %r5, %d1;");
    let (code, log) = k.cuda.load_with_log(&text).unwrap_err();
    assert_eq!(code, 218);
    let line = 1 + text.lines().position(|line| line.contains("popc")).unwrap();
    assert!(log.starts_with(&format!("line {line}: ")), "{log}");
    k.cuda.fake.set("version", "11.4");
    let newer = SCATTER.replace(".version 7.0", ".version 7.5");
    assert_eq!(k.cuda.load(&newer), Err(222));
    assert_eq!(k.cuda.load("\x7fELF"), Err(200));
}

#[test]
fn modules_end_with_their_context_and_functions_have_names() {
    let k = Kernel::new();
    let module = k.cuda.load(SCATTER).unwrap();
    assert_eq!(k.cuda.function(module, "gather"), Err(500));
    assert_eq!(k.cuda.fake.counter("modules"), 2);
    k.cuda.unload(module).unwrap();
    assert_eq!(k.cuda.unload(module), Err(400));
    assert_eq!(k.cuda.launch(module, 1, 1, k.stream, &[]), Err(400));
    k.cuda.release(0).unwrap();
    assert_eq!(k.cuda.fake.counter("modules"), 0);
}

#[test]
fn four_mebibytes_in_small_jobs_take_less_than_ten_seconds_of_a_processor() {
    let k = Kernel::new();
    let len = 4 << 20;
    let (from, to) = (k.cuda.alloc(len).unwrap(), k.cuda.alloc(len).unwrap());
    let jobs: Vec<(u64, u64, u64)> =
        (0..1024).map(|i| (from + i * 4096, to + (1023 - i) * 4096, 4096)).collect();
    let begun = processor_time();
    k.launch(&jobs).unwrap();
    k.cuda.wait_stream(k.stream).unwrap();
    let took = processor_time() - begun;
    assert!(took.as_secs() < 10, "{took:?}");
    println!("{took:?}");
}
