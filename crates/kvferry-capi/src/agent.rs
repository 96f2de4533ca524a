//! Agents.

use crate::error::kvferry_error;
use crate::failure::{self, Failure};
use crate::guard;
use crate::handles;
use crate::structs::{self, Versioned};
use kvferry::{Agent, Checksum, Config, ErrorKind, Secret, Transports};
use std::ffi::{c_char, c_int};

/// One kvferry endpoint in a process. A handle, not an address.
#[derive(Debug)]
pub struct kvferry_agent(());

/// The choice of the environment variable `KVFERRY_CHECKSUM`, else on between hosts and off on one host.
pub const KVFERRY_CHECKSUM_DEFAULT: c_int = 0;
/// Payload carries CRC32C checksums with every peer that supports them.
pub const KVFERRY_CHECKSUM_ON: c_int = 1;
/// No checksums, unless the peer requires them.
pub const KVFERRY_CHECKSUM_OFF: c_int = 2;

/// Settings of an agent. Set `size` to `sizeof(kvferry_agent_options)`, and the rest to zero: a zero or
/// NULL is what the environment variables say (`KVFERRY_LISTEN`, …), else the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_agent_options {
    pub size: usize,
    /// The name that peers see, 1 to 256 bytes.
    pub name: *const c_char,
    /// `host:port` to listen on. Port 0 lets the kernel choose. Default: `127.0.0.1:0`.
    pub listen: *const c_char,
    /// `host` or `host:port` that peers are told.
    pub advertise: *const c_char,
    /// The secret, shared by all agents that may connect to each other. NULL with a `secret_len` that is
    /// not 0 is refused: it is a key that could not be loaded, not the wish for none.
    pub secret: *const u8,
    pub secret_len: usize,
    /// Names of transports, separated by commas. Default: all.
    pub transports: *const c_char,
    /// `auto`, `uring` or `posix`.
    pub file_engine: *const c_char,
    /// A `KVFERRY_CHECKSUM_`.
    pub checksum: i32,
    /// Threads for inbound streams and asynchronous transfers, 1 to 64. Default: half of the cores.
    pub io_threads: u32,
    /// Data streams to one peer at most, 1 to 64.
    pub streams_per_peer: u32,
    /// 1: accept stock Mooncake peers, on a second port.
    pub mooncake: u32,
    /// How long a peer may be silent during a transfer, in milliseconds. Default: 3 000.
    pub silence_ms: u64,
    /// The time limit of calls that set none, in milliseconds. Default: 30 000.
    pub timeout_ms: u64,
}

// SAFETY: `repr(C)`, begins with its size, and holds numbers and addresses only.
unsafe impl Versioned for kvferry_agent_options {}

/// # Safety
/// The pointers in `options` are null or what the structure says.
unsafe fn config(options: &kvferry_agent_options) -> Result<Config, Failure> {
    kvferry_mooncake::link();
    let mut config = Config::from_env()?;
    let set = |to: &mut Option<String>, from, what| {
        // SAFETY: the caller's promise.
        let text = unsafe { guard::optional_text(from, what) }?;
        if let Some(text) = text {
            *to = Some(text.to_owned());
        }
        Ok::<(), Failure>(())
    };
    let mut name = None;
    set(&mut name, options.name, "the agent's name")?;
    config.name = name.unwrap_or(config.name);
    set(&mut config.listen, options.listen, "the address to listen on")?;
    set(&mut config.advertise, options.advertise, "the advertised address")?;
    let mut transports = None;
    set(&mut transports, options.transports, "the list of transports")?;
    if let Some(names) = transports {
        config.transports = Transports::parse(&names)?;
    }
    let mut engine = None;
    set(&mut engine, options.file_engine, "the file engine")?;
    if let Some(engine) = engine {
        config.transport_settings.set("file_engine", engine)?;
    }
    if !options.secret.is_null() || options.secret_len != 0 {
        // SAFETY: the caller's promise.
        let secret = unsafe { guard::array(options.secret, options.secret_len, "the secret") }?;
        let secret = Secret::new(secret);
        config.secret = Some(secret.ok_or_else(|| Failure::invalid("the secret has no bytes"))?);
    }
    config.checksum = match options.checksum {
        KVFERRY_CHECKSUM_DEFAULT => config.checksum,
        KVFERRY_CHECKSUM_ON => Checksum::On,
        KVFERRY_CHECKSUM_OFF => Checksum::Off,
        other => return Err(Failure::invalid(format!("{other} is no KVFERRY_CHECKSUM_"))),
    };
    let number = |wished: u32, default| if wished == 0 { default } else { Some(wished as usize) };
    config.io_threads = number(options.io_threads, config.io_threads);
    config.streams_per_peer = number(options.streams_per_peer, config.streams_per_peer);
    if options.mooncake != 0 {
        config.transport_settings.set("mooncake", true)?;
    }
    if options.silence_ms != 0 {
        config.silence_ms = options.silence_ms;
    }
    if options.timeout_ms != 0 {
        config.timeout_ms = options.timeout_ms;
    }
    Ok(config)
}

/// Starts an agent: opens its port and starts its threads. `options` may be NULL.
///
/// Any thread. A forked child starts agents of its own.
///
/// # Safety
/// `options` and `error` are null or structures whose field `size` is right; `agent` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_agent_start(
    options: *const kvferry_agent_options,
    agent: *mut *mut kvferry_agent,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        // SAFETY: the caller's promise; the place is tried before anything is started.
        let options = unsafe {
            guard::store(agent, std::ptr::null_mut(), "the place for the agent")?;
            structs::read(options, "the agent's options")?
        };
        crate::log::prepare();
        // SAFETY: the caller's promise.
        let config = unsafe { config(&options) }?;
        let started = Agent::start(config)?;
        crate::log::warn(started.take_warning());
        let started = handles::add(started);
        // SAFETY: the caller's promise.
        unsafe { guard::store(agent, handles::pointer(started), "the place for the agent") }?;
        Ok(0)
    })
}

/// Ends every session, fails every transfer and unregisters every region. Takes at most 0.2 s plus the
/// silence limit. The handle stays valid; other calls with the agent return `KVFERRY_SHUTDOWN`.
///
/// Any thread, more than once. From a callback on a thread of the agent it returns at once, and a thread of its
/// own goes on; a later call waits for it. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_agent_shutdown(
    agent: *mut kvferry_agent,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        handles::look_up::<Agent, _>(agent)?.shutdown();
        Ok(0)
    })
}

/// Shuts the agent down and frees the handle. Handles of its regions, peers, files and transfers stay
/// valid and are freed on their own, before or after.
///
/// Any thread; not from a callback. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_agent_free(
    agent: *mut kvferry_agent,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        handles::take::<Agent, _>(agent)?.shutdown();
        Ok(0)
    })
}

/// Copies the `host:port` that peers connect to, with its NUL. 300 bytes are enough for every address.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `buffer` has `capacity` bytes; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_agent_address(
    agent: *const kvferry_agent,
    buffer: *mut c_char,
    capacity: usize,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let agent = handles::look_up::<Agent, _>(agent)?;
        // SAFETY: the caller's promise.
        unsafe { guard::store_text(agent.advertised(), buffer, capacity, "the address") }?;
        Ok(0)
    })
}

/// Copies the random id that the agent drew when it started, 16 bytes. A restarted agent has another.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `id` has 16 bytes; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_agent_incarnation(
    agent: *const kvferry_agent,
    id: *mut u8,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let agent = handles::look_up::<Agent, _>(agent)?;
        let bytes = agent.incarnation().0.to_le_bytes();
        // SAFETY: the caller's promise; arrays of bytes have no alignment.
        unsafe { guard::store(id.cast::<[u8; 16]>(), bytes, "the place for the id") }?;
        Ok(0)
    })
}

/// Copies the agent's counters with their NUL: a JSON object of numbers by name, as in
/// `{"transfers_started":7, …}`. It has those of each GPU with registered memory, too, for all agents of the
/// process: `gpu0_bytes_out` and so on. 4096 bytes are enough without a GPU, and 2048 more for each GPU; with fewer,
/// the error says how many. Names may be added, and their order may change.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `buffer` has `capacity` bytes; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_agent_stats(
    agent: *const kvferry_agent,
    buffer: *mut c_char,
    capacity: usize,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let agent = handles::look_up::<Agent, _>(agent)?;
        let text = stats(&agent)?;
        // SAFETY: the caller's promise.
        unsafe { guard::store_text(&text, buffer, capacity, "the text of the counters") }?;
        Ok(0)
    })
}

/// The counters of an agent and of the process's GPUs, as JSON.
fn stats(agent: &Agent) -> Result<String, Failure> {
    let internal = |error: serde_json::Error| {
        Failure::new(failure::code(ErrorKind::Internal), error.to_string())
    };
    let mut counters = serde_json::to_value(agent.stats()).map_err(internal)?;
    if let Some(counters) = counters.as_object_mut() {
        for (name, value) in kvferry_cuda::Gpu::named_counters() {
            counters.insert(name, value.into());
        }
    }
    serde_json::to_string(&counters).map_err(internal)
}
