//! Records what decides which files a loss of power leaves.

use super::{FSYNC, FSYNCDIR, HangingDisk, Nodes, RENAME, WRITE, name_at, u64_at};
use std::sync::atomic::Ordering::SeqCst;

/// A step that the file system has carried out. Files and folders have numbers, whatever their names are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskStep {
    /// Bytes were written to the file of this number.
    Write(u64),
    /// A file or folder has got a name.
    Name {
        /// Number of the folder that the name is in.
        folder: u64,
        /// The name in that folder.
        name: Vec<u8>,
        /// Number of the file or folder.
        node: u64,
    },
    /// A folder has lost a name.
    Remove {
        /// Number of the folder.
        folder: u64,
        /// The name in that folder.
        name: Vec<u8>,
    },
    /// The file or folder of this number was synced.
    Sync(u64),
}

impl HangingDisk {
    /// Records the steps from now on.
    pub fn record(&self) {
        self.shared.is_recorded.store(true, SeqCst);
    }

    /// Takes the steps that were recorded, in their order.
    pub fn take_steps(&self) -> Vec<DiskStep> {
        std::mem::take(&mut *self.shared.steps.lock())
    }
}

impl Nodes {
    /// The steps of an operation that was carried out.
    pub(super) fn steps(&mut self, opcode: u32, node: u64, body: &[u8]) -> Vec<DiskStep> {
        match opcode {
            // MKDIR and LINK
            9 | 13 => vec![self.named(node, name_at(body, 8))],
            // UNLINK and RMDIR
            10 | 11 => vec![DiskStep::Remove { folder: node, name: name_at(body, 0).to_vec() }],
            // RENAME and RENAME2
            RENAME | 45 => {
                let names = if opcode == RENAME { 8 } else { 16 };
                let from = name_at(body, names);
                let to = name_at(body, names + from.len() + 1);
                let removed = DiskStep::Remove { folder: node, name: from.to_vec() };
                vec![removed, self.named(u64_at(body, 0).unwrap_or_default(), to)]
            }
            WRITE => vec![DiskStep::Write(node)],
            FSYNC | FSYNCDIR => vec![DiskStep::Sync(node)],
            // CREATE
            35 => vec![self.named(node, name_at(body, 16))],
            _ => Vec::new(),
        }
    }

    fn named(&mut self, folder: u64, name: &[u8]) -> DiskStep {
        let node = self.find(folder, name).expect("it was just named");
        DiskStep::Name { folder, name: name.to_vec(), node }
    }
}
