//! The block manager: which blocks of KV a sequence has, and the copies to host memory and directories that follow.
//!
//! Calls that take microseconds keep the interpreter's lock, as those of `connector` do. The driver's threads never take
//! it, and only attached threads hold the manager's lock.

use crate::blocking::{self, Stop, seconds};
use crate::connector::ints::Ids;
use crate::error;
use crate::memory::{Region, room};
use crate::retention::RetentionConfig;
use crate::shared::Shared;
use kvferry::ErrorKind;
use kvferry_blocks::{
    BlockManager as Manager, Config, Diff, Error, Event, EventKind, GroupConfig, Key, Match,
    Request, Tier, Usage,
};
use kvferry_offload::{Driver, Options, Pages, Piece, Stats};
use kvferry_store::Namespace;
use kvferry_sys::sync::Mutex;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// A group as Python gives it: the memory of its pages, primary blocks, secondary blocks.
type Group<'py> = (Vec<Bound<'py, Region>>, u32, u32);

/// The keys of a prompt's first blocks.
#[derive(Default)]
struct Keys(Vec<Key>);

impl FromPyObject<'_, '_> for Keys {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let mut keys = Vec::with_capacity(room(obj.len()?));
        for item in obj.try_iter()? {
            let item = item?;
            let bytes = item
                .cast::<PyBytes>()
                .map_err(|_| {
                    PyTypeError::new_err("expected a sequence of keys, each of them bytes")
                })?
                .as_bytes();
            let number = u128::from_be_bytes(bytes.try_into().map_err(|_| {
                let what = format!("key {} has {} bytes, not 16", keys.len(), bytes.len());
                error::invalid(obj.py(), &what)
            })?);
            keys.push(Key([(number >> 64) as u64, number as u64]));
        }
        Ok(Self(keys))
    }
}

fn key_bytes<'py>(py: Python<'py>, key: Key) -> Bound<'py, PyBytes> {
    PyBytes::new(py, key.0.map(u64::to_be_bytes).as_flattened())
}

/// A manager, what makes its copies, and the agent of its pages.
struct Open {
    state: Mutex<Manager>,
    driver: Arc<Driver>,
    /// Copies whose ends the manager knows.
    ended: AtomicU64,
    is_closed: AtomicBool,
    agent: Arc<Shared>,
}

impl Open {
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.agent.agent(py)?;
        match self.is_closed.load(Relaxed) {
            true => Err(error::new(py, ErrorKind::Shutdown, "the block manager is closed")),
            false => Ok(()),
        }
    }

    /// Tells the manager which copies have ended, and starts those that it asks for.
    fn settle(&self, manager: &mut Manager) {
        for (transfer, outcome) in self.driver.take_finished(usize::MAX) {
            let known = manager.finished(transfer, outcome, now_ms());
            debug_assert_eq!(known, Ok(()), "the driver names each transfer once");
            self.ended.fetch_add(1, Relaxed);
        }
        self.begin(manager);
    }

    /// Starts the copies that the manager asks for.
    fn begin(&self, manager: &mut Manager) {
        self.driver.submit(std::iter::from_fn(|| manager.poll_action()));
    }
}

impl Stop for Open {
    fn stop(&self) {
        self.is_closed.store(true, Relaxed);
        if !self.agent.is_forked() {
            self.driver.close();
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if self.agent.is_forked() {
            // A thread of the parent may have held any lock of the driver at the fork: drop nothing.
            return std::mem::forget(Arc::clone(&self.driver));
        }
        // Closing joins native threads: detach meanwhile, if the dropping thread is attached.
        if Python::try_attach(|py| py.detach(|| self.stop())).is_none() {
            self.stop();
        }
    }
}

/// The manager's clock.
fn now_ms() -> u64 {
    kvferry_sys::clock::boottime_ns() / 1_000_000
}

fn exception(py: Python<'_>, why: &Error) -> PyErr {
    let kind = match why {
        Error::OutOfBlocks { .. }
        | Error::AwaitTransfers { .. }
        | Error::NotReady { .. }
        | Error::InUse { .. } => ErrorKind::Busy,
        _ => ErrorKind::InvalidArgument,
    };
    error::new(py, kind, &why.to_string())
}

fn start_exception(py: Python<'_>, why: &kvferry_offload::Error) -> PyErr {
    match why {
        kvferry_offload::Error::Memory(why) => error::exception(py, why),
        kvferry_offload::Error::Store(why) => error::store_exception(py, why),
        _ => error::new(py, ErrorKind::Io, &why.to_string()),
    }
}

/// The agent of the groups' regions, and where their pages are.
fn pages_of(py: Python<'_>, groups: &[Group<'_>]) -> PyResult<(Arc<Shared>, Pages)> {
    let wrong =
        |number: usize, what: &str| Err(error::invalid(py, &format!("group {number}: {what}")));
    let mut agent: Option<&Arc<Shared>> = None;
    let mut seen = HashSet::new();
    let mut pages = Vec::with_capacity(groups.len());
    for (number, (regions, primary_blocks, _)) in groups.iter().enumerate() {
        if regions.is_empty() {
            return wrong(number, "its pages have no memory: give one region or more");
        }
        let mut pieces = Vec::with_capacity(regions.len());
        for region in regions {
            let region = region.get();
            let (len, blocks) = (region.region.len() as u64, u64::from(*primary_blocks));
            if !Arc::ptr_eq(agent.get_or_insert(region.shared()), region.shared()) {
                return wrong(number, "its regions are not of the agent of the others");
            }
            if !seen.insert(region.region.id().0) {
                return wrong(number, &format!("region {} is given twice", region.region.id()));
            }
            if !len.is_multiple_of(blocks) {
                return wrong(
                    number,
                    &format!("a region of {len} bytes is not {blocks} equal parts"),
                );
            }
            let len = len / blocks;
            pieces.push(Piece { region: region.region.clone(), base: 0, stride: len, len });
        }
        pages.push(pieces);
    }
    let agent = agent.ok_or_else(|| error::invalid(py, "no group of pages was given"))?;
    agent.agent(py)?;
    Ok((Arc::clone(agent), Pages::new(pages)))
}

/// The blocks of a new sequence.
#[pyclass(frozen, get_all, module = "kvferry")]
pub(crate) struct Allocation {
    /// Number of the sequence, for all later calls.
    sequence: u64,
    /// Tokens of the prompt that need not be computed, if the copies succeed. At least one is left to compute.
    reused_tokens: u32,
    /// True if the blocks may be used at once.
    is_ready: bool,
    /// Options of the request that it does not get, or None.
    warning: Option<String>,
}

#[pymethods]
impl Allocation {
    fn __repr__(&self) -> String {
        let Self { sequence, reused_tokens, is_ready, .. } = self;
        let ready = if *is_ready { "" } else { " not" };
        format!("<kvferry.Allocation {sequence}: {reused_tokens} tokens reused,{ready} ready>")
    }
}

/// Decides which blocks of KV sequences have, which are reused, offloaded and onboarded, and makes the copies.
#[pyclass(frozen, weakref, module = "kvferry")]
pub(crate) struct BlockManager {
    open: Arc<Open>,
    groups: usize,
    tokens_per_block: u32,
}

impl BlockManager {
    /// Calls the manager with the time, between copies that have ended and copies that begin.
    fn call<T>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Manager, u64) -> Result<T, Error>,
    ) -> PyResult<T> {
        self.open.check(py)?;
        let mut manager = self.open.state.lock();
        self.open.settle(&mut manager);
        let result = call(&mut manager, now_ms());
        // Also after an error: blocks may have been evicted. Copies that have ended by now are left to the next call: a
        // `wait` after an error of this one must not miss them.
        self.open.begin(&mut manager);
        drop(manager);
        result.map_err(|why| exception(py, &why))
    }

    fn no_group(&self, group: u16) -> Error {
        Error::Request(format!("no group {group}: the manager has {}", self.groups))
    }
}

#[pymethods]
impl BlockManager {
    #[new]
    #[pyo3(signature = (
        groups, *, tokens_per_block, secondary_offload_min_priority = 30, partial_reuse = true,
        copy_on_partial_reuse = true, events = 1024, store_bytes = 10 << 30
    ), text_signature = "(groups, *, tokens_per_block, secondary_offload_min_priority=30, partial_reuse=True, copy_on_partial_reuse=True, events=1024, store_bytes=10737418240)")]
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of the Python call")]
    fn new(
        py: Python<'_>,
        groups: Vec<Group<'_>>,
        tokens_per_block: u32,
        secondary_offload_min_priority: u8,
        partial_reuse: bool,
        copy_on_partial_reuse: bool,
        events: usize,
        store_bytes: u64,
    ) -> PyResult<Self> {
        let sizes = groups.iter().map(|&(_, primary_blocks, secondary_blocks)| GroupConfig {
            primary_blocks,
            secondary_blocks,
        });
        let config = Config {
            secondary_offload_min_priority,
            partial_reuse,
            copy_on_partial_reuse,
            events,
            ..Config::new(tokens_per_block, sizes.collect::<Vec<_>>())
        };
        let manager = py.detach(|| Manager::new(&config)).map_err(|why| exception(py, &why))?;
        let (agent, pages) = pages_of(py, &groups)?;
        let secondary: Vec<u32> = groups.iter().map(|group| group.2).collect();
        let options = Options::new(Namespace::new("")).store_bytes(store_bytes);
        let core = agent.agent(py)?;
        let driver = py
            .detach(|| Driver::start(core, pages, &secondary, options))
            .map_err(|why| start_exception(py, &why))?;
        let open = Arc::new(Open {
            state: Mutex::new(manager),
            driver: Arc::new(driver),
            ended: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            agent,
        });
        blocking::stop_at_exit(py, &open);
        Ok(Self { open, groups: groups.len(), tokens_per_block })
    }

    /// Gives a sequence its blocks: the longest prefix of the prompt that all groups have, a part of the block behind it, and
    /// then blocks that are free or evicted.
    ///
    /// `keys`: one for each full block of the prompt. `tokens`: the prompt, for the reuse of a part of a block; or None. `salt`:
    /// what the KV depends on besides the tokens, such as the adapter, as a number: parts of first blocks are reused under the
    /// same salt only. Raises BusyError if blocks are out.
    #[pyo3(signature = (prompt_tokens, keys, *, tokens = None, salt = 0, retention = None))]
    fn allocate(
        &self,
        py: Python<'_>,
        prompt_tokens: u32,
        keys: Keys,
        tokens: Option<Ids>,
        salt: u64,
        retention: Option<&Bound<'_, RetentionConfig>>,
    ) -> PyResult<Allocation> {
        let tokens = tokens.unwrap_or_default();
        let default = kvferry_blocks::RetentionConfig::default();
        let retention = retention.map_or(&default, |given| &given.get().0);
        let request = Request { prompt_tokens, keys: &keys.0, tokens: &tokens.0, salt, retention };
        let made = self.call(py, |manager, now_ms| manager.allocate(&request, now_ms))?;
        Ok(Allocation {
            sequence: made.sequence.into(),
            reused_tokens: made.reused_tokens,
            is_ready: made.is_ready,
            warning: made.warning.map(|warning| warning.to_string()),
        })
    }

    /// Makes room for more tokens of a sequence. Returns how many blocks it has got in each group. It may not be ready then,
    /// even if it was. Raises BusyError if blocks are out; the sequence keeps what it has.
    #[pyo3(signature = (sequence, tokens = 1))]
    fn append(&self, py: Python<'_>, sequence: u64, tokens: u32) -> PyResult<u32> {
        self.call(py, |manager, now_ms| manager.append(sequence.into(), tokens, now_ms))
    }

    /// The first blocks of a sequence are computed, and can be reused from now on. `keys` are those of its blocks from the
    /// first one; `tokens` are the sequence's, or None. Returns how many of its blocks are stored in all groups: fewer than
    /// `keys` while a copy concerns one.
    #[pyo3(signature = (sequence, keys, *, tokens = None))]
    fn store(
        &self,
        py: Python<'_>,
        sequence: u64,
        keys: Keys,
        tokens: Option<Ids>,
    ) -> PyResult<u32> {
        let tokens = tokens.unwrap_or_default();
        self.call(py, |manager, _| manager.store(sequence.into(), &keys.0, &tokens.0))
    }

    /// Ends a sequence, after `store`. Stored blocks stay in the cache until they are evicted. If it was aborted, `keys` are
    /// those of the blocks that are computed.
    #[pyo3(signature = (sequence, keys = Keys::default(), *, tokens = None), text_signature = "($self, sequence, keys=(), *, tokens=None)")]
    fn free(&self, py: Python<'_>, sequence: u64, keys: Keys, tokens: Option<Ids>) -> PyResult<()> {
        let tokens = tokens.unwrap_or_default();
        self.call(py, |manager, now_ms| manager.free(sequence.into(), &keys.0, &tokens.0, now_ms))
    }

    /// Keeps the stored blocks of a sequence in the primary pool until `unpin`, also when it is freed. Returns the number of
    /// the pin. Raises BusyError if the sequence is not ready.
    fn pin(&self, py: Python<'_>, sequence: u64) -> PyResult<u64> {
        self.call(py, |manager, _| manager.pin(sequence.into())).map(u64::from)
    }

    /// Ends a pin.
    fn unpin(&self, py: Python<'_>, pin: u64) -> PyResult<()> {
        self.call(py, |manager, now_ms| manager.unpin(pin.into(), now_ms))
    }

    /// Forgets all stored blocks: after new weights were loaded, no KV of the old ones may be reused. Raises BusyError while a
    /// sequence or a pin is open.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |manager, _| manager.reset())
    }

    /// The numbers of a sequence's pages in a group, in the order of its tokens. There are fewer than before after a copy for
    /// it has failed.
    #[pyo3(signature = (sequence, group = 0))]
    fn blocks(&self, py: Python<'_>, sequence: u64, group: u16) -> PyResult<Vec<u32>> {
        self.call(py, |manager, _| {
            manager.is_ready(sequence.into()).ok_or(Error::UnknownSequence)?;
            let blocks = manager.blocks(sequence.into(), group);
            blocks.map(<[u32]>::to_vec).ok_or_else(|| self.no_group(group))
        })
    }

    /// Whether a sequence's pages may be read and written: no copy concerns them.
    fn is_ready(&self, py: Python<'_>, sequence: u64) -> PyResult<bool> {
        self.call(py, |manager, _| manager.is_ready(sequence.into()).ok_or(Error::UnknownSequence))
    }

    /// Tokens at the start of a sequence that need not be computed. A copy that fails makes them fewer, until the sequence is
    /// ready.
    fn reused_tokens(&self, py: Python<'_>, sequence: u64) -> PyResult<u32> {
        self.call(py, |manager, _| {
            manager.reused_tokens(sequence.into()).ok_or(Error::UnknownSequence)
        })
    }

    /// How many blocks of a prompt, from its beginning, could be reused; and how many of them at least one group would have to
    /// onboard. This is no use of them.
    fn find_prefix(&self, py: Python<'_>, keys: Keys) -> PyResult<(u32, u32)> {
        let found = self.call(py, |manager, _| Ok(manager.find_prefix(&keys.0)));
        found.map(|Match { blocks, secondary_blocks }| (blocks, secondary_blocks))
    }

    /// The blocks of a group's pools by name: `primary_free` and `secondary_free` have no content, `primary_cached` can be
    /// reused or evicted. The others are in use, or under transfer.
    #[pyo3(signature = (group = 0))]
    fn usage<'py>(&self, py: Python<'py>, group: u16) -> PyResult<Bound<'py, PyDict>> {
        let usage =
            self.call(py, |manager, _| manager.usage(group).ok_or_else(|| self.no_group(group)));
        let Usage { primary_free, primary_cached, secondary_free } = usage?;
        let by_name = PyDict::new(py);
        by_name.set_item("primary_free", primary_free)?;
        by_name.set_item("primary_cached", primary_cached)?;
        by_name.set_item("secondary_free", secondary_free)?;
        Ok(by_name)
    }

    /// Waits until a copy has ended. False if none is under way, or `timeout` seconds passed first. Every other call, too,
    /// takes note of copies that have ended.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.open.check(py)?;
        let timeout = timeout.map(|timeout| seconds(py, timeout)).transpose()?;
        let (driver, ended) = (&self.open.driver, &self.open.ended);
        let before = ended.load(Relaxed);
        // Another thread may tell the manager of the end meanwhile, and counts it after it has taken it.
        blocking::wait(py, timeout, |slice| {
            let has_ended = driver.wait(slice) || ended.load(Relaxed) != before;
            (has_ended || driver.under_way() == 0).then_some(())
        })?;
        self.call(py, |_, _| Ok(ended.load(Relaxed) != before))
    }

    /// Takes the events of the cache, as dicts. All have an `id` that counts up, also over events that were dropped, a
    /// `group` and a `kind`: `created` (`primary_blocks`, `secondary_blocks`), `stored` (`key`, `parent` or None, `tokens`,
    /// `priority`), `removed` (`key`) or `updated` (`key`; `tier` and `priority`: the old and the new one, or None if it is
    /// the same).
    fn poll_events<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let events = self.call(py, |manager, now_ms| {
            manager.advance(now_ms);
            Ok(std::iter::from_fn(|| manager.poll_event()).collect::<Vec<_>>())
        })?;
        events.iter().map(|event| event_dict(py, event)).collect()
    }

    /// Counters by name: copies that were made (`offloaded`, `onboarded`, and `copied` within the pages), `bytes` of all
    /// these, `present`: offloads that found their block in a block store, `failed` copies, copies `under_way`, and
    /// `events_dropped`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let events_dropped = self.call(py, |manager, _| Ok(manager.events_dropped()))?;
        let Stats { offloaded, onboarded, copied, failed, bytes, present } =
            self.open.driver.stats();
        let by_name = PyDict::new(py);
        for (name, value) in [
            ("offloaded", offloaded),
            ("onboarded", onboarded),
            ("copied", copied),
            ("failed", failed),
            ("bytes", bytes),
            ("present", present),
            ("under_way", self.open.driver.under_way() as u64),
            ("events_dropped", events_dropped),
        ] {
            by_name.set_item(name, value)?;
        }
        Ok(by_name)
    }

    /// Ends the copies: no page is accessed when this returns. Waits for those that are being made. Later calls raise
    /// ShutdownError; a second close does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.open.agent.agent(py)?;
        py.detach(|| self.open.stop());
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        py.detach(|| self.open.stop());
    }

    fn __repr__(&self) -> String {
        let Self { groups, tokens_per_block, .. } = self;
        format!("<kvferry.BlockManager {groups} groups, {tokens_per_block} tokens per block>")
    }
}

fn event_dict<'py>(py: Python<'py>, event: &Event) -> PyResult<Bound<'py, PyDict>> {
    let tier = |tier| match tier {
        Tier::Primary => "primary",
        Tier::Secondary => "secondary",
    };
    let dict = PyDict::new(py);
    dict.set_item("id", event.id)?;
    dict.set_item("group", event.group)?;
    let kind = match event.kind {
        EventKind::Created { primary_blocks, secondary_blocks } => {
            dict.set_item("primary_blocks", primary_blocks)?;
            dict.set_item("secondary_blocks", secondary_blocks)?;
            "created"
        }
        EventKind::Stored { key, parent, tokens, priority } => {
            dict.set_item("key", key_bytes(py, key))?;
            dict.set_item("parent", parent.map(|parent| key_bytes(py, parent)))?;
            dict.set_item("tokens", tokens)?;
            dict.set_item("priority", priority)?;
            "stored"
        }
        EventKind::Removed { key } => {
            dict.set_item("key", key_bytes(py, key))?;
            "removed"
        }
        EventKind::Updated { key, tier: moved, priority } => {
            dict.set_item("key", key_bytes(py, key))?;
            dict.set_item("tier", moved.map(|Diff { old, new }| (tier(old), tier(new))))?;
            dict.set_item("priority", priority.map(|Diff { old, new }| (old, new)))?;
            "updated"
        }
        _ => "unknown",
    };
    dict.set_item("kind", kind)?;
    Ok(dict)
}
