//! Against prost as the oracle, and each rule by itself.

#![allow(clippy::arithmetic_side_effects)]

use std::collections::HashMap;

use bytes::Bytes;
use proptest::prelude::*;
use prost::Message as _;

use super::*;
use crate::pb::v1::{Message, SystemProperties};

fn field_of(result: Result<Envelope<'_>, EnvelopeError>) -> String {
    match result {
        Err(EnvelopeError::Field(invalid)) => invalid.field,
        Err(other) => other.to_string(),
        Ok(_) => "accepted".to_owned(),
    }
}

fn message(system: SystemProperties) -> Message {
    Message {
        user_properties: HashMap::new(),
        system_properties: Some(system),
        body: Bytes::from_static(b"body"),
    }
}

fn seen(system: SystemProperties) -> String {
    field_of(Envelope::parse(&message(system).encode_to_vec()))
}

prop_compose! {
    fn any_system()(
        tag in proptest::option::of("[a-zé ]{0,8}[a-zé][a-z]{0,8}"),
        keys in proptest::collection::vec("[a-z🦀]{1,12}", 0..=16),
        message_id in "[ -~]{0,64}",
        body_encoding in any::<i32>(),
        message_type in 0..=2_i32,
        born in proptest::option::of((any::<i64>(), any::<i32>())),
        born_host in "[a-z.]{0,40}",
        stored in proptest::option::of((any::<i64>(), any::<i32>())),
        store_host in "[a-z]{0,9}",
        queue_id in any::<i32>(),
        queue_offset in any::<Option<i64>>(),
        rest in (
            proptest::option::of("[a-zé]{1,31}"),
            proptest::option::of("[0-9a-f-]{0,55}"),
            any::<i32>(),
            any::<Option<u64>>(),
        ),
    ) -> SystemProperties {
        let time = |(seconds, nanos)| prost_types::Timestamp { seconds, nanos };
        SystemProperties {
            tag, keys, message_id, body_encoding, message_type,
            born_timestamp: born.map(time), born_host,
            store_timestamp: stored.map(time), store_host, queue_id, queue_offset,
            message_group: rest.0, trace_context: rest.1, flag: rest.2, log_position: rest.3,
        }
    }
}

prop_compose! {
    fn any_message()(
        system_properties in proptest::option::of(any_system()),
        user_properties in proptest::collection::hash_map("[!-~]{1,20}", ".{0,40}", 0..6),
        body in proptest::collection::vec(any::<u8>(), 1..200),
    ) -> Message {
        Message { user_properties, system_properties, body: body.into() }
    }
}

proptest! {
    #[test]
    fn an_encoded_message_is_found_as_it_was_made(message in any_message()) {
        let encoded = message.encode_to_vec();
        let envelope = Envelope::parse(&encoded).unwrap();
        let system = message.system_properties.unwrap_or_default();
        prop_assert_eq!(envelope.tag, system.tag.as_deref());
        prop_assert_eq!(envelope.keys(), system.keys.iter().map(String::as_str).collect::<Vec<_>>());
        prop_assert_eq!(envelope.id.unwrap_or(""), system.message_id);
        prop_assert_eq!(envelope.group, system.message_group.as_deref());
        prop_assert_eq!(envelope.kind_number, u64::try_from(system.message_type).unwrap());
        prop_assert_eq!(envelope.body_bytes, message.body.len());
        prop_assert_eq!(envelope.properties, message.user_properties.len());
    }

    #[test]
    fn the_servers_fields_win_over_forged_ones(
        message in any_message(),
        store_ms in prop_oneof![Just(0), Just(5000), 0..u64::from(u32::MAX) * 1000],
        queue in 0..4096_u32,
        offset in prop_oneof![Just(0), 0..u64::MAX / 2],
        position in prop_oneof![Just(0), any::<u64>()],
    ) {
        let encoded = message.encode_to_vec();
        let parts = Envelope::parse(&encoded).unwrap().place.split(&encoded);
        let mut bytes = BytesMut::from(parts.others.concat().as_slice());
        let own_id = message.system_properties.as_ref().map(|s| s.message_id.clone()).unwrap_or_default();
        let id = own_id.is_empty().then_some("0190b5e0-0000-7000-8000-000000000000");
        let before = bytes.len();
        let fields = ServerFields { id, store_ms, store_host: "shard-0", queue, offset, position };
        append_server_fields(&fields, parts.system, &mut bytes);
        prop_assert!(bytes.len() - before - parts.system.len() <= server_fields_bytes_max("shard-0"));
        prop_assert_eq!(Envelope::parse(&bytes).unwrap().fragments, 1, "readers need not merge");

        let merged = Message::decode(bytes.clone()).unwrap();
        let mut expected = message.clone();
        let system = expected.system_properties.get_or_insert_default();
        if let Some(id) = id {
            system.message_id = id.to_owned();
        }
        let (seconds, nanos) = ((store_ms / 1000) as i64, (store_ms % 1000) as i32 * 1_000_000);
        system.store_timestamp = Some(prost_types::Timestamp { seconds, nanos });
        system.store_host = "shard-0".to_owned();
        system.queue_id = queue as i32;
        system.queue_offset = Some(offset as i64);
        system.log_position = Some(position);
        prop_assert_eq!(&merged, &expected);

        let stored = Envelope::parse_stored(&bytes).unwrap();
        let system = expected.system_properties.unwrap();
        prop_assert_eq!(stored.tag, system.tag.as_deref());
        prop_assert_eq!(stored.id, Some(system.message_id.as_str()));
        prop_assert!(Envelope::parse(&bytes).is_ok(), "a pulled message can be sent again");
    }

    #[test]
    fn what_is_accepted_every_protobuf_reader_can_read(
        message in any_message(),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let mut encoded = message.encode_to_vec();
        for (at, byte) in flips {
            let at = at.index(encoded.len());
            encoded[at] = byte;
        }
        if Envelope::parse(&encoded).is_ok() {
            prop_assert!(Message::decode(encoded.as_slice()).is_ok(), "{:?}", encoded);
        }
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Envelope::parse(&bytes);
        let _ = Envelope::parse_stored(&bytes);
        let mut nested = vec![0x1a, bytes.len().min(127) as u8];
        nested.extend_from_slice(&bytes[..bytes.len().min(127)]);
        let _ = Envelope::parse(&nested);
    }
}

#[test]
fn fragments_of_system_properties_merge_and_the_last_scalar_wins() {
    let first = message(SystemProperties {
        tag: Some("a".into()),
        keys: vec!["k1".into()],
        message_id: "one".into(),
        ..Default::default()
    });
    let second = Message {
        system_properties: Some(SystemProperties {
            tag: Some("b".into()),
            keys: vec!["k2".into()],
            ..Default::default()
        }),
        ..Default::default()
    };
    let encoded = [first.encode_to_vec(), second.encode_to_vec()].concat();
    let envelope = Envelope::parse(&encoded).unwrap();
    assert_eq!(
        (envelope.tag, envelope.id, envelope.keys()),
        (Some("b"), Some("one"), ["k1", "k2"].as_slice())
    );
    assert_eq!(envelope.fragments, 2);
    let merged = merge_fragments(&encoded);
    assert_eq!(Envelope::parse(&merged).unwrap().fragments, 1);
    assert_eq!(Message::decode(merged), Message::decode(encoded.as_slice()));
}

#[test]
fn an_empty_or_too_large_body_is_told_apart() {
    let body = |bytes: usize| Message { body: vec![1; bytes].into(), ..Default::default() }.encode_to_vec();
    assert_eq!(Envelope::parse(&body(0)).unwrap_err(), EnvelopeError::BodyEmpty);
    assert_eq!(Envelope::parse(&[]).unwrap_err(), EnvelopeError::BodyEmpty);
    assert!(Envelope::parse(&body(MAX_BODY_BYTES)).is_ok());
    assert_eq!(
        Envelope::parse(&body(MAX_BODY_BYTES + 1)).unwrap_err(),
        EnvelopeError::BodyTooLarge(MAX_BODY_BYTES + 1)
    );
}

#[test]
fn each_limit_names_its_field_and_counts_bytes() {
    let system = SystemProperties::default;
    let tag = |tag: &str| seen(SystemProperties { tag: Some(tag.into()), ..system() });
    assert_eq!(tag(&"t".repeat(128)), "accepted");
    for bad in ["", "   ", "a|b", "a\n", &"t".repeat(129), &"é".repeat(65)] {
        assert_eq!(tag(bad), "system_properties.tag", "{bad:?}");
    }
    let key = |key: &str| seen(SystemProperties { keys: vec!["ok".into(), key.into()], ..system() });
    assert_eq!(key(&"k".repeat(128)), "accepted");
    for bad in ["", "a\u{7f}", &"k".repeat(129)] {
        assert_eq!(key(bad), "system_properties.keys[1]", "{bad:?}");
    }
    assert_eq!(seen(SystemProperties { keys: vec!["k".into(); 17], ..system() }), "system_properties.keys");
    let id = |id: &str| seen(SystemProperties { message_id: id.into(), ..system() });
    assert_eq!(id(&"i".repeat(64)), "accepted");
    for bad in ["é", "a\tb", &"i".repeat(65)] {
        assert_eq!(id(bad), "system_properties.message_id", "{bad:?}");
    }
    let group = |group: &str| seen(SystemProperties { message_group: Some(group.into()), ..system() });
    assert_eq!(group(&"g".repeat(63)), "accepted");
    for bad in ["", &"g".repeat(64), &"é".repeat(32)] {
        assert_eq!(group(bad), "system_properties.message_group", "{bad:?}");
    }
    let trace = SystemProperties { trace_context: Some("t".repeat(1025)), ..system() };
    assert_eq!(seen(trace), "system_properties.trace_context");
    assert_eq!(
        seen(SystemProperties { born_host: "h".repeat(256), ..system() }),
        "system_properties.born_host"
    );
    for kind in [3, 4, -1] {
        assert_eq!(
            seen(SystemProperties { message_type: kind, ..system() }),
            "system_properties.message_type"
        );
    }
}

#[test]
fn user_properties_have_limits() {
    let with = |properties: Vec<(String, String)>| {
        let message = Message {
            user_properties: properties.into_iter().collect(),
            ..message(SystemProperties::default())
        };
        field_of(Envelope::parse(&message.encode_to_vec()))
    };
    let many = |n: usize| (0..n).map(|i| (format!("k{i}"), String::new())).collect::<Vec<_>>();
    assert_eq!(with(many(128)), "accepted");
    assert_eq!(with(many(129)), "user_properties");
    assert_eq!(with(vec![("k".into(), "v".repeat(16 * 1024 - 1))]), "accepted");
    assert_eq!(with(vec![("k".into(), "v".repeat(16 * 1024))]), "user_properties");
    for bad in ["", "a b", "é", "a\n", &"k".repeat(129)] {
        assert_eq!(with(vec![(bad.to_owned(), "v".into())]), "user_properties", "{bad:?}");
    }
}

#[test]
fn what_belongs_to_the_broker_or_the_gateway_is_refused() {
    let raw = |inner: &[u8]| {
        let mut bytes = message(SystemProperties::default()).encode_to_vec();
        bytes.extend_from_slice(&[0x1a, inner.len() as u8]);
        bytes.extend_from_slice(inner);
        field_of(Envelope::parse(&bytes))
    };
    for number in [4_u32, 11, 12, 15, 16, 19, 20, 21, 22] {
        let mut field = BytesMut::new();
        put_number(number, 1, &mut field);
        assert_eq!(raw(&field), format!("system_properties.{}", refused_name(number)));
    }
    let mut unknown = BytesMut::new();
    put_text(200, "later", &mut unknown);
    assert_eq!(raw(&unknown), "accepted");

    let mut topic = BytesMut::new();
    put_text(1, "t", &mut topic);
    topic.extend_from_slice(&message(SystemProperties::default()).encode_to_vec());
    assert_eq!(field_of(Envelope::parse(&topic)), "topic");
}

#[test]
fn malformed_bytes_are_refused() {
    for bad in [
        &[0x1a, 5, 0x0a][..],                                             // ends early
        &[0x22],                                                          // no length
        &[0x20, 1],                                                       // body as a number
        &[0x23, 0x24],                                                    // a group
        &[0x26, 0],                                                       // wire type 6
        &[0x02, 0],                                                       // field number 0
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1], // endless number
        &[0x1a, 3, 0x0a, 1, 0xff],                                        // tag is not UTF-8
        &[0x22, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1], // length beyond memory
    ] {
        assert!(matches!(Envelope::parse(bad), Err(EnvelopeError::Field(_))), "{bad:?}");
        assert!(Envelope::parse_stored(bad).is_none(), "{bad:?}");
    }
}
