//! Stores with an object store in memory, or in a directory, and with faults.

use crate::Bucket;
use crate::faulty::{Fault, Faulty};
use kvferry::{Access, Agent, Region};
use kvferry_store::objects::ObjectTier;
use kvferry_store::{BlockMemory, Error, Namespace, Retain, Space, Store, StoreOptions};
use kvferry_testkit::eventually;
use kvferry_testkit::hanging::HangingDisk;
use object_store::ObjectStore;
use object_store::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

const LEN: usize = 16 << 10;
const SOON: Duration = Duration::from_secs(150);

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("kvferry-objects-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a folder for temporary files");
        Self(path)
    }

    fn url(&self) -> String {
        format!("file://{}", self.0.join("objects").display())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A host with a store.
struct Host {
    store: Store,
    kv: Space,
    pool: Region,
    // Dropped last.
    _agent: Agent,
}

impl Host {
    fn new(folder: &Folder, name: &str, tier: ObjectTier) -> Self {
        let agent = Agent::builder().name(name).start().expect("an agent");
        let pool = agent.allocate(64 * LEN, Access::NONE).expect("memory");
        let options = StoreOptions::new(folder.0.join(name), 24 << 20).segment_bytes(1 << 20);
        let store = Store::open(&agent, &options.objects(tier)).expect("a store");
        let kv = store.space(&Namespace::new("model@1"));
        Self { store, kv, pool, _agent: agent }
    }

    fn memory(&self, count: usize) -> Vec<BlockMemory> {
        let one = |at: usize| BlockMemory::new(&self.pool, (at * LEN) as u64, LEN as u64);
        (0..count).map(one).collect()
    }

    fn put(&self, prompt: &[[u8; 32]]) {
        for (at, hash) in prompt.iter().enumerate() {
            self.pool.write_at(at * LEN, &content(hash)).expect("inside");
        }
        let put = self.kv.put(prompt, 0, &self.memory(prompt.len()), Retain::default());
        assert_eq!(put.expect("a put").failed, 0);
    }

    fn prefetch(&self, prompt: &[[u8; 32]]) -> usize {
        let pending = self.kv.prefetch(prompt).expect("a prefetch");
        let outcome = pending.wait(Some(SOON)).expect("it ends");
        *outcome.as_ref().as_ref().expect("a number")
    }

    /// Gets blocks and compares them.
    fn get(&self, prompt: &[[u8; 32]]) -> usize {
        let got = self.kv.get(prompt, 0, &self.memory(prompt.len())).expect("a get");
        let mut bytes = vec![0; LEN];
        for (at, hash) in prompt[..got].iter().enumerate() {
            self.pool.read_at(at * LEN, &mut bytes).expect("inside");
            assert!(bytes == content(hash), "block {at} is not what was put");
        }
        got
    }

    fn flush(&self) {
        let is_done = self.store.flush_objects(SOON).expect("it is open");
        assert!(is_done, "{:?}", self.store.stats());
    }
}

fn content(hash: &[u8; 32]) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    let mut reader = blake3::Hasher::new().update(hash).finalize_xof();
    reader.fill(&mut bytes);
    bytes
}

fn prompt(seed: u64, blocks: u64) -> Vec<[u8; 32]> {
    let hash =
        |block: u64| *blake3::hash(&[seed.to_le_bytes(), block.to_le_bytes()].concat()).as_bytes();
    (0..blocks).map(hash).collect()
}

fn tier(store: &Faulty) -> ObjectTier {
    let store: Arc<dyn ObjectStore> = Arc::new(store.clone());
    let timeout = Duration::from_millis(300);
    let bucket = Bucket::new(store, Path::from("kv"), "memory", timeout).expect("threads");
    let soon = Duration::from_millis(2);
    ObjectTier::new(Arc::new(bucket)).away(3, soon, soon * 4).absent_for(Duration::ZERO)
}

#[test]
fn blocks_reach_another_host_through_a_directory() {
    let folder = Folder::new("directory");
    let open = |name: &str| {
        let tier = crate::open::<&str, &str>(&folder.url(), &[]).expect("a directory");
        Host::new(&folder, name, tier)
    };
    let (one, other) = (open("one"), open("other"));
    let prompt = prompt(1, 40);
    one.put(&prompt);
    one.flush();
    assert_eq!((other.prefetch(&prompt), other.get(&prompt)), (40, 40));
    // Uploaded again, where they exist.
    let third = open("third");
    third.put(&prompt);
    third.flush();
    assert_eq!((third.store.stats().uploaded, third.store.stats().upload_failed), (40, 0));
}

#[test]
fn uploads_to_a_directory_whose_device_fails_are_counted_and_succeed_once_it_works() {
    let folder = Folder::new("failing-directory");
    let objects = folder.0.join("objects");
    std::fs::create_dir_all(&objects).expect("a folder");
    let Some(disk) = HangingDisk::mount(&objects) else { return };
    let open = |name: &str| {
        let tier = crate::open::<&str, &str>(&folder.url(), &[]).expect("a directory");
        let soon = Duration::from_millis(2);
        let tier = tier.away(3, soon, soon * 4).absent_for(Duration::ZERO);
        Host::new(&folder, name, tier)
    };
    let (one, other) = (open("one"), open("other"));
    let prompt = prompt(1, 4);
    disk.fail_writes();
    one.put(&prompt);
    eventually("uploads fail", || one.store.stats().upload_failed >= 4);
    let stats = one.store.stats();
    assert_eq!((stats.uploaded, stats.upload_dropped, stats.uploads_waiting), (0, 0, 4));
    assert_eq!((other.prefetch(&prompt), one.get(&prompt)), (0, 4));
    disk.mend();
    one.flush();
    let stats = one.store.stats();
    assert_eq!((stats.uploaded, stats.upload_dropped), (4, 0), "{stats:?}");
    assert_eq!((other.prefetch(&prompt), other.get(&prompt)), (4, 4));
}

#[test]
fn late_answers_cost_no_hit() {
    let folder = Folder::new("late");
    let objects = Faulty::new(|number| Some(Fault::Late(Duration::from_millis(number as u64 % 7))));
    let one = Host::new(&folder, "one", tier(&objects));
    one.put(&prompt(1, 30));
    one.flush();
    let other = Host::new(&folder, "other", tier(&objects));
    assert_eq!((other.prefetch(&prompt(1, 30)), other.get(&prompt(1, 30))), (30, 30));
}

#[test]
fn whatever_becomes_of_requests_the_bytes_are_right_and_every_block_comes_in_the_end() {
    for seed in 0..6 {
        let folder = Folder::new("any-fault");
        let faults = move |number: usize| {
            let mut rng = fastrand::Rng::with_seed(seed << 32 | number as u64);
            let kinds = [
                Fault::Late(Duration::from_millis(3)),
                Fault::Error,
                Fault::Cut,
                Fault::Broken,
                Fault::Flip,
                Fault::Swap,
                Fault::Unconditional,
            ];
            (rng.u8(..) < 64).then(|| kinds[rng.usize(..kinds.len())])
        };
        let objects = Faulty::new(faults);
        let (one, other) = (
            Host::new(&folder, "one", tier(&objects)),
            Host::new(&folder, "other", tier(&objects)),
        );
        let prompts: Vec<_> = (0..8).map(|it| prompt(seed * 100 + it, 20)).collect();
        prompts.iter().for_each(|prompt| one.put(prompt));
        one.flush();
        let stats = one.store.stats();
        assert_eq!(stats.uploaded + stats.upload_dropped, 160, "{stats:?}");
        for prompt in &prompts {
            let here = other.prefetch(prompt);
            assert_eq!(other.get(prompt), here);
        }
        // What was not uploaded is put by the other host; a passing fault has changed no object.
        objects.set(|_| None);
        for prompt in &prompts {
            if other.prefetch(prompt) < 20 {
                other.put(prompt);
            }
            assert_eq!(other.get(prompt), 20);
        }
        other.flush();
        let third = Host::new(&folder, "third", tier(&objects));
        for prompt in &prompts {
            assert_eq!((third.prefetch(prompt), third.get(prompt)), (20, 20));
        }
        assert_eq!(third.store.stats().fetch_corrupt, 0);
    }
}

#[test]
fn an_outage_and_the_return_cost_nothing_but_misses() {
    let folder = Folder::new("outage");
    let objects = Faulty::new(|_| None);
    let one = Host::new(&folder, "one", tier(&objects));
    one.put(&prompt(1, 10));
    one.flush();
    let other = Host::new(&folder, "other", tier(&objects));
    objects.set(|_| Some(Fault::Error));
    for _ in 0..3 {
        assert_eq!(other.prefetch(&prompt(1, 10)), 0);
    }
    assert_eq!(other.store.stats().is_away, 1);
    one.put(&prompt(2, 10));
    objects.set(|_| None);
    one.flush();
    let began = std::time::Instant::now();
    while other.prefetch(&prompt(2, 10)) < 10 {
        assert!(began.elapsed() < SOON, "{:?}", other.store.stats());
        std::thread::yield_now();
    }
    assert_eq!((other.prefetch(&prompt(1, 10)), other.get(&prompt(1, 10))), (10, 10));
    assert_eq!((other.get(&prompt(2, 10)), one.store.stats().upload_dropped), (10, 0));
}

#[test]
fn an_object_store_that_does_not_answer_is_away_after_the_timeout() {
    let folder = Folder::new("hang");
    let objects = Faulty::new(|_| Some(Fault::Hang));
    let host = Host::new(&folder, "host", tier(&objects));
    for seed in 0..3 {
        assert_eq!(host.prefetch(&prompt(seed, 4)), 0);
    }
    let stats = host.store.stats();
    assert_eq!((stats.fetch_failed, stats.is_away), (3, 1));
    // Its requests are under way when the store is closed.
    host.put(&prompt(9, 4));
    let pending = host.kv.prefetch(&prompt(3, 4)).expect("a prefetch");
    host.store.close();
    let outcome = pending.wait(Some(SOON)).expect("it ends");
    assert!(matches!(*outcome, Ok(0) | Err(Error::Closed)), "{outcome:?}");
}

#[test]
fn an_object_store_that_cannot_write_on_a_condition_is_asked_once() {
    let folder = Folder::new("unconditional");
    let objects = Faulty::new(|_| Some(Fault::Unconditional));
    let host = Host::new(&folder, "host", tier(&objects).concurrency(1));
    host.put(&prompt(1, 10));
    host.flush();
    assert_eq!((host.store.stats().uploaded, objects.requests.load(SeqCst)), (10, 12));
}

#[test]
fn objects_are_below_the_prefix_of_the_url() {
    let folder = Folder::new("prefix");
    let objects = Faulty::new(|_| None);
    let host = Host::new(&folder, "host", tier(&objects));
    host.put(&prompt(1, 1));
    host.flush();
    let name = format!("{:?}", objects.inner);
    assert!(name.contains(&format!("kv/v1/{:016x}/", Namespace::new("model@1").id())), "{name}");
}

#[test]
fn a_url_or_option_that_cannot_be_used_is_named_without_its_secrets() {
    type Case = (&'static str, &'static [(&'static str, &'static str)], &'static str);
    let cases: [Case; 8] = [
        ("bucket", &[], "can't be parsed"),
        ("ftp://user:hidden@host/x", &[], "ftp://user@host/x is no object store"),
        ("memory:///", &[], "is no object store"),
        ("s3:///x", &[], "is no object store"),
        ("s3://bucket", &[("colour", "red")], "colour is no option"),
        ("gs://bucket", &[("aws_region", "x")], "aws_region is no option"),
        ("az://container", &[("region", "hidden")], "region is no option"),
        ("file://elsewhere/x", &[], "is no object store"),
    ];
    for (url, options, says) in cases {
        let error = crate::open(url, options).expect_err(url).to_string();
        assert!(error.contains(says) && !error.contains("hidden"), "{url}: {error}");
    }
}

#[test]
fn object_stores_open_without_being_asked() {
    let key = "YQ==";
    let s3 = [("aws_access_key_id", "x"), ("aws_secret_access_key", "y"), ("concurrency", "4")];
    let azure = [("account_name", "x"), ("account_key", key), ("request_timeout", "2.5")];
    crate::open("s3://bucket/prefix", &s3).expect("S3");
    crate::open("gs://bucket/prefix", &[("skip_signature", "true")]).expect("GCS");
    crate::open("az://container/prefix", &azure).expect("Azure");
}
