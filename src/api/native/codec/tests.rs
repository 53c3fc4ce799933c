use std::time::Duration;

use proptest::{collection::vec, option, prelude::*};

use super::*;
use crate::{
    broker::{Commit, CommitOutcome, MessageIds},
    model::TopicName,
};

fn message() -> impl Strategy<Value = v1::Message> {
    (vec(any::<u8>(), 0..200), "[a-z]{0,20}", option::of("[a-z]{0,9}")).prop_map(|(body, id, tag)| {
        v1::Message {
            body: body.into(),
            system_properties: Some(v1::SystemProperties { message_id: id, tag, ..Default::default() }),
            ..Default::default()
        }
    })
}

fn send_request() -> impl Strategy<Value = v1::SendRequest> {
    (".{0,20}", vec(message(), 0..8), any::<Option<u32>>(), any::<Option<u64>>()).prop_map(
        |(topic, messages, queue_id, queue_map_version)| v1::SendRequest {
            topic,
            messages,
            queue_id,
            queue_map_version,
        },
    )
}

fn sent() -> impl Strategy<Value = Sent> {
    let ids = vec("[!-~]{0,64}", 0..40);
    (any::<u32>(), 0..u64::MAX / 4, ids, 0..253_402_300_799_u64 * 1000, any::<bool>()).prop_map(
        |(queue, first_offset, ids, store_ms, disk)| Sent {
            queue,
            first_offset,
            ids: ids.iter().map(String::as_str).collect(),
            store_ms,
            reached: if disk { Reached::Disk } else { Reached::Memory },
        },
    )
}

fn commit() -> impl Strategy<Value = Commit> {
    let outcome = prop_oneof![
        Just(CommitOutcome::Committed),
        Just(CommitOutcome::Stale),
        Just(CommitOutcome::OutOfRange),
        Just(CommitOutcome::Failed(Error::TopicNotFound(TopicName::new("t").unwrap()))),
    ];
    (outcome, option::of(0..1_u64 << 62)).prop_map(|(outcome, committed)| Commit { outcome, committed })
}

fn pulled() -> impl Strategy<Value = Pulled> {
    let outcome = prop_oneof![
        vec(message(), 0..8).prop_map(|messages| PullOutcome::Found(
            messages.iter().map(|message| message.encode_to_vec().into()).collect()
        )),
        option::of(0_u64..100_000)
            .prop_map(|delay| PullOutcome::NoNewMessage(delay.map(Duration::from_millis))),
        Just(PullOutcome::NoMatchedMessage),
        Just(PullOutcome::BelowMin),
        Just(PullOutcome::BeyondMax),
        (0_u64..1 << 40, 0_u64..1 << 40).prop_map(|(begin, end)| PullOutcome::DataLoss { begin, end }),
    ];
    (outcome, 0_u64..1 << 62, 0_u64..1 << 62, 0_u64..1 << 62, option::of(commit())).prop_map(
        |(outcome, next_offset, min_offset, max_offset, commit)| Pulled {
            outcome,
            next_offset,
            min_offset,
            max_offset,
            commit,
        },
    )
}

fn same_send(ours: &SendCommand, theirs: &v1::SendRequest) {
    assert_eq!(ours.topic, theirs.topic);
    assert_eq!(ours.queue, theirs.queue_id);
    assert_eq!(ours.map_version, theirs.queue_map_version);
    let messages: Vec<Bytes> = theirs.messages.iter().map(|message| message.encode_to_vec().into()).collect();
    assert_eq!(ours.messages, messages);
}

/// What a `SendResponse` must say.
fn expected(sent: &Sent) -> v1::SendResponse {
    let durability = match sent.reached {
        Reached::Disk => v1::Durability::DurableDisk,
        Reached::Memory => v1::Durability::DurableMemory,
    };
    let receipts = sent.ids.iter().zip(sent.first_offset..);
    v1::SendResponse {
        queue_id: sent.queue,
        receipts: receipts
            .map(|(id, offset)| v1::Receipt { message_id: id.to_owned(), offset: convert::to_i64(offset) })
            .collect(),
        store_timestamp: Some(convert::to_timestamp(sent.store_ms)),
        durability: durability.into(),
    }
}

proptest! {
    #[test]
    fn a_send_is_read_as_prost_reads_it(request in send_request()) {
        same_send(&read_send(&request.encode_to_vec().into()).unwrap(), &request);
    }

    #[test]
    fn a_stream_frame_is_read_as_prost_reads_it(correlation: u64, request in send_request()) {
        let frame = v1::SendStreamRequest { correlation, send: Some(request.clone()) };
        let bytes: Bytes = frame.encode_to_vec().into();
        let read = read_frame(&bytes);
        prop_assert_eq!((read.correlation, read.bytes), (correlation, bytes.len()));
        same_send(&read.send.unwrap(), &request);
    }

    #[test]
    fn a_pull_is_read_as_prost_reads_it(
        names in (".{0,9}", ".{0,9}", ".{0,9}", ".{0,9}"),
        numbers: (u32, i64, u32, u32),
        wait in option::of((0_i64..100_000, 0_i32..1_000_000_000)),
        commit_offset: Option<i64>,
    ) {
        let request = v1::PullRequest {
            topic: names.0,
            queue_id: numbers.0,
            offset: numbers.1,
            max_messages: numbers.2,
            max_bytes: numbers.3,
            wait: wait.map(|(seconds, nanos)| prost_types::Duration { seconds, nanos }),
            tag_filter: names.1,
            group: names.2,
            client_id: names.3,
            commit_offset,
        };
        let read = read_pull(&request.encode_to_vec()).unwrap();
        prop_assert_eq!(read.topic, request.topic);
        prop_assert_eq!(read.queue, request.queue_id);
        prop_assert_eq!(read.offset, request.offset);
        prop_assert_eq!(read.max_messages, request.max_messages);
        prop_assert_eq!(read.max_bytes, request.max_bytes);
        let wait = wait.unwrap_or_default();
        prop_assert_eq!(read.wait, Duration::new(wait.0.unsigned_abs(), wait.1.unsigned_abs()));
        prop_assert_eq!(read.tag_filter, request.tag_filter);
        prop_assert_eq!(read.group, request.group);
        prop_assert_eq!(read.client, request.client_id);
        prop_assert_eq!(read.commit, request.commit_offset);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
        let bytes = Bytes::from(bytes);
        let _ = read_send(&bytes);
        let _ = read_frame(&bytes);
        let _ = read_pull(&bytes);
    }

    #[test]
    fn a_damaged_request_never_panics(
        request in send_request(), at: prop::sample::Index, byte: u8, cut: prop::sample::Index,
    ) {
        let mut bytes = v1::SendStreamRequest { correlation: 7, send: Some(request) }.encode_to_vec();
        let place = at.index(bytes.len());
        bytes[place] = byte;
        bytes.truncate(cut.index(bytes.len()) + 1);
        let _ = read_frame(&bytes.into());
    }

    #[test]
    fn what_was_sent_is_written_as_prost_reads_it(sent in sent()) {
        let answer = SentAnswer::new(&sent);
        let mut bytes = Vec::new();
        answer.write(&mut bytes);
        prop_assert_eq!(bytes.len(), answer.length());
        prop_assert_eq!(v1::SendResponse::decode(&*bytes).unwrap(), expected(&sent));
    }

    #[test]
    fn a_stream_answer_is_written_as_prost_reads_it(correlation: u64, sent in sent(), good: bool) {
        use v1::send_stream_response::Outcome;
        let error = Error::BodyEmpty { field: "messages[1].body".into() };
        let (outcome, theirs) = if good {
            (Ok(sent.clone()), Outcome::Sent(expected(&sent)))
        } else {
            (Err(error.clone()), Outcome::Error(status::call_error(&error)))
        };
        let mut bytes = Vec::new();
        write_stream_answer(&StreamAnswer { correlation, outcome }, &mut bytes);
        let read = v1::SendStreamResponse::decode(&*bytes).unwrap();
        prop_assert_eq!((read.correlation, read.outcome.unwrap()), (correlation, theirs));
    }

    #[test]
    fn what_was_pulled_is_written_as_prost_reads_it(pulled in pulled()) {
        let mut bytes = BytesMut::new();
        pulled.write(&mut bytes);
        prop_assert_eq!(bytes.len(), pulled.length(), "the buffer is of the right size");
        let mut read = v1::PullResponse::decode(&*bytes).unwrap();
        let found: Vec<Bytes> =
            read.messages.drain(..).map(|message| message.encode_to_vec().into()).collect();
        prop_assert_eq!(found, messages(&pulled));
        prop_assert_eq!(read, pull_rest(&pulled));
    }
}

#[test]
fn what_was_found_is_written_as_prost_reads_it() {
    let message = v1::Message { body: Bytes::from_static(b"x"), ..Default::default() };
    let found = Queried { messages: vec![message.encode_to_vec().into(); 2], truncated: true };
    let mut bytes = BytesMut::new();
    found.write(&mut bytes);
    assert_eq!(bytes.len(), found.length());
    let read = v1::QueryMessagesResponse::decode(&*bytes).unwrap();
    assert_eq!(read, v1::QueryMessagesResponse { messages: vec![message; 2], truncated: true });
}

#[test]
fn impossible_numbers_name_their_field() {
    // Field 2 (queue_id) with -1 and with 2^32.
    for number in [u64::MAX, 1 << 32] {
        let mut bytes = vec![2 << 3];
        encode_varint(number, &mut bytes);
        assert_eq!(read_pull(&bytes).unwrap_err().field, "queue_id");
        let mut bytes = vec![3 << 3];
        encode_varint(number, &mut bytes);
        let Err(Error::Invalid(invalid)) = read_send(&bytes.into()) else { panic!("accepted") };
        assert_eq!(invalid.field, "queue_id");
    }
    let wait = Some(prost_types::Duration { seconds: -1, nanos: 0 });
    let request = v1::PullRequest { wait, ..Default::default() };
    assert_eq!(read_pull(&request.encode_to_vec()).unwrap_err().field, "wait");
}

#[test]
fn text_must_be_utf8_and_fields_of_their_type() {
    assert_eq!(read_pull(&[1 << 3 | 2, 1, 0xff]).unwrap_err().field, "topic");
    assert_eq!(read_pull(&[1 << 3, 1]).unwrap_err().field, "topic");
    assert_eq!(read_pull(&[3 << 3 | 2, 0]).unwrap_err().field, "offset");
}

#[test]
fn too_many_messages_are_counted_and_not_kept() {
    let bytes: Bytes = [2 << 3 | 2, 0].repeat(100_000).into();
    let error = read_send(&bytes).unwrap_err();
    assert_eq!(error, Error::BatchTooLarge { unit: "messages", seen: 100_000, limit: MAX_BATCH_MESSAGES });
}

#[test]
fn a_stream_frame_without_a_send_or_with_a_broken_one_keeps_its_number() {
    let frame = v1::SendStreamRequest { correlation: 9, send: None };
    let read = read_frame(&frame.encode_to_vec().into());
    assert_eq!(read.correlation, 9);
    assert!(read.send.unwrap_err().to_string().starts_with("send:"));
    let read = read_frame(&Bytes::from_static(&[1 << 3, 9, 2 << 3 | 2, 2, 1 << 3 | 2, 9]));
    assert_eq!(read.correlation, 9);
    assert!(matches!(read.send, Err(Error::Invalid(_))));
}

#[test]
fn ids_of_a_batch_are_written_in_order() {
    let ids: MessageIds = ["a", "b"].into_iter().collect();
    let sent = Sent { queue: 0, first_offset: 0, ids, store_ms: 0, reached: Reached::Disk };
    let receipts = expected(&sent).receipts;
    assert_eq!((receipts[0].offset, receipts[1].offset), (0, 1));
}
