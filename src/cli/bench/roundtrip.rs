//! `holdfast bench roundtrip`.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::{BufMut as _, Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::{sync::oneshot, task::JoinSet};

use super::{
    Rig,
    send::{busy, join},
};
use crate::{
    cli::{Failure, values},
    client::{Batch, Connection, OutgoingMessage, Pull},
};

/// How long a pull waits.
const WAIT: Duration = Duration::from_secs(20);
/// Run and number, at the start of a body.
const STAMP_BYTES: usize = 16;

/// Messages under way: who waits for them.
struct Flights {
    /// Tells messages of this run from others in the topic.
    run: u64,
    next: AtomicU64,
    open: Mutex<HashMap<u64, oneshot::Sender<Instant>>>,
}

/// Runs senders and receivers until the meter says that it is over.
pub(super) async fn start(rig: Arc<Rig>) -> Result<(), Failure> {
    let flights = Arc::new(Flights {
        run: values::now_ms() << 16 | u64::from(std::process::id() & 0xffff),
        next: AtomicU64::new(0),
        open: Mutex::new(HashMap::new()),
    });
    let Some(connection) = rig.connection(0) else { return Ok(()) };
    let most = usize::try_from(rig.load.in_flight).unwrap_or(usize::MAX);
    let used: Vec<u32> = rig.queues.iter().copied().take(most.min(1024)).collect();
    let ends = connection.offsets(&rig.topic, &used, None, None).await?;
    let mut tasks = JoinSet::new();
    for queue in ends {
        // A connection of its own: a receiver is another process than the sender.
        let connection = Connection::new(connection.endpoint().clone())?;
        tasks.spawn(receive(rig.clone(), flights.clone(), connection, queue.queue, queue.max));
    }
    for (number, &queue) in (0..rig.load.in_flight).zip(used.iter().cycle()) {
        tasks.spawn(send(rig.clone(), flights.clone(), number, queue));
    }
    join(tasks).await
}

async fn receive(
    rig: Arc<Rig>,
    flights: Arc<Flights>,
    connection: Connection,
    queue: u32,
    from: u64,
) -> Result<(), Failure> {
    let mut pull = Pull { max_messages: 1024, wait: WAIT, ..Pull::new(rig.topic.clone(), queue, from) };
    while !rig.meter.is_over() {
        match connection.pull(&pull).await {
            Ok(pulled) => {
                let now = Instant::now();
                for message in &pulled.messages {
                    flights.landed(&message.body, now);
                }
                pull.offset = pulled.next_offset;
            }
            Err(error) => busy(&rig, error).await?,
        }
    }
    Ok(())
}

async fn send(rig: Arc<Rig>, flights: Arc<Flights>, number: u32, queue: u32) -> Result<(), Failure> {
    let Some(connection) = rig.connection(number) else { return Ok(()) };
    let filler = rig.body();
    while !rig.meter.is_over() {
        let (body, landing) = flights.start(&filler);
        let bytes = u64::try_from(body.len()).unwrap_or(u64::MAX);
        let batch =
            Batch { queue: Some(queue), ..Batch::new(rig.topic.clone(), vec![OutgoingMessage::new(body)]) };
        let begun = Instant::now();
        match connection.send(batch).await {
            Ok(_) => rig.meter.call(begun, 1, bytes),
            Err(error) => {
                busy(&rig, error).await?;
                continue;
            }
        }
        if let Ok(arrived) = landing.await {
            rig.meter.delivery(begun, arrived);
        }
    }
    Ok(())
}

impl Flights {
    /// A body that will be known again, of the size of `filler` if it has room.
    fn start(&self, filler: &Bytes) -> (Bytes, oneshot::Receiver<Instant>) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (landed, landing) = oneshot::channel();
        self.open.lock().insert(number, landed);
        let mut body = BytesMut::with_capacity(filler.len().max(STAMP_BYTES));
        body.put_u64(self.run);
        body.put_u64(number);
        body.extend_from_slice(filler.get(STAMP_BYTES..).unwrap_or_default());
        (body.freeze(), landing)
    }

    fn landed(&self, body: &[u8], at: Instant) {
        let Some((run, rest)) = body.split_first_chunk() else { return };
        let Some((number, _)) = rest.split_first_chunk() else { return };
        if u64::from_be_bytes(*run) == self.run
            && let Some(landed) = self.open.lock().remove(&u64::from_be_bytes(*number))
        {
            // A sender that has given up does not wait.
            let _ = landed.send(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_known_again_and_others_are_left_alone() {
        let flights = Flights { run: 7, next: AtomicU64::new(0), open: Mutex::new(HashMap::new()) };
        let (body, mut landing) = flights.start(&Bytes::from(vec![b'x'; 100]));
        assert_eq!(body.len(), 100);
        let now = Instant::now();
        flights.landed(b"short", now);
        flights.landed(&[0; 32], now);
        assert!(landing.try_recv().is_err());
        flights.landed(&body, now);
        assert_eq!(landing.try_recv(), Ok(now));
        assert_eq!(flights.start(&Bytes::from_static(b"x")).0.len(), STAMP_BYTES);
    }
}
