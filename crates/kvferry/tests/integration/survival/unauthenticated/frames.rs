//! Frames of data streams, malformed ones included.

use super::*;

pub(super) fn header(descriptors: u32, payload_len: u64) -> RequestHeader {
    RequestHeader {
        op: Op::Write,
        flags: Flags::NONE,
        descriptors,
        notify_len: 0,
        payload_len,
        transfer: TransferId(7),
        budget_ms: 5000,
        head_crc: 0,
    }
}

/// A well-formed write.
pub(super) fn write_frame(to: &RemoteRegion, offset: u64, payload: &[u8]) -> Vec<u8> {
    let mut table = Vec::new();
    WireDescriptor { offset, len: payload.len() as u32, region: to.id }.write_to(&mut table);
    let head = header(1, payload.len() as u64).seal(&table, &[]);
    [&head[..], &table, payload].concat()
}

/// Malformed frames, each with its name.
fn malformed(to: &RemoteRegion) -> Vec<(&'static str, Vec<u8>)> {
    let good = write_frame(to, 0, &[0xAB; 256]);
    let changed = |at: usize, bytes: &[u8]| {
        let mut frame = good.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    };
    let table = |descriptors: &[(u64, u32, u32)]| {
        let mut table = Vec::new();
        for (offset, len, region) in descriptors {
            WireDescriptor { offset: *offset, len: *len, region: RegionId(*region) }
                .write_to(&mut table);
        }
        table
    };
    let frame = |header: RequestHeader, table: &[u8], payload: &[u8]| {
        [&header.seal(table, &[])[..], table, payload].concat()
    };
    let id = to.id.0;
    let mut cases = vec![
        ("nonsense", Pattern::new(5).bytes(4096)),
        ("bad magic", changed(0, b"XXXX")),
        ("bad version", changed(4, &[77])),
        ("unknown operation", changed(5, &[99])),
        ("unknown flags", changed(6, &[0xF0])),
        ("reserved bytes", changed(40, &[1])),
        ("wrong checksum of the head", changed(60, &[1, 2, 3, 4])),
        ("a flipped offset", changed(64, &[0xFF])),
        ("descriptors without end", changed(8, &[0xFF; 4])),
        ("a notification without end", changed(12, &[0xFF; 4])),
        ("payload without end", changed(16, &[0xFF; 8])),
        ("the answer to nothing", [b"KVFr".as_slice(), &good[4..]].concat()),
    ];
    let wrong = [
        ("sums that differ", header(1, 1 << 30), table(&[(0, 64, id)])),
        (
            "payload that is too short for its table",
            header(2, 64),
            table(&[(0, 64, id), (64, 64, id)]),
        ),
        ("sizes that overflow", header(2, 2), table(&[(0, u32::MAX, id), (0, 3, id)])),
        ("a write of nothing", header(0, 0), Vec::new()),
        ("a descriptor of nothing", header(1, 0), table(&[(0, 0, id)])),
    ];
    for (what, header, table) in wrong {
        cases.push((what, frame(header, &table, &[0xAB; 64])));
    }
    let far = table(&[(to.len, 64, id)]);
    cases.push(("a write beyond the region", frame(header(1, 64), &far, &[0xAB; 64])));
    let unknown = table(&[(0, 64, 0xFFFF_FFFE)]);
    cases.push(("a write to no region", frame(header(1, 64), &unknown, &[0xAB; 64])));
    for (what, len) in [("a cut header", 30), ("a cut table", 70), ("half a frame", 200)] {
        cases.push((what, good[..len].to_vec()));
    }
    cases
}

#[test]
fn malformed_frames_write_nothing_and_delay_no_other_peer() {
    let _bound = bounded();
    let (mut child, address) = Child::with_agent(peer_config());
    let region = child.allocate(64 * KIB, "rw", 2);
    let protected = child.allocate(64 * KIB, "r", 3);
    let agent = agent();
    let from = source(&agent, 64 * KIB, 1);
    let peer = agent.peer(&address).expect("an address");
    peer.write(&batch(&from, &region.remote, 4096), &Options::default()).expect("a healthy write");
    let wanted = child.memory(&region);
    let before = child.resources();
    let mut raw_peer = RawPeer::call(&address, config()).expect("no secret is set");
    {
        let mut stream = raw_peer.stream();
        stream.write_all(&write_frame(&region.remote, 0, &wanted[..256])).expect("connected");
        assert!(!answered(&mut stream).is_empty(), "a proper frame of the raw_peer is answered");
    }
    for (what, frame) in malformed(&region.remote) {
        let mut stream = raw_peer.stream();
        drop(stream.write_all(&frame));
        drop(stream.shutdown(std::net::Shutdown::Write));
        drop(answer(&mut stream));
        peer.read(&batch(&from, &region.remote, 4096), &Options::default())
            .unwrap_or_else(|e| panic!("a healthy read after {what}: {e:?}"));
        let mut now = child.memory(&region);
        // A cut frame may have written its first 256 bytes.
        now[..256].copy_from_slice(&wanted[..256]);
        assert!(now == wanted, "{what}: something was written");
    }
    assert!(child.memory(&protected) == Pattern::new(3).bytes(64 * KIB));
    drop(raw_peer);
    eventually("nothing of the raw_peer is left", || {
        let stats = child.stats();
        stats["requests_in_flight"] == 0 && stats["sessions"] == 1
    });
    let grown = child.resources().memory_bytes.saturating_sub(before.memory_bytes);
    assert!(grown < 32 * MIB as u64, "malformed frames cost {grown} bytes of memory");
}
