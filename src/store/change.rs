//! The payloads of records that are not messages.
//!
//! | kind | payload |
//! |---|---|
//! | `Opened` | epoch u32, boot id text, version text |
//! | `Closed` | – |
//! | `Topic` | id u64, name text, queues u32, type u8, durability u8, visibility u8, retention ms u64, retention bytes u64, map version u64, map queues u32 |
//! | `TopicDeleted` | id u64 |
//! | `Group` | id u64, name text, start-from u8 |
//! | `GroupDeleted` | id u64 |
//! | `Progress` | group u64, n u32, n × (topic u64, queue u32, offset u64) |
//! | `Bounds` | topic u64, queue u32, start u64, end u64, n u32, n × lost (begin u64, end u64) |
//! | `Reserved` | topic u64, queue u32, until u64 |
//! | `Trimmed` | position u64 |
//!
//! A text is its length (u16) and its bytes. A retention of 0 stands for no limit.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::time::Duration;

use super::{
    codec::{Put, Reader},
    frame::RecordKind,
    tables::QueueMap,
};
use crate::model::{
    DurabilityLevel, GroupId, GroupName, GroupSettings, QueueKey, Retention, StartFrom, TopicId, TopicName,
    TopicSettings, TopicType, Visibility,
};

/// A change of state, as one record says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Opened { epoch: u32, boot_id: String, version: String },
    Closed,
    Topic { id: TopicId, name: TopicName, settings: TopicSettings, map: QueueMap },
    TopicDeleted { id: TopicId },
    Group { id: GroupId, name: GroupName, settings: GroupSettings },
    GroupDeleted { id: GroupId },
    Progress { group: GroupId, offsets: Vec<(QueueKey, u64)> },
    Bounds { queue: QueueKey, start: u64, end: u64, lost: Vec<(u64, u64)> },
    Reserved { queue: QueueKey, until: u64 },
    Trimmed { position: u64 },
}

impl Change {
    pub fn kind(&self) -> RecordKind {
        match self {
            Self::Opened { .. } => RecordKind::Opened,
            Self::Closed => RecordKind::Closed,
            Self::Topic { .. } => RecordKind::Topic,
            Self::TopicDeleted { .. } => RecordKind::TopicDeleted,
            Self::Group { .. } => RecordKind::Group,
            Self::GroupDeleted { .. } => RecordKind::GroupDeleted,
            Self::Progress { .. } => RecordKind::Progress,
            Self::Bounds { .. } => RecordKind::Bounds,
            Self::Reserved { .. } => RecordKind::Reserved,
            Self::Trimmed { .. } => RecordKind::Trimmed,
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Opened { epoch, boot_id, version } => {
                out.put_u32(*epoch);
                out.put_text(boot_id);
                out.put_text(version);
            }
            Self::Closed => {}
            Self::Topic { id, name, settings, map } => {
                out.put_u64(id.0);
                out.put_text(name.as_str());
                put_topic_settings(&mut out, settings, *map);
            }
            Self::TopicDeleted { id } => out.put_u64(id.0),
            Self::Group { id, name, settings } => {
                out.put_u64(id.0);
                out.put_text(name.as_str());
                out.put_u8(u8::from(settings.start_from == StartFrom::Latest));
            }
            Self::GroupDeleted { id } => out.put_u64(id.0),
            Self::Progress { group, offsets } => {
                out.put_u64(group.0);
                out.put_u32(u32::try_from(offsets.len()).unwrap_or(u32::MAX));
                for (queue, offset) in offsets {
                    put_queue(&mut out, *queue);
                    out.put_u64(*offset);
                }
            }
            Self::Bounds { queue, start, end, lost } => {
                put_queue(&mut out, *queue);
                out.put_u64(*start);
                out.put_u64(*end);
                out.put_u32(u32::try_from(lost.len()).unwrap_or(u32::MAX));
                for (begin, end) in lost {
                    out.put_u64(*begin);
                    out.put_u64(*end);
                }
            }
            Self::Reserved { queue, until } => {
                put_queue(&mut out, *queue);
                out.put_u64(*until);
            }
            Self::Trimmed { position } => out.put_u64(*position),
        }
        out
    }

    /// `None` when the payload does not follow the table above, or the record is a message.
    pub fn decode(kind: RecordKind, payload: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(payload);
        let change = Self::fields(kind, &mut reader)?;
        reader.is_empty().then_some(change)
    }

    fn fields(kind: RecordKind, reader: &mut Reader<'_>) -> Option<Self> {
        Some(match kind {
            RecordKind::Message => return None,
            RecordKind::Opened => Self::Opened {
                epoch: reader.u32()?,
                boot_id: reader.text()?.to_owned(),
                version: reader.text()?.to_owned(),
            },
            RecordKind::Closed => Self::Closed,
            RecordKind::Topic => {
                let id = TopicId(reader.u64()?);
                let name = TopicName::new(reader.text()?).ok()?;
                let (settings, map) = topic_settings(reader)?;
                Self::Topic { id, name, settings, map }
            }
            RecordKind::TopicDeleted => Self::TopicDeleted { id: TopicId(reader.u64()?) },
            RecordKind::Group => Self::Group {
                id: GroupId(reader.u64()?),
                name: GroupName::new(reader.text()?).ok()?,
                settings: GroupSettings {
                    start_from: if reader.u8()? == 1 { StartFrom::Latest } else { StartFrom::Earliest },
                },
            },
            RecordKind::GroupDeleted => Self::GroupDeleted { id: GroupId(reader.u64()?) },
            RecordKind::Progress => {
                let group = GroupId(reader.u64()?);
                let count = reader.u32()?;
                let mut offsets = Vec::new();
                for _ in 0..count {
                    offsets.push((queue(reader)?, reader.u64()?));
                }
                Self::Progress { group, offsets }
            }
            RecordKind::Bounds => {
                let queue = queue(reader)?;
                let (start, end, count) = (reader.u64()?, reader.u64()?, reader.u32()?);
                let mut lost = Vec::new();
                for _ in 0..count {
                    lost.push((reader.u64()?, reader.u64()?));
                }
                Self::Bounds { queue, start, end, lost }
            }
            RecordKind::Reserved => Self::Reserved { queue: queue(reader)?, until: reader.u64()? },
            RecordKind::Trimmed => Self::Trimmed { position: reader.u64()? },
        })
    }
}

fn put_queue(out: &mut Vec<u8>, queue: QueueKey) {
    out.put_u64(queue.topic.0);
    out.put_u32(queue.queue);
}

fn queue(reader: &mut Reader<'_>) -> Option<QueueKey> {
    Some(QueueKey { topic: TopicId(reader.u64()?), queue: reader.u32()? })
}

fn put_topic_settings(out: &mut Vec<u8>, settings: &TopicSettings, map: QueueMap) {
    out.put_u32(settings.queues);
    out.put_u8(match settings.kind {
        TopicType::Mixed => 0,
        TopicType::Normal => 1,
        TopicType::Fifo => 2,
    });
    out.put_u8(u8::from(settings.durability == DurabilityLevel::Async));
    out.put_u8(u8::from(settings.visibility == Visibility::Flushed));
    let age = settings.retention.age.map_or(0, |age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
    out.put_u64(age);
    out.put_u64(settings.retention.bytes.unwrap_or(0));
    out.put_u64(map.version);
    out.put_u32(map.queues);
}

fn topic_settings(reader: &mut Reader<'_>) -> Option<(TopicSettings, QueueMap)> {
    let settings = TopicSettings {
        queues: reader.u32()?,
        kind: match reader.u8()? {
            0 => TopicType::Mixed,
            1 => TopicType::Normal,
            2 => TopicType::Fifo,
            _ => return None,
        },
        durability: if reader.u8()? == 1 { DurabilityLevel::Async } else { DurabilityLevel::Sync },
        visibility: if reader.u8()? == 1 { Visibility::Flushed } else { Visibility::Appended },
        retention: Retention {
            age: Some(reader.u64()?).filter(|&ms| ms > 0).map(Duration::from_millis),
            bytes: Some(reader.u64()?).filter(|&bytes| bytes > 0),
        },
    };
    settings.check().ok()?;
    Some((settings, QueueMap { version: reader.u64()?, queues: reader.u32()? }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn changes() -> Vec<Change> {
        let queue = QueueKey { topic: TopicId(48), queue: 3 };
        vec![
            Change::Opened { epoch: 7, boot_id: "b".into(), version: "0.1.0".into() },
            Change::Closed,
            Change::Topic {
                id: TopicId(48),
                name: TopicName::new("orders").unwrap(),
                settings: TopicSettings { durability: DurabilityLevel::Async, ..TopicSettings::default() },
                map: QueueMap { version: 2, queues: 4 },
            },
            Change::TopicDeleted { id: TopicId(48) },
            Change::Group {
                id: GroupId(96),
                name: GroupName::new("billing").unwrap(),
                settings: GroupSettings { start_from: StartFrom::Latest },
            },
            Change::GroupDeleted { id: GroupId(96) },
            Change::Progress { group: GroupId(96), offsets: vec![(queue, 12), (queue, 13)] },
            Change::Bounds { queue, start: 5, end: 90, lost: vec![(7, 9)] },
            Change::Reserved { queue, until: 1024 },
            Change::Trimmed { position: 65_536 },
        ]
    }

    #[test]
    fn every_change_survives_its_encoding() {
        for change in changes() {
            assert_eq!(Change::decode(change.kind(), &change.encode()), Some(change));
        }
    }

    #[test]
    fn the_bytes_on_disk_are_those_of_format_1() {
        let bytes: Vec<u8> = changes().iter().flat_map(Change::encode).collect();
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/changes-v1.bin");
        if std::env::var_os("HOLDFAST_WRITE_GOLDEN").is_some() {
            std::fs::write(path, &bytes).unwrap();
        }
        assert_eq!(bytes, std::fs::read(path).unwrap());
    }

    proptest! {
        #[test]
        fn arbitrary_payloads_do_no_harm(kind in any::<u8>(), payload in proptest::collection::vec(any::<u8>(), 0..100)) {
            if let Some(kind) = RecordKind::of(kind) {
                let _ = Change::decode(kind, &payload);
            }
        }
    }
}
