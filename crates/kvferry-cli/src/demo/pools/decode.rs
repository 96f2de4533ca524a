//! The decode process: owns the blocks that are written, and judges what it finds in them.

use std::collections::HashMap;
use std::net::TcpListener;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use kvferry::{Access, Agent};
use serde_json::Value;

use crate::bench::pages::Pages;
use crate::bench::raw;
use crate::blocks::Numbers;
use crate::child;
use crate::content::{self, Content};
use crate::failure::Failure;
use crate::lines::Described;
use crate::machine::shared_clock;

use super::messages::{Ask, Opened, Verified, WaveId, Wrong};
use super::pool::{Pool, Shape};
use super::prefill::{HANDOFF, assign};

/// How long a notification may lag behind the call that promised it.
const NOTIFICATION_TIMEOUT: Duration = Duration::from_secs(10);

/// `kvferry demo-decode`.
pub(crate) fn run() -> Result<(), Failure> {
    let mut decode: Option<Decode> = None;
    child::answer_parent(|ask: Ask| match (ask, &mut decode) {
        (Ask::Open { shape, request_blocks, raw_bytes }, slot) => {
            let (opened, process) = Decode::open(shape, request_blocks, raw_bytes)?;
            *slot = Some(process);
            Ok(serde_json::to_value(opened).map_err(std::io::Error::from)?)
        }
        (Ask::Prepare(wave), Some(decode)) => decode.prepare(&wave),
        (Ask::Verify(wave), Some(decode)) => decode.verify(&wave),
        (_, None) => Err(Failure::Failed("no pool is open".into())),
    })
}

struct Decode {
    pool: Pool,
    request_blocks: u32,
    tables: Vec<Vec<u32>>,
    poison: u64,
    arrivals: Arc<Arrivals>,
    _agent: Agent,
}

impl Decode {
    fn open(
        shape: Shape,
        request_blocks: u32,
        raw_bytes: usize,
    ) -> Result<(Opened, Decode), Failure> {
        let agent = Agent::builder().name("decode").listen(([127, 0, 0, 1], 0)).start()?;
        let pool = Pool::allocate(&agent, shape, Access::WRITE)?;
        let raw = TcpListener::bind("127.0.0.1:0")?;
        let opened = Opened {
            agent: agent.advertised().to_string(),
            layers: pool.layers.iter().map(|layer| Described(layer.remote())).collect(),
            raw: raw.local_addr()?,
        };
        std::thread::spawn(move || -> std::io::Result<()> {
            let memory = Mutex::new(Pages::filled(0, raw_bytes));
            raw::serve(raw.accept()?.0, &memory)
        });
        let arrivals = Arc::new(Arrivals::default());
        arrivals.clone().listen(agent.clone());
        let (tables, poison) = (Vec::new(), 0);
        Ok((opened, Decode { pool, request_blocks, tables, poison, arrivals, _agent: agent }))
    }

    /// Poisons the whole pool with bytes nobody can foresee, and chooses where requests shall go.
    fn prepare(&mut self, wave: &WaveId) -> Result<Value, Failure> {
        self.arrivals.told.lock().expect(UNPOISONED).clear();
        self.poison = content::random();
        let mut numbers = Numbers::from_seed(content::random());
        self.tables = assign(&self.pool, wave, self.request_blocks, &mut numbers);
        self.pool.for_each_layer(|layer, page| {
            (0..self.pool.shape.blocks).try_for_each(|block| {
                self.poison_of(layer, block).fill(page);
                self.pool.write(layer, block, page)
            })
        })?;
        Ok(serde_json::to_value(&self.tables).map_err(std::io::Error::from)?)
    }

    fn poison_of(&self, layer: u32, block: u32) -> Content {
        Content::of(&[self.poison, u64::from(layer), u64::from(block)])
    }

    fn verify(&self, wave: &WaveId) -> Result<Value, Failure> {
        let told_ns = self.arrivals.of_all(wave.requests)?;
        // Which page of which request a block holds.
        let owners: HashMap<u32, (u32, u32)> =
            self.tables.iter().enumerate().flat_map(owned).collect();
        let wrong: Mutex<Vec<Wrong>> = Mutex::default();
        self.pool.for_each_layer(|layer, page| {
            let mut scratch = Vec::new();
            for block in 0..self.pool.shape.blocks {
                self.pool.read(layer, block, page)?;
                let owner = owners.get(&block).copied();
                if let Some(found) = self.judge(wave, layer, block, owner, page, &mut scratch) {
                    wrong.lock().expect(UNPOISONED).push(found);
                }
            }
            Ok(())
        })?;
        let mut wrong = wrong.into_inner().expect(UNPOISONED);
        wrong.sort_by_key(|wrong| {
            (wrong.request.is_none(), wrong.request, wrong.layer, wrong.block)
        });
        let layers = u64::from(self.pool.shape.layers);
        let pages = owners.len() as u64 * layers;
        let verified = Verified {
            told_ns,
            pages,
            untouched_pages: u64::from(self.pool.shape.blocks) * layers - pages,
            wrong_pages: wrong.len() as u64,
            wrong: wrong.into_iter().next(),
        };
        Ok(serde_json::to_value(verified).map_err(std::io::Error::from)?)
    }

    fn judge(
        &self,
        wave: &WaveId,
        layer: u32,
        block: u32,
        owner: Option<(u32, u32)>,
        page: &[u8],
        scratch: &mut Vec<u8>,
    ) -> Option<Wrong> {
        let poison = self.poison_of(layer, block);
        let right = match owner {
            Some((request, ordinal)) => wave.page(request, layer, ordinal),
            None => poison,
        };
        let offset = right.check(page, scratch).err()?;
        let request = owner.map(|(request, _)| wave.first_request + request);
        let poison = poison.check(page, scratch).is_ok();
        Some(Wrong { round: wave.round, request, layer, block, offset, poison })
    }
}

fn owned((request, table): (usize, &Vec<u32>)) -> impl Iterator<Item = (u32, (u32, u32))> {
    let pages = table.iter().enumerate();
    pages.map(move |(ordinal, &block)| (block, (request as u32, ordinal as u32)))
}

const UNPOISONED: &str = "nothing panics while it holds the lock";

/// When decode was told of each request.
#[derive(Default)]
struct Arrivals {
    told: Mutex<HashMap<u32, Vec<Duration>>>,
    more: Condvar,
}

impl Arrivals {
    /// Takes the agent's notifications on a thread of its own, for as long as the process lives.
    fn listen(self: Arc<Self>, agent: Agent) {
        const POLL: Duration = Duration::from_secs(3600);
        std::thread::spawn(move || {
            loop {
                let Some(notification) = agent.wait_notification(POLL) else { continue };
                let told = shared_clock();
                let request = <[u8; 4]>::try_from(notification.message.as_slice());
                if let (HANDOFF, Ok(request)) = (notification.name.as_str(), request) {
                    let request = u32::from_be_bytes(request);
                    self.told.lock().expect(UNPOISONED).entry(request).or_default().push(told);
                    self.more.notify_all();
                }
            }
        });
    }

    /// When each of `requests` arrived, in order; each must have been told exactly once.
    fn of_all(&self, requests: u32) -> Result<Vec<u64>, Failure> {
        let told = self.told.lock().expect(UNPOISONED);
        let (told, _) = self
            .more
            .wait_timeout_while(told, NOTIFICATION_TIMEOUT, |told| told.len() < requests as usize)
            .expect(UNPOISONED);
        (0..requests)
            .map(|request| match told.get(&request).map(Vec::as_slice) {
                Some([once]) => Ok(once.as_nanos() as u64),
                Some(more) => {
                    Err(format!("decode was told {} times of request {request}", more.len()))
                }
                None => Err(format!("decode was never told of request {request}")),
            })
            .collect::<Result<_, _>>()
            .map_err(Failure::Check)
    }
}
