//! What other commands want of a bench: how fast this machine moves so many bytes in blocks of some
//! size, by itself and with nothing around it.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use crate::child::{self, Child};
use crate::cli::{Op, Size};
use crate::failure::Failure;
use crate::lines::{Answer, Lines};
use crate::stats::median;

use super::floor::{self, CHUNKS, Floor, Served};
use super::limits::{RANGES, Reached};
use super::pages::Pages;
use super::tables::Table;

/// Bytes that one trial moves at least, in as many calls as that takes: all with the same memory, so
/// that caches help them more than they help what is moved once.
const TRIAL_BYTES: usize = 128 << 20;

const TRIALS: usize = 3;

/// `kvferry bench-memory`: says where its memory is, and holds it until its parent lets go.
pub(crate) fn hold(bytes: usize) -> Result<(), Failure> {
    child::die_with_parent()?;
    let memory = Pages::filled(1, bytes);
    let mut pipe = Lines::new(io::stdin(), io::stdout());
    pipe.send::<Answer<usize>>(&Ok(memory.as_ptr() as usize))?;
    while pipe.receive::<()>()?.is_some() {}
    Ok(())
}

/// Bytes per second of `process_vm_readv` from another process, `threads` at once, each with its share
/// of `bytes` in blocks.
pub(crate) fn process_vm(bytes: usize, block: usize, threads: usize) -> Result<f64, Failure> {
    let trial = Trial::new(bytes, block, threads);
    let span = trial.table.span();
    let mut holder = Child::spawn(&["bench-memory", "--bytes", &(span * threads).to_string()])?;
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
pub(crate) fn loopback(bytes: usize, block: usize, threads: usize) -> Result<f64, Failure> {
    let trial = Trial::new(bytes, block, threads);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut lanes = Vec::new();
    for _ in 0..threads {
        let stream = TcpStream::connect(listener.local_addr()?)?;
        let served = listener.accept()?.0;
        let memory = Pages::filled(1, trial.table.span());
        std::thread::spawn(move || {
            let chunk = AtomicUsize::new(CHUNKS[1]);
            floor::serve(&served, None, &Served { memory: Mutex::new(memory), chunk })
        });
        let mut floor = Floor::new(stream, None)?;
        floor.chunk = CHUNKS[1];
        lanes.push((floor, Pages::filled(2, trial.table.span())));
    }
    trial.rate(&mut lanes, |_, (floor, to), table| floor.read(to, table))
}

/// What each thread does in a trial.
struct Trial {
    table: Table,
    calls: usize,
}

impl Trial {
    fn new(bytes: usize, block: usize, threads: usize) -> Trial {
        let table = Table::scatter(0, Size { block, count: (bytes / threads / block).max(1) });
        Trial { calls: TRIAL_BYTES.div_ceil(table.bytes() * threads), table }
    }

    /// The median of some trials; the first one is not counted: it touches pages and opens windows.
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
    fn loopback_has_a_rate_that_a_machine_can_have() {
        let rate = loopback(1 << 20, 32 << 10, 2).expect("this machine can do it");
        assert!((1e7..1e13).contains(&rate), "{rate}");
    }
}
