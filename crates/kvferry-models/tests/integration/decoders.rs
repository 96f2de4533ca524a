//! Every decoder and state machine on the kept corpus and on seeded mutations of it. What a fuzzer
//! finds in hours is kept in `fuzz/corpus` and tried here in seconds, on any toolchain: `TARGET.tar.gz`
//! has the inputs that reach different code, the folder `TARGET` the regressions, each with its name.
#![allow(clippy::unwrap_used, reason = "a panic is a finding")]

use fastrand::Rng;
use kvferry_models::TARGETS;
use kvferry_models::mutate::mutate;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Instant;

fn fuzz_dir() -> PathBuf {
    // Asked when it runs: a build that moves to another checkout is not compiled again.
    let package =
        std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo and nextest say where the package is");
    Path::new(&package).join("../../fuzz")
}

/// The kept inputs of a target, in the order of their names: those of its archive, then its regressions.
fn corpus(name: &str) -> Vec<Vec<u8>> {
    let dir = fuzz_dir().join("corpus");
    let archive = std::fs::File::open(dir.join(format!("{name}.tar.gz"))).unwrap();
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(archive));
    let mut kept = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        if entry.header().entry_type().is_file() {
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            kept.insert(entry.path().unwrap().into_owned(), bytes);
        }
    }
    assert!(!kept.is_empty(), "the archive of {name} has no input");
    if let Ok(files) = std::fs::read_dir(dir.join(name)) {
        for path in files.map(|file| file.unwrap().path()) {
            let bytes = std::fs::read(&path).unwrap();
            kept.insert(path, bytes);
        }
    }
    kept.into_values().collect()
}

/// Runs each target on its seeds, its corpus, and one of `share` of its seeded mutations.
fn survive(share: u32) {
    let mut failed = Vec::new();
    for target in TARGETS {
        let began = Instant::now();
        let (seeds, kept) = ((target.seeds)(), corpus(target.name));
        let all: Vec<&Vec<u8>> = seeds.iter().chain(&kept).collect();
        let mut rng = Rng::with_seed(0xfe44);
        let mutations = (0..target.mutations.div_ceil(share)).map(|_| {
            let [of, other] = [0; 2].map(|_| all[rng.usize(..all.len())]);
            mutate(of, other, &mut rng)
        });
        let inputs = all.iter().map(|bytes| bytes.to_vec()).chain(mutations);
        for input in inputs {
            if catch_unwind(AssertUnwindSafe(|| (target.run)(&input))).is_err() {
                let file = std::env::temp_dir().join(format!("kvferry-finding-{}", target.name));
                std::fs::write(&file, &input).unwrap();
                failed.push(format!(
                    "{}: {} bytes in {}",
                    target.name,
                    input.len(),
                    file.display()
                ));
                break;
            }
        }
        println!(
            "{:20} {:3} seeds, {:4} kept, {:5} mutations, {:4} ms",
            target.name,
            seeds.len(),
            kept.len(),
            target.mutations.div_ceil(share),
            began.elapsed().as_millis()
        );
    }
    assert!(failed.is_empty(), "keep these in fuzz/corpus once they are understood: {failed:#?}");
}

#[test]
fn every_target_survives_its_corpus_and_a_few_mutations_of_it() {
    survive(16);
}

#[test]
#[ignore = "slow: make test-slow"]
fn every_target_survives_many_mutations_of_its_corpus() {
    survive(1);
}

#[test]
fn the_fuzz_package_and_the_corpus_have_exactly_these_targets() {
    let ours: BTreeSet<String> = TARGETS.iter().map(|t| t.name.to_owned()).collect();
    let names = |dir: &str, suffix: &str| -> BTreeSet<String> {
        let files = std::fs::read_dir(fuzz_dir().join(dir)).unwrap();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        names.map(|name| name.trim_end_matches(suffix).to_owned()).collect()
    };
    assert_eq!(names("fuzz_targets", ".rs"), ours);
    assert_eq!(names("corpus", ".tar.gz"), ours);
    let manifest = std::fs::read_to_string(fuzz_dir().join("Cargo.toml")).unwrap();
    for name in &ours {
        assert!(
            manifest.contains(&format!("name = \"{name}\"")),
            "{name} is not in fuzz/Cargo.toml"
        );
    }
}
