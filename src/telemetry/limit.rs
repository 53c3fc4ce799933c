//! Lines that say the same thing again and again are let through a few times a minute, then counted.

use std::{
    collections::HashMap,
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{Layer, layer::Context};

/// Lines alike in one window.
const PER_WINDOW: u64 = 10;
/// How long they are counted together.
pub(super) const WINDOW: Duration = Duration::from_secs(60);
/// Kinds of lines remembered; more than this at once are not limited.
const MAX_KINDS: usize = 1024;
/// Fields that differ without the line saying something else. Numbers never make a difference.
const ALIKE: &[&str] = &["peer", "client"];

/// Limits lines that are alike: from the same place in the code, with the same text in their fields.
#[derive(Clone, Debug, Default)]
pub(super) struct Limiter {
    kinds: Arc<Mutex<HashMap<u64, Kind>>>,
}

#[derive(Clone, Debug)]
struct Kind {
    begun: Instant,
    count: u64,
    target: &'static str,
    message: String,
}

/// How often something was said that was not let through.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Summary {
    pub(super) target: &'static str,
    pub(super) message: String,
    pub(super) more: u64,
}

impl Limiter {
    /// What was held back in windows that are over at `now`; forgets those.
    pub(super) fn summaries(&self, now: Instant) -> Vec<Summary> {
        let mut summaries = Vec::new();
        self.kinds.lock().retain(|_, kind| {
            let over = now.saturating_duration_since(kind.begun) >= WINDOW;
            if over && kind.count > PER_WINDOW {
                let more = kind.count - PER_WINDOW;
                summaries.push(Summary { target: kind.target, message: kind.message.clone(), more });
            }
            !over
        });
        summaries
    }

    fn allows(&self, event: &Event<'_>, now: Instant) -> bool {
        if *event.metadata().level() > Level::INFO {
            return true;
        }
        let mut words = Words { hasher: DefaultHasher::new(), message: String::new() };
        event.metadata().callsite().hash(&mut words.hasher);
        event.record(&mut words);
        let mut kinds = self.kinds.lock();
        let known = kinds.len();
        match kinds.get_mut(&words.hasher.finish()) {
            Some(kind) => {
                kind.count += 1;
                kind.count <= PER_WINDOW
            }
            None if known >= MAX_KINDS => true,
            None => {
                let (target, message) = (event.metadata().target(), words.message);
                kinds.insert(words.hasher.finish(), Kind { begun: now, count: 1, target, message });
                true
            }
        }
    }
}

impl<S: Subscriber> Layer<S> for Limiter {
    fn event_enabled(&self, event: &Event<'_>, _context: Context<'_, S>) -> bool {
        self.allows(event, Instant::now())
    }
}

/// The text in the fields of a line.
struct Words {
    hasher: DefaultHasher,
    message: String,
}

impl Words {
    fn add(&mut self, field: &Field, text: &str) {
        if !ALIKE.contains(&field.name()) {
            field.name().hash(&mut self.hasher);
            text.hash(&mut self.hasher);
        }
        if field.name() == "message" {
            text.clone_into(&mut self.message);
        }
    }
}

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }

    fn record_f64(&mut self, _: &Field, _: f64) {}
    fn record_i64(&mut self, _: &Field, _: i64) {}
    fn record_u64(&mut self, _: &Field, _: u64) {}
    fn record_i128(&mut self, _: &Field, _: i128) {}
    fn record_u128(&mut self, _: &Field, _: u128) {}
    fn record_bool(&mut self, _: &Field, _: bool) {}
}
