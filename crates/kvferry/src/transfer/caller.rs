//! Transfers on their callers' threads.

use crate::error::Error;
use crate::memory::stages::Wake;
use crate::reactor::{LINGER, now};
use crate::sync::Arc;
use crate::transfer::drive::{DeviceWait, Drive, Progress, abandon, no_wake};
use crate::transfer::job::Job;
use crate::transfer::lanes::{Lane, PERMIT_TIME};
use crate::transfer::link::Link;
use crate::transfer::slot::{INTERRUPT_EVERY, Interrupt, deadline_passed, interrupted, says_stop};
use kvferry_proto::Timestamp;
use kvferry_sys::poll::{self, EventFd, Interest};
use smallvec::SmallVec;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// A share that was stopped and could not end at once is polled at this part of the time since then, so that a
/// device that hangs costs little.
const STOPPED_POLLS: u32 = 16;
const STOPPED_POLL_MIN: Duration = Duration::from_millis(1);
const STOPPED_POLL_MAX: Duration = Duration::from_millis(100);

/// Time for which a caller's thread does not sleep while it waits for a device's copy. The copy of a whole stage takes
/// less, and to sleep and to be woken takes as long.
pub(super) const COPY_LINGER: Duration = Duration::from_micros(300);

/// Drives the shares of a job until they have ended; true if the last of them yielded. Each one on a lane has that of
/// its index.
pub(crate) fn drive<S: Drive>(
    job: &Arc<Job>,
    link: &Arc<Link>,
    lanes: &[Arc<Lane>],
    interrupt: Interrupt<'_>,
    shares: impl IntoIterator<Item = impl FnOnce(Wake) -> S>,
) -> bool {
    let may_be_woken = !job.batch.local.all_host() || (lanes.is_empty() && job.notify.is_some());
    let mut shares: SmallVec<[Share<'_, S>; 1]> = shares
        .into_iter()
        .enumerate()
        .map(|(index, share)| Share::new(share, job, lanes.get(index), may_be_woken))
        .collect();
    // A share that waits for its memory, or has no lane, gets no event when the agent is shut down.
    let asks = interrupt.is_some() || may_be_woken || lanes.is_empty();
    let mut at = now();
    let mut asked = at;
    let mut permit_until = (!lanes.is_empty()).then(|| at + PERMIT_TIME);
    let mut yielded = false;
    let mut lingering: Option<Timestamp> = None;
    let mut stopped_at: Option<Timestamp> = None;
    loop {
        if at >= job.deadline && !job.is_stopped() {
            job.stop(deadline_passed());
        }
        if permit_until.is_some_and(|until| at >= until) {
            permit_until = None;
            lanes.iter().for_each(|lane| link.pass_permit(lane));
        }
        if asks && at.saturating_since(asked) >= INTERRUPT_EVERY {
            asked = at;
            if job.core.is_closed() {
                job.stop(Error::shutdown());
            }
            if interrupt.is_some_and(says_stop) {
                job.stop(interrupted());
            }
        }
        shares.retain_mut(|share| {
            share.progress(job, link, at);
            yielded |= share.last == Progress::Yielded;
            !matches!(share.last, Progress::Done | Progress::Yielded)
        });
        if shares.is_empty() {
            return yielded;
        }
        if shares.iter().any(|share| share.is_due) {
            lingering = None;
        } else if let [share] = &mut shares[..]
            && share.last == Progress::Wait(Interest::Read)
            && at.saturating_since(*lingering.get_or_insert(at)) < LINGER
        {
            // A response is due soon: polling costs less than sleeping and waking up.
            std::thread::yield_now();
            share.is_due = true;
        } else {
            lingering = None;
            if job.is_stopped() {
                stopped_at.get_or_insert(at);
            }
            let poll_after = stopped_at.map(|since| {
                (at.saturating_since(since) / STOPPED_POLLS)
                    .clamp(STOPPED_POLL_MIN, STOPPED_POLL_MAX)
            });
            wait(job, &mut shares, permit_until, poll_after, asks);
        }
        at = now();
    }
}

/// A share on the caller's thread.
struct Share<'a, S> {
    drive: S,
    last: Progress,
    lane: Option<&'a Arc<Lane>>,
    /// Signalled by the share's waker.
    wakeup: Option<Arc<EventFd>>,
    /// An event that the share waits for has come.
    is_due: bool,
    device: DeviceWait,
}

impl<'a, S: Drive> Share<'a, S> {
    fn new(
        share: impl FnOnce(Wake) -> S,
        job: &Job,
        lane: Option<&'a Arc<Lane>>,
        may_be_woken: bool,
    ) -> Self {
        let wakeup = may_be_woken.then(EventFd::new).transpose();
        let wakeup = wakeup.unwrap_or_else(|e| {
            job.fail(Error::io("the event descriptor of a transfer can't be made", e));
            None
        });
        let wakeup = wakeup.map(Arc::new);
        let wake: Wake = match wakeup.clone() {
            Some(wakeup) => Arc::new(move || wakeup.signal()),
            None => no_wake(),
        };
        let (last, device) = (Progress::Again, DeviceWait::default());
        Self { drive: share(wake), last, lane, wakeup, is_due: true, device }
    }

    fn progress(&mut self, job: &Arc<Job>, link: &Arc<Link>, at: Timestamp) {
        let is_checked = self.drive.check_at().is_some_and(|check| check <= at);
        if !self.is_due && !is_checked && !job.is_stopped() {
            return;
        }
        self.last = self.drive.progress(at);
        if self.device.is_over(job, self.last, at) {
            abandon(job, link, self.lane, self.drive.still_moving());
            self.last = Progress::Done;
        }
        self.is_due = self.last == Progress::Again;
    }
}

/// Waits until a share can go on, and marks those that are due.
fn wait<S: Drive>(
    job: &Job,
    shares: &mut [Share<'_, S>],
    until: Option<Timestamp>,
    poll_after: Option<Duration>,
    asks: bool,
) {
    let at = now();
    let until = until.map_or(job.deadline, |until| until.min(job.deadline));
    let mut timeout = until.saturating_since(at);
    if let Some(poll_after) = poll_after {
        // A stopped share that could not end at once is polled. Its deadline may have passed.
        timeout = poll_after;
    }
    if asks {
        timeout = timeout.min(INTERRUPT_EVERY);
    }
    for share in &*shares {
        if let Some(check) = share.drive.check_at() {
            timeout = timeout.min(check.saturating_since(at));
        }
    }
    let result = match shares {
        [share] if share.wakeup.is_none() => {
            share.is_due = true;
            let Progress::Wait(interest) = share.last else { return };
            let waited = share.drive.wait(timeout);
            waited.unwrap_or_else(|| match share.drive.fd() {
                Some(fd) => poll::wait_one(fd, interest, Some(timeout)).map(drop),
                None => Ok(()),
            })
        }
        shares => {
            let waits_for_copy = shares.iter().any(|share| share.last == Progress::Memory)
                && !job.batch.local.all_host()
                && !job.is_stopped();
            let awake = if waits_for_copy { COPY_LINGER.min(timeout) } else { Duration::ZERO };
            wait_any(shares, timeout, awake)
        }
    };
    if let Err(e) = result {
        job.fail(Error::io("waiting for the network failed", e));
    }
}

/// Waits until a share can go on. For the first part of the time, `awake`, the thread does not sleep.
fn wait_any<S: Drive>(
    shares: &mut [Share<'_, S>],
    timeout: Duration,
    awake: Duration,
) -> io::Result<()> {
    let mut fds: Vec<(BorrowedFd<'_>, Interest)> = Vec::with_capacity(2 * shares.len());
    let mut of: Vec<usize> = Vec::with_capacity(2 * shares.len());
    for (index, share) in shares.iter().enumerate() {
        if let (Progress::Wait(interest), Some(fd)) = (share.last, share.drive.fd()) {
            fds.push((fd, interest));
            of.push(index);
        }
        if let Some(wakeup) = &share.wakeup {
            fds.push((wakeup.as_fd(), Interest::Read));
            of.push(index);
        }
    }
    let began = now();
    let ready = loop {
        let sleeps = now().saturating_since(began) >= awake;
        let ready = poll::wait_any(&fds, Some(if sleeps { timeout } else { Duration::ZERO }))?;
        if sleeps || ready.iter().any(|ready| ready.any()) {
            break ready;
        }
        std::thread::yield_now();
    };
    for (index, _) in of.into_iter().zip(ready).filter(|(_, ready)| ready.any()) {
        let share = &mut shares[index];
        share.is_due = true;
        if let Some(wakeup) = &share.wakeup {
            wakeup.clear();
        }
    }
    Ok(())
}
