//! `holdfast bench send`.

use std::{sync::Arc, time::Instant};

use tokio::{sync::mpsc, task::JoinSet};

use super::Rig;
use crate::{
    cli::{Exit, Failure},
    client::{self, Batch, Code, OutgoingMessage, Window},
};

/// Bytes that a stream may have in flight; batches are what bounds it.
const STREAM_BYTES: usize = 1 << 30;

/// Runs the senders until the meter says that it is over.
pub(super) async fn start(rig: Arc<Rig>) -> Result<(), Failure> {
    let mut tasks = JoinSet::new();
    if rig.load.streams == 0 {
        for number in 0..rig.load.in_flight {
            tasks.spawn(unary(rig.clone(), number));
        }
    } else {
        for number in 0..rig.load.streams {
            tasks.spawn(stream(rig.clone(), number));
        }
    }
    join(tasks).await
}

/// Waits for all tasks; the first failure ends them.
pub(super) async fn join(mut tasks: JoinSet<Result<(), Failure>>) -> Result<(), Failure> {
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(|error| Failure::new(Exit::Failed, error.to_string()))??;
    }
    Ok(())
}

/// Makes the same batch over and over.
pub(super) struct Maker {
    body: bytes::Bytes,
    batch: u32,
    topic: String,
}

impl Maker {
    fn new(rig: &Rig) -> Self {
        Self { body: rig.body(), batch: rig.load.batch, topic: rig.topic.clone() }
    }

    fn batch(&self) -> Batch {
        let messages = (0..self.batch).map(|_| OutgoingMessage::new(self.body.clone())).collect();
        Batch::new(self.topic.clone(), messages)
    }

    fn bytes(&self) -> u64 {
        u64::try_from(self.body.len()).unwrap_or(u64::MAX).saturating_mul(self.batch.into())
    }
}

/// One call after the other.
async fn unary(rig: Arc<Rig>, number: u32) -> Result<(), Failure> {
    let Some(connection) = rig.connection(number) else { return Ok(()) };
    let maker = Maker::new(&rig);
    while !rig.meter.is_over() {
        let begun = Instant::now();
        match connection.send(maker.batch()).await {
            Ok(_) => rig.meter.call(begun, maker.batch.into(), maker.bytes()),
            Err(error) => busy(&rig, error).await?,
        }
    }
    Ok(())
}

/// One stream with its window full.
async fn stream(rig: Arc<Rig>, number: u32) -> Result<(), Failure> {
    let Some(connection) = rig.connection(number) else { return Ok(()) };
    let maker = Maker::new(&rig);
    let (messages, bytes) = (maker.batch.into(), maker.bytes());
    let in_flight = usize::try_from(rig.load.in_flight).unwrap_or(usize::MAX);
    let mut stream = connection.send_stream(Window { batches: in_flight, bytes: STREAM_BYTES });
    let (answers, mut arrivals) = mpsc::channel::<(Instant, client::Answer)>(in_flight);
    let counting = {
        let rig = rig.clone();
        tokio::spawn(async move {
            while let Some((begun, answer)) = arrivals.recv().await {
                match answer.await {
                    Ok(_) => rig.meter.call(begun, messages, bytes),
                    Err(error) => busy(&rig, error).await?,
                }
            }
            Ok(())
        })
    };
    while !rig.meter.is_over() {
        let batch = maker.batch();
        // The window is waited for outside the measured time: it is this side's queue, not the broker's.
        let Ok(()) = stream.ready(&batch).await else { break };
        let begun = Instant::now();
        let Ok(answer) = stream.send(batch).await else { break };
        if answers.send((begun, answer)).await.is_err() {
            break;
        }
    }
    drop(answers);
    counting.await.map_err(|error| Failure::new(Exit::Failed, error.to_string()))?
}

/// A broker that is busy gets the pause it asks for; all else ends the run.
pub(super) async fn busy(rig: &Rig, error: client::Error) -> Result<(), Failure> {
    match (error.code(), error.retry_after()) {
        (Code::ResourceExhausted, Some(pause)) => {
            rig.meter.refused();
            tokio::time::sleep(pause).await;
            Ok(())
        }
        _ => Err(error.into()),
    }
}
