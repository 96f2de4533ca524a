//! `kvferry demo --without-engines`: KV cache handed from a prefill to a decode process, every byte verified.
//!
//! This process is prefill (`prefill.rs`) and starts the other (`decode.rs`); they talk over a pipe
//! (`messages.rs`) about everything but the cache itself, which moves through two agents. A round
//! goes in waves of as many requests as the pools hold: prepare (prefill fills, decode poisons and
//! chooses its blocks), hand off (the only part that is timed), verify.

pub(crate) mod decode;
mod messages;
mod plan;
mod pool;
mod prefill;
mod report;

use std::sync::Mutex;
use std::time::Duration;

use indicatif::ProgressBar;

use crate::cli::DemoArgs;
use crate::failure::Failure;
use crate::model::MODELS;
use crate::{content, output, table, units};

use messages::{Verified, WaveId};
use plan::Plan;
use prefill::Prefill;
use report::{Measured, Report};

pub(crate) fn run(args: &DemoArgs) -> Result<(), Failure> {
    let plan = Plan::new(args, crate::machine::available_memory())?;
    if !args.quiet {
        output::note(&plan.describe());
        plan.remarks.iter().for_each(|remark| output::note(&format!("note: {remark}")));
    }
    let bar = output::byte_bar(args.quiet, plan.total_bytes());
    let measured = measure(&plan, args.inject_fault, &bar);
    bar.finish_and_clear();
    let report = Report::new(&plan, &measured?);
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&report.to_table())?;
    }
    Ok(())
}

fn measure(plan: &Plan, inject_fault: bool, bar: &ProgressBar) -> Result<Measured, Failure> {
    bar.set_message("starting decode");
    let mut prefill = Prefill::start(plan)?;
    let seed = content::random();
    let mut measured = Measured::default();
    for round in 0..plan.rounds {
        for (wave, requests) in plan.waves().enumerate() {
            let id = WaveId {
                seed,
                round,
                first_request: requests.start,
                requests: requests.len() as u32,
            };
            let at = format!("round {}/{}", round + 1, plan.rounds);
            bar.set_message(format!("{at}: filling"));
            let tables = prefill.prepare(&id)?;
            if inject_fault && round == 0 && wave == 0 {
                prefill.flip_a_byte(&tables)?;
            }
            measured.raw_rates.push(prefill.raw_rate()?);
            bar.set_message(format!("{at}: moving"));
            let started = hand_off_all(&prefill, &tables, plan.concurrency, bar)?;
            bar.set_message(format!("{at}: verifying"));
            let verified = prefill.verify(&id)?;
            check(&verified)?;
            measured.add_wave(&started, &verified, plan.request_bytes());
        }
    }
    Ok(measured)
}

/// All requests of a wave, `concurrency` at a time; when each was started, on the shared clock.
fn hand_off_all(
    prefill: &Prefill,
    tables: &prefill::Tables,
    concurrency: u32,
    bar: &ProgressBar,
) -> Result<Vec<Duration>, Failure> {
    let requests = tables.decode.len();
    let waiting = Mutex::new(0..requests);
    let started = Mutex::new(vec![Duration::ZERO; requests]);
    let lock = "no handoff panics while it holds the list";
    std::thread::scope(|scope| {
        let caller = || -> Result<(), Failure> {
            loop {
                let Some(request) = waiting.lock().expect(lock).next() else { return Ok(()) };
                let at = prefill.hand_off(tables, request)?;
                started.lock().expect(lock)[request] = at;
                bar.inc(prefill.request_bytes());
            }
        };
        let callers: Vec<_> = (0..concurrency).map(|_| scope.spawn(caller)).collect();
        callers.into_iter().try_for_each(|caller| caller.join().expect("no handoff panics"))
    })?;
    Ok(started.into_inner().expect(lock))
}

/// The first wrong byte, by name.
fn check(verified: &Verified) -> Result<(), Failure> {
    match &verified.wrong {
        None => Ok(()),
        Some(wrong) => Err(Failure::Check(wrong.describe(verified.wrong_pages))),
    }
}

pub(crate) fn list_models(args: &DemoArgs) -> Result<(), Failure> {
    let header = ["model", "shape", "per token", "page"];
    let rows: Vec<Vec<String>> = MODELS
        .iter()
        .map(|model| {
            let page = model.page_bytes(args.block_tokens, args.dtype);
            let token = model.token_bytes(args.dtype);
            vec![model.name.into(), model.describe(), units::bytes(token), units::bytes(page)]
        })
        .collect();
    output::print(&table::aligned(&header, &rows))?;
    Ok(())
}
