//! Rates at which plain programs move bytes in blocks on this machine, for other commands.

use kvferry_sys::sync::Mutex;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use crate::child;
use crate::failure::Failure;
use crate::helper;
use crate::options::{Op, Size};
use crate::stats::median;

use super::copies::{RANGES, Reached};
use super::floor::{self, CHUNKS, Floor};
use super::pages::Pages;
use super::tables::Table;

/// Bytes that one trial moves at least. All calls use the same memory, so caches help them more than
/// they help what is moved once.
const TRIAL_BYTES: usize = 128 << 20;

const TRIALS: usize = 3;

/// The helper `memory`: says where its memory is, and holds it until its parent closes the pipe.
pub(crate) fn hold(bytes: usize) -> Result<(), Failure> {
    child::die_with_parent()?;
    let memory = Pages::filled(1, bytes);
    child::hold(memory.as_ptr() as usize)
}

/// Bytes per second of `process_vm_readv` from another process, `threads` at once, each with its share
/// of `bytes` in blocks.
///
/// # Errors
/// If no process can be started, or the kernel refuses to read its memory.
pub fn process_vm(bytes: usize, block: usize, threads: usize) -> Result<f64, Failure> {
    let trial = Trial::new(bytes, block, threads);
    let span = trial.table.span();
    let mut holder = helper::spawn(&["memory", &(span * threads).to_string()])?;
    let address: usize = holder.hello()?;
    let pid = holder.id().cast_signed();
    let mut lanes: Vec<Pages> = (0..threads).map(|_| Pages::filled(2, span)).collect();
    trial.rate(&mut lanes, |thread, to, table| {
        let from = Reached { pid, address: address + thread * span };
        from.copy(Op::Read, to, table, RANGES[1])
    })
}

/// Bytes per second of the floor program reading over loopback, `threads` connections at once, each
/// with its share of `bytes` in blocks.
///
/// # Errors
/// What the sockets say.
pub fn loopback(bytes: usize, block: usize, threads: usize) -> Result<f64, Failure> {
    let trial = Trial::new(bytes, block, threads);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut lanes = Vec::new();
    for _ in 0..threads {
        let stream = TcpStream::connect(listener.local_addr()?)?;
        let served = listener.accept()?.0;
        let memory = Pages::filled(1, trial.table.span());
        std::thread::spawn(move || {
            let chunk = AtomicUsize::new(CHUNKS[1]);
            floor::serve(&served, None, &Mutex::new(memory), &chunk)
        });
        let mut floor = Floor::new(vec![stream], None)?;
        floor.chunk = CHUNKS[1];
        lanes.push((floor, Pages::filled(2, trial.table.span())));
    }
    trial.rate(&mut lanes, |_, (floor, to), table| floor.read(to, table))
}

/// The work of each thread in a trial.
struct Trial {
    table: Table,
    calls: usize,
}

impl Trial {
    fn new(bytes: usize, block: usize, threads: usize) -> Trial {
        let table = Table::scatter(0, Size { block, count: (bytes / threads / block).max(1) });
        Trial { calls: TRIAL_BYTES.div_ceil(table.bytes() * threads), table }
    }

    /// The median of some trials. The first trial does not count: it touches pages and opens windows.
    fn rate<L: Send>(
        &self,
        lanes: &mut [L],
        once: impl Fn(usize, &mut L, &Table) -> io::Result<()> + Sync,
    ) -> Result<f64, Failure> {
        let bytes = self.table.bytes() * self.calls * lanes.len();
        let once = &once;
        let mut trial = || -> io::Result<f64> {
            let began = Instant::now();
            std::thread::scope(|scope| {
                let run = |(thread, lane): (usize, &'_ mut L)| {
                    (0..self.calls).try_for_each(|_| once(thread, lane, &self.table))
                };
                let lanes = lanes.iter_mut().enumerate();
                let lanes: Vec<_> = lanes.map(|lane| scope.spawn(move || run(lane))).collect();
                lanes.into_iter().try_for_each(|lane| lane.join().expect("no panic"))
            })?;
            Ok(bytes as f64 / began.elapsed().as_secs_f64())
        };
        trial()?;
        let rates = (0..TRIALS).map(|_| trial()).collect::<io::Result<Vec<_>>>()?;
        Ok(median(&rates))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_a_plausible_rate() {
        let rate = loopback(1 << 20, 32 << 10, 2).expect("this machine can do it");
        assert!((1e7..1e13).contains(&rate), "{rate}");
    }
}
