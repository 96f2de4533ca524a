//! Share of one thread in a transfer within the host.

use super::LocalPeer;
use super::copier::{BatchSides, Copier};
use super::copy::Targets;
use crate::error::Error;
use crate::memory::cursor::Lent;
use crate::memory::gate::Gate;
use crate::memory::stages::Wake;
use crate::notify::Notification;
use crate::sync::{Arc, OnceLock};
use crate::transfer::batch::Frame;
use crate::transfer::drive::{Drive, Progress, STEP_BYTES};
use crate::transfer::job::Job;
use crate::transfer::link::Link;
use crate::transfer::requests::{NOTIFY, Note, encode};
use crate::transfer::still_moving::StillMoving;
use crate::transport::refusal::refusal;
use kvferry_proto::{Limits, Timestamp, WireCode};

/// The bytes that a step counts for at least: a step of a thousand tiny pieces takes as long as one
/// of as many bytes.
const STEP_MIN: usize = STEP_BYTES / 64;

/// The share failed; the job has the error.
struct Ended;

pub(crate) struct LocalShare {
    link: Arc<Link>,
    peer: Arc<LocalPeer>,
    job: Arc<Job>,
    targets: Arc<Targets>,
    wake: Wake,
    gate: Arc<Gate>,
    limits: Limits,
    current: Option<Current>,
    /// The response to the notification that was sent once all bytes were in place.
    noted: Option<Arc<OnceLock<WireCode>>>,
    ended: bool,
}

struct Current {
    frame: Frame,
    copier: Copier,
}

impl LocalShare {
    pub(crate) fn new(
        link: &Arc<Link>,
        peer: &Arc<LocalPeer>,
        job: &Arc<Job>,
        targets: &Arc<Targets>,
        wake: Wake,
    ) -> Self {
        Self {
            link: Arc::clone(link),
            peer: Arc::clone(peer),
            job: Arc::clone(job),
            targets: Arc::clone(targets),
            wake,
            gate: peer.take_gate(&job.core),
            limits: Limits::default(),
            current: None,
            noted: None,
            ended: false,
        }
    }

    fn begin(&self, frame: Frame) -> Current {
        let (pieces, gate) = (&self.job.batch.local, Arc::clone(&self.gate));
        let wake = Arc::clone(&self.wake);
        let copier = Copier::new(self.job.op, pieces, frame.at, frame.bytes, gate, wake);
        Current { frame, copier }
    }

    /// Copies one chunk of the current frame; an error was reported to the job.
    fn copy(&mut self, now: Timestamp) -> Result<Lent, Ended> {
        let Some(current) = &mut self.current else { return Ok(Lent::Moved(0)) };
        let way = BatchSides { link: &self.link, peer: &self.peer, batch: &self.job.batch };
        current.copier.step(&way, &self.targets, now).map_err(|error| self.fail(error))
    }

    fn fail(&self, error: Error) -> Ended {
        self.job.fail(error);
        Ended
    }

    /// The current frame is copied: whether its bytes are in place.
    fn finish_frame(&mut self) -> Result<Lent, Ended> {
        let Some(current) = &mut self.current else { return Ok(Lent::Moved(0)) };
        let way = BatchSides { link: &self.link, peer: &self.peer, batch: &self.job.batch };
        match current.copier.flush(&way) {
            Ok(Lent::NotReady) => return Ok(Lent::NotReady),
            Ok(_) => {}
            Err(error) => return Err(self.fail(error)),
        }
        let frame = current.frame;
        self.current = None;
        if let Some(notification) = self.job.acknowledged(&frame) {
            self.notify(notification);
        }
        Ok(Lent::Moved(0))
    }

    fn notify(&mut self, notification: Notification) {
        let Notification { name, message, .. } = notification;
        let answer = Arc::new(OnceLock::new());
        let (set, wake) = (Arc::clone(&answer), Arc::clone(&self.wake));
        self.noted = Some(answer);
        self.link.begin();
        let link = Arc::clone(&self.link);
        self.link.request(
            NOTIFY,
            encode(&Note { name, message }),
            self.job.deadline.saturating_since(crate::reactor::now()),
            Box::new(move |code, _| {
                link.finish();
                let _ = set.set(code);
                wake();
            }),
        );
    }

    /// Ends the share once no device copies for it: after the outcome, no byte arrives any more.
    fn end(&mut self) -> Progress {
        if self.gate.has_copies() {
            return Progress::Memory;
        }
        if !self.ended {
            self.ended = true;
            if let Some(gate) = self.peer.page.gate() {
                gate.count(0, 0, 1);
            }
            self.job.share_ended(&self.link, None);
        }
        Progress::Done
    }
}

impl Drive for LocalShare {
    fn progress(&mut self, now: Timestamp) -> Progress {
        let mut budget = STEP_BYTES;
        let mut at = now;
        loop {
            if self.ended || self.job.is_stopped() {
                return self.end();
            }
            if let Some(noted) = &self.noted {
                match noted.get() {
                    None => return Progress::Memory,
                    Some(WireCode::Ok) => self.job.noted(),
                    Some(code) => self.job.fail(match (code, self.link.end()) {
                        (WireCode::Closed, Some(end)) => end.clone(),
                        (code, _) => refusal(&self.link, &self.job.batch, *code, None),
                    }),
                }
                return self.end();
            }
            if let Some(notification) = self.job.bare_notification() {
                self.notify(notification);
                continue;
            }
            if self.current.is_none() {
                match self.job.next_frame(&self.limits) {
                    Some(frame) => self.current = Some(self.begin(frame)),
                    None => return self.end(),
                }
            }
            let is_copied = self.current.as_ref().is_some_and(|c| c.copier.is_done());
            let step = if is_copied { self.finish_frame() } else { self.copy(at) };
            match step {
                Ok(Lent::Moved(0)) => {}
                Ok(Lent::Moved(moved)) => {
                    budget = budget.saturating_sub(moved.max(STEP_MIN));
                    if budget == 0 {
                        return Progress::Again;
                    }
                    at = crate::reactor::now();
                }
                Ok(Lent::WouldBlock | Lent::NotReady) => return Progress::Memory,
                Err(_) => return self.end(),
            }
        }
    }

    fn still_moving(&self) -> StillMoving {
        StillMoving::copies(&self.gate)
    }
}

impl Drop for LocalShare {
    fn drop(&mut self) {
        // The gate of a share that was given up tells when its copies have ended: no other share's may be counted by it.
        if self.ended {
            self.peer.put_gate(Arc::clone(&self.gate));
        }
    }
}
