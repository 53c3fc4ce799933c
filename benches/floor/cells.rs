//! What is measured: one load on one server, by name. Names begin with the server's letter: T, S, or P for the product.

use std::{collections::BTreeMap, path::Path, time::Duration};

use holdfast::{
    client::{Batch, Connection, OutgoingMessage, TopicChange},
    model::DurabilityLevel,
    pb::v1::Durability::{DurableDisk, DurableMemory},
};

use crate::{
    Error, Result,
    grpc::{self, Frames, Shape},
    load::{Sample, Timing},
    process::Server,
    raw, requests,
};

/// Queues of each topic.
const QUEUES: u32 = 4;
/// Messages in each queue of the topic that is read: 64 MiB in all, more than the broker keeps in memory of its own.
const FILLED: u64 = 16 << 10;
/// Acknowledged from the page cache.
const PAGE: &str = "floor-page";
/// Acknowledged from the device.
const DEVICE: &str = "floor-device";
/// Filled once, then read.
const READ: &str = "floor-read";
/// For the long run; keeps little, so that it does not fill the disk.
const LONG: &str = "floor-long";
const LONG_BYTES: u64 = 4 << 30;
/// Streams on each connection.
const STREAMS: usize = 2;
/// Sends in flight on all streams: 16 on each of four.
const STREAM_IN_FLIGHT: usize = 64;
/// Messages in flight where calls carry many: 1 MiB.
const MANY: usize = 1024;
/// Pulls at once.
const PULLS: usize = 8;

/// The servers of one repeat, and how to load them.
pub struct Rig<'a> {
    pub raw: Server,
    pub stock: Server,
    pub product: Server,
    pub timing: Timing,
    pub threads: usize,
    /// The directory that all of them write to.
    pub dir: &'a Path,
}

/// What has been measured in a repeat so far.
pub type Samples = BTreeMap<&'static str, Sample>;

pub struct Cell {
    pub name: &'static str,
    pub what: &'static str,
    run: fn(&Rig<'_>, &Samples) -> Result<Sample>,
}

impl Cell {
    pub fn run(&self, rig: &Rig<'_>, samples: &Samples) -> Result<Sample> {
        (self.run)(rig, samples).map_err(|error| format!("{}: {error}", self.name).into())
    }
}

pub const CELLS: &[Cell] = &[
    Cell {
        name: "T.send-1024",
        what: "appends, 1024 in flight",
        run: |rig, _| raw::append(&rig.raw, rig.threads, MANY, rig.timing),
    },
    Cell {
        name: "T.send-64",
        what: "appends, 64 in flight",
        run: |rig, _| raw::append(&rig.raw, rig.threads, 64, rig.timing),
    },
    Cell {
        name: "S.send",
        what: "unary Send, 64 in flight",
        run: |rig, _| rig.send(&rig.stock, 64, 1, PAGE),
    },
    Cell {
        name: "P.send",
        what: "unary Send, page cache, 64 in flight",
        run: |rig, _| rig.send(&rig.product, 64, 1, PAGE),
    },
    Cell {
        name: "P.stream",
        what: "stream Send, one message a frame, 4 streams × 16 in flight",
        run: |rig, _| rig.stream(&rig.product),
    },
    Cell { name: "S.stream", what: "the same", run: |rig, _| rig.stream(&rig.stock) },
    Cell {
        name: "P.send-of-64",
        what: "unary Send of 64, page cache, 16 in flight",
        run: |rig, _| rig.send(&rig.product, MANY / 64, 64, PAGE),
    },
    Cell {
        name: "S.send-of-64",
        what: "unary Send of 64, 16 in flight",
        run: |rig, _| rig.send(&rig.stock, MANY / 64, 64, PAGE),
    },
    Cell {
        name: "P.send-of-256",
        what: "unary Send of 256, page cache, frames of 1 MiB, 4 in flight",
        run: |rig, _| rig.send(&rig.product, MANY / 256, 256, PAGE),
    },
    Cell {
        name: "T.pull-of-64",
        what: "reads of 64, 8 in flight",
        run: |rig, _| raw::read(&rig.raw, rig.threads, 64, PULLS, rig.timing),
    },
    Cell {
        name: "S.pull-of-64",
        what: "Pull of 64, 8 in flight, stock client's frames",
        run: |rig, _| rig.pull(&rig.stock, 64, Frames::Stock),
    },
    Cell {
        name: "S.pull-of-64-large",
        what: "the same, our client's frames",
        run: |rig, _| rig.pull(&rig.stock, 64, Frames::Ours),
    },
    Cell {
        name: "P.pull-of-64",
        what: "Pull of 64, 8 in flight, our client's frames",
        run: |rig, _| rig.pull(&rig.product, 64, Frames::Ours),
    },
    Cell {
        name: "P.pull-of-64-small",
        what: "the same, stock client's frames",
        run: |rig, _| rig.pull(&rig.product, 64, Frames::Stock),
    },
    Cell {
        name: "T.pull-of-256",
        what: "reads of 256, 8 in flight",
        run: |rig, _| raw::read(&rig.raw, rig.threads, 256, PULLS, rig.timing),
    },
    Cell {
        name: "P.pull-of-256",
        what: "Pull of 256, 8 in flight, our client's frames",
        run: |rig, _| rig.pull(&rig.product, 256, Frames::Ours),
    },
    Cell {
        name: "P.send-1",
        what: "unary Send, page cache, one in flight",
        run: |rig, _| rig.one_by_one(PAGE),
    },
    Cell {
        name: "P.durable-1",
        what: "unary Send, durable, one in flight",
        run: |rig, _| rig.one_by_one(DEVICE),
    },
    Cell {
        name: "P.durable-64",
        what: "unary Send, durable, 64 in flight",
        run: |rig, _| rig.send(&rig.product, 64, 1, DEVICE),
    },
    Cell {
        name: "P.durable-256",
        what: "unary Send, durable, 256 in flight",
        run: |rig, _| rig.send(&rig.product, 256, 1, DEVICE),
    },
    Cell {
        name: "P.durable-of-64",
        what: "unary Send of 64, durable, 16 in flight",
        run: |rig, _| rig.send(&rig.product, MANY / 64, 64, DEVICE),
    },
    Cell {
        name: "P.quarter",
        what: "unary Send, page cache, at a steady quarter of the rate of P.send",
        run: |rig, samples| {
            let full = samples.get("P.send").ok_or("needs P.send")?.messages_per_second;
            grpc::send_paced(&rig.product, PAGE, full / 4.0, rig.shape(1, 1, Frames::Ours), rig.timing)
        },
    },
    Cell {
        name: "P.round-trip",
        what: "a message to a waiting Pull, page cache, one in flight",
        run: |rig, _| grpc::round_trip(&rig.product, PAGE, rig.timing),
    },
    Cell {
        name: "P.round-trip-durable",
        what: "the same, durable",
        run: |rig, _| grpc::round_trip(&rig.product, DEVICE, rig.timing),
    },
];

impl Rig<'_> {
    fn shape(&self, in_flight: usize, batch: u32, frames: Frames) -> Shape {
        Shape { frames, threads: self.threads, in_flight, batch }
    }

    fn send(&self, server: &Server, in_flight: usize, batch: u32, topic: &str) -> Result<Sample> {
        let promise = if topic == DEVICE { DurableDisk } else { DurableMemory };
        grpc::send(server, topic, promise, self.shape(in_flight, batch, Frames::Ours), self.timing)
    }

    fn one_by_one(&self, topic: &str) -> Result<Sample> {
        let promise = if topic == DEVICE { DurableDisk } else { DurableMemory };
        let shape = Shape { threads: 1, ..self.shape(1, 1, Frames::Ours) };
        grpc::send(&self.product, topic, promise, shape, self.timing)
    }

    fn stream(&self, server: &Server) -> Result<Sample> {
        let shape = self.shape(STREAM_IN_FLIGHT, 1, Frames::Ours);
        grpc::send_stream(server, PAGE, STREAMS, shape, self.timing)
    }

    fn pull(&self, server: &Server, batch: u32, frames: Frames) -> Result<Sample> {
        grpc::pull(server, READ, QUEUES, FILLED, self.shape(PULLS, batch, frames), self.timing)
    }

    /// One stretch of the long run.
    pub fn long(&self, measured: Duration) -> Result<Sample> {
        let timing = Timing { measured, ..self.timing };
        grpc::send(&self.product, LONG, DurableMemory, self.shape(8, 64, Frames::Ours), timing)
    }
}

/// What the long run's load is, for people.
pub const LONG_WHAT: &str = "unary Send of 64, page cache, 8 in flight";

/// Makes the topics, and fills the one that is read.
pub fn prepare(product: &Server) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let connection = Connection::new(product.address.to_string().parse()?)?;
        for (topic, durability, most) in [
            (PAGE, DurabilityLevel::Async, None),
            (DEVICE, DurabilityLevel::Sync, None),
            (READ, DurabilityLevel::Async, None),
            (LONG, DurabilityLevel::Async, Some(LONG_BYTES)),
        ] {
            let settings = TopicChange {
                queues: Some(QUEUES),
                durability: Some(durability),
                retention_bytes: most.map(Some),
                ..TopicChange::default()
            };
            connection.create_topic(topic, settings).await?;
        }
        const BATCH: u64 = 256;
        let body = requests::body();
        for number in 0..u64::from(QUEUES) * FILLED / BATCH {
            let messages = (0..BATCH).map(|_| OutgoingMessage::new(body.clone())).collect();
            let queue = u32::try_from(number % u64::from(QUEUES))?;
            connection.send(Batch { queue: Some(queue), ..Batch::new(READ, messages) }).await?;
        }
        Ok::<_, Error>(())
    })
}
