use super::*;
use crate::bench::Bench;
use crate::core::Core;
use crate::log::format;
use crate::opening::{Opening, recover};
use crate::options::StoreOptions;
use crate::pending::Pending;
use crate::tiers::objects::content::header;
use crate::tiers::objects::outage::Gate;
use crate::tiers::objects::upload::Queue;
use crate::tiers::objects::{IfExists, Objects, Settings};
use std::collections::BTreeSet;

const MIB: u64 = 1 << 20;
/// The namespace of all blocks, and the check of each.
const NAMESPACE: u64 = 7;
const CHECK: u64 = 8;

#[test]
fn a_window_is_cut_by_the_length_of_its_own_namespace_and_is_one_block_until_that_is_known() {
    let mut lengths = Lengths::default();
    assert_eq!(lengths.window(1), 1);
    lengths.note(1, 16 << 20);
    lengths.note(2, 32 << 10);
    assert_eq!((lengths.window(1), lengths.window(2), lengths.window(3)), (2, 1024, 1));
    lengths.note(2, 64 << 20);
    assert_eq!(lengths.window(2), 1);
    for namespace in 0..10 * LENGTHS_MAX as u64 {
        lengths.note(namespace, 1);
    }
    assert!(lengths.0.len() <= LENGTHS_MAX);
}

/// A store that has no space for bytes: it only knows which blocks were written.
#[derive(Clone, Debug, Default)]
struct WrittenBlocks(Arc<Mutex<BTreeSet<[u64; 2]>>>);

impl PrefetchTarget for WrittenBlocks {
    fn prefix_of(&self, blocks: &[Wanted]) -> usize {
        blocks.iter().take_while(|it| self.has(&it.key)).count()
    }

    fn has(&self, key: &Key) -> bool {
        self.0.lock().contains(&key.0)
    }

    fn write(&self, fetched: &[&Fetched]) -> crate::Result<Put> {
        self.0.lock().extend(fetched.iter().map(|it| it.block.key));
        Ok(Put { stored: fetched.len(), ..Put::default() })
    }

    fn end(&self, _blocks: Vec<Wanted>, here: usize, promise: Promise<usize>) {
        promise.finish(Ok(here));
    }
}

/// An object store that answers when the test does.
#[derive(Debug, Default)]
struct Asked(Mutex<Vec<(String, u64, Done<GetResult>)>>);

impl Objects for Asked {
    fn get(&self, name: &str, len_max: u64, done: Done<GetResult>) {
        self.0.lock().push((name.to_owned(), len_max, done));
    }

    fn put(&self, _name: &str, _content: Vec<u8>, _if_exists: IfExists, _done: Done<()>) {
        unreachable!("nothing is uploaded")
    }

    fn location(&self) -> &'static str {
        "a test"
    }
}

fn wanted(number: u64) -> Wanted {
    Wanted { key: Key([number, number]), namespace: NAMESPACE, check: CHECK }
}

fn prefetch(
    here: &WrittenBlocks,
    numbers: impl Iterator<Item = u64>,
) -> (Pending<usize>, Box<Prefetch>) {
    let (pending, promise) = Pending::new();
    let target = Box::new(here.clone());
    (pending, Box::new(Prefetch::new(target, numbers.map(wanted).collect(), promise)))
}

fn object(number: u64, len: u64) -> Vec<u8> {
    let data = vec![0; usize::try_from(len).expect("short")];
    let block = Block {
        key: [number, number],
        parent: None,
        sum: format::sum(&data, CHECK),
        check: CHECK,
        namespace: NAMESPACE,
        len: u32::try_from(len).expect("short"),
        retention: Retention::DEFAULT.to_bits(),
        time: 0,
    };
    [&header(&block, 0)[..], &data].concat()
}

/// A fetcher that the test drives, in a store without threads.
struct Rig {
    fetcher: Fetcher,
    events: Receiver<Event>,
    asked: Arc<Asked>,
    _bench: Bench,
}

impl Rig {
    fn new(name: &str) -> Self {
        let bench = Bench::new(name, 4096);
        let options = StoreOptions::new(&bench.folder, 1 << 30).segment_bytes(80 * MIB);
        let opening = Opening::new(&bench.agent, &options).expect("directories");
        let superblock = opening.open_superblock().expect("a superblock");
        let disk = opening.disk(&superblock, true).expect("files");
        let geometry = options.geometry(None).expect("in bounds");
        let index = recover::fill(&disk, &superblock, geometry).expect("an index");
        let core = Core::new(disk, superblock, index.join().expect("a member"));
        let asked = Arc::new(Asked::default());
        let settings = Settings { concurrency: 1000, ..Settings::default() };
        let shared = Shared {
            settings,
            objects: Mutex::new(Some(Arc::clone(&asked) as Arc<dyn Objects>)),
            location: "a test".into(),
            core: Arc::new(core),
            gate: Mutex::new(Gate::new(settings.patience)),
            uploads: Arc::new(Queue::default()),
            damaged: Mutex::new(Remembered::new(1, 1)),
        };
        let (tell, events) = channel();
        let fetcher = Fetcher::new(Arc::new(shared), tell, Arc::default());
        Self { fetcher, events, asked, _bench: bench }
    }

    /// Bytes that a prefetch has in memory, and those that its requests may bring.
    fn bytes(&self, prefetch: &Prefetch) -> u64 {
        let of = |(at, answer): &(usize, Answer)| match answer {
            Answer::Waiting => self.fetcher.flights[&prefetch.blocks[*at].key].len_max,
            Answer::Block(fetched) => fetched.content.capacity() as u64 - HEADER_BYTES as u64,
            Answer::Missing | Answer::Larger => 0,
        };
        prefetch.asked.iter().map(of).sum()
    }

    /// Answers the first request, if there is one, with a block of a length by its number.
    fn answer(&mut self, len: impl Fn(u64) -> u64) -> bool {
        let mut asked = self.asked.0.lock();
        if asked.is_empty() {
            return false;
        }
        let (name, len_max, done) = asked.remove(0);
        drop(asked);
        let number = u64::from_str_radix(&name[name.len() - 16..], 16).expect("a key");
        let bytes = len(number) + HEADER_BYTES as u64;
        done.end(Ok(match bytes <= len_max {
            true => GetResult::Found(object(number, len(number))),
            false => GetResult::TooLong,
        }));
        let Ok(Event::Ended { key, permit, outcome }) = self.events.try_recv() else {
            panic!("the request has ended")
        };
        self.fetcher.in_flight -= 1;
        let answer = self.fetcher.judge(key, permit, outcome);
        self.fetcher.deliver(key, &answer);
        self.fetcher.advance();
        true
    }
}

#[test]
fn prefetches_of_blocks_of_any_length_have_32_mib_each_in_memory_or_one_block() {
    const PROMPT: u64 = 60;
    /// Blocks of another prompt have numbers from here on.
    const OTHER: u64 = 1000;
    // Short ones, from which the windows grow, and long ones behind them; one is longer than a window.
    let len = |number: u64| match number % OTHER {
        ..21 => 4096,
        40 => 40 * MIB,
        at if at % 3 == 0 => 5 * MIB - 1,
        _ => 20_000,
    };
    let mut rig = Rig::new("fetch-bytes");
    let here = WrittenBlocks::default();
    let prompts = [0..PROMPT, 0..PROMPT, 10..PROMPT, OTHER..OTHER + PROMPT];
    let mut pending = Vec::new();
    for numbers in prompts {
        let (ended, prefetch) = prefetch(&here, numbers.clone());
        pending.push((ended, (numbers.end - numbers.start) as usize));
        rig.fetcher.begin(prefetch);
        rig.fetcher.advance();
    }
    let (mut requests, mut most) = (0, 0);
    loop {
        for prefetch in rig.fetcher.active.values() {
            let bytes = rig.bytes(prefetch);
            let is_one = prefetch.asked.len() == 1 && bytes <= BLOCK_LEN_MAX;
            assert!(
                is_one || bytes <= 32 * MIB,
                "{bytes} bytes of {} blocks",
                prefetch.asked.len()
            );
            most = most.max(prefetch.asked.len());
        }
        if !rig.answer(len) {
            break;
        }
        requests += 1;
    }
    for (ended, blocks) in pending {
        let outcome = ended.outcome().expect("it has ended");
        assert!(matches!(*outcome, Ok(here) if here == blocks), "{outcome:?}");
    }
    assert_eq!(here.0.lock().len() as u64, 2 * PROMPT);
    assert!(most >= 16, "windows grow to {most} blocks");
    // A window that is cut is asked for again, and no more once the namespace's longest block is known.
    assert!((2 * PROMPT + 1..=6 * PROMPT).contains(&requests), "{requests} requests");
    assert_eq!(rig.fetcher.flights.len(), 0);
}

#[test]
fn a_block_that_is_longer_than_any_may_be_is_damaged_and_asked_for_once() {
    let mut rig = Rig::new("fetch-long");
    let (ended, prefetch) = prefetch(&WrittenBlocks::default(), 0..3);
    rig.fetcher.begin(prefetch);
    rig.fetcher.advance();
    assert!(rig.answer(|_| 65 * MIB) && !rig.answer(|_| 1));
    assert!(matches!(*ended.outcome().expect("it has ended"), Ok(0)));
    assert_eq!(rig.fetcher.shared.core.counters.read().fetch_corrupt, 1);
}

#[test]
fn prefetches_that_the_thread_has_not_seen_are_bounded_and_further_ones_end_at_once() {
    let (events, received) = channel();
    let handle = Handle { events, unseen: Arc::default(), thread: Mutex::new(None) };
    let here = WrittenBlocks::default();
    here.0.lock().insert([0, 0]);
    let begun = || {
        let (ended, prefetch) = prefetch(&here, 0..2);
        handle.begin(prefetch);
        ended.outcome().map(|it| it.as_ref().as_ref().copied().expect("it does not fail"))
    };
    assert!((0..WAITING_MAX).all(|_| begun().is_none()));
    // They end with what is here.
    assert!((0..10).all(|_| begun() == Some(1)));
    assert_eq!(received.try_iter().count(), WAITING_MAX);
}
