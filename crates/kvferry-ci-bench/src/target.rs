//! The other process: an agent that peers write to and read from, and what it counted.

use crate::Failure;
use crate::counters::{Counts, be_quiet, watch};
use kvferry::{Access, Agent, Checksum, RemoteRegion};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Room for the largest batch, twice over so that blocks can be scattered.
pub(crate) const REGION_BYTES: usize = 64 << 20;

/// An agent that has no choices left to the machine it runs on.
pub(crate) fn agent(name: &str, transport: &str) -> Result<Agent, Failure> {
    let agent = Agent::builder()
        .name(name)
        .listen(([127, 0, 0, 1], 0))
        .transports(kvferry::Transports::parse(transport)?)
        .io_threads(1)
        .streams_per_peer(1)
        .checksum(Checksum::Off)
        .start()?;
    Ok(agent)
}

/// Says where it is, then answers each line with what was counted so far.
pub(crate) fn serve(transport: &str) -> Result<(), Failure> {
    // Answering is no part of what is counted.
    be_quiet();
    let agent = agent("target", transport)?;
    let region = agent.allocate_private(REGION_BYTES, Access::READ_WRITE)?;
    watch(region.addr(), REGION_BYTES);
    let here = (agent.advertised(), region.remote().to_bytes());
    println!("{}", serde_json::to_string(&here)?);
    for line in std::io::stdin().lock().lines() {
        line?;
        println!("{}", serde_json::to_string(&Counts::now())?);
    }
    Ok(())
}

/// The other process, seen from this one.
pub(crate) struct Target {
    child: Child,
    ask: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    pub(crate) address: String,
    pub(crate) region: RemoteRegion,
}

impl Target {
    pub(crate) fn start(transport: &str) -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["target", transport])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let ask = child.stdin.take();
        let mut answers = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        let mut line = String::new();
        answers.read_line(&mut line)?;
        let (address, region): (String, Vec<u8>) = serde_json::from_str(&line)?;
        let region = RemoteRegion::from_bytes(&region)?;
        Ok(Self { child, ask, answers, address, region })
    }

    pub(crate) fn counts(&mut self) -> Result<Counts, Failure> {
        let ask = self.ask.as_mut().ok_or("the target was told to end")?;
        writeln!(ask)?;
        ask.flush()?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.ask.take());
        let _ = self.child.wait();
    }
}
