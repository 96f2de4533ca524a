//! Starts several transfers at the same time; waits for some and polls the others as futures.
//!
//! A [`kvferry::Transfer`] is a future and needs no runtime: the I/O threads of the agent move the
//! bytes, and wake the future's waker when the transfer has ended. Any executor can await it.

use kvferry::{Access, Agent, Batch, Options, Result};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::thread::{self, Thread};
use std::time::Duration;

const BYTES: usize = 1024 * 1024;

/// Wakes the thread that polls.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls a future on this thread until it is ready.
fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Arc::new(Unpark(thread::current())).into();
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

pub(crate) fn main() -> Result<()> {
    let (near, far) = (Agent::builder().start()?, Agent::builder().start()?);
    let from = near.allocate(BYTES, Access::NONE)?;
    from.write_at(0, &vec![1; BYTES])?;
    let peer = near.peer(far.advertised())?;

    let mut transfers = Vec::new();
    for _ in 0..4 {
        let to = far.allocate(BYTES, Access::WRITE)?;
        let mut batch = Batch::new();
        batch.push(&from, 0, &to.remote(), 0, BYTES as u64)?;
        transfers.push(peer.write_async(&batch, &Options::default()));
    }

    // Await two transfers, one after the other. Both run in the background already.
    let [first, second] = [transfers.remove(0), transfers.remove(0)];
    let awaited = block_on(async { Ok::<_, kvferry::Error>((first.await?, second.await?)) })?;
    assert_eq!((awaited.0.bytes, awaited.1.bytes), (BYTES as u64, BYTES as u64));

    // Without a future: wait with a time limit, and cancel what takes too long.
    for transfer in transfers {
        match transfer.wait(Duration::from_secs(10)) {
            Some(outcome) => println!("moved {} bytes", outcome?.bytes),
            None => transfer.cancel(),
        }
    }
    Ok(())
}
