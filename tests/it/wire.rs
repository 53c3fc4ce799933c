//! Odd calls: whatever comes over the wire, the answer is a clear client error and the broker lives on.

use std::time::Duration;

use bytes::Bytes;
use holdfast::pb::v1::*;
use tonic::{Code, Request};

use crate::harness::*;

/// The broker still takes a message.
async fn assert_well(broker: &Broker) {
    let client = broker.client().await;
    client.try_send(send_request("well", vec![message("x")])).await.unwrap();
    let output = broker.output();
    assert!(!output.contains("panicked"), "{output}");
}

/// A call with these `grpc-timeout` headers, made without tonic, whose client would act on them itself. Answers
/// code and message.
async fn call_with_timeouts(
    broker: &Broker,
    path: &str,
    request: &impl prost::Message,
    values: &[&str],
) -> (Code, String) {
    let stream = tokio::net::TcpStream::connect(broker.address()).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let bytes = request.encode_to_vec();
    let mut body = vec![0];
    body.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
    body.extend(bytes);
    let mut call = http::Request::post(format!("http://{}{path}", broker.address()))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    for value in values {
        call = call.header("grpc-timeout", *value);
    }
    let mut client = client.ready().await.unwrap();
    let (answer, mut sender) = client.send_request(call.body(()).unwrap(), false).unwrap();
    // The broker may answer before it has read all; then there is nobody to send to.
    let _ = sender.send_data(body.into(), true);
    let (head, mut body) = answer.await.unwrap().into_parts();
    while body.data().await.is_some() {}
    let trailers = body.trailers().await.unwrap().unwrap_or_default();
    connection.abort();
    let find = |name: &str| {
        let value = trailers.get(name).or_else(|| head.headers.get(name));
        value.map(|value| value.to_str().unwrap().to_string()).unwrap_or_default()
    };
    (Code::from_bytes(find("grpc-status").as_bytes()), find("grpc-message"))
}

const SEND: &str = "/holdfast.v1.Broker/Send";
const PULL: &str = "/holdfast.v1.Broker/Pull";

#[tokio::test]
async fn a_deadline_that_cannot_be_read_is_refused_and_has_no_effect() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let (send, pull) = (send_request("t", vec![message("x")]), waiting(pull_request("t", 0, 0), SOON));
    for values in [
        &["abc"][..],
        &["5"],
        &["-1S"],
        &["999999999S"],
        &["S"],
        &["1.5S"],
        &["5 S"],
        &["5s"],
        &[""],
        &["1S", "2S"],
    ] {
        for (code, text) in [
            call_with_timeouts(&broker, SEND, &send, values).await,
            call_with_timeouts(&broker, PULL, &pull, values).await,
        ] {
            assert_eq!(code, Code::InvalidArgument, "{values:?}: {text}");
            assert!(text.contains("grpc-timeout"), "{values:?}: {text}");
        }
    }
    assert_eq!(client.offsets("t", 0, "").await.max_offset, 0);
}

#[tokio::test]
async fn a_deadline_that_is_over_fails_at_once_and_has_no_effect() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let (send, pull) = (send_request("t", vec![message("x")]), waiting(pull_request("t", 0, 0), SOON));
    for value in ["0n", "0S", "0m"] {
        let (code, text) = call_with_timeouts(&broker, SEND, &send, &[value]).await;
        assert_eq!(code, Code::DeadlineExceeded, "{value}: {text}");
        let (code, text) = call_with_timeouts(&broker, PULL, &pull, &[value]).await;
        assert_eq!(code, Code::DeadlineExceeded, "{value}: {text}");
    }
    assert_eq!(client.offsets("t", 0, "").await.max_offset, 0);
    client.wait_held(0).await;
}

#[tokio::test]
async fn a_call_with_every_field_missing_gets_a_client_error() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    let (mut b, mut a) = (client.broker.clone(), client.admin.clone());
    let answers = [
        ("Send", b.send(SendRequest::default()).await.map(drop)),
        ("Pull", b.pull(PullRequest::default()).await.map(drop)),
        ("CommitOffsets", b.commit_offsets(CommitOffsetsRequest::default()).await.map(drop)),
        ("GetOffsets", b.get_offsets(GetOffsetsRequest::default()).await.map(drop)),
        ("QueryMessages", b.query_messages(QueryMessagesRequest::default()).await.map(drop)),
        ("CreateTopic", a.create_topic(CreateTopicRequest::default()).await.map(drop)),
        ("UpdateTopic", a.update_topic(UpdateTopicRequest::default()).await.map(drop)),
        ("DeleteTopic", a.delete_topic(DeleteTopicRequest::default()).await.map(drop)),
        ("DescribeTopic", a.describe_topic(DescribeTopicRequest::default()).await.map(drop)),
        ("CreateGroup", a.create_group(CreateGroupRequest::default()).await.map(drop)),
        ("UpdateGroup", a.update_group(UpdateGroupRequest::default()).await.map(drop)),
        ("DeleteGroup", a.delete_group(DeleteGroupRequest::default()).await.map(drop)),
        ("DescribeGroup", a.describe_group(DescribeGroupRequest::default()).await.map(drop)),
        ("ResetOffsets", a.reset_offsets(ResetOffsetsRequest::default()).await.map(drop)),
    ];
    for (call, answer) in answers {
        let Err(status) = answer else { panic!("{call} was taken") };
        assert_eq!(Refusal::of(&status).code, Code::InvalidArgument, "{call}: {status:?}");
    }
    assert_well(&broker).await;
}

#[tokio::test]
async fn numbers_and_texts_at_their_ends_get_a_client_error_or_an_honest_answer() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    client.send("t", 0, &["x"]).await;
    let long = "t".repeat(1 << 20);
    let client_error = |status: tonic::Status| {
        let code = status.code();
        let honest = [Code::InvalidArgument, Code::NotFound, Code::FailedPrecondition, Code::OutOfRange];
        assert!(honest.contains(&code), "{status:?}");
    };
    for queue_id in [0, u32::MAX] {
        for offset in [i64::MIN, -1, 0, i64::MAX] {
            for max in [0, u32::MAX] {
                let request =
                    PullRequest { max_messages: max, max_bytes: max, ..pull_request("t", queue_id, offset) };
                client.try_pull(request).await.map(drop).unwrap_or_else(client_error);
            }
            let offsets = vec![QueueOffset { topic: "t".into(), queue_id, offset }];
            let request = CommitOffsetsRequest { group: "g".into(), offsets };
            client.broker.clone().commit_offsets(request).await.map(drop).unwrap_or_else(client_error);
            let by = Some(query_messages_request::By::Place(Place { queue_id, offset }));
            let request =
                QueryMessagesRequest { topic: "t".into(), by, limit: u32::MAX, ..Default::default() };
            client.broker.clone().query_messages(request).await.map(drop).unwrap_or_else(client_error);
        }
    }
    for (seconds, nanos) in [(i64::MIN, i32::MIN), (i64::MAX, i32::MAX), (0, -1), (-62_135_596_801, 0)] {
        let time = Some(prost_types::Timestamp { seconds, nanos });
        let queues = vec![QueueRef { topic: "t".into(), queue_id: 0 }];
        let request = GetOffsetsRequest { queues, timestamp: time, bound: i32::MAX, ..Default::default() };
        client.broker.clone().get_offsets(request).await.map(drop).unwrap_or_else(client_error);
        let by = Some(query_messages_request::By::Key("k".into()));
        let request =
            QueryMessagesRequest { topic: "t".into(), by, begin: time, end: time, ..Default::default() };
        client.broker.clone().query_messages(request).await.map(drop).unwrap_or_else(client_error);
        let wait = Some(prost_types::Duration { seconds, nanos });
        let request = PullRequest { wait, ..pull_request("t", 0, 0) };
        client.try_pull(request).await.map(drop).unwrap_or_else(client_error);
        let born_timestamp = Some(prost_types::Timestamp { seconds, nanos });
        let system = SystemProperties {
            born_timestamp,
            body_encoding: i32::MAX,
            message_type: i32::MIN,
            ..Default::default()
        };
        let odd = Message { system_properties: Some(system), ..message("x") };
        client.try_send(send_request("t", vec![odd])).await.map(drop).unwrap_or_else(client_error);
    }
    for request in [
        PullRequest { tag_filter: long.clone(), ..pull_request("t", 0, 0) },
        PullRequest { client_id: long.clone(), ..pull_request("t", 0, 0) },
        PullRequest { group: long.clone(), ..pull_request("t", 0, 0) },
        pull_request(&long, 0, 0),
    ] {
        assert_eq!(client.try_pull(request).await.unwrap_err().code(), Code::InvalidArgument);
    }
    let request = ListTopicsRequest { page_token: long.clone(), prefix: long, page_size: u32::MAX };
    client.admin.clone().list_topics(request).await.map(drop).unwrap_or_else(client_error);
    assert_well(&broker).await;
}

#[tokio::test]
async fn bytes_that_are_no_message_get_a_client_error() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let mut random = Random(7);
    for path in ["/holdfast.v1.Broker/Send", "/holdfast.v1.Broker/Pull", "/holdfast.v1.Admin/CreateTopic"] {
        for _ in 0..300 {
            let length = random.below(64);
            let garbage: Vec<u8> = (0..=length).map(|_| random.next() as u8).collect();
            let status = raw(&client, path, garbage).await;
            if let Err(status) = status {
                let code = status.code();
                assert!(!matches!(code, Code::Unknown | Code::Unavailable), "{path}: {status:?}");
            }
        }
    }
    // A message whose fields are nearly right: wrong wire types, lengths beyond the end.
    let mut good = prost::Message::encode_to_vec(&send_request("t", vec![tagged("body", "tag")]));
    for at in 0..good.len() {
        for bit in 0..8 {
            good[at] ^= 1 << bit;
            if let Err(status) = raw(&client, "/holdfast.v1.Broker/Send", good.clone()).await {
                assert!(!matches!(status.code(), Code::Unknown | Code::Unavailable), "{status:?}");
            }
            good[at] ^= 1 << bit;
        }
    }
    assert_well(&broker).await;
}

/// A unary call whose request is these bytes.
async fn raw(client: &Client, path: &str, bytes: Vec<u8>) -> Result<Bytes, tonic::Status> {
    let mut grpc = tonic::client::Grpc::new(client.channel.clone());
    grpc.ready().await.unwrap();
    let path = http::uri::PathAndQuery::try_from(path).unwrap();
    grpc.unary(Request::new(Bytes::from(bytes)), path, RawCodec).await.map(tonic::Response::into_inner)
}

/// Bytes as they are, both ways.
#[derive(Clone, Copy, Default)]
struct RawCodec;

impl tonic::codec::Codec for RawCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl tonic::codec::Encoder for RawCodec {
    type Item = Bytes;
    type Error = tonic::Status;

    fn encode(&mut self, item: Bytes, to: &mut tonic::codec::EncodeBuf<'_>) -> Result<(), tonic::Status> {
        bytes::BufMut::put(to, item);
        Ok(())
    }
}

impl tonic::codec::Decoder for RawCodec {
    type Item = Bytes;
    type Error = tonic::Status;

    fn decode(&mut self, from: &mut tonic::codec::DecodeBuf<'_>) -> Result<Option<Bytes>, tonic::Status> {
        use bytes::Buf;
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

#[tokio::test]
async fn a_method_that_is_not_there_is_unimplemented() {
    let broker = Broker::start().await;
    let client = broker.client().await;
    let status = raw(&client, "/holdfast.v1.Broker/Receive", Vec::new()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
}

#[tokio::test]
async fn a_client_that_sends_no_grpc_at_all_does_no_harm() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let broker = Broker::start().await;
    let mut random = Random(3);
    for n in 0..50 {
        let mut stream = tokio::net::TcpStream::connect(broker.address()).await.unwrap();
        let text: Vec<u8> = match n % 3 {
            0 => b"GET / HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
            1 => b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff".to_vec(),
            _ => (0..256).map(|_| random.next() as u8).collect(),
        };
        let _ = stream.write_all(&text).await;
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(Duration::from_millis(20), stream.read_to_end(&mut answer)).await;
    }
    assert_well(&broker).await;
}

#[tokio::test]
async fn system_properties_sent_in_fragments_are_served_in_one() {
    use prost::Message as _;
    let broker = Broker::start().await;
    let client = broker.client().await;
    client.topic("t", 1).await;
    let first = tagged("body", "tag").encode_to_vec();
    let keyed = SystemProperties { keys: vec!["key".into()], ..SystemProperties::default() };
    let second = Message { system_properties: Some(keyed), ..Message::default() }.encode_to_vec();
    // SendRequest: topic, then one message made of both.
    let mut request = vec![0x0a, 1, b't', 0x12, u8::try_from(first.len() + second.len()).unwrap()];
    request.extend([first, second].concat());
    raw(&client, SEND, request).await.unwrap();
    let served = raw(&client, PULL, pull_request("t", 0, 0).encode_to_vec()).await.unwrap();
    let found = PullResponse::decode(served.clone()).unwrap();
    let stored = system(&found.messages[0]);
    assert_eq!(
        (stored.tag.as_deref(), stored.keys.as_slice()),
        (Some("tag"), ["key".to_string()].as_slice())
    );
    // As many bytes as one fragment takes, whatever its order: a reader that does not merge loses nothing. The
    // broker writes its scalars even when they are zero, here the queue's number.
    let length = u8::try_from(stored.encoded_len() + [0x68, 0].len()).unwrap();
    assert!(served.windows(2).any(|window| window == [0x1a, length]), "{served:?}");
}
