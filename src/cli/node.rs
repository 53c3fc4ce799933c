//! What `standalone`, `broker` and `config explain` share: where settings come from, and the start screen.

use std::{
    env, fs,
    io::{self, IsTerminal as _, Write as _},
    path::{Path, PathBuf},
};

use super::{
    Exit, Failure,
    output::{BOLD, DIM, GOOD, paint},
    values,
};
use crate::{
    app::Started,
    config::{API_PORT, Config, Layers, Loaded, Role, load},
    telemetry::{COMMIT, Sink, VERSION},
};

/// Where the settings of a node come from.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Settings")]
pub(super) struct NodeArgs {
    /// Read settings from a TOML file; HOLDFAST_CONFIG names one too.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Keep everything in this directory (node.data_dir).
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Address of the gRPC API (listen.api).
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<String>,
    /// Set any key, as in --set store.segment_size=64MiB; may be repeated. `holdfast config explain` lists them.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl NodeArgs {
    /// The layers that these arguments and this process name.
    pub(super) fn layers(&self) -> Result<Layers, Failure> {
        let mut layers = Layers { file: self.config.clone(), ..Layers::of_process() };
        for assignment in &self.set {
            layers.set(assignment).map_err(|error| Failure::usage(error.to_string()))?;
        }
        if let Some(dir) = &self.data_dir {
            let Some(dir) = dir.to_str() else {
                return Err(Failure::usage("--data-dir is not UTF-8; choose another directory"));
            };
            layers.flag("--data-dir", "node.data_dir", dir);
        }
        if let Some(address) = &self.listen {
            layers.flag("--listen", "listen.api", address);
        }
        Ok(layers)
    }

    /// The settings, checked.
    pub(super) fn load(&self, role: Role) -> Result<(Loaded, Layers), Failure> {
        let layers = self.layers()?;
        let loaded = load(role, &layers).map_err(|error| Failure::new(Exit::Failed, error.to_string()))?;
        Ok((loaded, layers))
    }
}

/// Tells people that a node serves: on standard output, or, when that takes JSON for a machine, on standard error if
/// somebody looks there. The log line `node.started` says the same.
pub(super) fn announce(config: &Config, started: &Started, role: Role) {
    let screen = screen(started, role, &program());
    // Nobody there to read it: nothing to be done.
    let _ = match Sink::of(config.telemetry.log_format) {
        Sink::Text => write!(anstream::stdout(), "{screen}").and_then(|()| io::stdout().flush()),
        Sink::Json if !io::stdout().is_terminal() && io::stderr().is_terminal() => {
            write!(anstream::stderr(), "{screen}")
        }
        Sink::Json => Ok(()),
    };
}

fn screen(started: &Started, role: Role, program: &str) -> String {
    let build = if COMMIT == "unknown" { String::new() } else { format!(" ({COMMIT})") };
    let kept = match (started.store.topics, started.store.log_bytes) {
        (0, _) => "new, or without a topic yet".to_owned(),
        (1, bytes) => format!("1 topic, {} of log", values::size(bytes)),
        (topics, bytes) => format!("{topics} topics, {} of log", values::size(bytes)),
    };
    let mut text = format!(
        "\n{} {}\n\n  {:<9} {} {}\n  {:<9} {}\n  {:<9} http://{} {}\n  {:<9} {}\n",
        paint(BOLD, format_args!("Holdfast {VERSION}")),
        paint(DIM, format_args!("{}{build}", role.name())),
        "Data",
        started.data_dir.display(),
        paint(DIM, format_args!("({kept})")),
        "gRPC",
        paint(GOOD, started.api),
        "Probes",
        started.probe,
        paint(DIM, "(/readyz, /metrics)"),
        "Promise",
        "OK means synced to disk: an acknowledged message survives a crash or a power cut",
    );
    if role == Role::Standalone {
        let endpoint = match started.api {
            api if api.port() == API_PORT && api.ip().is_loopback() => String::new(),
            api if api.ip().is_unspecified() && api.port() == API_PORT => String::new(),
            api if api.ip().is_unspecified() => format!(" --endpoint 127.0.0.1:{}", api.port()),
            api => format!(" --endpoint {api}"),
        };
        text.push_str("\nTry in another terminal:\n");
        for (command, rest) in [
            ("send", " --topic hello \"first message\""),
            ("pull", " --topic hello --from earliest"),
            ("topic list", ""),
        ] {
            text.push_str(&format!("  {program} {command}{endpoint}{rest}\n"));
        }
        text.push_str(&format!("\n{}\n", paint(DIM, "Ctrl-C stops it; the data stays.")));
    }
    text.push('\n');
    text
}

/// How a person would call this program here.
fn program() -> String {
    let Ok(running) = env::current_exe() else { return "holdfast".into() };
    let here = env::current_dir().unwrap_or_default();
    let path = env::var_os("PATH").unwrap_or_default();
    called(&running, &here, &env::split_paths(&path).collect::<Vec<_>>())
}

fn called(running: &Path, here: &Path, path: &[PathBuf]) -> String {
    let name = env!("CARGO_PKG_NAME");
    let same = |found: PathBuf| fs::canonicalize(found).is_ok_and(|found| found == running);
    if path.iter().any(|dir| same(dir.join(name))) {
        return name.into();
    }
    match running.strip_prefix(here) {
        Ok(below) => format!("./{}", below.display()),
        Err(_) => running.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_shown_as_they_can_be_typed() {
        let dir = fs::canonicalize(tempfile::tempdir().unwrap().keep()).unwrap();
        let binary = dir.join("target/release/holdfast");
        fs::create_dir_all(binary.parent().unwrap()).unwrap();
        fs::write(&binary, "").unwrap();
        assert_eq!(called(&binary, &dir, &[]), "./target/release/holdfast");
        assert_eq!(called(&binary, Path::new("/elsewhere"), &[]), binary.display().to_string());
        let bin = binary.parent().unwrap().to_owned();
        assert_eq!(called(&binary, &dir, &[PathBuf::from("/usr/bin"), bin]), "holdfast");
        fs::remove_dir_all(dir).unwrap();
    }
}
