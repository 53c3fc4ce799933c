//! The subcommands of `holdfast`: one file a command, each with its arguments, its help and what it does.
//!
//! Commands that talk to a broker do so through [`crate::client`] alone. Results go to standard output, all else
//! to standard error, so that pipes carry nothing but results.

use std::{ffi::OsString, future::Future, io, process::ExitCode};

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use tokio_util::sync::CancellationToken;

use crate::client::{Connection, Endpoint};

mod bench;
mod broker;
mod config;
mod exit;
mod group;
mod lines;
mod merge;
mod message;
mod node;
mod offsets;
mod output;
mod pull;
mod send;
mod standalone;
mod status;
mod store;
mod topic;
mod values;

pub use bench::probe;
pub use exit::{Exit, Failure};
pub use output::Format;

const AFTER_HELP: &str = "\
Try it:
  holdfast standalone                                       a broker without configuration
  holdfast send --topic logs 'hello'                        one message
  holdfast send --topic logs --lines < /var/log/syslog      each line a message
  holdfast pull --topic logs --from earliest                all messages, in the order of the log
  holdfast pull --topic logs --follow                       what comes from now on

`holdfast help COMMAND` shows examples of each command; `holdfast --help` also shows the exit codes.";

/// A durable message broker that speaks gRPC only.
#[derive(Debug, Parser)]
#[command(
    name = "holdfast",
    version,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = AFTER_HELP,
    after_long_help = format!("{AFTER_HELP}\n\n{}", exit::EXIT_CODES),
)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Options of every command.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Global options")]
struct Global {
    /// The broker to talk to.
    #[arg(
        long,
        global = true,
        env = "HOLDFAST_ENDPOINT",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:8081"
    )]
    endpoint: Endpoint,
    /// For whom to print: people (text) or scripts (json: one object a line).
    #[arg(long, short = 'o', global = true, value_enum, value_name = "FORMAT", default_value = "text")]
    output: Format,
    /// No colours, even on a terminal. The variable NO_COLOR does the same.
    #[arg(long, global = true)]
    no_color: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a durable broker on this machine, without configuration.
    Standalone(standalone::Args),
    /// Run a broker among others.
    Broker(broker::Args),
    Send(Box<send::SendArgs>),
    Pull(Box<pull::PullArgs>),
    /// Create, change, delete, list and describe topics.
    #[command(subcommand)]
    Topic(topic::Command),
    /// Create, change, delete, list and describe consumer groups.
    #[command(subcommand)]
    Group(group::Command),
    /// Find messages by id, key or place.
    #[command(subcommand)]
    Message(message::Command),
    /// Set a consumer group's progress.
    #[command(subcommand)]
    Offsets(offsets::Command),
    /// Show the state of the broker.
    Status(status::Args),
    /// Check a data directory.
    #[command(subcommand)]
    Store(store::Command),
    /// Measure how fast a broker is.
    #[command(subcommand)]
    Bench(bench::Command),
    /// Explain the settings of a node.
    #[command(subcommand)]
    Config(config::Command),
    /// Print a completion script for a shell.
    #[command(after_help = COMPLETIONS_HELP)]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

const COMPLETIONS_HELP: &str = "\
Examples:
  holdfast completions bash > ~/.local/share/bash-completion/completions/holdfast
  holdfast completions zsh > ~/.zfunc/_holdfast
  holdfast completions fish > ~/.config/fish/completions/holdfast.fish";

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    run(std::env::args_os().collect()).into()
}

fn run(arguments: Vec<OsString>) -> Exit {
    let plain = arguments.iter().any(|argument| argument == "--no-color");
    let mut grammar = Cli::command();
    if plain {
        anstream::ColorChoice::Never.write_global();
        grammar = grammar.color(clap::ColorChoice::Never);
    }
    let parsed = grammar.try_get_matches_from(arguments).and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            // Help goes to standard output, where nobody need be listening.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage } else { Exit::Ok };
        }
    };
    let format = cli.global.output;
    match cli.command.run(cli.global) {
        Ok(exit) => exit,
        Err(failure) => {
            output::failure(&failure, format);
            failure.exit
        }
    }
}

impl Command {
    fn run(self, global: Global) -> Result<Exit, Failure> {
        match self {
            Self::Standalone(args) => standalone::run(&args),
            Self::Broker(args) => broker::run(&args),
            Self::Config(command) => config::run(&command, global.output),
            Self::Send(args) => converse(global, |session| send::run(session, *args)),
            Self::Pull(args) => converse(global, |session| pull::run(session, *args)),
            Self::Topic(command) => talk(global, |session| topic::run(session, command)),
            Self::Group(command) => talk(global, |session| group::run(session, command)),
            Self::Message(command) => talk(global, |session| message::run(session, command)),
            Self::Offsets(command) => talk(global, |session| offsets::run(session, command)),
            Self::Store(command) => store::run(global.output, command),
            Self::Bench(command) => {
                converse_on(command.threads(), global, |session| bench::run(session, command))
            }
            Self::Status(args) => talk(global, |session| status::run(session, args)),
            Self::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Cli::command(), "holdfast", &mut script);
                io::Write::write_all(&mut io::stdout(), &script).map_err(|error| Failure::stdout(&error))?;
                Ok(Exit::Ok)
            }
        }
    }
}

/// What a command that talks to a broker is given.
#[derive(Clone, Debug)]
struct Session {
    /// The broker; nothing is sent before the first call.
    broker: Connection,
    /// For whom to print.
    format: Format,
    /// Cancelled by Ctrl-C and SIGTERM. Commands that have something to say at their end watch it; the others
    /// are dropped.
    stop: CancellationToken,
}

impl Session {
    fn is_json(&self) -> bool {
        self.format == Format::Json
    }
}

/// Runs a command that talks to a broker and ends with its last answer, or at once when interrupted.
fn talk<F>(global: Global, command: impl FnOnce(Session) -> F) -> Result<Exit, Failure>
where
    F: Future<Output = Result<Exit, Failure>>,
{
    converse(global, |session| async {
        let stop = session.stop.clone();
        let command = command(session);
        tokio::select! {
            result = command => result,
            () = stop.cancelled() => Err(Failure::quiet(Exit::Interrupted)),
        }
    })
}

/// Runs a command that talks to a broker and watches [`Session::stop`] itself. A second signal ends the process.
fn converse<F>(global: Global, command: impl FnOnce(Session) -> F) -> Result<Exit, Failure>
where
    F: Future<Output = Result<Exit, Failure>>,
{
    converse_on(1, global, command)
}

/// As [`converse`], with work spread over some threads.
fn converse_on<F>(threads: u16, global: Global, command: impl FnOnce(Session) -> F) -> Result<Exit, Failure>
where
    F: Future<Output = Result<Exit, Failure>>,
{
    let mut builder = match threads {
        0 | 1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = builder
        .worker_threads(usize::from(threads.max(1)))
        .enable_all()
        .build()
        .map_err(|error| Failure::io("cannot start", &error))?;
    let result = runtime.block_on(async {
        let stop = CancellationToken::new();
        tokio::spawn(watch_signals(stop.clone()));
        command(Session { broker: Connection::new(global.endpoint)?, format: global.output, stop }).await
    });
    // A thread may still be reading standard input; nobody waits for it.
    runtime.shutdown_background();
    result
}

async fn watch_signals(stop: CancellationToken) {
    use tokio::signal::unix::{SignalKind, signal};
    let signals = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()));
    let (Ok(mut interrupt), Ok(mut terminate)) = signals else { return };
    for first in [true, false] {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        if first {
            stop.cancel();
        }
    }
    std::process::exit(Exit::Interrupted.code().into());
}

/// Asks on the terminal before something that cannot be undone. Scripts are not asked: they say `--yes`, or mean it.
fn confirm(question: &str, yes: bool) -> Result<(), Failure> {
    use std::io::{BufRead as _, IsTerminal as _, Write as _};
    if yes || !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Ok(());
    }
    let mut out = anstream::stderr();
    let _ = write!(out, "{question} [y/N] ").and_then(|()| out.flush());
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).map_err(|error| Failure::io("standard input", &error))?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(Failure::new(Exit::Interrupted, "nothing was changed")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar_has_no_contradictions() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_an_example_in_its_help() {
        fn visit(command: &clap::Command, path: &str, missing: &mut Vec<String>) {
            let path = format!("{path} {}", command.get_name());
            if command.has_subcommands() {
                command.get_subcommands().for_each(|sub| visit(sub, &path, missing));
            } else {
                let help = command.get_after_help().or(command.get_after_long_help());
                if !help.is_some_and(|help| help.to_string().contains("holdfast ")) {
                    missing.push(path);
                }
            }
        }
        let mut missing = Vec::new();
        visit(&Cli::command(), "", &mut missing);
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn global_options_stand_before_and_after_the_command() {
        for line in
            ["holdfast --endpoint h:1 -o json topic list", "holdfast topic list --endpoint h:1 --output json"]
        {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            assert_eq!(cli.global.endpoint.as_str(), "h:1");
            assert_eq!(cli.global.output, Format::Json);
        }
    }
}
