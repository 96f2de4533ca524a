//! The route of a peer within the host.

use super::copy::{Targets, Unreached};
use super::direct::copy_all;
use super::share::LocalShare;
use super::{Local, LocalPeer};
use crate::core::Core;
use crate::error::{Error, Result};
use crate::reactor::now;
use crate::sync::Arc;
use crate::transfer::Options;
use crate::transfer::batch::Batch;
use crate::transfer::caller::drive;
use crate::transfer::drive::{background, no_wake, shares};
use crate::transfer::job::{Frames, Job, Op, TransferStats, count_outcome};
use crate::transfer::kind::Transport;
use crate::transfer::link::{Link, Offered, Route};
use crate::transfer::slot::{Interrupt, Watch};
use std::time::Duration;

/// Bytes below which a caller copies alone: a millisecond's work. Another thread would have to be woken,
/// and a job made.
const CALLER_BYTES_MIN: u64 = 8 << 20;
/// Bytes below which one thread copies a job that is not its caller's. Threads are woken either way.
const COPIER_BYTES_MIN: u64 = 1 << 20;

/// Returns the number of threads that should copy `bytes`, each at least `least`.
fn copiers_for(core: &Core, bytes: u64, least: u64, streams: Option<usize>) -> usize {
    shares(core, bytes / least, core.sizing.copiers_default, streams)
}

pub(super) struct LocalRoute(pub(super) Arc<LocalPeer>);

impl LocalRoute {
    /// Resolves the remote ranges of a job, if all of them are within reach.
    fn targets(&self, link: &Arc<Link>, job: &Job) -> Result<Arc<Targets>, Offered> {
        match self.0.targets(&job.batch, job.op) {
            Ok(targets) => Ok(Arc::new(targets)),
            Err(Unreached::Elsewhere(why)) => Err(Offered::Elsewhere(why)),
            Err(Unreached::Refused { code, pair }) => {
                Err(Offered::Refused(self.0.refused(link, &job.batch, code, pair)))
            }
        }
    }

    /// Registers the shares of a job and starts all but `own` of them on I/O threads.
    fn start(&self, link: &Arc<Link>, job: &Arc<Job>, targets: &Arc<Targets>, own: usize) {
        let bytes_min = if own == 0 { COPIER_BYTES_MIN } else { CALLER_BYTES_MIN };
        let copiers = copiers_for(&job.core, job.batch.bytes(), bytes_min, job.streams);
        let frames = Frames::Copies { bytes_min };
        job.start_shares(copiers, Local::KIND, frames);
        for _ in own..copiers {
            let share = |wake| LocalShare::new(link, &self.0, job, targets, wake);
            background(job, link, None, |_, _| {}, share);
        }
    }
}

impl Route for LocalRoute {
    fn transport(&self) -> &'static dyn Transport {
        &Local
    }

    fn is_open(&self) -> bool {
        self.0.is_attached()
    }

    fn obstacle(&self) -> Option<&str> {
        self.0.obstacle()
    }

    fn run_direct(
        &self,
        link: &Arc<Link>,
        op: Op,
        batch: &Batch,
        options: &Options<'_>,
        timeout: Duration,
    ) -> Option<Result<TransferStats>> {
        if options.notify.is_some()
            || copiers_for(&link.core, batch.bytes(), CALLER_BYTES_MIN, options.streams) > 1
            || !batch.local.all_host()
        {
            return None;
        }
        let at = now();
        let watch = Watch::new(at + timeout, options.interrupt, at);
        let counters = &link.core.counters;
        counters.transfers_in_flight.one();
        let copied = copy_all(link, &self.0, op, batch, watch, no_wake());
        counters.transfers_in_flight.less_one();
        let copied = copied?;
        counters.transfers_started.one();
        let bytes = batch.bytes();
        let (descriptors, transport) = (batch.len(), Some(Local::KIND));
        let outcome = match copied {
            Ok(()) => Ok(TransferStats { bytes, descriptors, streams: 1, transport }),
            // The caller's thread has copied.
            Err(e) => Err(e.with("peer", &link.address).with_quiesced(true)),
        };
        count_outcome(counters, op, &outcome);
        Some(outcome)
    }

    fn run(&self, link: &Arc<Link>, job: &Arc<Job>, interrupt: Interrupt<'_>) -> Offered {
        let targets = match self.targets(link, job) {
            Ok(targets) => targets,
            Err(offered) => return offered,
        };
        self.start(link, job, &targets, 1);
        let share = |wake| LocalShare::new(link, &self.0, job, &targets, wake);
        drive(job, link, &[], interrupt, [share]);
        Offered::Taken
    }

    fn submit(&self, link: &Arc<Link>, job: &Arc<Job>) -> Offered {
        match self.targets(link, job) {
            Ok(targets) => {
                self.start(link, job, &targets, 0);
                Offered::Taken
            }
            Err(offered) => offered,
        }
    }

    fn peer_loss(&self, link: &Arc<Link>) -> Option<Error> {
        self.0.gone(link)
    }

    fn close(&self, link: &Link) {
        self.0.detach();
        link.core.threads.control.wake(self.0.handler);
    }
}
