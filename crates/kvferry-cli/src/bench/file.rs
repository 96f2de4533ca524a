//! `kvferry bench file`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvferry_bench::failure::Failure;
use kvferry_bench::files;
use kvferry_bench::options::FileBench;
use kvferry_bench::report::Report;
use kvferry_bench::units::parse_bytes;

use super::Figures;

const EXAMPLES: &str = "\
Examples:
  kvferry bench file --quick                       a minute, in the folder of temporary files
  kvferry bench file --folder /mnt/nvme --check    seven rounds on that file system, with bounds
  kvferry bench file --sizes 2MiB --engine posix   one size, without io_uring

The file is written in blocks of random order and read: through the page cache (buffered, cached), with
an empty page cache (cold), and past it (direct). fio does the same with io_uring, registered buffers and
files, in as much memory. Without fio (apt-get install fio) its rows are missing. --peers measures NIXL,
too; `make bench-file-peers` installs it first.";

/// Measure memory to files and back, beside fio in the same rounds.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct FileArgs {
    /// Where the file is made, and removed in the end [default: the folder of temporary files]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Bytes of the file [default: 512MiB, with --quick 128MiB]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    bytes: Option<u64>,
    /// Block sizes, up to 64 MiB
    #[arg(long, value_delimiter = ',', value_parser = parse_bytes, value_name = "SIZE",
          default_value = "4KiB,32KiB,256KiB,1MiB,16MiB")]
    sizes: Vec<u64>,
    /// How files are read and written
    #[arg(long, value_enum, default_value = "auto")]
    engine: Engine,
    /// A Python interpreter with NIXL and `kvferry_peers`, to measure NIXL's POSIX plug-in, too
    #[arg(long, value_name = "PYTHON")]
    peers: Option<PathBuf>,
    /// Rounds; seven or more to judge by [default: 7, with --quick 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Small and short
    #[arg(long)]
    quick: bool,
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    figures: Figures,
}

/// Engine for reads and writes of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Engine {
    /// io_uring if the system permits it, else threads
    Auto,
    /// io_uring
    Uring,
    /// Threads that call pread and pwrite
    Posix,
}

impl FileArgs {
    fn options(&self) -> FileBench {
        FileBench {
            folder: self.folder.clone(),
            bytes: self.bytes.unwrap_or(if self.quick { 128 << 20 } else { 512 << 20 }),
            sizes: self.sizes.clone(),
            engine: match self.engine {
                Engine::Auto => "auto",
                Engine::Uring => "uring",
                Engine::Posix => "posix",
            },
            peers: self.peers.clone(),
            rounds: self.rounds.map(|rounds| rounds as usize),
            quick: self.quick,
        }
    }
}

pub(super) fn run(args: &FileArgs) -> Result<(), Failure> {
    args.folder.as_deref().map_or(Ok(()), files::check_folder)?;
    args.figures.of(&[files::SCHEMA], args.check, Report::drawings, |bar| {
        files::measure(&args.options(), bar)
    })
}
