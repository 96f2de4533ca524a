//! The two sides of the wire, as the suite drives them.

use super::*;

pub(super) struct Side {
    pub(super) side: usize,
    pub(super) wire: Arc<StopOnDrop>,
}

impl Side {
    fn wire(&self) -> &Arc<Wire> {
        &self.wire.0
    }

    fn end(&self) -> &End {
        &self.wire().ends[self.side]
    }
}

impl Endpoint for Side {
    fn register(
        &self,
        memory: &Memory,
        offset: usize,
        len: usize,
        access: Access,
    ) -> Result<Region, Failure> {
        let inner = Arc::new(Registered {
            id: self.wire().next_id.fetch_add(1, SeqCst),
            memory: memory.clone(),
            offset,
            len: len as u64,
            access,
            alive: AtomicBool::new(true),
            gate: RwLock::new(()),
        });
        self.end().regions.lock().insert(inner.id, Arc::clone(&inner));
        Ok(Region { memory: memory.clone(), offset, len, access, inner })
    }

    fn unregister(&self, region: &Region) -> Result<(), Failure> {
        let region = region.inner.clone().downcast::<Registered>().expect("a region of this wire");
        let known = self.end().regions.lock().remove(&region.id);
        known.ok_or_else(|| Failure::new("not_registered"))?;
        region.alive.store(false, SeqCst);
        let forgets = match self.wire().fault {
            Some(Fault::UnregisterForgetsDevice) => region.memory.kind() == MemoryKind::Slow,
            Some(Fault::HastyUnregister) => true,
            _ => false,
        };
        if !forgets {
            drop(region.gate.write());
        }
        Ok(())
    }

    fn transfer(&self, way: Way, moves: &[Move], options: &Options<'_>) -> Outcome {
        let running = self.start(way, moves, options);
        loop {
            if let Some(outcome) = running.wait(Duration::from_secs(3600)) {
                return outcome;
            }
        }
    }

    fn start(&self, way: Way, moves: &[Move], options: &Options<'_>) -> Box<dyn Handle> {
        let wire = Arc::clone(self.wire());
        let job = wire.submit(Job {
            side: self.side,
            way,
            moves: moves.to_vec(),
            note: options.notify.clone(),
            deadline: options.timeout.map(|t| Instant::now() + t),
            cancelled: AtomicBool::new(false),
            refusals_before: wire.refusals.load(SeqCst),
            bigs_before: wire.bigs.load(SeqCst),
            progress: Mutex::default(),
            outcome: Mutex::default(),
            second: Mutex::default(),
            waiting: AtomicUsize::new(0),
            ended: Condvar::new(),
            event: EventFd::new().expect("the process has descriptors left"),
        });
        Box::new(Running { job, wire })
    }

    fn notify(&self, note: Notification, _: &Options<'_>) -> Result<(), Failure> {
        self.wire().deliver(1 - self.side, note);
        Ok(())
    }

    fn take_notes(&self) -> Vec<Notification> {
        self.end().notes.lock().queue.drain(..).collect()
    }

    fn wait_note(&self, timeout: Duration) -> Option<Notification> {
        let give_up = Instant::now() + timeout;
        let mut notes = self.end().notes.lock();
        loop {
            if let Some(note) = notes.queue.pop_front() {
                return Some(note);
            }
            let left = give_up.checked_duration_since(Instant::now())?;
            notes = self.end().noted.wait(notes, left);
        }
    }

    fn gauges(&self) -> Vec<(&'static str, u64)> {
        let end = self.end();
        let leaked = end.closed.load(SeqCst) && self.wire().has(Fault::LeakedSession);
        vec![
            ("transfers in flight", end.in_flight.load(SeqCst) as u64),
            ("regions", end.regions.lock().len() as u64),
            ("notifications", end.notes.lock().queue.len() as u64),
            ("sessions", u64::from(leaked)),
        ]
    }

    fn close(&self) {
        self.end().closed.store(true, SeqCst);
        let regions = std::mem::take(&mut *self.end().regions.lock());
        for region in regions.values() {
            region.alive.store(false, SeqCst);
            if !self.wire().has(Fault::HastyClose) {
                drop(region.gate.write());
            }
        }
    }
}

struct Running {
    job: Arc<Job>,
    wire: Arc<Wire>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.wire.has(Fault::DropCancels) {
            self.cancel();
        }
    }
}

impl Handle for Running {
    fn poll(&self) -> Option<Outcome> {
        self.job.read(&mut self.job.outcome.lock())
    }

    fn wait(&self, timeout: Duration) -> Option<Outcome> {
        let outcome = self.job.outcome.lock();
        self.job.waiting.fetch_add(1, SeqCst);
        let mut outcome = self.job.ended.wait_while(outcome, timeout, |o| o.is_none());
        self.job.waiting.fetch_sub(1, SeqCst);
        if outcome.is_none() && self.wire.has(Fault::WaitCancels) {
            drop(outcome);
            self.cancel();
            return None;
        }
        self.job.read(&mut outcome)
    }

    fn cancel(&self) {
        match self.wire.fault {
            Some(Fault::IgnoredCancel) => self.wire.complete(&self.job, early("cancelled", true)),
            Some(Fault::HastyCancelOfMix) if !self.job.is_mixed() => {
                self.job.cancelled.store(true, SeqCst);
            }
            Some(Fault::HastyCancel | Fault::HastyCancelOfMix) => {
                self.job.cancelled.store(true, SeqCst);
                self.wire.complete(&self.job, early("cancelled", true));
            }
            _ => self.job.cancelled.store(true, SeqCst),
        }
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.job.event.as_fd()
    }
}
