//! Virtual memory, as expandable segments use it.

use crate::driver::{EXPORTABLE, Prop, pattern, ready};
use kvferry_fakecuda::UNWRITTEN;

const CHUNK: usize = 2 << 20;

#[test]
fn a_copy_crosses_the_chunks_of_an_expandable_segment() {
    let cuda = ready(&[]);
    let address = cuda.reserve(4 * CHUNK).unwrap();
    let handles: Vec<u64> = (0..3).map(|_| cuda.create(CHUNK, &EXPORTABLE).unwrap()).collect();
    for (index, &handle) in handles.iter().enumerate() {
        let at = address + (index * CHUNK) as u64;
        cuda.map(at, CHUNK, handle).unwrap();
        cuda.release_handle(handle).unwrap();
    }
    let len = CHUNK + 4096;
    let host = cuda.alloc_host(len).unwrap();
    let bytes = pattern(len, 4);
    cuda.fake.write(host, &bytes).unwrap();
    let stream = cuda.stream().unwrap();
    let at = address + CHUNK as u64 / 2;
    assert_eq!(cuda.copy(at, host, len, stream), Err(1), "no device may access it yet");
    cuda.set_access(address, 3 * CHUNK, 0).unwrap();
    cuda.copy(at, host, len, stream).unwrap();
    cuda.wait_stream(stream).unwrap();
    assert_eq!(cuda.fake.read(at, len).unwrap(), bytes);
    assert_eq!(cuda.fake.read(address, 1).unwrap(), [UNWRITTEN]);
    let last = address + 3 * CHUNK as u64;
    assert_eq!(cuda.copy(last - 4096, host, 8192, stream), Err(1), "the fourth chunk is empty");
    assert_eq!(cuda.address_range(at), Ok((address, CHUNK)));
    assert_eq!(cuda.pointer_attribute(10, at), Ok(0), "no legacy IPC");
    assert_eq!(cuda.ipc_handle(at), Err(1));
    assert_eq!(cuda.free(address), Err(1));
    assert_eq!(cuda.unmap(address, CHUNK / 2), Err(1));
    assert_eq!(cuda.free_reserved(address, 4 * CHUNK), Err(1), "chunks are mapped");
    cuda.unmap(address, 3 * CHUNK).unwrap();
    cuda.free_reserved(address, 4 * CHUNK).unwrap();
    for name in ["vmm_handles", "vmm_mappings", "vmm_reservations"] {
        assert_eq!(cuda.fake.counter(name), 0, "{name}");
    }
    assert_eq!(cuda.fake.counter("device_used:0"), 500_000_000);
}

#[test]
fn the_handle_of_an_address_keeps_the_memory_and_tells_its_properties() {
    let cuda = ready(&[]);
    let address = cuda.reserve(CHUNK).unwrap();
    let handle = cuda.create(CHUNK, &EXPORTABLE).unwrap();
    cuda.map(address, CHUNK, handle).unwrap();
    cuda.set_access(address, CHUNK, 0).unwrap();
    cuda.fake.write(address, &[5]).unwrap();
    let same = cuda.retain_handle(address + 17).unwrap();
    assert_eq!(same, handle);
    cuda.release_handle(handle).unwrap();
    cuda.unmap(address, CHUNK).unwrap();
    assert_eq!(cuda.properties(same).unwrap().handle_types, 1);
    cuda.map(address, CHUNK, same).unwrap();
    cuda.set_access(address, CHUNK, 0).unwrap();
    assert_eq!(cuda.fake.read(address, 1).unwrap(), [5]);
    cuda.release_handle(same).unwrap();
    assert_eq!(cuda.release_handle(same), Err(1));
}

#[test]
fn memory_made_without_a_handle_type_is_not_exported_and_fabric_is_not_supported() {
    let cuda = ready(&[]);
    let plain = cuda.create(CHUNK, &Prop { handle_types: 0, ..EXPORTABLE }).unwrap();
    assert_eq!(cuda.export(plain), Err(1));
    assert_eq!(cuda.create(CHUNK, &Prop { handle_types: 8, ..EXPORTABLE }).unwrap_err(), 801);
    assert_eq!(cuda.create(CHUNK + 1, &EXPORTABLE).unwrap_err(), 1);
    let unknown = Prop { location: [1, 7], ..EXPORTABLE };
    assert_eq!(cuda.create(CHUNK, &unknown).unwrap_err(), 101);
}

#[test]
fn a_dma_buf_spans_no_more_chunks_than_the_limit() {
    let cuda = ready(&[("dmabuf_chunks", "2")]);
    let address = cuda.reserve(3 * CHUNK).unwrap();
    for index in 0..3 {
        let handle = cuda.create(CHUNK, &EXPORTABLE).unwrap();
        cuda.map(address + index * CHUNK as u64, CHUNK, handle).unwrap();
    }
    cuda.set_access(address, 3 * CHUNK, 0).unwrap();
    assert!(cuda.dmabuf(address, 2 * CHUNK, 0).is_ok());
    assert_eq!(cuda.dmabuf(address, 3 * CHUNK, 0), Err(1));
}

#[test]
fn work_that_reaches_unmapped_memory_ends_with_an_illegal_address() {
    let cuda = ready(&[]);
    let address = cuda.reserve(CHUNK).unwrap();
    let handle = cuda.create(CHUNK, &EXPORTABLE).unwrap();
    cuda.map(address, CHUNK, handle).unwrap();
    cuda.set_access(address, CHUNK, 0).unwrap();
    let stream = cuda.stream().unwrap();
    cuda.fake.hold(kvferry_fakecuda::control::ALL_ENGINES);
    cuda.fill(address, 1, CHUNK, stream).unwrap();
    cuda.unmap(address, CHUNK).unwrap();
    cuda.fake.release();
    assert_eq!(cuda.wait_stream(stream), Err(700));
}
