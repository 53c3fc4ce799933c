//! Layers the configuration: defaults < file < environment < flags, and remembers where each value is from.
//!
//! | layer | scheme |
//! |---|---|
//! | file | TOML, `[section]` and `key = value`; named by `--config` or `HOLDFAST_CONFIG` |
//! | environment | `HOLDFAST_SECTION__KEY`, as in `HOLDFAST_STORE__SEGMENT_SIZE=64MiB` |
//! | flags | `--set section.key=value`, and the flags that stand for a key, such as `--data-dir` |
//!
//! Of the other variables that begin with `HOLDFAST_`, `HOLDFAST_LOG` (and `RUST_LOG`) sets `telemetry.log_level`,
//! `HOLDFAST_CONFIG` names the file, `HOLDFAST_ENDPOINT` is for clients, `HOLDFAST_BIN` and `HOLDFAST_SEED` for the test suites,
//! `HOLDFAST_BUILD_COMMIT` and `HOLDFAST_BUILD_RUSTC` for the build (`cargo run` hands them on to what it runs).
//! The rest is refused by name, except what Kubernetes sets by itself for a service called `holdfast…`.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::{Path, PathBuf},
};

use config::{Map, Source, Value, ValueKind};
use serde_json::Value as Json;
use toml::de::{DeTable, DeValue};

use super::{Config, Role, SECTIONS};

/// Largest configuration file.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// What variables that set a key begin with.
const PREFIX: &str = "HOLDFAST_";
/// Variables that set no key, or set one under another name.
const SPECIAL: &[&str] = &[
    "HOLDFAST_CONFIG",
    "HOLDFAST_ENDPOINT",
    "HOLDFAST_LOG",
    "HOLDFAST_BIN",
    "HOLDFAST_SEED",
    "HOLDFAST_BUILD_COMMIT",
    "HOLDFAST_BUILD_RUSTC",
];
/// Variables that set the log level; the first one that is set wins.
const LOG_LEVEL: &[&str] = &["HOLDFAST_LOG", "RUST_LOG"];
/// The key that they set.
const LOG_LEVEL_KEY: &str = "telemetry.log_level";

/// What the configuration is made from.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    /// The file, if one was named by flag.
    pub file: Option<PathBuf>,
    /// The environment of the process.
    pub environment: BTreeMap<String, String>,
    /// `(flag, key, value)` in the order of the command line; the last one wins.
    pub flags: Vec<(String, String, String)>,
}

impl Layers {
    /// Without file and flags; with the environment of this process, as far as it is text.
    pub fn of_process() -> Self {
        let environment = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        Self { environment, ..Self::default() }
    }

    /// Adds a flag that stands for a key.
    pub fn flag(&mut self, flag: &str, key: &str, value: impl Into<String>) {
        self.flags.push((flag.into(), key.into(), value.into()));
    }

    /// Adds what `--set` was given.
    pub fn set(&mut self, assignment: &str) -> Result<(), ConfigError> {
        let Some((key, value)) = assignment.split_once('=') else {
            return Err(ConfigError::Assignment(assignment.into()));
        };
        self.flag("--set", key.trim(), value.trim());
        Ok(())
    }
}

/// Where a value is from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    #[default]
    Default,
    /// File and line.
    File(PathBuf, usize),
    /// Name of the variable.
    Environment(String),
    /// Name of the flag.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => to.write_str("default"),
            Self::File(path, line) => write!(to, "{}:{line}", path.display()),
            Self::Environment(name) => write!(to, "env {name}"),
            Self::Flag(name) => write!(to, "flag {name}"),
        }
    }
}

/// Why there is no configuration. Says where, what, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("configuration file {path}: {error}", path = .0.display(), error = .1)]
    Unreadable(PathBuf, io::Error),
    /// The file is not TOML.
    #[error("configuration file {path}:{line}: {problem}", path = .0.display(), line = .1, problem = .2)]
    Syntax(PathBuf, usize, String),
    /// There is no such key.
    #[error("unknown configuration key `{key}` ({origin}){}", did_you_mean(.nearest.as_deref()))]
    UnknownKey {
        /// As it was written.
        key: String,
        /// Where.
        origin: Origin,
        /// What may have been meant.
        nearest: Option<String>,
    },
    /// There is no key behind this variable.
    #[error(
        "unknown environment variable {name} (keys are set as HOLDFAST_SECTION__KEY){}",
        did_you_mean(.nearest.as_deref())
    )]
    UnknownVariable {
        /// Its name.
        name: String,
        /// What may have been meant.
        nearest: Option<String>,
    },
    /// A value that is not of the kind, or not in the range.
    #[error("{key} {problem} ({origin})")]
    Value {
        /// The key.
        key: String,
        /// What was seen, what is allowed.
        problem: String,
        /// Where.
        origin: Origin,
    },
    /// `--set` without `=`.
    #[error("--set {0}: use --set section.key=value")]
    Assignment(String),
    /// The layers do not fit; does not happen with checked values.
    #[error("configuration: {0}")]
    Layering(String),
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |nearest| format!("; did you mean `{nearest}`?"))
}

/// A checked configuration, and where each of its values is from.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Checked.
    pub config: Config,
    /// What it was started as.
    pub role: Role,
    /// By key, as `section.key`; what is missing is a default.
    pub origins: BTreeMap<String, Origin>,
}

/// Reads and checks all layers.
pub fn load(role: Role, layers: &Layers) -> Result<Loaded, ConfigError> {
    let named = layers.environment.get("HOLDFAST_CONFIG").filter(|name| !name.is_empty()).map(PathBuf::from);
    let file = match layers.file.clone().or(named) {
        Some(path) => from_file(&path)?,
        None => Layer::default(),
    };
    let environment = from_environment(&layers.environment)?;
    let flags = from_flags(&layers.flags)?;

    let layering = |error: config::ConfigError| ConfigError::Layering(error.to_string());
    let defaults = Config::defaults(role, &layers.environment);
    let merged = config::Config::builder()
        .add_source(config::Config::try_from(&defaults).map_err(layering)?)
        .add_source(file.clone())
        .add_source(environment.clone())
        .add_source(flags.clone())
        .build()
        .map_err(layering)?;

    let mut origins = file.origins;
    origins.extend(environment.origins);
    origins.extend(flags.origins);
    let shown_defaults = serde_json::to_value(&defaults).unwrap_or_default();
    let mut sections = serde_json::Map::new();
    for section in SECTIONS {
        let mut fields = serde_json::Map::new();
        for &(field, _) in section.keys {
            let key = format!("{}.{field}", section.name);
            let value: Value = merged.get(&key).map_err(layering)?;
            let origin = origins.get(&key).cloned().unwrap_or_default();
            let refused = |problem| ConfigError::Value { key: key.clone(), problem, origin: origin.clone() };
            let default = at(&shown_defaults, section.name, field);
            let value = of_kind(default, value.kind).map_err(&refused)?;
            if let Err(problem) = (section.try_value)(field, value.clone()) {
                return Err(refused(format!("is {}; {problem}", show(&value))));
            }
            fields.insert(field.into(), value);
        }
        sections.insert(section.name.into(), Json::Object(fields));
    }
    let config: Config = serde_json::from_value(Json::Object(sections))
        .map_err(|error| ConfigError::Layering(error.to_string()))?;
    config.check().map_err(|invalid| ConfigError::Value {
        origin: origins.get(&invalid.field).cloned().unwrap_or_default(),
        key: invalid.field,
        problem: invalid.problem,
    })?;
    Ok(Loaded { config, role, origins })
}

/// A key's value among all.
pub(super) fn at<'a>(all: &'a Json, section: &str, field: &str) -> &'a Json {
    all.get(section).and_then(|fields| fields.get(field)).unwrap_or(&Json::Null)
}

/// A value as a person would write it.
pub(super) fn show(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Makes a value be of the kind that the default has. Variables and flags are always text.
fn of_kind(default: &Json, value: ValueKind) -> Result<Json, String> {
    let text = match &value {
        ValueKind::String(text) => text.trim().to_owned(),
        ValueKind::Array(_) => return Err("is a list; use a single value".into()),
        ValueKind::Table(_) => return Err("is a table; use a single value".into()),
        other => other.to_string(),
    };
    match default {
        Json::Bool(_) => match (&value, text.as_str()) {
            (ValueKind::Boolean(_) | ValueKind::String(_), "true") => Ok(Json::Bool(true)),
            (ValueKind::Boolean(_) | ValueKind::String(_), "false") => Ok(Json::Bool(false)),
            _ => Err(format!("is {text}; use true or false")),
        },
        Json::Number(_) => {
            let digits = !matches!(value, ValueKind::Boolean(_) | ValueKind::Float(_));
            match text.parse::<u64>() {
                Ok(number) if digits => Ok(number.into()),
                _ => Err(format!("is {text}; use a whole number, 0 or above")),
            }
        }
        _ => match value {
            ValueKind::Boolean(_) => Err(format!("is {text}; use text in quotes")),
            ValueKind::String(_) => Ok(Json::String(text)),
            ValueKind::I64(number) => Ok(number.into()),
            ValueKind::U64(number) => Ok(number.into()),
            _ => Ok(Json::String(text)),
        },
    }
}

/// The values of one source by key, and where each is from.
#[derive(Clone, Debug, Default)]
struct Layer {
    values: Map<String, Value>,
    origins: BTreeMap<String, Origin>,
}

impl Layer {
    fn insert(&mut self, key: String, value: impl Into<ValueKind>, origin: Origin) {
        self.values.insert(key.clone(), Value::new(Some(&origin.to_string()), value));
        self.origins.insert(key, origin);
    }
}

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, config::ConfigError> {
        Ok(self.values.clone())
    }
}

fn from_file(path: &Path) -> Result<Layer, ConfigError> {
    let unreadable = |error| ConfigError::Unreadable(path.to_owned(), error);
    let bytes = fs::metadata(path).map_err(unreadable)?.len();
    if bytes > MAX_FILE_BYTES {
        let error = io::Error::other(format!("{bytes} bytes are over the limit of {MAX_FILE_BYTES}"));
        return Err(unreadable(error));
    }
    let text = fs::read_to_string(path).map_err(unreadable)?;
    let line_at = |at: usize| 1 + text.bytes().take(at).filter(|&byte| byte == b'\n').count();
    let table = DeTable::parse(&text).map_err(|error| {
        let line = line_at(error.span().map_or(0, |span| span.start));
        ConfigError::Syntax(path.to_owned(), line, error.message().to_owned())
    })?;
    let mut layer = Layer::default();
    let mut todo = vec![(String::new(), table.get_ref())];
    while let Some((outer, table)) = todo.pop() {
        for (name, value) in table {
            let key = if outer.is_empty() {
                name.get_ref().to_string()
            } else {
                format!("{outer}.{}", name.get_ref())
            };
            let origin = Origin::File(path.to_owned(), line_at(name.span().start));
            let is_section = SECTIONS.iter().any(|section| section.name == key);
            let kind: ValueKind = match value.get_ref() {
                DeValue::Table(inner) if is_section => {
                    todo.push((key, inner));
                    continue;
                }
                _ if !is_key(&key) => return Err(unknown(key, origin)),
                DeValue::String(text) => text.to_string().into(),
                DeValue::Boolean(value) => (*value).into(),
                DeValue::Integer(number) => {
                    match i64::from_str_radix(&number.as_str().replace('_', ""), number.radix()) {
                        Ok(number) => number.into(),
                        Err(_) => number.as_str().into(),
                    }
                }
                DeValue::Float(number) => number.as_str().parse::<f64>().unwrap_or(f64::NAN).into(),
                DeValue::Datetime(time) => time.to_string().into(),
                DeValue::Array(_) => ValueKind::Array(Vec::new()),
                DeValue::Table(_) => ValueKind::Table(Map::new()),
            };
            layer.insert(key, kind, origin);
        }
    }
    Ok(layer)
}

fn from_environment(environment: &BTreeMap<String, String>) -> Result<Layer, ConfigError> {
    let mut layer = Layer::default();
    for name in LOG_LEVEL.iter().rev() {
        if let Some(value) = environment.get(*name).filter(|value| !value.is_empty()) {
            layer.insert(LOG_LEVEL_KEY.into(), value.as_str(), Origin::Environment((*name).into()));
        }
    }
    for (name, value) in environment {
        let Some(rest) = name.strip_prefix(PREFIX) else { continue };
        if SPECIAL.contains(&name.as_str()) || is_from_kubernetes(name, value) {
            continue;
        }
        let key = rest.to_ascii_lowercase().replace("__", ".");
        if !is_key(&key) {
            let nearest = nearest_key(&key).map(|key| variable(&key));
            return Err(ConfigError::UnknownVariable { name: name.clone(), nearest });
        }
        layer.insert(key, value.as_str(), Origin::Environment(name.clone()));
    }
    Ok(layer)
}

/// What Kubernetes sets in every pod for a service whose name begins with `holdfast`.
fn is_from_kubernetes(name: &str, value: &str) -> bool {
    let address = value.starts_with("tcp://") || value.starts_with("udp://");
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || (name.ends_with("_PORT") && address)
        || name.contains("_TCP")
        || name.contains("_UDP")
}

fn from_flags(flags: &[(String, String, String)]) -> Result<Layer, ConfigError> {
    let mut layer = Layer::default();
    for (flag, key, value) in flags {
        let origin = Origin::Flag(flag.clone());
        if !is_key(key) {
            return Err(unknown(key.clone(), origin));
        }
        layer.insert(key.clone(), value.as_str(), origin);
    }
    Ok(layer)
}

/// The variable that sets a key.
pub(super) fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "__").to_ascii_uppercase())
}

fn keys() -> impl Iterator<Item = String> {
    SECTIONS
        .iter()
        .flat_map(|section| section.keys.iter().map(move |(key, _)| format!("{}.{key}", section.name)))
}

fn is_key(key: &str) -> bool {
    keys().any(|known| known == key)
}

fn unknown(key: String, origin: Origin) -> ConfigError {
    let nearest = nearest_key(&key);
    ConfigError::UnknownKey { key, origin, nearest }
}

/// The known key that needs the fewest changes of letters, if it is few.
pub(super) fn nearest_key(wanted: &str) -> Option<String> {
    let alike = |key: &str| distance(&key.replace('.', "_"), &wanted.replace('.', "_"));
    let of_section = |key: &str| key.split_once('.').is_some_and(|(_, rest)| rest == wanted);
    keys()
        .map(|key| (if of_section(&key) { 0 } else { alike(&key) }, key))
        .min()
        .filter(|(changes, _)| *changes <= 2 + wanted.len() / 4)
        .map(|(_, key)| key)
}

/// How many letters must be changed, added or left out (Levenshtein). Quadratic; inputs are short.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(128).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(128).enumerate() {
        let mut left = i + 1;
        let mut next = vec![left];
        for (y, above) in b.iter().zip(row.windows(2)) {
            let &[diagonal, up] = above else { continue };
            left = (diagonal + usize::from(x != *y)).min(up + 1).min(left + 1);
            next.push(left);
        }
        row = next;
    }
    row.last().copied().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn layers(file: &str, environment: &[(&str, &str)], flags: &[&str]) -> (tempfile::TempDir, Layers) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("holdfast.toml");
        fs::write(&path, file).unwrap();
        let mut layers = Layers { file: Some(path), ..Layers::default() };
        layers.environment = environment.iter().map(|&(k, v)| (k.to_owned(), v.to_owned())).collect();
        for flag in flags {
            layers.set(flag).unwrap();
        }
        (dir, layers)
    }

    fn refused(file: &str, environment: &[(&str, &str)], flags: &[&str]) -> String {
        let (dir, layers) = layers(file, environment, flags);
        let error = load(Role::Standalone, &layers).unwrap_err().to_string();
        error.replace(&format!("{}/", dir.path().display()), "")
    }

    #[test]
    fn later_layers_win_and_every_value_knows_its_origin() {
        let file = "[topics]\nmax = 1\ndefault_queues = 2\n\n[pull]\nwait_max = \"10s\"\n[groups]\nmax = 1\n";
        let environment = [("HOLDFAST_TOPICS__MAX", "5"), ("HOLDFAST_GROUPS__MAX", "6")];
        let (_dir, layers) = layers(file, &environment, &["topics.max=7"]);
        let loaded = load(Role::Standalone, &layers).unwrap();
        assert_eq!(loaded.config.topics.max, 7);
        assert_eq!(loaded.config.topics.default_queues, 2);
        assert_eq!(loaded.config.groups.max, 6);
        assert_eq!(loaded.config.pull.wait_max, Duration::from_secs(10));
        assert!(loaded.config.topics.auto_create, "the default of the role");
        let path = layers.file.clone().unwrap();
        assert_eq!(loaded.origins["topics.max"], Origin::Flag("--set".into()));
        assert_eq!(loaded.origins["groups.max"], Origin::Environment("HOLDFAST_GROUPS__MAX".into()));
        assert_eq!(loaded.origins["pull.wait_max"], Origin::File(path, 6));
        assert!(!loaded.origins.contains_key("hold.max_total"));
    }

    #[test]
    fn the_environment_names_the_file_and_the_log_level() {
        let (_dir, mut layers) = layers("[telemetry]\nlog_level = \"trace\"\n", &[], &[]);
        let path = layers.file.take().unwrap();
        let named = path.to_str().unwrap().to_owned();
        layers.environment.insert("HOLDFAST_CONFIG".into(), named);
        assert_eq!(load(Role::Broker, &layers).unwrap().config.telemetry.log_level, "trace");
        layers.environment.insert("RUST_LOG".into(), "warn".into());
        assert_eq!(load(Role::Broker, &layers).unwrap().config.telemetry.log_level, "warn");
        layers.environment.insert("HOLDFAST_LOG".into(), "debug".into());
        assert_eq!(load(Role::Broker, &layers).unwrap().config.telemetry.log_level, "debug");
        layers.environment.insert("HOLDFAST_TELEMETRY__LOG_LEVEL".into(), "error".into());
        assert_eq!(load(Role::Broker, &layers).unwrap().config.telemetry.log_level, "error");
    }

    #[test]
    fn unknown_keys_are_refused_with_the_nearest_one() {
        assert_eq!(
            refused("\n[topics]\nauto_crate = true\n", &[], &[]),
            "unknown configuration key `topics.auto_crate` (holdfast.toml:3); did you mean `topics.auto_create`?"
        );
        assert_eq!(
            refused("data_dir = \"x\"\n", &[], &[]),
            "unknown configuration key `data_dir` (holdfast.toml:1); did you mean `node.data_dir`?"
        );
        assert_eq!(
            refused("", &[], &["stor.segment_size=64MiB"]),
            "unknown configuration key `stor.segment_size` (flag --set); did you mean `store.segment_size`?"
        );
        let error = refused("[topics.more]\nx = 1\n", &[], &[]);
        assert!(error.starts_with("unknown configuration key `topics.more` (holdfast.toml:1)"), "{error}");
        let error = refused("store = 5\n", &[], &[]);
        assert!(error.starts_with("unknown configuration key `store` (holdfast.toml:1)"), "{error}");
    }

    #[test]
    fn unknown_variables_are_refused_but_not_those_of_others() {
        assert_eq!(
            refused("", &[("HOLDFAST_STORE_SEGMENT_SIZE", "64MiB")], &[]),
            "unknown environment variable HOLDFAST_STORE_SEGMENT_SIZE (keys are set as \
             HOLDFAST_SECTION__KEY); did you mean `HOLDFAST_STORE__SEGMENT_SIZE`?"
        );
        let others = [
            ("HOLDFAST_ENDPOINT", "127.0.0.1:1"),
            ("HOLDFAST_BUILD_COMMIT", "abc"),
            ("HOLDFAST_PORT", "tcp://10.0.0.1:8081"),
            ("HOLDFAST_PORT_8081_TCP_ADDR", "10.0.0.1"),
            ("HOLDFAST_BROKER_SERVICE_HOST", "10.0.0.1"),
            ("HOLDFAST_SERVICE_PORT_GRPC", "8081"),
        ];
        let (_dir, layers) = layers("", &others, &[]);
        load(Role::Broker, &layers).unwrap();
    }

    #[test]
    fn wrong_values_are_refused_with_key_value_origin_and_range() {
        let environment = [("HOLDFAST_STORE__SEGMENT_SIZE", "4MiB")];
        assert_eq!(
            refused("", &environment, &[]),
            "store.segment_size is 4MiB; use 64MiB to 1GiB (env HOLDFAST_STORE__SEGMENT_SIZE)"
        );
        assert_eq!(
            refused("[pull]\nwait_max = 30\n", &[], &[]),
            "pull.wait_max is 30; use a number with a unit, such as 250ms, 30s or 5m (holdfast.toml:2)"
        );
        assert_eq!(
            refused("topics.default_queues = 4.5", &[], &[]),
            "topics.default_queues is 4.5; use a whole number, 0 or above (holdfast.toml:1)"
        );
        assert_eq!(
            refused("topics.auto_create = 1", &[], &[]),
            "topics.auto_create is 1; use true or false (holdfast.toml:1)"
        );
        assert_eq!(
            refused("", &[], &["listen.api=everywhere"]),
            "listen.api is everywhere; use IP:PORT such as 127.0.0.1:8081, or :8081 for all interfaces \
             (flag --set)"
        );
        let error = refused("", &[], &["topics.default_queues=99999999999"]);
        assert!(error.starts_with("topics.default_queues is 99999999999; "), "{error}");
        let error = refused("", &[], &["telemetry.log_format=xml"]);
        assert!(error.contains("`text`"), "{error}");
        let error = refused("node.name = [1]", &[], &[]);
        assert_eq!(error, "node.name is a list; use a single value (holdfast.toml:1)");
    }

    #[test]
    fn a_file_that_is_missing_or_not_toml_is_named_with_the_line() {
        let error = refused("[topics]\n\nmax = = 4\n", &[], &[]);
        assert!(error.starts_with("configuration file holdfast.toml:3: "), "{error}");
        let layers = Layers { file: Some("/nowhere/h.toml".into()), ..Layers::default() };
        let error = load(Role::Broker, &layers).unwrap_err().to_string();
        assert!(error.starts_with("configuration file /nowhere/h.toml: No such file"), "{error}");
    }

    #[test]
    fn set_needs_a_key_and_a_value() {
        let error = Layers::default().set("topics.max").unwrap_err().to_string();
        assert_eq!(error, "--set topics.max: use --set section.key=value");
    }
}
