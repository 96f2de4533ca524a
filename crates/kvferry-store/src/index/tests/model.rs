use super::*;
use crate::index::{Entry, MAX_SLOTS};
use fastrand::Rng;

/// The index beside a map.
struct Model {
    member: Member,
    blocks: HashMap<u64, New>,
    slots: u32,
    rng: Rng,
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let slots = rng.u32(1..100);
        let member = index(slots).join().expect("a member");
        Self { member, blocks: HashMap::new(), slots, rng }
    }

    fn find(&self, n: u64) -> Option<Entry> {
        let found = self.member.find(&key(n));
        let known = self.blocks.get(&n);
        assert_eq!(found.is_some(), known.is_some(), "key {n}");
        if let (Some(entry), Some(known)) = (&found, known) {
            assert_is_whole(entry, n);
            assert_eq!(
                (entry.page, entry.used_at, entry.parent),
                (known.page, known.now, known.parent)
            );
            assert_eq!(self.member.entry(entry.slot), found);
        }
        found
    }

    fn step(&mut self) {
        let n = self.rng.u64(0..150);
        let page = self.rng.u32(0..70 * PAGES_PER_SEGMENT);
        let found = self.find(n);
        match (self.rng.u32(0..11), found) {
            (0..5, found) => {
                let parent = self.rng.bool().then(|| self.rng.u32(..));
                let new = New { parent: parent.map(|p| p % MAX_SLOTS), ..block(n, page) };
                match (self.member.insert(key(n), new), found) {
                    (Inserted::New(_), None) => drop(self.blocks.insert(n, new)),
                    (Inserted::Exists(there), Some(found)) => assert_eq!(there, found),
                    (Inserted::Full, None) => assert_eq!(self.blocks.len(), self.slots as usize),
                    (other, found) => panic!("{other:?}, found {found:?}"),
                }
            }
            (5..7, Some(entry)) => {
                assert!(self.member.remove(&entry) && !self.member.remove(&entry));
                assert!(!self.member.relocate(&entry, page));
                assert!(!self.member.set_parent(&entry, None));
                self.blocks.remove(&n);
            }
            (7, Some(entry)) => {
                let page = page / VARIANTS * VARIANTS + entry.page % VARIANTS;
                assert!(self.member.relocate(&entry, page) && !self.member.remove(&entry));
                self.blocks.get_mut(&n).expect("there").page = page;
            }
            (8, Some(entry)) => {
                self.member.touch(&entry, page);
                self.blocks.get_mut(&n).expect("there").now = page;
            }
            (9, Some(entry)) => {
                let parent = Some(page % MAX_SLOTS);
                assert!(self.member.set_parent(&entry, parent));
                self.blocks.get_mut(&n).expect("there").parent = parent;
            }
            _ => self.find_prefix(),
        }
    }

    fn find_prefix(&mut self) {
        let start = self.rng.u64(0..150);
        let chain: Vec<u64> = (start..start + self.rng.u64(0..150)).collect();
        let keys: Vec<Key> = chain.iter().map(|&n| key(n)).collect();
        let mut out = Vec::new();
        let len = self.member.find_prefix(&keys, &mut out);
        let expected = chain.iter().take_while(|n| self.blocks.contains_key(n)).count();
        assert_eq!((len, out.len()), (expected, expected));
        chain.iter().zip(&out).for_each(|(&n, entry)| assert_is_whole(entry, n));
    }
}

#[test]
fn the_index_does_what_a_map_does() {
    for seed in 0..40 {
        let mut model = Model::new(seed);
        (0..4000).for_each(|_| model.step());
        assert_eq!(verify(&model.member) as usize, model.blocks.len());
        assert_eq!(model.member.iter().count(), model.blocks.len());
        assert_eq!(model.member.recount(), 0);
        verify(&model.member);
    }
}

#[test]
fn an_index_takes_all_its_slots_and_gives_them_back() {
    // More than one word of the bitmap's second level, and not a multiple of 64.
    let slots = 64 * 64 + 77;
    let member = index(slots).join().expect("a member");
    for _ in 0..2 {
        for n in 0..slots.into() {
            assert_eq!(insert(&member, n, 0), Inserted::New(n as u32), "the lowest free slot");
        }
        assert_eq!(insert(&member, slots.into(), 0), Inserted::Full);
        let last = member.entry(slots - 1).expect("taken");
        assert!(member.remove(&last));
        assert_eq!(insert(&member, slots.into(), 0), Inserted::New(slots - 1));
        assert_eq!(verify(&member), slots);
        member.iter().for_each(|entry| assert!(member.remove(&entry)));
        assert_eq!(verify(&member), 0);
    }
}

#[test]
fn an_index_of_any_size_takes_at_most_56_bytes_per_slot_and_no_memory_at_first() {
    let fixed = index(1).memory().len();
    for slots in [100_000, 10_000_000, MAX_SLOTS] {
        let geometry = Geometry { slots, segments: 1 << 20, pages_per_segment: 4096 };
        let index = Index::create(geometry).expect("memory that is not taken");
        let memory = index.memory();
        let segments = (1 << 20) * 41;
        let per_slot = (memory.len() - fixed - segments) as f64 / f64::from(slots);
        assert!(per_slot <= 56.0, "{per_slot} of {slots}");
        let taken = rustix::fs::fstat(memory).expect("open").st_blocks * 512;
        assert!(taken < 100_000, "{taken}");
        let member = Arc::new(index).join().expect("a member");
        assert_eq!(insert(&member, 7, 1 << 31), Inserted::New(0));
        assert!(member.find(&key(7)).is_some());
    }
}

#[test]
fn memory_that_is_not_an_index_is_refused() {
    let geometry = Geometry { slots: 0, segments: 1, pages_per_segment: 1 };
    assert!(Index::create(geometry).is_err(), "no slots");
    let geometry = Geometry { slots: 1, segments: 1 << 20, pages_per_segment: 4097 };
    assert!(Index::create(geometry).is_err(), "more pages than a number of 32 bits names");
    let other = kvferry_sys::shared::Shared::create("kvferry-test", 8192).expect("memory");
    let memory = std::os::fd::AsFd::as_fd(&other).try_clone_to_owned().expect("a descriptor");
    let e = Index::open(memory).expect_err("zeroes");
    assert_eq!(e.kind(), std::io::ErrorKind::InvalidData);
}

#[test]
fn a_reader_that_meets_a_damaged_chain_says_not_there() {
    let member = index(100).join().expect("a member");
    assert_eq!(insert(&member, 1, 0), Inserted::New(0));
    let slot = member.slot(0);
    let bucket = member.bucket_of(&key(1));
    let other = (2..).find(|&n| member.bucket_of(&key(n)) == bucket).expect("some key");
    // The chain is a circle; it leads to the end of another bucket; it leads outside.
    for link in [Link::Slot(0), Link::End(bucket ^ 1), Link::Slot(100)] {
        slot.set_next(link);
        assert!(member.find(&key(1)).is_some());
        assert_eq!(member.find(&key(other)), None);
        assert_eq!(insert(&member, other, 0), Inserted::Contended);
    }
}

#[test]
fn a_held_slot_in_a_chain_hides_its_block_and_no_other() {
    let member = index(100).join().expect("a member");
    let bucket = member.bucket_of(&key(0));
    let same: Vec<u64> = (0..).filter(|&n| member.bucket_of(&key(n)) == bucket).take(3).collect();
    for &n in &same {
        insert(&member, n, 0);
    }
    member.slot(1).hold(member.id());
    let found = same.iter().map(|&n| member.find(&key(n)).is_some());
    assert_eq!(found.collect::<Vec<_>>(), [true, false, true]);
}
