//! The floor: the plainest program that moves scattered blocks over TCP, and what kvferry is
//! measured against. One message per batch, one socket, one calling thread, vectored I/O of at most
//! `chunk` bytes a call, and nothing a data plane needs beyond that: no sessions, no checks of
//! rights, no notifications, no second caller.
//!
//! ```text
//! write   →  count:u32  count × (offset:u64 len:u32)  payload           ←  count:u64
//! read    →  count:u32 | READ  count × (offset:u64 len:u32)             ←  payload
//! ```

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;
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
const MOST_DESCRIPTORS: u32 = 1 << 20;
const DESCRIPTOR_BYTES: usize = 12;
/// The kernel takes no more in one call.
const MOST_SLICES: usize = 1024;

/// The calling side.
#[derive(Debug)]
pub(super) struct Floor {
    stream: TcpStream,
    pub(super) chunk: usize,
    descriptors: Vec<u8>,
}

impl Floor {
    pub(super) fn new(stream: TcpStream, buffer: Option<usize>) -> io::Result<Floor> {
        prepare(&stream, buffer)?;
        Ok(Floor { stream, chunk: CHUNKS[0], descriptors: Vec::new() })
    }

    /// The blocks of `source` that the table names, to where they belong there.
    pub(super) fn write(&mut self, source: &[u8], table: &Table) -> io::Result<()> {
        self.describe(table, |pair| pair.destination);
        let head = (table.pairs.len() as u32).to_le_bytes();
        let mut parts: Vec<&[u8]> = Vec::with_capacity(table.pairs.len() + 2);
        parts.extend([&head[..], &self.descriptors]);
        parts.extend(table.pairs.iter().map(|pair| &source[pair.source..][..pair.len]));
        send_all(&self.stream, &parts, self.chunk)?;
        receive_all(&self.stream, &mut [&mut [0; 8]], self.chunk)
    }

    /// The blocks there that the table names, to where they belong in `destination`.
    pub(super) fn read(&mut self, destination: &mut [u8], table: &Table) -> io::Result<()> {
        self.describe(table, |pair| pair.source);
        let head = (table.pairs.len() as u32 | READ).to_le_bytes();
        send_all(&self.stream, &[&head[..], &self.descriptors], self.chunk)?;
        let parts = carve(destination, table);
        let mut parts = parts.ok_or_else(|| invalid("a table reaches beyond the memory"))?;
        receive_all(&self.stream, &mut parts, self.chunk)
    }

    fn describe(&mut self, table: &Table, place: impl Fn(&Pair) -> usize) {
        self.descriptors.clear();
        for pair in &table.pairs {
            self.descriptors.extend_from_slice(&(place(pair) as u64).to_le_bytes());
            self.descriptors.extend_from_slice(&(pair.len as u32).to_le_bytes());
        }
    }
}

/// What the serving side works on.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) memory: Mutex<Pages>,
    pub(super) chunk: AtomicUsize,
}

/// Serves one connection until it closes.
pub(super) fn serve(stream: &TcpStream, buffer: Option<usize>, served: &Served) -> io::Result<()> {
    prepare(stream, buffer)?;
    let mut descriptors = Vec::new();
    loop {
        wait(stream, PollFlags::IN)?;
        let mut head = [0; 4];
        match receive_all(stream, &mut [&mut head], MOST_SLICES) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            other => other?,
        }
        let head = u32::from_le_bytes(head);
        let (read, count) = (head & READ != 0, head & !READ);
        if count == 0 || count > MOST_DESCRIPTORS {
            return Err(invalid("a floor message has too many descriptors or none"));
        }
        descriptors.resize(count as usize * DESCRIPTOR_BYTES, 0);
        let chunk = served.chunk.load(Ordering::Relaxed);
        receive_all(stream, &mut [&mut descriptors], chunk)?;
        let mut memory = served.memory.lock().expect("nobody panics while measuring");
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

fn prepare(stream: &TcpStream, buffer: Option<usize>) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
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

/// How far a list of slices has been worked through.
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
    let mut call = Vec::with_capacity(parts.len().min(MOST_SLICES));
    while progress.part < parts.len() {
        call.clear();
        let (mut room, mut skip) = (chunk, progress.offset);
        for part in parts[progress.part..].iter().take(MOST_SLICES) {
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
        let mut call = Vec::with_capacity(rest.len().min(MOST_SLICES));
        let (mut room, mut skip) = (chunk, progress.offset);
        for part in rest.iter_mut().take(MOST_SLICES) {
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
    use crate::cli::Size;
    use std::net::TcpListener;

    fn tables() -> [Table; 3] {
        let sizes = [(4096, 1024), (40_000, 100)].map(|(block, count)| Size { block, count });
        let odd = [(7, 9000, 5000), (100_000, 3, 1), (9000, 700, 100)];
        let odd = odd.map(|(source, destination, len)| Pair { source, destination, len });
        let [first, second] = sizes.map(|size| Table::scatter(0, size));
        [first, second, Table::new(odd.to_vec()).expect("no overlap")]
    }

    fn with_a_pair(test: impl FnOnce(&mut Floor, &Served)) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("listens");
        let accepted = listener.accept().expect("connected").0;
        let served = Served {
            memory: Mutex::new(Pages::filled(0, 4 << 20)),
            chunk: AtomicUsize::new(CHUNKS[0]),
        };
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| serve(&accepted, BUFFERS[0], &served));
            let mut floor = Floor::new(stream, BUFFERS[0]).expect("a connected socket");
            test(&mut floor, &served);
            drop(floor);
            serving.join().expect("no panic").expect("every message was whole");
        });
    }

    fn blocks(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i / 7 + i / 4096) as u8).collect()
    }

    #[test]
    fn a_write_lands_where_the_table_says() {
        let source = blocks(4 << 20);
        with_a_pair(|floor, served| {
            for table in tables() {
                floor.write(&source, &table).expect("moves");
                let memory = served.memory.lock().expect("unpoisoned");
                for &Pair { source: from, destination: to, len } in &table.pairs {
                    assert_eq!(source[from..][..len], memory[to..][..len], "{from}");
                }
            }
        });
    }

    #[test]
    fn a_read_is_the_mirror_of_a_write() {
        let mut destination = vec![0; 4 << 20];
        with_a_pair(|floor, served| {
            served.memory.lock().expect("unpoisoned").copy_from_slice(&blocks(4 << 20));
            for table in tables() {
                floor.read(&mut destination, &table).expect("moves");
                let memory = served.memory.lock().expect("unpoisoned");
                for &Pair { source: from, destination: to, len } in &table.pairs {
                    assert_eq!(memory[from..][..len], destination[to..][..len], "{from}");
                }
            }
        });
    }

    #[test]
    fn what_a_message_may_not_say_is_refused() {
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
