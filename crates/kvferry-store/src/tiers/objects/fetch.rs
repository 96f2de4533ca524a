//! Fetches: the blocks of a prompt that are missing here are read from the object store and put on the disk.
//!
//! One thread does it. It asks for a window of missing blocks, in the order of the prompt, and for the next one,
//! four times as long, once all of them have arrived: a prompt that the object store does not have costs one
//! request. A window is bounded by its bytes, too: each request may bring so many, and a block that has more is asked
//! for again, alone. Blocks are written in the order of the prompt, up to the first that could not be fetched, so that the
//! policy sees them as it sees those of a put.
//!
//! A block that two prefetches want is asked for once: a *flight*.

use super::content::{HEADER_BYTES, Unusable, Wanted, name_of, verify};
use super::outage::{Direction, Permit};
use super::remembered::Remembered;
use super::{Done, GetResult, Outcome, Shared};
use crate::key::Key;
use crate::log::Block;
use crate::log::format::{bytes_of, pages_of};
use crate::memory::BLOCK_LEN_MAX;
use crate::outcome::Put;
use crate::pending::Promise;
use crate::policy::Retention;
use crate::stats::Counters;
use kvferry_sys::sync::Mutex;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Blocks of a window at most, and how much longer the next one is.
const WINDOW_MAX: usize = 64;
const WINDOW_GROWTH: usize = 4;
/// Bytes of a window of more than one block, at most. They are in memory.
const WINDOW_BYTES: u64 = 32 << 20;
/// Namespaces whose length of blocks is remembered at most.
const LENGTHS_MAX: usize = 1024;
/// Prefetches under way at most, and those that wait. Further ones fetch nothing.
const ACTIVE_MAX: usize = 16;
const WAITING_MAX: usize = 1024;
/// Absent keys that are remembered at most.
const ABSENT_MAX: usize = 1 << 16;
/// Pause between tries of arrived blocks that found no space on the disk.
const NO_ROOM_AGAIN: Duration = Duration::from_millis(2);
/// Milliseconds between two log lines about damaged objects.
const DAMAGED_EVERY_MS: u64 = 10_000;

/// The store that a prefetch brings blocks to.
pub(crate) trait PrefetchTarget: std::fmt::Debug + Send {
    /// Number of leading `blocks` that are in the store.
    fn prefix_of(&self, blocks: &[Wanted]) -> usize;

    fn has(&self, key: &Key) -> bool;

    /// Puts blocks on the disk that were fetched, one behind another in a prompt. What is refused may be tried again
    /// once the keeper has freed space.
    fn write(&self, fetched: &[&Fetched]) -> crate::Result<Put>;

    /// Brings blocks that are on the disk to host memory, if there is such a tier, and ends the prefetch. `here`:
    /// how many are here, from the first.
    fn end(&self, blocks: Vec<Wanted>, here: usize, promise: Promise<usize>);
}

/// State of one call of [`Space::prefetch`](crate::Space::prefetch).
#[derive(Debug)]
pub(crate) struct Prefetch {
    target: Box<dyn PrefetchTarget>,
    blocks: Vec<Wanted>,
    promise: Promise<usize>,
    /// Blocks of the prompt, from its beginning, that are here.
    here: usize,
    /// The most that were.
    reached: usize,
    window: usize,
    /// Blocks of the window, by their place in the prompt.
    asked: Vec<(usize, Answer)>,
    /// Number of blocks in `asked` that have not arrived.
    open: usize,
}

impl Prefetch {
    pub(crate) fn new(
        target: Box<dyn PrefetchTarget>,
        blocks: Vec<Wanted>,
        promise: Promise<usize>,
    ) -> Self {
        let (here, reached, window) = (0, 0, 1);
        Self { target, blocks, promise, here, reached, window, asked: Vec::new(), open: 0 }
    }

    fn finish(mut self) {
        // Blocks at the beginning may have left again.
        self.here = 0;
        self.look();
        self.target.end(self.blocks, self.here, self.promise);
    }

    /// Looks how much is here.
    fn look(&mut self) {
        self.here += self.target.prefix_of(&self.blocks[self.here..]);
    }

    /// Puts the blocks that have arrived on the disk, up to the first that has not.
    fn take(&mut self) -> crate::Result<WriteProgress> {
        let arrived: Vec<_> = self
            .asked
            .iter()
            .map_while(|(at, answer)| match answer {
                Answer::Block(fetched) => Some((*at, fetched)),
                _ => None,
            })
            .collect();
        let is_whole = arrived.len() == self.asked.len();
        let is_cut = matches!(self.asked.get(arrived.len()), Some((_, Answer::Larger)));
        let is_first_cut = is_cut && arrived.is_empty();
        // Another prefetch may have written some.
        let missing = |(at, _): &(usize, &Arc<Fetched>)| !self.target.has(&self.blocks[*at].key);
        let arrived: Vec<_> = arrived.into_iter().filter(missing).collect();
        let (mut refused, mut failed) = (0, 0);
        for run in arrived.chunk_by(|(one, _), (next, _)| one + 1 == *next) {
            if refused + failed > 0 {
                // What is behind a hole is not written before it.
                refused += run.len();
                continue;
            }
            let fetched: Vec<_> = run.iter().map(|(_, fetched)| fetched.as_ref()).collect();
            let put = self.target.write(&fetched)?;
            refused += put.refused;
            failed += put.failed;
        }
        if refused > 0 && failed == 0 {
            // In a store that is smaller than the prompt, blocks leave for those behind them: that brings nothing.
            let here = self.here + self.target.prefix_of(&self.blocks[self.here..]);
            let did_grow = here > self.reached;
            self.reached = self.reached.max(here);
            return Ok(WriteProgress::NoRoom { did_grow, refused });
        }
        let before = self.here;
        self.asked.clear();
        self.look();
        self.window = if is_cut { 1 } else { (self.window * WINDOW_GROWTH).min(WINDOW_MAX) };
        let did_grow = self.here > before || is_first_cut;
        let is_more = (is_whole || is_cut) && failed == 0 && did_grow;
        Ok(if is_more { WriteProgress::More } else { WriteProgress::End })
    }
}

/// Result of putting blocks that have arrived on the disk.
enum WriteProgress {
    /// There is more to ask for.
    More,
    End,
    /// Some wait in memory for the keeper to free space.
    NoRoom {
        /// More of the prompt is here than ever before.
        did_grow: bool,
        refused: usize,
    },
}

/// A prefetch whose blocks wait for space on the disk.
#[derive(Debug)]
struct Stalled {
    number: u64,
    prefetch: Prefetch,
    /// Time since which the prefetch waits without progress.
    since_ms: u64,
}

/// A block that has arrived and is right.
#[derive(Debug)]
pub(crate) struct Fetched {
    block: Block,
    content: Vec<u8>,
}

impl Fetched {
    /// Record of the block, with `now_s` as the time of its put.
    pub(crate) fn block(&self, now_s: u32) -> Block {
        Block { time: now_s, ..self.block }
    }

    /// Bytes of the block, followed by zeros up to a whole page.
    pub(crate) fn data(&self) -> &[u8] {
        &self.content[HEADER_BYTES..]
    }
}

#[derive(Clone, Debug)]
enum Answer {
    Waiting,
    Missing,
    /// The block has more bytes than there was room for in the window.
    Larger,
    Block(Arc<Fetched>),
}

/// A block that was asked for.
#[derive(Debug)]
struct Flight {
    wanted: Wanted,
    /// Bytes that the block may have.
    len_max: u64,
    /// Kept until the first prefetch that waited has it on the disk.
    answer: Option<Answer>,
    waiters: Vec<u64>,
}

impl Flight {
    /// Bytes of memory that the block takes, at most.
    fn bytes(&self) -> u64 {
        match &self.answer {
            None | Some(Answer::Waiting) => self.len_max,
            Some(Answer::Block(fetched)) => fetched.block.len.into(),
            Some(Answer::Missing | Answer::Larger) => 0,
        }
    }
}

#[derive(Debug)]
enum Event {
    Begin(Box<Prefetch>),
    Ended { key: Key, permit: Permit, outcome: Outcome<GetResult> },
    Stop,
}

#[derive(Debug)]
pub(super) struct Handle {
    events: Sender<Event>,
    /// Prefetches that the thread has not seen yet.
    unseen: Arc<AtomicUsize>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Handle {
    pub(super) fn start(shared: &Arc<Shared>) -> io::Result<Self> {
        let (events, received) = channel();
        let unseen = Arc::new(AtomicUsize::new(0));
        let fetcher = Fetcher::new(Arc::clone(shared), events.clone(), Arc::clone(&unseen));
        let run = move || fetcher.serve(&received);
        let thread = kvferry_sys::thread::spawn("kvferry-store-down".into(), run)?;
        Ok(Self { events, unseen, thread: Mutex::new(Some(thread)) })
    }

    /// Begins a prefetch. After [`Handle::stop`] it ends with `Closed`. While the thread is busy with a slow disk, only
    /// so many wait for it.
    pub(super) fn begin(&self, prefetch: Box<Prefetch>) {
        if self.unseen.fetch_add(1, Relaxed) >= WAITING_MAX {
            self.unseen.fetch_sub(1, Relaxed);
            return prefetch.finish();
        }
        let _ = self.events.send(Event::Begin(prefetch));
    }

    /// Ends prefetches with `Closed`, and the thread. Idempotent.
    pub(super) fn stop(&self) {
        let _ = self.events.send(Event::Stop);
        if let Some(thread) = self.thread.lock().take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

struct Fetcher {
    shared: Arc<Shared>,
    /// Sender for the ends of requests, which hold nothing else of the store.
    events: Sender<Event>,
    unseen: Arc<AtomicUsize>,
    active: FxHashMap<u64, Prefetch>,
    /// Prefetches that wait for space; they count as active, too.
    stalled: Vec<Stalled>,
    waiting: VecDeque<Box<Prefetch>>,
    /// The number of the next prefetch.
    next: u64,
    flights: FxHashMap<Key, Flight>,
    /// Flights whose requests were not made yet.
    unsent: VecDeque<Key>,
    in_flight: usize,
    absent: Remembered,
    lengths: Lengths,
    quiet_until_ms: u64,
}

impl Fetcher {
    fn new(shared: Arc<Shared>, events: Sender<Event>, unseen: Arc<AtomicUsize>) -> Self {
        let absent_ms = u64::try_from(shared.settings.absent_for.as_millis()).unwrap_or(u64::MAX);
        Self {
            shared,
            events,
            unseen,
            active: FxHashMap::default(),
            stalled: Vec::new(),
            waiting: VecDeque::new(),
            next: 0,
            flights: FxHashMap::default(),
            unsent: VecDeque::new(),
            in_flight: 0,
            absent: Remembered::new(ABSENT_MAX, absent_ms),
            lengths: Lengths::default(),
            quiet_until_ms: 0,
        }
    }

    fn serve(mut self, events: &Receiver<Event>) {
        loop {
            let event = match self.stalled.is_empty() {
                true => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => events.recv_timeout(NO_ROOM_AGAIN),
            };
            match event {
                Ok(Event::Begin(prefetch)) => {
                    self.unseen.fetch_sub(1, Relaxed);
                    self.begin(prefetch);
                }
                Ok(Event::Ended { key, permit, outcome }) => {
                    self.in_flight -= 1;
                    let answer = self.judge(key, permit, outcome);
                    self.deliver(key, &answer);
                }
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    for Stalled { number, prefetch, since_ms } in std::mem::take(&mut self.stalled)
                    {
                        self.go_on(number, prefetch, since_ms);
                    }
                }
            }
            self.advance();
        }
    }

    fn count(&self, counter: fn(&Counters) -> &std::sync::atomic::AtomicU64) {
        Counters::add(counter(&self.shared.core.counters), 1);
    }

    fn begin(&mut self, prefetch: Box<Prefetch>) {
        if self.waiting.len() < WAITING_MAX {
            self.waiting.push_back(prefetch);
        } else {
            prefetch.finish();
        }
    }

    /// Starts prefetches and makes requests, as many as there may be.
    fn advance(&mut self) {
        loop {
            while self.active.len() + self.stalled.len() < ACTIVE_MAX
                && let Some(mut prefetch) = self.waiting.pop_front()
            {
                self.next += 1;
                prefetch.look();
                self.go_on(self.next, *prefetch, self.shared.now_ms());
            }
            self.send();
            if self.active.len() + self.stalled.len() >= ACTIVE_MAX || self.waiting.is_empty() {
                return;
            }
        }
    }

    /// Puts what has arrived on the disk and asks for the next window, or ends the prefetch. `since_ms`: since when
    /// what has arrived waits for space.
    fn go_on(&mut self, number: u64, mut prefetch: Prefetch, since_ms: u64) {
        loop {
            if !prefetch.asked.is_empty() {
                let keys: Vec<_> =
                    prefetch.asked.iter().map(|(at, _)| prefetch.blocks[*at].key).collect();
                let taken = prefetch.take();
                if let Ok(WriteProgress::NoRoom { did_grow, refused }) = taken {
                    let now_ms = self.shared.now_ms();
                    let since_ms = if did_grow { now_ms } else { since_ms };
                    let waited = Duration::from_millis(now_ms.saturating_sub(since_ms));
                    if waited < self.shared.settings.no_room_for {
                        return self.stalled.push(Stalled { number, prefetch, since_ms });
                    }
                    let counters = &self.shared.core.counters;
                    Counters::add(&counters.refused, refused);
                    Counters::add(&counters.refused_no_space, refused);
                }
                for key in keys {
                    if self.flights.get(&key).is_some_and(|flight| flight.answer.is_some()) {
                        self.flights.remove(&key);
                    }
                }
                match taken {
                    Ok(WriteProgress::More) => {}
                    Ok(WriteProgress::End | WriteProgress::NoRoom { .. }) => {
                        return prefetch.finish();
                    }
                    Err(e) => return prefetch.promise.finish(Err(e)),
                }
            }
            self.ask(number, &mut prefetch);
            if prefetch.open > 0 {
                self.active.insert(number, prefetch);
                return;
            }
            if prefetch.asked.is_empty() {
                return prefetch.finish();
            }
        }
    }

    /// Bytes of a block, at most.
    fn block_max(&self) -> u64 {
        let geometry = self.shared.core.superblock.geometry;
        u64::from(geometry.max_block_bytes()).min(BLOCK_LEN_MAX)
    }

    /// Asks for the next missing blocks: those behind them that are here are passed over. Together they have
    /// [`WINDOW_BYTES`] at most, or it is one.
    fn ask(&mut self, number: u64, prefetch: &mut Prefetch) {
        let now_ms = self.shared.now_ms();
        let Some(namespace) = prefetch.blocks.first().map(|it| it.namespace) else { return };
        let window = prefetch.window.min(self.lengths.window(namespace));
        let len_max = match window {
            1 => self.block_max(),
            _ => self.block_max().min(WINDOW_BYTES / window as u64),
        };
        let mut room = WINDOW_BYTES;
        for at in prefetch.here..prefetch.blocks.len() {
            let wanted = prefetch.blocks[at];
            if prefetch.asked.len() >= window {
                return;
            }
            if prefetch.target.has(&wanted.key) {
                continue;
            }
            let bytes = self.flights.get(&wanted.key).map_or(len_max, Flight::bytes);
            if !prefetch.asked.is_empty() && bytes > room {
                return;
            }
            room = room.saturating_sub(bytes);
            let is_away = self.shared.gate.lock().look(Direction::Down, now_ms).is_some();
            match self.flights.get_mut(&wanted.key) {
                // Two names of blocks with one key: the second one waits for another time.
                Some(flight) if flight.wanted != wanted => return,
                Some(Flight { answer: Some(answer), .. }) => {
                    prefetch.asked.push((at, answer.clone()));
                    continue;
                }
                Some(flight) => flight.waiters.push(number),
                None if is_away || self.absent.contains(&wanted.key, now_ms) => {
                    if prefetch.asked.is_empty() {
                        self.count(|counters| &counters.fetch_missed);
                    }
                    return;
                }
                None => {
                    let flight = Flight { wanted, len_max, answer: None, waiters: vec![number] };
                    self.flights.insert(wanted.key, flight);
                    self.unsent.push_back(wanted.key);
                }
            }
            prefetch.asked.push((at, Answer::Waiting));
            prefetch.open += 1;
        }
    }

    /// Makes requests, as many as there may be. Where the object store is away, blocks are missing at once.
    fn send(&mut self) {
        while self.in_flight < self.shared.settings.concurrency
            && let Some(key) = self.unsent.pop_front()
        {
            let Some(flight) = self.flights.get(&key) else { continue };
            let name = name_of(flight.wanted.namespace, key);
            let permit = self.shared.gate.lock().admit(Direction::Down, self.shared.now_ms());
            let Some(permit) = permit else {
                self.count(|counters| &counters.fetch_missed);
                self.deliver(key, &Answer::Missing);
                continue;
            };
            let len_max = flight.len_max + HEADER_BYTES as u64;
            let events = self.events.clone();
            let done = Done::new(move |outcome| {
                let _ = events.send(Event::Ended { key, permit, outcome });
            });
            self.in_flight += 1;
            self.shared.get(&name, len_max, done);
        }
    }

    /// Notes the end of a request and verifies the object that it brought.
    fn judge(&mut self, key: Key, permit: Permit, outcome: Outcome<GetResult>) -> Answer {
        self.shared.note(Direction::Down, permit, &outcome);
        let now_ms = self.shared.now_ms();
        let Some(&Flight { wanted, len_max, .. }) = self.flights.get(&key) else {
            return Answer::Missing;
        };
        let verified = match outcome {
            Err(_) => {
                self.count(|counters| &counters.fetch_failed);
                return Answer::Missing;
            }
            Ok(GetResult::Absent) => Err(Unusable::Unknown),
            Ok(GetResult::TooLong) if len_max < self.block_max() => return Answer::Larger,
            Ok(GetResult::TooLong) => {
                Err(Unusable::Damaged("it is longer than a block can be here"))
            }
            Ok(GetResult::Found(content)) => {
                verify(&content, &wanted, self.shared.created_s()).map(|block| (block, content))
            }
        };
        let verified = verified.and_then(|(block, content)| {
            let has_left = Retention::from_bits(block.retention).at(now_ms).is_none();
            if has_left { Err(Unusable::Unknown) } else { Ok((block, content)) }
        });
        match verified {
            Ok((block, content)) => {
                self.count(|counters| &counters.fetched);
                self.lengths.note(wanted.namespace, block.len);
                Answer::Block(Arc::new(pad(block, content)))
            }
            Err(why) => {
                match why {
                    Unusable::Unknown => self.count(|counters| &counters.fetch_missed),
                    Unusable::Damaged(what) => self.damaged(&wanted, now_ms, what),
                }
                self.absent.insert(key, now_ms);
                Answer::Missing
            }
        }
    }

    fn damaged(&mut self, wanted: &Wanted, now_ms: u64, what: &str) {
        self.count(|counters| &counters.fetch_corrupt);
        self.shared.damaged.lock().insert(wanted.key, now_ms);
        if now_ms >= self.quiet_until_ms {
            self.quiet_until_ms = now_ms + DAMAGED_EVERY_MS;
            let (location, name) = (&self.shared.location, name_of(wanted.namespace, wanted.key));
            tracing::warn!("the object {name} of {location} is not used: {what}; it is missed");
        }
    }

    /// Passes the answer to the prefetches that wait for the block.
    fn deliver(&mut self, key: Key, answer: &Answer) {
        let Some(flight) = self.flights.get_mut(&key) else { return };
        flight.answer = Some(answer.clone());
        for number in std::mem::take(&mut flight.waiters) {
            let Some(prefetch) = self.active.get_mut(&number) else { continue };
            let Prefetch { asked, blocks, open, .. } = prefetch;
            for (at, waiting) in asked.iter_mut() {
                if blocks[*at].key == key && matches!(waiting, Answer::Waiting) {
                    *waiting = answer.clone();
                    *open -= 1;
                }
            }
            if *open == 0
                && let Some(prefetch) = self.active.remove(&number)
            {
                self.go_on(number, prefetch, self.shared.now_ms());
            }
        }
    }
}

/// Length of the longest block seen in each namespace: blocks of one namespace are equally long, mostly.
#[derive(Debug, Default)]
struct Lengths(FxHashMap<u64, u32>);

impl Lengths {
    fn note(&mut self, namespace: u64, len: u32) {
        if self.0.len() >= LENGTHS_MAX && !self.0.contains_key(&namespace) {
            self.0.clear();
        }
        let longest = self.0.entry(namespace).or_default();
        *longest = len.max(*longest);
    }

    /// Blocks of a window at most: one, until the length is known.
    fn window(&self, namespace: u64) -> usize {
        let Some(len) = self.0.get(&namespace) else { return 1 };
        usize::try_from(WINDOW_BYTES / u64::from(*len).max(1)).unwrap_or(usize::MAX).max(1)
    }
}

fn pad(block: Block, mut content: Vec<u8>) -> Fetched {
    let data_bytes = usize::try_from(bytes_of(pages_of(block.len))).expect("at most a segment");
    let bytes = HEADER_BYTES + data_bytes;
    // `resize` alone may take twice the memory.
    content.reserve_exact(bytes.saturating_sub(content.len()));
    content.resize(bytes, 0);
    Fetched { block, content }
}

#[cfg(test)]
mod tests;
