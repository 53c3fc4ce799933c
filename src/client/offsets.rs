//! Progress of groups, bounds of queues, offsets by time.

use std::time::SystemTime;

use super::{
    Connection, Error,
    connection::request,
    message::{offset, wire_offset},
};
use crate::pb::v1 as pb;

/// An offset in a queue: of the next message to consume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueOffset {
    /// The topic.
    pub topic: String,
    /// Queue of the topic.
    pub queue: u32,
    /// The offset.
    pub offset: u64,
}

/// What became of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// The result.
    pub outcome: CommitOutcome,
    /// The progress in force now.
    pub committed: Option<u64>,
}

/// Results of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommitOutcome {
    /// It is durable.
    Committed,
    /// More is committed already, and stands.
    Stale,
    /// Not in the queue; nothing changed.
    OutOfRange,
    /// Not carried out.
    Failed(Option<Error>),
}

impl From<pb::CommitResult> for Commit {
    fn from(result: pb::CommitResult) -> Self {
        let outcome = match result.outcome() {
            pb::CommitOutcome::Committed => CommitOutcome::Committed,
            pb::CommitOutcome::CommitStale => CommitOutcome::Stale,
            pb::CommitOutcome::CommitOutOfRange => CommitOutcome::OutOfRange,
            pb::CommitOutcome::CommitFailed | pb::CommitOutcome::Unspecified => {
                CommitOutcome::Failed(result.error.map(Error::of_call))
            }
        };
        Self { outcome, committed: result.committed.map(offset) }
    }
}

/// Which message a time stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeBound {
    /// The first one stored at or after it; the end of the queue if there is none.
    #[default]
    FirstAtOrAfter,
    /// The last one stored at or before it; the start of the queue if there is none.
    LastAtOrBefore,
}

/// Offsets of one queue, read together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offsets {
    /// Queue of the topic.
    pub queue: u32,
    /// First offset.
    pub min: u64,
    /// End: the offset that the next message will have.
    pub max: u64,
    /// Progress of the group asked for.
    pub committed: Option<u64>,
    /// For the time asked for.
    pub by_time: Option<u64>,
}

impl Connection {
    /// Commits a group's progress on 1 to 1024 queues; one result each, in order. Durable before it answers.
    pub async fn commit_offsets(&self, group: &str, offsets: &[QueueOffset]) -> Result<Vec<Commit>, Error> {
        let message = pb::CommitOffsetsRequest {
            group: group.to_owned(),
            offsets: offsets
                .iter()
                .map(|at| pb::QueueOffset {
                    topic: at.topic.clone(),
                    queue_id: at.queue,
                    offset: wire_offset(at.offset),
                })
                .collect(),
        };
        let response = self.broker().commit_offsets(request(message)).await.map_err(|s| self.error(&s))?;
        Ok(response.into_inner().results.into_iter().map(Commit::from).collect())
    }

    /// Bounds of 1 to 1024 queues of a topic; with a group its progress, with a time the offset for it.
    pub async fn offsets(
        &self,
        topic: &str,
        queues: &[u32],
        group: Option<&str>,
        time: Option<(SystemTime, TimeBound)>,
    ) -> Result<Vec<Offsets>, Error> {
        let bound = match time.map(|(_, bound)| bound) {
            None => pb::TimestampBound::Unspecified,
            Some(TimeBound::FirstAtOrAfter) => pb::TimestampBound::FirstAtOrAfter,
            Some(TimeBound::LastAtOrBefore) => pb::TimestampBound::LastAtOrBefore,
        };
        let message = pb::GetOffsetsRequest {
            queues: queues
                .iter()
                .map(|&queue_id| pb::QueueRef { topic: topic.to_owned(), queue_id })
                .collect(),
            group: group.unwrap_or_default().to_owned(),
            timestamp: time.map(|(time, _)| time.into()),
            bound: bound.into(),
        };
        let response = self.broker().get_offsets(request(message)).await.map_err(|s| self.error(&s))?;
        Ok(response
            .into_inner()
            .offsets
            .into_iter()
            .map(|found| Offsets {
                queue: found.queue_id,
                min: offset(found.min_offset),
                max: offset(found.max_offset),
                committed: found.committed.map(offset),
                by_time: found.by_timestamp.map(offset),
            })
            .collect())
    }
}
