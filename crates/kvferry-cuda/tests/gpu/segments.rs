//! Memory that is mapped piece by piece into one range, as PyTorch's expandable segments are.

use crate::kit::*;
use kvferry::{Access, After, Batch, ErrorKind, Region, TransportKind};
use kvferry_cuda::gpu::Settings;
use kvferry_cuda::{Counters, Error, Gpu, Method};
use kvferry_sys::cuda::{self, VmmAllocation, VmmMapping, granularity};
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::{Watchdog, eventually};
use std::ffi::{c_int, c_void};

/// Makes GPUs copy everything by one method, until it is dropped.
struct Only;

impl Only {
    fn by(method: Method) -> Self {
        let method = Some(method);
        Settings::give(Some(Settings { method, is_uncalibrated: true, ..Settings::default() }));
        Self
    }
}

impl Drop for Only {
    fn drop(&mut self) {
        Settings::give(None);
    }
}

/// Three segments in one range.
struct Segments {
    mapping: VmmMapping,
    _allocations: [VmmAllocation; 3],
    /// Bytes of each.
    each: usize,
}

impl Segments {
    fn new(rig: &FakeRig) -> Self {
        let context = rig.context(0);
        let each = granularity(context.device(), false).expect("it is known");
        let allocations =
            [(); 3].map(|()| VmmAllocation::new(&context, each, false).expect("memory"));
        let pieces = allocations.each_ref().map(|allocation| (allocation, each));
        let mapping = VmmMapping::new(&context, &pieces).expect("mapped");
        Self { mapping, _allocations: allocations, each }
    }

    fn len(&self) -> usize {
        3 * self.each
    }

    fn at(&self, segment: usize) -> u64 {
        self.mapping.address() + (segment * self.each) as u64
    }

    /// Takes the memory of a segment away.
    fn unmap(&self, rig: &FakeRig, segment: usize) {
        type Unmap = unsafe extern "C" fn(u64, usize) -> c_int;
        let unmap = rig.symbol("cuMemUnmap");
        // SAFETY: the symbol has this signature.
        let unmap = unsafe { std::mem::transmute::<*mut c_void, Unmap>(unmap) };
        // SAFETY: no copy of the segment runs.
        assert_eq!(unsafe { unmap(self.at(segment), self.each) }, 0);
    }

    /// Pieces inside of these segments: their offsets and lengths.
    fn inside(&self, segments: &[usize]) -> Vec<(usize, usize)> {
        let of = |segment: usize| (1..5).map(move |i| (segment * self.each + i * 8192, 1024));
        segments.iter().flat_map(|segment| of(*segment)).collect()
    }

    /// Pieces that cross the two borders.
    fn across(&self) -> [(usize, usize); 2] {
        [1, 2].map(|segment| (segment * self.each - 528, 1040))
    }
}

fn batch_of(region: &Region, to: &Region, pieces: &[(usize, usize)]) -> Batch {
    let mut batch = Batch::new();
    batch.set_after(After::host());
    for &(at, len) in pieces {
        let at = at as u64;
        batch.push(region, at, &to.remote(), at, len as u64).expect("inside");
    }
    batch
}

fn calls(counters: &Counters, method: Method) -> u64 {
    match method {
        Method::Copy => counters.single_calls,
        Method::Batch => counters.batch_calls,
        Method::Kernel => counters.kernel_calls,
        Method::Gather => counters.gather_calls,
    }
}

#[test]
fn copies_cross_the_borders_of_segments_by_each_method() {
    let _bound = Watchdog::new(LIMIT);
    for method in [Method::Copy, Method::Batch, Method::Kernel, Method::Gather] {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let _only = Only::by(method);
        let segments = Segments::new(&rig);
        let len = segments.len();
        let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
        let memory = kvferry_cuda::memory(segments.at(0), len as u64, Some(0)).expect("of GPU 0");
        let region = near.register_device(memory, Access::READ_WRITE).expect("a region");
        let to = far.allocate(len, Access::READ_WRITE).expect("memory");
        let peer = peer_of(&near, &far);
        let pieces = [segments.inside(&[0, 1, 2]), segments.across().to_vec()].concat();
        let batch = batch_of(&region, &to, &pieces);
        let sent = Pattern::new(1).bytes(len);
        rig.fake.write(segments.at(0), &sent).expect("it is mapped");
        peer.write(&batch, &options()).expect("written");
        let mut got = vec![0; len];
        to.read_at(0, &mut got).expect("inside");
        let is_same =
            |a: &[u8], b: &[u8]| pieces.iter().all(|&(at, len)| a[at..at + len] == b[at..at + len]);
        assert!(is_same(&got, &sent), "{method:?}");
        rig.fake.write(segments.at(0), &vec![0; len]).expect("it is mapped");
        peer.read(&batch, &options()).expect("read");
        let got = rig.fake.read(segments.at(0), len).expect("it is mapped");
        assert!(is_same(&got, &sent), "{method:?}");
        let counters = counters();
        assert!(calls(&counters, method) > 0, "{method:?}: {counters:?}");
        near.unregister(&region).expect("nothing copies");
        drop((near, far, peer, batch, region, to));
        eventually("no GPU is in use", || Gpu::all().is_empty());
        assert_eq!(rig.findings(), Vec::<String>::new());
    }
}

#[test]
fn a_segment_that_is_unmapped_under_a_region_ends_its_transfers_with_an_error() {
    let _bound = Watchdog::new(LIMIT);
    // The driver refuses copies of memory that is not mapped. A kernel finds out when it runs.
    for (method, is_lost) in [(Method::Batch, false), (Method::Kernel, true)] {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let _only = Only::by(method);
        let segments = Segments::new(&rig);
        let len = segments.len();
        let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
        let memory = |address, len| kvferry_cuda::memory(address, len as u64, None);
        let region = memory(segments.at(0), len).expect("of a GPU");
        let region = near.register_device(region, Access::READ_WRITE).expect("a region");
        let to = far.allocate(len, Access::READ_WRITE).expect("memory");
        let peer = peer_of(&near, &far);
        let all = batch_of(&region, &to, &segments.inside(&[0, 1, 2]));
        let left = batch_of(&region, &to, &segments.inside(&[0, 2]));
        rig.fake.write(segments.at(0), &Pattern::new(1).bytes(len)).expect("it is mapped");
        peer.write(&all, &options()).expect("written");
        segments.unmap(&rig, 1);
        let error = peer.write(&all, &options()).expect_err("a segment is gone");
        assert_eq!(error.quiesced(), Some(true), "{method:?}: {error}");
        assert_ne!(error.kind(), ErrorKind::Deadline, "{method:?}: {error}");
        let named = if is_lost { "ILLEGAL_ADDRESS" } else { "INVALID_VALUE" };
        assert!(format!("{error:?}").contains(named), "{method:?}: {error:?}");
        let again = memory(segments.at(0), len).expect_err("a segment is gone");
        let not_mapped = Error::Driver(cuda::Error::NotMapped(segments.at(1)));
        assert_eq!(again, not_mapped, "{method:?}");
        assert!(again.to_string().contains("map it first"), "{again}");
        match is_lost {
            false => {
                peer.write(&left, &options()).expect("the other segments go on");
                peer.read(&left, &options()).expect("the other segments go on");
            }
            true => {
                let error = peer.write(&left, &options()).expect_err("the GPU is lost");
                assert!(format!("{error:?}").contains("restart the process"), "{error:?}");
                let lost = memory(segments.at(0), 4096).expect_err("the GPU is lost");
                assert!(matches!(lost, Error::Lost { device: 0, .. }), "{lost}");
            }
        }
        assert_eq!(counters().leaked, 0, "{method:?}");
        near.unregister(&region).expect("nothing copies");
        rig.fake.clear_faults();
        drop((near, far, peer, all, left, region, to));
        eventually("no GPU is in use", || Gpu::all().is_empty());
    }
}
