//! What the system says about this process. Elsewhere than on Linux there is nothing to read, so nothing is told.

use std::{fs, time::Instant};

use opentelemetry::{KeyValue, metrics::Meter};

/// A line of `/proc/self/stat`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stat {
    user_seconds: f64,
    system_seconds: f64,
    threads: u64,
    virtual_bytes: u64,
    resident_bytes: u64,
}

impl Stat {
    fn read() -> Option<Self> {
        let text = fs::read_to_string("/proc/self/stat").ok()?;
        let ticks = rustix::param::clock_ticks_per_second();
        let page = u64::try_from(rustix::param::page_size()).ok()?;
        Self::parse(&text, ticks, page)
    }

    /// Fields by their numbers in proc(5). The second one, the name, may hold blanks and brackets.
    fn parse(text: &str, ticks: u64, page: u64) -> Option<Self> {
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        let seconds = |field| Some(number(field)? as f64 / ticks as f64);
        Some(Self {
            user_seconds: seconds(14)?,
            system_seconds: seconds(15)?,
            threads: number(20)?,
            virtual_bytes: number(23)?,
            resident_bytes: number(24)?.saturating_mul(page),
        })
    }
}

fn open_files() -> Option<u64> {
    // One of them is the directory that is being read.
    Some((fs::read_dir("/proc/self/fd").ok()?.count() as u64).saturating_sub(1))
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Makes the instruments of the process.
pub(super) fn observe(meter: &Meter) {
    let started = Instant::now();
    meter
        .f64_observable_counter("process.cpu.time")
        .with_unit("s")
        .with_description("Processor time used, by mode")
        .with_callback(|to| {
            if let Some(stat) = Stat::read() {
                to.observe(stat.user_seconds, &[KeyValue::new("cpu.mode", "user")]);
                to.observe(stat.system_seconds, &[KeyValue::new("cpu.mode", "system")]);
            }
        })
        .build();
    meter
        .i64_observable_up_down_counter("process.memory.usage")
        .with_unit("By")
        .with_description("Memory that is resident")
        .with_callback(|to| {
            if let Some(stat) = Stat::read() {
                to.observe(signed(stat.resident_bytes), &[]);
            }
        })
        .build();
    meter
        .i64_observable_up_down_counter("process.memory.virtual")
        .with_unit("By")
        .with_description("Memory that is mapped")
        .with_callback(|to| {
            if let Some(stat) = Stat::read() {
                to.observe(signed(stat.virtual_bytes), &[]);
            }
        })
        .build();
    meter
        .i64_observable_up_down_counter("process.thread.count")
        .with_unit("{thread}")
        .with_description("Threads")
        .with_callback(|to| {
            if let Some(stat) = Stat::read() {
                to.observe(signed(stat.threads), &[]);
            }
        })
        .build();
    meter
        .i64_observable_up_down_counter("process.open_file_descriptor.count")
        .with_unit("{file_descriptor}")
        .with_description("Open file descriptors")
        .with_callback(|to| {
            if let Some(count) = open_files() {
                to.observe(signed(count), &[]);
            }
        })
        .build();
    meter
        .f64_observable_gauge("process.uptime")
        .with_unit("s")
        .with_description("Time since the start")
        .with_callback(move |to| to.observe(started.elapsed().as_secs_f64(), &[]))
        .build();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_and_blanks_does_not_shift_the_fields() {
        let text =
            "7 (a ) b) S 1 7 7 0 -1 4 0 0 0 0 250 50 0 0 20 0 9 0 100 4096000 25 18446744073709551615 1";
        let stat = Stat::parse(text, 100, 4096).unwrap();
        assert_eq!((stat.user_seconds, stat.system_seconds), (2.5, 0.5));
        assert_eq!((stat.threads, stat.virtual_bytes, stat.resident_bytes), (9, 4_096_000, 25 * 4096));
        assert_eq!(Stat::parse("7 (a", 100, 4096), None);
        assert_eq!(Stat::parse("7 (a) S 1", 100, 4096), None);
    }
}
