//! What the store measures. Names are public.

use std::{sync::Arc, time::Duration};

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Histogram, Meter},
};

use super::shard::{Shard, WeakShard};

const APPEND_BUCKETS: [f64; 12] =
    [0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0];
const SYNC_BUCKETS: [f64; 11] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0];
const GROUP_BUCKETS: [f64; 8] =
    [4096.0, 16384.0, 65536.0, 262_144.0, 1_048_576.0, 4_194_304.0, 16_777_216.0, 67_108_864.0];

/// The store's instruments.
pub(super) struct Metrics {
    append: Histogram<f64>,
    sync: Histogram<f64>,
    synced_bytes: Histogram<f64>,
    sync_errors: Counter<u64>,
    corrupt: Counter<u64>,
    refused: Counter<u64>,
    deleted: Counter<u64>,
    relocated: Counter<u64>,
    unread_removed: Counter<u64>,
    shard: [KeyValue; 1],
}

impl Metrics {
    pub fn new(meter: &Meter, shard: &str) -> Self {
        Self {
            append: meter
                .f64_histogram("holdfast.storage.append.duration")
                .with_unit("s")
                .with_description("Time to write one group of frames to the page cache.")
                .with_boundaries(APPEND_BUCKETS.to_vec())
                .build(),
            sync: meter
                .f64_histogram("holdfast.storage.fsync.duration")
                .with_unit("s")
                .with_description("Time of one sync of the log.")
                .with_boundaries(SYNC_BUCKETS.to_vec())
                .build(),
            synced_bytes: meter
                .f64_histogram("holdfast.storage.fsync.size")
                .with_unit("By")
                .with_description("Bytes made durable by one sync of the log.")
                .with_boundaries(GROUP_BUCKETS.to_vec())
                .build(),
            sync_errors: meter
                .u64_counter("holdfast.storage.fsync.errors")
                .with_description("Failed writes and syncs of the log; any is an incident.")
                .build(),
            corrupt: meter
                .u64_counter("holdfast.storage.corrupt_records")
                .with_description("Damaged places found in the store.")
                .build(),
            refused: meter
                .u64_counter("holdfast.storage.busy_refusals")
                .with_description("Sends refused because too much waits to be written.")
                .build(),
            deleted: meter
                .u64_counter("holdfast.storage.deleted")
                .with_unit("By")
                .with_description("Bytes of log segments removed by retention.")
                .build(),
            relocated: meter
                .u64_counter("holdfast.storage.relocated")
                .with_unit("By")
                .with_description("Bytes of live messages copied forward before their segment went.")
                .build(),
            unread_removed: meter
                .u64_counter("holdfast.storage.unread_removed")
                .with_unit("{message}")
                .with_description(
                    "Messages that retention removed before a group with progress had read them.",
                )
                .build(),
            shard: [KeyValue::new("shard", shard.to_owned())],
        }
    }

    /// Instruments that look at the shard when they are read.
    pub fn observe(meter: &Meter, shard: &Arc<Shard>) {
        let gauge = |name: &'static str, unit: &'static str, text: &'static str, read: fn(&Shard) -> u64| {
            let weak: WeakShard = Arc::downgrade(shard);
            let label = [KeyValue::new("shard", shard.options.shard.clone())];
            let _registered = meter
                .u64_observable_gauge(name)
                .with_unit(unit)
                .with_description(text)
                .with_callback(move |observer| {
                    if let Some(shard) = weak.upgrade() {
                        observer.observe(read(&shard), &label);
                    }
                })
                .build();
        };
        use std::sync::atomic::Ordering::Relaxed;
        gauge(
            "holdfast.storage.disk.free",
            "By",
            "Free space on the file system of the data directory.",
            |shard| shard.space_left.free.load(Relaxed),
        );
        gauge("holdfast.storage.segments", "", "Segments of the log.", |shard| shard.segments.size().0);
        gauge("holdfast.storage.log.size", "By", "Bytes of log files.", |shard| shard.segments.size().1);
        gauge("holdfast.storage.index.size", "By", "Bytes of queue index files.", |shard| {
            shard.space.size().1
        });
        gauge("holdfast.storage.keys.runs", "", "Files of the key index.", |shard| shard.keys.size().0);
        gauge("holdfast.storage.keys.size", "By", "Bytes of key index files.", |shard| shard.keys.size().1);
        gauge("holdfast.storage.keys.in_memory", "", "Look-ups in memory, in no file yet.", |shard| {
            shard.keys.in_memory()
        });
        gauge(
            "holdfast.storage.keys.damaged",
            "",
            "Files of the key index in which damage was found since the start, to be rebuilt from the log.",
            |shard| shard.keys.damaged(),
        );
        gauge(
            "holdfast.storage.keys.forgotten",
            "",
            "Look-ups given up since the start because the key index could not be written.",
            |shard| shard.keys.forgotten(),
        );
        gauge("holdfast.storage.flush_behind.size", "By", "Bytes appended and not yet synced.", |shard| {
            let end = shard.inner.lock().end;
            end.saturating_sub(shard.durable.load(Relaxed))
        });
        gauge(
            "holdfast.storage.dispatch_behind.size",
            "By",
            "Bytes appended and not yet indexed.",
            |shard| {
                let end = shard.inner.lock().end;
                end.saturating_sub(shard.dispatched.load(Relaxed))
            },
        );
        gauge(
            "holdfast.storage.writable",
            "",
            "1 while sends are taken, 0 while they are refused.",
            |shard| u64::from(shard.state() == super::State::Writable),
        );
        gauge(
            "holdfast.storage.unread_expiring",
            "{message}",
            "Messages in the last tenth of their topic's retention that a group with progress has not read.",
            |shard| shard.unread_expiring.load(Relaxed),
        );
        gauge("holdfast.storage.recovery.time", "ms", "How long the last start read the log.", |shard| {
            shard.recovery_ms.load(Relaxed)
        });
        gauge("holdfast.topics", "", "Topics of the shard.", |shard| shard.tables.counts().0);
        gauge("holdfast.groups", "", "Consumer groups of the shard.", |shard| shard.tables.counts().1);
    }

    pub fn wrote(&self, took: Duration) {
        self.append.record(took.as_secs_f64(), &self.shard);
    }

    pub fn synced(&self, took: Duration, bytes: u64) {
        self.sync.record(took.as_secs_f64(), &self.shard);
        self.synced_bytes.record(bytes as f64, &self.shard);
    }

    pub fn fenced(&self) {
        self.sync_errors.add(1, &self.shard);
    }

    pub fn damaged(&self) {
        self.corrupt.add(1, &self.shard);
    }

    pub fn refused_busy(&self) {
        self.refused.add(1, &self.shard);
    }

    pub fn deleted(&self, bytes: u64) {
        self.deleted.add(bytes, &self.shard);
    }

    pub fn relocated(&self, bytes: u64) {
        self.relocated.add(bytes, &self.shard);
    }

    pub fn unread_removed(&self, messages: u64) {
        self.unread_removed.add(messages, &self.shard);
    }
}
