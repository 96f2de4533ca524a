//! `kvferry bench`, `bench file`, `bench store`, `bench offload` and `kvferry bench-handoff`: the library measures, this prints, judges and writes.

use std::fs;
use std::path::Path;

use kvferry_bench::failure::Failure;
use kvferry_bench::options::StoreBench;
use kvferry_bench::{handoffs, transfers};

use crate::cli::{
    BenchArgs, BenchFileArgs, BenchHandoffArgs, BenchOf, BenchOffloadArgs, BenchStoreArgs,
    StoreRows,
};
use crate::files;
use crate::output::{self, Report};

pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    match &args.of {
        None => transfers(args),
        Some(BenchOf::File(args)) => files(args),
        Some(BenchOf::Store(args)) => store(args),
        Some(BenchOf::Offload(args)) => offload(args),
    }
}

fn store(args: &BenchStoreArgs) -> Result<(), Failure> {
    if let (Some(count), Some(folder)) = (args.fill, &args.folder) {
        return kvferry_bench::store::speed::fill(folder, count, args.quick);
    }
    args.folder.as_deref().map_or(Ok(()), kvferry_bench::files::check_folder)?;
    let bar = output::step_bar(args.quiet);
    let measured = match &args.trace {
        Some(trace) => {
            let blocks = args.blocks.iter().map(|&blocks| blocks as usize).collect();
            let options = StoreBench { trace: trace.clone(), blocks };
            kvferry_bench::store::measure(&options, &bar)
        }
        None if args.rows == StoreRows::Full => {
            kvferry_bench::store::full::measure(&args.speed(), args.seconds(), &bar)
        }
        None => kvferry_bench::store::speed::measure(&args.speed(), &bar),
    };
    bar.finish_and_clear();
    judged(&measured?, args.json, args.check)
}

fn offload(args: &BenchOffloadArgs) -> Result<(), Failure> {
    args.folder.as_deref().map_or(Ok(()), kvferry_bench::files::check_folder)?;
    let bar = output::step_bar(args.quiet);
    let measured = kvferry_bench::offload::measure(&args.options(), &bar);
    bar.finish_and_clear();
    judged(&measured?, args.json, args.check)
}

fn judged(report: &kvferry_bench::report::Report, json: bool, check: bool) -> Result<(), Failure> {
    output::show(report, json)?;
    match report.shortfall() {
        Some(shortfall) if check => Err(Failure::Check(shortfall)),
        _ => Ok(()),
    }
}

fn files(args: &BenchFileArgs) -> Result<(), Failure> {
    args.folder.as_deref().map_or(Ok(()), kvferry_bench::files::check_folder)?;
    let bar = output::step_bar(args.quiet);
    let measured = kvferry_bench::files::measure(&args.options(), &bar);
    bar.finish_and_clear();
    judged(&measured?, args.json, args.check)
}

fn transfers(args: &BenchArgs) -> Result<(), Failure> {
    if args.serve {
        return transfers::serve(args.listen);
    }
    let report = match &args.from {
        Some(file) => read(file)?,
        None => {
            args.output.as_deref().map_or(Ok(()), files::check)?;
            args.plot.as_deref().map_or(Ok(()), check_folder)?;
            let bar = output::step_bar(args.quiet);
            let measured = transfers::measure(&args.options(), &bar);
            bar.finish_and_clear();
            measured?
        }
    };
    // Each is tried, even if another can't be written.
    let shown = output::show(&report, args.json);
    let kept = match &args.output {
        Some(file) => files::write(file, output::json(&report)?),
        None => Ok(()),
    };
    let drawn = args.plot.as_deref().map_or(Ok(()), |folder| draw(folder, &report));
    shown.map_err(Failure::from).and(kept).and(drawn)?;
    match report.shortfall() {
        Some(shortfall) if args.check => Err(Failure::Check(shortfall)),
        _ => Ok(()),
    }
}

pub(crate) fn handoffs(args: &BenchHandoffArgs) -> Result<(), Failure> {
    let bar = output::step_bar(args.quiet);
    let measured = handoffs::measure(&args.options(), &bar);
    bar.finish_and_clear();
    let report = measured?;
    output::show(&report, args.json)?;
    report.shortfall().map_or(Ok(()), |shortfall| Err(Failure::Check(shortfall)))
}

impl Report for transfers::Report {
    fn text(&self) -> String {
        self.to_table()
    }
}

impl Report for kvferry_bench::report::Report {
    fn text(&self) -> String {
        self.to_table()
    }
}

fn read(file: &Path) -> Result<transfers::Report, Failure> {
    let text = fs::read_to_string(file).map_err(|error| error.to_string());
    let report = text.and_then(|text| transfers::Report::from_json(&text));
    report.map_err(|why| Failure::Usage(format!("--from {}: {why}", file.display())))
}

/// Whether pictures can be written to `folder`, which is made.
fn check_folder(folder: &Path) -> Result<(), Failure> {
    files::folder(folder)
        .and_then(|()| files::check(&folder.join(transfers::PAGE_NAME)))
        .map_err(|why| why.while_doing("--plot"))
}

fn draw(folder: &Path, report: &transfers::Report) -> Result<(), Failure> {
    let write = |(name, content)| files::write(&folder.join(name), content);
    files::folder(folder)
        .and_then(|()| report.drawings().into_iter().try_for_each(write))
        .map_err(|why| why.while_doing("--plot"))
}
