//! A child's transfers: blocking ones, asynchronous ones, and writers that repeat in the background.

use super::command::Command;
use super::{Outcome, Server};
use kvferry::{Batch, Options, Peer, RemoteRegion, TransferStats};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A thread that writes one batch again and again.
pub(super) struct Writer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Value>,
}

fn moved(stats: TransferStats) -> Value {
    json!({"bytes": stats.bytes, "descriptors": stats.descriptors, "streams": stats.streams})
}

pub(super) fn options(command: Command<'_>) -> Options<'static> {
    Options {
        timeout: command.get("timeout_ms").as_u64().map(Duration::from_millis),
        ..Options::default()
    }
}

impl Server {
    pub(super) fn peer(&self, command: Command<'_>) -> Result<Peer, kvferry::Error> {
        self.agent().peer(command.text("peer"))
    }

    /// `count` blocks of `block` bytes, from the start of both regions.
    pub(super) fn batch(&self, command: Command<'_>) -> Result<Batch, kvferry::Error> {
        let remote = RemoteRegion::from_bytes(&command.value::<Vec<u8>>("remote"))?;
        let local = &self.region(command).region;
        let (block, count) = (command.number("block"), command.number("count"));
        let mut batch = Batch::with_capacity(count as usize);
        for i in 0..count {
            batch.push(local, i * block, &remote, i * block, block)?;
        }
        Ok(batch)
    }

    pub(super) fn connect(&self, command: Command<'_>) -> Outcome {
        let summary = self.peer(command)?.connect(command.millis("timeout_ms"))?;
        Ok(super::value(summary))
    }

    pub(super) fn write(&self, command: Command<'_>) -> Outcome {
        self.peer(command)?.write(&self.batch(command)?, &options(command)).map(moved)
    }

    pub(super) fn read(&self, command: Command<'_>) -> Outcome {
        self.peer(command)?.read(&self.batch(command)?, &options(command)).map(moved)
    }

    pub(super) fn write_async(&mut self, command: Command<'_>) -> Outcome {
        let transfer = self.peer(command)?.write_async(&self.batch(command)?, &options(command));
        let id = self.new_id();
        self.transfers.insert(id, transfer);
        Ok(json!({"transfer": id}))
    }

    pub(super) fn cancel(&self, command: Command<'_>) -> Outcome {
        self.transfers[&command.number("transfer")].cancel();
        Ok(json!({}))
    }

    pub(super) fn wait(&self, command: Command<'_>) -> Outcome {
        let transfer = &self.transfers[&command.number("transfer")];
        match transfer.wait(command.millis("timeout_ms")) {
            Some(outcome) => outcome.map(moved),
            None => Ok(json!({"running": true})),
        }
    }

    pub(super) fn keep_writing(&mut self, command: Command<'_>) -> Outcome {
        let (peer, batch, options) = (self.peer(command)?, self.batch(command)?, options(command));
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut errors = Vec::new();
            while !stopped.load(Ordering::SeqCst) {
                if let Err(e) = peer.write(&batch, &options) {
                    errors.push(format!("{}: {e}", e.kind()));
                }
            }
            json!({"errors": errors})
        });
        let id = self.new_id();
        self.writers.insert(id, Writer { stop, thread });
        Ok(json!({"writer": id}))
    }

    pub(super) fn stop_writing(&mut self, command: Command<'_>) -> Outcome {
        let writer = self.writers.remove(&command.number("writer")).expect("a writer");
        writer.stop.store(true, Ordering::SeqCst);
        Ok(writer.thread.join().expect("writers don't panic"))
    }
}
