//! How late the events of a store are, and what publishing them costs the process that puts or removes a block.
//!
//! `cargo run --release -p kvferry-store --example event_lag [BLOCKS]`
//!
//! - *event*: from the moment at which a put begins until a thread of another opener of the store, which waits in
//!   `Events::wait`, has read it. It has the put's own time in it.
//! - *report*: the same until a thread in `Watch::gather` has made its report.
//! - *publish*: an insert and a removal in the index, without and with a subscriber.

use kvferry::{Access, Agent};
use kvferry_store::index::{Geometry, Index, Inserted, New};
use kvferry_store::{BlockMemory, Event, Key, Namespace, Polled, Retain, Store, StoreOptions};
use std::error::Error;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

const LEN: u64 = 64 << 10;
/// Between two puts, so that each waits for a thread that sleeps.
const PAUSE: Duration = Duration::from_millis(30);
const ROUNDS: u64 = 500_000;

fn main() -> Result<(), Box<dyn Error>> {
    let blocks: u64 = std::env::args().nth(1).map_or(Ok(200), |it| it.parse())?;
    let folder = std::env::temp_dir().join(format!("kvferry-event-lag-{}", std::process::id()));
    let outcome = lag(&folder, blocks);
    std::fs::remove_dir_all(&folder)?;
    outcome?;
    publish();
    Ok(())
}

fn lag(folder: &std::path::Path, blocks: u64) -> Result<(), Box<dyn Error>> {
    let agent = Agent::builder().name("event-lag").start()?;
    let pool = agent.allocate(usize::try_from(LEN)?, Access::NONE)?;
    let options = StoreOptions::new(folder, 256 << 20);
    let (store, other) = (Store::open(&agent, &options)?, Store::open(&agent, &options)?);
    let name = Namespace::new("model");
    let space = store.space(&name);
    let hash = |block: u64| blake3::hash(&block.to_le_bytes());
    let mut events = other.events()?;
    while events.poll(1, &mut Vec::new())? == Polled::Lost {}
    let watch = other.watch(&[vec![other.space(&name)]])?;
    let (mut of_events, mut of_reports) = (Vec::new(), Vec::new());
    let (seen, is_seen) = mpsc::channel();
    std::thread::scope(|scope| -> Result<(), Box<dyn Error>> {
        let (events, watch) = (&mut events, &watch);
        let to_main = seen.clone();
        scope.spawn(move || {
            while events.wait(Duration::from_secs(600)).is_ok() {
                let mut new = Vec::new();
                if events.poll(1000, &mut new).is_err() {
                    return;
                }
                let now = Instant::now();
                for _ in new.iter().filter(|it| matches!(it, Event::Stored(_))) {
                    let _ = to_main.send((false, now));
                }
            }
        });
        scope.spawn(move || {
            while let Ok(made) = watch.gather(Duration::from_secs(600)) {
                let now = Instant::now();
                (0..made).for_each(|_| _ = seen.send((true, now)));
                watch.take(usize::MAX);
            }
        });
        for block in 0..blocks {
            let hash = hash(block);
            watch.add(0, &[hash.as_bytes()])?;
            std::thread::sleep(PAUSE);
            let began = Instant::now();
            space.put(
                &[hash.as_bytes()],
                0,
                &[BlockMemory::new(&pool, 0, LEN)],
                Retain::default(),
            )?;
            for _ in 0..2 {
                let (is_report, at) = is_seen.recv()?;
                if is_report { &mut of_reports } else { &mut of_events }.push(at - began);
            }
        }
        other.close();
        Ok(())
    })?;
    for (what, mut times) in [("event", of_events), ("report", of_reports)] {
        times.sort_unstable();
        let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
        println!(
            "{what}: median {:.1?}, 99 % within {:.1?}, the latest after {:.1?}",
            at(0.5),
            at(0.99),
            at(1.0)
        );
    }
    Ok(())
}

fn publish() {
    let geometry = Geometry { slots: 1000, segments: 1, pages_per_segment: 1000 };
    let member = Arc::new(Index::create(geometry).expect("memory")).join().expect("a member");
    let time = || {
        let began = Instant::now();
        for n in 0..ROUNDS {
            let key = Key([n.wrapping_mul(0x9e37_79b9_7f4a_7c15), n]);
            let new = New { sum: 0, parent: None, page: 0, len: 1, retention: 0, now: 0 };
            assert!(matches!(member.insert(key, new), Inserted::New(_)));
            assert!(member.remove(&member.find(&key).expect("inserted")));
        }
        began.elapsed() / u32::try_from(ROUNDS).expect("few")
    };
    let mut figures = Vec::new();
    for _ in 0..5 {
        let without = time();
        let changes = member.subscribe();
        figures.push((without, time()));
        member.unsubscribe(&changes);
    }
    figures.sort_unstable();
    let (without, with) = figures[figures.len() / 2];
    println!(
        "publish: insert and removal take {without:.0?} without a subscriber, {with:.0?} with one"
    );
}
