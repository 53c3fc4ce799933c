//! Puts a data directory in order that no broker uses, as far as that costs nothing: damaged derived files go,
//! headers of segments are written anew, files that are not of the shard are set aside. Never removes bytes of the
//! log: what is lost in it stays as it is, and its readers are told.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    OpenError, Options, Report,
    adopt::{FileProblem, Found},
    check::{Examined, examine},
    disk::{Disk, RealDisk},
    recovery::index_dir,
    segment::{HEADER_BYTES, SegmentHeader},
};

/// What is done to a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// A derived file goes; the next start rebuilds it from the log.
    Remove,
    /// It is moved there, away from where the broker looks.
    SetAside(PathBuf),
    /// The segment's header is written anew; what stood there is kept in this file.
    RewriteHeader(PathBuf),
    /// It gets the name that fits what it holds.
    Rename(PathBuf),
}

/// One step of a repair.
#[derive(Clone, Debug)]
pub struct Step {
    /// The file.
    pub file: PathBuf,
    /// What is done to it.
    pub action: Action,
    /// What is wrong with it.
    pub why: String,
    header: Option<SegmentHeader>,
}

/// What [`repair`] found, and what it did or would do.
#[derive(Clone, Debug)]
pub struct Repair {
    /// What was found before.
    pub report: Report,
    /// In this order.
    pub steps: Vec<Step>,
    /// The steps were taken.
    pub done: bool,
}

/// Looks for what can be put in order in the shard in `dir`, and does it if `apply` says so. What is set aside goes
/// to `quarantine/<stamp>` in `dir`. `progress` hears how many bytes of how many are read.
///
/// # Errors
/// As [`super::check`], and when a file cannot be changed; steps before that one were taken then.
pub fn repair(
    dir: &Path,
    stamp: &str,
    apply: bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Repair, OpenError> {
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    let Examined { report, segments, problems, lock } = examine(&disk, dir, progress)?;
    let aside = dir.join("quarantine").join(stamp);
    let mut steps = Vec::new();
    let derived = report.snapshots.iter().chain(&report.keys).chain(&report.index);
    for (file, problem) in derived {
        if let Some(why) = problem {
            let (file, why) = (PathBuf::from(file), why.clone());
            steps.push(Step { file, action: Action::Remove, why, header: None });
        }
    }
    for Found { path, why, problem } in problems {
        let name = path.file_name().unwrap_or_default().to_owned();
        let (action, header) = match problem {
            FileProblem::LeftAlone => (Action::SetAside(aside.join(name)), None),
            FileProblem::Header(header) => {
                let mut kept = name;
                kept.push(".header");
                (Action::RewriteHeader(aside.join(kept)), Some(header))
            }
            FileProblem::Misnamed(base) => {
                let free = segments.free_path(base).map_err(|error| OpenError(error.to_string()))?;
                (Action::Rename(free), None)
            }
        };
        steps.push(Step { file: path, action, why, header });
    }
    if apply && !steps.is_empty() {
        for step in &steps {
            let failed = |error: io::Error| OpenError(format!("{}: {error}", step.file.display()));
            take(&disk, &aside, step).map_err(failed)?;
        }
    }
    drop(lock);
    Ok(Repair { report, steps, done: apply })
}

fn take(disk: &Arc<dyn Disk>, aside: &Path, step: &Step) -> io::Result<()> {
    let parent = step.file.parent().unwrap_or(Path::new(""));
    match &step.action {
        Action::Remove => disk.remove(&step.file)?,
        Action::SetAside(to) => {
            disk.create_dir_all(aside)?;
            disk.rename(&step.file, to)?;
            disk.sync_dir(aside)?;
        }
        Action::Rename(to) => disk.rename(&step.file, to)?,
        Action::RewriteHeader(to) => {
            let Some(header) = &step.header else { return Ok(()) };
            let file = disk.open(&step.file)?;
            let mut before = vec![0; usize::try_from(HEADER_BYTES.min(file.len()?)).unwrap_or(0)];
            file.read_at(&mut before, 0)?;
            disk.create_dir_all(aside)?;
            let kept = disk.create(to)?;
            kept.write_at(&before, 0)?;
            kept.sync_data()?;
            disk.sync_dir(aside)?;
            file.write_at(&header.encode(), 0)?;
            file.sync_data()?;
        }
    }
    disk.sync_dir(parent)
}

/// The files of the queue index in `dir`, which stand or fall together.
pub(super) fn index_files(disk: &Arc<dyn Disk>, options: &Options) -> Vec<PathBuf> {
    let dir = index_dir(options);
    let names = disk.list(&dir).unwrap_or_default().into_iter();
    names.filter(|name| name.ends_with(".index")).map(|name| dir.join(name)).collect()
}
