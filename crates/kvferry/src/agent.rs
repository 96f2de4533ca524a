//! The agent: one kvferry endpoint in a process.
//!
//! It owns one control thread (sessions, handshakes, heartbeats) and a few I/O threads (inbound
//! streams, asynchronous transfers), all of them reactors. Handlers share [`Core`]; the threads
//! themselves belong to [`Agent`], so that no handler can keep its own thread alive.

use crate::address;
use crate::builder::AgentBuilder;
use crate::config::{Checksum, Config};
use crate::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Unquiet;
use crate::notify::Notification;
use crate::peer::Peer;
use crate::reactor::{self, Cause, Cx, Handler, LINGER, Next, Reactor, Threads, now};
use crate::session::accept::Listener;
use crate::session::channel::MessageHandler;
use crate::session::sessions::{Identity, Sessions, SuspendTimer};
use crate::stats::Stats;
use crate::suspend::SuspendDetector;
use crate::sync::{Arc, Condvar, Mutex};
use crate::transfer::slot::Slot;
use crate::transport::service::{Directory, Startup};
use crate::transport::{Services, Transports};
use crate::users::Users;
use kvferry_proto::auth::SECRET_LEN_MIN;
use kvferry_proto::{Incarnation, Secret, WireCode};
use kvferry_sys::socket::Socket;
use kvferry_sys::{fd, random};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// The longest time that a shutdown waits until the close messages to the peers are written.
const CLOSE_MESSAGES_MAX: Duration = Duration::from_millis(200);

struct Inner {
    core: Arc<Core>,
    sessions: Arc<Sessions>,
    control: Reactor,
    io: Vec<Reactor>,
    config: Config,
    stage: Mutex<Stage>,
    stopped: Condvar,
    /// See [`Agent::take_warning`].
    warning: Mutex<Option<String>>,
}

/// Progress of an agent's shutdown.
#[derive(Clone, Copy)]
enum Stage {
    Running,
    /// The shutdown runs on this thread.
    Stopping(ThreadId),
    Stopped,
}

impl Inner {
    /// Every call returns when the agent is shut down. Exceptions: a call on one of the agent's
    /// threads and a call from within the shutdown return at once, because the shutdown waits for them.
    fn shutdown(&self) {
        if self.claim_shutdown() {
            self.run_shutdown();
        }
    }

    /// True for the first caller, which then calls [`Inner::run_shutdown`]. Other callers wait as in [`Inner::shutdown`].
    fn claim_shutdown(&self) -> bool {
        let me = thread::current().id();
        let mut stage = self.stage.lock();
        loop {
            match *stage {
                Stage::Running => {
                    *stage = Stage::Stopping(me);
                    return true;
                }
                Stage::Stopped => return false,
                Stage::Stopping(by) if by == me || self.is_own_thread() => return false,
                Stage::Stopping(_) => {
                    stage = self.stopped.wait(stage, None);
                }
            }
        }
    }

    fn run_shutdown(&self) {
        // This thread may be another one than the caller of `claim_shutdown`.
        *self.stage.lock() = Stage::Stopping(thread::current().id());
        self.stop();
        *self.stage.lock() = Stage::Stopped;
        self.stopped.notify_all();
    }

    /// Refuses further calls.
    fn close(&self) {
        self.core.close();
        self.core.inbox.close();
    }

    fn is_own_thread(&self) -> bool {
        self.control.is_current() || self.io.iter().any(Reactor::is_current)
    }

    fn stop(&self) {
        self.close();
        self.sessions.close_all(WireCode::Shutdown, Error::shutdown);
        // The control thread runs commands in order: when it runs the marker, it has written the
        // close messages.
        let written = Slot::new();
        let marker = Marker(Some(Arc::clone(&written)));
        self.control.remote().add(self.control.remote().token(), Box::new(marker));
        let _ = written.wait(now() + CLOSE_MESSAGES_MAX, None);
        let until = now() + self.core.settings.silence;
        let threads = || std::iter::once(&self.control).chain(&self.io);
        // All at once: one that hangs takes nothing of the time in which the others end.
        threads().for_each(Reactor::tell_to_stop);
        for thread in threads() {
            if !thread.stop_by(until) {
                tracing::error!("a thread of the agent hangs in a copy; it is left behind");
            }
        }
        self.sessions.clear();
        let memory = &self.core.memory;
        memory.regions.close();
        let regions = memory.regions.clear();
        // A thread that hangs has taken all of the time, which is not the fault of the others.
        let until = until.max(now() + self.core.settings.check_timeout());
        let Unquiet { stuck, copied, occupied } = memory.quiesce(&regions, true, until);
        if !stuck.is_empty() {
            tracing::error!(
                threads = stuck.len(),
                "the agent is shut down, but threads hang in copies to or from registered memory; do not \
                 reuse it"
            );
        }
        if let Some(region) = copied.or_else(|| memory.regions.wait_for_others(&regions, until)) {
            tracing::error!(
                %region,
                "the agent is shut down, but a copy of a device or a file has not ended, a transport still \
                 holds the memory, or another thread still unregisters it; do not reuse the \
                 region's memory"
            );
        }
        if let Some(copier) = occupied.first() {
            tracing::error!(
                peer = %copier.name(),
                "the agent is shut down, but a process of this host may still write to its \
                 memory: the process does not answer; do not reuse the memory until it exits"
            );
        }
        memory.regions.left(&regions);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.core.was_forked() {
            // A thread of the parent may have held any lock at the fork, and no thread of the child
            // releases it. So take no lock, and leak every value whose drop might take one.
            self.control.abandon();
            self.io.iter_mut().for_each(Reactor::abandon);
            std::mem::forget((Arc::clone(&self.core), Arc::clone(&self.sessions)));
            return;
        }
        self.shutdown();
    }
}

/// Fills its slot when the control thread has run all commands before it.
struct Marker(Option<Arc<Slot<()>>>);

impl Handler for Marker {
    fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
        if let Some(slot) = self.0.take() {
            slot.fill(());
        }
        Next::Close
    }
}

/// One kvferry endpoint in a process: registered memory, sessions with peers, transfers.
///
/// Clones are the same agent. It is shut down by [`Agent::shutdown`], or when the last clone is
/// dropped, by the thread that drops it. All methods may be called from any thread.
///
/// ```
/// use kvferry::{Access, Agent, Batch, Options};
///
/// let prefill = Agent::builder().name("prefill").start()?;
/// let decode = Agent::builder().name("decode").start()?;
/// let from = prefill.allocate(4096, Access::READ)?;
/// let to = decode.allocate(4096, Access::WRITE)?;
/// from.write_at(0, b"key and value")?;
///
/// let peer = prefill.peer(decode.advertised())?;
/// let mut batch = Batch::new();
/// batch.push(&from, 0, &to.remote(), 0, 4096)?;
/// peer.write(&batch, &Options::default())?;
///
/// let mut bytes = [0; 13];
/// to.read_at(0, &mut bytes)?;
/// assert_eq!(&bytes, b"key and value");
/// # Ok::<(), kvferry::Error>(())
/// ```
#[derive(Clone)]
pub struct Agent(Arc<Inner>);

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent")
            .field("name", &self.name())
            .field("incarnation", &self.incarnation())
            .field("address", &self.advertised())
            .finish_non_exhaustive()
    }
}

impl Agent {
    /// A builder. Settings that it does not set come from the environment variables of [`Config`].
    pub fn builder() -> AgentBuilder {
        AgentBuilder::default()
    }

    /// Starts an agent: opens its port and starts one control thread and the I/O threads.
    ///
    /// # Errors
    /// `InvalidArgument` if a setting is out of range, or there is no secret and the environment variable
    /// `KVFERRY_REQUIRE_SECRET` demands one; `Io` if the port can't be opened, a thread can't be started, or, on loopback
    /// without a secret, the kernel tells the users of connections and fails to.
    pub fn start(config: Config) -> Result<Self> {
        config.check()?;
        must_have_secret(std::env::var_os(REQUIRE_SECRET), config.secret.is_some())?;
        fd::install_fork_handlers()
            .map_err(|e| Error::io("the process has no file descriptor left", e))?;
        let listen = config.listen_addr()?;
        let socket = Socket::listen(listen).map_err(|e| Error::io("can't listen", e))?;
        let local_addr = socket
            .local_addr()
            .map_err(|e| Error::io("the local address of the port can't be read", e))?;
        let (advertised, _) = address::advertised(config.advertise.as_deref(), local_addr)?;
        let users = Users::new(local_addr, config.secret.is_some())?;
        let is_open = config.secret.is_none() && !users.is_on();
        let warning = is_open.then(|| warn_once_that_open(local_addr)).flatten();
        let warning = Mutex::new(warning.or_else(|| warn_if_short(config.secret.as_ref())));

        let start = |name: String, linger: Duration| {
            Reactor::start(name, linger).map_err(|e| Error::io("a thread can't be started", e))
        };
        let control = start("kvferry-control".into(), Duration::ZERO)?;
        let threads = |name: &str, count: usize| {
            let each = (0..count).map(|i| start(format!("kvferry-{name}-{i}"), LINGER));
            each.collect::<Result<Vec<_>>>()
        };
        let io = threads("io", config.io_threads())?;
        let copy = threads("copy", config.copy_threads())?;
        let remotes = |of: &[Reactor]| of.iter().map(|r| r.remote().clone()).collect();
        let threads = Threads::new(control.remote().clone(), remotes(&io), remotes(&copy));
        let io: Vec<_> = io.into_iter().chain(copy).collect();
        let random =
            random::bytes().map_err(|e| Error::io("the kernel returned no random bytes", e))?;
        let core = Arc::new(Core::new(
            Incarnation(u128::from_le_bytes(random)),
            config.settings(),
            config.sizing(),
            threads,
            SuspendDetector::new(config.silence(), now()),
            users,
        ));
        let identity = Identity {
            secret: config.secret.clone(),
            checksum: config.checksum,
            advertised,
            local_addr,
        };
        let speaks_native = config.transports.has_native();
        let sessions = Sessions::new(Arc::clone(&core), identity, speaks_native);
        let (stage, stopped) = (Mutex::new(Stage::Running), Condvar::new());
        // From here on a start that fails drops it, which stops its threads.
        let inner = Inner { core, sessions, control, io, config, stage, stopped, warning };
        let agent = Self(Arc::new(inner));
        let (core, sessions) = (agent.core(), &agent.0.sessions);
        let directory: Arc<dyn Directory> = Arc::clone(sessions) as _;
        let (config, advertised) = (&agent.0.config, agent.advertised());
        let startup = Startup {
            core,
            settings: &config.transport_settings,
            has_secret: config.secret.is_some(),
            must_check: config.checksum == Checksum::On,
            speaks_native,
            local_addr,
            advertised,
            directory: &directory,
        };
        sessions.set_services(Services::start(config.transports, &startup)?);

        let remote = &core.threads.control;
        remote.add(reactor::FIRST, Box::new(SuspendTimer::new(Arc::downgrade(sessions))));
        let token = remote.token();
        remote.add(token, Box::new(Listener::new(sessions, socket, token)));
        tracing::info!(
            name = agent.name(), incarnation = %core.incarnation, listening = %local_addr,
            advertised, "agent started"
        );
        Ok(agent)
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.0.core
    }

    pub(crate) fn services(&self) -> &Services {
        self.0.sessions.services()
    }

    #[cfg(test)]
    pub(crate) fn sessions(&self) -> &Arc<Sessions> {
        &self.0.sessions
    }

    /// The agent's name, 1 to 256 bytes. Peers see it in [`PeerSummary`](crate::PeerSummary) and in
    /// notifications.
    pub fn name(&self) -> &str {
        &self.core().settings.name
    }

    /// The random id that this agent drew when it started. A restarted agent has another one.
    pub fn incarnation(&self) -> Incarnation {
        self.core().incarnation
    }

    /// The address that the agent listens on, with the port that the kernel chose.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.sessions.identity.local_addr
    }

    /// The `host:port` that the agent tells its peers; pass it to [`Agent::peer`].
    pub fn advertised(&self) -> &str {
        &self.0.sessions.identity.advertised
    }

    /// The configuration that the agent was started with, the secret included.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// The transports that the agent may use.
    pub fn transports(&self) -> Transports {
        self.0.config.transports
    }

    /// Sets the handler of the messages that peers send over their [`crate::Channel`]s.
    ///
    /// Set it before the agent connects to a peer and before peers know its address. For sessions
    /// that exist already, [`MessageHandler::began`] is not called; a message that arrives while there
    /// is no handler is refused, which ends its session.
    ///
    /// # Errors
    /// `InvalidArgument` if the agent has a handler.
    pub fn set_message_handler(&self, handler: Arc<dyn MessageHandler>) -> Result<()> {
        self.core().check()?;
        if self.0.sessions.set_message_handler(handler) {
            return Ok(());
        }
        let what = "the agent has a message handler already";
        Err(Error::invalid(what))
    }

    /// A peer by its `host:port`. Sends nothing: the first transfer, or [`Peer::connect`], connects.
    ///
    /// Blocks while a host name is resolved.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unreachable` if the address can't be resolved.
    pub fn peer(&self, address: &str) -> Result<Peer> {
        self.core().check()?;
        let state = self.0.sessions.peer(address)?;
        Ok(Peer::new(Arc::clone(self.core()), state))
    }

    /// Takes all notifications that have arrived, oldest first. Does not block.
    pub fn notifications(&self) -> Vec<Notification> {
        self.core().inbox.drain()
    }

    /// Takes the next notification. Waits for it for `timeout` at most, or without limit if `timeout`
    /// is `None`. Returns `None` if no notification came in time.
    ///
    /// # Errors
    /// `Shutdown` when the agent is shut down and all notifications have been taken; a shutdown also
    /// ends a wait.
    pub fn wait_notification(
        &self,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Option<Notification>> {
        match self.core().check() {
            Err(e) if e.kind() == ErrorKind::Forked => Err(e),
            _ => self.core().inbox.wait(timeout.into().unwrap_or(Duration::MAX)),
        }
    }

    /// A descriptor that is readable while notifications are queued.
    ///
    /// # Errors
    /// `Io` if the process has no descriptor left.
    pub fn notification_fd(&self) -> Result<BorrowedFd<'_>> {
        self.core().check()?;
        self.core().inbox.event_fd()
    }

    /// A warning for the operator: every host that reaches the agent's port has access to its memory. The
    /// first such agent of a process has one, and returns it once. It is also logged, but a log
    /// exists only where the program made one, so bindings pass it on.
    pub fn take_warning(&self) -> Option<String> {
        self.0.warning.lock().take()
    }

    /// A snapshot of the counters and gauges.
    pub fn stats(&self) -> Stats {
        let mut stats = self.core().counters.snapshot();
        stats.regions = self.core().memory.regions.count() as u64;
        stats.peer_memory_bytes = self.core().peer_memory.held() as u64;
        stats.gates = self.core().memory.gates.live() as u64;
        stats.regions_quarantined = self.core().memory.regions.quarantined() as u64;
        self.services().count(&mut stats);
        stats
    }

    /// Ends every session, fails every transfer, unregisters every region, joins the threads.
    /// When it returns, no thread of this agent touches registered memory.
    ///
    /// May be called more than once, by any thread; every call waits until the agent is shut down,
    /// except a call on one of the agent's threads, as from a callback: it returns at once, other
    /// calls fail from then on, and a thread of its own shuts the agent down: until that is done,
    /// [`Region::is_registered`] is true and copiers may touch the memory. Takes at most 0.2 s plus
    /// the silence limit. A region that a device or a process of this host may still touch after
    /// that is logged, and [`Region::is_quarantined`] returns true for it.
    ///
    /// [`Region::is_registered`]: crate::Region::is_registered
    /// [`Region::is_quarantined`]: crate::Region::is_quarantined
    pub fn shutdown(&self) {
        if self.core().was_forked() || !self.0.claim_shutdown() {
            return;
        }
        if self.0.is_own_thread() {
            self.0.close();
            let inner = Arc::clone(&self.0);
            match kvferry_sys::thread::spawn("kvferry-end".into(), move || inner.run_shutdown()) {
                Ok(_) => return,
                Err(e) => {
                    tracing::warn!(error = %e, "no thread can be started for a shutdown from a callback: it runs on the callback's thread")
                }
            }
        }
        self.0.run_shutdown();
    }
}

/// Logs and returns a warning, once per process, if the secret can be guessed by trying.
fn warn_if_short(secret: Option<&Secret>) -> Option<String> {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !secret.is_some_and(Secret::is_short) || WARNED.swap(true, Ordering::Relaxed) {
        return None;
    }
    let warning = format!(
        "the secret of kvferry has fewer than {SECRET_LEN_MIN} bytes: a process that an agent connects to \
         can find it by trying; make one with `openssl rand -hex 32`"
    );
    tracing::warn!("{warning}");
    Some(warning)
}

/// Makes agents without a secret an error, however they are configured.
const REQUIRE_SECRET: &str = "KVFERRY_REQUIRE_SECRET";

/// `required` is the value of [`REQUIRE_SECRET`]. One that can't be read is an error: it may have been
/// meant as yes.
fn must_have_secret(required: Option<OsString>, secret: bool) -> Result<()> {
    let required = required.unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let what = match &*required {
        "" | "0" | "false" | "off" => return Ok(()),
        "1" | "true" | "on" if secret => return Ok(()),
        "1" | "true" | "on" => "the agent has no secret, and KVFERRY_REQUIRE_SECRET demands one",
        _ => "KVFERRY_REQUIRE_SECRET must be 1 or 0",
    };
    Err(Error::invalid(format!("{what}; set KVFERRY_SECRET_FILE")))
}

/// Logs and returns a warning, once per process: the port gives every host, or every user of this
/// host, access to registered memory.
fn warn_once_that_open(addr: SocketAddr) -> Option<String> {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if WARNED.swap(true, Ordering::Relaxed) {
        return None;
    }
    let who = if addr.ip().to_canonical().is_loopback() {
        "any user of this host"
    } else {
        "any process that reaches this port"
    };
    let warning = format!(
        "kvferry listens on {addr} without a secret: {who} can read and write registered memory; set \
         KVFERRY_SECRET_FILE"
    );
    tracing::warn!("{warning}");
    Some(warning)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Access;
    use crate::memory::user::tests::Clinging;
    use kvferry_sys::poll::Interest;
    use std::sync::mpsc;

    #[test]
    fn an_agent_without_a_secret_is_refused_where_the_environment_demands_one() {
        let demanded = |value: &str, secret| must_have_secret(Some(value.into()), secret);
        assert!(demanded("1", true).is_ok() && demanded("0", false).is_ok());
        assert!(must_have_secret(None, false).is_ok() && demanded("", false).is_ok());
        for value in ["1", "true", "on", "yes please"] {
            let refused = demanded(value, false).expect_err("there is no secret");
            assert!(refused.to_string().contains("KVFERRY_REQUIRE_SECRET"), "{refused}");
        }
    }

    #[test]
    fn the_first_short_secret_of_a_process_has_a_warning_and_a_long_one_has_none() {
        let [short, long] = [15, 16].map(|len| Secret::new(vec![7; len]).expect("some bytes"));
        assert_eq!(warn_if_short(None), None);
        assert_eq!(warn_if_short(Some(&long)), None);
        assert!(warn_if_short(Some(&short)).is_some_and(|text| text.contains("16 bytes")));
        assert_eq!(warn_if_short(Some(&short)), None);
    }

    #[test]
    fn the_first_open_port_of_a_process_has_a_warning_and_others_have_none() {
        let at = |addr: &str| addr.parse().expect("an address");
        let first = warn_once_that_open(at("127.0.0.1:1")).expect("the first");
        assert!(
            first.contains("127.0.0.1:1") && first.contains("any user of this host"),
            "{first}"
        );
        assert_eq!(warn_once_that_open(at("0.0.0.0:2")), None);
    }

    /// Holds its thread until the other end of the channel is dropped.
    struct Hangs(Option<mpsc::Sender<()>>, mpsc::Receiver<()>);

    impl Handler for Hangs {
        fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
            drop(self.0.take());
            let _ = self.1.recv();
            Next::Close
        }
    }

    /// Says when it is called, and stays.
    struct Stays(mpsc::Sender<()>);

    impl Handler for Stays {
        fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
            let _ = self.0.send(());
            Next::Wait { interest: Interest::None, deadline: None }
        }
    }

    #[test]
    fn a_thread_that_hangs_takes_no_time_of_the_others_when_the_agent_is_shut_down() {
        let silence = Duration::from_secs(4);
        let agent = Agent::builder().silence(silence).start().expect("an agent");
        let threads = &agent.core().threads;
        let io = threads.io();
        let (stays, is_called) = mpsc::channel();
        io.add(io.token(), Box::new(Stays(stays)));
        is_called.recv().expect("the thread runs");
        let ((hangs, is_held), (release, is_released)) = (mpsc::channel(), mpsc::channel());
        let control = &threads.control;
        control.add(control.token(), Box::new(Hangs(Some(hangs), is_released)));
        assert!(is_held.recv().is_err(), "it has dropped its end");
        agent.shutdown();
        // The thread has ended: its handlers are dropped.
        assert_eq!(is_called.try_recv(), Err(mpsc::TryRecvError::Disconnected));
        drop(release);
    }

    #[test]
    fn i2_a_region_that_a_transport_still_holds_after_a_shutdown_is_in_quarantine() {
        let builder = Agent::builder().silence(Duration::from_millis(100));
        let agent = builder.start().expect("an agent");
        let region = agent.allocate(4096, Access::READ_WRITE).expect("memory");
        let key = region.0.keys.get(Clinging::default);
        agent.shutdown();
        assert!(region.is_quarantined());
        assert_eq!(agent.stats().regions_quarantined, 1);
        key.let_go.store(true, Ordering::SeqCst);
        assert!(!region.is_quarantined());
        assert_eq!(agent.stats().regions_quarantined, 0);
    }

    #[test]
    fn an_agent_on_loopback_warns_only_where_users_can_not_be_told_apart() {
        let agent = Agent::builder().listen(([127, 0, 0, 1], 0)).start().expect("an agent");
        assert!(agent.take_warning().is_none() || !agent.core().users.is_on());
    }
}
