//! One thread's part of a transfer within the host.

use super::copy::{Broken, Targets};
use super::{CHUNK, LocalPeer};
use crate::error::{Error, ErrorKind};
use crate::memory::cursor::{Fault, Gather, Lent, Position, Scatter, Sink, Source};
use crate::memory::device::Wake;
use crate::memory::gate::Gate;
use crate::notify::Notification;
use crate::session::link::Link;
use crate::session::service::{self, Note};
use crate::sync::{Arc, OnceLock};
use crate::transfer::batch::Frame;
use crate::transfer::job::{Job, Op};
use crate::transport::{Drive, Progress, TURN, local_fault, refusal};
use kvferry_proto::{Limits, Timestamp, WireCode};
use std::io;
use std::os::fd::BorrowedFd;

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
    local: Local,
    at: Position,
}

enum Local {
    From(Gather),
    To(Scatter),
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
        let (pieces, gate) = (Arc::clone(&self.job.batch.local), Arc::clone(&self.gate));
        let wake = Arc::clone(&self.wake);
        let local = match self.job.op {
            Op::Write => Local::From(Gather::new(pieces, frame.at, frame.bytes, gate, wake)),
            Op::Read => Local::To(Scatter::new(pieces, frame.at, frame.bytes, gate, wake)),
        };
        Current { frame, local, at: frame.at }
    }

    /// Copies one chunk of the frame at hand.
    fn copy(&mut self, now: Timestamp) -> Result<Lent, Fault> {
        let Some(Current { local, at, .. }) = &mut self.current else {
            return Ok(Lent::Moved(0));
        };
        let job = &*self.job;
        let pieces = &*job.batch.local;
        while pieces.pieces[at.piece].len == at.within {
            *at = Position { piece: at.piece + 1, within: 0 };
        }
        let Some(gate) = self.peer.page.gate() else {
            // As many threads as there are gates copy to this peer: they will be done soon.
            crate::sync::thread::yield_now();
            return Ok(Lent::Moved(0));
        };
        let mut broken = None;
        let mut copy = |spans: &[kvferry_sys::HostSpan]| {
            let place = (&*self.targets, pieces, *at);
            self.peer.copy(&job.core, &gate, job.op, place, spans, now).map_err(|why| {
                broken = Some(why);
                io::Error::from(io::ErrorKind::Other)
            })
        };
        let result = match local {
            Local::From(source) => source.lend(CHUNK, &mut copy),
            Local::To(sink) => sink.lend(CHUNK, &mut copy),
        };
        if let Some(broken) = broken {
            self.broken(broken);
            return Err(Fault::Shut);
        }
        match result {
            Ok(Lent::Moved(moved)) => advance(pieces, at, moved as u64),
            Ok(Lent::WouldBlock | Lent::NotReady) => {}
            Err(Fault::Memory { code, index }) => {
                job.fail(local_fault(code, index));
                return Err(Fault::Shut);
            }
            Err(Fault::Shut | Fault::Io(_)) => {
                job.fail(Error::new(ErrorKind::Internal, "a copy within the host was stopped"));
                return Err(Fault::Shut);
            }
        }
        result
    }

    fn broken(&self, why: Broken) {
        let error = match why {
            Broken::Gone(error) => match self.link.end() {
                Some(end) => end.clone(),
                None => {
                    // The next transfer meets the peer afresh, or takes another way.
                    self.peer.detach();
                    error.with("peer", &self.link.address)
                }
            },
            Broken::Pair { code, pair } => refusal(&self.link, &self.job.batch, code, Some(pair)),
        };
        self.job.fail(error);
    }

    /// The frame at hand is copied: whether its bytes are where they belong.
    fn finish_frame(&mut self) -> Result<Lent, Fault> {
        let Some(current) = &mut self.current else { return Ok(Lent::Moved(0)) };
        if let Local::To(sink) = &mut current.local {
            match sink.flush() {
                Ok(Lent::NotReady) => return Ok(Lent::NotReady),
                Ok(_) => {}
                Err(fault) => {
                    if let Fault::Memory { code, index } = fault {
                        self.job.fail(local_fault(code, index));
                    }
                    return Err(Fault::Shut);
                }
            }
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

fn advance(pieces: &crate::memory::cursor::Pieces, at: &mut Position, mut moved: u64) {
    while moved > 0 {
        let left = pieces.pieces[at.piece].len - at.within;
        if moved < left {
            at.within += moved;
            return;
        }
        moved -= left;
        *at = Position { piece: at.piece + 1, within: 0 };
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
            let is_copied = self.current.as_ref().is_some_and(|current| match &current.local {
                Local::From(source) => source.remaining() == 0,
                Local::To(sink) => sink.remaining() == 0,
            });
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
