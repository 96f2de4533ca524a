//! The driver that is there, with a device: a real one, or what KVFERRY_LIBCUDA names. Without one the tests
//! say that they were skipped.

use kvferry_sys::HostSpan;
use kvferry_sys::cuda::{
    Context, CopyBatch, DeviceAllocation, Driver, Error, Event, Grid, HostRegistration, IpcHandle,
    MemoryKind, Module, RawStream, SourceOrder, Stream, VmmAllocation, VmmMapping, allocation_at,
    classify, copy_async, copy_batch, dma_buf, fill_async, granularity, host_function, launch,
};
use kvferry_sys::map::Mapping;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const LEN: usize = 1 << 20;

/// A context of the first device. `None` if there is none.
fn device(test: &str) -> Option<Context> {
    match Driver::get() {
        Ok(driver) => {
            let device = driver.device(0).expect("it is counted");
            Some(Context::primary(device).expect("the device works"))
        }
        Err(why) => {
            println!("SKIPPED: {test}: {why}");
            None
        }
    }
}

/// Registered host memory, filled with a pattern that starts with `seed`.
struct Pinned {
    registered: HostRegistration,
    _map: Mapping,
}

impl Pinned {
    fn new(context: &Context, seed: u8) -> Self {
        let map = Mapping::populated(LEN).expect("memory");
        let bytes: Vec<u8> = (0..LEN).map(|i| (i * 7) as u8 ^ seed).collect();
        // SAFETY: the mapping outlives the registration, which is dropped first.
        let registered = unsafe {
            let span = HostSpan::new(map.as_ptr(), LEN);
            span.copy_from(&bytes);
            HostRegistration::new(context, span)
        };
        Self { registered: registered.expect("a MiB can be pinned"), _map: map }
    }

    fn address(&self) -> u64 {
        self.registered.span().as_ptr() as u64
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.registered.span().copy_to(&mut bytes);
        bytes
    }
}

#[test]
fn bytes_return_from_a_device_in_the_order_of_events() {
    let Some(context) = device("copies of a device") else { return };
    let info = context.device().info().expect("it is described");
    println!("{info:?}, driver {}", context.driver().version());
    assert!(info.unified_addressing && info.copy_engines > 0 && info.multiprocessors > 0);
    let (from, to) = (Pinned::new(&context, 1), Pinned::new(&context, 2));
    let memory = DeviceAllocation::new(&context, LEN).expect("a MiB");
    let (up, down) = (Stream::new(&context).expect("one"), Stream::new(&context).expect("one"));
    let (there, back) = (Event::new(&context).expect("one"), Event::new(&context).expect("one"));
    // SAFETY: all memory lives until `back` is reached, and nothing else uses it.
    unsafe { copy_async(&up, memory.address(), from.address(), LEN) }.expect("copied");
    there.record(&up).expect("recorded");
    down.wait(&there).expect("it waits");
    // SAFETY: as above.
    unsafe { copy_async(&down, to.address(), memory.address(), LEN) }.expect("copied");
    back.record(&down).expect("recorded");
    back.synchronize().expect("reached");
    assert_eq!((back.query(), down.query()), (Ok(true), Ok(true)));
    assert_eq!(to.bytes(), from.bytes());
    // SAFETY: the legacy stream exists.
    unsafe { there.record_raw(RawStream::LEGACY) }.expect("recorded");
    // SAFETY: as above.
    assert_eq!(unsafe { RawStream::PER_THREAD.is_capturing(&context) }, Ok(false));
    up.wait(&there).expect("it waits");
    up.synchronize().expect("idle");
}

#[test]
fn a_batch_copies_each_piece_to_its_place() {
    let Some(context) = device("batches") else { return };
    if context.driver().batch_call().is_none() {
        println!("SKIPPED: batches: the driver is older than CUDA 12.8");
        return;
    }
    let (from, to) = (Pinned::new(&context, 3), Pinned::new(&context, 4));
    let memory = DeviceAllocation::new(&context, LEN).expect("a MiB");
    let stream = Stream::new(&context).expect("one");
    const PIECE: usize = 4096;
    let pieces = (LEN / PIECE) as u64;
    let at = |base: u64, i: u64| base + i * PIECE as u64;
    // In reverse order on the device.
    let up: CopyBatch = (0..pieces)
        .map(|i| (at(memory.address(), pieces - 1 - i), at(from.address(), i), PIECE))
        .collect();
    let down: CopyBatch = (0..pieces)
        .map(|i| (at(to.address(), i), at(memory.address(), pieces - 1 - i), PIECE))
        .collect();
    // SAFETY: memory and lists live until the stream is synchronised, and nothing else uses them.
    unsafe {
        copy_batch(&stream, &up, SourceOrder::Stream).expect("copied");
        copy_batch(&stream, &down, SourceOrder::Stream).expect("copied");
    }
    stream.synchronize().expect("idle");
    assert_eq!(to.bytes(), from.bytes());
}

#[test]
fn a_host_function_sees_what_the_stream_has_done() {
    let Some(context) = device("host functions") else { return };
    let to = Pinned::new(&context, 5);
    let memory = DeviceAllocation::new(&context, LEN).expect("a MiB");
    let stream = Stream::new(&context).expect("one");
    // SAFETY: all memory lives until the stream is synchronised, and nothing else uses it.
    unsafe {
        fill_async(&stream, memory.address(), 0xab, LEN).expect("filled");
        copy_async(&stream, to.address(), memory.address(), LEN).expect("copied");
    }
    let seen = Arc::new(AtomicBool::new(false));
    let (flag, span) = (seen.clone(), to.registered.span());
    let check = move || {
        let mut bytes = vec![0; LEN];
        span.copy_to(&mut bytes);
        flag.store(bytes.iter().all(|byte| *byte == 0xab), Ordering::SeqCst);
    };
    host_function(&stream, Box::new(check)).expect("queued");
    stream.synchronize().expect("idle");
    assert!(seen.load(Ordering::SeqCst));
}

#[test]
fn an_allocation_is_missing_from_the_memory_that_is_free() {
    let Some(context) = device("free memory") else { return };
    const BYTES: usize = 256 << 20;
    // Other processes may use the device meanwhile.
    let is_less = || {
        let before = context.memory_info().expect("it is known");
        let memory = DeviceAllocation::new(&context, BYTES).expect("256 MiB");
        let after = context.memory_info().expect("it is known");
        assert!(
            before.total == after.total && before.free <= before.total,
            "{before:?}, {after:?}"
        );
        drop(memory);
        before.free.saturating_sub(after.free) >= BYTES as u64
    };
    assert!((0..10).any(|_| is_less()));
}

#[test]
fn kinds_of_memory_are_told_apart() {
    let Some(context) = device("kinds of memory") else { return };
    let driver = context.driver();
    let pinned = Pinned::new(&context, 6);
    let memory = DeviceAllocation::new(&context, LEN).expect("a MiB");
    let found = classify(driver, memory.address() + 5, 100).expect("it is known");
    assert_eq!(found.kind, MemoryKind::Device);
    assert_eq!(found.base, memory.address());
    assert!(found.len >= LEN as u64 && found.buffer_id > 0);
    assert_eq!(found.context(), Ok(Some(context.clone())));
    assert_eq!(allocation_at(&context, memory.address() + 5), Ok((found.base, found.len as usize)));
    let beyond = classify(driver, memory.address(), found.len + 1).expect_err("it is too long");
    assert!(matches!(beyond, Error::OutOfRange { .. }), "{beyond:?}");
    let found = classify(driver, pinned.address(), LEN as u64).expect("it is known");
    assert_eq!(found.kind, MemoryKind::PinnedHost);
    assert!(found.contains(pinned.address(), LEN as u64), "{found:?}");
    let host = Mapping::anonymous(LEN).expect("memory");
    let found = classify(driver, host.as_ptr() as u64, LEN as u64).expect("it is host memory");
    assert_eq!(found.kind, MemoryKind::Pageable);
    let address = memory.address();
    drop(memory);
    let freed = classify(driver, address, 1).expect_err("it was freed");
    assert!(matches!(freed, Error::UnknownPointer(_) | Error::NotMapped(_)), "{freed:?}");
}

#[test]
fn pieces_of_memory_are_mapped_listed_and_shared_by_a_descriptor() {
    let Some(context) = device("virtual memory") else { return };
    if !context.device().info().expect("it is described").vmm_export_fd {
        println!("SKIPPED: virtual memory: the device can't export it as a descriptor");
        return;
    }
    let bytes = granularity(context.device(), true).expect("it is known");
    let pieces = [1, 2].map(|_| VmmAllocation::new(&context, bytes, true).expect("made"));
    let mapping = VmmMapping::new(&context, &[(&pieces[0], bytes), (&pieces[1], bytes)]);
    let mapping = mapping.expect("mapped");
    let found = classify(context.driver(), mapping.address() + 1, 2 * bytes as u64 - 1);
    let found = found.expect("it is known");
    let MemoryKind::Vmm(chunks) = &found.kind else { panic!("{found:?}") };
    let places: Vec<_> = chunks.iter().map(|chunk| (chunk.address, chunk.len)).collect();
    let expected = [0, 1].map(|i| (mapping.address() + i * bytes as u64, bytes as u64));
    assert_eq!(places, expected);
    assert_ne!(chunks[0].block_id, chunks[1].block_id);
    assert!(chunks.iter().all(|chunk| chunk.properties.export_fd));
    assert_eq!(chunks[0].properties.device, Some(0));
    // Written through one mapping, read through another one of the same memory.
    let fd = pieces[1].export_fd().expect("exported");
    let imported = VmmAllocation::import_fd(&context, fd.as_fd()).expect("imported");
    let second = VmmMapping::new(&context, &[(&imported, bytes)]).expect("mapped");
    let (from, to) = (Pinned::new(&context, 7), Pinned::new(&context, 8));
    let stream = Stream::new(&context).expect("one");
    let len = LEN.min(bytes);
    // SAFETY: all memory lives until the stream is synchronised, and nothing else uses it.
    unsafe {
        let at = mapping.address() + bytes as u64;
        copy_async(&stream, at, from.address(), len).expect("copied");
        copy_async(&stream, to.address(), second.address(), len).expect("copied");
    }
    stream.synchronize().expect("idle");
    assert_eq!(to.bytes()[..len], from.bytes()[..len]);
    let address = mapping.address();
    drop((mapping, second));
    let unmapped = classify(context.driver(), address, 1).expect_err("nothing is mapped there");
    assert!(matches!(unmapped, Error::UnknownPointer(_) | Error::NotMapped(_)), "{unmapped:?}");
}

#[test]
fn exports_of_an_allocation_work_or_are_refused_with_a_code() {
    let Some(context) = device("exports") else { return };
    let memory = DeviceAllocation::new(&context, 4 << 20).expect("4 MiB");
    let found = classify(context.driver(), memory.address(), 1).expect("it is known");
    let handle = IpcHandle::of_allocation(&context, found.base);
    assert_eq!(handle.is_ok(), found.legacy_ipc, "{handle:?}");
    let info = context.device().info().expect("it is described");
    let exported = dma_buf(&context, memory.address(), 2 << 20, false);
    println!("dma-buf: {exported:?}, the device says {}", info.dma_buf);
    assert!(
        exported.as_ref().is_ok_and(|_| info.dma_buf)
            || exported.is_err_and(|e| e.code() != Some(700))
    );
    let flushed = context.flush_rdma_writes(false);
    println!("flush of remote writes: {flushed:?}, the device says {}", info.rdma_flush);
    context.synchronize().expect("the device is not lost");
}

/// Adds one to each of `n` words.
const PTX: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry add_one(.param .u64 words, .param .u32 n)
{
    .reg .pred %p<2>;
    .reg .b32 %r<7>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [words];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r5, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.u32 %r6, [%rd4];
    add.u32 %r6, %r6, 1;
    st.global.u32 [%rd4], %r6;
DONE:
    ret;
}
";

#[test]
fn a_kernel_from_ptx_runs_and_nonsense_is_refused_with_the_compilers_words() {
    let Some(context) = device("kernels") else { return };
    let module = Module::load_ptx(&context, PTX).expect("it compiles");
    let function = module.function("add_one").expect("it is there");
    assert_eq!(module.function("no_such").expect_err("there is none").code(), Some(500));
    let (from, to) = (Pinned::new(&context, 9), Pinned::new(&context, 10));
    let memory = DeviceAllocation::new(&context, LEN).expect("a MiB");
    let stream = Stream::new(&context).expect("one");
    let words = (LEN / 4) as u32;
    let grid = Grid { blocks: words.div_ceil(256), threads: 256, shared_bytes: 0 };
    // SAFETY: all memory lives until the stream is synchronised, and nothing else uses it.
    unsafe {
        copy_async(&stream, memory.address(), from.address(), LEN).expect("copied");
        let arguments = [memory.address(), u64::from(words)];
        launch(&stream, &function, grid, &arguments).expect("launched");
        copy_async(&stream, to.address(), memory.address(), LEN).expect("copied");
    }
    stream.synchronize().expect("idle");
    let word = |bytes: &[u8]| u32::from_ne_bytes(bytes.try_into().expect("four bytes"));
    let (before, after) = (from.bytes(), to.bytes());
    let pairs = before.chunks(4).zip(after.chunks(4));
    assert!(pairs.into_iter().all(|(old, new)| word(old).wrapping_add(1) == word(new)));
    let refused = Module::load_ptx(&context, "nonsense").expect_err("it does not compile");
    println!("{refused}");
    assert!(!refused.error.is_sticky() && !refused.log.is_empty(), "{refused:?}");
}
