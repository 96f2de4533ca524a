//! The thread that runs operations, and the thread that runs host functions.
//!
//! One step at a time: the scheduler picks, by the seed, one of the streams whose first operation
//! can go on, and moves a few parts of it. Streams interleave at the parts of copies, and the
//! lock is free between steps, so the program sees copies half done.

use std::ffi::c_void;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use crate::ops::{Callback, Work};
use crate::state::{Session, State, contended, wake_hosts, wake_scheduler};
use crate::thread;

/// Next action of the scheduler.
#[derive(Debug)]
enum Choice {
    Step(usize),
    /// Sources of an operation, by its place in the stream's queue, read before its turn.
    Early {
        stream: usize,
        op: usize,
    },
}

/// Starts both threads. The callbacks end when the process does.
fn start() -> Sender<Callback> {
    let (sender, receiver) = channel();
    std::thread::Builder::new()
        .name("fakecuda-engine".to_owned())
        .spawn(run)
        .expect("a test process can start a thread");
    std::thread::Builder::new()
        .name("fakecuda-host".to_owned())
        .spawn(move || run_callbacks(&receiver))
        .expect("a test process can start a thread");
    sender
}

fn run() {
    let mut session = Session::lock();
    loop {
        let mut wait = None;
        let choices = session.choices(&mut wait);
        if choices.is_empty() {
            session.wait_for_work(wait);
            continue;
        }
        let index = session.rng.usize(..choices.len());
        session.take(&choices[index]);
        drop(session);
        if contended() {
            std::thread::yield_now();
        }
        session = Session::lock();
    }
}

fn run_callbacks(receiver: &Receiver<Callback>) {
    for callback in receiver {
        {
            let mut session = Session::lock();
            let host = session.host_key();
            session.checker.host_join(host, &callback.point.before);
        }
        thread::with(|local| local.callback = Some(callback.point.clone()));
        // SAFETY: the caller of `cuLaunchHostFunc` promised that the function may be called with
        // this argument on a thread of the driver, once all before it in the stream is done.
        unsafe { (callback.function)(callback.user as *mut c_void) };
        thread::with(|local| local.callback = None);
        let mut session = Session::lock();
        let front = session.streams.get(&callback.stream).and_then(|s| s.queue.front());
        if front.is_some_and(|op| op.id == callback.op) {
            session.complete(callback.stream);
        }
        session.work_ready();
    }
}

impl State {
    /// Starts the scheduler at the first operation, and wakes it.
    pub(crate) fn work_ready(&mut self) {
        if self.callbacks.is_none() {
            self.callbacks = Some(start());
        }
        wake_scheduler();
    }

    /// All that can be done now. `wait`: how long until more can, when nothing else happens.
    fn choices(&self, wait: &mut Option<Duration>) -> Vec<Choice> {
        let now = Instant::now();
        let mut choices = Vec::new();
        for (&handle, stream) in &self.streams {
            for (index, op) in stream.queue.iter().enumerate() {
                if let Work::Move(moving) = &op.work
                    && !moving.early.is_empty()
                {
                    choices.push(Choice::Early { stream: handle, op: index });
                }
            }
            let Some(op) = stream.queue.front() else { continue };
            let blocked = op.stalled
                || op.after.iter().any(|other| self.pending.contains(other))
                || self.held & op.engine.bit() != 0
                || op.started && matches!(op.work, Work::Host { .. });
            let engine = op.engine.bit() != 0 && !op.started;
            let busy =
                engine && self.devices[stream.device].busy[op.engine as usize] >= op.engine.width();
            if blocked || busy {
                continue;
            }
            match op.not_before {
                Some(at) if at > now => {
                    let rest = at - now;
                    *wait = Some(wait.map_or(rest, |wait| wait.min(rest)));
                }
                _ => choices.push(Choice::Step(handle)),
            }
        }
        choices.sort_by_key(|choice| match *choice {
            Choice::Step(stream) => (stream, 0),
            Choice::Early { stream, op } => (stream, op + 1),
        });
        choices
    }

    fn take(&mut self, choice: &Choice) {
        match *choice {
            Choice::Step(stream) => self.step(stream),
            Choice::Early { stream, op } => self.read_early(stream, op),
        }
    }

    /// Starts the stream's first operation, or goes on with it.
    fn step(&mut self, handle: usize) {
        let device = self.streams[&handle].device;
        let slow = self.streams[&handle].slow;
        let times = if slow { self.config.slow_times } else { 1 };
        let stream = self.streams.get_mut(&handle).expect("choices has seen it");
        let op = stream.queue.front_mut().expect("choices has seen it");
        if !op.started {
            let engine = op.engine;
            let first = op.not_before.is_none();
            if first && (slow || self.config.delay_us > 0) {
                let bound = self.config.delay_us.saturating_mul(times);
                let delay = Duration::from_micros(self.rng.u64(0..=bound.max(u64::from(slow))));
                op.not_before = Some(Instant::now() + delay);
                return;
            }
            op.started = true;
            if engine.bit() != 0 {
                self.devices[device].busy[engine as usize] += 1;
            }
            let delay = self.begin(handle);
            let stream = self.streams.get_mut(&handle).expect("it was there");
            if let Some(op) = stream.queue.front_mut()
                && !delay.is_zero()
            {
                op.not_before = Some(Instant::now() + delay);
                return;
            }
        }
        let stream = self.streams.get_mut(&handle).expect("choices has seen it");
        let Some(mut op) = stream.queue.pop_front() else { return };
        let result = match &mut op.work {
            Work::Marker => Ok(true),
            Work::Host { function, user } => {
                let callback = Callback {
                    function: *function,
                    user: *user,
                    stream: handle,
                    op: op.id,
                    point: op.point.clone(),
                };
                if let Some(callbacks) = &self.callbacks {
                    // The receiver lives as long as the process.
                    let _ = callbacks.send(callback);
                }
                Ok(false)
            }
            Work::Move(moving) => self.move_some(device, moving, &op.point),
            Work::Kernel(kernel) => self.run_some(device, kernel, &op.point),
        };
        if self.config.step_us > 0 {
            let pause = Duration::from_micros(self.config.step_us.saturating_mul(times));
            op.not_before = Some(Instant::now() + pause);
        }
        self.streams.get_mut(&handle).expect("choices has seen it").queue.push_front(op);
        match result {
            Ok(true) => self.complete(handle),
            Ok(false) => {}
            Err(error) => self.lose(device, error),
        }
    }

    /// Ends the stream's first operation.
    fn complete(&mut self, handle: usize) {
        let stream = self.streams.get_mut(&handle).expect("the caller has seen it");
        let device = stream.device;
        let op = stream.queue.pop_front().expect("the caller has seen it");
        let dead = stream.dying && stream.queue.is_empty();
        if op.engine.bit() != 0 {
            self.devices[device].busy[op.engine as usize] -= 1;
        }
        self.pending.remove(&op.id);
        self.counters.completed += 1;
        if dead {
            self.remove_stream(handle);
        }
        wake_hosts();
    }

    /// Removes a stream that has nothing left to do.
    pub(crate) fn remove_stream(&mut self, handle: usize) {
        if let Some(stream) = self.streams.remove(&handle) {
            for actor in self.checker.retire(stream.actor) {
                for stream in self.streams.values_mut() {
                    stream.clock.forget(actor);
                }
            }
        }
    }
}
