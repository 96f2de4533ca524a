//! A second process of this program, commanded over a pipe.
//!
//! The child cannot outlive its parent: the kernel kills it when the parent dies, even if it is stopped,
//! and it ends by itself at the end of its standard input.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child as Process, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::Failure;
use crate::lines::{Answer, Lines};

/// Commands to a child that are not answered in turn.
pub type Commands = Lines<io::Empty, ChildStdin>;

/// A helper process. Dropping it closes its pipe, waits half a second, then kills and reaps it.
///
/// Spawn it from the main thread: the kernel kills it when the *thread* that spawned it ends.
#[derive(Debug)]
pub struct Child {
    process: Process,
    /// Dropped first: the end of its input asks the child to end.
    pipe: Option<Lines<ChildStdout, ChildStdin>>,
}

impl Child {
    /// Starts this program with these arguments, its standard input and output on pipes.
    ///
    /// # Errors
    /// [`Failure::Failed`] if no process can be started.
    pub fn spawn(arguments: &[&str]) -> Result<Child, Failure> {
        // The running image: a new build may have replaced its file.
        Child::start(Command::new("/proc/self/exe").arg0("kvferry").args(arguments))
    }

    /// Starts another program that answers as this one does. It must end by itself when its parent
    /// dies.
    pub(crate) fn start(command: &mut Command) -> Result<Child, Failure> {
        let mut process = command
            // Ctrl-C goes to the parent alone, which must not lose its helper before it acts.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::Failed(format!("cannot start a second process: {error}")))?;
        let (answers, asks) = (process.stdout.take(), process.stdin.take());
        let pipe = answers.zip(asks).map(|(answers, asks)| Lines::new(answers, asks));
        Ok(Child { process, pipe })
    }

    fn pipe(&mut self) -> &mut Lines<ChildStdout, ChildStdin> {
        self.pipe.as_mut().expect("the pipe is open until the child is dropped")
    }

    /// Asks the child, and waits for its answer without a limit.
    ///
    /// # Errors
    /// What the child failed with, or that it has ended.
    pub fn ask<Q: Serialize, A: DeserializeOwned>(&mut self, ask: &Q) -> Result<A, Failure> {
        let pipe = self.pipe();
        pipe.ask(ask).map_err(|error| Failure::Failed(format!("the helper process: {error}")))?
    }

    /// Asks the child, and waits for its answer for `patience`. A child that does not answer in time
    /// must be dropped: its answer would be taken for that of the next ask.
    ///
    /// # Errors
    /// What the child failed with, that it has ended, or that it does not answer.
    pub fn ask_within<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        ask: &Q,
        patience: Duration,
    ) -> Result<A, Failure> {
        self.tell(ask)?;
        self.hear_within(patience)
    }

    /// Asks the child; [`Child::hear_within`] returns the answer.
    pub(crate) fn tell<Q: Serialize>(&mut self, ask: &Q) -> Result<(), Failure> {
        self.pipe().send(ask).map_err(|error| Failure::Failed(format!("the process: {error}")))
    }

    /// The child's next answer, if it comes in time.
    pub(crate) fn hear_within<A: DeserializeOwned>(
        &mut self,
        patience: Duration,
    ) -> Result<A, Failure> {
        let heard: io::Result<Option<Answer<A>>> = self.pipe().receive_within(patience);
        match heard {
            Ok(Some(answer)) => answer,
            Ok(None) => Err(Failure::Failed(self.how_it_ended()?)),
            Err(error) => Err(Failure::Failed(error.to_string())),
        }
    }

    /// Both ends of the pipe, to read answers on another thread. The child ends when the second one is
    /// dropped.
    ///
    /// # Errors
    /// If answers were read ahead.
    pub fn take_pipe(&mut self) -> io::Result<(Lines<ChildStdout, io::Sink>, Commands)> {
        let pipe = self.pipe.take().expect("the pipe is taken once");
        let (answers, asks) = pipe.into_parts()?;
        Ok((Lines::new(answers, io::sink()), Lines::new(io::empty(), asks)))
    }

    /// Describes how a child ended that has closed its output.
    ///
    /// # Errors
    /// An error of waiting for the process.
    pub fn how_it_ended(&mut self) -> io::Result<String> {
        Ok(match self.process.wait()? {
            status if status.success() => "the process ended".to_string(),
            status => format!("the process ended: {status}"),
        })
    }

    /// True if the process has ended.
    ///
    /// # Errors
    /// An error of asking for the process.
    pub fn has_ended(&mut self) -> io::Result<bool> {
        Ok(self.process.try_wait()?.is_some())
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// The first line of a child that reports without being asked.
    pub(crate) fn hello<A: DeserializeOwned>(&mut self) -> Result<A, Failure> {
        let hello: Option<Answer<A>> = self.pipe().receive()?;
        hello.ok_or_else(|| Failure::Failed("the helper process ended at once".into()))?
    }

    /// Sends a signal: SIGKILL, SIGSTOP or SIGCONT.
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
            // A stopped process can't end by itself.
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

/// Answers the parent, in the child, until the parent closes the pipe.
///
/// # Errors
/// If the pipe fails, or a line of it can't be read.
pub fn answer_parent<Q, F>(mut answer: F) -> Result<(), Failure>
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

/// Sends one answer, in the child, and waits until the parent closes the pipe.
pub(crate) fn hold<T: Serialize>(hello: T) -> Result<(), Failure> {
    let mut pipe = Lines::new(io::stdin(), io::stdout());
    pipe.send::<Answer<T>>(&Ok(hello))?;
    while pipe.receive::<serde_json::Value>()?.is_some() {}
    Ok(())
}

/// An answer as the pipe carries it.
///
/// # Errors
/// If `answer` has no JSON form.
pub(crate) fn value<T: Serialize>(answer: &T) -> Result<serde_json::Value, Failure> {
    Ok(serde_json::to_value(answer).map_err(io::Error::from)?)
}

/// Has the kernel kill this process when its parent ends. A parent that ended before has closed the
/// pipe, which ends this process, too.
///
/// # Errors
/// What the kernel says.
pub fn die_with_parent() -> Result<(), Failure> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| Failure::Failed(format!("cannot follow the parent process: {error}")))
}
