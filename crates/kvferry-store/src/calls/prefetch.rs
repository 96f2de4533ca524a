//! Prefetches from the object tier.

use crate::error::Result;
use crate::key::Key;
use crate::log::format::bytes_of;
use crate::log::{self, Disk, Extent};
use crate::open_store::OpenStore;
use crate::outcome::{Put, Refusal};
use crate::pending::{Pending, Promise};
use crate::space::Space;
use crate::tiers::objects::content::Wanted;
use crate::tiers::objects::fetch::{Fetched, Prefetch, PrefetchTarget};
use crate::writer::NotWritten;

impl Space {
    /// Brings blocks of a prompt that are missing here from the object store to the disk, one after another, and
    /// those on the disk to host memory, if there are such tiers, in the background. The outcome is how many blocks
    /// of the prompt, from its beginning, are here at the end, as [`Space::lookup`] counts them.
    ///
    /// It ends at the first block that the object store does not have, or that can't be brought. A prompt that is
    /// not there costs one request, and none if that was found out within the last seconds. This is no use of the
    /// blocks.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` for a hash that is too short or too long.
    pub fn prefetch<H: AsRef<[u8]>>(&self, prompt: &[H]) -> Result<Pending<usize>> {
        let _call = self.store.enter()?;
        let keys = self.keys(prompt)?;
        let here = self.find(&keys).len();
        let wanted = |(key, hash): (Key, &H)| Wanted {
            key,
            namespace: self.identity.id,
            check: self.identity.check(hash.as_ref()),
        };
        let blocks: Vec<_> = keys.into_iter().zip(prompt).map(wanted).collect();
        let (pending, promise) = Pending::new();
        match &self.store.objects {
            Some(objects) if here < blocks.len() => {
                objects.prefetch(Box::new(Prefetch::new(
                    Box::new(self.for_task()),
                    blocks,
                    promise,
                )));
            }
            _ => self.end(blocks, here, promise),
        }
        Ok(pending)
    }
}

impl PrefetchTarget for Space {
    fn end(&self, blocks: Vec<Wanted>, here: usize, promise: Promise<usize>) {
        let keys: Vec<_> = blocks[..here].iter().map(|it| it.key).collect();
        let here = self.readable(&keys, &self.find(&keys));
        if self.store.host.is_none() || here == 0 {
            return promise.finish(Ok(here));
        }
        let space = self.for_task();
        let task = move || {
            let (keys, checks): (Vec<_>, Vec<_>) =
                blocks[..here].iter().map(|it| (it.key, it.check)).unzip();
            // What can't be brought there is read from the disk.
            let warmed = space.store.enter().and_then(|_call| space.warm(&keys, &checks));
            promise.finish(warmed.map(|()| here));
        };
        // Without the pool, as the store was closed, the promise says so.
        let _ = self.store.pool.submit(task);
    }

    fn prefix_of(&self, blocks: &[Wanted]) -> usize {
        let keys: Vec<_> = blocks.iter().map(|it| it.key).collect();
        self.find(&keys).len()
    }

    fn has(&self, key: &Key) -> bool {
        self.store.core.member.find(key).is_some()
    }

    fn write(&self, fetched: &[&Fetched]) -> Result<Put> {
        let _call = self.store.enter()?;
        let OpenStore { core, worker, .. } = &*self.store;
        let now_s = core.clock.now_s();
        let blocks: Vec<_> = fetched.iter().map(|it| it.block(now_s)).collect();
        let (mut put, mut done) = (Put::default(), 0);
        while done < blocks.len() {
            let write = |extent: &Extent| -> std::io::Result<()> {
                let (at, header) = extent.header();
                core.disk.write_at(extent.segment(), at, &header.0)?;
                extent.records().iter().zip(&fetched[done..]).try_for_each(|(record, it)| {
                    core.disk.write_at(extent.segment(), bytes_of(record.page), it.data())
                })
            };
            let publish = |segment: u32, records: &[log::Record]| {
                self.publish(segment, records, None, &mut put);
            };
            let (count, written) = worker.writer.write_with(core, &blocks[done..], write, publish);
            let left = if count == 0 { blocks.len() - done } else { count };
            match written {
                Ok(()) => {}
                Err(NotWritten::Full) => {
                    core.member.note_no_space();
                    put.refuse(Refusal::NoSpace, left);
                    self.store.wake_keeper();
                }
                Err(NotWritten::Failed | NotWritten::Hangs) => put.failed += left,
            }
            done += left;
        }
        if worker.writer.is_awaited() {
            worker.wake();
            self.store.wake_keeper();
        }
        Ok(put)
    }
}
