//! The end of a share: failures, and the notification after the last byte.

use super::{Share, Step};
use crate::transport::diagnose::{Diagnosis, misfit, refusal};
use crate::transport::exchange::{Failure, ask};
use crate::transport::lanes::{drop_lane, replace_lane};
use crate::transport::peer::{end, notified, notify_frame};
use crate::transport::wire::{Kind, Status};
use kvferry::transport::{Fault, Progress, local_fault, now};
use kvferry::{Error, ErrorKind, Notification};
use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// State of a share whose lane is gone.
pub(super) enum Dying {
    /// `dirty` if the peer may still have requests in progress.
    Broken { dirty: bool },
    /// The connection was lost; why has to be found out.
    Lost(Diagnosis),
}

impl Share {
    /// A refusal ends the connection, but the peer applies no later request: the lane is replaced,
    /// and the link goes on.
    pub(super) fn refused(&mut self, status: Status) -> Step {
        let pair = self.awaited.front().expect("the refused request is awaited").pair;
        let part = self.job.part(pair);
        let kind = match status {
            // If the range fits a buffer of the last known list, the peer has unregistered it
            // since.
            Status::Refused => misfit(part.offset, part.len, &self.peer.buffers())
                .unwrap_or(ErrorKind::NotRegistered),
            _ => ErrorKind::Protocol,
        };
        let error = refusal(&self.link, &self.job, pair, kind);
        self.job.fail(error);
        replace_lane(&self.peer, &self.link, &self.lane);
        self.over(false)
    }

    /// The connection broke.
    pub(super) fn lost(&mut self, e: io::Error) -> Step {
        if let Some(ended) = self.link.end() {
            self.job.fail(ended.clone());
            drop_lane(&self.peer, &self.link, &self.lane);
            return self.over(true);
        }
        let error = Error::new(ErrorKind::PeerReset, "the connection to the peer broke")
            .with("peer", &self.link.address)
            .caused_by(e);
        drop_lane(&self.peer, &self.link, &self.lane);
        self.dying = Some(Dying::Lost(Diagnosis {
            peer: Arc::clone(&self.peer),
            link: Arc::clone(&self.link),
            job: Arc::clone(&self.job),
            lane: self.lane.id,
            pairs: self.under_way(),
            error,
        }));
        Step::Over
    }

    /// The pairs of requests that were not answered.
    fn under_way(&self) -> RangeInclusive<usize> {
        let made = self.making.as_ref().filter(|m| m.unfenced.0 > 0).map(|m| m.unfenced.2);
        let first = self.awaited.front().map(|a| a.pair).or(made);
        match first {
            Some(first) => first..=self.last_made.max(first),
            None => RangeInclusive::new(1, 0),
        }
    }

    pub(super) fn protocol(&mut self, what: impl std::fmt::Display) -> Step {
        self.job.fail(
            Error::new(ErrorKind::Protocol, format!("the peer sent {what}"))
                .with("peer", &self.link.address),
        );
        drop_lane(&self.peer, &self.link, &self.lane);
        self.over(true)
    }

    pub(super) fn silent(&mut self) -> Step {
        let error = Error::new(ErrorKind::PeerSilent, "the peer acknowledged nothing for too long")
            .with("peer", &self.link.address)
            .with("silence_ms", self.stall_detector.silence.as_millis());
        self.job.fail(error.clone());
        drop_lane(&self.peer, &self.link, &self.lane);
        end(&self.link, error);
        self.over(true)
    }

    pub(super) fn fault(&mut self, fault: Fault) -> Step {
        match fault {
            Fault::Io(e) => self.lost(e),
            Fault::Shut => self.lost(io::ErrorKind::ConnectionAborted.into()),
            Fault::Memory(fault) => {
                self.job.fail(local_fault(fault));
                drop_lane(&self.peer, &self.link, &self.lane);
                self.over(true)
            }
        }
    }

    /// Ends a broken lane. `dirty` if the peer may still have requests of it in progress.
    pub(super) fn over(&mut self, dirty: bool) -> Step {
        self.dying = Some(Dying::Broken { dirty });
        Step::Over
    }

    /// Ends a share whose lane is gone, once no device copies for it: after the outcome, no byte arrives
    /// any more.
    pub(super) fn finish(&mut self) -> Progress {
        if self.lane.gate.has_copies() {
            return Progress::Memory;
        }
        self.ended = true;
        match self.dying.take() {
            Some(Dying::Broken { dirty }) => {
                self.job.share_ended(&self.link, dirty.then_some(self.lane.id));
            }
            Some(Dying::Lost(diagnosis)) => diagnosis.hold(),
            None => {}
        }
        Progress::Done
    }

    /// True if every request was answered and nothing is left to send.
    pub(super) fn is_clean(&self) -> bool {
        self.awaited.is_empty() && self.out.is_empty() && self.flushing.is_none()
    }

    /// Ends the share. If requests are in progress, ends the lane, too.
    pub(super) fn end(&mut self) -> Progress {
        if !self.is_clean() || self.making.as_ref().is_some_and(|m| m.unfenced.0 > 0) {
            drop_lane(&self.peer, &self.link, &self.lane);
            self.over(true);
            return self.finish();
        }
        if self.lane.gate.has_copies() {
            return Progress::Memory;
        }
        self.ended = true;
        self.link.put(Arc::clone(&self.lane));
        if self.job.is_stopped() {
            self.job.share_ended(&self.link, None);
            return Progress::Done;
        }
        if self.yielding.yields() && self.notification.is_none() {
            return if self.job.share_yielded() { Progress::Yielded } else { Progress::Done };
        }
        match self.notification.take() {
            Some(notification) => self.notify(&notification),
            None => self.job.share_ended(&self.link, None),
        }
        Progress::Done
    }

    /// Sends the notification on a connection of its own; the share ends with its answer.
    fn notify(&self, notification: &Notification) {
        let request = match notify_frame(notification) {
            Ok(request) => request,
            Err(e) => {
                self.job.fail(e);
                return self.job.share_ended(&self.link, None);
            }
        };
        let (core, job, link) = (&self.link.core, Arc::clone(&self.job), Arc::clone(&self.link));
        let left = job.deadline.saturating_since(now());
        ask(
            core,
            self.link.peer_addr,
            Kind::Notify,
            request,
            left.min(core.handshake_timeout()),
            Box::new(move |_, answer| {
                let answer = answer.map_err(Failure::into_error);
                match answer.and_then(|answer| notified(&answer)) {
                    Ok(()) => job.noted(),
                    Err(e) => job.fail(e.with("peer", &link.address)),
                }
                job.share_ended(&link, None);
            }),
        );
    }
}
