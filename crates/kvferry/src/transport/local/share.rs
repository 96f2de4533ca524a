//! One thread's part of a transfer within the host.

use super::copier::{Copier, Way};
use super::copy::Targets;
use super::{CHUNK, LocalPeer};
use crate::error::Error;
use crate::memory::cursor::Lent;
use crate::memory::device::Wake;
use crate::memory::gate::Gate;
use crate::notify::Notification;
use crate::session::link::Link;
use crate::session::service::{self, Note};
use crate::sync::{Arc, OnceLock};
use crate::transfer::batch::Frame;
use crate::transfer::job::Job;
use crate::transport::{Drive, Progress, TURN, refusal};
use kvferry_proto::{Limits, Timestamp, WireCode};
use std::os::fd::BorrowedFd;

/// The job knows why.
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
    /// The answer to the notification that went out when all bytes were in place.
    noted: Option<Arc<OnceLock<WireCode>>>,
    ended: bool,
}

/// The frame at hand.
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

    /// Copies one chunk of the frame at hand; an error was told to the job.
    fn copy(&mut self, now: Timestamp) -> Result<Lent, Ended> {
        let Some(current) = &mut self.current else { return Ok(Lent::Moved(0)) };
        let way = Way { link: &self.link, peer: &self.peer, batch: &self.job.batch };
        current.copier.step(&way, &self.targets, now).map_err(|error| self.fail(error))
    }

    fn fail(&self, error: Error) -> Ended {
        self.job.fail(error);
        Ended
    }

    /// The frame at hand is copied: whether its bytes are where they belong.
    fn finish_frame(&mut self) -> Result<Lent, Ended> {
        let Some(current) = &mut self.current else { return Ok(Lent::Moved(0)) };
        let way = Way { link: &self.link, peer: &self.peer, batch: &self.job.batch };
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
            service::NOTIFY,
            service::encode(&Note { name, message }),
            self.job.deadline.saturating_since(crate::reactor::now()),
            Box::new(move |code, _| {
                link.finish();
                let _ = set.set(code);
                wake();
            }),
        );
    }

    fn end(&mut self) -> Progress {
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
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn progress(&mut self, now: Timestamp) -> Progress {
        let mut turn = TURN;
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
                    turn = turn.saturating_sub(moved);
                    if turn == 0 {
                        return Progress::Again;
                    }
                    if moved >= CHUNK / 2 {
                        at = crate::reactor::now();
                    }
                }
                Ok(Lent::WouldBlock | Lent::NotReady) => return Progress::Memory,
                Err(_) => return self.end(),
            }
        }
    }
}

impl Drop for LocalShare {
    fn drop(&mut self) {
        self.peer.put_gate(Arc::clone(&self.gate));
    }
}
