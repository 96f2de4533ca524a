//! Limits the connections that peers may open to an agent.
//!
//! Each connection takes a descriptor of the process, and the engine needs descriptors, too. The
//! limits follow the process's descriptor limit (the soft `RLIMIT_NOFILE`) at the time of each
//! connection, because the engine may raise it after the agent has started. A connection beyond
//! them is refused with `Busy` and counted in `connections_refused`; the peer may retry. Sessions in which
//! nothing is in progress keep no new one out, and neither does a network that has more sessions than the new one's: the
//! new one gets the place of one of them (see `Sessions::displace_for`). A connection counts as a session once its peer
//! has proved the secret.
//!
//! Together the limits take at most three quarters of the process's: a quarter for sessions, a
//! quarter for the one stream that each session needs to move anything, and a quarter for all
//! further streams and for the processes of this host that copy directly, first come, first served.
//! Where the process may have very many, 4 096 sessions and four further streams for each are the limit.

use crate::sync::Arc;
use crate::sync::atomic::{AtomicUsize, Ordering};
use kvferry_sys::fd;

/// Streams of one session: twice the number that an initiator can be configured to open, because
/// streams that it has just reset may still be open here.
const STREAMS_PER_SESSION_MAX: usize = 128;
/// Sessions of an agent, however many descriptors the process may have: containers often have a limit
/// of a million, and each session may hold memory.
const SESSIONS_MAX: usize = 4096;
/// Descriptors of further streams and of copying processes of an agent: four for each session.
const FURTHER_MAX: usize = 4 * SESSIONS_MAX;
/// Descriptors of one process that copies directly: its connection, its page of gates, its pidfd.
const COPYING_PROCESS: usize = 3;

/// The connections that peers have opened to one agent.
#[derive(Debug, Default)]
pub(crate) struct Quota {
    sessions: Arc<AtomicUsize>,
    /// Descriptors of further streams and of copying processes.
    further: Arc<AtomicUsize>,
}

/// The descriptors of one connection; counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    count: Arc<AtomicUsize>,
    descriptors: usize,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.count.fetch_sub(self.descriptors, Ordering::Relaxed);
    }
}

/// A quarter of the process's descriptors.
pub(crate) fn quarter() -> usize {
    fd::limit() / 4
}

fn sessions_max() -> usize {
    quarter().min(SESSIONS_MAX)
}

fn take(count: &Arc<AtomicUsize>, descriptors: usize, max: usize) -> Option<Permit> {
    let before = count.fetch_add(descriptors, Ordering::Relaxed);
    let permit = Permit { count: Arc::clone(count), descriptors };
    (before + descriptors <= max).then_some(permit)
}

impl Quota {
    /// For a session that a peer opens.
    pub(crate) fn session(&self) -> Option<Permit> {
        take(&self.sessions, 1, sessions_max())
    }

    /// Whether there is room for another session.
    pub(crate) fn has_session(&self) -> bool {
        self.sessions.load(Ordering::Relaxed) < sessions_max()
    }

    /// For one more stream of a session that has `streams` open.
    pub(crate) fn stream(&self, streams: usize) -> Option<Permit> {
        match streams {
            // As many first streams as there are sessions.
            0 => take(&self.further, 0, usize::MAX),
            STREAMS_PER_SESSION_MAX.. => None,
            _ => take(&self.further, 1, quarter().min(FURTHER_MAX)),
        }
    }

    /// For one more process of this host that copies directly.
    pub(crate) fn copying_process(&self) -> Option<Permit> {
        take(&self.further, COPYING_PROCESS, quarter().min(FURTHER_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_always_gets_its_first_stream_and_further_ones_while_there_are_descriptors() {
        let quota = Quota::default();
        let max = quarter().min(FURTHER_MAX);
        let further: Vec<_> = (0..=max).map_while(|_| quota.stream(1)).collect();
        assert_eq!(further.len(), max);
        let first = quota.stream(0).expect("the first of its session");
        assert!(quota.stream(1).is_none());
        assert!(quota.copying_process().is_none());
        drop((further, first));
        assert!(quota.copying_process().is_some());
        assert!(quota.stream(STREAMS_PER_SESSION_MAX - 1).is_some());
        assert!(quota.stream(STREAMS_PER_SESSION_MAX).is_none());
        let max = quarter().min(SESSIONS_MAX);
        let sessions: Vec<_> = (0..=max).map_while(|_| quota.session()).collect();
        assert_eq!(sessions.len(), max);
        drop(sessions);
        assert!(quota.session().is_some(), "a place that was released");
    }
}
