//! A whole batch, copied on the caller's thread: nothing is allocated, nobody is woken.

use super::copier::{Copier, Way};
use super::copy::{Targets, Unreached};
use super::{CHUNK, LocalPeer};
use crate::error::Error;
use crate::memory::cursor::{Lent, Position};
use crate::memory::device::Wake;
use crate::reactor::now;
use crate::session::link::Link;
use crate::sync::Arc;
use crate::transfer::batch::Batch;
use crate::transfer::drive::Watch;
use crate::transfer::job::Op;
use std::cell::RefCell;

thread_local! {
    static TARGETS: RefCell<Targets> = RefCell::default();
}

/// Copies a batch of host memory; `None` if it has to go another way.
pub(crate) fn copy_all(
    link: &Arc<Link>,
    peer: &LocalPeer,
    op: Op,
    batch: &Batch,
    mut watch: Watch<'_>,
    wake: Wake,
) -> Option<Result<(), Error>> {
    // Taken, not borrowed: the caller's check may come back here.
    let mut targets = TARGETS.take();
    let copied = match peer.look_up_into(&mut targets, batch, op) {
        Err(Unreached::Elsewhere) => None,
        Err(Unreached::Refused { code, pair }) => Some(Err(peer.refused(link, batch, code, pair))),
        Ok(()) => {
            let gate = peer.take_gate(&link.core);
            let (start, bytes) = (Position::default(), batch.bytes());
            let copier = Copier::new(op, &batch.local, start, bytes, gate.clone(), wake);
            let way = Way { link, peer, batch };
            let result = run(&way, copier, &targets, &mut watch);
            peer.put_gate(gate);
            Some(result)
        }
    };
    // Memory of the peer that is mapped here is not to be kept.
    targets.clear();
    TARGETS.set(targets);
    copied
}

fn run(
    way: &Way<'_>,
    mut copier: Copier,
    targets: &Targets,
    watch: &mut Watch<'_>,
) -> Result<(), Error> {
    let mut at = now();
    while !copier.is_done() {
        watch.check(at)?;
        if let Lent::Moved(moved) = copier.step(way, targets, at)?
            && moved >= CHUNK / 2
        {
            at = now();
        }
    }
    if let Some(gate) = way.peer.page.gate() {
        gate.count(0, 0, 1);
    }
    Ok(())
}
