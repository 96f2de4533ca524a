//! `kvferry demo`: prefill engines hand requests over to decode engines, and every token is verified.
//!
//! This process is the router (`router.rs`). Each engine is a process (`node.rs`) with a scheduler, a
//! model that computes on a paged KV cache and kvferry's connector, an agent per rank. They talk over
//! pipes (`messages.rs`) about everything but KV, which the engines fetch from each other.
//! `plan.rs` says what there is to be done, `report.rs` and `plot.rs` what came of it.

mod messages;
pub(crate) mod node;
mod plan;
mod plot;
mod report;
mod router;

use indicatif::ProgressBar;

use crate::cli::DemoArgs;
use crate::failure::Failure;
use crate::{files, machine, output};

use plan::{Asked, Plan};
use report::Report;
use router::Router;

pub(super) fn run(args: &DemoArgs) -> Result<(), Failure> {
    let plan = Plan::new(args, machine::available_memory())?;
    let drawing = args.engines.plot.as_deref();
    drawing.map_or(Ok(()), files::check)?;
    if !args.quiet {
        output::note(&plan.describe());
    }
    let bar = output::told_bar(args.quiet, plan.total_bytes());
    let report = measure(&plan, args, &bar);
    bar.finish_and_clear();
    let report = report?;
    let printed =
        if args.json { output::print_json(&report) } else { output::print(&report.to_table()) };
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
    bar.set_message("finding what the machine reaches by itself");
    let limits = report::limits(plan)?;
    bar.set_message("starting engines");
    let router = Router::start(plan, bar)?;
    bar.set_message("finding what the model says without any engine");
    let asked = all_asked(plan);
    if !args.quiet {
        bar.suspend(|| output::note(&router.describe()));
    }
    Ok(Report::new(plan, &limits, router.run(asked, args.inject_fault)?))
}

/// All requests with what is right, found on all cores.
fn all_asked(plan: &Plan) -> Vec<Asked> {
    let threads = machine::cpus().min(plan.requests as usize);
    let requests = plan.requests as usize;
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
