// What a Node program with @grpc/grpc-js and proto/ can do with a broker.
//
// HOLDFAST_ENDPOINT says where the broker is; tests/run starts one.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { after, beforeEach, test } from "node:test";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import protobuf from "protobufjs";

const proto = fileURLToPath(new URL("../../../proto", import.meta.url));
const files = ["holdfast/v1/message.proto", "holdfast/v1/broker.proto", "holdfast/v1/admin.proto"];
const definition = loader.loadSync(files, {
  includeDirs: [proto],
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { Broker, Admin } = grpc.loadPackageDefinition(definition).holdfast.v1;

// A body has up to 4 MiB, an answer up to 16 MiB; grpc-js's own limit for answers is 4 MiB.
const options = { "grpc.max_receive_message_length": 32 << 20 };
const endpoint = process.env.HOLDFAST_ENDPOINT;
const broker = new Broker(endpoint, grpc.credentials.createInsecure(), options);
const admin = new Admin(endpoint, grpc.credentials.createInsecure(), options);

/** A unary call as a promise. */
const call = (client, method, request, settings = {}) =>
  new Promise((resolve, reject) => {
    client[method](request, new grpc.Metadata(), settings, (error, answer) => (error ? reject(error) : resolve(answer)));
  });

// The parts of google.rpc that the details are made of.
const rpc = protobuf.parse(`
  syntax = "proto3";
  package google.rpc;
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
  message BadRequest {
    message FieldViolation { string field = 1; string description = 2; }
    repeated FieldViolation field_violations = 1;
  }
`, { keepCase: true }).root;

/** The google.rpc details of a failed call, by type. */
function details(error) {
  const [bytes] = error.metadata.get("grpc-status-details-bin");
  const found = {};
  for (const any of rpc.lookupType("google.rpc.Status").decode(bytes).details) {
    const type = any.type_url.split("/").pop();
    const known = rpc.lookup(type);
    if (known) found[type] = known.decode(any.value);
  }
  return found;
}

let topic;
const send = (bodies, fields = {}) =>
  call(broker, "Send", { topic, messages: bodies.map((body) => ({ body: Buffer.from(body) })), ...fields });
const pull = (fields = {}) => call(broker, "Pull", { topic, queue_id: 0, offset: 0, ...fields });

beforeEach(async () => {
  topic = `node-${randomUUID()}`;
  const made = await call(admin, "CreateTopic", { topic, settings: { queues: 2 } });
  assert.equal(made.settings.queues, 2);
});

after(() => {
  broker.close();
  admin.close();
});

test("what is sent is pulled with all its fields", async () => {
  const body = Buffer.from([0, 255, 1, 2]);
  const system_properties = { tag: "paid", keys: ["order-1"], flag: -3 };
  const sent = await call(broker, "Send", { topic, queue_id: 1, messages: [{ body, system_properties }] });
  assert.equal(sent.durability, "DURABLE_DISK");
  const pulled = await pull({ queue_id: 1 });
  assert.equal(pulled.outcome, "FOUND");
  assert.equal(pulled.next_offset, 1);
  const [got] = pulled.messages;
  assert.deepEqual(got.body, body);
  assert.equal(got.system_properties.tag, "paid");
  assert.deepEqual(got.system_properties.keys, ["order-1"]);
  assert.equal(got.system_properties.flag, -3);
  assert.equal(got.system_properties.message_id, sent.receipts[0].message_id);
  assert.equal(got.system_properties.queue_offset, 0);
});

test("a pull waits until a message is sent", async () => {
  const begun = performance.now();
  const held = pull({ wait: { seconds: 20 } });
  setTimeout(() => send(["late"], { queue_id: 0 }), 300);
  const pulled = await held;
  assert.equal(pulled.outcome, "FOUND");
  assert.equal(pulled.messages[0].body.toString(), "late");
  assert.ok(performance.now() - begun >= 290);
});

test("a pull without wait answers at once that there is nothing new", async () => {
  const pulled = await pull();
  assert.equal(pulled.outcome, "NO_NEW_MESSAGE");
  assert.deepEqual([pulled.next_offset, pulled.min_offset, pulled.max_offset], [0, 0, 0]);
});

test("committed progress is read back", async () => {
  await send(["a", "b", "c"], { queue_id: 0 });
  const offsets = [{ topic, queue_id: 0, offset: 2 }];
  const committed = await call(broker, "CommitOffsets", { group: "node", offsets });
  assert.equal(committed.results[0].outcome, "COMMITTED");
  const queues = [{ topic, queue_id: 0 }, { topic, queue_id: 1 }];
  const got = await call(broker, "GetOffsets", { group: "node", queues });
  assert.equal(got.offsets[0].committed, 2);
  assert.equal(got.offsets[0].max_offset, 3);
  assert.equal(got.offsets[1]._committed, undefined, "no progress there");
});

test("a stream answers in order and survives a bad frame", async () => {
  const stream = broker.SendStream();
  const answers = [];
  const ended = new Promise((resolve, reject) => {
    stream.on("data", (answer) => answers.push(answer));
    stream.on("end", resolve);
    stream.on("error", reject);
  });
  for (let n = 0; n < 200; n += 1) {
    const body = Buffer.from(n === 100 ? "" : String(n));
    stream.write({ correlation: n, send: { topic, queue_id: 0, messages: [{ body }] } });
  }
  stream.end();
  await ended;
  assert.deepEqual(answers.map((answer) => answer.correlation), [...Array(200).keys()]);
  const [bad] = answers.splice(100, 1);
  assert.equal(bad.outcome, "error");
  assert.equal(bad.error.code, grpc.status.INVALID_ARGUMENT);
  assert.equal(bad.error.reason, "BODY_EMPTY");
  assert.deepEqual(answers.map((answer) => answer.sent.receipts[0].offset), [...Array(199).keys()]);
});

test("an error says reason and field in its details", async () => {
  const error = await send(["good", ""]).then(() => assert.fail("was taken"), (refused) => refused);
  assert.equal(error.code, grpc.status.INVALID_ARGUMENT);
  const found = details(error);
  assert.equal(found["google.rpc.ErrorInfo"].domain, "holdfast");
  assert.equal(found["google.rpc.ErrorInfo"].reason, "BODY_EMPTY");
  assert.equal(found["google.rpc.BadRequest"].field_violations[0].field, "messages[1].body");
  assert.equal((await pull()).max_offset, 0);
});

test("a missing topic is not found, with its name", async () => {
  const error = await pull({ topic: "node-nothing" }).then(() => assert.fail("was found"), (refused) => refused);
  assert.equal(error.code, grpc.status.NOT_FOUND);
  const info = details(error)["google.rpc.ErrorInfo"];
  assert.equal(info.reason, "TOPIC_NOT_FOUND");
  assert.equal(info.metadata.topic, "node-nothing");
});

test("the largest message goes both ways", async () => {
  const body = Buffer.alloc(4 << 20, "holdfast");
  await call(broker, "Send", { topic, queue_id: 0, messages: [{ body }] });
  const pulled = await pull();
  assert.ok(pulled.messages[0].body.equals(body));
});

test("a deadline ends a wait with an answer", async () => {
  const pulled = await call(broker, "Pull", { topic, wait: { seconds: 20 } }, { deadline: Date.now() + 2000 });
  assert.equal(pulled.outcome, "NO_NEW_MESSAGE");
});
