"""What a Python program with grpcio and stubs made from proto/ can do with a broker.

HOLDFAST_ENDPOINT says where the broker is; tests/run starts one.
"""

import os
import threading
import time
import unittest
import uuid

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from holdfast.v1 import admin_pb2, admin_pb2_grpc, broker_pb2, broker_pb2_grpc, message_pb2

ENDPOINT = os.environ["HOLDFAST_ENDPOINT"]
# A body has up to 4 MiB, an answer up to 16 MiB; grpcio's own limit for answers is 4 MiB.
OPTIONS = [("grpc.max_receive_message_length", 32 << 20)]


def message(body, **system):
    return message_pb2.Message(body=body, system_properties=message_pb2.SystemProperties(**system))


def details(error):
    """The google.rpc details of a failed call, by type."""
    status = rpc_status.from_call(error)
    found = {}
    for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
        for detail in status.details:
            if detail.Is(kind.DESCRIPTOR):
                found[kind] = kind()
                detail.Unpack(found[kind])
    return found


class Client(unittest.TestCase):
    def setUp(self):
        self.channel = grpc.insecure_channel(ENDPOINT, options=OPTIONS)
        self.broker = broker_pb2_grpc.BrokerStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        self.addCleanup(self.channel.close)
        self.topic = "python-" + uuid.uuid4().hex
        settings = admin_pb2.TopicSettings(queues=2)
        made = self.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=self.topic, settings=settings))
        self.assertEqual(made.settings.queues, 2)

    def send(self, *bodies, **fields):
        messages = [body if isinstance(body, message_pb2.Message) else message(body) for body in bodies]
        return self.broker.Send(broker_pb2.SendRequest(topic=self.topic, messages=messages, **fields))

    def pull(self, offset=0, **fields):
        return self.broker.Pull(broker_pb2.PullRequest(topic=self.topic, offset=offset, **fields))

    def test_what_is_sent_is_pulled_with_all_its_fields(self):
        sent = self.send(
            message(b"\x00\xff body", tag="paid", keys=["order-1"], flag=-3, born_host="here"), queue_id=1
        )
        self.assertEqual(sent.durability, broker_pb2.DURABLE_DISK)
        pulled = self.pull(queue_id=1)
        self.assertEqual(pulled.outcome, broker_pb2.FOUND)
        self.assertEqual(pulled.next_offset, 1)
        (got,) = pulled.messages
        self.assertEqual(got.body, b"\x00\xff body")
        system = got.system_properties
        self.assertEqual((system.tag, list(system.keys), system.flag), ("paid", ["order-1"], -3))
        self.assertEqual(system.message_id, sent.receipts[0].message_id)
        self.assertEqual((system.queue_id, system.queue_offset), (1, 0))
        self.assertEqual(system.store_timestamp, sent.store_timestamp)

    def test_a_pull_waits_until_a_message_is_sent(self):
        sender = threading.Timer(0.3, lambda: self.send(b"late", queue_id=0))
        begun = time.monotonic()
        sender.start()
        pulled = self.pull(queue_id=0, wait=Duration(seconds=20))
        sender.join()
        self.assertEqual(pulled.outcome, broker_pb2.FOUND)
        self.assertEqual(pulled.messages[0].body, b"late")
        self.assertGreaterEqual(time.monotonic() - begun, 0.3)

    def test_a_pull_without_wait_answers_at_once_that_there_is_nothing_new(self):
        pulled = self.pull(queue_id=0)
        self.assertEqual(pulled.outcome, broker_pb2.NO_NEW_MESSAGE)
        self.assertEqual((pulled.next_offset, pulled.min_offset, pulled.max_offset), (0, 0, 0))

    def test_committed_progress_is_read_back(self):
        self.send(b"a", b"b", b"c", queue_id=0)
        where = broker_pb2.QueueOffset(topic=self.topic, queue_id=0, offset=2)
        committed = self.broker.CommitOffsets(
            broker_pb2.CommitOffsetsRequest(group="python", offsets=[where])
        )
        self.assertEqual(committed.results[0].outcome, broker_pb2.COMMITTED)
        queues = [broker_pb2.QueueRef(topic=self.topic, queue_id=queue) for queue in (0, 1)]
        got = self.broker.GetOffsets(broker_pb2.GetOffsetsRequest(group="python", queues=queues))
        first, second = got.offsets
        self.assertEqual((first.min_offset, first.max_offset, first.committed), (0, 3, 2))
        self.assertFalse(second.HasField("committed"))

    def test_a_stream_answers_in_order_and_survives_a_bad_frame(self):
        def frames():
            for n in range(200):
                body = b"" if n == 100 else str(n).encode()
                send = broker_pb2.SendRequest(topic=self.topic, queue_id=0, messages=[message(body)])
                yield broker_pb2.SendStreamRequest(correlation=n, send=send)

        answers = list(self.broker.SendStream(frames()))
        self.assertEqual([answer.correlation for answer in answers], list(range(200)))
        bad = answers.pop(100)
        self.assertEqual(bad.WhichOneof("outcome"), "error")
        self.assertEqual(bad.error.code, grpc.StatusCode.INVALID_ARGUMENT.value[0])
        self.assertEqual(bad.error.reason, "BODY_EMPTY")
        self.assertEqual([answer.sent.receipts[0].offset for answer in answers], list(range(199)))

    def test_an_error_says_reason_and_field_in_its_details(self):
        with self.assertRaises(grpc.RpcError) as raised:
            self.send(b"good", b"")
        self.assertEqual(raised.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        found = details(raised.exception)
        info = found[error_details_pb2.ErrorInfo]
        self.assertEqual((info.domain, info.reason), ("holdfast", "BODY_EMPTY"))
        (violation,) = found[error_details_pb2.BadRequest].field_violations
        self.assertEqual(violation.field, "messages[1].body")
        self.assertEqual(self.pull(queue_id=0).max_offset, 0)

    def test_a_missing_topic_is_not_found_with_its_name(self):
        with self.assertRaises(grpc.RpcError) as raised:
            self.broker.Pull(broker_pb2.PullRequest(topic="python-nothing"))
        self.assertEqual(raised.exception.code(), grpc.StatusCode.NOT_FOUND)
        info = details(raised.exception)[error_details_pb2.ErrorInfo]
        self.assertEqual(info.reason, "TOPIC_NOT_FOUND")
        self.assertEqual(info.metadata["topic"], "python-nothing")

    def test_the_largest_message_goes_both_ways(self):
        body = bytes(range(256)) * (4 << 12)
        self.assertEqual(len(body), 4 << 20)
        self.send(body, queue_id=0)
        self.assertEqual(self.pull(queue_id=0).messages[0].body, body)

    def test_a_deadline_ends_a_wait_with_an_answer(self):
        request = broker_pb2.PullRequest(topic=self.topic, wait=Duration(seconds=20))
        pulled = self.broker.Pull(request, timeout=2)
        self.assertEqual(pulled.outcome, broker_pb2.NO_NEW_MESSAGE)


if __name__ == "__main__":
    unittest.main()
