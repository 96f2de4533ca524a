//! A kernel that computes for as long as the caller wants.

use crate::edge::Edge;
use crate::error::Error;
use kvferry::After;
use kvferry_sys::cuda::{Context, DeviceAllocation, Function, Grid, Module, Stream, launch};
use std::time::{Duration, Instant};

/// The kernel. Its parameters are the address of a word for each thread, and the number of rounds.
const TEXT: &str = include_str!("compute.ptx");
const ENTRY: &str = "kvferry_compute";

/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks for each multiprocessor: as many threads as it can have.
const BLOCKS_OF_ONE: u32 = 8;

/// Multiplies and adds on all multiprocessors of a device.
#[derive(Debug)]
pub struct Compute {
    stream: Stream,
    function: Function,
    /// A word for each thread, so that no compiler leaves the work out.
    results: DeviceAllocation,
    blocks: u32,
}

impl Compute {
    /// Loads the kernel for a context's device, with a stream of its own. A launch has at most `blocks_max` blocks.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(of: &Context, blocks_max: u32) -> Result<Self, Error> {
        let all = of.device().info()?.multiprocessors * BLOCKS_OF_ONE;
        let blocks = all.clamp(1, blocks_max.max(1));
        let module = Module::load_ptx(of, TEXT).map_err(|refused| refused.error)?;
        let results = DeviceAllocation::new(of, (blocks * THREADS * 4) as usize)?;
        let (stream, function) = (Stream::new(of)?, module.function(ENTRY)?);
        Ok(Self { stream, function, results, blocks })
    }

    /// Starts this many rounds, after those that were started before.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn start(&self, rounds: u32) -> Result<(), Error> {
        let grid = Grid { blocks: self.blocks, threads: THREADS, shared_bytes: 0 };
        let arguments = [self.results.address(), u64::from(rounds)];
        // SAFETY: each thread of the grid has a word of the results, which nothing else uses and which are freed only
        // after the driver has waited for the device's work.
        Ok(unsafe { launch(&self.stream, &self.function, grid, &arguments) }?)
    }

    /// An edge behind all rounds that were started, for transfers to come after.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn after(&self) -> Result<After, Error> {
        let device = self.stream.context().device().ordinal();
        // SAFETY: the stream is this value's.
        let edge = unsafe { Edge::after_stream(self.stream.raw(), device) }?;
        Ok(Edge::all([edge]))
    }

    /// Waits until all rounds that were started have run.
    ///
    /// # Errors
    /// If the driver refuses, or the kernel failed.
    pub fn wait(&self) -> Result<(), Error> {
        Ok(self.stream.synchronize()?)
    }

    /// The number of rounds that take about this time.
    ///
    /// # Errors
    /// If the driver refuses, or the kernel failed.
    pub fn rounds_for(&self, time: Duration) -> Result<u32, Error> {
        self.start(1)?;
        self.wait()?;
        let mut rounds = 16u32;
        loop {
            let began = Instant::now();
            self.start(rounds)?;
            self.wait()?;
            let took = began.elapsed().as_secs_f64();
            if took * 4.0 >= time.as_secs_f64() || rounds >= 1 << 28 {
                let wanted = f64::from(rounds) * time.as_secs_f64() / took;
                return Ok((wanted as u32).max(1));
            }
            rounds *= 2;
        }
    }
}
