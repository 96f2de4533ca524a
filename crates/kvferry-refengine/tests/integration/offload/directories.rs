//! Directories that are used again, removed, replaced, read-only and full while an engine serves.

use crate::offload::kit::{
    BLOCK, Folder, Rig, config, dense, options, paths_below, prompt, to_files,
};
use kvferry_blocks::{RetentionConfig, TransferMode};
use std::fs;
use std::path::Path;
use std::process::Command;

const LEN: usize = 5 * BLOCK + BLOCK / 2;
const FILE_MODES: [TransferMode; 2] = [TransferMode::PosixDebugFallback, TransferMode::Gds];

/// Serves prompts before and after `harm` was done. Returns how many tokens were computed for the prompts' second time.
fn serve_around(rig: &mut Rig, retention: &RetentionConfig, harm: impl FnOnce()) -> usize {
    for n in 0..3 {
        rig.serve(&format!("before-{n}"), prompt(n, LEN), retention);
    }
    rig.push_out(100, retention);
    harm();
    let mut computed = 0;
    for n in 0..3 {
        computed += rig.serve(&format!("after-{n}"), prompt(n, LEN), retention);
    }
    rig.push_out(200, retention);
    for n in 0..3 {
        rig.serve(&format!("later-{n}"), prompt(n, LEN), retention);
    }
    rig.run();
    computed
}

fn files_below(folder: &Path) -> usize {
    paths_below(folder).len()
}

#[test]
fn an_engine_that_starts_on_the_directory_of_an_earlier_one_has_right_tokens_and_no_more_files() {
    for mode in FILE_MODES {
        let folder = Folder::new(&format!("offload-restart-{mode:?}"));
        let retention = to_files(mode, folder.path());
        let mut files = vec![];
        for start in 0..4 {
            let mut model = dense();
            // The third engine has other weights: equal tokens have other KV.
            model.seed += u64::from(start == 2);
            let mut rig = Rig::of(config(&model, BLOCK, 17), 32, options());
            serve_around(&mut rig, &retention, || {});
            drop(rig);
            files.push(files_below(folder.path()));
        }
        assert!(files.iter().all(|count| *count <= 32 + 8), "{mode:?}: {files:?}");
        assert!(files.iter().all(|count| *count > 0), "{mode:?}: {files:?}");
    }
}

#[test]
fn the_block_store_of_an_earlier_engine_has_its_blocks_which_are_not_written_again() {
    let folder = Folder::new("offload-present");
    let retention = to_files(TransferMode::Gds, folder.path());
    let mut present = vec![];
    for _ in 0..2 {
        let mut rig = Rig::of(config(&dense(), BLOCK, 17), 64, options().share_names());
        rig.serve("a", prompt(1, LEN), &retention);
        rig.push_out(100, &retention);
        present.push(rig.run().present);
    }
    assert_eq!(present[0], 0);
    assert!(present[1] >= 5, "{present:?}");
}

#[test]
fn a_directory_that_is_removed_while_the_engine_serves_costs_hits_only() {
    for mode in FILE_MODES {
        let folder = Folder::new(&format!("offload-removed-{mode:?}"));
        let path = folder.path().join("kv");
        let retention = to_files(mode, &path);
        let mut rig = Rig::new(16, 64);
        let computed = serve_around(&mut rig, &retention, || fs::remove_dir_all(&path).unwrap());
        if mode == TransferMode::PosixDebugFallback {
            assert_eq!(computed, 3 * (LEN + 2), "the files are gone");
            assert!(path.is_dir(), "it is made again for what is offloaded afterwards");
        }
    }
}

#[test]
fn a_directory_that_is_replaced_by_a_file_costs_hits_only() {
    for mode in FILE_MODES {
        let folder = Folder::new(&format!("offload-replaced-{mode:?}"));
        let path = folder.path().join("kv");
        let mut rig = Rig::new(16, 64);
        serve_around(&mut rig, &to_files(mode, &path), || {
            fs::remove_dir_all(&path).unwrap();
            fs::write(&path, b"not a directory").unwrap();
        });
        assert_eq!(fs::read(&path).unwrap(), b"not a directory");
    }
}

#[test]
fn a_directory_that_can_not_be_made_costs_hits_only() {
    let folder = Folder::new("offload-impossible");
    let file = folder.path().join("file");
    fs::write(&file, b"").unwrap();
    for mode in FILE_MODES {
        let mut rig = Rig::new(16, 64);
        let computed = serve_around(&mut rig, &to_files(mode, &file.join("kv")), || {});
        assert_eq!(computed, 3 * (LEN + 2));
    }
}

/// A small file system at a folder.
struct Tmpfs(Folder);

impl Tmpfs {
    /// None, with a line that says so, if this process may not mount.
    fn mount(name: &str, kib: u64) -> Option<Self> {
        let folder = Folder::new(name);
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={kib}k"), "kvferry"]).arg(folder.path());
        if mount.output().is_ok_and(|done| done.status.success()) {
            return Some(Self(folder));
        }
        println!("SKIPPED: {name}: this process may not mount a tmpfs");
        None
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_file_system_that_becomes_read_only_while_the_engine_serves_costs_hits_only() {
    for mode in FILE_MODES {
        let name = format!("offload-read-only-{mode:?}");
        let Some(disk) = Tmpfs::mount(&name, 64 << 10) else { return };
        let retention = to_files(mode, &disk.path().join("kv"));
        let mut rig = Rig::new(16, 64);
        serve_around(&mut rig, &retention, || {
            let mut mount = Command::new("mount");
            mount.args(["-o", "remount,ro"]).arg(disk.path());
            if !mount.output().unwrap().status.success() {
                // A file that is open for writing keeps the file system writable: the directory, then.
                mount = Command::new("mount");
                mount.args(["-o", "remount,ro,bind"]).arg(disk.path());
                let _ = mount.output();
            }
        });
    }
}

#[test]
fn a_file_system_that_is_full_costs_hits_only() {
    for mode in FILE_MODES {
        let name = format!("offload-full-{mode:?}");
        let Some(disk) = Tmpfs::mount(&name, 64) else { return };
        let retention = to_files(mode, &disk.path().join("kv"));
        let mut rig = Rig::new(16, 64);
        serve_around(&mut rig, &retention, || {});
        let stats = rig.engine.offload_stats();
        assert!(stats.failed > 0, "{mode:?}: the file system has never been full: {stats:?}");
        // Nothing that is unfinished takes space.
        let unfinished = paths_below(&disk.path().join("kv"))
            .into_iter()
            .filter(|path| path.extension().is_some_and(|extension| extension == "tmp"));
        assert_eq!(unfinished.count(), 0);
    }
}
