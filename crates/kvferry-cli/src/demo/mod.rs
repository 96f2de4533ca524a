//! `kvferry demo`: prefill engines hand requests over to decode engines, and every token is verified.
//!
//! This process is the router (`router.rs`). Each engine is a process (`node.rs`) with a scheduler, a
//! model that computes on a paged KV cache and kvferry's connector, an agent per rank. Pipes
//! (`messages.rs`) carry everything but KV, which the engines fetch from each other. `plan.rs` has the
//! engines and requests, `report.rs` and `plot.rs` the results, `args.rs` the arguments. `store/` is
//! `kvferry demo store`.

mod args;
mod messages;
pub(crate) mod node;
mod plan;
mod plot;
mod report;
mod router;
pub(crate) mod store;

use indicatif::ProgressBar;

use crate::{files, output};
use kvferry_bench::failure::Failure;
use kvferry_bench::machine;

pub(crate) use args::DemoArgs;
use args::OtherDemo;
use plan::{Asked, Plan};
use report::Report;
use router::Router;

pub(crate) fn run(args: &DemoArgs) -> Result<(), Failure> {
    if let Some(OtherDemo::Store(args)) = &args.of {
        return store::run(args);
    }
    let plan = Plan::new(args, machine::available_memory())?;
    let drawing = args.plot.as_deref();
    drawing.map_or(Ok(()), files::check)?;
    if !args.quiet {
        output::note(&plan.describe());
    }
    let bar = output::byte_bar(args.quiet, plan.total_bytes());
    let report = measure(&plan, args, &bar);
    bar.finish_and_clear();
    let report = report?;
    let printed = output::show(&report, args.json);
    if let Some(file) = drawing {
        files::write(file, plot::html(&report))?;
        if !args.quiet {
            output::note(&format!("drawn: {}", file.display()));
        }
    }
    printed?;
    report.complaint().map_or(Ok(()), |why| Err(Failure::Check(why)))
}

fn measure(plan: &Plan, args: &DemoArgs, bar: &ProgressBar) -> Result<Report, Failure> {
    bar.set_message("measuring the machine's limit");
    let limits = report::limits(plan)?;
    bar.set_message("starting engines");
    let router = Router::start(plan, bar)?;
    bar.set_message("computing the right tokens without engines");
    let asked = all_asked(plan);
    if !args.quiet {
        bar.suspend(|| output::note(&router.describe()));
    }
    Ok(Report::new(plan, &limits, router.run(asked, args.inject_fault)?))
}

/// Computes all requests with their right tokens, on all cores.
fn all_asked(plan: &Plan) -> Vec<Asked> {
    let threads = machine::cpus().min(plan.options.requests as usize);
    let requests = plan.options.requests as usize;
    let mut all: Vec<(usize, Asked)> = std::thread::scope(|scope| {
        let share = |thread: usize| {
            scope.spawn(move || {
                let numbers = (thread..requests).step_by(threads);
                numbers.map(|number| (number, plan.asked(number))).collect::<Vec<_>>()
            })
        };
        let shares: Vec<_> = (0..threads).map(share).collect();
        shares.into_iter().flat_map(|share| share.join().expect("no request panics")).collect()
    });
    all.sort_by_key(|(number, _)| *number);
    all.into_iter().map(|(_, asked)| asked).collect()
}
