//! Copies a whole batch on the caller's thread, without allocating and without waking a thread.

use super::LocalPeer;
use super::copier::{BatchSides, Copier};
use super::copy::{Targets, Unreached};
use crate::error::Error;
use crate::memory::pieces::Position;
use crate::memory::stages::Wake;
use crate::reactor::now;
use crate::sync::Arc;
use crate::transfer::batch::Batch;
use crate::transfer::job::Op;
use crate::transfer::link::Link;
use crate::transfer::slot::Watch;
use std::cell::RefCell;

thread_local! {
    static TARGETS: RefCell<Targets> = RefCell::default();
}

/// Copies a batch of host memory; `None` if it needs a job or another route.
pub(crate) fn copy_all(
    link: &Arc<Link>,
    peer: &LocalPeer,
    op: Op,
    batch: &Batch,
    mut watch: Watch<'_>,
    wake: Wake,
) -> Option<Result<(), Error>> {
    // Taken, not borrowed: the caller's interrupt check may call this function again.
    let mut targets = TARGETS.take();
    let copied = match peer.look_up_into(&mut targets, batch, op) {
        Err(Unreached::Elsewhere(_)) => None,
        Err(Unreached::Refused { code, pair }) => Some(Err(peer.refused(link, batch, code, pair))),
        Ok(()) => {
            let gate = peer.take_gate(&link.core);
            let (start, bytes) = (Position::default(), batch.bytes());
            let copier = Copier::new(op, &batch.local, start, bytes, gate.clone(), wake);
            let way = BatchSides { link, peer, batch };
            let result = run(&way, copier, &targets, &mut watch);
            peer.put_gate(gate);
            Some(result)
        }
    };
    // The buffers are reused; references to mapped memory of the peer must not stay in them.
    targets.clear();
    TARGETS.set(targets);
    copied
}

fn run(
    way: &BatchSides<'_>,
    mut copier: Copier,
    targets: &Targets,
    watch: &mut Watch<'_>,
) -> Result<(), Error> {
    while !copier.is_done() {
        // In each step, not after a number of bytes: a step may copy a thousand tiny pieces, or
        // nothing while all gates are in use.
        let at = now();
        watch.check(at)?;
        copier.step(way, targets, at)?;
    }
    if let Some(gate) = way.peer.page.gate() {
        gate.count(0, 0, 1);
    }
    Ok(())
}
