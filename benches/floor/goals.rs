//! What the product should reach, as ratios of cells of the same repeat. T has as many messages in flight as what it is
//! compared with: 64 for single messages, 1024 for batches.

use holdfast::cli::probe::Probe;

use crate::{
    cells::Samples,
    load::{Quantiles, Sample, number},
    requests::BODY_BYTES,
};

/// The device is fast enough for goals that say so.
const FAST_DEVICE_MS: f64 = 0.5;

/// What one repeat gave.
pub struct View<'a> {
    pub samples: &'a Samples,
    /// Before and after the repeat.
    pub device: [&'a Probe; 2],
}

#[derive(Clone, Copy)]
pub enum Target {
    AtMost(f64),
    AtLeast(f64),
    /// To compare by; there is no goal.
    None,
}

pub struct Goal {
    pub id: &'static str,
    pub what: &'static str,
    pub target: Target,
    /// What a path without limits, checks and metrics has reached.
    pub bare: &'static str,
    /// Cells that it is made of.
    pub cells: &'static [&'static str],
    /// Not worth looking at when the device changed its speed.
    pub on_device: bool,
    pub value: fn(&View<'_>) -> Option<f64>,
}

impl Target {
    pub fn is_met(self, value: f64) -> Option<bool> {
        match self {
            Self::AtMost(most) => Some(value <= most),
            Self::AtLeast(least) => Some(value >= least),
            Self::None => None,
        }
    }
}

impl View<'_> {
    fn rate(&self, cell: &str) -> Option<f64> {
        Some(self.samples.get(cell)?.messages_per_second)
    }

    fn cpu(&self, cell: &str) -> Option<f64> {
        Some(self.samples.get(cell)?.server_us_per_message)
    }

    /// CPU by another cell's, without what prepares the next segment: that comes in bursts of a whole one.
    fn cpus_unprepared(&self, cell: &str, by: &str) -> Option<f64> {
        let prepare = self.samples.get(cell)?.threads_us_per_message.get("store-prepare").copied();
        Some((self.cpu(cell)? - prepare.unwrap_or(0.0)) / self.cpu(by)?)
    }

    fn latency(&self, cell: &str) -> Option<Quantiles> {
        self.samples.get(cell)?.latency
    }

    fn rates(&self, cell: &str, by: &str) -> Option<f64> {
        Some(self.rate(cell)? / self.rate(by)?)
    }

    fn cpus(&self, cell: &str, by: &str) -> Option<f64> {
        Some(self.cpu(cell)? / self.cpu(by)?)
    }

    /// Of 4 KiB, in milliseconds.
    fn device_p50(&self) -> f64 {
        mean(self.device.map(|probe| probe.small.p50_ms))
    }

    /// Bodies by the bandwidth of writes of 1 MiB.
    fn of_bandwidth(&self, cell: &str) -> Option<f64> {
        let bytes = number(u64::try_from(BODY_BYTES).ok()?);
        let bandwidth = mean(self.device.map(|probe| probe.large.megabytes_per_second));
        Some(self.rate(cell)? * bytes / 1e6 / bandwidth)
    }

    fn delivery(&self, cell: &str) -> Option<f64> {
        let sample: &Sample = self.samples.get(cell)?;
        Some(sample.delivery?.p50 / sample.latency?.p50)
    }

    fn tail(&self, cell: &str) -> Option<f64> {
        self.latency(cell).map(|latency| latency.p99 / latency.p50)
    }
}

fn mean([a, b]: [f64; 2]) -> f64 {
    f64::midpoint(a, b)
}

use Target::{AtLeast, AtMost};

/// A goal on CPU time or rates.
const fn goal(
    id: &'static str,
    what: &'static str,
    target: Target,
    bare: &'static str,
    cells: &'static [&'static str],
    value: fn(&View<'_>) -> Option<f64>,
) -> Goal {
    Goal { id, what, target, bare, cells, on_device: false, value }
}

/// A goal in which the device has its part.
const fn on_device(goal: Goal) -> Goal {
    Goal { on_device: true, ..goal }
}

pub const GOALS: &[Goal] = &[
    goal("G1", "unary Send: CPU by S", AtMost(0.65), "0.51", &["P.send", "S.send"], |v| {
        v.cpus("P.send", "S.send")
    }),
    goal("G1", "the same, segments filled for nothing", Target::None, "", &["P.send", "S.send"], |v| {
        v.cpus_unprepared("P.send", "S.send")
    }),
    goal("G1", "unary Send: CPU by T", AtMost(13.0), "11", &["P.send", "T.send-64"], |v| {
        v.cpus("P.send", "T.send-64")
    }),
    goal("G2", "unary Send: rate by S", AtLeast(1.5), "1.6–1.9", &["P.send", "S.send"], |v| {
        v.rates("P.send", "S.send")
    }),
    goal("G3", "stream Send: rate by unary", AtLeast(5.0), "5–6", &["P.stream", "P.send"], |v| {
        v.rates("P.stream", "P.send")
    }),
    goal("G3", "stream Send: rate by T", AtLeast(0.3), "0.36–0.53", &["P.stream", "T.send-64"], |v| {
        v.rates("P.stream", "T.send-64")
    }),
    goal("G3", "stream Send: CPU by S", Target::None, "", &["P.stream", "S.stream"], |v| {
        v.cpus("P.stream", "S.stream")
    }),
    goal("G4", "Send of 64: rate by unary", AtLeast(12.0), "13–24", &["P.send-of-64", "P.send"], |v| {
        v.rates("P.send-of-64", "P.send")
    }),
    goal(
        "G4",
        "Send of 64: rate by T",
        AtLeast(0.23),
        "0.29–0.36",
        &["P.send-of-64", "T.send-1024"],
        |v| v.rates("P.send-of-64", "T.send-1024"),
    ),
    goal("G4", "Send of 64: CPU by T", Target::None, "", &["P.send-of-64", "T.send-1024"], |v| {
        v.cpus("P.send-of-64", "T.send-1024")
    }),
    goal("G4", "Send of 64: CPU by S", Target::None, "0.74–0.81", &["P.send-of-64", "S.send-of-64"], |v| {
        v.cpus("P.send-of-64", "S.send-of-64")
    }),
    goal(
        "G4",
        "Send of 256: rate by T",
        AtLeast(0.46),
        "0.6–0.7",
        &["P.send-of-256", "T.send-1024"],
        |v| v.rates("P.send-of-256", "T.send-1024"),
    ),
    goal(
        "G5",
        "Pull of 64: CPU by S, each with its own client's frames",
        AtMost(0.6),
        "0.40–0.49",
        &["P.pull-of-64", "S.pull-of-64"],
        |v| v.cpus("P.pull-of-64", "S.pull-of-64"),
    ),
    goal(
        "G5",
        "the same, our client's frames on both",
        Target::None,
        "",
        &["P.pull-of-64", "S.pull-of-64-large"],
        |v| v.cpus("P.pull-of-64", "S.pull-of-64-large"),
    ),
    goal(
        "G5",
        "the same, the stock client's frames on both",
        Target::None,
        "0.75–0.85",
        &["P.pull-of-64-small", "S.pull-of-64"],
        |v| v.cpus("P.pull-of-64-small", "S.pull-of-64"),
    ),
    goal(
        "G5",
        "Pull of 64: rate by T",
        AtLeast(0.24),
        "0.31–0.34",
        &["P.pull-of-64", "T.pull-of-64"],
        |v| v.rates("P.pull-of-64", "T.pull-of-64"),
    ),
    goal(
        "G5",
        "Pull of 256: rate by T",
        AtLeast(0.38),
        "0.48–0.55",
        &["P.pull-of-256", "T.pull-of-256"],
        |v| v.rates("P.pull-of-256", "T.pull-of-256"),
    ),
    on_device(goal(
        "G7",
        "durable, one in flight: p50 by page cache's + D4's",
        AtMost(1.25),
        "0.97",
        &["P.durable-1", "P.send-1"],
        |v| Some(v.latency("P.durable-1")?.p50 / (v.latency("P.send-1")?.p50 + v.device_p50())),
    )),
    on_device(goal(
        "G8",
        "durable, 64 in flight: rate by one in flight",
        AtLeast(8.0),
        "11–13",
        &["P.durable-64", "P.durable-1"],
        |v| v.rates("P.durable-64", "P.durable-1"),
    )),
    on_device(goal(
        "G8",
        "durable, 256 in flight: rate by one in flight",
        AtLeast(15.0),
        "19–31",
        &["P.durable-256", "P.durable-1"],
        |v| v.rates("P.durable-256", "P.durable-1"),
    )),
    on_device(goal(
        "G8",
        "durable, 64 in flight: rate by page cache's, where D4 ≤ 0.5 ms",
        AtLeast(0.35),
        "0.48",
        &["P.durable-64", "P.send"],
        |v| v.rates("P.durable-64", "P.send").filter(|_| v.device_p50() <= FAST_DEVICE_MS),
    )),
    on_device(goal(
        "G9",
        "durable Send of 64: rate by page cache's",
        AtLeast(0.55),
        "0.50–0.62",
        &["P.durable-of-64", "P.send-of-64"],
        |v| v.rates("P.durable-of-64", "P.send-of-64"),
    )),
    on_device(goal(
        "G9",
        "durable Send of 64: bandwidth by D1M's",
        AtLeast(0.2),
        "0.3",
        &["P.durable-of-64"],
        |v| v.of_bandwidth("P.durable-of-64"),
    )),
    goal("G11", "one in flight: p99 by p50", AtMost(3.0), "1.7–2.0", &["P.send-1"], |v| v.tail("P.send-1")),
    goal("G11", "a quarter of the rate: p99 by p50", AtMost(10.0), "8–9", &["P.quarter", "P.send"], |v| {
        v.tail("P.quarter")
    }),
    goal("G12", "delivery by the sender's OK, p50", AtMost(1.15), "1.01–1.07", &["P.round-trip"], |v| {
        v.delivery("P.round-trip")
    }),
    on_device(goal("G12", "the same, durable", AtMost(1.15), "", &["P.round-trip-durable"], |v| {
        v.delivery("P.round-trip-durable")
    })),
];
