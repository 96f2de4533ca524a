//! `kvferry bench file`.

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::files;
use kvferry_bench::options::FileBench;
use kvferry_bench::report::Report;

use super::Figures;

const EXAMPLES: &str = "\
Examples:
  kvferry bench file --quick                      a minute, in the folder of temporary files
  kvferry bench file --folder /mnt/nvme --check   seven rounds on that file system, with bounds
  kvferry bench file --sizes 2MiB --engine posix  one size, without io_uring

The file is written in blocks of random order and read: through the page cache (buffered, cached),
with an empty page cache (cold), and past it (direct). fio does the same with io_uring, registered
buffers and files, in as much memory. Without fio (apt-get install fio) its rows are missing.
--peers measures NIXL, too; `make bench-file-peers` installs it first.";

/// Measure memory to files and back, beside fio in the same rounds.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct FileArgs {
    #[command(flatten)]
    options: FileBench,
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    figures: Figures,
}

pub(super) fn run(args: &FileArgs) -> Result<(), Failure> {
    args.options.folder.as_deref().map_or(Ok(()), files::check_folder)?;
    args.figures.of(&[files::SCHEMA], args.check, Report::drawings, |bar| {
        files::measure(&args.options, bar)
    })
}
