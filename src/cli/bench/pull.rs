//! `holdfast bench pull`.

use std::{sync::Arc, time::Instant};

use tokio::task::JoinSet;

use super::{
    Rig,
    send::{busy, join},
};
use crate::{
    cli::{Exit, Failure},
    client::Pull,
};

/// As much as a pull may bring.
const MAX_BYTES: u32 = 16 << 20;

/// Runs the readers until the meter says that it is over.
pub(super) async fn start(rig: Arc<Rig>) -> Result<(), Failure> {
    let mut filled = Vec::new();
    if let Some(connection) = rig.connection(0) {
        for some in rig.queues.chunks(1024) {
            let offsets = connection.offsets(&rig.topic, some, None, None).await?;
            filled.extend(offsets.into_iter().filter(|queue| queue.max > queue.min).map(|queue| queue.queue));
        }
    }
    if filled.is_empty() {
        return Err(Failure::new(
            Exit::Refused,
            format!("topic `{}` is empty; fill it with `holdfast bench send`", rig.topic),
        ));
    }
    let mut tasks = JoinSet::new();
    for (number, &queue) in (0..rig.load.in_flight).zip(filled.iter().cycle()) {
        tasks.spawn(read(rig.clone(), number, queue));
    }
    join(tasks).await
}

/// One queue from start to end, over and over.
async fn read(rig: Arc<Rig>, number: u32, queue: u32) -> Result<(), Failure> {
    let Some(connection) = rig.connection(number) else { return Ok(()) };
    let mut pull =
        Pull { max_messages: rig.load.batch, max_bytes: MAX_BYTES, ..Pull::new(rig.topic.clone(), queue, 0) };
    while !rig.meter.is_over() {
        let begun = Instant::now();
        match connection.pull(&pull).await {
            Ok(pulled) => {
                let bytes: usize = pulled.messages.iter().map(|message| message.body.len()).sum();
                let count = u64::try_from(pulled.messages.len()).unwrap_or(u64::MAX);
                if count > 0 {
                    rig.meter.call(begun, count, u64::try_from(bytes).unwrap_or(u64::MAX));
                }
                let at_end = pulled.next_offset >= pulled.max_offset;
                pull.offset = if at_end { pulled.min_offset } else { pulled.next_offset };
            }
            Err(error) => busy(&rig, error).await?,
        }
    }
    Ok(())
}
