//! A second process of this program, and the pipe that commands it.
//!
//! The child cannot outlive its parent: the kernel kills it when the parent dies, and it leaves on
//! its own at the end of its standard input. The first also ends a child that was stopped.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child as Process, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::Failure;
use crate::lines::{Answer, Lines};

/// What is said to a child, and not answered in turn.
pub(crate) type Commands = Lines<io::Empty, ChildStdin>;

/// A helper process; killed and reaped when dropped.
///
/// Spawn it from the main thread: the kernel takes the death of the spawning *thread* for the
/// parent's.
#[derive(Debug)]
pub(crate) struct Child {
    process: Process,
    /// Closed first when the child is to leave.
    pipe: Option<Lines<ChildStdout, ChildStdin>>,
}

impl Child {
    /// Starts `kvferry` with these arguments, its standard input and output on pipes.
    pub(crate) fn spawn(arguments: &[&str]) -> Result<Child, Failure> {
        // The running image itself: its file may have been replaced since by a new build.
        Child::start(Command::new("/proc/self/exe").arg0("kvferry").args(arguments))
    }

    /// Starts another program that answers like this one. It has to end by itself when its parent
    /// dies.
    pub(crate) fn start(command: &mut Command) -> Result<Child, Failure> {
        let mut process = command
            // Ctrl-C is for the parent alone: it must not find its helper gone first.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::Failed(format!("cannot start a second process: {error}")))?;
        let (answers, asks) = (process.stdout.take(), process.stdin.take());
        let pipe = answers.zip(asks).map(|(answers, asks)| Lines::new(answers, asks));
        Ok(Child { process, pipe })
    }

    /// Asks the child for something.
    pub(crate) fn ask<Q: Serialize, A: DeserializeOwned>(&mut self, ask: &Q) -> Result<A, Failure> {
        let pipe = self.pipe.as_mut().expect("the pipe is open until the child is dropped");
        pipe.ask(ask).map_err(|error| Failure::Failed(format!("the helper process: {error}")))?
    }

    /// Asks the child for something, and does not wait for ever: a child that does not answer in time
    /// is of no use any more.
    pub(crate) fn ask_within<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        ask: &Q,
        patience: Duration,
    ) -> Result<A, Failure> {
        self.tell(ask)?;
        self.hear_within(patience)
    }

    /// Asks the child for something whose answer is heard later.
    pub(crate) fn tell<Q: Serialize>(&mut self, ask: &Q) -> Result<(), Failure> {
        let pipe = self.pipe.as_mut().expect("the pipe is open until the child is dropped");
        pipe.send(ask).map_err(|error| Failure::Failed(format!("the process: {error}")))
    }

    /// What the child says next, if it does so in time.
    pub(crate) fn hear_within<A: DeserializeOwned>(
        &mut self,
        patience: Duration,
    ) -> Result<A, Failure> {
        let pipe = self.pipe.as_mut().expect("the pipe is open until the child is dropped");
        let heard: io::Result<Option<Answer<A>>> = pipe.receive_within(patience);
        match heard {
            Ok(Some(answer)) => answer,
            Ok(None) => Err(Failure::Failed(self.how_it_ended()?)),
            Err(error) => Err(Failure::Failed(error.to_string())),
        }
    }

    /// Both ends of the pipe, for one who listens and commands at the same time. The child is to
    /// leave when the second is dropped.
    pub(crate) fn take_pipe(&mut self) -> io::Result<(Lines<ChildStdout, io::Sink>, Commands)> {
        let pipe = self.pipe.take().expect("the pipe is taken once");
        let (answers, asks) = pipe.into_parts()?;
        Ok((Lines::new(answers, io::sink()), Lines::new(io::empty(), asks)))
    }

    /// How a child that has closed its output ended.
    pub(crate) fn how_it_ended(&mut self) -> io::Result<String> {
        Ok(match self.process.wait()? {
            status if status.success() => "the process ended".to_string(),
            status => format!("the process ended: {status}"),
        })
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// What the child says first, unasked.
    pub(crate) fn hello<A: DeserializeOwned>(&mut self) -> Result<A, Failure> {
        let pipe = self.pipe.as_mut().expect("the pipe is open until the child is dropped");
        let hello: Option<Answer<A>> = pipe.receive()?;
        hello.ok_or_else(|| Failure::Failed("the helper process ended at once".into()))?
    }

    /// SIGKILL, SIGSTOP, SIGCONT: what the fault figures are about.
    pub(crate) fn signal(&self, signal: Signal) -> Result<(), Failure> {
        let pid = i32::try_from(self.id()).ok().and_then(Pid::from_raw);
        let pid = pid.expect("a process id is a positive i32");
        kill_process(pid, signal).map_err(|error| Failure::Failed(error.to_string()))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        const GRACE: Duration = Duration::from_millis(500);
        self.pipe = None;
        if matches!(self.process.try_wait(), Ok(None)) {
            // One that was stopped can't leave.
            let _ = self.signal(Signal::CONT);
        }
        let asked = Instant::now();
        while asked.elapsed() < GRACE {
            match self.process.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                _ => return,
            }
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// In the child: answers asks until the parent closes the pipe.
pub(crate) fn answer_parent<Q, F>(mut answer: F) -> Result<(), Failure>
where
    Q: DeserializeOwned,
    F: FnMut(Q) -> Result<serde_json::Value, Failure>,
{
    die_with_parent()?;
    let mut pipe = Lines::new(io::stdin(), io::stdout());
    while let Some(ask) = pipe.receive()? {
        if pipe.send::<Answer<_>>(&answer(ask)).is_err() {
            break;
        }
    }
    Ok(())
}

/// An answer on its way.
pub(crate) fn value<T: Serialize>(answer: &T) -> Result<serde_json::Value, Failure> {
    Ok(serde_json::to_value(answer).map_err(io::Error::from)?)
}

/// The kernel ends this process when its parent ends. A parent that is gone already has closed the
/// pipe, so the race between the two needs nothing more.
pub(crate) fn die_with_parent() -> Result<(), Failure> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| Failure::Failed(format!("cannot follow the parent process: {error}")))
}
