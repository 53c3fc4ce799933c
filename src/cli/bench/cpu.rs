//! CPU time of this process and of a broker on the same machine, from `/proc`.

use std::{fs, time::Duration};

/// CPU time used so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Used {
    client: Option<Duration>,
    server: Option<Duration>,
}

/// CPU time used between two readings; `None` where it is not known.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spent {
    pub(super) client: Option<Duration>,
    pub(super) server: Option<Duration>,
}

/// Reads both.
pub(super) fn read(server: Option<u32>) -> Used {
    Used { client: of("self"), server: server.and_then(|pid| of(&pid.to_string())) }
}

impl Used {
    /// What was used from here until `later`.
    pub(super) fn until(&self, later: &Self) -> Spent {
        let between = |begin: Option<Duration>, end: Option<Duration>| Some(end?.saturating_sub(begin?));
        Spent { client: between(self.client, later.client), server: between(self.server, later.server) }
    }
}

fn of(process: &str) -> Option<Duration> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let ticks = ticks(&stat)?;
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Some(Duration::from_millis(ticks.saturating_mul(1000) / per_second))
}

/// User and system time, in clock ticks: fields 14 and 15. The name in field 2 may hold spaces and brackets.
fn ticks(stat: &str) -> Option<u64> {
    let (_, behind) = stat.rsplit_once(')')?;
    let mut fields = behind.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    user.checked_add(system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_found_behind_any_name() {
        let stat = "7 (a ) (b) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 4 0 100 1000 200";
        assert_eq!(ticks(stat), Some(300));
        assert_eq!(ticks("nonsense"), None);
    }
}
