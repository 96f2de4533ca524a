//! Which segments of a directory have a file.

use super::Device;
use crate::fault_points::{Op, step};
use crate::log;
use crate::tiers::disk::errors::is_read_only;
use crate::tiers::disk::gate::Pace;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

impl Device {
    /// Bytes of all segments' files, as far as that is known. Waits for no device: another thread counts them anew.
    pub(in crate::tiers::disk) fn bytes(self: &Arc<Self>) -> u64 {
        self.count_soon();
        self.state.counted.lock().segments * self.segment_bytes
    }

    /// Has another thread count the segments' files, unless one does.
    fn count_soon(self: &Arc<Self>) {
        if std::mem::replace(&mut self.state.counted.lock().is_counting, true) {
            return;
        }
        let device = Arc::clone(self);
        let begun = self.enter(Pace::Quick).and_then(|entered| {
            let count = move || {
                device.count();
                device.state.counted.lock().is_counting = false;
                drop(entered);
            };
            self.helpers.submit(Box::new(count))
        });
        if begun.is_err() {
            self.state.counted.lock().is_counting = false;
        }
    }

    /// Counts the segments' files when the store is opened.
    pub(in crate::tiers::disk) fn count_patiently(self: &Arc<Self>) -> io::Result<()> {
        self.patiently(Pace::Quick, None, |it| {
            it.count();
            Ok(())
        })
    }

    /// A directory that can't be listed has none.
    fn count(&self) {
        let before = self.state.counted.lock().changed;
        let is_segment = |entry: &std::fs::DirEntry| {
            entry.file_name().to_str().and_then(log::superblock::segment_of).is_some()
        };
        let listed = std::fs::read_dir(&self.path);
        let segments = listed.map_or(0, |it| it.flatten().filter(is_segment).count());
        let mut counted = self.state.counted.lock();
        if (counted.changing, counted.changed) == (0, before) {
            counted.segments = segments as u64;
        }
    }

    /// The numbers of the segments that belong into this directory and are there.
    pub(in crate::tiers::disk) fn segments(self: &Arc<Self>) -> io::Result<Vec<u32>> {
        self.patiently(Pace::Quick, None, |it| {
            let mut segments = Vec::new();
            for entry in std::fs::read_dir(&it.path)? {
                let name = entry?.file_name();
                let segment = name.to_str().and_then(log::superblock::segment_of);
                segments.extend(segment.filter(|number| it.has(*number)));
            }
            Ok(segments)
        })
    }

    fn has(&self, segment: u32) -> bool {
        segment as usize % self.directories == self.number
    }

    /// See [`crate::tiers::disk::Directories::discard_others`].
    pub(in crate::tiers::disk) fn discard_others(
        self: &Arc<Self>,
        segments: u32,
    ) -> io::Result<usize> {
        let others = self.patiently(Pace::Quick, None, move |it| it.others(segments))?;
        let mut beyond = 0;
        // One by one: an operation that was given up must not go on to remove what was made since.
        for (segment, path) in others {
            let remove = move || step(|| Op::Remove(path.clone()), || std::fs::remove_file(&path));
            match self.patiently(Pace::Slow, None, move |_| remove()) {
                Ok(()) => beyond += usize::from(segment >= segments),
                Err(e) if is_read_only(&e) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(beyond)
    }

    /// Files of segments that the store does not have, with their numbers.
    fn others(&self, segments: u32) -> io::Result<Vec<(u32, PathBuf)>> {
        let mut others = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(segment) = name.to_str().and_then(log::superblock::segment_of) else {
                continue;
            };
            let is_whole = entry.metadata()?.len() == self.segment_bytes;
            if segment >= segments || !self.has(segment) || !is_whole {
                others.push((segment, entry.path()));
            }
        }
        Ok(others)
    }
}
