//! How far the product is from the floor: the real binary beside references, interleaved in one run.
//!
//! ```text
//! main ─► cells ─► grpc ──► P  the product           each a process of its own, so that
//!           │       └─────► S  stock     (stock)     its CPU time is its own
//!           └────► raw ───► T  plain TCP (raw)
//! goals ─► report            D4, D1M     (holdfast::cli::probe)
//! ```
//!
//! Only ratios within one repeat count: a machine that is shared, or has another day, moves both sides of them.

mod cells;
mod goals;
mod grpc;
mod load;
mod process;
mod raw;
mod report;
mod requests;
mod stock;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Parser, ValueEnum};
use holdfast::cli::probe::{self, Probe};

use cells::{CELLS, Cell, Rig, Samples};
use goals::{GOALS, Goal};
use load::{Sample, Timing};
use process::Server;

/// The same allocator for all, so that no ratio is the allocator's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T> = std::result::Result<T, Error>;

/// Stretches of the long run.
const STRETCHES: u32 = 10;

const HELP: &str = "\
References:
  T        messages over TCP with a length before each, checksum, one write a read, an index entry
  S        the same gRPC service as tonic makes it by default, storing nothing
  D4, D1M  writes of 4 KiB and 1 MiB, each with fdatasync
P is the product: the real binary with its defaults and a data directory of its own.

Messages have 1 KiB. Every repeat has fresh processes and measures every cell once; a goal's
figure is the median of its ratio in each repeat. docs/performance.md says more.

Examples:
  cargo bench --bench floor                                     all of it, five minutes
  cargo bench --bench floor -- --markdown > table.md            the tables of docs/performance.md
  cargo bench --bench floor -- --goals G1,G2 --repeats 3        some goals, to try a change
  cargo bench --bench floor -- --goals G5 --holdfast ./old      another binary
  cargo bench --bench floor -- --goals none --sustained 10      ten minutes of sends (G10)
  cargo bench --bench floor -- --set store.recent_size=64MiB    the product with another setting";

/// Measure the product beside the references.
#[derive(Debug, Parser)]
#[command(name = "cargo bench --bench floor --", after_help = HELP)]
struct Options {
    /// How often each cell is measured.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// How long each cell is measured, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    seconds: f64,
    /// How long each cell runs before, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5)]
    warm_up: f64,
    /// Threads that make the load, each with one connection.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=8))]
    threads: u16,
    /// Only these goals and what they need; `none` for none.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    goals: Vec<String>,
    /// Only these cells, without goals that need others.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    cells: Vec<String>,
    /// Send for so many minutes at the end, and look whether the rate holds (G10).
    #[arg(long, value_name = "MINUTES")]
    sustained: Option<f64>,
    /// The binary to measure; otherwise the one that cargo has just built.
    #[arg(long, value_name = "FILE", env = "HOLDFAST_BIN")]
    holdfast: Option<PathBuf>,
    /// A setting for the product, `section.key=value`.
    #[arg(long, value_name = "SETTING")]
    set: Vec<String>,
    /// Where data goes (about 4 GiB, removed afterwards); the device that is measured.
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    dir: PathBuf,
    #[arg(long, value_enum, default_value = "text")]
    output: Output,
    /// Tables for a document.
    #[arg(long, conflicts_with = "output")]
    markdown: bool,
    /// Be one of the references.
    #[arg(long, value_enum, hide = true)]
    serve: Option<Reference>,
    /// Cargo says so.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Reference {
    Raw,
    Stock,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match options.serve {
        Some(Reference::Raw) => raw::serve(&options.dir),
        Some(Reference::Stock) => stock::serve(),
        None => run(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What a run gave.
pub struct Run {
    /// One map a repeat.
    repeats: Vec<Samples>,
    /// One before each repeat, and one at the end.
    probes: Vec<Probe>,
    /// Resident memory of the product at the end of each repeat, and at most, in bytes.
    memory: Vec<(u64, u64)>,
    /// The long run, if there was one.
    stretches: Vec<Sample>,
}

fn run(options: &Options) -> Result<()> {
    let goals = chosen_goals(options)?;
    let cells = chosen_cells(options, &goals)?;
    let binary = process::binary(options.holdfast.clone());
    let mut run = Run { repeats: vec![], probes: vec![], memory: vec![], stretches: vec![] };
    let parent = tempfile::Builder::new().prefix("holdfast-floor-").tempdir_in(&options.dir)?;
    for number in 1..=options.repeats {
        if cells.is_empty() {
            break;
        }
        run.probes.push(probe::measure(parent.path())?);
        let dir = tempfile::tempdir_in(parent.path())?;
        let rig = start(options, &binary, dir.path())?;
        let mut samples = Samples::new();
        for cell in &cells {
            let (of, pid) = (options.repeats, rig.product.pid());
            eprint!("\r\x1b[Krepeat {number} of {of}, product is process {pid}  {}", cell.name);
            let sample = cell.run(&rig, &samples)?;
            samples.insert(cell.name, sample);
            process::settle(rig.dir)?;
        }
        eprint!("\r\x1b[K");
        run.memory.push(rig.product.memory()?);
        run.repeats.push(samples);
        drop(rig);
        dir.close()?;
        process::settle(parent.path())?;
    }
    run.probes.push(probe::measure(parent.path())?);
    if let Some(minutes) = options.sustained {
        let dir = tempfile::tempdir_in(parent.path())?;
        let rig = start(options, &binary, dir.path())?;
        let stretch = Duration::try_from_secs_f64(minutes * 60.0)? / STRETCHES;
        for number in 1..=STRETCHES {
            eprint!("\r\x1b[Ksustained {number} of {STRETCHES}");
            run.stretches.push(rig.long(stretch)?);
        }
        eprint!("\r\x1b[K");
    }
    report::print(options, &goals, &cells, &run)
}

fn start<'a>(options: &Options, binary: &Path, dir: &'a Path) -> Result<Rig<'a>> {
    let rig = Rig {
        raw: Server::reference("raw", dir)?,
        stock: Server::reference("stock", dir)?,
        product: Server::product(binary, dir, &options.set)?,
        timing: Timing {
            warm_up: Duration::try_from_secs_f64(options.warm_up)?,
            measured: Duration::try_from_secs_f64(options.seconds)?,
        },
        threads: options.threads.into(),
        dir,
    };
    cells::prepare(&rig.product)?;
    process::settle(dir)?;
    Ok(rig)
}

fn chosen_goals(options: &Options) -> Result<Vec<&'static Goal>> {
    let named = |goal: &&Goal| options.goals.is_empty() || options.goals.iter().any(|id| id == goal.id);
    let known = |id: &&String| *id == "none" || GOALS.iter().any(|goal| goal.id == id.as_str());
    if let Some(id) = options.goals.iter().find(|id| !known(id)) {
        let ids: BTreeSet<usize> = GOALS.iter().filter_map(|goal| goal.id.get(1..)?.parse().ok()).collect();
        let ids: Vec<String> = ids.iter().map(|id| format!("G{id}")).collect();
        return Err(format!("there is no goal `{id}`; there are {}", ids.join(", ")).into());
    }
    let possible = |goal: &&Goal| {
        options.cells.is_empty()
            || goal.cells.iter().all(|cell| options.cells.iter().any(|name| name == cell))
    };
    Ok(GOALS.iter().filter(named).filter(possible).collect())
}

fn chosen_cells(options: &Options, goals: &[&Goal]) -> Result<Vec<&'static Cell>> {
    if let Some(name) = options.cells.iter().find(|name| CELLS.iter().all(|cell| cell.name != name.as_str()))
    {
        let names: Vec<&str> = CELLS.iter().map(|cell| cell.name).collect();
        return Err(format!("there is no cell `{name}`; there are {}", names.join(", ")).into());
    }
    let wanted = |cell: &&Cell| match options.cells.is_empty() {
        true => goals.iter().any(|goal| goal.cells.contains(&cell.name)),
        false => options.cells.iter().any(|name| name == cell.name),
    };
    Ok(CELLS.iter().filter(wanted).collect())
}
