//! The floor: the best that plain code does with scattered blocks over TCP, and what kvferry is measured
//! against. One message per batch and stream, vectored I/O of at most `chunk` bytes a call, and nothing
//! else that a data plane needs: no sessions, no access control, no notifications, no second caller.
//!
//! Its sockets have the options of kvferry's ([`prepare`]). Size of a call, socket buffers and number of
//! streams are found by trial for each size. With several streams each carries a part of the table, sent
//! by a thread of its own and received by one into memory of its own: splitting one memory among
//! threads whenever a batch arrives is work that the floor is spared.
//!
//! ```text
//! write   →  count:u32  count × (offset:u64 len:u32)  payload           ←  count:u64
//! read    →  count:u32 | READ  count × (offset:u64 len:u32)             ←  payload
//! ```

use kvferry_sys::sync::Mutex;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt;

use super::pages::Pages;
use super::tables::{Pair, Table, carve};

/// Sizes of one I/O call that are tried.
pub(super) const CHUNKS: [usize; 3] = [128 << 10, 256 << 10, 512 << 10];

/// Socket buffers that are tried; `None` leaves them to the kernel.
pub(super) const BUFFERS: [Option<usize>; 3] = [None, Some(1 << 20), Some(4 << 20)];

const READ: u32 = 1 << 31;
const DESCRIPTORS_MAX: u32 = 1 << 20;
const DESCRIPTOR_BYTES: usize = 12;
/// Slices that the kernel takes in one call.
const SLICES_MAX: usize = 1024;

/// Numbers of streams that are tried.
pub(super) const STREAMS: [usize; 3] = [1, 2, STREAMS_MAX];

/// Streams of a floor program, each with memory of its own at the target.
pub(super) const STREAMS_MAX: usize = 4;

/// The calling side: connected streams, of which the first ones are used.
#[derive(Debug)]
pub(super) struct Floor {
    lanes: Vec<Lane>,
    /// Bytes of one call.
    pub(super) chunk: usize,
    /// Streams that share a table, one at least.
    pub(super) streams: usize,
}

/// A stream.
#[derive(Debug)]
struct Lane {
    stream: TcpStream,
    descriptors: Vec<u8>,
}

/// The parts of a table that each of `streams` carries.
pub(super) fn shares(pairs: &[Pair], streams: usize) -> std::slice::Chunks<'_, Pair> {
    pairs.chunks(pairs.len().div_ceil(streams).max(1))
}

impl Floor {
    /// Over streams that are served by [`serve`], one at least.
    pub(super) fn new(streams: Vec<TcpStream>, buffer: Option<usize>) -> io::Result<Floor> {
        for stream in &streams {
            prepare(stream, buffer)?;
        }
        let lane = |stream| Lane { stream, descriptors: Vec::new() };
        Ok(Floor { lanes: streams.into_iter().map(lane).collect(), chunk: CHUNKS[0], streams: 1 })
    }

    /// Sends the blocks of `source` that the table names to their places at the target.
    pub(super) fn write(&mut self, source: &[u8], table: &Table) -> io::Result<()> {
        let chunk = self.chunk;
        assert!(self.streams <= self.lanes.len(), "a share without a stream would be lost");
        let shares = shares(&table.pairs, self.streams);
        let jobs = self.lanes.iter_mut().zip(shares);
        at_once(jobs, |(lane, pairs)| lane.write(source, pairs, chunk))
    }

    /// Fetches the blocks of the target that the table names to their places in `destination`.
    pub(super) fn read(&mut self, destination: &mut [u8], table: &Table) -> io::Result<()> {
        let parts = carve(destination, table);
        let mut parts = parts.ok_or_else(|| invalid("a table reaches beyond the memory"))?;
        let chunk = self.chunk;
        assert!(self.streams <= self.lanes.len(), "a share without a stream would be lost");
        let shares = shares(&table.pairs, self.streams);
        let parts = parts.chunks_mut(shares.clone().next().map_or(1, <[Pair]>::len));
        let jobs = self.lanes.iter_mut().zip(shares).zip(parts);
        at_once(jobs, |((lane, pairs), parts)| lane.read(parts, pairs, chunk))
    }
}

/// The first job on this thread, each other one on its own.
fn at_once<J: Send>(
    mut jobs: impl Iterator<Item = J>,
    run: impl Fn(J) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let Some(first) = jobs.next() else { return Ok(()) };
    let run = &run;
    std::thread::scope(|scope| {
        let others: Vec<_> = jobs.map(|job| scope.spawn(move || run(job))).collect();
        let own = run(first);
        others.into_iter().fold(own, |ended, it| ended.and(it.join().expect("no job panics")))
    })
}

impl Lane {
    fn write(&mut self, source: &[u8], pairs: &[Pair], chunk: usize) -> io::Result<()> {
        self.describe(pairs, |pair| pair.destination);
        let head = (pairs.len() as u32).to_le_bytes();
        let mut parts: Vec<&[u8]> = Vec::with_capacity(pairs.len() + 2);
        parts.extend([&head[..], &self.descriptors]);
        parts.extend(pairs.iter().map(|pair| &source[pair.source..][..pair.len]));
        send_all(&self.stream, &parts, chunk)?;
        receive_all(&self.stream, &mut [&mut [0; 8]], chunk)
    }

    fn read(&mut self, parts: &mut [&mut [u8]], pairs: &[Pair], chunk: usize) -> io::Result<()> {
        self.describe(pairs, |pair| pair.source);
        let head = (pairs.len() as u32 | READ).to_le_bytes();
        send_all(&self.stream, &[&head[..], &self.descriptors], chunk)?;
        receive_all(&self.stream, parts, chunk)
    }

    fn describe(&mut self, pairs: &[Pair], place: impl Fn(&Pair) -> usize) {
        self.descriptors.clear();
        for pair in pairs {
            self.descriptors.extend_from_slice(&(place(pair) as u64).to_le_bytes());
            self.descriptors.extend_from_slice(&(pair.len as u32).to_le_bytes());
        }
    }
}

/// Serves one stream into `memory` until it closes, with the call size that `chunk` has at the time.
pub(super) fn serve(
    stream: &TcpStream,
    buffer: Option<usize>,
    memory: &Mutex<Pages>,
    chunk: &AtomicUsize,
) -> io::Result<()> {
    prepare(stream, buffer)?;
    let mut descriptors = Vec::new();
    loop {
        wait(stream, PollFlags::IN)?;
        let mut head = [0; 4];
        match receive_all(stream, &mut [&mut head], SLICES_MAX) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            other => other?,
        }
        let head = u32::from_le_bytes(head);
        let (read, count) = (head & READ != 0, head & !READ);
        if count == 0 || count > DESCRIPTORS_MAX {
            return Err(invalid("a floor message has too many descriptors or none"));
        }
        descriptors.resize(count as usize * DESCRIPTOR_BYTES, 0);
        let chunk = chunk.load(Ordering::Relaxed);
        receive_all(stream, &mut [&mut descriptors], chunk)?;
        let mut memory = memory.lock();
        if read {
            send_all(stream, &gather(&memory, &descriptors)?, chunk)?;
        } else {
            receive_all(stream, &mut scatter(&mut memory, &descriptors)?, chunk)?;
            send_all(stream, &[&u64::from(count).to_le_bytes()], chunk)?;
        }
    }
}

fn parse(descriptors: &[u8]) -> impl Iterator<Item = (usize, usize)> + Clone {
    descriptors.chunks_exact(DESCRIPTOR_BYTES).map(|descriptor| {
        let (offset, len) = descriptor.split_at(8);
        let offset = u64::from_le_bytes(offset.try_into().expect("eight bytes"));
        let len = u32::from_le_bytes(len.try_into().expect("four bytes"));
        (offset as usize, len as usize)
    })
}

fn gather<'a>(memory: &'a [u8], descriptors: &[u8]) -> io::Result<Vec<&'a [u8]>> {
    let part = |(offset, len): (usize, usize)| memory.get(offset..offset.checked_add(len)?);
    let parts: Option<Vec<&[u8]>> = parse(descriptors).map(part).collect();
    parts.ok_or_else(|| invalid("a floor message reaches beyond the memory"))
}

/// The pieces of memory that the descriptors name, in their order. Blocks of one size, side by side
/// as a pool has them, need no sorting.
fn scatter<'a>(memory: &'a mut [u8], descriptors: &[u8]) -> io::Result<Vec<&'a mut [u8]>> {
    let block = parse(descriptors).next().map_or(0, |(_, len)| len);
    if block == 0 || parse(descriptors).any(|(offset, len)| len != block || offset % block != 0) {
        return scatter_any(memory, descriptors);
    }
    let places = parse(descriptors).map(|(offset, _)| offset / block);
    let blocks = places.clone().max().map_or(0, |last| last.saturating_add(1));
    let mut all: Vec<_> = memory.chunks_exact_mut(block).take(blocks).map(Some).collect();
    let picked: Option<Vec<_>> = places.map(|place| all.get_mut(place)?.take()).collect();
    picked.ok_or_else(|| invalid("a floor message names a block twice or one that is not there"))
}

fn scatter_any<'a>(memory: &'a mut [u8], descriptors: &[u8]) -> io::Result<Vec<&'a mut [u8]>> {
    let pair = |(destination, len)| Pair { source: 0, destination, len };
    let pairs: Vec<Pair> = parse(descriptors).map(pair).collect();
    let table = Table::new(pairs).map_err(|why| invalid(&why))?;
    carve(memory, &table).ok_or_else(|| invalid("a floor message reaches beyond the memory"))
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// The options that kvferry gives its own sockets: no delay, and Reno within a host, where there is no
/// congestion, and a congestion control that paces (BBR) halves what loopback carries.
pub(super) fn like_ours(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    if stream.local_addr()?.ip() == stream.peer_addr()?.ip() {
        // A kernel without it keeps the system's choice, as for kvferry's sockets.
        let _ = sockopt::set_tcp_congestion(stream, "reno");
    }
    Ok(())
}

fn prepare(stream: &TcpStream, buffer: Option<usize>) -> io::Result<()> {
    like_ours(stream)?;
    stream.set_nonblocking(true)?;
    if let Some(bytes) = buffer {
        sockopt::set_socket_send_buffer_size(stream, bytes)?;
        sockopt::set_socket_recv_buffer_size(stream, bytes)?;
    }
    Ok(())
}

fn wait(stream: &TcpStream, flags: PollFlags) -> io::Result<()> {
    match poll(&mut [PollFd::new(stream, flags)], None) {
        Err(rustix::io::Errno::INTR) | Ok(_) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Position in a list of slices.
#[derive(Default)]
struct Progress {
    part: usize,
    offset: usize,
}

impl Progress {
    fn advance(&mut self, mut bytes: usize, len_of: impl Fn(usize) -> usize) {
        while bytes > 0 {
            let left = len_of(self.part) - self.offset;
            if bytes < left {
                self.offset += bytes;
                return;
            }
            bytes -= left;
            self.part += 1;
            self.offset = 0;
        }
    }
}

fn send_all(mut stream: &TcpStream, parts: &[&[u8]], chunk: usize) -> io::Result<()> {
    let mut progress = Progress::default();
    let mut call = Vec::with_capacity(parts.len().min(SLICES_MAX));
    while progress.part < parts.len() {
        call.clear();
        let (mut room, mut skip) = (chunk, progress.offset);
        for part in parts[progress.part..].iter().take(SLICES_MAX) {
            let part = &part[skip..];
            let len = part.len().min(room);
            call.push(IoSlice::new(&part[..len]));
            (room, skip) = (room - len, 0);
            if room == 0 {
                break;
            }
        }
        match stream.write_vectored(&call) {
            Ok(bytes) => progress.advance(bytes, |part| parts[part].len()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(stream, PollFlags::OUT)?
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn receive_all(mut stream: &TcpStream, parts: &mut [&mut [u8]], chunk: usize) -> io::Result<()> {
    let mut progress = Progress::default();
    while progress.part < parts.len() {
        let rest = &mut parts[progress.part..];
        let mut call = Vec::with_capacity(rest.len().min(SLICES_MAX));
        let (mut room, mut skip) = (chunk, progress.offset);
        for part in rest.iter_mut().take(SLICES_MAX) {
            let part = &mut part[skip..];
            let len = part.len().min(room);
            call.push(IoSliceMut::new(&mut part[..len]));
            (room, skip) = (room - len, 0);
            if room == 0 {
                break;
            }
        }
        match stream.read_vectored(&mut call) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => progress.advance(bytes, |part| parts[part].len()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait(stream, PollFlags::IN)?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Size;
    use std::net::TcpListener;

    fn tables() -> [Table; 3] {
        let sizes = [(4096, 1024), (40_000, 100)].map(|(block, count)| Size { block, count });
        let odd = [(7, 9000, 5000), (100_000, 3, 1), (9000, 700, 100)];
        let odd = odd.map(|(source, destination, len)| Pair { source, destination, len });
        let [first, second] = sizes.map(|size| Table::scatter(0, size));
        [first, second, Table::new(odd.to_vec()).expect("no overlap")]
    }

    /// A floor of so many streams, and the memories that it writes to and reads from.
    fn with_a_pair(streams: usize, test: impl FnOnce(&mut Floor, &[Mutex<Pages>])) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = listener.local_addr().expect("bound");
        let pair = |_| {
            let stream = TcpStream::connect(address).expect("listens");
            (stream, listener.accept().expect("connected").0)
        };
        let (ours, theirs): (Vec<_>, Vec<_>) = (0..streams).map(pair).unzip();
        let memories: Vec<_> =
            (0..streams).map(|_| Mutex::new(Pages::filled(0, 4 << 20))).collect();
        let chunk = AtomicUsize::new(CHUNKS[0]);
        std::thread::scope(|scope| {
            let serving: Vec<_> = theirs
                .iter()
                .zip(&memories)
                .map(|(it, memory)| scope.spawn(|| serve(it, BUFFERS[0], memory, &chunk)))
                .collect();
            let mut floor = Floor::new(ours, BUFFERS[0]).expect("connected sockets");
            floor.streams = streams;
            test(&mut floor, &memories);
            drop(floor);
            for serving in serving {
                serving.join().expect("no panic").expect("every message was whole");
            }
        });
    }

    fn blocks(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i / 7 + i / 4096) as u8).collect()
    }

    #[test]
    fn a_write_lands_at_the_places_of_the_table_over_one_and_several_streams() {
        let source = blocks(4 << 20);
        for streams in STREAMS {
            with_a_pair(streams, |floor, memories| {
                for table in tables() {
                    floor.write(&source, &table).expect("moves");
                    for (pairs, memory) in shares(&table.pairs, streams).zip(memories) {
                        let memory = memory.lock();
                        for &Pair { source: from, destination: to, len } in pairs {
                            assert_eq!(source[from..][..len], memory[to..][..len], "{from}");
                        }
                    }
                }
            });
        }
    }

    #[test]
    fn a_read_is_the_mirror_of_a_write() {
        for streams in STREAMS {
            let mut destination = vec![0; 4 << 20];
            let source = blocks(4 << 20);
            with_a_pair(streams, |floor, memories| {
                for memory in memories {
                    memory.lock().copy_from_slice(&source);
                }
                for table in tables() {
                    floor.read(&mut destination, &table).expect("moves");
                    for &Pair { source: from, destination: to, len } in &table.pairs {
                        assert_eq!(source[from..][..len], destination[to..][..len], "{from}");
                    }
                }
            });
        }
    }

    #[test]
    fn a_message_that_names_memory_twice_or_beyond_the_end_is_refused() {
        let descriptor =
            |offset: u64, len: u32| [&offset.to_le_bytes()[..], &len.to_le_bytes()].concat();
        let mut memory = vec![0; 100];
        let twice = [descriptor(10, 10), descriptor(10, 10)].concat();
        let overlap = [descriptor(10, 10), descriptor(15, 3)].concat();
        let beyond = [descriptor(95, 10), descriptor(u64::MAX, 1)];
        for bad in [twice, overlap].into_iter().chain(beyond) {
            assert!(scatter(&mut memory, &bad).is_err());
        }
        assert!(gather(&memory, &descriptor(95, 10)).is_err());
        assert!(gather(&memory, &descriptor(u64::MAX, 1)).is_err());
        assert_eq!(scatter(&mut memory, &descriptor(90, 10)).expect("in bounds")[0].len(), 10);
    }
}
