//! The prefill process: fills its pool, writes each request into decode's blocks.

use std::net::TcpStream;
use std::time::Duration;

use kvferry::{Access, Agent, Batch, Notification, Options, Peer};

use crate::bench::pages::Pages;
use crate::bench::raw;
use crate::blocks::{Numbers, shuffled};
use crate::child::Child;
use crate::failure::Failure;
use crate::machine::shared_clock;

use super::messages::{Ask, Opened, Verified, WaveId};
use super::plan::Plan;
use super::pool::Pool;

/// Notifications of this name carry a request's number in its wave.
pub(super) const HANDOFF: &str = "handoff";

/// The raw stream is as long as a wave, up to this: a demo is not made to wait for it.
const RAW_BYTES: u64 = 128 << 20;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) struct Prefill {
    pool: Pool,
    peer: Peer,
    decode: Opened,
    request_blocks: u32,
    raw: TcpStream,
    raw_payload: Pages,
    child: Child,
    // Last, so that it is dropped after everything that uses it.
    _agent: Agent,
}

/// Which blocks hold each request of a wave, here and there.
pub(super) struct Tables {
    pub(super) prefill: Vec<Vec<u32>>,
    pub(super) decode: Vec<Vec<u32>>,
}

impl Prefill {
    pub(super) fn start(plan: &Plan) -> Result<Prefill, Failure> {
        let mut child = Child::spawn(&["demo-decode"])?;
        let (shape, request_blocks) = (plan.shape(), plan.request_blocks());
        let raw_bytes = plan.wave_bytes().clamp(1 << 20, RAW_BYTES) as usize;
        let decode: Opened = child.ask(&Ask::Open { shape, request_blocks, raw_bytes })?;
        let agent = Agent::builder().name("prefill").listen(([127, 0, 0, 1], 0)).start()?;
        let pool = Pool::allocate(&agent, shape, Access::NONE)?;
        let peer = agent.peer(&decode.agent)?;
        peer.connect(CONNECT_TIMEOUT)?;
        let mut raw = TcpStream::connect(decode.raw)?;
        let raw_payload = Pages::filled(1, raw_bytes);
        // The first one pays for the receiver's page faults.
        raw::send(&mut raw, &raw_payload)?;
        Ok(Prefill { pool, peer, decode, request_blocks, raw, raw_payload, child, _agent: agent })
    }

    /// Fills this pool while decode poisons its own.
    pub(super) fn prepare(&mut self, wave: &WaveId) -> Result<Tables, Failure> {
        let Prefill { pool, child, request_blocks, .. } = self;
        let mut numbers = Numbers::from_seed(crate::content::random());
        let prefill = assign(pool, wave, *request_blocks, &mut numbers);
        let decode = std::thread::scope(|scope| {
            let filling = scope.spawn(|| fill(pool, wave, &prefill));
            let decode = child.ask::<_, Vec<Vec<u32>>>(&Ask::Prepare(*wave));
            filling.join().expect("filling does not panic")?;
            decode
        })?;
        Ok(Tables { prefill, decode })
    }

    /// Writes a request and returns when that was begun. Building the batch counts: a block table
    /// is new with each request.
    pub(super) fn hand_off(&self, tables: &Tables, request: usize) -> Result<Duration, Failure> {
        let started = shared_clock();
        let batch = self.batch(&tables.prefill[request], &tables.decode[request])?;
        let message = (request as u32).to_be_bytes().to_vec();
        let notify = Notification { from: String::new(), name: HANDOFF.into(), message };
        let moved =
            self.peer.write(&batch, &Options { notify: Some(notify), ..Options::default() })?;
        if moved.bytes != self.request_bytes() {
            let (moved, meant) = (moved.bytes, self.request_bytes());
            return Err(Failure::Check(format!("{moved} bytes were moved instead of {meant}")));
        }
        Ok(started)
    }

    fn batch(&self, ours: &[u32], theirs: &[u32]) -> Result<Batch, Failure> {
        let page = self.pool.shape.page_bytes;
        let mut batch = Batch::with_capacity(ours.len() * self.pool.layers.len());
        for (local, remote) in self.pool.layers.iter().zip(&self.decode.layers) {
            for (&from, &to) in ours.iter().zip(theirs) {
                let (from, to) = (u64::from(from) * page, u64::from(to) * page);
                batch.push(local, from, &remote.0, to, page)?;
            }
        }
        Ok(batch)
    }

    pub(super) fn verify(&mut self, wave: &WaveId) -> Result<Verified, Failure> {
        self.child.ask(&Ask::Verify(*wave))
    }

    /// Bytes per second of one raw TCP stream between the same two processes.
    pub(super) fn raw_rate(&mut self) -> Result<f64, Failure> {
        let took = raw::send(&mut self.raw, &self.raw_payload)?;
        Ok(self.raw_payload.len() as f64 / took.as_secs_f64())
    }

    pub(super) fn request_bytes(&self) -> u64 {
        request_bytes(&self.pool, self.request_blocks) as u64
    }

    /// Damages one byte in the middle of the last request.
    pub(super) fn flip_a_byte(&self, tables: &Tables) -> Result<(), Failure> {
        let table = tables.prefill.last().expect("a wave has a request");
        let (layer, block) = (self.pool.shape.layers / 2, table[table.len() / 2]);
        let mut page = vec![0; self.pool.shape.page_bytes as usize];
        self.pool.read(layer, block, &mut page)?;
        let middle = page.len() / 2;
        page[middle] ^= 0x40;
        self.pool.write(layer, block, &page)
    }
}

fn request_bytes(pool: &Pool, request_blocks: u32) -> usize {
    let page = pool.shape.page_bytes as usize;
    page * request_blocks as usize * pool.layers.len()
}

/// Random blocks of the pool for each request of a wave, no block twice.
pub(super) fn assign(
    pool: &Pool,
    wave: &WaveId,
    request_blocks: u32,
    numbers: &mut Numbers,
) -> Vec<Vec<u32>> {
    let order = shuffled(pool.shape.blocks, numbers);
    let tables = order.chunks_exact(request_blocks as usize).take(wave.requests as usize);
    tables.map(<[u32]>::to_vec).collect()
}

fn fill(pool: &Pool, wave: &WaveId, tables: &[Vec<u32>]) -> Result<(), Failure> {
    pool.for_each_layer(|layer, page| {
        for (request, table) in tables.iter().enumerate() {
            for (ordinal, &block) in table.iter().enumerate() {
                wave.page(request as u32, layer, ordinal as u32).fill(page);
                pool.write(layer, block, page)?;
            }
        }
        Ok(())
    })
}
